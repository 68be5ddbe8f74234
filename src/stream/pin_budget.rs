//! How much host memory may be pinned. Pure: facts in, a number and its reason out.
//!
//! Pinned memory cannot be swapped or dropped: too much of it, and the system kills processes, or a
//! driver loses the device at a later submission. So it never exceeds what is available minus a reserve.

use std::fmt;
use std::path::PathBuf;

use super::memory_facts::MemoryFacts;
use super::options::HostSource;
use crate::plan::Bytes;
use crate::vk::{DeviceInfo, Vendor};

/// Kept free of everything pinned: this, or a tenth, whichever is more ...
const RESERVE_BYTES: u64 = 1 << 30;
const RESERVE_PARTS: u64 = 10;
/// ... but no more than a quarter, so that small machines and control groups can pin something.
const MOST_RESERVE_PARTS: u64 = 4;

/// amdgpu goes over all pages of all imports at every submission.
const WALKED_IMPORT_BYTES: u64 = 1 << 30;

/// How much may be pinned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PinBudget {
    /// So many bytes in all.
    pub bytes: u64,
    /// What keeps it from being more.
    pub limited_by: Limit,
}

/// What sets the limit. `Display` ends the sentence "over the limit set by …".
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Limit {
    /// The memory of the machine.
    Available {
        /// What could be had.
        available_bytes: u64,
        /// What of it stays free.
        reserve_bytes: u64,
    },
    /// A control group.
    Cgroup {
        /// Its folder.
        path: PathBuf,
        /// Its limit.
        limit_bytes: u64,
        /// What is used already.
        used_bytes: u64,
    },
    /// The driver's budget for host memory that the device uses.
    HostHeap {
        /// The budget.
        budget_bytes: u64,
        /// What is used already.
        usage_bytes: u64,
    },
    /// The driver's cost for imported pages.
    ImportCost,
    /// `--pin-max-mib`
    PinMax {
        /// Its value.
        bytes: u64,
    },
    /// The driver took no more, whatever the budget.
    Refused {
        /// What may explain it: `RLIMIT_MEMLOCK`, if there is such a limit.
        memlock_bytes: Option<u64>,
    },
    /// Nothing is known about the memory.
    Unknown,
    /// Time: the pinning goes on.
    Unfinished,
    /// The ring was chosen: nothing is to be pinned.
    Ring,
}

/// How much `source` may pin for a device. `pin_max_bytes` is `--pin-max-mib`.
pub fn pin_budget(
    facts: &MemoryFacts,
    info: &DeviceInfo,
    source: HostSource,
    pin_max_bytes: Option<u64>,
) -> PinBudget {
    let mut limits = system_limits(facts);
    if let Some(heap) = facts.host_heap.filter(|_| heap_counts(facts, info, source)) {
        let (budget_bytes, usage_bytes) = (heap.budget_bytes, heap.usage_bytes);
        let bytes = budget_bytes.saturating_sub(usage_bytes);
        let bytes = bytes.saturating_sub(reserve(budget_bytes));
        limits.push((bytes, Limit::HostHeap { budget_bytes, usage_bytes }));
    }
    if is_walked(facts, info, source) {
        limits.push((WALKED_IMPORT_BYTES, Limit::ImportCost));
    }
    // Before all others: it says what to change where several are equal, and nothing else is known.
    let of_user = pin_max_bytes.map(|bytes| (bytes, Limit::PinMax { bytes }));
    let lowest = of_user.into_iter().chain(limits).min_by_key(|(bytes, _)| *bytes);
    let (bytes, limited_by) = lowest.unwrap_or((0, Limit::Unknown));
    PinBudget { bytes, limited_by }
}

/// What the machine and the control groups leave.
fn system_limits(facts: &MemoryFacts) -> Vec<(u64, Limit)> {
    let available = facts.available_bytes.map(|available_bytes| {
        let reserve_bytes = reserve(facts.total_bytes.unwrap_or(available_bytes));
        let bytes = available_bytes.saturating_sub(reserve_bytes);
        (bytes, Limit::Available { available_bytes, reserve_bytes })
    });
    let groups = facts.cgroups.iter().map(|group| {
        let bytes = group.limit_bytes.saturating_sub(group.used_bytes);
        let bytes = bytes.saturating_sub(reserve(group.limit_bytes));
        let limit = Limit::Cgroup {
            path: group.path.clone(),
            limit_bytes: group.limit_bytes,
            used_bytes: group.used_bytes,
        };
        (bytes, limit)
    });
    available.into_iter().chain(groups).collect()
}

/// Whether pinned memory counts against the driver's heap of host memory: what the driver allocates
/// does; imports do on amdgpu (GTT, half of the memory by default), and on Windows ("shared GPU
/// memory"), of which nothing else is known.
fn heap_counts(facts: &MemoryFacts, info: &DeviceInfo, source: HostSource) -> bool {
    let is_allocated = matches!(source, HostSource::Host | HostSource::Ring);
    is_allocated || info.vendor == Vendor::Amd || facts.available_bytes.is_none()
}

/// Whether every submission goes over all that is pinned: amdgpu, which is Linux's.
fn is_walked(facts: &MemoryFacts, info: &DeviceInfo, source: HostSource) -> bool {
    let is_import = matches!(source, HostSource::Mmap | HostSource::Arena);
    is_import && info.vendor == Vendor::Amd && facts.available_bytes.is_some()
}

fn reserve(total_bytes: u64) -> u64 {
    RESERVE_BYTES.max(total_bytes / RESERVE_PARTS).min(total_bytes / MOST_RESERVE_PARTS)
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Limit::Available { available_bytes, reserve_bytes } => {
                let (available, reserve) = (Bytes(*available_bytes), Bytes(*reserve_bytes));
                write!(f, "the available memory ({available}, of which {reserve} stay free)")
            }
            Limit::Cgroup { path, limit_bytes, used_bytes } => {
                let (limit, used) = (Bytes(*limit_bytes), Bytes(*used_bytes));
                write!(f, "the control group {} ({limit}, {used} in use)", path.display())
            }
            Limit::HostHeap { budget_bytes, usage_bytes } => {
                let (budget, usage) = (Bytes(*budget_bytes), Bytes(*usage_bytes));
                write!(f, "the driver's budget of host memory ({budget}, {usage} in use)")
            }
            Limit::ImportCost => {
                f.write_str("the driver, which goes over all imported pages at every submission")
            }
            Limit::PinMax { bytes } => write!(f, "--pin-max-mib {}", bytes >> 20),
            Limit::Refused { memlock_bytes: None } => f.write_str("the driver, which took no more"),
            Limit::Refused { memlock_bytes: Some(bytes) } => {
                let limit = Bytes(*bytes);
                write!(f, "the driver, which took no more (locked memory, `ulimit -l`: {limit})")
            }
            Limit::Unknown => f.write_str("nothing being known about this system's memory"),
            Limit::Unfinished => f.write_str("the time that pinning takes"),
            Limit::Ring => f.write_str("the host source, which pins nothing but a ring"),
        }
    }
}

/// The line that tells the user what was pinned.
#[derive(Clone, Debug)]
pub struct PinReport {
    /// Pinned.
    pub pinned_bytes: u64,
    /// What is kept in host memory.
    pub wanted_bytes: u64,
    /// How.
    pub source: HostSource,
    /// Why not all, if so.
    pub limit: Limit,
}

impl fmt::Display for PinReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (unit, name) = match self.wanted_bytes >> 30 {
            0 => (1u64 << 20, "MiB"),
            _ => (1 << 30, "GiB"),
        };
        let in_unit = |bytes: u64| bytes as f64 / unit as f64;
        let (pinned, wanted) = (in_unit(self.pinned_bytes), in_unit(self.wanted_bytes));
        if self.limit == Limit::Ring {
            return f.write_str("not pinned: all of it streams through the ring");
        }
        write!(f, "pinned {pinned:.1} of {wanted:.1} {name} ({})", self.source)?;
        let rest = self.wanted_bytes.saturating_sub(self.pinned_bytes);
        match self.limit {
            _ if rest == 0 => Ok(()),
            Limit::Unfinished => f.write_str(" so far"),
            _ => write!(
                f,
                "; the rest streams through the ring: {} over the limit set by {}",
                Bytes(rest),
                self.limit
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::memory_facts::{CgroupMemory, HeapRoom};
    use super::*;
    use proptest::prelude::*;

    const GIB: u64 = 1 << 30;

    fn device(vendor: Vendor) -> DeviceInfo {
        let mut info = DeviceInfo::default();
        info.vendor = vendor;
        info
    }

    /// 64 GiB, 40 GiB of them available, 32 GiB of GTT with 2 GiB in use.
    fn desktop() -> MemoryFacts {
        MemoryFacts {
            total_bytes: Some(64 * GIB),
            available_bytes: Some(40 * GIB),
            host_heap: Some(HeapRoom { budget_bytes: 32 * GIB, usage_bytes: 2 * GIB }),
            memlock_bytes: Some(64 << 10),
            ..MemoryFacts::default()
        }
    }

    #[test]
    fn available_memory_minus_a_reserve_can_be_pinned() {
        let budget = pin_budget(&desktop(), &device(Vendor::Nvidia), HostSource::Mmap, None);
        let reserve_bytes = 64 * GIB / 10;
        assert_eq!(budget.bytes, 40 * GIB - reserve_bytes, "and not 64 KiB: nobody counts those");
        let available_bytes = 40 * GIB;
        assert_eq!(budget.limited_by, Limit::Available { available_bytes, reserve_bytes });
    }

    #[test]
    fn the_drivers_heap_counts_for_its_own_memory_and_on_amd_for_imports() {
        let bytes = 30 * GIB - 32 * GIB / 10;
        for (vendor, source) in [
            (Vendor::Nvidia, HostSource::Host),
            (Vendor::Amd, HostSource::Host),
            (Vendor::Intel, HostSource::Ring),
        ] {
            let budget = pin_budget(&desktop(), &device(vendor), source, None);
            assert_eq!(budget.bytes, bytes, "{vendor:?}");
            assert!(matches!(budget.limited_by, Limit::HostHeap { .. }));
        }
        let budget = pin_budget(&desktop(), &device(Vendor::Amd), HostSource::Arena, None);
        assert_eq!(budget, PinBudget { bytes: GIB, limited_by: Limit::ImportCost });
        let heap = HeapRoom { budget_bytes: GIB, usage_bytes: GIB / 2 };
        let small = MemoryFacts { host_heap: Some(heap), ..desktop() };
        let budget = pin_budget(&small, &device(Vendor::Amd), HostSource::Arena, None);
        assert_eq!(budget.bytes, GIB / 4);
    }

    #[test]
    fn the_tightest_group_counts() {
        let group = |path: &str, limit_bytes, used_bytes| CgroupMemory {
            path: PathBuf::from(path),
            limit_bytes,
            used_bytes,
        };
        let cgroups = vec![group("/a", 8 * GIB, 6 * GIB), group("/b", 4 * GIB, 0)];
        let facts = MemoryFacts { cgroups, ..desktop() };
        let budget = pin_budget(&facts, &device(Vendor::Nvidia), HostSource::Arena, None);
        assert_eq!(budget.bytes, GIB);
        assert_eq!(budget.limited_by.to_string(), "the control group /a (8.0 GiB, 6.0 GiB in use)");
    }

    #[test]
    fn without_facts_nothing_is_pinned_but_what_the_user_wants() {
        let (facts, info) = (MemoryFacts::default(), DeviceInfo::default());
        let budget = pin_budget(&facts, &info, HostSource::Mmap, None);
        assert_eq!(budget, PinBudget { bytes: 0, limited_by: Limit::Unknown });
        let budget = pin_budget(&facts, &info, HostSource::Mmap, Some(GIB));
        assert_eq!(budget, PinBudget { bytes: GIB, limited_by: Limit::PinMax { bytes: GIB } });
    }

    #[test]
    fn the_line_says_what_was_pinned_and_why_not_more() {
        let limit = Limit::PinMax { bytes: 12 * GIB };
        let report = |pinned_bytes, wanted_bytes| {
            let source = HostSource::Mmap;
            PinReport { pinned_bytes, wanted_bytes, source, limit: limit.clone() }.to_string()
        };
        assert_eq!(
            report(12 * GIB, 17 * GIB),
            "pinned 12.0 of 17.0 GiB (mmap); the rest streams through the ring: 5.0 GiB over the \
             limit set by --pin-max-mib 12288"
        );
        assert_eq!(report(300 << 20, 300 << 20), "pinned 300.0 of 300.0 MiB (mmap)");
        let report = |limit, source| {
            let (pinned_bytes, wanted_bytes) = (6 * GIB, 8 * GIB);
            PinReport { pinned_bytes, wanted_bytes, source, limit }.to_string()
        };
        let so_far = report(Limit::Unfinished, HostSource::Arena);
        assert_eq!(so_far, "pinned 6.0 of 8.0 GiB (arena) so far");
        let none = report(Limit::Ring, HostSource::Ring);
        assert_eq!(none, "not pinned: all of it streams through the ring");
    }

    fn any_facts() -> impl Strategy<Value = MemoryFacts> {
        let size = || 0..1u64 << 42;
        let heap = (size(), size())
            .prop_map(|(budget_bytes, usage_bytes)| HeapRoom { budget_bytes, usage_bytes });
        let group = (size(), size()).prop_map(|(limit_bytes, used_bytes)| CgroupMemory {
            path: PathBuf::new(),
            limit_bytes,
            used_bytes,
        });
        (
            prop::option::of(size()),
            prop::option::of(size()),
            prop::collection::vec(group, 0..4),
            prop::option::of(heap),
        )
            .prop_map(|(total_bytes, available_bytes, cgroups, host_heap)| MemoryFacts {
                total_bytes,
                available_bytes,
                cgroups,
                memlock_bytes: None,
                host_heap,
            })
    }

    proptest! {
        /// Never more than anything known allows; more memory never means less to pin.
        #[test]
        fn no_limit_is_passed(
            facts in any_facts(),
            vendor in prop::sample::select(vec![Vendor::Amd, Vendor::Intel, Vendor::Nvidia]),
            source in prop::sample::select(HostSource::ALL.to_vec()),
            pin_max in prop::option::of(0..1u64 << 42),
            more in 0..1u64 << 40,
        ) {
            let budget = pin_budget(&facts, &device(vendor), source, pin_max);
            let most = |limit: Option<u64>| limit.is_none_or(|limit| budget.bytes <= limit);
            prop_assert!(most(pin_max) && most(facts.available_bytes));
            for group in &facts.cgroups {
                let left = group.limit_bytes.saturating_sub(group.used_bytes);
                prop_assert!(budget.bytes <= left);
                prop_assert!(budget.bytes <= group.limit_bytes - reserve(group.limit_bytes));
            }
            if let (Some(heap), HostSource::Host) = (facts.host_heap, source) {
                prop_assert!(budget.bytes <= heap.budget_bytes.saturating_sub(heap.usage_bytes));
            }
            let richer = MemoryFacts {
                available_bytes: facts.available_bytes.map(|bytes| bytes + more),
                total_bytes: facts.total_bytes,
                ..facts.clone()
            };
            if facts.total_bytes.is_some() {
                let after = pin_budget(&richer, &device(vendor), source, pin_max);
                prop_assert!(after.bytes >= budget.bytes);
            }
            prop_assert!(!budget.limited_by.to_string().is_empty());
        }
    }
}
