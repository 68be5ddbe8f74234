//! A model's bytes by other ways than the mapping for reading: positioned reads, and the mapping that
//! devices import. Both must be the file's bytes, or say that the file changed.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fs::File;
use std::path::{Path, PathBuf};

use common::gguf_builder::GgufBuilder;
use tempfile::TempDir;
use vkmoe::Error;
use vkmoe::gguf::{GgmlType, Gguf};
use vkmoe::vk::HostPages;

const ALIGN: usize = 64 << 10;

/// Bytes that depend on their place.
fn pattern(bytes: u64) -> Vec<u8> {
    (0..bytes).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

/// Writes a model whose tensors begin at odd multiples of 32, and opens it.
fn model_in(dir: &Path) -> Gguf {
    Gguf::open(&write_model(dir)).unwrap()
}

fn write_model(dir: &Path) -> PathBuf {
    let mut builder = GgufBuilder::new();
    for (name, bytes) in [("small", 36), ("large", (37 << 20) + 8), ("last", 20)] {
        builder = builder.tensor(name, GgmlType::F32, &[bytes / 4], pattern(bytes));
    }
    builder.write(&dir.join("model.gguf"))
}

/// Folders on file systems of different kinds: that of temporary files, and memory.
fn folders() -> Vec<TempDir> {
    let mut folders = vec![tempfile::tempdir().unwrap()];
    folders.extend(tempfile::tempdir_in("/dev/shm").ok());
    folders
}

fn shrink(gguf: &Gguf, len: u64) {
    File::options().write(true).open(gguf.path()).unwrap().set_len(len).unwrap();
}

/// The one line about a file that shrank.
#[track_caller]
fn assert_shrank(result: vkmoe::Result<()>, gguf: &Gguf) {
    let error = result.unwrap_err();
    assert!(matches!(error, Error::Gguf { .. }), "{error:?}");
    let text = error.to_string();
    assert!(text.starts_with(&gguf.path().display().to_string()), "{text}");
    assert!(text.contains("it changed from") && text.lines().count() == 1, "{text}");
}

#[test]
fn positioned_reads_give_the_files_bytes() {
    for dir in folders() {
        let gguf = model_in(dir.path());
        for tensor in gguf.tensors() {
            let expected = gguf.bytes(tensor);
            for (start, end) in [(0, expected.len()), (4, expected.len() - 3), (7, 7), (11, 20)] {
                let mut found = vec![0xaa; end - start];
                gguf.read_at(tensor, start as u64, &mut found).unwrap();
                assert!(found == expected[start..end], "{} {start}..{end}", tensor.name);
                found.fill(0xaa);
                gguf.read_parallel(tensor, start as u64, &mut found).unwrap();
                assert!(found == expected[start..end], "{} {start}..{end}", tensor.name);
            }
        }
    }
}

#[test]
fn many_threads_read_at_a_time() {
    let dir = tempfile::tempdir().unwrap();
    let gguf = model_in(dir.path());
    let large = gguf.require("large").unwrap();
    std::thread::scope(|scope| {
        for thread in 0..8u64 {
            let gguf = &gguf;
            scope.spawn(move || {
                for i in 0..50u64 {
                    let (at, mut found) = (thread * 1_000_003 + i * 7919, vec![0; 4099]);
                    gguf.read_at(large, at, &mut found).unwrap();
                    assert!(found == gguf.bytes(large)[at as usize..at as usize + 4099]);
                }
            });
        }
    });
}

#[test]
#[should_panic(expected = "5 bytes at 16 are outside tensor `last` of 20")]
fn a_read_past_a_tensor_is_our_bug() {
    let dir = tempfile::tempdir().unwrap();
    let gguf = model_in(dir.path());
    gguf.read_at(gguf.require("last").unwrap(), 16, &mut [0; 5]).unwrap();
}

#[test]
fn a_read_of_a_file_that_shrank_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let gguf = model_in(dir.path());
    let large = gguf.require("large").unwrap();
    shrink(&gguf, 5 << 20);
    let mut found = vec![0; large.bytes as usize];
    assert_shrank(gguf.read_at(large, 0, &mut found), &gguf);
    assert_shrank(gguf.read_parallel(large, 0, &mut found), &gguf);
}

#[test]
fn the_private_mapping_is_the_file_and_then_zeros() {
    for dir in folders() {
        let gguf = model_in(dir.path());
        let file = std::fs::read(gguf.path()).unwrap();
        let mapping = gguf.map_private(0).unwrap();
        let bytes = mapping.bytes();
        assert_eq!(mapping.file_bytes(), file.len() as u64);
        assert_eq!((bytes.as_ptr() as usize % ALIGN, bytes.len() % ALIGN), (0, 0));
        assert!(bytes.len() >= file.len() && bytes.len() - file.len() < ALIGN);
        let check = |what: &str| {
            assert!(bytes[..file.len()] == file, "{what}");
            assert!(bytes[file.len()..].iter().all(|&byte| byte == 0), "{what}");
            mapping.check().unwrap();
        };
        check("as mapped");
        for range in [5..6, 100_000..3 << 20, 0..u64::MAX, 9..9, 1 << 40..1 << 41] {
            mapping.populate(range.clone()).unwrap();
            check(&format!("after {range:?}"));
        }
        assert!(std::fs::read(gguf.path()).unwrap() == file, "the file itself never changes");
    }
}

/// What the process has of its own within a range: bytes of anonymous pages, in its list of mappings.
#[cfg(target_os = "linux")]
fn anonymous_bytes(pages: &[u8]) -> u64 {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let wanted = pages.as_ptr() as usize;
    let mut is_inside = false;
    for line in smaps.lines() {
        let range = line.split_whitespace().next().and_then(|range| range.split_once('-'));
        let hex = |text| usize::from_str_radix(text, 16).ok();
        if let Some((Some(start), Some(end))) = range.map(|(start, end)| (hex(start), hex(end))) {
            is_inside = start <= wanted && wanted < end;
        }
        if let (true, Some(value)) = (is_inside, line.strip_prefix("Anonymous:")) {
            return value.split_whitespace().next().unwrap().parse::<u64>().unwrap() << 10;
        }
    }
    panic!("no such mapping");
}

#[test]
#[cfg(target_os = "linux")]
fn populating_copies_the_range_and_no_more() {
    let dir = tempfile::tempdir().unwrap();
    let gguf = model_in(dir.path());
    let mapping = gguf.map_private(0).unwrap();
    assert_eq!(anonymous_bytes(mapping.bytes()), 0);
    mapping.populate(1 << 20..21 << 20).unwrap();
    assert_eq!(anonymous_bytes(mapping.bytes()), 20 << 20);
    mapping.populate(0..u64::MAX).unwrap();
    let whole = mapping.file_bytes().next_multiple_of(4096);
    assert_eq!(anonymous_bytes(mapping.bytes()), whole);
}

#[test]
fn a_private_mapping_of_a_file_that_shrank_says_so_and_stays_readable() {
    let dir = tempfile::tempdir().unwrap();
    let gguf = model_in(dir.path());
    let mapping = gguf.map_private(0).unwrap();
    mapping.populate(0..1 << 20).unwrap();
    shrink(&gguf, 3 << 20);
    assert_shrank(mapping.populate(0..u64::MAX), &gguf);
    assert_shrank(mapping.check(), &gguf);
    let file = std::fs::read(gguf.path()).unwrap();
    let bytes = mapping.bytes();
    assert!(bytes[..3 << 20] == file && bytes[3 << 20..].iter().all(|&byte| byte == 0));
}

/// A file larger than all memory can be mapped: only what is pinned gets copied.
#[test]
#[cfg(target_os = "linux")]
fn a_file_larger_than_memory_can_be_mapped() {
    let dir = tempfile::tempdir().unwrap();
    let path = write_model(dir.path());
    let file = File::options().write(true).open(&path).unwrap();
    if file.set_len(8 << 40).is_err() {
        file.set_len(1 << 40).unwrap();
    }
    let gguf = Gguf::open(&path).unwrap();
    let mapping = gguf.map_private(0).unwrap();
    assert!(mapping.file_bytes() >= 1 << 40);
    mapping.populate(0..1 << 20).unwrap();
    let large = gguf.require("large").unwrap();
    let start = large.offset as usize;
    assert!(mapping.bytes()[start..start + large.bytes as usize] == *gguf.bytes(large));
}

#[test]
#[cfg(unix)]
fn a_file_that_may_only_be_read_is_enough() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let path = write_model(dir.path());
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o444)).unwrap();
    let gguf = Gguf::open(&path).unwrap();
    gguf.map_private(0).unwrap().populate(0..u64::MAX).unwrap();
}
