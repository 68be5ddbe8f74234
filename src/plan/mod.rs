//! What lives where: pure arithmetic over sizes and a budget, no Vulkan type, no clock.
//!
//! Everything goes into device memory if it fits. If not, the experts of the first layers stay in
//! host memory, as few layers as possible; what the user fixes stays where the user put it.
//!
//! Reading order: the words below; [`options`] is what the user may ask for, [`overrides`] the
//! syntax of `--override-tensor`, `place` decides by what `predict` says, `cache` sizes the expert cache,
//! [`usage`] adds up what a plan uses for tables and bars.

pub mod options;
pub mod overrides;
mod cache;
mod place;
mod predict;
pub mod usage;

pub use options::{CpuMoe, GpuLayers, PlacementOptions};
pub use overrides::{Override, Overrides};
pub use place::{SLOT_SLACK_BYTES, place};
pub use predict::{Prediction, Rates};

use std::fmt;

/// Where a weight lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// Device-local memory.
    Device,
    /// Host memory that kernels read directly.
    Host,
}

impl Place {
    /// As on the command line: `VRAM` or `HOST`.
    pub fn name(self) -> &'static str {
        match self {
            Place::Device => "VRAM",
            Place::Host => "HOST",
        }
    }
}

/// Bytes that are needed beside the weights.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Needs {
    /// KV cache of the session.
    pub kv_bytes: u64,
    /// Activations of a ubatch.
    pub scratch_bytes: u64,
    /// Gaps between weights and behind them, at most.
    pub packing_bytes: u64,
    /// Left free for the driver, the desktop and other programs.
    pub margin_bytes: u64,
    /// Batches that go through the model layer by layer.
    pub batch: BatchNeeds,
    /// How fast everything is.
    pub rates: Rates,
}

/// What batches of several ubatches need, if they go through the model layer by layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchNeeds {
    /// Tokens of a ubatch.
    pub n_ubatch: u32,
    /// `-b`: tokens of a batch, whole ubatches; `None`: the plan chooses.
    pub n_batch: Option<u32>,
    /// No batch has more tokens: ubatches that hold the context, or as many as a buffer can hold.
    pub n_max: u32,
    /// What each ubatch keeps from layer to layer.
    pub ubatch_bytes: u64,
}

impl BatchNeeds {
    /// Bytes of a batch.
    pub fn bytes(&self, n_batch: u32) -> u64 {
        let n_ubatches = n_batch.div_ceil(self.n_ubatch.max(1));
        if n_ubatches > 1 { u64::from(n_ubatches) * self.ubatch_bytes } else { 0 }
    }
}

/// Whose memory the device's is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sharing {
    /// A card's own.
    #[default]
    None,
    /// The host's, but Vulkan has a heap for either side.
    Chips,
    /// The host's, and both sides allocate from one heap.
    Heap,
}

/// Bytes that are there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Budget {
    /// Free device-local memory, or what the user allows of it.
    pub device_bytes: u64,
    /// Free host memory that the device can read. With [`Sharing::Heap`] all that is free: what is
    /// used as device memory comes out of it.
    pub host_bytes: u64,
    /// Whose memory the device's is.
    pub sharing: Sharing,
}

/// A decided placement.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// By weight.
    pub places: Vec<Place>,
    /// Layers with experts in host memory.
    pub n_host_layers: u32,
    /// Weights in device memory.
    pub device_weight_bytes: u64,
    /// Weights in host memory.
    pub host_weight_bytes: u64,
    /// Staging slots in device memory; 0 if no experts are in host memory.
    pub n_slots: u32,
    /// One slot: the largest expert tensor in host memory and [`SLOT_SLACK_BYTES`]; 0 without slots.
    pub slot_bytes: u64,
    /// Tokens that go through the model layer by layer, whole ubatches; one ubatch: none do.
    pub n_batch: u32,
    /// Device memory for experts in host memory that are used often, at most.
    pub cache_bytes: u64,
    /// More was asked for, and would have been of use.
    pub cache_is_short: bool,
    /// What else is needed.
    pub needs: Needs,
    /// How long it takes, if experts are in host memory.
    pub prediction: Option<Prediction>,
    /// The best plan with other layers in host memory or other slots, if there is one.
    pub runner_up: Option<RunnerUp>,
}

/// A plan that was not chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RunnerUp {
    /// As in [`Plan`].
    pub n_host_layers: u32,
    /// As in [`Plan`].
    pub n_slots: u32,
    /// As in [`Plan`].
    pub n_batch: u32,
    /// How long it would take.
    pub prediction: Prediction,
}

impl Plan {
    /// All staging slots.
    pub fn slots_bytes(&self) -> u64 {
        u64::from(self.n_slots) * self.slot_bytes
    }

    /// Device memory in use when everything is loaded; the margin is not in it.
    pub fn device_bytes(&self) -> u64 {
        let n = &self.needs;
        let beside = n.kv_bytes + n.scratch_bytes + n.packing_bytes;
        let streaming = self.slots_bytes() + self.batch_bytes() + self.cache_bytes;
        self.device_weight_bytes + streaming + beside
    }

    /// What a batch keeps from layer to layer.
    pub fn batch_bytes(&self) -> u64 {
        self.needs.batch.bytes(self.n_batch)
    }

    /// The batch that was asked for, if it is not the plan's.
    pub fn refused_batch(&self) -> Option<u32> {
        self.prediction.and(self.needs.batch.n_batch).filter(|&n| n > self.n_batch)
    }

    /// What the choice between slots, batch and layers came to, in words; and the next best.
    pub fn choice(&self) -> Vec<String> {
        let runner_up = self.runner_up.map(|other| {
            let RunnerUp { n_host_layers, n_slots, n_batch, prediction } = other;
            let times = prediction.times();
            format!("{n_host_layers} layers on the host, {n_slots} slots, batch {n_batch}: {times}")
        });
        self.prediction.map(|p| format!("predicted: {p}")).into_iter().chain(runner_up).collect()
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "device memory {} (weights {}, KV cache {}, activations {}, {} staging slots {}",
            Bytes(self.device_bytes()),
            Bytes(self.device_weight_bytes),
            Bytes(self.needs.kv_bytes),
            Bytes(self.needs.scratch_bytes),
            self.n_slots,
            Bytes(self.slots_bytes()),
        )?;
        if self.batch_bytes() > 0 {
            let bytes = Bytes(self.batch_bytes());
            write!(f, ", residual stream of {} tokens {bytes}", self.n_batch)?;
        }
        if self.cache_bytes > 0 {
            write!(f, ", expert cache {}", Bytes(self.cache_bytes))?;
        }
        write!(f, "), host memory {}", Bytes(self.host_weight_bytes))?;
        match self.n_host_layers {
            0 => {}
            n => write!(f, " (experts of {n} layers)")?,
        }
        self.choice().iter().try_for_each(|line| write!(f, "; {line}"))
    }
}

/// A byte count as people read it: `17.3 GiB`.
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = ["B", "KiB", "MiB", "GiB", "TiB"];
        let mut value = self.0 as f64;
        let mut unit = 0;
        while value >= 1024.0 && unit + 1 < units.len() {
            value /= 1024.0;
            unit += 1;
        }
        let decimals = usize::from(unit > 0);
        write!(f, "{value:.decimals$} {}", units[unit])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_well() {
        assert_eq!(Bytes(512).to_string(), "512 B");
        assert_eq!(Bytes(18_576_000_000).to_string(), "17.3 GiB");
    }
}
