//! What is known about the memory that could be pinned: from `/proc`, from the control groups that this
//! process is in, and from the device's heaps. Whatever cannot be read or understood is unknown, not
//! an error.

use std::fs;
use std::path::{Path, PathBuf};

use super::mountinfo::{self, Mount};
use crate::vk::Heap;

/// The facts. All sizes are in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryFacts {
    /// All memory of the machine; `None`: not known, as elsewhere than on Linux.
    pub total_bytes: Option<u64>,
    /// What can be had without swapping: free memory, and caches that would give way.
    pub available_bytes: Option<u64>,
    /// Limits of the process's control group and of the groups around it.
    pub cgroups: Vec<CgroupMemory>,
    /// `RLIMIT_MEMLOCK`; `None`: unlimited, or not known. No Vulkan driver is known to count pinned
    /// pages against it: NVIDIA's `os_lock_user_pages` and i915's userptr pin without looking at it,
    /// amdgpu and xe do not pin. So it explains a refusal, and limits nothing.
    pub memlock_bytes: Option<u64>,
    /// The largest heap of the device that is host memory.
    pub host_heap: Option<HeapRoom>,
}

/// A control group with a memory limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CgroupMemory {
    /// Its folder.
    pub path: PathBuf,
    /// The limit.
    pub limit_bytes: u64,
    /// What is used of it and would not give way, as the page cache does.
    pub used_bytes: u64,
}

/// Part of a heap that is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeapRoom {
    /// What this process may use of it.
    pub budget_bytes: u64,
    /// What it uses.
    pub usage_bytes: u64,
}

impl MemoryFacts {
    /// The facts of this process, now; `heaps` are the device's: `Device::memory_budget`.
    pub fn now(heaps: &[Heap]) -> Self {
        Self { host_heap: host_heap(heaps), ..Self::read(Path::new("/")) }
    }

    /// The facts once this process has taken so many bytes more.
    pub fn after(mut self, bytes: u64) -> Self {
        self.available_bytes = self.available_bytes.map(|left| left.saturating_sub(bytes));
        for group in &mut self.cgroups {
            group.used_bytes = group.used_bytes.saturating_add(bytes);
        }
        if let Some(heap) = &mut self.host_heap {
            heap.usage_bytes = heap.usage_bytes.saturating_add(bytes);
        }
        self
    }

    /// The system's facts; `root` is `/`, or a copy of what is below `/proc` and `/sys/fs/cgroup`.
    pub fn read(root: &Path) -> Self {
        let meminfo = read(&root.join("proc/meminfo"));
        let total_bytes = kib_field(&meminfo, "MemTotal:");
        Self {
            total_bytes,
            available_bytes: kib_field(&meminfo, "MemAvailable:"),
            cgroups: cgroups(root, total_bytes),
            memlock_bytes: memlock(&read(&root.join("proc/self/limits"))),
            host_heap: None,
        }
    }
}

/// The largest heap that is not the device's own; where all are, host memory is the device's.
fn host_heap(heaps: &[Heap]) -> Option<HeapRoom> {
    let all_local = heaps.iter().all(|heap| heap.device_local);
    let of_host = heaps.iter().filter(|heap| all_local || !heap.device_local);
    of_host
        .max_by_key(|heap| heap.bytes)
        .map(|heap| HeapRoom { budget_bytes: heap.budget_bytes, usage_bytes: heap.usage_bytes })
}

/// A file's text, or nothing.
fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// `MemTotal:       24684096 kB`
fn kib_field(text: &str, name: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(name))?;
    value.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

/// `Max locked memory         8388608              8388608              bytes`: the first is in force.
fn memlock(limits: &str) -> Option<u64> {
    let values = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"))?;
    values.split_whitespace().next()?.parse().ok()
}

/// Version of the control groups, with the names of its files.
#[derive(Clone, Copy)]
struct Version {
    /// Limits; the lowest counts.
    limits: &'static [&'static str],
    usage: &'static str,
    /// Fields of `memory.stat`: page cache, children included.
    cache: [&'static str; 2],
}

const V1: Version = Version {
    limits: &["memory.limit_in_bytes"],
    usage: "memory.usage_in_bytes",
    cache: ["total_inactive_file ", "total_active_file "],
};
/// From `memory.high` on a group is slowed down, which is as bad for us as the end.
const V2: Version = Version {
    limits: &["memory.max", "memory.high"],
    usage: "memory.current",
    cache: ["inactive_file ", "active_file "],
};

/// The limits that this process is under, its own group first.
fn cgroups(root: &Path, total_bytes: Option<u64>) -> Vec<CgroupMemory> {
    let mounts = mountinfo::parse(&read(&root.join("proc/self/mountinfo")));
    let membership = read(&root.join("proc/self/cgroup"));
    let mut found = Vec::new();
    for line in membership.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(group)) = (fields.next(), fields.next()) else { continue };
        let version = match controllers {
            "" => V2,
            names if names.split(',').any(|name| name == "memory") => V1,
            _ => continue,
        };
        let hierarchy = mounts.iter().filter(|mount| match controllers {
            "" => mount.kind == "cgroup2",
            _ => mount.kind == "cgroup" && mount.options.split(',').any(|name| name == "memory"),
        });
        for mount in hierarchy {
            found.extend(limits_up(root, mount, Path::new(group), version));
        }
    }
    // A limit beyond all memory is none: version 1 says "none" that way.
    found.retain(|group| total_bytes.is_none_or(|total| group.limit_bytes < total));
    found.dedup();
    found
}

/// The limits of a group and of those around it, as far as they are mounted.
fn limits_up(root: &Path, mount: &Mount, group: &Path, version: Version) -> Vec<CgroupMemory> {
    // In a container the mount may be of the group itself, or of another namespace's ("/../..").
    let below = group.strip_prefix(&mount.root).unwrap_or(Path::new(""));
    let outside = below.components().any(|part| part == std::path::Component::ParentDir);
    let point = mount.point.strip_prefix("/").unwrap_or(&mount.point);
    let own = point.join(if outside { Path::new("") } else { below });
    own.ancestors()
        .take_while(|folder| folder.starts_with(point))
        .filter_map(|folder| limit_of(root, folder, version))
        .collect()
}

fn limit_of(root: &Path, folder: &Path, version: Version) -> Option<CgroupMemory> {
    let number = |name: &str| read(&root.join(folder).join(name)).trim().parse::<u64>().ok();
    let limit_bytes = version.limits.iter().filter_map(|name| number(name)).min()?;
    let stat = read(&root.join(folder).join("memory.stat"));
    let field = |name| stat.lines().find_map(|line| line.strip_prefix(name)?.parse::<u64>().ok());
    let cache: u64 = version.cache.iter().filter_map(field).sum();
    let used_bytes = number(version.usage).unwrap_or(0).saturating_sub(cache);
    Some(CgroupMemory { path: Path::new("/").join(folder), limit_bytes, used_bytes })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MEMINFO: &str =
        "MemTotal:       16777216 kB\nMemFree: 1 kB\nMemAvailable:    8388608 kB\n";

    /// A folder with these files.
    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        dir
    }

    fn facts(files: &[(&str, &str)]) -> MemoryFacts {
        MemoryFacts::read(tree(files).path())
    }

    fn group(path: &str, limit_bytes: u64, used_bytes: u64) -> CgroupMemory {
        CgroupMemory { path: PathBuf::from(path), limit_bytes, used_bytes }
    }

    #[test]
    fn memory_and_the_limit_of_locked_memory_are_read() {
        let limits = "Limit                     Soft Limit           Hard Limit           Units     \n\
                      Max file locks            unlimited            unlimited            locks     \n\
                      Max locked memory         65536                unlimited            bytes     \n";
        let found = facts(&[("proc/meminfo", MEMINFO), ("proc/self/limits", limits)]);
        assert_eq!(found.total_bytes, Some(16 << 30));
        assert_eq!(found.available_bytes, Some(8 << 30));
        assert_eq!(found.memlock_bytes, Some(65536));
        assert_eq!(
            memlock("Max locked memory         unlimited            unlimited  bytes"),
            None
        );
    }

    #[test]
    fn nothing_to_read_is_nothing_known() {
        assert_eq!(facts(&[]), MemoryFacts::default());
        let odd = [("proc/meminfo", "MemTotal: many kB\nMemAvailable: 99999999999999999999 kB")];
        assert_eq!(facts(&odd), MemoryFacts::default());
    }

    /// systemd: limits on the service and on the slice around it; the root has no files.
    #[test]
    fn version_2_limits_are_found_on_the_way_up() {
        let found = facts(&[
            ("proc/meminfo", MEMINFO),
            ("proc/self/cgroup", "0::/user.slice/app.service\n"),
            ("proc/self/mountinfo", "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"),
            ("sys/fs/cgroup/user.slice/app.service/memory.max", "max\n"),
            ("sys/fs/cgroup/user.slice/app.service/memory.high", "4294967296\n"),
            ("sys/fs/cgroup/user.slice/app.service/memory.current", "3000\n"),
            (
                "sys/fs/cgroup/user.slice/app.service/memory.stat",
                "anon 900\nfile 2100\ninactive_file 1500\nactive_file 500\n",
            ),
            ("sys/fs/cgroup/user.slice/memory.max", "8589934592\n"),
            ("sys/fs/cgroup/user.slice/memory.current", "4000\n"),
            ("sys/fs/cgroup/other.slice/memory.max", "1\n"),
        ]);
        let expected = [
            group("/sys/fs/cgroup/user.slice/app.service", 4 << 30, 1000),
            group("/sys/fs/cgroup/user.slice", 8 << 30, 4000),
        ];
        assert_eq!(found.cgroups, expected);
    }

    /// Both versions mounted, memory by version 1; its "no limit" is a huge number.
    #[test]
    fn version_1_limits_are_found_on_their_own_mount() {
        let found = facts(&[
            ("proc/meminfo", MEMINFO),
            ("proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/box/run\n0::/\nnonsense\n"),
            (
                "proc/self/mountinfo",
                "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,cpu,memory\n\
                 36 31 0:33 / /sys/fs/cgroup/devices rw - cgroup cgroup rw,devices\n\
                 41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
            ),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/memory/box/run/memory.limit_in_bytes", "1073741824\n"),
            ("sys/fs/cgroup/memory/box/run/memory.usage_in_bytes", "5000\n"),
            (
                "sys/fs/cgroup/memory/box/run/memory.stat",
                "inactive_file 1\ntotal_inactive_file 1000\ntotal_active_file 9000\n",
            ),
        ]);
        assert_eq!(found.cgroups, [group("/sys/fs/cgroup/memory/box/run", 1 << 30, 0)]);
    }

    /// A container sees its own group as the root of the mount, by one of two descriptions.
    #[test]
    fn in_a_container_the_mount_is_the_group() {
        for (membership, mounted) in [
            ("0::/\n", "/"),
            ("0::/docker/abc\n", "/docker/abc"),
            ("0::/../other\n", "/"),
            ("0::/host/path\n", "/docker/abc"),
        ] {
            let mount = format!("31 23 0:28 {mounted} /sys/fs/cgroup ro - cgroup2 cgroup rw\n");
            let found = facts(&[
                ("proc/self/cgroup", membership),
                ("proc/self/mountinfo", &mount),
                ("sys/fs/cgroup/memory.max", "2147483648\n"),
                ("sys/fs/cgroup/memory.current", "77\n"),
            ]);
            assert_eq!(found.cgroups, [group("/sys/fs/cgroup", 2 << 30, 77)], "{membership}");
        }
    }

    #[test]
    fn the_host_heap_is_the_largest_that_is_not_the_devices() {
        let heap = |bytes, device_local| Heap {
            bytes,
            budget_bytes: bytes / 2,
            usage_bytes: 1,
            device_local,
        };
        let room = |bytes: u64| Some(HeapRoom { budget_bytes: bytes / 2, usage_bytes: 1 });
        assert_eq!(host_heap(&[heap(80, true), heap(20, false), heap(30, false)]), room(30));
        assert_eq!(host_heap(&[heap(80, true)]), room(80));
        assert_eq!(host_heap(&[]), None);
    }

    #[test]
    fn what_will_be_taken_is_gone_everywhere() {
        let facts = MemoryFacts {
            total_bytes: Some(100),
            available_bytes: Some(50),
            cgroups: vec![group("/a", 90, 10), group("/b", 80, u64::MAX)],
            memlock_bytes: Some(1),
            host_heap: Some(HeapRoom { budget_bytes: 70, usage_bytes: 5 }),
        };
        let expected = MemoryFacts {
            available_bytes: Some(20),
            cgroups: vec![group("/a", 90, 40), group("/b", 80, u64::MAX)],
            host_heap: Some(HeapRoom { budget_bytes: 70, usage_bytes: 35 }),
            ..facts.clone()
        };
        assert_eq!(facts.after(30), expected);
        assert_eq!(expected.after(21).available_bytes, Some(0));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn this_machine_has_memory() {
        let facts = MemoryFacts::now(&[]);
        assert!(facts.available_bytes > Some(0) && facts.available_bytes <= facts.total_bytes);
    }

    proptest! {
        /// Any text in any of the files: no panic, and limits stay below all memory.
        #[test]
        fn any_text_is_survived(
            texts in prop::collection::vec("[0-9a-z:/ .\n-]{0,60}", 4),
            limit in any::<u64>(),
        ) {
            let limit_text = limit.to_string();
            let mount = format!("1 1 0:1 / /cg rw - cgroup2 x rw\n{}", texts[2]);
            let found = facts(&[
                ("proc/meminfo", &format!("{MEMINFO}{}", texts[0])),
                ("proc/self/cgroup", &format!("0::/\n{}", texts[1])),
                ("proc/self/mountinfo", &mount),
                ("proc/self/limits", &texts[3]),
                ("cg/memory.max", &limit_text),
            ]);
            let expected = u64::from(limit < 16 << 30);
            let count = found.cgroups.iter().filter(|g| g.limit_bytes == limit).count() as u64;
            prop_assert!(count >= expected);
            prop_assert!(found.cgroups.iter().all(|group| group.limit_bytes < 16 << 30));
        }
    }
}
