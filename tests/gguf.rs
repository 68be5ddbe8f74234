//! GGUF files: what a valid one gives, and what a hostile one is answered with.

#![allow(clippy::unwrap_used, reason = "a test may fail")]
#![allow(missing_docs, reason = "a test's name says what it shows")]

mod common;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use common::gguf_builder::{GgufBuilder, put_string, raw_array};
use proptest::prelude::*;
use vkmoe::gguf::{Array, GgmlType, Gguf, Value};

/// A small valid model: keys of every kind, three tensors.
fn model() -> GgufBuilder {
    GgufBuilder::new()
        .key("general.architecture", text("qwen3moe"))
        .key("general.alignment", Value::U32(32))
        .key("qwen3moe.block_count", Value::U32(2))
        .key("qwen3moe.head_count_kv", Value::Array(Array::I32(vec![4, 0])))
        .key("qwen3moe.eps", Value::F32(1e-6))
        .key("signed", Value::I8(-1))
        .key("wide", Value::U64(1 << 40))
        .key("double", Value::F64(0.5))
        .key("on", Value::Bool(true))
        .key("tokens", strings(&["<s>", "", "Ġé", "\n"]))
        .key("scores", Value::Array(Array::F32(vec![0.5, -1.0])))
        .key("flags", Value::Array(Array::Bool(vec![true, false])))
        .f32s("norm.weight", &[4], &[1.0, 2.0, 3.0, 4.0])
        .zeros("exps.weight", GgmlType::Q4_K, &[512, 3, 2])
        .tensor("last.weight", GgmlType::I8, &[5], vec![9, 8, 7, 6, 5])
}

/// One tensor, `t`, for tests that break it.
fn one_tensor() -> GgufBuilder {
    GgufBuilder::new().zeros("t", GgmlType::F32, &[8, 4])
}

fn text(text: &str) -> Value {
    Value::String(text.into())
}

fn strings(items: &[&str]) -> Value {
    Value::Array(Array::String(items.iter().map(|&item| item.into()).collect()))
}

/// Opens the bytes as a file.
fn open(bytes: &[u8]) -> vkmoe::Result<Gguf> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, bytes).unwrap();
    Gguf::open(&path)
}

/// Asserts that the bytes are refused quickly, in one line with the file's name and all of `parts`.
#[track_caller]
fn refused(bytes: &[u8], parts: &[&str]) {
    let start = Instant::now();
    let message = open(bytes).unwrap_err().to_string();
    assert!(start.elapsed() < Duration::from_secs(1), "slow: {message}");
    assert_says(&message, &["model.gguf: "]);
    assert_says(&message, parts);
}

#[track_caller]
fn assert_says(message: &str, parts: &[&str]) {
    assert!(!message.contains('\n'), "more than a line: {message}");
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
}

// ---- valid files ----

#[test]
fn both_versions_give_keys_and_tensors() {
    for version in [2, 3] {
        let mut file = model();
        file.version = version;
        let gguf = open(&file.build()).unwrap();
        assert_eq!(gguf.version(), version);
        assert_eq!(gguf.parts().len(), 1);
        assert_eq!(gguf.metadata().iter().len(), 12);
        let names: Vec<_> = gguf.tensors().iter().map(|tensor| tensor.name.as_str()).collect();
        assert_eq!(names, ["norm.weight", "exps.weight", "last.weight"]);
        let exps = gguf.require("exps.weight").unwrap();
        assert_eq!((exps.ty, exps.shape, exps.n_dims), (GgmlType::Q4_K, [512, 3, 2, 1], 3));
        assert_eq!(exps.bytes, 2 * 144 * 6);
        assert_eq!(gguf.bytes(gguf.tensor("last.weight").unwrap()), [9, 8, 7, 6, 5]);
        assert_eq!(gguf.bytes(&gguf.tensors()[0])[4..8], 2f32.to_le_bytes());
        assert_eq!(gguf.total_bytes(), 16 + 2 * 144 * 6 + 5);
        gguf.check().unwrap();
    }
}

#[test]
fn lookups_convert_integers_that_fit_and_nothing_else() {
    let gguf = open(&model().build()).unwrap();
    let metadata = gguf.metadata();
    assert_eq!(metadata.iter().next().unwrap().0, "general.architecture");
    assert_eq!(metadata.u32("qwen3moe.block_count").unwrap(), Some(2));
    assert_eq!(metadata.u64("qwen3moe.block_count").unwrap(), Some(2));
    assert_eq!(metadata.u32("absent").unwrap(), None);
    assert_eq!(metadata.i32("signed").unwrap(), Some(-1));
    assert_eq!(metadata.f32("double").unwrap(), Some(0.5));
    assert_eq!(metadata.bool("on").unwrap(), Some(true));
    assert_eq!(metadata.str("general.architecture").unwrap(), Some("qwen3moe"));
    assert_eq!(metadata.strings("tokens").unwrap().unwrap(), ["<s>", "", "Ġé", "\n"]);
    assert_eq!(metadata.f32s("scores").unwrap().unwrap(), [0.5, -1.0]);
    assert_eq!(metadata.bools("flags").unwrap().unwrap(), [true, false]);
    assert_eq!(metadata.u32s("qwen3moe.head_count_kv").unwrap().unwrap(), [4, 0]);
    assert_eq!(metadata.require_u32_per_layer("qwen3moe.head_count_kv", 2).unwrap(), [4, 0]);
    assert_eq!(metadata.require_u32_per_layer("qwen3moe.block_count", 3).unwrap(), [2, 2, 2]);

    let says = |error: vkmoe::Error, parts: &[&str]| assert_says(&error.to_string(), parts);
    let wide = metadata.u32("wide").unwrap_err();
    says(wide, &["model.gguf: key `wide`: expected u32, found u64 1099511627776"]);
    says(metadata.u32("signed").unwrap_err(), &["`signed`: expected u32, found i8 -1"]);
    says(metadata.u32("tokens").unwrap_err(), &["expected u32, found array of 4 string"]);
    says(metadata.strings("on").unwrap_err(), &["expected array of string, found bool true"]);
    says(metadata.require_f32("absent").unwrap_err(), &["key `absent`: is missing; expected f32"]);
    says(
        metadata.u32_per_layer("qwen3moe.head_count_kv", 3).unwrap_err(),
        &["expected one number or 3, found 2"],
    );
    says(gguf.require("x").unwrap_err(), &["model.gguf: tensor `x`: is missing"]);
}

#[test]
fn a_file_without_tensors_is_a_vocabulary() {
    let gguf = open(&GgufBuilder::new().key("a", text("b")).build()).unwrap();
    assert!(gguf.tensors().is_empty());
}

#[test]
fn any_power_of_two_aligns() {
    for alignment in [1, 8, 64, 4096] {
        let mut file = GgufBuilder::new()
            .key("general.alignment", Value::U32(alignment))
            .tensor("a", GgmlType::I8, &[3], vec![1, 2, 3])
            .tensor("b", GgmlType::I8, &[2], vec![4, 5]);
        file.alignment = alignment as usize;
        let gguf = open(&file.build()).unwrap();
        assert_eq!(gguf.bytes(gguf.tensor("b").unwrap()), [4, 5]);
    }
}

#[test]
fn a_real_vocabulary_parses_fast() {
    let tokens = (0..262_144).map(|i| format!("token{i}")).collect();
    let merges = (0..515_000).map(|i| format!("tok en{i}")).collect();
    let file = GgufBuilder::new()
        .key("tokenizer.ggml.tokens", Value::Array(Array::String(tokens)))
        .key("tokenizer.ggml.merges", Value::Array(Array::String(merges)))
        .key("tokenizer.ggml.scores", Value::Array(Array::F32(vec![0.0; 262_144])))
        .key("tokenizer.ggml.token_type", Value::Array(Array::I32(vec![1; 262_144])));
    let bytes = file.build();
    let start = Instant::now();
    let header = Gguf::parse_bytes(&bytes).unwrap();
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    let tokens = header.metadata.require_strings("tokenizer.ggml.tokens").unwrap();
    assert_eq!(tokens[262_143], "token262143");
}

// ---- hostile headers ----

#[test]
fn what_is_no_gguf_is_named() {
    refused(b"", &["header", "the file ends at byte 0"]);
    refused(b"GGU", &["header", "the file ends at byte 3"]);
    refused(b"GGUF\x03\0\0\0\0", &["header", "the file ends at byte 9"]);
    refused(b"ELF\x7f....", &["header", "not a GGUF file", "`ELF\\x7f`"]);
    refused(b"tjgg....", &["before GGUF"]);
    refused(b"version https://git-lfs", &["Git LFS pointer"]);
}

#[test]
fn versions_that_are_not_read_are_named() {
    let with_version = |version| {
        let mut file = model();
        file.version = version;
        file.build()
    };
    refused(&with_version(1), &["header", "version 1"]);
    refused(&with_version(4), &["version 4", "versions 2 and 3"]);
    refused(&with_version(0), &["version 0"]);
    refused(&with_version(3u32.swap_bytes()), &["big-endian file (version 3)"]);
}

#[test]
fn counts_are_bounded_by_the_file() {
    for count in [1 << 62, u64::MAX, 1 << 63, 1000] {
        let mut file = model();
        file.n_keys = Some(count);
        let start = Instant::now();
        let message = open(&file.build()).unwrap_err().to_string();
        assert!(start.elapsed() < Duration::from_secs(1));
        assert_says(&message, &["model.gguf: header: ", &format!("{count} keys"), "bytes left"]);
        let mut file = model();
        file.n_tensors = Some(count);
        refused(&file.build(), &["header", &format!("{count} tensors"), "bytes left"]);
    }
    let mut file = model().zeros("filler", GgmlType::I8, &[4 << 20]);
    file.n_tensors = Some(65537);
    refused(&file.build(), &["header", "65537 tensors; at most 65536"]);
    let mut file = model().zeros("filler", GgmlType::I8, &[4 << 20]);
    file.n_keys = Some(65537);
    refused(&file.build(), &["header", "65537 keys; at most 65536"]);
}

#[test]
fn keys_have_a_name_and_only_one_value() {
    let twice = model().key("on", Value::U8(1));
    refused(&twice.build(), &["key `on`", "twice"]);
    refused(&GgufBuilder::new().key("", Value::U8(1)).build(), &["key 1 of 1", "empty"]);
    let long = "k".repeat(65536);
    refused(&GgufBuilder::new().key(&long, Value::U8(1)).build(), &["key 1 of 1", "65536 bytes"]);
    let latin1 = GgufBuilder::new().raw_key(b"caf\xe9", 0, vec![1]);
    refused(&latin1.build(), &["key 1 of 1", "not UTF-8 at byte 3"]);
    let mut endless = GgufBuilder::new().key("a", Value::U8(1)).build();
    endless[24..32].copy_from_slice(&u64::MAX.to_le_bytes());
    refused(&endless, &["key 1 of 1", "18446744073709551615 bytes"]);
}

#[test]
fn strings_and_arrays_are_bounded_by_the_file() {
    let with = |type_id, value: Vec<u8>| GgufBuilder::new().raw_key(b"k", type_id, value).build();
    refused(&with(8, u64::MAX.to_le_bytes().to_vec()), &["key `k`", "18446744073709551615 bytes"]);
    for element_type in [0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12] {
        for count in [1 << 60, u64::MAX, 1 << 63] {
            let stated = format!("{count} elements");
            refused(&with(9, raw_array(element_type, count, &[0; 64])), &["key `k`", &stated]);
        }
    }
    refused(&with(9, raw_array(8, 1 << 60, &[0; 64])), &["key `k`", "1152921504606846976 strings"]);
    refused(&with(9, raw_array(9, 1, &[0; 64])), &["key `k`", "array of arrays"]);
    refused(&with(9, raw_array(13, 1, &[0; 64])), &["key `k`", "value type 13"]);
    refused(&with(99, vec![0; 8]), &["key `k`", "value type 99"]);
    refused(&with(7, vec![2]), &["key `k`", "bool of 2"]);
    refused(&with(9, raw_array(7, 2, &[1, 7])), &["key `k`", "bool of 7"]);
}

#[test]
fn strings_are_utf8() {
    let mut value = Vec::new();
    put_string(&mut value, b"a\xff");
    let file = GgufBuilder::new().raw_key(b"k", 8, value.clone());
    refused(&file.build(), &["key `k`", "not UTF-8 at byte 1"]);
    let mut tokens = Vec::new();
    put_string(&mut tokens, b"fine");
    tokens.extend(value);
    let file = GgufBuilder::new().raw_key(b"tokens", 9, raw_array(8, 2, &tokens));
    refused(&file.build(), &["key `tokens`", "string 1: not UTF-8 at byte 1"]);
}

#[test]
fn names_from_the_file_cannot_break_the_line() {
    let file = GgufBuilder::new().raw_key(b"a\nb\x1b[31m", 99, vec![]);
    refused(&file.build(), &["key `a\\nb\\u{1b}[31m`"]);
}

#[test]
fn alignment_is_a_u32_power_of_two() {
    for bad in [0, 3, 48] {
        let file = one_tensor().key("general.alignment", Value::U32(bad));
        refused(
            &file.build(),
            &["key `general.alignment`", &format!("{bad} is not a power of two")],
        );
    }
    let file = one_tensor().key("general.alignment", text("32"));
    refused(&file.build(), &["key `general.alignment`", "expected u32, found string"]);
    let file = one_tensor().key("general.alignment", Value::U64(32));
    refused(&file.build(), &["key `general.alignment`", "expected u32, found u64 32"]);
    let file = one_tensor().key("general.alignment", Value::U32(1 << 31));
    refused(&file.build(), &["tensor `t`", "the file is cut off"]);
}

// ---- hostile tensors ----

#[test]
fn dimensions_are_bounded() {
    for n_dims in [0, 5, u32::MAX] {
        let file = one_tensor().corrupt(|t| t.n_dims = Some(n_dims));
        refused(&file.build(), &["tensor `t`", &format!("{n_dims} dimensions")]);
    }
    for (dim, shown) in [(0, "0"), (u64::MAX, "-1"), (1 << 63, "-9223372036854775808")] {
        let file = one_tensor().corrupt(|t| t.dims[1] = dim);
        refused(&file.build(), &["tensor `t`", &format!("dimension 1 is {shown};")]);
    }
    let file = one_tensor().corrupt(|t| t.dims = vec![(1 << 42) + 1]);
    refused(&file.build(), &["tensor `t`", "end after the file's"]);
    let file = one_tensor().corrupt(|t| t.dims = vec![1 << 62, 1 << 62]);
    refused(&file.build(), &["tensor `t`", "more than 2^64 bytes"]);
    let file = one_tensor().corrupt(|t| t.dims = vec![1 << 16; 4]);
    refused(&file.build(), &["tensor `t`", "more than 2^64 bytes"]);
}

#[test]
fn types_are_known_and_rows_whole_blocks() {
    for unknown in [4, 5, 31, 1000, u32::MAX] {
        let file = one_tensor().corrupt(|t| t.type_id = unknown);
        let stated = format!("type {unknown} is unknown");
        refused(&file.build(), &["tensor `t`", &stated, "Q4_K=12", "MXFP4=39"]);
    }
    let file = one_tensor().corrupt(|t| (t.type_id, t.dims) = (12, vec![255]));
    refused(&file.build(), &["tensor `t`", "rows of 255 are not whole Q4_K blocks of 256"]);
}

#[test]
fn tensors_have_a_name_and_only_one_place() {
    let file = one_tensor().zeros("t", GgmlType::F32, &[1]);
    refused(&file.build(), &["tensor `t`", "twice"]);
    refused(
        &GgufBuilder::new().zeros("", GgmlType::F32, &[1]).build(),
        &["tensor 1 of 1", "empty"],
    );
    let long = GgufBuilder::new().zeros(&"n".repeat(256), GgmlType::F32, &[1]);
    refused(&long.build(), &["tensor 1 of 1", "256 bytes long; at most 255"]);
    open(&GgufBuilder::new().zeros(&"n".repeat(100), GgmlType::F32, &[1]).build()).unwrap();
    let file = one_tensor().corrupt(|t| t.name = b"\xff".to_vec());
    refused(&file.build(), &["tensor 1 of 1", "not UTF-8"]);
}

#[test]
fn tensors_lie_in_the_file_side_by_side() {
    let second = || one_tensor().zeros("u", GgmlType::F32, &[8]);
    open(&second().build()).unwrap();
    let file = second().corrupt(|t| t.offset = Some(96));
    refused(&file.build(), &["tensor `u`", "overlap tensor `t`"]);
    let file = second().corrupt(|t| t.offset = Some(0));
    refused(&file.build(), &["overlap tensor"]);
    let file = second().corrupt(|t| t.offset = Some(130));
    refused(&file.build(), &["tensor `u`", "offset 130 is not a multiple of the alignment 32"]);
    let file = second().corrupt(|t| t.offset = Some(1 << 40));
    refused(&file.build(), &["tensor `u`", "the file is cut off"]);
    let file = second().corrupt(|t| t.offset = Some(u64::MAX - 31));
    refused(&file.build(), &["tensor `u`", "past any file"]);
}

#[test]
fn a_file_cut_by_one_byte_is_cut_off() {
    let mut bytes = model().build();
    bytes.pop();
    refused(&bytes, &["tensor `last.weight`", "the file is cut off"]);
}

#[test]
fn every_cut_is_refused() {
    let bytes = model().build();
    for len in 0..bytes.len() {
        Gguf::parse_bytes(&bytes[..len]).unwrap_err();
    }
    Gguf::parse_bytes(&bytes).unwrap();
}

#[test]
fn what_is_no_file_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let message = Gguf::open(dir.path()).unwrap_err().to_string();
    assert_says(&message, &["cannot open", "not a regular file"]);
    let message = Gguf::open(&dir.path().join("absent.gguf")).unwrap_err().to_string();
    assert_says(&message, &["absent.gguf", "cannot open"]);
}

// ---- split models ----

/// The parts of a model split in three; part `no` holds the tensor `t{no}`, whose bytes are `no`.
fn part(no: u16) -> GgufBuilder {
    let mut file = GgufBuilder::new().split(no, 3, 3);
    if no == 0 {
        file = file.key("general.architecture", text("qwen3moe"));
    }
    file.tensor(&format!("t{no}"), GgmlType::I8, &[8], vec![no as u8; 8])
}

fn part_path(dir: &Path, no: u16) -> PathBuf {
    dir.join(format!("m-{:05}-of-00003.gguf", no + 1))
}

/// Writes three parts, then lets `change` break them.
fn split_model(change: impl FnOnce(&Path)) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for no in 0..3 {
        part(no).write(&part_path(dir.path(), no));
    }
    change(dir.path());
    dir
}

#[track_caller]
fn split_refused(given: u16, change: impl FnOnce(&Path), parts: &[&str]) {
    let dir = split_model(change);
    let message = Gguf::open(&part_path(dir.path(), given)).unwrap_err().to_string();
    assert_says(&message, parts);
}

#[test]
fn any_part_opens_the_whole_model() {
    let dir = split_model(|_| ());
    for given in 0..3 {
        let path = part_path(dir.path(), given);
        let gguf = Gguf::open(&path).unwrap();
        assert_eq!(gguf.path(), path);
        assert_eq!(gguf.parts(), [0, 1, 2].map(|no| part_path(dir.path(), no)));
        assert_eq!(gguf.metadata().require_str("general.architecture").unwrap(), "qwen3moe");
        for no in 0..3 {
            let tensor = gguf.require(&format!("t{no}")).unwrap();
            assert_eq!(tensor.part, no);
            assert_eq!(gguf.bytes(tensor), [no as u8; 8]);
        }
        assert_eq!(gguf.tensors().len(), 3);
        gguf.check().unwrap();
    }
}

#[test]
fn missing_parts_are_named() {
    let remove = |no| move |dir: &Path| std::fs::remove_file(part_path(dir, no)).unwrap();
    split_refused(0, remove(2), &["m-00003-of-00003.gguf", "part 3 of 3 is missing"]);
    split_refused(2, remove(0), &["m-00001-of-00003.gguf", "part 1 of 3 is missing"]);
}

#[test]
fn parts_of_another_model_are_named() {
    let replace = |file: GgufBuilder| move |dir: &Path| drop(file.write(&part_path(dir, 1)));
    let names_it = "m-00002-of-00003.gguf";
    split_refused(0, replace(model()), &[names_it, "a model of its own, not part 2 of 3"]);
    let other_count = GgufBuilder::new().split(1, 4, 3);
    split_refused(0, replace(other_count), &[names_it, "it holds part 2 of 4"]);
    let other_total = GgufBuilder::new().split(1, 3, 7);
    split_refused(0, replace(other_total), &[names_it, "key `split.tensors.count`"]);
    let other_arch = part(1).key("general.architecture", text("mixtral"));
    split_refused(
        0,
        replace(other_arch),
        &[names_it, "key `general.architecture`", "another model"],
    );
    let same_tensor = GgufBuilder::new().split(1, 3, 3).zeros("t0", GgmlType::I8, &[8]);
    split_refused(0, replace(same_tensor), &[names_it, "tensor `t0`", "m-00001-of-00003.gguf"]);
    let no_tensor = GgufBuilder::new().split(1, 3, 3);
    split_refused(0, replace(no_tensor), &["key `split.tensors.count`", "3", "have 2 tensors"]);
}

#[test]
fn swapped_and_renamed_parts_are_named() {
    let swap = |dir: &Path| {
        part(2).write(&part_path(dir, 0));
        part(0).write(&part_path(dir, 2));
    };
    split_refused(0, swap, &["m-00001-of-00003.gguf", "holds part 3 of 3", "-00003-of-00003.gguf"]);
    split_refused(
        1,
        swap,
        &["m-00001-of-00003.gguf", "says part 1 of 3, but it holds part 3 of 3"],
    );
    let dir = tempfile::tempdir().unwrap();
    let path = part(1).write(&dir.path().join("model.gguf"));
    let message = Gguf::open(&path).unwrap_err().to_string();
    assert_says(&message, &["model.gguf", "part 2 of 3", "must end in `-00002-of-00003.gguf`"]);
}

#[test]
fn concatenated_parts_are_named() {
    let joined = [part(0).build(), part(1).build(), part(2).build()].concat();
    let write = |dir: &Path| std::fs::write(part_path(dir, 0), &joined).unwrap();
    split_refused(0, write, &["m-00001-of-00003.gguf", "another GGUF file starts here", "--merge"]);
    refused(&[model().build(), model().build()].concat(), &["another GGUF file starts here"]);
}

#[test]
fn split_keys_are_bounded() {
    let file = GgufBuilder::new().key("split.count", Value::U64(1 << 62));
    refused(&file.build(), &["key `split.count`", "at most 65535"]);
    let file = GgufBuilder::new().key("split.count", Value::I32(-1));
    refused(&file.build(), &["key `split.count`", "found i32 -1"]);
    refused(&GgufBuilder::new().key("split.count", Value::U16(2)).build(), &["key `split.no`"]);
    refused(&GgufBuilder::new().split(3, 3, 0).build(), &["key `split.no`", "split.count is 3"]);
    open(&GgufBuilder::new().split(0, 1, 0).build()).unwrap();
}

// ---- files that change while mapped ----

#[cfg(unix)]
mod shrinking {
    use super::*;

    /// A model with 4 MiB of ones, and its file.
    fn big_model(dir: &Path) -> (Gguf, std::fs::File) {
        let file = GgufBuilder::new().tensor("t", GgmlType::I8, &[4 << 20], vec![1; 4 << 20]);
        let path = file.write(&dir.join("model.gguf"));
        (Gguf::open(&path).unwrap(), std::fs::File::options().write(true).open(path).unwrap())
    }

    fn sum(gguf: &Gguf) -> u64 {
        gguf.bytes(&gguf.tensors()[0]).iter().map(|&byte| u64::from(byte)).sum()
    }

    #[test]
    fn a_file_that_shrinks_reads_as_zeros_and_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let (gguf, file) = big_model(dir.path());
        assert_eq!(sum(&gguf), 4 << 20);
        file.set_len(1 << 20).unwrap();
        let sum = sum(&gguf);
        assert!((1 << 19..=1 << 20).contains(&sum), "{sum}");
        let message = gguf.check().unwrap_err().to_string();
        assert_says(&message, &["model.gguf", "it changed from", "to 1048576 bytes while in use"]);
    }

    #[test]
    fn a_file_cut_and_grown_again_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let (gguf, file) = big_model(dir.path());
        let len = file.metadata().unwrap().len();
        file.set_len(0).unwrap();
        assert_eq!(sum(&gguf), 0);
        file.set_len(len).unwrap();
        let message = gguf.check().unwrap_err().to_string();
        assert_says(&message, &["model.gguf", "could not be read while in use"]);
    }

    #[test]
    fn many_threads_may_fault_and_other_files_are_not_blamed() {
        let dirs = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let (cut, file) = big_model(dirs[0].path());
        let (whole, _) = big_model(dirs[1].path());
        file.set_len(4096).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| assert!(sum(&cut) <= 4096));
                scope.spawn(|| assert_eq!(sum(&whole), 4 << 20));
            }
        });
        cut.check().unwrap_err();
        whole.check().unwrap();
    }

    #[test]
    fn mappings_end_with_their_model() {
        let dir = tempfile::tempdir().unwrap();
        let path = one_tensor().write(&dir.path().join("model.gguf"));
        for _ in 0..5000 {
            Gguf::open(&path).unwrap(); // the table of mappings has fewer slots
        }
    }

    /// The child of the test below: ends by SIGBUS from elsewhere, or fails to.
    #[test]
    #[ignore = "run by a_sigbus_from_elsewhere_still_ends_the_process"]
    fn child_receives_sigbus() {
        let dir = tempfile::tempdir().unwrap();
        let (_gguf, _file) = big_model(dir.path());
        // Rust's own handler only uninstalls itself on the first.
        for _ in 0..2 {
            std::process::Command::new("sh").args(["-c", "kill -BUS $PPID"]).status().unwrap();
        }
    }

    #[test]
    fn a_sigbus_from_elsewhere_still_ends_the_process() {
        use std::os::unix::process::ExitStatusExt;
        let status = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "shrinking::child_receives_sigbus"])
            .stdout(std::process::Stdio::null())
            .status()
            .unwrap();
        assert_eq!(status.signal(), Some(libc::SIGBUS), "{status}");
    }
}

// ---- mutated files ----

#[derive(Debug, Clone)]
enum Mutation {
    Flip { at: usize, bit: u8 },
    Cut { at: usize },
    Insert { at: usize, number: u64, bytes: usize },
    Overwrite { at: usize, number: u64, bytes: usize },
}

fn mutation() -> impl Strategy<Value = Mutation> {
    let at = 0..4096usize;
    let number = prop_oneof![
        any::<u64>(),
        (0..64u32).prop_map(|bit| 1 << bit),
        (0..64u32).prop_map(|bit| u64::MAX >> bit),
        0..64u64,
    ];
    let bytes = prop_oneof![Just(1usize), Just(4), Just(8)];
    prop_oneof![
        (at.clone(), 0..8u8).prop_map(|(at, bit)| Mutation::Flip { at, bit }),
        at.clone().prop_map(|at| Mutation::Cut { at }),
        (at.clone(), number.clone(), bytes.clone())
            .prop_map(|(at, number, bytes)| Mutation::Insert { at, number, bytes }),
        (at, number, bytes).prop_map(|(at, number, bytes)| Mutation::Overwrite {
            at,
            number,
            bytes
        }),
    ]
}

/// Applies a mutation within the file's first bytes, where the header is.
fn mutate(file: &mut Vec<u8>, mutation: &Mutation) {
    let place = |at: usize, file: &Vec<u8>| at % file.len().clamp(1, 800);
    match *mutation {
        Mutation::Flip { at, bit } => {
            let at = place(at, file);
            file.iter_mut().skip(at).take(1).for_each(|byte| *byte ^= 1 << bit);
        }
        Mutation::Cut { at } => file.truncate(at.max(1)),
        Mutation::Insert { at, number, bytes } => {
            let at = place(at, file).min(file.len());
            file.splice(at..at, number.to_le_bytes()[..bytes].iter().copied());
        }
        Mutation::Overwrite { at, number, bytes } => {
            let at = place(at, file);
            let number = number.to_le_bytes();
            file.iter_mut().skip(at).zip(&number[..bytes]).for_each(|(byte, new)| *byte = *new);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn mutated_files_never_panic(mutations in proptest::collection::vec(mutation(), 1..5)) {
        let mut file = model().build();
        mutations.iter().for_each(|mutation| mutate(&mut file, mutation));
        let start = Instant::now();
        match Gguf::parse_bytes(&file) {
            Err(error) => prop_assert!(!error.to_string().contains('\n')),
            Ok(header) => {
                for tensor in &header.tensors {
                    prop_assert!(tensor.bytes > 0 && tensor.end() <= file.len() as u64);
                }
            }
        }
        prop_assert!(start.elapsed() < Duration::from_secs(1));
    }
}
