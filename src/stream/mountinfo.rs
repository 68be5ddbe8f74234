//! What is mounted where: `/proc/self/mountinfo`, see `proc_pid_mountinfo(5)`. Pure.

use std::path::{Path, PathBuf};

/// A mounted file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mount {
    /// What of the file system is mounted: `/`, or a folder of it.
    pub(super) root: PathBuf,
    /// Where.
    pub(super) point: PathBuf,
    /// `ext4`, `fuse.sshfs`.
    pub(super) kind: String,
    /// Options of the file system itself: `rw,memory`.
    pub(super) options: String,
}

/// All mounts in the order of the text; lines that are not understood are left out.
pub(super) fn parse(text: &str) -> Vec<Mount> {
    text.lines().filter_map(parse_line).collect()
}

/// `36 35 98:0 /root /point rw,noatime master:1 - ext3 /dev/root rw`
fn parse_line(line: &str) -> Option<Mount> {
    let (mount, file_system) = line.split_once(" - ")?;
    let mut mount = mount.split(' ').skip(3);
    let (root, point) = (mount.next()?, mount.next()?);
    let mut file_system = file_system.split(' ');
    let (kind, options) = (file_system.next()?, file_system.nth(1)?);
    Some(Mount {
        root: PathBuf::from(unescape(root)),
        point: PathBuf::from(unescape(point)),
        kind: kind.to_owned(),
        options: options.to_owned(),
    })
}

/// Blanks, tabs, line ends and backslashes are written as `\040`, in octal digits.
fn unescape(text: &str) -> String {
    let mut parts = text.split('\\');
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let code = part.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match (code, part.get(3..)) {
            (Some(code), Some(rest)) => {
                plain.push(char::from(code));
                plain.push_str(rest);
            }
            _ => {
                plain.push('\\');
                plain.push_str(part);
            }
        }
    }
    plain
}

/// The mount that an absolute path without links lies on; of several at one point the last hides the
/// others.
pub(super) fn mount_of<'a>(mounts: &'a [Mount], path: &Path) -> Option<&'a Mount> {
    let depth = |mount: &&Mount| mount.point.components().count();
    mounts.iter().filter(|mount| path.starts_with(&mount.point)).max_by_key(depth)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
25 24 0:23 / /dev/shm rw shared:7 master:1 - tmpfs tmpfs rw,size=24684096k
41 27 0:99 /sub /mnt/my\\040models ro - fuse.sshfs me@there ro,user_id=0
no mount at all
30 25 0:27 / /dev/shm rw,relatime - ramfs none rw
";

    #[test]
    fn mounts_are_found_by_path() {
        let mounts = parse(TEXT);
        assert_eq!(mounts.len(), 4);
        let kind = |path: &str| mount_of(&mounts, Path::new(path)).map(|m| m.kind.as_str());
        assert_eq!(kind("/models/a.gguf"), Some("ext4"));
        assert_eq!(kind("/dev/shmoo"), Some("ext4"));
        assert_eq!(kind("/dev/shm/a.gguf"), Some("ramfs"));
        assert_eq!(kind("/mnt/my models/a.gguf"), Some("fuse.sshfs"));
        assert_eq!(kind("relative"), None);
        assert_eq!(mounts[2].root, Path::new("/sub"));
        assert_eq!(mounts[1].options, "rw,size=24684096k");
    }

    #[test]
    fn escapes_that_are_none_stay_as_they_are() {
        assert_eq!(unescape("a\\134b\\04"), "a\\b\\04");
        assert_eq!(unescape("\\999é\\ü12"), "\\999é\\ü12");
    }
}
