//! Runs cases: opens engines, feeds them random tokens, takes times.

use super::cases::{Case, Load, Test};
use crate::cmd::model_path;
use crate::cmd::options::mib;
use crate::engine::{Engine, EngineOptions, Outputs, Session};
use crate::error::Result;
use crate::plan::{CpuMoe, PlacementOptions};
use crate::stream::options::StreamOptions;
use crate::stream::stats::StreamStats;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::time::{Duration, Instant};

/// What a case took.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Measured {
    /// Of each repetition.
    pub(super) samples: Vec<Duration>,
    /// Sum over the repetitions.
    pub(super) stats: StreamStats,
}

/// How often, and whether once more before.
#[derive(Clone, Copy, Debug)]
pub(super) struct Repeat {
    pub(super) n: u32,
    pub(super) warm_up: bool,
}

/// An engine and what it was opened with.
pub(super) struct Opened {
    pub(super) load: Load,
    pub(super) engine: Engine,
}

impl Opened {
    /// Opens the engine of a case. Nothing of that goes on when this returns.
    pub(super) fn open(case: &Case, tracing: bool) -> Result<Opened> {
        let path = model_path(case.load.model.as_deref())?;
        let mut engine = Engine::open(&path, &EngineOptions { tracing, ..options(&case.load) })?;
        engine.finish_loading();
        Ok(Opened { load: case.load.clone(), engine })
    }

    /// Times a case in a session of its own. `step` is told what happens next.
    pub(super) fn measure(
        &mut self,
        case: &Case,
        repeat: Repeat,
        step: impl FnMut(&str),
    ) -> Result<Measured> {
        let session = self.engine.session()?;
        let n_vocab = self.engine.hparams().n_vocab;
        let random = Tokens { rng: ChaCha8Rng::seed_from_u64(0), n_vocab };
        let mut run = Run { engine: &mut self.engine, session, random };
        let measured = run.repeat(&case.test, repeat, step);
        let Run { engine, session, .. } = run;
        engine.close(session);
        measured
    }
}

/// What a case's engine is opened with.
fn options(load: &Load) -> EngineOptions {
    EngineOptions {
        device: load.device.clone(),
        n_ctx: load.n_ctx,
        n_batch: load.n_batch,
        n_ubatch: load.n_launch,
        type_k: load.type_k,
        type_v: load.type_v,
        vram_limit_bytes: load.vram_limit_mib.map(|n| mib(n.into())),
        placement: PlacementOptions {
            overrides: load.overrides.clone(),
            cpu_moe: match load.n_cpu_moe {
                0 => CpuMoe::Unset,
                n => CpuMoe::First(n),
            },
            gpu_layers: load.gpu_layers,
            margin_bytes: None,
        },
        stream: StreamOptions {
            host_source: load.host_source,
            slots: load.slots,
            expert_cache: load.expert_cache,
            copy_queue: load.copy_queue,
            ..StreamOptions::default()
        },
        ..EngineOptions::default()
    }
}

/// Tokens that mean nothing.
struct Tokens {
    rng: ChaCha8Rng,
    n_vocab: u32,
}

impl Tokens {
    fn draw(&mut self, n: u32) -> Vec<u32> {
        (0..n).map(|_| self.rng.random_range(0..self.n_vocab)).collect()
    }
}

/// One case at work.
struct Run<'a> {
    engine: &'a mut Engine,
    session: Session,
    random: Tokens,
}

impl Run<'_> {
    fn repeat(
        &mut self,
        test: &Test,
        repeat: Repeat,
        mut step: impl FnMut(&str),
    ) -> Result<Measured> {
        let mut measured = Measured::default();
        self.session.truncate(0);
        if test.n_depth > 0 {
            step("depth");
            self.prompt(test.n_depth)?;
        }
        if repeat.warm_up {
            // At the depth: long contexts have kernels of their own.
            step("warm-up");
            self.prompt(test.n_prompt)?;
            self.generate(test.n_gen.min(1))?;
        }
        for i in 1..=repeat.n {
            // What an earlier repetition added goes; the depth stays as it was computed once.
            self.session.truncate(test.n_depth);
            step(&format!("run {i}/{}", repeat.n));
            self.engine.take_stats();
            self.engine.take_trace();
            let start = Instant::now();
            self.prompt(test.n_prompt)?;
            self.generate(test.n_gen)?;
            measured.samples.push(start.elapsed());
            measured.stats.add(&self.engine.take_stats());
        }
        Ok(measured)
    }

    /// Processes `n` tokens. The last logits are fetched: only then is the work done.
    fn prompt(&mut self, n: u32) -> Result<()> {
        let tokens = self.random.draw(n);
        self.engine.eval(&mut self.session, &tokens, Outputs::Last, |_, _| Ok(()))
    }

    /// Processes `n` tokens one by one, each when the one before is done, and chooses the next.
    fn generate(&mut self, n: u32) -> Result<()> {
        for _ in 0..n {
            let token = self.random.draw(1);
            self.engine.eval_greedy(&mut self.session, &token)?;
        }
        Ok(())
    }
}
