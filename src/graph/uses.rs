//! What fusions look at and how they change a graph: which ops read and write a tensor, and ops replaced by
//! others. Pure.

use super::{Graph, Op, Tensor};
use std::collections::HashMap;

/// Who reads and who writes a tensor, as indices of ops, ascending.
#[derive(Default)]
pub(super) struct Uses {
    reads: HashMap<Tensor, Vec<usize>>,
    writes: HashMap<Tensor, Vec<usize>>,
}

impl Uses {
    pub(super) fn of(graph: &Graph) -> Self {
        let mut uses = Uses::default();
        for (i, op) in graph.ops.iter().enumerate() {
            let (reads, writes) = op.access();
            reads.into_iter().for_each(|t| uses.reads.entry(t).or_default().push(i));
            writes.into_iter().for_each(|t| uses.writes.entry(t).or_default().push(i));
        }
        uses
    }

    pub(super) fn readers(&self, t: Tensor) -> &[usize] {
        self.reads.get(&t).map_or(&[], Vec::as_slice)
    }

    /// The last op before `at` that writes a tensor.
    pub(super) fn writer_before(&self, t: Tensor, at: usize) -> Option<usize> {
        self.writes.get(&t)?.iter().copied().rfind(|&writer| writer < at)
    }

    /// The one op that reads a tensor, if there is one and it comes after `from`.
    pub(super) fn only_reader(&self, t: Tensor, from: usize) -> Option<usize> {
        match *self.readers(t) {
            [reader] if reader > from && self.is_written_once(t) => Some(reader),
            _ => None,
        }
    }

    pub(super) fn is_written_once(&self, t: Tensor) -> bool {
        self.writes.get(&t).is_some_and(|writes| writes.len() == 1)
    }

    /// Whether `t` is the same for an op at `from` and for one at `to`.
    pub(super) fn is_unchanged(&self, t: Tensor, from: usize, to: usize) -> bool {
        let writes = self.writes.get(&t).map_or(&[][..], Vec::as_slice);
        !writes.iter().any(|&at| from < at && at < to)
    }
}

/// Replaces ops by others or, with `None`, by nothing.
pub(super) fn replace(graph: &mut Graph, by: HashMap<usize, Option<Op>>) {
    let ops = std::mem::take(&mut graph.ops).into_iter().enumerate();
    graph.ops = ops
        .filter_map(|(i, op)| match by.get(&i) {
            Some(other) => other.clone(),
            None => Some(op),
        })
        .collect();
}
