//! How much memory a hostile GGUF file can take: the peak of this process, which runs this one test.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test may fail")]
#![allow(missing_docs, reason = "a test's name says what it shows")]

mod common;

use std::path::Path;
use std::time::{Duration, Instant};

use common::gguf_builder::{GgufBuilder, raw_array};
use vkmoe::gguf::{Array, GgmlType, Gguf, Value};

/// Peak of resident memory that no file backs, in bytes. Mapped pages are the kernel's to take away.
fn peak_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    let kib: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    kib << 10
}

/// Opens a file that is followed by zeros up to `len`, which take no space on disk.
fn open_sparse(path: &Path, file: &GgufBuilder, len: u64) -> vkmoe::Result<Gguf> {
    file.write(path);
    std::fs::File::options().write(true).open(path).unwrap().set_len(len).unwrap();
    Gguf::open(path)
}

#[track_caller]
fn assert_over_budget(opened: vkmoe::Result<Gguf>) {
    let message = opened.unwrap_err().to_string();
    assert!(message.contains("MiB of memory"), "{message}");
}

#[test]
fn hostile_files_take_less_than_100_mb() {
    const GIB: u64 = 1 << 30;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let start = Instant::now();

    // Arrays that are really there: empty strings, bytes, doubles.
    for (element_type, count) in [(8, GIB / 8), (0, 3 * GIB), (12, GIB / 4)] {
        let array = raw_array(element_type, count, &[]);
        let file = GgufBuilder::new().raw_key(b"k", 9, array);
        assert_over_budget(open_sparse(&path, &file, 4 * GIB));
    }
    // As many tensors as are read, all headers damaged from the second on.
    let mut file = GgufBuilder::new().zeros("t", GgmlType::F32, &[1]);
    file.n_tensors = Some(1 << 16);
    open_sparse(&path, &file, 4 * GIB).unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(4));

    // A million small keys.
    let mut file = GgufBuilder::new();
    file.keys.reserve(0);
    std::fs::write(&path, million_keys()).unwrap();
    assert_over_budget(Gguf::open(&path));

    // The most that is accepted, or nearly.
    let before = peak_bytes();
    let strings = (0..1 << 20).map(|_| String::new()).collect();
    let bytes = GgufBuilder::new().key("k", Value::Array(Array::String(strings))).build();
    std::fs::write(&path, bytes).unwrap();
    Gguf::open(&path).unwrap();
    let peak = peak_bytes();
    println!("peak {before} before the largest accepted file, {peak} after");
    assert!(peak < 100_000_000 + 60_000_000, "{peak}");
}

/// A header that states a million keys of one byte each, all different.
fn million_keys() -> Vec<u8> {
    let mut file = Vec::with_capacity(24 << 20);
    file.extend(b"GGUF\x03\0\0\0");
    file.extend(0u64.to_le_bytes());
    file.extend(1_000_000u64.to_le_bytes());
    for i in 0..1_000_000u32 {
        file.extend(4u64.to_le_bytes());
        file.extend(format!("{i:08x}").as_bytes().iter().skip(4));
        file.extend(0u32.to_le_bytes());
        file.push(1);
    }
    file
}
