//! A loaded model and its sessions. Commands and servers know this, never tensors.
//!
//! Opening is two steps: [`Planned`] is what will live where, with a device opened for its budget, and
//! [`Engine::load`] does it.

mod advice;
mod batch;
mod ops;
mod planned;

pub use batch::{Progress, Watch};
pub use ops::{OpTimes, OpsRequest};
pub use planned::Planned;

use crate::error::{Error, Result};
use crate::exec::kv::{KvCache, KvShape, KvType};
use crate::exec::residency::Residency;
use crate::exec::run::{Executor, ExecutorOptions, Pass};
use crate::exec::tuning::Tuning;
use crate::gguf::Gguf;
use crate::model::Model;
use crate::model::hparams::HParams;
use crate::plan::{Bytes, PlacementOptions, Plan};
use crate::progress;
use crate::stream::host_tensor::host_tensors;
use crate::stream::options::StreamOptions;
use crate::stream::pin_budget::PinReport;
use crate::stream::stats::StreamStats;
use crate::stream::{self, StreamJob, Streamer};
use crate::trace::Trace;
use crate::vk::{Device, Validation};
use batch::{Passed, Ubatch};
use planned::pass_shape;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// How to load a model.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// `--device`: a number or part of a name.
    pub device: Option<String>,
    /// Context of a session in tokens; 0: what the model was trained for, or less if that is large.
    pub n_ctx: u32,
    /// Tokens that go through the model together; `None`: the plan chooses.
    pub n_batch: Option<u32>,
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
    /// What goes where.
    pub placement: PlacementOptions,
    /// Experts in host memory.
    pub stream: StreamOptions,
    /// Times every dispatch and copy, for [`Engine::take_trace`].
    pub tracing: bool,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            device: None,
            n_ctx: 0,
            n_batch: None,
            n_ubatch: 512,
            type_k: KvType::F16,
            type_v: KvType::F16,
            vram_limit_bytes: None,
            hash_logits: false,
            validation: Validation::Off,
            placement: PlacementOptions::default(),
            stream: StreamOptions::default(),
            tracing: false,
        }
    }
}

/// A loaded model on a device.
pub struct Engine {
    gguf: Arc<Gguf>,
    model: Model,
    device: Arc<Device>,
    plan: Plan,
    kv_shape: KvShape,
    n_ubatch: u32,
    hash_logits: bool,
    watch: Option<Box<Watch>>,
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
        Engine::load(Planned::new(path, options)?)
    }

    /// Loads what was planned, with a progress bar.
    pub fn load(planned: Planned) -> Result<Engine> {
        let Planned { gguf, model, mut device, tuning, kv_shape, n_ubatch, options, plan, .. } =
            planned;
        log::info!("{plan}");
        let graph = model.graph(&pass_shape(&model.hparams, &tuning, 1, 0, 1, None));
        let tensors = host_tensors(&gguf, &model.weights, &plan.places, &graph);
        let route = match tensors.is_empty() {
            true => None,
            false => Some(stream::route(&device, &gguf, &options.stream)?),
        };
        if let Some(queue) = route.as_ref().and_then(|route| route.copy_queue) {
            device = device.with_copy_queue(queue)?;
        }
        let total = plan.device_weight_bytes;
        let since = Instant::now();
        let bar = progress::bytes_bar("loading", total);
        let residency = Residency::load(&device, &gguf, &model.weights, &plan.places, &bar)?;
        bar.finish_and_clear();
        log::info!("loaded {} in {:.1?}", Bytes(total), since.elapsed());
        let n_expert_used = model.hparams.experts.n_used;
        let job = StreamJob {
            device: device.clone(),
            gguf: gguf.clone(),
            tensors,
            n_used: n_expert_used,
            n_slots: plan.n_slots,
            cache_bytes: plan.cache_bytes,
            planned_bytes: plan.device_bytes() - plan.device_weight_bytes,
        };
        let streamer = route.map(|route| stream::open(job, &route, &options.stream));
        let executor = Executor::new(
            &device,
            ExecutorOptions {
                tuning,
                n_batch: plan.n_batch,
                n_ubatch,
                n_embd: model.hparams.n_embd,
                scratch_bytes: plan.needs.scratch_bytes,
                rope_freqs: &model.hparams.attention.rope.frequencies(),
                n_expert_used,
                streamer: streamer.transpose()?,
                tracing: options.tracing,
            },
        )?;
        Ok(Engine {
            gguf,
            model,
            device,
            plan,
            kv_shape,
            n_ubatch,
            hash_logits: options.hash_logits,
            watch: None,
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

    /// Sizes and kinds of the kernels.
    pub fn tuning(&self) -> &Tuning {
        self.executor.tuning()
    }

    /// Takes other sizes of kernels from the next evaluation on, for comparisons: logits may get other bits.
    pub fn set_tuning(&mut self, tuning: Tuning) {
        self.executor.set_tuning(tuning);
    }

    /// Waits for what loading left to the background: passes are as fast as they get from now on.
    pub fn finish_loading(&mut self) {
        if let Some(streamer) = self.executor.streamer_mut() {
            streamer.wait_for_pins();
        }
    }

    /// What moved since the last call, and how long it took.
    pub fn take_stats(&mut self) -> StreamStats {
        self.executor.take_stats()
    }

    /// What ran since the last call, if [`EngineOptions::tracing`] is on.
    pub fn take_trace(&mut self) -> Option<Trace> {
        let spans = self.executor.take_trace()?;
        let (model, device) = (self.gguf.description(), self.device.info().name.clone());
        Some(Trace { model, device, spans })
    }

    /// What of the experts in host memory is pinned by now; `None` if there are none.
    pub fn pin_report(&self) -> Option<PinReport> {
        self.executor.streamer().map(Streamer::pin_report)
    }

    /// Draws no more bars of what goes on in the background. The first logits do the same: who gets
    /// them is about to print.
    pub fn hide_progress(&self) {
        if let Some(streamer) = self.executor.streamer() {
            streamer.hide_progress();
        }
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Context of a session, in tokens.
    pub fn n_ctx(&self) -> u32 {
        self.kv_shape.n_ctx
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

    /// Has `watch` look on while evaluations of several ubatches go on. When it breaks one off, that ends with
    /// [`Error::Interrupted`], and the session has the tokens of whole ubatches or batches.
    pub fn set_watch(&mut self, watch: Box<Watch>) {
        self.watch = Some(watch);
    }

    /// Runs the ubatches of `tokens`, batch by batch; `done` follows each, with the number of rows it put out.
    fn passes(
        &mut self,
        session: &mut Session,
        tokens: &[u32],
        outputs: Outputs,
        top: Option<u32>,
        mut done: impl FnMut(&mut Self, &mut Session, u32) -> Result<()>,
    ) -> Result<()> {
        self.check_tokens(session, tokens)?;
        let ubatches = Ubatch::cut(tokens, self.n_ubatch, session.n_past, outputs, top);
        let mut passed = Passed::new(tokens.len(), self.model.hparams.n_layer);
        // Whole ubatches: where they begin does not depend on the batch.
        let per_batch = (self.plan.n_batch / self.n_ubatch).max(1);
        for batch in ubatches.chunks(per_batch as usize) {
            let by_layer = batch.len() > 1 && self.run_layers(session, batch, passed)?;
            for (number, ubatch) in batch.iter().enumerate() {
                let Engine { model, residency, executor, .. } = self;
                let pass = ubatch.pass(model, residency, executor.tuning(), &session.kv);
                match (by_layer, ubatch.n_outputs) {
                    (false, _) => executor.run(&pass)?,
                    (true, 0) => {}
                    (true, _) => executor.run_head(&pass, number)?,
                }
                session.n_past += ubatch.n_tokens();
                if ubatch.n_outputs > 0 {
                    self.hide_progress();
                }
                done(self, session, ubatch.n_outputs)?;
                passed.add(ubatch.n_tokens());
                if !by_layer {
                    passed.tell(&mut self.watch, 0)?;
                }
            }
        }
        Ok(())
    }

    /// Runs a batch layer by layer but for the heads, if that is worth it.
    fn run_layers(
        &mut self,
        session: &Session,
        batch: &[Ubatch<'_>],
        passed: Passed,
    ) -> Result<bool> {
        let Engine { model, residency, executor, watch, .. } = self;
        let tuning = *executor.tuning();
        let ubatches = batch.iter();
        let passes: Vec<Pass<'_>> =
            ubatches.map(|u| u.pass(model, residency, &tuning, &session.kv)).collect();
        executor.run_layers(&passes, &mut |done| passed.tell(watch, done))
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
