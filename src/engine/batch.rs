//! What an evaluation of many tokens is made of: ubatches, and how far they are.

use super::Outputs;
use super::planned::pass_shape;
use crate::error::{Error, Result};
use crate::exec::kv::KvCache;
use crate::exec::residency::Residency;
use crate::exec::run::Pass;
use crate::exec::tuning::Tuning;
use crate::model::Model;
use std::ops::ControlFlow;

/// Tokens of one pass, or of one row of a batch that goes layer by layer.
pub(super) struct Ubatch<'a> {
    tokens: &'a [u32],
    first_position: u32,
    /// Logits of the last so many tokens are handed out.
    pub(super) n_outputs: u32,
    /// As in [`PassShape`](crate::model::PassShape).
    top: Option<u32>,
}

impl<'a> Ubatch<'a> {
    /// Cuts tokens, the first of which has position `first_position`, into ubatches.
    pub(super) fn cut(
        tokens: &'a [u32],
        n_ubatch: u32,
        first_position: u32,
        outputs: Outputs,
        top: Option<u32>,
    ) -> Vec<Self> {
        let chunks = tokens.chunks(n_ubatch as usize);
        let last = chunks.len().saturating_sub(1);
        let n_outputs = |i: usize, tokens: &[u32]| match outputs {
            Outputs::All => tokens.len() as u32,
            Outputs::None => 0,
            Outputs::Last => u32::from(i == last),
        };
        let ubatch = |(i, tokens): (usize, &'a [u32])| Ubatch {
            tokens,
            first_position: first_position + i as u32 * n_ubatch,
            n_outputs: n_outputs(i, tokens),
            top,
        };
        chunks.enumerate().map(ubatch).collect()
    }

    pub(super) fn n_tokens(&self) -> u32 {
        self.tokens.len() as u32
    }

    /// The pass over it.
    pub(super) fn pass<'p>(
        &'p self,
        model: &'p Model,
        residency: &'p Residency,
        tuning: &Tuning,
        kv: &'p KvCache,
    ) -> Pass<'p> {
        let (n_tokens, n_outputs) = (self.n_tokens(), self.n_outputs);
        let n_kv = self.first_position + n_tokens;
        let shape = pass_shape(&model.hparams, tuning, n_tokens, n_outputs, n_kv, self.top);
        let (tokens, first_position) = (self.tokens, self.first_position);
        Pass { model, residency, kv, shape, tokens, first_position }
    }
}

/// How far an evaluation of several ubatches is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Tokens times the layers that they passed.
    pub done: u64,
    /// Tokens times layers.
    pub total: u64,
}

/// Looks on; what it answers may end an evaluation.
pub type Watch = dyn FnMut(Progress) -> ControlFlow<()>;

/// Counts tokens times layers.
#[derive(Clone, Copy)]
pub(super) struct Passed {
    n_layer: u64,
    done: u64,
    total: u64,
}

impl Passed {
    pub(super) fn new(n_tokens: usize, n_layer: u32) -> Self {
        let n_layer = n_layer.into();
        Passed { n_layer, done: 0, total: n_tokens as u64 * n_layer }
    }

    /// So many tokens passed all layers.
    pub(super) fn add(&mut self, n_tokens: u32) {
        self.done += u64::from(n_tokens) * self.n_layer;
    }

    /// Tells the one who looks on, with what a batch has done so far. At the end nobody needs to be told.
    pub(super) fn tell(&self, watch: &mut Option<Box<Watch>>, done: u64) -> Result<()> {
        let progress = Progress { done: self.done + done, total: self.total };
        let Some(watch) = watch.as_mut().filter(|_| progress.done < progress.total) else {
            return Ok(());
        };
        match watch(progress) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(Error::Interrupted),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ubatches_follow_each_other_and_the_last_may_be_short() {
        let tokens: Vec<u32> = (0..20).collect();
        let cut = |outputs| -> Vec<_> {
            let ubatches = Ubatch::cut(&tokens, 8, 5, outputs, None);
            ubatches.iter().map(|u| (u.tokens[0], u.first_position, u.n_outputs)).collect()
        };
        assert_eq!(cut(Outputs::All), [(0, 5, 8), (8, 13, 8), (16, 21, 4)]);
        assert_eq!(cut(Outputs::Last), [(0, 5, 0), (8, 13, 0), (16, 21, 1)]);
        assert_eq!(cut(Outputs::None), [(0, 5, 0), (8, 13, 0), (16, 21, 0)]);
        assert!(Ubatch::cut(&[], 8, 0, Outputs::Last, None).is_empty());
    }
}
