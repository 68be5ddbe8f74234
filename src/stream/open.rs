//! Sets streaming up for a loaded model: which host source, how much of it is pinned.

use super::chaos::Chaos;
use super::host_tensor::HostTensor;
use super::options::{HostSource, StreamOptions};
use super::pin_budget::PinBudget;
use super::pins::{PinJob, Pins};
use super::streamer::{Streamer, StreamerParts};
use crate::error::Result;
use crate::gguf::Gguf;
use crate::progress;
use crate::vk::Device;
use std::sync::Arc;

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
}

/// Begins to pin the host source, and makes the streamer; `None` where nothing stays on the host.
pub fn open(job: StreamJob, options: &StreamOptions) -> Result<Option<Streamer>> {
    if job.tensors.is_empty() {
        return Ok(None);
    }
    let source = options.host_source.unwrap_or(HostSource::Host);
    let total_bytes = job.tensors.iter().map(|t| t.file.bytes()).sum();
    let budget = PinBudget {
        bytes: options.pin_max_bytes.unwrap_or(u64::MAX),
        limited_by: "--pin-max-mib".into(),
    };
    let pins = match source {
        HostSource::Ring => None,
        source => Some(Pins::start(PinJob {
            device: job.device.clone(),
            gguf: job.gguf.clone(),
            source,
            tensors: job.tensors.clone(),
            budget,
            bar: progress::bytes_bar("pinning", total_bytes),
        })?),
    };
    Streamer::new(StreamerParts {
        device: job.device,
        gguf: job.gguf,
        tensors: job.tensors,
        n_used: job.n_used,
        n_slots: job.n_slots,
        pins,
        free_host_bytes: 8 << 30,
        chaos: options.chaos.map(Chaos::new),
    })
    .map(Some)
}
