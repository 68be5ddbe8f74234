//! Sets streaming up for a loaded model: which host source works, which queue copies, how much is
//! pinned.

use super::chaos::Chaos;
use super::host_tensor::HostTensor;
use super::memory_facts::MemoryFacts;
use super::options::{HostSource, StreamOptions};
use super::pin_budget::pin_budget;
use super::pins::{PinJob, Pins};
use super::probe::{Measure, Probe, cached_probe, ladder, overrule};
use super::ring;
use super::streamer::{Streamer, StreamerParts};
use crate::error::{Error, Result};
use crate::gguf::Gguf;
use crate::progress;
use crate::vk::{CacheFile, CopyQueue, Device, plan_lanes};
use std::sync::Arc;

/// How experts get to the device.
#[derive(Clone, Debug)]
pub struct Route {
    /// Where from.
    pub source: HostSource,
    /// Where the copy lane runs; `None`: where the device has it.
    pub copy_queue: Option<CopyQueue>,
    /// Speed of the bus, if it was measured.
    pub link_gbps: Option<f64>,
}

/// Chooses the host source: the user's, or the first of the ladder that passes a trial on a device of
/// its own.
pub fn route(device: &Device, gguf: &Gguf, options: &StreamOptions) -> Result<Route> {
    let info = device.info();
    let measure = match options.copy_queue.is_none() && !info.shares_host_memory() {
        true => Measure::CopyQueues,
        false => Measure::Nothing,
    };
    let cache = CacheFile::User;
    let tried = |source| cached_probe(device.instance(), info, source, gguf, measure, &cache);
    let chosen = |source, probe: &Probe| {
        let copy_queue = options.copy_queue.or_else(|| overrule(info, &probe.copy_gbps));
        let plan = plan_lanes(info, copy_queue)?;
        let is_used = |kind| plan_lanes(info, Some(kind)).is_ok_and(|other| other == plan);
        let used = probe.copy_gbps.iter().find(|(kind, _)| is_used(*kind));
        log::info!("host source {source}: {}; copy queues {:?}", probe.why, probe.copy_gbps);
        Ok(Route { source, copy_queue, link_gbps: used.map(|(_, gbps)| *gbps) })
    };
    if let Some(source) = options.host_source {
        let probe = tried(source);
        return match probe.usable {
            true => chosen(source, &probe),
            false => {
                let problem = format!("{}; without the flag one that works is chosen", probe.why);
                Err(Error::usage(format!("--host-source {source}"), problem))
            }
        };
    }
    for &source in ladder(info) {
        let probe = tried(source);
        if probe.usable {
            return chosen(source, &probe);
        }
        log::info!("host source {source} does not work here: {}", probe.why);
    }
    Ok(Route { source: HostSource::Ring, copy_queue: options.copy_queue, link_gbps: None })
}

/// What there is to stream.
pub struct StreamJob {
    /// On this device.
    pub device: Arc<Device>,
    /// From this file.
    pub gguf: Arc<Gguf>,
    /// These tensors, in the order of use.
    pub tensors: Vec<HostTensor>,
    /// Experts that a token uses.
    pub n_used: u32,
    /// Slots that the plan has room for.
    pub n_slots: u32,
    /// Device memory that the plan has for the expert cache.
    pub cache_bytes: u64,
    /// Device memory that the plan names and that is not allocated yet, slots included.
    pub planned_bytes: u64,
}

/// Begins to pin the host source, and makes the streamer.
pub fn open(job: StreamJob, route: &Route, options: &StreamOptions) -> Result<Streamer> {
    let info = job.device.info();
    let planned_bytes = if info.shares_host_memory() { job.planned_bytes } else { 0 };
    let facts = MemoryFacts::now(&job.device.memory_budget()).after(planned_bytes);
    let total_bytes = job.tensors.iter().map(|t| t.file.bytes()).sum();
    let free_bytes = pin_budget(&facts, info, HostSource::Ring, None).bytes;
    let ring = ring::layout(total_bytes, free_bytes, info.limits.allocated_buffer_bytes());
    // Also if all gets pinned: until then what is not yet goes through the ring.
    let facts = facts.after(ring.bytes());
    let pins = match route.source {
        HostSource::Ring => None,
        source => Some(Pins::start(PinJob {
            device: job.device.clone(),
            gguf: job.gguf.clone(),
            source,
            tensors: job.tensors.clone(),
            budget: pin_budget(&facts, info, source, options.pin_max_bytes),
            memlock_bytes: facts.memlock_bytes,
            bar: progress::bytes_bar("pinning", total_bytes),
        })?),
    };
    Streamer::new(StreamerParts {
        device: job.device,
        gguf: job.gguf,
        tensors: job.tensors,
        n_used: job.n_used,
        n_slots: job.n_slots,
        cache_bytes: job.cache_bytes,
        pins,
        ring,
        link_gbps: route.link_gbps,
        chaos: options.chaos.map(Chaos::new),
    })
}
