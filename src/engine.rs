//! A loaded model and its sessions. Commands and servers know this, never tensors.

use crate::error::{Error, Result};
use crate::exec::kv::{KvCache, KvShape, KvType};
use crate::exec::residency::{Residency, packing_overhead_bytes};
use crate::exec::run::{Executor, Pass};
use crate::exec::tuning::Tuning;
use crate::gguf::Gguf;
use crate::graph::scratch;
use crate::model::hparams::HParams;
use crate::model::{Model, PassShape};
use crate::plan::{self, Budget, Needs, Plan};
use crate::progress;
use crate::stream::options::StreamOptions;
use crate::stream::stats::StreamStats;
use crate::vk::{self, Device, DeviceOptions, Instance, InstanceOptions, Validation};
use std::path::Path;
use std::sync::Arc;

/// How to load a model.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// `--device`: a number or part of a name.
    pub device: Option<String>,
    /// Context of a session in tokens; 0: what the model was trained for, or less if that is large.
    pub n_ctx: u32,
    /// Tokens that one kernel launch handles.
    pub n_ubatch: u32,
    /// Type of cached keys.
    pub type_k: KvType,
    /// Type of cached values.
    pub type_v: KvType,
    /// Plan as if the device had no more memory than this.
    pub vram_limit_bytes: Option<u64>,
    /// Sessions hash the logits that they hand out.
    pub hash_logits: bool,
    /// Checks of the validation layer; with `Off`, `VKMOE_VALIDATION` decides.
    pub validation: Validation,
    /// Experts in host memory.
    pub stream: StreamOptions,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            device: None,
            n_ctx: 0,
            n_ubatch: 512,
            type_k: KvType::F16,
            type_v: KvType::F16,
            vram_limit_bytes: None,
            hash_logits: false,
            validation: Validation::Off,
            stream: StreamOptions::default(),
        }
    }
}

/// Room left for the driver, the desktop and other programs.
const MARGIN_BYTES: u64 = 1 << 30;
/// Without `-c`, the cache takes at most this share of the device's memory, and a context of at
/// least [`MIN_AUTO_CTX`] is tried.
const AUTO_KV_SHARE: u64 = 5;
const MIN_AUTO_CTX: u32 = 4096;
/// Logits computed together take at most this.
const OUTPUT_BYTES: u64 = 64 << 20;

/// A loaded model on a device.
pub struct Engine {
    gguf: Gguf,
    model: Model,
    device: Arc<Device>,
    plan: Plan,
    kv_shape: KvShape,
    n_ubatch: u32,
    hash_logits: bool,
    stats: StreamStats,
    // Dropped before the weights that its recorded commands use.
    executor: Executor,
    residency: Residency,
}

/// One timeline of tokens: a KV cache and how far it is filled.
pub struct Session {
    kv: KvCache,
    n_past: u32,
    /// Only where the options ask for it: large vocabularies are slow to hash.
    hasher: Option<blake3::Hasher>,
}

/// Which logits an evaluation hands out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outputs {
    /// After the last token.
    Last,
    /// None: the tokens only fill the cache.
    None,
    /// After every token.
    All,
}

impl Engine {
    /// Opens a model and loads it, with a progress bar.
    pub fn open(path: &Path, options: &EngineOptions) -> Result<Engine> {
        let gguf = Gguf::open(path)?;
        let model = Model::load(&gguf)?;
        let device = open_device(options)?;
        let tuning = Tuning::new(device.info());
        let budget = memory(&device, options.vram_limit_bytes);
        let kv_shape = kv_shape(&model.hparams, options, budget, &device)?;
        // Nothing launches more tokens than there are cells.
        let n_ubatch = options.n_ubatch.min(kv_shape.n_ctx).max(1);
        let largest = pass_shape(&model.hparams, &tuning, n_ubatch, n_ubatch, kv_shape.n_ctx, None);
        check_ubatch(&model, &largest, device.info().limits.storage_range_bytes)?;
        let scratch_bytes = scratch_bytes(&model, &tuning, n_ubatch, kv_shape.n_ctx);
        let needs = Needs {
            kv_bytes: kv_shape.bytes(&model.hparams),
            scratch_bytes,
            margin_bytes: packing_overhead_bytes(&model.weights)
                + MARGIN_BYTES.min(budget.device_bytes / 20),
        };
        let plan = plan::place(&model.weights, needs, budget)?;
        log::info!("{plan}");
        let total = plan.device_weight_bytes + plan.host_weight_bytes;
        let bar = progress::bytes_bar("loading", total);
        let residency = Residency::load(&device, &gguf, &model.weights, &plan.places, &bar)?;
        bar.finish_and_clear();
        let freqs = model.hparams.attention.rope.frequencies();
        let executor = Executor::new(&device, tuning, n_ubatch, scratch_bytes, &freqs)?;
        let hash_logits = options.hash_logits;
        Ok(Engine {
            gguf,
            model,
            device,
            plan,
            kv_shape,
            n_ubatch,
            hash_logits,
            stats: StreamStats::default(),
            executor,
            residency,
        })
    }

    /// The file.
    pub fn gguf(&self) -> &Gguf {
        &self.gguf
    }

    /// Hyper-parameters.
    pub fn hparams(&self) -> &HParams {
        &self.model.hparams
    }

    /// What lives where.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Context of a session, in tokens.
    pub fn n_ctx(&self) -> u32 {
        self.kv_shape.n_ctx
    }

    /// What streaming did since the last call.
    pub fn take_stats(&mut self) -> StreamStats {
        std::mem::take(&mut self.stats)
    }

    /// A new session with an empty cache.
    pub fn session(&self) -> Result<Session> {
        let kv = KvCache::new(&self.device, &self.model.hparams, self.kv_shape)?;
        let hasher = self.hash_logits.then(blake3::Hasher::new);
        Ok(Session { kv, n_past: 0, hasher })
    }

    /// Frees a session and what was recorded for it.
    pub fn close(&mut self, session: Session) {
        self.executor.forget(&session.kv);
    }

    /// Appends tokens to a session. `sink` gets (position, logits `[n_vocab]`) in order.
    pub fn eval(
        &mut self,
        session: &mut Session,
        tokens: &[u32],
        outputs: Outputs,
        mut sink: impl FnMut(u32, &[f32]) -> Result<()>,
    ) -> Result<()> {
        let n_vocab = self.model.hparams.n_vocab as usize;
        let mut logits = vec![0f32; n_vocab];
        self.passes(session, tokens, outputs, None, |engine, session, n_outputs| {
            for row in 0..n_outputs {
                engine.executor.read(u64::from(row) * n_vocab as u64, &mut logits)?;
                if let Some(hasher) = &mut session.hasher {
                    hasher.update(bytemuck::cast_slice(&logits));
                }
                sink(session.n_past - n_outputs + row, &logits)?;
            }
            Ok(())
        })
    }

    /// Appends tokens and returns the likeliest next one; ties go to the lower id. The logits stay on
    /// the device.
    pub fn eval_greedy(&mut self, session: &mut Session, tokens: &[u32]) -> Result<u32> {
        let mut top = [0f32; 2];
        self.passes(session, tokens, Outputs::Last, Some(1), |engine, _, n_outputs| {
            if n_outputs > 0 { engine.executor.read(0, &mut top) } else { Ok(()) }
        })?;
        let id = top[0].to_bits();
        if id < self.model.hparams.n_vocab {
            return Ok(id);
        }
        Err(Error::Sampling("all logits are NaN".into()))
    }

    /// Runs the ubatches of `tokens`; `done` follows each, with the number of rows it put out.
    fn passes(
        &mut self,
        session: &mut Session,
        tokens: &[u32],
        outputs: Outputs,
        top: Option<u32>,
        mut done: impl FnMut(&mut Self, &mut Session, u32) -> Result<()>,
    ) -> Result<()> {
        self.check_tokens(session, tokens)?;
        let n_chunks = tokens.len().div_ceil(self.n_ubatch as usize);
        for (i, chunk) in tokens.chunks(self.n_ubatch as usize).enumerate() {
            let n_tokens = chunk.len() as u32;
            let n_outputs = match outputs {
                Outputs::All => n_tokens,
                Outputs::None => 0,
                Outputs::Last => u32::from(i + 1 == n_chunks),
            };
            let shape = pass_shape(
                &self.model.hparams,
                self.executor.tuning(),
                n_tokens,
                n_outputs,
                session.n_past + n_tokens,
                top,
            );
            self.executor.run(&Pass {
                model: &self.model,
                residency: &self.residency,
                kv: &session.kv,
                shape,
                tokens: chunk,
                first_position: session.n_past,
            })?;
            session.n_past += n_tokens;
            done(self, session, n_outputs)?;
        }
        Ok(())
    }

    fn check_tokens(&self, session: &Session, tokens: &[u32]) -> Result<()> {
        let n_vocab = self.model.hparams.n_vocab;
        if let Some(id) = tokens.iter().find(|&&id| id >= n_vocab) {
            return Err(Error::Tokenizer(format!(
                "token {id} is not in the vocabulary of {n_vocab}"
            )));
        }
        self.check_room(session, tokens.len())
    }

    /// Refuses more tokens than the session's cache has cells left.
    pub fn check_room(&self, session: &Session, n_tokens: usize) -> Result<()> {
        let n_ctx = self.kv_shape.n_ctx;
        let needed = u32::try_from(n_tokens).unwrap_or(u32::MAX).saturating_add(session.n_past);
        if needed <= n_ctx {
            return Ok(());
        }
        let suggestion = needed.max(n_ctx.saturating_mul(2)).next_multiple_of(256);
        Err(Error::ContextFull { n_ctx, suggestion })
    }
}

impl Session {
    /// Tokens in the cache.
    pub fn n_past(&self) -> u32 {
        self.n_past
    }

    /// Forgets all tokens from position `n_past` on.
    pub fn truncate(&mut self, n_past: u32) {
        self.n_past = self.n_past.min(n_past);
    }

    /// Hash of all logits that [`Engine::eval`] handed out, in order, if the options ask for it.
    pub fn logits_hash(&self) -> Option<String> {
        self.hasher.as_ref().map(|hasher| hasher.finalize().to_hex().to_string())
    }
}

/// Opens the chosen device.
fn open_device(options: &EngineOptions) -> Result<Arc<Device>> {
    let validation = options.validation;
    let instance = Arc::new(Instance::new(InstanceOptions { validation })?);
    let devices = instance.devices()?;
    let visible = std::env::var("GGML_VK_VISIBLE_DEVICES").ok();
    let index = vk::choose(&devices, options.device.as_deref(), visible.as_deref())?;
    log::info!("device: {}", devices[index].name);
    Device::open(&instance, &devices[index], DeviceOptions::default())
}

/// Free memory of a device: its largest local heap, and the largest of the others.
fn memory(device: &Device, limit_bytes: Option<u64>) -> Budget {
    let free = |local: bool| {
        let heaps = device.memory_budget();
        let fitting = heaps.iter().filter(|h| h.device_local == local);
        fitting.map(|h| h.budget_bytes.saturating_sub(h.usage_bytes)).max()
    };
    let device_bytes = free(true).unwrap_or(0);
    // Where all memory is the device's, host memory comes out of the same heap.
    let host_bytes = free(false).unwrap_or(device_bytes);
    Budget { device_bytes: device_bytes.min(limit_bytes.unwrap_or(u64::MAX)), host_bytes }
}

/// The cache of a session: as asked for, else as much of the trained context as is reasonable.
fn kv_shape(
    hp: &HParams,
    options: &EngineOptions,
    budget: Budget,
    device: &Device,
) -> Result<KvShape> {
    let shape = |n_ctx| KvShape { n_ctx, type_k: options.type_k, type_v: options.type_v };
    let range = device.info().limits.storage_range_bytes;
    if options.n_ctx > 0 {
        shape(options.n_ctx).check(hp, range)?;
        return Ok(shape(options.n_ctx));
    }
    let mut n_ctx = hp.n_ctx_train;
    let reasonable = |n_ctx| {
        let fits = shape(n_ctx).bytes(hp) <= budget.device_bytes / AUTO_KV_SHARE;
        fits && shape(n_ctx).check(hp, range).is_ok()
    };
    while n_ctx / 2 >= MIN_AUTO_CTX && !reasonable(n_ctx) {
        n_ctx /= 2;
    }
    shape(n_ctx).check(hp, range)?;
    Ok(shape(n_ctx))
}

/// The sizes of a pass. `n_kv`: tokens in the cache afterwards.
fn pass_shape(
    hp: &HParams,
    tuning: &Tuning,
    n_tokens: u32,
    n_outputs: u32,
    n_kv: u32,
    top: Option<u32>,
) -> PassShape {
    let output_rows = OUTPUT_BYTES / (u64::from(hp.n_vocab) * 4);
    PassShape {
        n_tokens,
        n_outputs,
        output_rows: output_rows.clamp(1, 256) as u32,
        top,
        n_splits: tuning.attention_splits(&hp.attention, n_tokens, n_kv),
        group_from: tuning.group_from,
        group_tile: tuning.mul_mat.bn,
    }
}

/// Refuses a ubatch whose activations are larger than a kernel can bind.
fn check_ubatch(model: &Model, shape: &PassShape, storage_range_bytes: u64) -> Result<()> {
    let graph = model.graph(shape);
    let largest = graph.tensors.iter().map(|t| t.bytes()).max().unwrap_or(0);
    if largest <= storage_range_bytes {
        return Ok(());
    }
    let possible = u64::from(shape.n_tokens) * storage_range_bytes / largest;
    let problem =
        format!("{} tokens are too many for this device; {possible} are possible", shape.n_tokens);
    Err(Error::usage("-ub", problem))
}

/// Scratch memory for every pass of up to `n_ubatch` tokens in a context of `n_ctx`.
fn scratch_bytes(model: &Model, tuning: &Tuning, n_ubatch: u32, n_ctx: u32) -> u64 {
    // Small passes split their keys, and more so the smaller they are: for each number of splits the
    // largest pass counts.
    let splits = |n_tokens| tuning.attention_splits(&model.hparams.attention, n_tokens, n_ctx);
    let is_largest = |&n: &u32| n == n_ubatch || splits(n) != splits(n + 1);
    let bytes = (1..=n_ubatch).filter(is_largest).map(|n_tokens| {
        let shape = pass_shape(&model.hparams, tuning, n_tokens, n_tokens, n_ctx, None);
        scratch::plan(&model.graph(&shape)).bytes
    });
    bytes.max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vk::{DeviceInfo, DeviceKind};

    /// Every pass finds the scratch memory that was planned, however its keys are split.
    #[test]
    fn scratch_memory_is_enough_for_every_pass() -> Result<()> {
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo-q4_k_m.gguf");
        let model = Model::load(&Gguf::open(&demo)?)?;
        for (kind, subgroup) in [(DeviceKind::Cpu, 8), (DeviceKind::Discrete, 32)] {
            let mut info = DeviceInfo::default();
            info.kind = kind;
            info.subgroup.default = subgroup;
            let tuning = Tuning::new(&info);
            for n_ubatch in [1, 40, 100, 512] {
                let planned = scratch_bytes(&model, &tuning, n_ubatch, 4096);
                for n_tokens in 1..=n_ubatch {
                    for n_kv in [n_tokens, 700, 4096] {
                        let shape =
                            pass_shape(&model.hparams, &tuning, n_tokens, n_tokens, n_kv, None);
                        let needed = scratch::plan(&model.graph(&shape)).bytes;
                        assert!(needed <= planned, "{n_tokens} of {n_ubatch} tokens: {needed}");
                    }
                }
            }
        }
        Ok(())
    }
}
