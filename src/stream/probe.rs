//! Which host sources a device can read from, found out by trying: import, copy, copy back, compare.
//!
//! What a driver reports does not tell. Some refuse file pages (amdgpu), some refuse and are then no
//! good for any import (NVIDIA), some accept and lose the device at the first use (i915). So every
//! source is tried on a device that is thrown away, and any error means no. The same occasion serves to
//! measure the copy queues. Results are kept in the user's cache directory: a driver, a kernel or a file
//! system that changes makes them stale.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::mountinfo;
use super::options::HostSource;
use crate::error::{Error, Result};
use crate::gguf::Gguf;
use crate::vk::{
    Arena, Buffer, CacheFile, CopyQueue, Device, DeviceInfo, DeviceOptions, Faults, HostPages,
    Instance, Lane, MemoryKind, Recorder, Region, Replay, Vendor, plan_lanes, replace_file,
};

/// Copied and compared.
const TRIED_BYTES: u64 = 4 << 20;
/// Where the trial's copy is cut in two: the alignment of tensors in a file, and no more.
const ODD_OFFSET: u64 = 3 * 32;
/// Copied at a time to measure, and how many times.
const MEASURED_BYTES: u64 = 64 << 20;
const MEASURED_COPIES: u32 = 8;
/// Smaller files tell nothing about speed, and need none.
const LEAST_MEASURED_BYTES: u64 = 16 << 20;
/// A device that takes longer than this for a few copies is no good.
const WAIT_LIMIT: Duration = Duration::from_secs(20);
/// How much faster another queue must be to overrule the table of copy queues. Where kernels run as well
/// copies cost more than they show alone (H200: 3 % faster, and prefill by a third slower).
const CLEARLY_FASTER: f64 = 1.5;

/// What a trial showed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Probe {
    /// Whether the device reads this source.
    pub usable: bool,
    /// What was done, or what went wrong: one line.
    pub why: String,
    /// Whether copy queues were to be measured.
    pub measured: bool,
    /// Speed from the source to the device by each copy queue that the device has, in GB/s.
    pub copy_gbps: Vec<(CopyQueue, f64)>,
}

/// Whether a probe measures the copy queues as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measure {
    /// No.
    Nothing,
    /// Yes, if the source works. Opens the device once for each.
    CopyQueues,
}

/// The sources in the order in which they are tried if the user does not choose; the ring, the last,
/// works everywhere.
///
/// amdgpu never imports file pages, and prefers memory of its own: it goes over imported pages at every
/// submission. Others take the file's pages: for pinning the system copies them, which several threads
/// have done ahead (H200, 16 threads: 9 GiB/s; filling an arena 4 GiB/s, the driver's memory 3 GiB/s).
pub fn ladder(info: &DeviceInfo) -> &'static [HostSource] {
    use HostSource::{Arena, Host, Mmap, Ring};
    match info.vendor {
        _ if !info.optional.external_memory_host => &[Host, Ring],
        Vendor::Amd => &[Host, Arena, Ring],
        _ => &[Mmap, Arena, Host, Ring],
    }
}

/// The copy queue to use instead of the table's: `None` unless another was clearly faster. One that
/// shares the compute lane's queue never overrules another: copies on it hold up the kernels. Where the
/// device's memory is the host's, hardly anything is copied.
pub fn overrule(info: &DeviceInfo, measured: &[(CopyQueue, f64)]) -> Option<CopyQueue> {
    if info.shares_host_memory() {
        return None;
    }
    let table = plan_lanes(info, None).ok()?;
    let is_table = |kind: CopyQueue| plan_lanes(info, Some(kind)).is_ok_and(|plan| plan == table);
    let (_, of_table) = measured.iter().find(|(kind, _)| is_table(*kind))?;
    let others = measured.iter().filter(|(kind, _)| *kind != CopyQueue::Same && !is_table(*kind));
    let (kind, gbps) = others.max_by(|a, b| a.1.total_cmp(&b.1))?;
    (*gbps > of_table * CLEARLY_FASTER).then_some(*kind)
}

/// Tries a source. Every device that it opens is gone afterwards.
pub fn probe(
    instance: &Arc<Instance>,
    info: &DeviceInfo,
    source: HostSource,
    gguf: &Gguf,
    measure: Measure,
) -> Probe {
    Trial { instance, info, source, gguf }.result(measure).0
}

/// As [`probe`], with the results of earlier runs in a file of `cache`. Nothing is kept where faults
/// are injected.
pub fn cached_probe(
    instance: &Arc<Instance>,
    info: &DeviceInfo,
    source: HostSource,
    gguf: &Gguf,
    measure: Measure,
    cache: &CacheFile,
) -> Probe {
    let kept = *instance.faults() == Faults::default();
    let directory = cache.directory().filter(|_| kept);
    let Some(directory) = directory else { return probe(instance, info, source, gguf, measure) };
    let key = Key::new(info, gguf.path());
    let path = directory.join(key.file_name());
    let mut results = Results::load(&path, &key);
    if let Some(known) = results.answer(source, worth_measuring(source, gguf, measure)) {
        return known.clone();
    }
    let (found, reason) = Trial { instance, info, source, gguf }.result(measure);
    if reason == Reason::Driver {
        results.probes.insert(source.name().to_owned(), found.clone());
        results.save(&path);
    }
    found
}

/// What a result depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reason {
    /// The driver, which answers the same again.
    Driver,
    /// This file, or what memory was free: another time it may be otherwise.
    Moment,
}

impl Reason {
    fn of(error: &Error) -> Self {
        match error {
            Error::ImportRefused { .. }
            | Error::DeviceLost(_)
            | Error::Timeout { .. }
            | Error::Vulkan { .. } => Reason::Driver,
            _ => Reason::Moment,
        }
    }
}

/// What earlier runs found out about a source, for models that lie where this one does.
pub fn known_probe(
    info: &DeviceInfo,
    source: HostSource,
    model: &Path,
    cache: &CacheFile,
) -> Option<Probe> {
    let key = Key::new(info, model);
    let path = cache.directory()?.join(key.file_name());
    Results::load(&path, &key).answer(source, Measure::Nothing).cloned()
}

/// What of a measurement can be done: the pages of a small file tell nothing, and must not pass for a
/// result where a large one lies beside it.
fn worth_measuring(source: HostSource, gguf: &Gguf, measure: Measure) -> Measure {
    let first = gguf.parts().first().and_then(|path| path.metadata().ok());
    let is_small = first.is_none_or(|file| file.len() < LEAST_MEASURED_BYTES);
    if source == HostSource::Mmap && is_small { Measure::Nothing } else { measure }
}

/// A source to try on a device.
struct Trial<'a> {
    instance: &'a Arc<Instance>,
    info: &'a DeviceInfo,
    source: HostSource,
    gguf: &'a Gguf,
}

/// A buffer of the source, and what it holds.
struct Sample {
    buffer: Buffer,
    bytes: Vec<u8>,
}

impl Trial<'_> {
    fn result(&self, measure: Measure) -> (Probe, Reason) {
        let measured = worth_measuring(self.source, self.gguf, measure) == Measure::CopyQueues;
        let (usable, why, reason) = match self.run() {
            Ok(bytes) => (true, format!("{bytes} bytes were copied and compared"), Reason::Driver),
            Err(error) => (false, error.to_string(), Reason::of(&error)),
        };
        let copy_gbps = if usable && measured { self.measure() } else { Vec::new() };
        let probe = Probe { usable, why, measured, copy_gbps };
        log::debug!("{}: {}: {probe:?}", self.info.name, self.source);
        (probe, reason)
    }

    /// Copies to the device and back; how many bytes, or what went wrong.
    fn run(&self) -> Result<u64> {
        let device = self.open(None)?;
        let Sample { buffer: from, bytes: expected } = self.sample(&device, TRIED_BYTES)?;
        let bytes = expected.len() as u64;
        let there = Buffer::new(&device, "probe.there", bytes, MemoryKind::Device)?;
        let back = Buffer::new(&device, "probe.back", bytes, MemoryKind::HostRead)?;
        let mut copy = Recorder::new(&device, Lane::Copy, "probe.copy", Replay::Once)?;
        let regions = [(0, ODD_OFFSET), (ODD_OFFSET, bytes - ODD_OFFSET)];
        let regions = regions.map(|(at, bytes)| Region { from: at, to: at, bytes });
        copy.copy_regions(&from, &there, &regions);
        copy.barrier();
        copy.copy(&there, 0, &back, 0, bytes);
        copy.host_barrier();
        let point = device.submit(Lane::Copy, &[&copy.finish()?], &[])?;
        device.wait(point, "a copy from host memory")?;
        let mut found = vec![0; expected.len()];
        back.read(0, &mut found)?;
        self.gguf.check()?;
        match found.iter().zip(&expected).position(|(found, expected)| found != expected) {
            None => Ok(bytes),
            Some(at) => Err(self.wrong_copy(at)),
        }
    }

    fn wrong_copy(&self, at: usize) -> Error {
        Error::ImportRefused {
            what: format!("{} memory (byte {at} was copied wrong)", self.source),
            result: ash::vk::Result::ERROR_UNKNOWN,
        }
    }

    /// The speed of each copy queue that the device has; those that fail are left out.
    fn measure(&self) -> Vec<(CopyQueue, f64)> {
        let there = |kind: &CopyQueue| plan_lanes(self.info, Some(*kind)).is_ok();
        let kinds = CopyQueue::ALL.into_iter().filter(there);
        kinds
            .filter_map(|kind| match self.measure_one(kind) {
                Ok(gbps) => gbps.map(|gbps| (kind, gbps)),
                Err(error) => {
                    log::debug!("{}: the copy queue {kind:?} fails: {error}", self.info.name);
                    None
                }
            })
            .collect()
    }

    /// GB/s; `None` if there is too little to copy.
    fn measure_one(&self, kind: CopyQueue) -> Result<Option<f64>> {
        let device = self.open(Some(kind))?;
        let from = self.sample(&device, MEASURED_BYTES)?.buffer;
        let bytes = from.bytes();
        if bytes < LEAST_MEASURED_BYTES {
            return Ok(None);
        }
        let to = Buffer::new(&device, "probe.there", bytes, MemoryKind::Device)?;
        let seconds_of = |copies: u32| -> Result<f64> {
            let mut run = Recorder::new(&device, Lane::Copy, "probe.measure", Replay::Once)?;
            for _ in 0..copies {
                run.copy(&from, 0, &to, 0, bytes);
                run.barrier();
            }
            let run = run.finish()?;
            let start = Instant::now();
            let point = device.submit(Lane::Copy, &[&run], &[])?;
            device.wait(point, "the measured copies")?;
            Ok(start.elapsed().as_secs_f64())
        };
        // The first pays for page tables and clocks that rise.
        seconds_of(1)?;
        let seconds = seconds_of(MEASURED_COPIES)?;
        let gbps = bytes as f64 * f64::from(MEASURED_COPIES) / seconds / 1e9;
        // No more digits than mean something, which also come back from a file as they were.
        Ok(Some((gbps * 100.0).round() / 100.0))
    }

    fn open(&self, copy_queue: Option<CopyQueue>) -> Result<Arc<Device>> {
        let options =
            DeviceOptions { copy_queue, wait_limit: Some(WAIT_LIMIT), cache: CacheFile::None };
        Device::open(self.instance, self.info, options)
    }

    /// At most `bytes` bytes of the source, and no more than the device takes at a time.
    fn sample(&self, device: &Arc<Device>, bytes: u64) -> Result<Sample> {
        let limits = &device.info().limits;
        let allocated_bytes = bytes.min(limits.allocated_buffer_bytes());
        // Without imports the limit is 0, and the import says so.
        let imported_bytes = bytes.min(limits.import_bytes());
        match self.source {
            HostSource::Mmap => {
                let pages = self.gguf.map_private(0)?;
                let bytes = imported_bytes.min(pages.bytes().len() as u64);
                pages.populate(0..bytes)?;
                imported(device, pages, bytes)
            }
            HostSource::Arena => {
                let mut arena = Arena::new("a trial of imports", imported_bytes)?;
                let to = arena.bytes_mut();
                to.copy_from_slice(&pattern(to.len()));
                imported(device, Arc::new(arena), imported_bytes)
            }
            HostSource::Host => allocated(device, MemoryKind::HostRead, allocated_bytes),
            HostSource::Ring => allocated(device, MemoryKind::Upload, allocated_bytes),
        }
    }
}

/// The first `bytes` bytes of `pages`, a multiple of every import alignment.
fn imported(device: &Arc<Device>, pages: Arc<dyn HostPages>, bytes: u64) -> Result<Sample> {
    let buffer = Buffer::import(device, "probe.pages", &pages, 0..bytes)?;
    let bytes = pages.bytes()[..bytes as usize].to_vec();
    Ok(Sample { buffer, bytes })
}

fn allocated(device: &Arc<Device>, kind: MemoryKind, bytes: u64) -> Result<Sample> {
    let bytes = pattern(bytes as usize);
    let buffer = Buffer::new(device, "probe.host", bytes.len() as u64, kind)?;
    buffer.write(0, &bytes)?;
    Ok(Sample { buffer, bytes })
}

/// Bytes of which no two pages are alike.
fn pattern(bytes: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut filled = Vec::with_capacity(bytes.next_multiple_of(8));
    while filled.len() < bytes {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        filled.extend_from_slice(&state.to_le_bytes());
    }
    filled.truncate(bytes);
    filled
}

/// What a result depends on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Key {
    vkmoe: String,
    device: String,
    device_id: (u32, u32),
    uuid: String,
    driver: String,
    driver_number: u32,
    kernel: String,
    file_system: String,
}

impl Key {
    fn new(info: &DeviceInfo, model: &Path) -> Self {
        Self {
            vkmoe: env!("CARGO_PKG_VERSION").to_owned(),
            device: info.name.clone(),
            device_id: (info.vendor.id(), info.device_id),
            uuid: info.cache_uuid(),
            driver: format!("{} {}", info.driver, info.driver_version),
            driver_number: info.driver_number,
            kernel: kernel(),
            file_system: file_system(model),
        }
    }

    /// One file for each key: `probe-<hash>.json`.
    fn file_name(&self) -> PathBuf {
        let hash = blake3::hash(format!("{self:?}").as_bytes()).to_hex();
        PathBuf::from(format!("probe-{}.json", &hash[..16]))
    }
}

/// Release of the running kernel, or the system's name.
fn kernel() -> String {
    match std::fs::read_to_string("/proc/sys/kernel/osrelease") {
        Ok(release) => release.trim().to_owned(),
        Err(_) => std::env::consts::OS.to_owned(),
    }
}

/// The type of the file system that a model lies on: `ext4`; empty if it is not known.
fn file_system(model: &Path) -> String {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mounts = mountinfo::parse(&mounts);
    let path = model.canonicalize().unwrap_or_else(|_| model.to_owned());
    mountinfo::mount_of(&mounts, &path).map(|mount| mount.kind.clone()).unwrap_or_default()
}

/// The content of a file of results.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Results {
    key: Key,
    /// By the name of the source.
    probes: BTreeMap<String, Probe>,
}

impl Results {
    /// The results in a file; none if it cannot be read, or is of another key.
    fn load(path: &Path, key: &Key) -> Self {
        let text = std::fs::read(path).unwrap_or_default();
        match serde_json::from_slice::<Results>(&text) {
            Ok(results) if results.key == *key => results,
            _ => Results { key: key.clone(), probes: BTreeMap::new() },
        }
    }

    /// A result that says what is asked.
    fn answer(&self, source: HostSource, measure: Measure) -> Option<&Probe> {
        let known = self.probes.get(source.name())?;
        let enough = measure == Measure::Nothing || known.measured || !known.usable;
        enough.then_some(known)
    }

    /// What goes wrong is only logged: the next run tries again.
    fn save(&self, path: &Path) {
        let written = serde_json::to_vec_pretty(self)
            .map_err(std::io::Error::other)
            .and_then(|text| replace_file(path, &text));
        if let Err(error) = written {
            log::info!("{}: cannot write: {error}", path.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vk::{DeviceKind, QueueFamily};
    use ash::vk::QueueFlags;

    fn device(vendor: Vendor, kind: DeviceKind) -> DeviceInfo {
        let mut info = DeviceInfo::default();
        (info.vendor, info.kind) = (vendor, kind);
        info.optional.external_memory_host = true;
        let transfer = QueueFlags::TRANSFER;
        let compute = QueueFlags::COMPUTE | transfer;
        info.queue_families = [(compute, 2), (transfer, 1)]
            .map(|(flags, count)| QueueFamily { flags, count, timestamp_bits: 64 })
            .to_vec();
        info
    }

    #[test]
    fn the_ladder_is_of_what_drivers_take() {
        use HostSource::{Arena, Host, Mmap, Ring};
        let of = |vendor, kind| ladder(&device(vendor, kind)).to_vec();
        assert_eq!(of(Vendor::Nvidia, DeviceKind::Discrete), [Mmap, Arena, Host, Ring]);
        for kind in [DeviceKind::Discrete, DeviceKind::Integrated] {
            assert_eq!(of(Vendor::Amd, kind), [Host, Arena, Ring]);
        }
        assert_eq!(of(Vendor::Intel, DeviceKind::Integrated), [Mmap, Arena, Host, Ring]);
        let mut bare = device(Vendor::Nvidia, DeviceKind::Discrete);
        bare.optional.external_memory_host = false;
        assert_eq!(ladder(&bare), [Host, Ring]);
    }

    #[test]
    fn the_table_is_overruled_only_by_a_clearly_faster_queue() {
        use CopyQueue::{Same, SecondCompute, Transfer};
        let nvidia = device(Vendor::Nvidia, DeviceKind::Discrete);
        let choose = |same, second, transfer| {
            overrule(&nvidia, &[(Same, same), (SecondCompute, second), (Transfer, transfer)])
        };
        assert_eq!(choose(51.0, 51.0, 49.4), None, "as on an H200");
        assert_eq!(choose(99.0, 49.0, 49.4), None, "the kernels' own queue");
        assert_eq!(choose(49.0, 60.0, 49.4), None);
        assert_eq!(choose(49.0, 80.0, 49.4), Some(SecondCompute));
        assert_eq!(choose(49.0, f64::NAN, 49.4), None);
        // The table has the compute lane's queue.
        let intel = device(Vendor::Intel, DeviceKind::Discrete);
        assert_eq!(overrule(&intel, &[(Same, 10.0), (Transfer, 10.4)]), None);
        assert_eq!(overrule(&intel, &[(Same, 10.0), (Transfer, 16.0)]), Some(Transfer));
        assert_eq!(overrule(&intel, &[(Transfer, 12.0)]), None);
        assert_eq!(overrule(&DeviceInfo::default(), &[(Same, 1.0), (Transfer, 2.0)]), None);
        let integrated = device(Vendor::Intel, DeviceKind::Integrated);
        assert_eq!(overrule(&integrated, &[(Same, 10.0), (Transfer, 99.0)]), None);
    }

    #[test]
    fn no_two_pages_of_the_pattern_are_alike() {
        let bytes = pattern(TRIED_BYTES as usize + 3);
        assert_eq!(bytes.len(), TRIED_BYTES as usize + 3);
        let pages: std::collections::BTreeSet<&[u8]> = bytes.chunks(4096).collect();
        assert_eq!(pages.len(), bytes.len().div_ceil(4096));
    }

    fn key(driver_number: u32) -> Key {
        let mut info = device(Vendor::Intel, DeviceKind::Discrete);
        info.driver_number = driver_number;
        Key::new(&info, Path::new("/"))
    }

    #[test]
    fn results_are_kept_for_their_key_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new").join(key(1).file_name());
        let mut results = Results::load(&path, &key(1));
        assert!(results.probes.is_empty());
        let probe = Probe {
            usable: true,
            why: "so".into(),
            measured: false,
            copy_gbps: vec![(CopyQueue::SecondCompute, 1.5)],
        };
        results.probes.insert("mmap".into(), probe.clone());
        results.save(&path);
        let again = Results::load(&path, &key(1));
        assert_eq!(again, results);
        assert_eq!(again.answer(HostSource::Mmap, Measure::Nothing), Some(&probe));
        assert_eq!(again.answer(HostSource::Mmap, Measure::CopyQueues), None);
        assert_eq!(again.answer(HostSource::Arena, Measure::Nothing), None);
        assert_ne!(key(1).file_name(), key(2).file_name());
        assert!(Results::load(&path, &key(2)).probes.is_empty(), "of another driver");
        std::fs::write(&path, "{\"key\": 7}").unwrap();
        assert!(Results::load(&path, &key(1)).probes.is_empty(), "damaged");
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_key_knows_kernel_and_file_system() {
        let key = key(1);
        assert!(!key.kernel.is_empty() && !key.file_system.is_empty(), "{key:?}");
    }
}
