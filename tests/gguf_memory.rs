//! How much memory a hostile GGUF file can take: the peak of this process, which runs this one test
//! and streams its files to disk.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test may fail")]
#![allow(missing_docs, reason = "a test's name says what it shows")]

mod common;

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use common::gguf_builder::{GgufBuilder, raw_array};
use vkmoe::gguf::Gguf;

const GIB: u64 = 1 << 30;
const LIMIT_BYTES: u64 = 100_000_000;

/// Peak of resident memory, in bytes; pages of mapped files that were read count.
fn peak_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    let kib: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    kib << 10
}

/// Opens a file; asserts that it took neither long nor much memory.
fn open(path: &Path) -> vkmoe::Result<Gguf> {
    let start = Instant::now();
    let opened = Gguf::open(path);
    let (taken, peak) = (start.elapsed(), peak_bytes());
    assert!(taken < Duration::from_secs(1), "{taken:?}");
    assert!(peak < LIMIT_BYTES, "{peak}");
    println!("{taken:?}, peak {} MB: {:?}", peak / 1_000_000, opened.as_ref().err());
    opened
}

#[track_caller]
fn assert_over_budget(opened: vkmoe::Result<Gguf>) {
    let message = opened.unwrap_err().to_string();
    assert!(message.contains("MiB of memory"), "{message}");
}

/// Writes a file of a header, `count` pieces, and zeros that take no space up to `len` bytes.
fn write(path: &Path, head: &[u8], count: u32, piece: impl Fn(u32) -> [u8; 16], len: u64) {
    let mut file = BufWriter::new(File::create(path).unwrap());
    file.write_all(head).unwrap();
    for i in 0..count {
        file.write_all(&piece(i)).unwrap();
    }
    let file = file.into_inner().unwrap();
    file.set_len(len.max(file.metadata().unwrap().len())).unwrap();
}

/// The head of a file with one key, an array without its elements.
fn array_head(element_type: u32, count: u64) -> Vec<u8> {
    let mut file = GgufBuilder::new().raw_key(b"k", 9, raw_array(element_type, count, &[]));
    file.alignment = 1;
    file.build()
}

/// A string of 8 characters.
fn string(i: u32) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[0] = 8;
    bytes[8..].copy_from_slice(format!("{i:08x}").as_bytes());
    bytes
}

/// A key of 3 bytes, all different for 2^18 numbers, with a u8.
fn key(i: u32) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[0] = 3;
    for (digit, byte) in bytes[8..11].iter_mut().enumerate() {
        *byte = b'0' + (i >> (6 * digit) & 63) as u8;
    }
    bytes
}

#[test]
fn hostile_files_take_less_than_100_mb() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");

    // Arrays whose elements are in the file: empty strings, bytes, doubles.
    for (element_type, count) in [(8, GIB / 8), (0, 3 * GIB), (12, GIB / 4)] {
        write(&path, &array_head(element_type, count), 0, string, 4 * GIB);
        assert_over_budget(open(&path));
    }
    // As many keys as are read.
    let mut head = GgufBuilder::new();
    head.n_keys = Some(1 << 16);
    head.alignment = 1;
    write(&path, &head.build(), 1 << 16, key, 0);
    open(&path).unwrap();
    // Nearly as many strings as are read.
    write(&path, &array_head(8, 1_100_000), 1_100_000, string, 0);
    open(&path).unwrap();
}
