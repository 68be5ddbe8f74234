//! Which ops may run beside each other: what an op reads and writes against what runs since the last
//! barrier. Pure.

use crate::graph::scratch::Layout;
use crate::graph::{Graph, KvHalf, Op, Tensor};

/// A piece of memory that ops share.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Area {
    Scratch { start: u64, end: u64 },
    Kv(u32, KvHalf),
    Status,
}

impl Area {
    fn meets(&self, other: &Area) -> bool {
        match (self, other) {
            (Area::Scratch { start: a, end: b }, Area::Scratch { start: c, end: d }) => {
                a < d && c < b
            }
            (a, b) => a == b,
        }
    }
}

/// What an op reads and writes.
#[derive(Default)]
pub(super) struct Access {
    reads: Vec<Area>,
    writes: Vec<Area>,
}

impl Access {
    pub(super) fn of(op: &Op, graph: &Graph, layout: &Layout) -> Self {
        let (reads, writes) = op.access();
        let area = |t: Tensor| {
            let start = layout.offsets[t.0 as usize];
            Area::Scratch { start, end: start + graph.shape(t).bytes() }
        };
        let mut access = Access {
            reads: reads.into_iter().map(area).collect(),
            writes: writes.into_iter().map(area).collect(),
        };
        match *op {
            Op::KvStore { il, half, .. } => access.writes.push(Area::Kv(il, half)),
            Op::Attention { il, .. } => {
                access.reads.extend([Area::Kv(il, KvHalf::K), Area::Kv(il, KvHalf::V)]);
            }
            Op::DecodeAttention { il, .. } => {
                let cache = [Area::Kv(il, KvHalf::K), Area::Kv(il, KvHalf::V)];
                access.reads.extend(cache.clone());
                access.writes.extend(cache);
                access.writes.push(Area::Status);
            }
            Op::Router { .. } | Op::NormRouter { .. } | Op::ReadTop { .. } => {
                access.writes.push(Area::Status);
            }
            _ => {}
        }
        access
    }
}

/// What runs since the last barrier.
#[derive(Default)]
pub(super) struct Hazards(Access);

impl Hazards {
    /// Whether an op must wait for what runs.
    pub(super) fn conflict(&self, op: &Access) -> bool {
        let any =
            |ours: &[Area], theirs: &[Area]| ours.iter().any(|a| theirs.iter().any(|b| a.meets(b)));
        let running = &self.0;
        any(&op.reads, &running.writes)
            || any(&op.writes, &running.reads)
            || any(&op.writes, &running.writes)
    }

    /// The op is among what runs.
    pub(super) fn add(&mut self, op: Access) {
        self.0.reads.extend(op.reads);
        self.0.writes.extend(op.writes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(reads: &[(u64, u64)], writes: &[(u64, u64)]) -> Access {
        let areas = |ranges: &[(u64, u64)]| {
            ranges.iter().map(|&(start, end)| Area::Scratch { start, end }).collect()
        };
        Access { reads: areas(reads), writes: areas(writes) }
    }

    #[test]
    fn products_of_one_input_run_together_and_dependent_ops_wait() {
        let mut hazards = Hazards::default();
        hazards.add(access(&[(0, 10)], &[(10, 20)]));
        assert!(!hazards.conflict(&access(&[(0, 10)], &[(20, 30)])), "reads the same input");
        assert!(hazards.conflict(&access(&[(15, 20)], &[(30, 40)])), "reads what is written");
        assert!(hazards.conflict(&access(&[], &[(9, 10)])), "overwrites what is read");
        assert!(hazards.conflict(&access(&[], &[(19, 22)])), "overwrites what is written");
    }

    #[test]
    fn attention_waits_for_its_own_layer_only() {
        let mut hazards = Hazards::default();
        hazards.add(Access { reads: vec![], writes: vec![Area::Kv(3, KvHalf::K)] });
        let attend = |il| Access { reads: vec![Area::Kv(il, KvHalf::K)], writes: vec![] };
        assert!(!hazards.conflict(&attend(2)));
        assert!(hazards.conflict(&attend(3)));
    }
}
