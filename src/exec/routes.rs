//! Which experts a pass chose, for the expert cache: the routers' ids of all layers with experts in host memory lie
//! one behind the other, between activations and batch, outlive the pass, and are copied to the host at its end.

use crate::error::Result;
use crate::graph::scratch::SCRATCH_ALIGN;
use crate::graph::{Graph, Op, Tensor};
use crate::vk::{Buffer, Device, MemoryKind, Recorder};
use std::sync::Arc;

/// Where ids are kept.
pub(super) struct Routes {
    /// The layers, in order.
    layers: Vec<u32>,
    n_used: u32,
    /// Where they begin in scratch memory.
    start: u64,
    host: Buffer,
}

/// Bytes from the ids of a layer to those of the next, if passes have `n_tokens`: kernels may bind both.
fn stride(n_tokens: u32, n_used: u32) -> u64 {
    (u64::from(n_tokens) * u64::from(n_used) * 4).next_multiple_of(SCRATCH_ALIGN)
}

/// Bytes of the ids of `n_layer` layers in a pass of `n_tokens`.
pub fn bytes(n_layer: u32, n_tokens: u32, n_used: u32) -> u64 {
    u64::from(n_layer) * stride(n_tokens, n_used)
}

impl Routes {
    /// For passes of up to `n_tokens`; `None` if no layer is asked for. `start`: in scratch memory.
    pub(super) fn new(
        device: &Arc<Device>,
        layers: Vec<u32>,
        n_tokens: u32,
        n_used: u32,
        start: u64,
    ) -> Result<Option<Routes>> {
        if layers.is_empty() {
            return Ok(None);
        }
        let bytes = bytes(layers.len() as u32, n_tokens, n_used);
        let host = Buffer::new(device, "routes", bytes, MemoryKind::HostRead)?;
        Ok(Some(Routes { layers, n_used, start, host }))
    }

    /// Places of the ids in a graph that is a pass, or a part of one, of up to `n_tokens`.
    pub(super) fn fixed(&self, graph: &Graph, n_tokens: u32) -> Vec<(Tensor, u64)> {
        let chosen = graph.ops.iter().filter_map(|op| match *op {
            Op::Router { router, ids, .. } | Op::NormRouter { router, ids, .. } => {
                Some((router.il, ids))
            }
            _ => None,
        });
        let place = |(il, ids)| {
            let at = self.layers.iter().position(|layer| *layer == il)?;
            Some((ids, self.start + at as u64 * stride(n_tokens, self.n_used)))
        };
        chosen.filter_map(place).collect()
    }

    /// Copies the ids to the host. A barrier comes before and after.
    pub(super) fn record(&self, recorder: &mut Recorder, scratch: &Buffer, n_tokens: u32) {
        let bytes = bytes(self.layers.len() as u32, n_tokens, self.n_used);
        recorder.copy(scratch, self.start, &self.host, 0, bytes);
    }

    /// What was copied, layer by layer: in [`rows`](Self::rows).
    pub(super) fn read(&self, n_tokens: u32) -> Result<Vec<u32>> {
        let bytes = bytes(self.layers.len() as u32, n_tokens, self.n_used);
        let mut ids = vec![0; bytes as usize / 4];
        self.host.read(0, bytemuck::cast_slice_mut(&mut ids))?;
        Ok(ids)
    }

    /// The ids of each layer: those of `n_rows` tokens, of up to `n_tokens`.
    pub(super) fn rows<'a>(
        &self,
        ids: &'a mut [u32],
        n_tokens: u32,
        n_rows: u32,
    ) -> impl Iterator<Item = &'a mut [u32]> {
        let n = (n_rows * self.n_used) as usize;
        let layers = ids.chunks_exact_mut(stride(n_tokens, self.n_used) as usize / 4);
        layers.map(move |layer| &mut layer[..n])
    }
}
