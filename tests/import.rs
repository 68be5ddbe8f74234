//! Host pages that a device imports: the right bytes at any alignment, lifetimes, and every way in which
//! a driver can say no, by injected faults, for the drivers of test machines say yes to everything.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(unsafe_code, reason = "owners of host pages are an unsafe trait")]

mod common;

use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Weak};
use std::time::Duration;

use common::gguf_builder::GgufBuilder;
use common::vulkan::{assert_clean, validation};
use proptest::prelude::*;
use tempfile::TempDir;
use vkmoe::Error;
use vkmoe::gguf::{GgmlType, Gguf, TensorInfo};
use vkmoe::stream::options::HostSource;
use vkmoe::stream::probe::{Measure, Probe, cached_probe, ladder, probe};
use vkmoe::vk::{
    Arena, Buffer, CacheFile, CopyQueue, Device, DeviceInfo, DeviceOptions, Faults, HostPages,
    Instance, InstanceOptions, Lane, MemoryKind, Point, Recorder, Region, Replay, choose,
};

const MIB: u64 = 1 << 20;

// ---------------------------------------------------------------- helpers

/// An instance with faults, and the device under test as it is seen with them.
fn machine(faults: &str) -> (Arc<Instance>, DeviceInfo) {
    let options = InstanceOptions { validation: validation() };
    let faults = Faults::parse(faults).unwrap();
    let instance = Arc::new(Instance::with_faults(options, faults).unwrap());
    let devices = instance.devices().unwrap();
    let visible = std::env::var("GGML_VK_VISIBLE_DEVICES").ok();
    let info = devices[choose(&devices, None, visible.as_deref()).unwrap()].clone();
    (instance, info)
}

fn open(faults: &str) -> Arc<Device> {
    let (instance, info) = machine(faults);
    let options = DeviceOptions { cache: CacheFile::None, ..DeviceOptions::default() };
    Device::open(&instance, &info, options).unwrap()
}

/// Closes the device; the validation layer had nothing to say, also not about objects left behind.
fn close(device: Arc<Device>) {
    let instance = device.instance().clone();
    let device = Arc::into_inner(device);
    assert!(device.is_some(), "something still holds the device");
    drop(device);
    assert_clean(&instance);
}

/// Bytes that depend on their place and on `seed`.
fn pattern(seed: u64, bytes: usize) -> Vec<u8> {
    (0..bytes as u64)
        .map(|i| ((i ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8)
        .collect()
}

fn arena(seed: u64, bytes: u64) -> Arc<dyn HostPages> {
    let mut arena = Arena::new("a test", bytes).unwrap();
    let to = arena.bytes_mut();
    to.copy_from_slice(&pattern(seed, to.len()));
    Arc::new(arena)
}

/// Copies pieces (buffer, offset, length) one behind the other into a buffer of the device, on the copy
/// lane, and reads that back.
fn copied(device: &Arc<Device>, pieces: &[(&Buffer, u64, u64)]) -> vkmoe::Result<Vec<u8>> {
    let bytes: u64 = pieces.iter().map(|(_, _, bytes)| bytes).sum();
    let there = Buffer::new(device, "test.there", bytes, MemoryKind::Device)?;
    let back = Buffer::new(device, "test.back", bytes, MemoryKind::HostRead)?;
    let mut copy = Recorder::new(device, Lane::Copy, "test.copy", Replay::Once)?;
    let mut to = 0;
    for &(from, at, bytes) in pieces {
        copy.copy(from, at, &there, to, bytes);
        to += bytes;
    }
    let filled = device.submit(Lane::Copy, &[&copy.finish()?], &[])?;
    let mut fetch = Recorder::new(device, Lane::Compute, "test.fetch", Replay::Once)?;
    fetch.copy(&there, 0, &back, 0, bytes);
    fetch.host_barrier();
    let point = device.submit(Lane::Compute, &[&fetch.finish()?], &[filled])?;
    device.wait(point, "the copies")?;
    let mut found = vec![0; bytes as usize];
    back.read(0, &mut found)?;
    Ok(found)
}

fn assert_same(found: &[u8], expected: &[u8]) {
    assert_eq!(found.len(), expected.len());
    let wrong = found.iter().zip(expected).position(|(found, expected)| found != expected);
    assert_eq!(wrong, None, "the first wrong byte");
}

/// A model with tensors at offsets that are multiples of 32 and no more, and an odd length.
fn model() -> (TempDir, Gguf) {
    let dir = tempfile::tempdir().unwrap();
    let gguf = model_in(dir.path());
    (dir, gguf)
}

fn model_in(dir: &Path) -> Gguf {
    let tensor = |builder: GgufBuilder, name: &str, bytes: u64| {
        let data = pattern(bytes, bytes as usize);
        builder.tensor(name, GgmlType::F32, &[bytes / 4], data)
    };
    let mut builder = GgufBuilder::new();
    for (name, bytes) in [("small", 36), ("large", 5 * MIB + 4), ("last", MIB + 12)] {
        builder = tensor(builder, name, bytes);
    }
    Gguf::open(&builder.write(&dir.join("model.gguf"))).unwrap()
}

fn import(device: &Arc<Device>, pages: &Arc<dyn HostPages>) -> vkmoe::Result<Buffer> {
    Buffer::import(device, "test.pages", pages, 0..pages.bytes().len() as u64)
}

#[track_caller]
fn assert_refused(result: vkmoe::Result<Buffer>) {
    match result.err() {
        Some(error @ Error::ImportRefused { .. }) => {
            let text = error.to_string();
            assert!(text.starts_with("cannot import the pages of buffer test.pages"), "{text}");
        }
        other => panic!("{other:?}"),
    }
}

// ---------------------------------------------------------------- right bytes

#[test]
fn anonymous_pages_are_copied_right_from_any_offset() {
    let device = open("");
    let pages = arena(1, 6 * MIB);
    let align = device.info().limits.import_alignment;
    // Not from the start, and two neighbours.
    let whole = pages.bytes().len() as u64;
    let ranges = [align..3 * MIB, 3 * MIB..whole];
    let buffers = ranges.clone().map(|range| {
        let buffer = Buffer::import(&device, "test.pages", &pages, range.clone()).unwrap();
        assert_eq!(buffer.bytes(), range.end - range.start);
        assert!(buffer.is_imported() && !buffer.is_mapped() && buffer.address() != 0);
        buffer
    });
    for (buffer, range) in buffers.iter().zip(&ranges) {
        for (at, bytes) in [(0, buffer.bytes()), (32, 4), (buffer.bytes() - 4, 4), (96, MIB + 4)] {
            let start = (range.start + at) as usize;
            let found = copied(&device, &[(buffer, at, bytes)]).unwrap();
            assert_same(&found, &pages.bytes()[start..start + bytes as usize]);
        }
    }
    drop(buffers);
    close(device);
}

#[test]
fn tensors_of_file_pages_are_copied_right_over_chunk_borders() {
    let device = open("");
    let (_dir, gguf) = model();
    let mapping = gguf.map_private(0).unwrap();
    let file_bytes = mapping.file_bytes();
    mapping.populate(0..file_bytes).unwrap();
    let pages: Arc<dyn HostPages> = mapping.clone();
    let whole = pages.bytes().len() as u64;
    let chunk = 2 * MIB;
    let chunks: Vec<Buffer> = (0..whole)
        .step_by(chunk as usize)
        .map(|start| {
            let range = start..(start + chunk).min(whole);
            Buffer::import(&device, "test.pages", &pages, range).unwrap()
        })
        .collect();
    for tensor in gguf.tensors() {
        let found = copied(&device, &pieces_of(tensor, &chunks, chunk)).unwrap();
        assert_same(&found, gguf.bytes(tensor));
    }
    // Behind the file's end: zeros.
    let last = chunks.last().unwrap();
    let rest = whole - file_bytes;
    assert!(rest > 0 && !file_bytes.is_multiple_of(4096), "the model's length is odd");
    let at = last.bytes() - rest;
    let (from, skipped) = (at / 4 * 4, (at % 4) as usize);
    let found = copied(&device, &[(last, from, last.bytes() - from)]).unwrap();
    assert!(found[skipped..].iter().all(|&byte| byte == 0));
    mapping.check().unwrap();
    drop(chunks);
    close(device);
}

/// A tensor's ranges in buffers of `chunk` bytes each.
fn pieces_of<'a>(
    tensor: &TensorInfo,
    chunks: &'a [Buffer],
    chunk: u64,
) -> Vec<(&'a Buffer, u64, u64)> {
    let mut pieces = Vec::new();
    let mut at = tensor.offset;
    while at < tensor.end() {
        let buffer = &chunks[(at / chunk) as usize];
        let bytes = (chunk - at % chunk).min(tensor.end() - at);
        pieces.push((buffer, at % chunk, bytes));
        at += bytes;
    }
    pieces
}

#[test]
fn pages_written_after_the_import_are_seen() {
    let device = open("");
    let pages = Arc::new(Writable::new(MIB));
    let shared: Arc<dyn HostPages> = pages.clone();
    let buffer = import(&device, &shared).unwrap();
    for seed in 0..3 {
        let expected = pattern(seed, MIB as usize);
        pages.write(&expected);
        assert_same(&copied(&device, &[(&buffer, 0, MIB)]).unwrap(), &expected);
    }
    drop((buffer, shared));
    close(device);
}

/// Pages that the host writes while they are imported.
struct Writable {
    // Boxed bytes would not be aligned.
    arena: Arena,
    start: *mut u8,
}

impl Writable {
    fn new(bytes: u64) -> Self {
        let mut arena = Arena::new("a test", bytes).unwrap();
        let start = arena.bytes_mut().as_mut_ptr();
        Self { arena, start }
    }

    fn write(&self, data: &[u8]) {
        // SAFETY: the arena has room, and no submission that reads it is pending.
        unsafe { self.start.copy_from_nonoverlapping(data.as_ptr(), data.len()) };
    }
}

// SAFETY: only the test's thread writes.
unsafe impl Send for Writable {}
// SAFETY: as above.
unsafe impl Sync for Writable {}
// SAFETY: the arena's pages.
unsafe impl HostPages for Writable {
    fn bytes(&self) -> &[u8] {
        self.arena.bytes()
    }
}

#[test]
fn memory_of_the_driver_is_filled_in_place_by_several_threads() {
    let device = open("");
    let (_dir, gguf) = model();
    let large = gguf.require("large").unwrap();
    for kind in [MemoryKind::HostRead, MemoryKind::Upload] {
        let buffer = Buffer::new(&device, "test.host", large.bytes + 64, kind).unwrap();
        buffer.write(0, &vec![7; buffer.bytes() as usize]).unwrap();
        buffer
            .write_with(32, large.bytes, |to| {
                assert_eq!(to.len() as u64, large.bytes);
                gguf.read_parallel(large, 0, to)
            })
            .unwrap();
        let found = copied(&device, &[(&buffer, 0, buffer.bytes())]).unwrap();
        let (before, rest) = found.split_at(32);
        let (middle, after) = rest.split_at(large.bytes as usize);
        assert_same(middle, gguf.bytes(large));
        assert!(before.iter().chain(after).all(|&byte| byte == 7));
        let failed = buffer.write_with(0, 4, |_| Err(Error::usage("a flag", "is wrong")));
        assert_eq!(failed.unwrap_err().to_string(), "a flag: is wrong");
    }
    close(device);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    /// Any aligned range of an arena, and any piece of it.
    #[test]
    fn any_aligned_range_is_copied_right(
        start in 0u64..512,
        pages in 1u64..256,
        piece in (0f64..1.0, 0f64..1.0),
    ) {
        let device = open("");
        let owner = arena(start, 4 * MIB);
        let align = device.info().limits.import_alignment;
        let unit = align.max(4096);
        let end = ((start + pages) * unit).min(4 * MIB);
        let range = (start * unit).min(end - unit)..end;
        let buffer = Buffer::import(&device, "test.pages", &owner, range.clone()).unwrap();
        let at = (piece.0 * buffer.bytes() as f64) as u64 / 4 * 4;
        let bytes = ((piece.1 * (buffer.bytes() - at) as f64) as u64 / 4 * 4).max(4);
        let found = copied(&device, &[(&buffer, at, bytes)]).unwrap();
        let first = (range.start + at) as usize;
        assert_same(&found, &owner.bytes()[first..first + bytes as usize]);
        drop(buffer);
        close(device);
    }
}

// ---------------------------------------------------------------- lifetimes

fn is_gone(pages: &Weak<dyn HostPages>) -> bool {
    pages.strong_count() == 0
}

#[test]
fn pages_live_until_the_last_user_of_the_buffer_is_done() {
    let device = open("");
    let pages = arena(3, MIB);
    let watch = Arc::downgrade(&pages);
    let buffer = import(&device, &pages).unwrap();
    drop(pages);
    let there = Buffer::new(&device, "test.there", MIB, MemoryKind::Device).unwrap();
    let mut copy = Recorder::new(&device, Lane::Copy, "test.copy", Replay::Many).unwrap();
    copy.copy_regions(&buffer, &there, &[Region { from: 0, to: 0, bytes: MIB }]);
    let copy = copy.finish().unwrap();
    drop(buffer);
    assert!(!is_gone(&watch), "commands hold the buffer");
    let point = device.submit(Lane::Copy, &[&copy], &[]).unwrap();
    device.wait(point, "the copy").unwrap();
    assert!(!is_gone(&watch), "the commands may be submitted again");
    drop(copy);
    assert!(is_gone(&watch), "nothing is in flight, nothing is left to use them");
    drop(there);
    close(device);
}

#[test]
fn pages_dropped_in_flight_stay_until_the_device_is_done() {
    let device = open("");
    let pages = arena(4, 64 * MIB);
    let watch = Arc::downgrade(&pages);
    let buffer = import(&device, &pages).unwrap();
    let there = Buffer::new(&device, "test.there", 64 * MIB, MemoryKind::Device).unwrap();
    let mut copy = Recorder::new(&device, Lane::Copy, "test.copy", Replay::Once).unwrap();
    for _ in 0..8 {
        copy.copy(&buffer, 0, &there, 0, 64 * MIB);
        copy.barrier();
    }
    let commands = copy.finish().unwrap();
    let point = device.submit(Lane::Copy, &[&commands], &[]).unwrap();
    drop((commands, buffer, pages));
    let gone = is_gone(&watch);
    assert!(!gone || device.is_reached(point).unwrap(), "unpinned while the device reads");
    device.wait(point, "the copies").unwrap();
    assert!(is_gone(&watch), "the wait collects");
    drop(there);
    close(device);
}

#[test]
fn closing_the_device_lets_pages_go() {
    let device = open("");
    let pages = arena(5, MIB);
    let watch = Arc::downgrade(&pages);
    let buffer = import(&device, &pages).unwrap();
    drop(device);
    drop(pages);
    assert!(!is_gone(&watch));
    drop(buffer);
    assert!(is_gone(&watch));
}

// ---------------------------------------------------------------- refusals

#[test]
fn file_pages_are_refused_and_anonymous_ones_are_not() {
    let device = open("amdgpu");
    let (_dir, gguf) = model();
    let pages: Arc<dyn HostPages> = gguf.map_private(0).unwrap();
    assert_refused(import(&device, &pages));
    let pages = arena(6, MIB);
    let buffer = import(&device, &pages).unwrap();
    assert_same(&copied(&device, &[(&buffer, 0, MIB)]).unwrap(), &pages.bytes()[..MIB as usize]);
    drop(buffer);
    close(device);
}

#[test]
fn everything_is_refused() {
    for faults in ["refuse-import", "no-import-extension", "bare", "non-coherent"] {
        let device = open(faults);
        assert_refused(import(&device, &arena(7, MIB)));
        close(device);
    }
}

#[test]
fn one_refused_import_poisons_the_device_but_not_the_next() {
    let device = open("nvidia");
    let (_dir, gguf) = model();
    let private: Arc<dyn HostPages> = gguf.map_private(0).unwrap();
    let buffer = import(&device, &private).unwrap();
    drop(buffer);
    let read_only: Arc<dyn HostPages> = Arc::new(ReadOnly::open(gguf.path()));
    assert_refused(Buffer::import(&device, "test.pages", &read_only, 0..MIB));
    assert_refused(import(&device, &arena(8, MIB)));
    close(device);
    let device = open("nvidia");
    drop(import(&device, &arena(8, MIB)).unwrap());
    close(device);
}

/// A file as programs usually map it.
struct ReadOnly(memmap2::Mmap);

impl ReadOnly {
    fn open(path: &Path) -> Self {
        let file = std::fs::File::open(path).unwrap();
        // SAFETY: the test's own file, which nobody changes.
        ReadOnly(unsafe { memmap2::Mmap::map(&file) }.unwrap())
    }
}

// SAFETY: a lie, the pages are not writable; the fault refuses them before any driver sees them.
unsafe impl HostPages for ReadOnly {
    fn bytes(&self) -> &[u8] {
        &self.0
    }
}

#[test]
fn a_coarser_alignment_is_kept_to() {
    let device = open("import-alignment=64");
    assert_eq!(device.info().limits.import_alignment, 64 << 10);
    let (_dir, gguf) = model();
    let mapping = gguf.map_private(0).unwrap();
    let pages: Arc<dyn HostPages> = mapping;
    let buffer = import(&device, &pages).unwrap();
    assert_same(&copied(&device, &[(&buffer, 0, buffer.bytes())]).unwrap(), pages.bytes());
    let wrong = std::panic::catch_unwind(AssertUnwindSafe(|| {
        Buffer::import(&device, "test.pages", &pages, 4096..8192).map(drop)
    }));
    assert!(wrong.is_err(), "that is the caller's mistake");
    drop(buffer);
    close(device);
}

#[test]
fn more_than_a_buffer_holds_is_refused() {
    let device = open("max-buffer=1");
    assert_refused(import(&device, &arena(9, 2 * MIB)));
    match Buffer::new(&device, "kv.k", MIB + 1, MemoryKind::Device).err() {
        Some(Error::OutOfMemory { available_bytes, .. }) => assert_eq!(available_bytes, MIB),
        other => panic!("{other:?}"),
    }
    close(device);
}

#[track_caller]
fn assert_lost<T>(result: vkmoe::Result<T>) {
    match result.err() {
        Some(Error::DeviceLost(text)) => assert!(text.contains("VKMOE_FAULTS"), "{text}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_import_can_be_accepted_and_fail_at_its_first_use() {
    let device = open("i915");
    let plan = device.lane_plan();
    assert_eq!(plan.compute, plan.copy, "one queue");
    let own = Buffer::new(&device, "test.own", 64, MemoryKind::Upload).unwrap();
    own.write(0, &[5; 64]).unwrap();
    assert_eq!(copied(&device, &[(&own, 0, 64)]).unwrap(), [5; 64]);
    let buffer = import(&device, &arena(10, MIB)).unwrap();
    assert_lost(copied(&device, &[(&buffer, 0, 64)]));
    assert!(device.is_lost());
    assert_lost(copied(&device, &[(&own, 0, 64)]));
    assert_lost(import(&device, &arena(10, MIB)));
    assert_lost(device.wait(Point { lane: Lane::Copy, value: 99 }, "what comes later"));
    drop((own, buffer));
    close(device);
}

#[test]
fn a_device_is_lost_in_the_middle() {
    let device = open("device-lost-after=3");
    let own = Buffer::new(&device, "test.own", 64, MemoryKind::Upload).unwrap();
    own.write(0, &[5; 64]).unwrap();
    assert_eq!(copied(&device, &[(&own, 0, 64)]).unwrap(), [5; 64]);
    assert_lost(copied(&device, &[(&own, 0, 64)]));
    drop(own);
    close(device);
}

#[test]
fn slots_run_out_and_come_back() {
    let device = open("slot-allocation-fails=2");
    let slot = |i| Buffer::new(&device, &format!("slot.{i}"), 4096, MemoryKind::Device);
    let mut slots = vec![slot(0).unwrap(), slot(1).unwrap()];
    assert!(
        matches!(slot(2).err(), Some(Error::OutOfMemory { what, .. }) if what.contains("slot.2"))
    );
    slots.pop();
    slots.push(slot(3).unwrap());
    assert!(slot(4).is_err());
    drop(slots);
    close(device);
}

#[test]
fn a_budget_that_drops_is_told_and_kept() {
    let device = open("budget-drops=1024");
    let local = |device: &Device| -> u64 {
        let heaps = device.memory_budget();
        heaps.iter().filter(|heap| heap.device_local).map(|heap| heap.budget_bytes).max().unwrap()
    };
    let (before, after) = (local(&device), local(&device));
    // Other processes allocate and free meanwhile.
    let slack = 512 * MIB;
    assert!(after + 1024 * MIB <= before + slack && after < before, "{before} {after}");
    close(device);
    let device = open("budget-drops=1048576");
    local(&device);
    assert!(matches!(
        Buffer::new(&device, "slot.0", MIB, MemoryKind::Device).err(),
        Some(Error::OutOfMemory { available_bytes: 0, .. })
    ));
    close(device);
}

#[test]
fn a_fault_that_does_not_exist_ends_the_program_in_one_line() {
    let program = env!("CARGO_BIN_EXE_vkmoe");
    let ran = Command::new(program).arg("devices").env("VKMOE_FAULTS", "amd").output().unwrap();
    let err = String::from_utf8(ran.stderr).unwrap();
    assert!(!ran.status.success());
    assert_eq!(err.lines().count(), 1, "{err}");
    assert!(err.contains("VKMOE_FAULTS: no fault `amd`; there are: amdgpu, i915, nvidia"), "{err}");
}

// ---------------------------------------------------------------- the probe

fn probed(faults: &str, gguf: &Gguf) -> Vec<(HostSource, Probe)> {
    let (instance, info) = machine(faults);
    let probes = HostSource::ALL
        .map(|source| (source, probe(&instance, &info, source, gguf, Measure::Nothing)));
    assert_clean(&instance);
    probes.to_vec()
}

#[test]
fn the_probe_finds_what_works_under_each_fault() {
    use HostSource::{Arena, Host, Mmap, Ring};
    let (_dir, gguf) = model();
    let cases = [
        ("", vec![Mmap, Arena, Host, Ring]),
        ("amdgpu", vec![Arena, Host, Ring]),
        ("nvidia", vec![Mmap, Arena, Host, Ring]),
        ("i915", vec![Host, Ring]),
        ("bare", vec![Host, Ring]),
        ("refuse-import", vec![Host, Ring]),
        ("import-reads-zeros", vec![Host, Ring]),
        ("refuse-import,import-poisons", vec![Host, Ring]),
        ("refuse-file-import,import-poisons", vec![Arena, Host, Ring]),
        ("non-coherent", vec![Host, Ring]),
        ("import-alignment=64,one-queue", vec![Mmap, Arena, Host, Ring]),
        ("device-lost-after=1", vec![]),
    ];
    for (faults, expected) in cases {
        let probes = probed(faults, &gguf);
        let usable = probes.iter().filter(|(_, probe)| probe.usable).map(|(source, _)| *source);
        assert_eq!(usable.collect::<Vec<_>>(), expected, "{faults}: {probes:?}");
        for (_, probe) in &probes {
            let one_line = !probe.why.is_empty() && probe.why.lines().count() == 1;
            assert!(one_line && probe.copy_gbps.is_empty(), "{faults}: {probe:?}");
        }
    }
}

#[test]
fn a_wrong_copy_is_found_and_told() {
    let (_dir, gguf) = model();
    let probes = probed("import-reads-zeros", &gguf);
    let (_, arena) = probes.iter().find(|(source, _)| *source == HostSource::Arena).unwrap();
    assert!(arena.why.contains("arena memory (byte ") && arena.why.contains("copied wrong"));
}

#[test]
fn the_ladder_of_this_device_ends_with_what_works() {
    let (_dir, gguf) = model();
    for faults in ["", "bare"] {
        let (instance, info) = machine(faults);
        let works = |source: &&HostSource| {
            probe(&instance, &info, **source, &gguf, Measure::Nothing).usable
        };
        assert_eq!(ladder(&info).last(), Some(&HostSource::Ring), "{faults}");
        let first = ladder(&info).iter().find(works);
        assert!(first.is_some_and(|first| *first != HostSource::Ring), "{faults}: {first:?}");
    }
}

#[test]
fn copy_queues_are_measured_where_asked() {
    let (_dir, gguf) = model();
    let (instance, info) = machine("one-queue");
    let measure = |source| probe(&instance, &info, source, &gguf, Measure::CopyQueues);
    let probe = measure(HostSource::Arena);
    assert!(probe.usable && probe.measured, "{probe:?}");
    assert_eq!(
        probe.copy_gbps.iter().map(|(kind, _)| *kind).collect::<Vec<_>>(),
        [CopyQueue::Same]
    );
    assert!(probe.copy_gbps.iter().all(|(_, gbps)| (0.01..10_000.0).contains(gbps)), "{probe:?}");
    let probe = measure(HostSource::Mmap);
    assert!(probe.usable && probe.copy_gbps.is_empty(), "the file is too small: {probe:?}");
    assert_clean(&instance);
}

#[test]
fn results_are_kept_and_a_damaged_file_is_made_anew() {
    let (dir, gguf) = model();
    let cache = CacheFile::In(dir.path().join("cache"));
    let (instance, info) = machine("");
    let ask = |instance: &Arc<Instance>, source, measure| {
        cached_probe(instance, &info, source, &gguf, measure, &cache)
    };
    let file = || {
        let entries: Vec<_> = std::fs::read_dir(dir.path().join("cache")).unwrap().collect();
        assert_eq!(entries.len(), 1, "{entries:?}");
        entries.into_iter().next().unwrap().unwrap().path()
    };
    let first = ask(&instance, HostSource::Host, Measure::Nothing);
    assert!(first.usable, "{first:?}");
    // What the file says is believed: it is asked, not the device.
    let text = std::fs::read_to_string(file()).unwrap();
    std::fs::write(file(), text.replace("were copied", "WERE COPIED")).unwrap();
    let again = ask(&instance, HostSource::Host, Measure::Nothing);
    assert!(again.why.contains("WERE COPIED"), "{again:?}");
    // Measuring was not asked for before, another source neither.
    let measured = ask(&instance, HostSource::Host, Measure::CopyQueues);
    assert!(!measured.copy_gbps.is_empty() && measured.why == first.why, "{measured:?}");
    assert_eq!(ask(&instance, HostSource::Host, Measure::CopyQueues), measured);
    assert!(ask(&instance, HostSource::Arena, Measure::Nothing).usable);
    for bad in ["", "{", "[]", "\u{0}"] {
        std::fs::write(file(), bad).unwrap();
        assert_eq!(ask(&instance, HostSource::Host, Measure::Nothing), first);
    }
    // What fails for the file's sake says nothing about the driver.
    let shrunk = std::fs::File::options().write(true).open(gguf.path()).unwrap();
    let len = shrunk.metadata().unwrap().len();
    shrunk.set_len(4096).unwrap();
    assert!(!ask(&instance, HostSource::Mmap, Measure::Nothing).usable);
    shrunk.set_len(len).unwrap();
    let gguf = Gguf::open(gguf.path()).unwrap();
    let ask = |instance: &Arc<Instance>, source, measure| {
        cached_probe(instance, &info, source, &gguf, measure, &cache)
    };
    assert!(ask(&instance, HostSource::Mmap, Measure::Nothing).usable);
    // With faults neither read nor written.
    let before = std::fs::read(file()).unwrap();
    let (faulty, _) = machine("device-lost-after=1");
    assert!(!ask(&faulty, HostSource::Host, Measure::Nothing).usable);
    assert_eq!(std::fs::read(file()).unwrap(), before);
}

#[test]
fn a_model_that_shrinks_is_not_usable() {
    let (_dir, gguf) = model();
    let (instance, info) = machine("");
    let file = std::fs::File::options().write(true).open(gguf.path()).unwrap();
    file.set_len(4096).unwrap();
    for source in [HostSource::Mmap, HostSource::Host] {
        let probe = probe(&instance, &info, source, &gguf, Measure::Nothing);
        assert!(!probe.usable && probe.why.contains("while in use"), "{probe:?}");
    }
}

/// The fault must not wait for a device that will never answer.
#[test]
fn a_lost_device_is_noticed_at_once() {
    let start = std::time::Instant::now();
    let (_dir, gguf) = model();
    assert!(probed("device-lost-after=1", &gguf).iter().all(|(_, probe)| !probe.usable));
    assert!(start.elapsed() < Duration::from_secs(30));
}
