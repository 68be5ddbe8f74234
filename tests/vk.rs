//! The Vulkan base: choices over made-up devices, then real work on the first device of the machine,
//! without a message of the validation layer. No device: the tests fail.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "common/vulkan.rs"]
mod vulkan;

use std::sync::Arc;
use std::time::{Duration, Instant};

use ash::vk::QueueFlags;
use glam::UVec3;
use vkmoe::Error;
use vkmoe::vk::{
    Binding, Buffer, CacheFile, Clock, CopyQueue, Device, DeviceInfo, DeviceKind, DeviceOptions,
    HostClock, Instance, InstanceOptions, Lane, MemoryKind, Pipeline, PipelineInfo, Point,
    QueryPool, QueueFamily, QueueId, Recorder, Region, Replay, Subgroups, Validation, Vendor,
    choose, plan_lanes, visible_devices,
};
use vulkan::keep_drivers;

// ---------------------------------------------------------------- choices

fn made_up(vulkan_index: usize, name: &str, missing: &[&str]) -> DeviceInfo {
    let mut info = DeviceInfo::default();
    info.vulkan_index = vulkan_index;
    info.name = name.to_owned();
    info.missing = missing.iter().map(|&name| name.to_owned()).collect();
    info
}

/// As `Instance::devices` sorts them: discrete first, so Vulkan's indices are mixed.
fn machine() -> Vec<DeviceInfo> {
    vec![
        made_up(2, "NVIDIA GeForce RTX 3060", &[]),
        made_up(0, "AMD Radeon RX 580", &["shaderInt64", "storageBuffer8BitAccess"]),
        made_up(1, "Intel(R) Arc(tm) Graphics", &[]),
    ]
}

#[test]
fn without_a_wish_the_first_usable_device_is_chosen() {
    assert_eq!(choose(&machine(), None, None).unwrap(), 0);
    assert_eq!(choose(&machine()[1..], None, None).unwrap(), 1);
}

#[test]
fn a_device_is_wanted_by_number_or_by_a_part_of_its_name() {
    assert_eq!(choose(&machine(), Some("2"), None).unwrap(), 2);
    assert_eq!(choose(&machine(), Some("arc"), None).unwrap(), 2);
    assert_eq!(choose(&machine(), Some(" geforce "), None).unwrap(), 0);
}

#[test]
fn visible_devices_are_vulkan_indices_in_their_order() {
    assert_eq!(visible_devices(&machine(), Some("1, 2")).unwrap(), [2, 0]);
    assert_eq!(visible_devices(&machine(), Some("")).unwrap(), [0, 1, 2]);
    assert_eq!(choose(&machine(), None, Some("0,1")).unwrap(), 2);
    assert_eq!(choose(&machine(), Some("1"), Some("1,2")).unwrap(), 0);
    let error = choose(&machine(), None, Some("0;1")).unwrap_err().to_string();
    assert!(error.starts_with("GGML_VK_VISIBLE_DEVICES: "), "{error}");
    let error = choose(&machine(), None, Some("7")).unwrap_err().to_string();
    assert!(error.contains("no device 7"), "{error}");
}

#[test]
fn what_a_device_lacks_is_named() {
    for wanted in [Some("1"), Some("radeon")] {
        let error = choose(&machine(), wanted, None).unwrap_err().to_string();
        assert_eq!(error, "AMD Radeon RX 580 lacks shaderInt64, storageBuffer8BitAccess");
    }
    let error = choose(&machine()[1..2], None, None).unwrap_err().to_string();
    assert!(error.contains("requirements") && error.contains("shaderInt64"), "{error}");
    let error = choose(&machine(), Some("H200"), None).unwrap_err().to_string();
    assert!(error.contains("H200") && error.contains("2 Intel(R) Arc"), "{error}");
    assert!(matches!(choose(&[], None, None), Err(Error::NoDevice(_))));
}

const ALL: QueueFlags = QueueFlags::from_raw(
    QueueFlags::GRAPHICS.as_raw() | QueueFlags::COMPUTE.as_raw() | QueueFlags::TRANSFER.as_raw(),
);
const COMPUTE: QueueFlags =
    QueueFlags::from_raw(QueueFlags::COMPUTE.as_raw() | QueueFlags::TRANSFER.as_raw());
const TRANSFER: QueueFlags =
    QueueFlags::from_raw(QueueFlags::TRANSFER.as_raw() | QueueFlags::SPARSE_BINDING.as_raw());
const VIDEO: QueueFlags =
    QueueFlags::from_raw(QueueFlags::TRANSFER.as_raw() | QueueFlags::VIDEO_DECODE_KHR.as_raw());

fn with_queues(vendor: Vendor, kind: DeviceKind, families: &[(QueueFlags, u32)]) -> DeviceInfo {
    let mut info = DeviceInfo::default();
    (info.vendor, info.kind) = (vendor, kind);
    info.queue_families = families
        .iter()
        .map(|&(flags, count)| QueueFamily { flags, count, timestamp_bits: 64 })
        .collect();
    info
}

/// Copies run beside each other where queues only copy and there are two.
#[test]
fn a_second_queue_copies_beside_the_first() {
    let beside = |vendor, families: &[_]| {
        let info = with_queues(vendor, DeviceKind::Discrete, families);
        plan_lanes(&info, None).unwrap().copy_beside
    };
    let second = QueueId { family: 1, index: 1 };
    assert_eq!(beside(Vendor::Nvidia, &[(ALL, 16), (TRANSFER, 2), (COMPUTE, 8)]), Some(second));
    assert_eq!(beside(Vendor::Nvidia, &[(ALL, 16), (TRANSFER, 1)]), None);
    assert_eq!(beside(Vendor::Amd, &[(ALL, 1), (COMPUTE, 4)]), None, "they compute");
}

/// (compute family, copy family, copy index) of the default table.
fn lanes_of(info: &DeviceInfo) -> (u32, u32, u32) {
    let plan = plan_lanes(info, None).unwrap();
    assert_eq!(plan.compute.index, 0);
    (plan.compute.family, plan.copy.family, plan.copy.index)
}

#[test]
fn the_copy_queue_follows_the_table() {
    use DeviceKind::{Cpu, Discrete, Integrated};
    let mesa = Vendor::Other(0x10005);
    let cases = [
        // NVIDIA: the pure transfer family, not a video one.
        (
            Vendor::Nvidia,
            Discrete,
            vec![(ALL, 16), (VIDEO, 1), (TRANSFER, 2), (COMPUTE, 8)],
            (3, 2, 0),
        ),
        // NVK: one family, one queue.
        (Vendor::Nvidia, Discrete, vec![(ALL, 1)], (0, 0, 0)),
        // RADV on a card: no transfer family, a second compute queue.
        (Vendor::Amd, Discrete, vec![(ALL, 1), (COMPUTE, 4)], (1, 1, 1)),
        // RADV with one compute queue: the graphics queue copies.
        (Vendor::Amd, Discrete, vec![(ALL, 1), (COMPUTE, 1)], (1, 0, 0)),
        // AMD on Windows: a transfer family.
        (Vendor::Amd, Discrete, vec![(ALL, 1), (COMPUTE, 2), (TRANSFER, 2)], (1, 2, 0)),
        (Vendor::Amd, Discrete, vec![(ALL, 1)], (0, 0, 0)),
        (Vendor::Amd, Integrated, vec![(ALL, 1), (COMPUTE, 4)], (1, 1, 0)),
        // Intel with xe: the copy engine is not used unless asked for.
        (Vendor::Intel, Discrete, vec![(ALL, 1), (COMPUTE, 1), (TRANSFER, 1)], (1, 1, 0)),
        (mesa, Cpu, vec![(ALL, 1)], (0, 0, 0)),
    ];
    for (vendor, kind, families, expected) in cases {
        let info = with_queues(vendor, kind, &families);
        assert_eq!(lanes_of(&info), expected, "{vendor:?} {kind:?} {families:?}");
    }
}

#[test]
fn an_override_beats_the_table_or_is_refused() {
    let families = [(ALL, 1), (COMPUTE, 2), (TRANSFER, 1)];
    let info = with_queues(Vendor::Intel, DeviceKind::Discrete, &families);
    let copy = |wanted| plan_lanes(&info, Some(wanted)).unwrap().copy;
    assert_eq!(copy(CopyQueue::Same), QueueId { family: 1, index: 0 });
    assert_eq!(copy(CopyQueue::SecondCompute), QueueId { family: 1, index: 1 });
    assert_eq!(copy(CopyQueue::Transfer), QueueId { family: 2, index: 0 });
    let small = with_queues(Vendor::Intel, DeviceKind::Integrated, &[(ALL, 1)]);
    let refused = |kind| plan_lanes(&small, Some(kind)).unwrap_err().to_string();
    assert!(refused(CopyQueue::Transfer).starts_with("--copy-queue: transfer: "));
    assert!(refused(CopyQueue::SecondCompute).starts_with("--copy-queue: compute: "));
    let none = with_queues(Vendor::Intel, DeviceKind::Other, &[(TRANSFER, 1)]);
    assert!(matches!(plan_lanes(&none, None), Err(Error::NoDevice(_))));
}

// ---------------------------------------------------------------- a real device

fn open(validation: Validation, cache: CacheFile) -> Arc<Device> {
    keep_drivers();
    let instance = Arc::new(Instance::new(InstanceOptions { validation }).unwrap());
    let devices = instance.devices().unwrap();
    let index = choose(&devices, None, None).unwrap();
    let options = DeviceOptions { cache, ..DeviceOptions::default() };
    Device::open(&instance, &devices[index], options).unwrap()
}

fn bytes(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

fn read_words(buffer: &Buffer) -> Vec<u32> {
    let mut data = vec![0; buffer.bytes() as usize];
    buffer.read(0, &mut data).unwrap();
    data.chunks_exact(4).map(|word| u32::from_ne_bytes(word.try_into().unwrap())).collect()
}

fn scale_spirv() -> Vec<u32> {
    include_bytes!("fixtures/scale.spv")
        .chunks_exact(4)
        .map(|word| u32::from_le_bytes(word.try_into().unwrap()))
        .collect()
}

/// `target[i] = source[i] · 3 + 5`
fn scale_pipeline(device: &Arc<Device>) -> Pipeline {
    let info = PipelineInfo {
        name: "test.scale",
        spirv: &scale_spirv(),
        n_bindings: 1,
        push_bytes: 12,
        spec: &[3, 5],
        subgroups: Subgroups::FullOf(device.info().subgroup.default),
    };
    Pipeline::new(device, &info).unwrap()
}

fn scale_push(source: &Buffer, n: u32) -> Vec<u8> {
    [source.address().to_ne_bytes().as_slice(), &n.to_ne_bytes()].concat()
}

const N: u32 = 1000;
/// Workgroups of 32.
const GROUPS: u32 = N.div_ceil(32);

/// Host → staging → copy lane → device → compute lane (a kernel in two halves, then a copy) → host.
/// The compute commands are submitted twice.
fn round_trip(device: &Arc<Device>) {
    let size = u64::from(N) * 4;
    let buffer = |name, kind| Buffer::new(device, name, size, kind).unwrap();
    let staging = buffer("test.staging", MemoryKind::Upload);
    let source = buffer("test.source", MemoryKind::Device);
    let target = buffer("test.target", MemoryKind::Device);
    let result = buffer("test.result", MemoryKind::HostRead);
    let pipeline = scale_pipeline(device);
    let pool = QueryPool::new(device, Lane::Compute, "test.timestamps", 2).unwrap();

    let mut upload = Recorder::new(device, Lane::Copy, "test.upload", Replay::Many).unwrap();
    let half = size / 8 * 4;
    let regions = [
        Region { from: 0, to: 0, bytes: half },
        Region { from: half, to: half, bytes: size - half },
    ];
    upload.copy_regions(&staging, &source, &regions);
    let upload = upload.finish().unwrap();

    let mut run = Recorder::new(device, Lane::Compute, "test.run", Replay::Many).unwrap();
    run.reset_timestamps(&pool, 0..2);
    run.write_timestamp(&pool, 0);
    run.barrier();
    run.fill(&target, 0..size, 7);
    run.barrier();
    run.keep(&source);
    let push = scale_push(&source, N);
    let first = GROUPS / 2;
    run.label("halves", |run| {
        for (base, groups) in [(0, first), (first, GROUPS - first)] {
            let (groups, base) = (UVec3::new(groups, 1, 1), UVec3::new(base, 0, 0));
            run.dispatch(&pipeline, &push, &[Binding::from(&target)], groups, base);
            run.barrier();
        }
    });
    run.copy(&target, 0, &result, 0, size);
    run.host_barrier();
    run.write_timestamp(&pool, 1);
    let run = run.finish().unwrap();

    let mut done: Option<Point> = None;
    for round in 0..2u32 {
        let words: Vec<u32> = (0..N).map(|i| i * 10 + round).collect();
        staging.write(0, &bytes(&words)).unwrap();
        let filled = device.submit(Lane::Copy, &[&upload], done.as_slice()).unwrap();
        let point = device.submit(Lane::Compute, &[&run], &[filled]).unwrap();
        assert_eq!((filled.value, point.value), (u64::from(round) + 1, u64::from(round) + 1));
        device.wait(point, "the round trip").unwrap();
        let expected: Vec<u32> = words.iter().map(|word| word * 3 + 5).collect();
        let found = read_words(&result);
        let wrong = (0..N as usize).find(|&i| found[i] != expected[i]);
        if let Some(i) = wrong {
            let report = device.instance().validation_report();
            panic!("round {round}: word {i} is {}, not {}; {report:#?}", found[i], expected[i]);
        }
        done = Some(point);
    }
    let times = pool.read_ns(0..2).unwrap();
    assert!(times[0] == 0 && times[1] < 60_000_000_000, "{times:?}");
}

/// Everything is dropped right after the submission, while the device works.
fn drop_in_flight(device: &Arc<Device>) {
    let size = 1 << 20;
    let from = Buffer::new(device, "test.from", size, MemoryKind::Device).unwrap();
    let to = Buffer::new(device, "test.to", size, MemoryKind::HostRead).unwrap();
    let mut copy = Recorder::new(device, Lane::Compute, "test.fleeting", Replay::Once).unwrap();
    copy.fill(&from, 0..size, 42);
    copy.barrier();
    copy.copy(&from, 0, &to, 0, size);
    copy.host_barrier();
    let point = device.submit(Lane::Compute, &[&copy.finish().unwrap()], &[]).unwrap();
    drop(from);
    device.wait(point, "the fleeting copy").unwrap();
    assert!(read_words(&to).iter().all(|&word| word == 42));
}

/// Timestamps around a fill on a lane that can take them: (pool, the fill's point).
fn timed_fill(device: &Arc<Device>, lane: Lane, waits: &[Point]) -> (QueryPool, Point) {
    let size = 4 << 20;
    let buffer = Buffer::new(device, "test.timed", size, MemoryKind::Device).unwrap();
    let pool = QueryPool::new(device, lane, "test.clock", 2).unwrap();
    let mut fill = Recorder::new(device, lane, "test.timed", Replay::Once).unwrap();
    fill.write_timestamp(&pool, 0);
    fill.fill(&buffer, 0..size, 7);
    fill.write_timestamp(&pool, 1);
    let point = device.submit(lane, &[&fill.finish().unwrap()], waits).unwrap();
    (pool, point)
}

/// Work of both lanes, one after the other, lies in that order between the host's instants.
fn one_clock(device: &Arc<Device>) {
    let calibration = device.calibration().unwrap();
    let can = device.info().optional.calibrated_timestamps;
    assert_eq!(calibration.is_some(), can, "{:?}", device.info().name);
    let before = Instant::now();
    let (compute, computed) = timed_fill(device, Lane::Compute, &[]);
    let (copy, copied) = timed_fill(device, Lane::Copy, &[computed]);
    device.wait(copied, "the timed fills").unwrap();
    let after = Instant::now();

    let ticks = [&compute, &copy].map(|pool| pool.read_ticks(0..2).unwrap());
    for (pool, ticks) in [&compute, &copy].into_iter().zip(&ticks) {
        let between_ns = pool.tick_format().ns_between(ticks[0], ticks[1]);
        assert_eq!(pool.read_ns(0..2).unwrap(), [0, between_ns]);
        assert!(ticks.iter().all(|tick| tick & !pool.tick_format().mask == 0), "{ticks:?}");
    }
    let clock = |pool: &QueryPool| match &calibration {
        Some(calibration) => Clock::new(calibration, pool.tick_format()),
        None => Clock::uncalibrated(ticks[0][0], pool.tick_format()),
    };
    let times_ns: Vec<u64> = [&compute, &copy]
        .into_iter()
        .zip(&ticks)
        .flat_map(|(pool, ticks)| {
            ticks.iter().map(|&tick| clock(pool).to_ns(tick)).collect::<Vec<_>>()
        })
        .collect();
    assert!(times_ns.is_sorted(), "{times_ns:?}");
    let Some(calibration) = calibration else { return };
    assert!(calibration.deviation_ns < 10_000_000, "{calibration:?}");
    let host = HostClock::new(&calibration);
    let (early_ns, late_ns) = (host.to_ns(before), host.to_ns(after));
    // Clocks drift by some 20 µs a second.
    let slack_ns = calibration.deviation_ns + (late_ns - early_ns) / 10_000;
    assert!(early_ns <= times_ns[0] + slack_ns, "{early_ns} {times_ns:?} {calibration:?}");
    assert!(times_ns[3] <= late_ns + slack_ns, "{late_ns} {times_ns:?} {calibration:?}");
}

#[test]
fn the_lanes_and_the_host_share_a_clock() {
    one_clock(&open(Validation::Off, CacheFile::None));
}

#[test]
fn calibrations_agree_with_each_other() {
    let device = open(Validation::Off, CacheFile::None);
    let Some(first) = device.calibration().unwrap() else { return };
    std::thread::sleep(Duration::from_millis(50));
    let second = device.calibration().unwrap().unwrap();
    let pool = QueryPool::new(&device, Lane::Compute, "test.clock", 1).unwrap();
    let seen_ns = Clock::new(&first, pool.tick_format()).to_ns(second.ticks);
    let slack_ns = first.deviation_ns + second.deviation_ns + 50_000;
    assert!(seen_ns.abs_diff(second.host_ns) <= slack_ns, "{first:?} {second:?}");
    let host_ns = HostClock::new(&first).to_ns(second.instant);
    assert!(host_ns.abs_diff(second.host_ns) <= slack_ns, "{first:?} {second:?}");
    assert!(second.host_ns - first.host_ns >= 50_000_000, "{first:?} {second:?}");
}

fn without_messages(validation: Validation) {
    let device = open(validation, CacheFile::None);
    let instance = device.instance().clone();
    round_trip(&device);
    one_clock(&device);
    drop_in_flight(&device);
    drop(device);
    assert_eq!(instance.validation_messages(), 0, "{:#?}", instance.validation_report());
}

#[test]
fn core_validation_finds_nothing() {
    without_messages(Validation::Core);
}

#[test]
fn synchronization_validation_finds_nothing() {
    without_messages(Validation::Sync);
}

#[test]
fn gpu_assisted_validation_finds_nothing() {
    if gpu_assisted_works() {
        without_messages(Validation::GpuAssisted);
    }
}

/// Whether the layer is new enough; an old one must be refused in words.
fn gpu_assisted_works() -> bool {
    keep_drivers();
    match Instance::new(InstanceOptions { validation: Validation::GpuAssisted }) {
        Ok(_) => true,
        Err(Error::Usage { problem, .. }) if problem.contains("from 1.3.296 on") => false,
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn an_access_outside_a_buffer_is_counted() {
    if !gpu_assisted_works() {
        return;
    }
    let device = open(Validation::GpuAssisted, CacheFile::None);
    let buffer = |name, bytes| Buffer::new(&device, name, bytes, MemoryKind::Device).unwrap();
    let (source, target) = (buffer("test.source", 64), buffer("test.target", 4096));
    let pipeline = scale_pipeline(&device);
    let mut run = Recorder::new(&device, Lane::Compute, "test.outside", Replay::Once).unwrap();
    run.keep(&source);
    // Far away: the neighbours of a buffer belong to other buffers, which the layer lets pass.
    let mut push = scale_push(&source, N);
    push[..8].copy_from_slice(&4096u64.to_ne_bytes());
    run.dispatch(&pipeline, &push, &[Binding::from(&target)], UVec3::ONE, UVec3::ZERO);
    // The layer looks into what its code in the kernel noted some time after the wait.
    let run = run.finish().unwrap();
    let point = device.submit(Lane::Compute, &[&run], &[]).unwrap();
    device.wait(point, "the kernel").unwrap();
    let is_reported = || {
        let report = device.instance().validation_report();
        report.iter().any(|text| text.contains("out of bounds"))
    };
    let limit = Instant::now() + Duration::from_secs(10);
    while !is_reported() && Instant::now() < limit {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(is_reported(), "{:#?}", device.instance().validation_report());
}

/// The three tests above mean something only if a mistake is counted.
#[test]
fn a_missing_barrier_is_counted() {
    let device = open(Validation::Sync, CacheFile::None);
    let buffer = Buffer::new(&device, "test.hazard", 64, MemoryKind::Device).unwrap();
    let mut fills = Recorder::new(&device, Lane::Compute, "test.hazard", Replay::Once).unwrap();
    fills.fill(&buffer, 0..64, 1);
    fills.fill(&buffer, 0..64, 2);
    let report = device.instance().validation_report();
    assert!(device.instance().validation_messages() > 0);
    assert!(report.iter().any(|text| text.contains("HAZARD")), "{report:#?}");
}

#[test]
fn a_wait_that_runs_out_names_what_it_waited_for() {
    let device = open(Validation::Off, CacheFile::None);
    let never = Point { lane: Lane::Copy, value: 1 };
    let error = device.wait_within(never, "expert 3 of layer 7", Duration::from_millis(20));
    let error = error.unwrap_err().to_string();
    assert_eq!(error, "the device did not finish expert 3 of layer 7 within 20 ms");
}

#[test]
fn memory_that_is_not_there_is_refused_by_name() {
    let device = open(Validation::Off, CacheFile::None);
    let heaps = device.memory_budget();
    assert!(heaps.iter().all(|heap| heap.bytes > 0 && heap.budget_bytes > 0), "{heaps:?}");
    // More than all memory, and (where one buffer may be so large) just more than the budget.
    let all: u64 = heaps.iter().map(|heap| heap.bytes).sum();
    let left = heaps.iter().map(|heap| heap.budget_bytes.saturating_sub(heap.usage_bytes)).max();
    for bytes in [all * 2, left.unwrap() + (64 << 20)] {
        match Buffer::new(&device, "kv.k", bytes, MemoryKind::Device).err() {
            Some(Error::OutOfMemory { what, needed_bytes, .. }) => {
                assert!(what.contains("kv.k") && needed_bytes == bytes, "{what}");
            }
            other => panic!("{bytes} bytes: {other:?}"),
        }
    }
}

#[test]
fn the_pipeline_cache_is_kept_and_a_damaged_one_is_ignored() {
    let directory = tempfile::tempdir().unwrap();
    let cache = || CacheFile::In(directory.path().join("new"));
    let file = || {
        let entries: Vec<_> = std::fs::read_dir(directory.path().join("new")).unwrap().collect();
        assert_eq!(entries.len(), 1, "{entries:?}");
        entries.into_iter().next().unwrap().unwrap().path()
    };
    let run = || {
        let device = open(Validation::Core, cache());
        scale_pipeline(&device);
        assert_eq!(device.instance().validation_messages(), 0);
    };
    run();
    let name = file().file_name().unwrap().to_string_lossy().into_owned();
    assert!(name.starts_with("pipelines-") && name.ends_with(".bin"), "{name}");
    let good = std::fs::read(file()).unwrap();
    run();
    let mut damaged = good.clone();
    *damaged.last_mut().unwrap() ^= 1;
    for bad in [damaged, good[..good.len() / 2].to_vec(), Vec::new()] {
        std::fs::write(file(), bad).unwrap();
        run();
        assert_eq!(std::fs::read(file()).unwrap().len(), good.len());
    }
}

#[test]
fn a_subgroup_size_that_the_device_lacks_is_refused() {
    let device = open(Validation::Off, CacheFile::None);
    let spirv = scale_spirv();
    let info = PipelineInfo {
        name: "test.wide",
        spirv: &spirv,
        n_bindings: 1,
        push_bytes: 12,
        subgroups: Subgroups::FullOf(1024),
        ..PipelineInfo::default()
    };
    let error = Pipeline::new(&device, &info).err().unwrap().to_string();
    assert!(error.contains("test.wide") && error.contains("1024"), "{error}");
}
