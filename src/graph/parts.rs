//! A pass in parts: the embedding, one part for each layer, and the head. Between parts there is nothing
//! but the residual stream, so that a batch of several ubatches can go through the model layer by layer. Pure.
//!
//! A part is fused by itself and has the ops that it has in the whole pass: results are the same bits.

use super::scratch::SCRATCH_ALIGN;
use super::{Graph, Tensor};

/// The residual stream on its way from part to part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream {
    /// `[n_tokens][n_embd]`
    pub x: Tensor,
    /// `[n_tokens][n_embd]`: what the last block put out. The next norm adds it to `x`.
    pub delta: Option<Tensor>,
}

impl Stream {
    /// Its tensors, each with the plane that holds it between parts. The stream without delta is the
    /// embedding: the first layer reads it in the op that writes its own `x`, so they lie in different
    /// planes.
    fn planes(self) -> impl Iterator<Item = (Tensor, u64)> {
        let planes = match self.delta {
            Some(delta) => [Some((self.x, 0)), Some((delta, 1))],
            None => [Some((self.x, 1)), None],
        };
        planes.into_iter().flatten()
    }
}

/// What a part takes from the one before and leaves to the next one; a whole pass does neither.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Border {
    /// Written before.
    pub enters: Option<Stream>,
    /// Read afterwards.
    pub leaves: Option<Stream>,
}

impl Graph {
    /// Tokens that the ops are for; `None` for a graph that has neither ids nor a stream.
    pub fn n_tokens(&self) -> Option<u32> {
        let first = self.tokens.or(self.border.enters.map(|stream| stream.x));
        first.map(|t| self.shape(t).rows)
    }
}

/// Where ids and residual stream of a batch lie: behind the activations of a ubatch, in the same buffer.
/// Each ubatch has a place for its ids and two planes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchLayout {
    /// The first ubatch begins here.
    start: u64,
    ids_bytes: u64,
    plane_bytes: u64,
}

impl BatchLayout {
    /// For ubatches of up to `n_ubatch` tokens, behind so many bytes of activations.
    pub fn new(scratch_bytes: u64, n_ubatch: u32, n_embd: u32) -> Self {
        let row_bytes = u64::from(n_embd) * 4;
        BatchLayout {
            start: scratch_bytes.next_multiple_of(SCRATCH_ALIGN),
            ids_bytes: Self::ids_bytes(n_ubatch),
            plane_bytes: (u64::from(n_ubatch) * row_bytes).next_multiple_of(SCRATCH_ALIGN),
        }
    }

    /// Bytes of the ids, or of the positions, of a ubatch: the next ubatch's begin where kernels may bind.
    pub fn ids_bytes(n_ubatch: u32) -> u64 {
        (u64::from(n_ubatch) * 4).next_multiple_of(SCRATCH_ALIGN)
    }

    /// Bytes that each ubatch takes.
    pub fn ubatch_bytes(&self) -> u64 {
        self.ids_bytes + 2 * self.plane_bytes
    }

    /// Where everything of `n` ubatches ends.
    pub fn end(&self, n: u64) -> u64 {
        self.start + n * self.ubatch_bytes()
    }

    /// Where the ids of a ubatch begin.
    pub fn ids(&self, ubatch: usize) -> u64 {
        self.end(ubatch as u64)
    }

    /// The places of what a part of a ubatch shares with others.
    pub fn fixed(&self, part: &Graph, ubatch: usize) -> Vec<(Tensor, u64)> {
        let ids = self.ids(ubatch);
        let streams = [part.border.enters, part.border.leaves].into_iter().flatten();
        let plane = |(t, plane)| (t, ids + self.ids_bytes + plane * self.plane_bytes);
        let tokens = part.tokens.map(|t| (t, ids));
        tokens.into_iter().chain(streams.flat_map(Stream::planes).map(plane)).collect()
    }
}
