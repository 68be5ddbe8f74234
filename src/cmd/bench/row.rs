//! A row of the result: a case, its model and device, and the figures. Field names are llama-bench's
//! where it has the field.

use super::cases::Case;
use super::measure::Measured;
use crate::engine::Engine;
use crate::gguf::Gguf;
use crate::plan::Bytes;
use crate::stream::options::{CacheSize, SlotCount};
use serde_json::{Value, json};
use std::time::Duration;

/// One measured case.
#[derive(Clone, Debug)]
pub(super) struct Row {
    pub(super) case: Case,
    pub(super) model: ModelInfo,
    /// Name of the device.
    pub(super) gpu: String,
    /// Tokens of a batch, as asked for or as planned.
    pub(super) n_batch: u32,
    pub(super) measured: Measured,
    /// Sizes of kernels, if several are compared.
    pub(super) sizes: Option<String>,
    /// When it was measured, RFC 3339.
    pub(super) time: String,
}

/// What rows say of a model.
#[derive(Clone, Debug, Default)]
pub(super) struct ModelInfo {
    pub(super) file: String,
    /// `qwen3moe 30B.A3B Q4_K - Medium`
    pub(super) description: String,
    pub(super) bytes: u64,
    pub(super) n_params: u64,
}

impl Row {
    /// Of a case that was measured just now.
    pub(super) fn new(case: &Case, engine: &Engine, measured: Measured) -> Row {
        Row {
            case: case.clone(),
            model: ModelInfo::of(engine.gguf()),
            gpu: engine.device().info().name.clone(),
            n_batch: case.load.n_batch.unwrap_or(engine.plan().n_batch),
            measured,
            sizes: None,
            time: jiff::Timestamp::now().strftime("%FT%TZ").to_string(),
        }
    }

    /// Tokens per second of each repetition.
    pub(super) fn rates(&self) -> Vec<f64> {
        let n = f64::from(self.case.test.n_timed());
        self.measured.samples.iter().map(|t| n / t.as_secs_f64().max(1e-9)).collect()
    }

    /// GiB copied to the device, per repetition.
    pub(super) fn streamed_gib(&self) -> f64 {
        self.per_repetition(self.measured.stats.streamed_bytes) / (1u64 << 30) as f64
    }

    /// What the expert cache did, per repetition: `75 %, 12, 1.5 MiB`.
    pub(super) fn cached(&self) -> String {
        let stats = &self.measured.stats;
        let [evictions, promoted] =
            [stats.cache_evictions, stats.promoted_bytes].map(|n| self.per_repetition(n));
        let of = |hits| {
            format!("{:.0} %, {evictions:.0}, {}", 100.0 * hits, Bytes(promoted.round() as u64))
        };
        stats.hit_share().map_or_else(|| "-".to_owned(), of)
    }

    fn per_repetition(&self, sum: u64) -> f64 {
        sum as f64 / self.measured.samples.len().max(1) as f64
    }

    /// All fields with their values; absent figures are null. The order and the names are the same for
    /// every row.
    pub(super) fn fields(&self) -> Vec<(&'static str, Value)> {
        let Row { case, model, measured, .. } = self;
        let (load, test, stats) = (&case.load, case.test, measured.stats);
        let (rates, times) = (self.rates(), nanoseconds(&measured.samples));
        let bound = stats.bound();
        let overrides = match load.overrides.0.is_empty() {
            true => "none".to_owned(),
            false => load.overrides.to_string(),
        };
        vec![
            ("build_version", json!(env!("CARGO_PKG_VERSION"))),
            ("gpu_info", json!(self.gpu)),
            ("backends", json!("Vulkan")),
            ("model_filename", json!(model.file)),
            ("model_type", json!(model.description)),
            ("model_size", json!(model.bytes)),
            ("model_n_params", json!(model.n_params)),
            ("n_batch", json!(self.n_batch)),
            ("n_ubatch", json!(case.n_ubatch)),
            ("type_k", json!(load.type_k.to_string())),
            ("type_v", json!(load.type_v.to_string())),
            ("n_gpu_layers", json!(load.gpu_layers.number())),
            ("n_cpu_moe", json!(load.n_cpu_moe)),
            ("devices", json!(load.device.as_deref().unwrap_or("auto"))),
            ("tensor_buft_overrides", json!(overrides)),
            ("host_source", json!(load.host_source.map_or("auto", |source| source.name()))),
            ("copy_queue", json!(load.copy_queue.map_or("auto", |queue| queue.name()))),
            ("prefetch_experts_slots", json!(slots(load.slots))),
            ("expert_cache_mib", json!(cache(load.expert_cache))),
            ("vram_limit_mib", json!(load.vram_limit_mib)),
            ("n_prompt", json!(test.n_prompt)),
            ("n_gen", json!(test.n_gen)),
            ("n_depth", json!(test.n_depth)),
            ("test_time", json!(self.time)),
            ("avg_ns", json!(average(&times).round() as u64)),
            ("stddev_ns", json!(deviation(&times).round() as u64)),
            ("avg_ts", json!(average(&rates))),
            ("stddev_ts", json!(deviation(&rates))),
            ("streamed_bytes", json!(self.per_repetition(stats.streamed_bytes).round() as u64)),
            ("direct_bytes", json!(self.per_repetition(stats.direct_bytes).round() as u64)),
            ("link_gbps", json!(stats.link_gbps())),
            ("hidden_share", json!(stats.hidden_share())),
            ("cache_hit_share", json!(stats.hit_share())),
            ("cache_evictions", json!(self.per_repetition(stats.cache_evictions))),
            ("promoted_bytes", json!(self.per_repetition(stats.promoted_bytes).round() as u64)),
            ("bound", json!(bound.map(|bound| bound.name()))),
            ("bound_share", json!(bound.map(|bound| bound.share()))),
            ("sizes", json!(self.sizes)),
        ]
    }

    /// The figures of each repetition, for formats that hold lists.
    pub(super) fn samples(&self) -> [(&'static str, Value); 2] {
        let times: Vec<u64> = self.measured.samples.iter().map(|t| t.as_nanos() as u64).collect();
        [("samples_ns", json!(times)), ("samples_ts", json!(self.rates()))]
    }
}

impl ModelInfo {
    fn of(gguf: &Gguf) -> ModelInfo {
        ModelInfo {
            file: gguf.path().display().to_string(),
            description: gguf.description(),
            bytes: gguf.total_bytes(),
            n_params: gguf.n_params(),
        }
    }
}

/// As on the command line.
pub(super) fn slots(slots: SlotCount) -> String {
    match slots {
        SlotCount::Auto => "auto".to_owned(),
        SlotCount::Fixed(n) => n.to_string(),
    }
}

/// As on the command line: MiB.
pub(super) fn cache(size: CacheSize) -> String {
    match size {
        CacheSize::Auto => "auto".to_owned(),
        CacheSize::Fixed(bytes) => (bytes >> 20).to_string(),
    }
}

/// `17.28 GiB`, or MiB below one, as llama-bench has it.
pub(super) fn size(bytes: u64) -> String {
    let gib = bytes as f64 / (1u64 << 30) as f64;
    if gib < 1.0 { format!("{:.2} MiB", gib * 1024.0) } else { format!("{gib:.2} GiB") }
}

/// `30.53 B`, or M below one.
pub(super) fn params(n: u64) -> String {
    if n < 1_000_000_000 {
        format!("{:.2} M", n as f64 / 1e6)
    } else {
        format!("{:.2} B", n as f64 / 1e9)
    }
}

fn nanoseconds(samples: &[Duration]) -> Vec<f64> {
    samples.iter().map(|t| t.as_secs_f64() * 1e9).collect()
}

pub(super) fn average(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

/// Of a sample: the sum of squares is divided by one less than their number.
pub(super) fn deviation(values: &[f64]) -> f64 {
    if values.len() < 2 {
        return 0.0;
    }
    let mean = average(values);
    let squares: f64 = values.iter().map(|v| (v - mean) * (v - mean)).sum();
    (squares / (values.len() - 1) as f64).sqrt()
}
