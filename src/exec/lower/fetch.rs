//! Copies of chosen experts from host memory to slots, before the ops that multiply with them.

use super::Lowering;
use crate::exec::kernels::{KernelKey, Launch};
use crate::graph::{Op, Routing, Weight};
use crate::push;
use crate::stream::Streamer;
use glam::UVec3;

/// 16-byte loads of an invocation that are on their way.
const LOADS: u32 = 8;
/// Workgroups of a matrix at most: it takes few to fill a bus.
const MAX_PARTS: u32 = 64;

impl Lowering<'_> {
    /// What brings the experts of an op, if they are not there yet. Gate and up come first, and behind them the
    /// down projections, for which gate and up need not wait.
    pub(super) fn fetches(&self, op: &Op) -> Vec<Launch> {
        let routing = op.routing().filter(|_| self.streamer.is_some_and(Streamer::fetches));
        let Some(routing) = routing else { return Vec::new() };
        let same_experts = |other: &&Op| other.routing().is_some_and(|r| r.ids == routing.ids);
        let first = self.graph.ops.iter().find(same_experts);
        let brings_all = matches!(first, Some(Op::GateUp { .. }));
        let is_first = matches!(op, Op::GateUp { .. });
        if brings_all && !is_first {
            return Vec::new();
        }
        let own: Vec<Weight> = op.weights().collect();
        let later = self.graph.ops.iter().filter(same_experts).flat_map(|op| op.weights());
        let later: Vec<Weight> = later.filter(|w| brings_all && !own.contains(w)).collect();
        [own, later].iter().filter_map(|weights| self.fetch(weights, routing)).collect()
    }

    /// The launch for tensors of a layer, up to three; `None` if they are not fetched.
    fn fetch(&self, weights: &[Weight], routing: Routing) -> Option<Launch> {
        let fetch = |w: &Weight| Some((self.residency.table(w.id), self.streamer?.fetch(w.id)?));
        let fetched: Vec<_> = weights.iter().filter_map(fetch).collect();
        let (&first, n) = (fetched.first()?, fetched.len() as u32);
        let [a, b, c] = [0, 1, 2].map(|i| *fetched.get(i).unwrap_or(&first));
        let bytes = fetched.iter().map(|(_, f)| f.bytes).max().unwrap_or(0);
        let local = self.tuning.scan;
        let n_pairs = self.shape(routing.ids).rows * routing.n_used;
        let push = push::FetchExperts {
            tables: a.0,
            tables2: b.0,
            tables3: c.0,
            hosts: a.1.hosts,
            hosts2: b.1.hosts,
            hosts3: c.1.hosts,
            slots: a.1.slot,
            slots2: b.1.slot,
            slots3: c.1.slot,
            found: a.1.found,
            found2: b.1.found,
            found3: c.1.found,
            bytes: a.1.bytes,
            bytes2: b.1.bytes,
            bytes3: c.1.bytes,
            n_pairs,
            n_used: routing.n_used,
            _pad: 0,
        };
        let parts = bytes.div_ceil(16 * LOADS * local).clamp(1, MAX_PARTS);
        let kernel = KernelKey::new::<push::FetchExperts>(&[local, LOADS]);
        let groups = UVec3::new(parts, n_pairs, n);
        Some(Launch::new(kernel, push, &[self.bound(routing.ids)], groups).striding())
    }
}
