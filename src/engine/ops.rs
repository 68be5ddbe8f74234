//! Times the kernels of a pass, for benchmarks.

use super::Engine;
use super::planned::pass_shape;
use crate::error::{Error, Result};
use crate::exec::candidates::candidates;
use crate::exec::kv::KvCache;
use crate::exec::op_times::{OpTime, Repeat};
use crate::exec::peaks::Peaks;
use crate::exec::run::{Executor, Pass};
use crate::exec::tuning::Tuning;
use crate::plan::Bytes;
use std::collections::HashSet;

/// Passes of which the whole is timed, after one that is not.
const PASSES: usize = 5;

/// What to time.
#[derive(Clone, Copy, Debug)]
pub struct OpsRequest {
    /// Tokens of the pass; no more than the engine's ubatch.
    pub n_tokens: u32,
    /// Tokens in the cache before.
    pub n_depth: u32,
    /// Samples of a kernel.
    pub samples: u32,
    /// Also the tiles that were not chosen.
    pub tiles: bool,
}

/// What was timed.
#[derive(Clone, Debug, Default)]
pub struct OpTimes {
    /// Nanoseconds of a whole pass, as the engine runs it.
    pub pass_ns: f64,
    /// The kernels that a pass has.
    pub ops: Vec<OpTime>,
    /// Kernels of other tiles.
    pub others: Vec<OpTime>,
}

impl Engine {
    /// What the device does at best.
    pub fn peaks(&self) -> Result<Peaks> {
        Peaks::measure(&self.device)
    }

    /// Times the steps of a pass over random tokens, those for which `wanted` holds. What is in the cache
    /// before is zeros: kernels take no other time for it.
    pub fn time_ops(
        &mut self,
        request: &OpsRequest,
        tokens: &[u32],
        wanted: &dyn Fn(&OpTime) -> bool,
    ) -> Result<OpTimes> {
        if self.plan.host_weight_bytes > 0 {
            let problem = format!(
                "kernels are timed with all weights on the device; {} do not fit",
                Bytes(self.plan.host_weight_bytes)
            );
            return Err(Error::usage("--ops", problem));
        }
        let (kv, kv_layers) = self.deep_cache()?;
        let result = self.time_ops_with(&kv, kv_layers, request, tokens, wanted);
        self.executor.forget(&kv);
        result
    }

    /// A cache with more layers than the model has, so that no cache of the device holds all of them.
    fn deep_cache(&self) -> Result<(KvCache, u32)> {
        let mut hparams = self.model.hparams.clone();
        let layer_bytes = self.kv_shape.bytes(&hparams) / u64::from(hparams.n_layer);
        hparams.n_layer = Executor::kv_layers(&self.device, layer_bytes, hparams.n_layer);
        Ok((KvCache::new(&self.device, &hparams, self.kv_shape)?, hparams.n_layer))
    }

    fn time_ops_with(
        &mut self,
        kv: &KvCache,
        kv_layers: u32,
        request: &OpsRequest,
        tokens: &[u32],
        wanted: &dyn Fn(&OpTime) -> bool,
    ) -> Result<OpTimes> {
        let Engine { model, residency, executor, .. } = self;
        let repeat = Repeat { samples: request.samples };
        let pass = |tuning: &Tuning| Pass {
            model,
            residency,
            kv,
            shape: pass_shape(
                &model.hparams,
                tuning,
                request.n_tokens,
                1,
                request.n_depth + request.n_tokens,
                Some(1),
            ),
            tokens,
            first_position: request.n_depth,
        };
        let tuning = *executor.tuning();
        let chosen = pass(&tuning);
        let mut passes = Vec::new();
        for _ in 0..=PASSES {
            executor.take_stats();
            executor.run(&chosen)?;
            passes.push(executor.take_stats().compute_ns as f64);
        }
        passes.remove(0);
        passes.sort_by(f64::total_cmp);
        let ops = executor.time_ops(&chosen, &tuning, kv_layers, repeat, wanted)?;
        let mut times = OpTimes { pass_ns: passes[PASSES / 2], ops, others: Vec::new() };
        if !request.tiles {
            return Ok(times);
        }
        let mut seen: HashSet<_> = times.ops.iter().map(OpTime::key).collect();
        for other in candidates(&tuning, self.device.info()) {
            let is_new = |op: &OpTime| op.is_product && !seen.contains(&op.key()) && wanted(op);
            let found = match executor.time_ops(&pass(&other), &other, kv_layers, repeat, &is_new) {
                Ok(found) => found,
                Err(e) if self.device.is_lost() => return Err(e),
                // A driver that refuses a tile has others.
                Err(e) => {
                    log::warn!("a tile is left out: {e}");
                    continue;
                }
            };
            let found: Vec<OpTime> = found.into_iter().filter(|op| op.ns.is_some()).collect();
            seen.extend(found.iter().map(OpTime::key));
            times.others.extend(found);
        }
        Ok(times)
    }
}
