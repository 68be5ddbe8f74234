//! The expert tensors that stay in host memory, in the order in which a pass uses them.

use super::chunks::FileTensor;
use crate::exec::residency::is_streamed;
use crate::gguf::Gguf;
use crate::graph::{Graph, Op, WeightId};
use crate::model::weights::WeightInfo;
use crate::plan::Place;

/// One of them.
#[derive(Clone, Debug)]
pub struct HostTensor {
    /// The weight.
    pub weight: WeightId,
    /// Index into [`Gguf::tensors`].
    pub tensor: usize,
    /// Where it is in the file.
    pub file: FileTensor,
    /// Layer.
    pub il: Option<u32>,
    /// `blk.3.ffn_gate_exps.weight`
    pub name: String,
}

/// Those of a model. `graph`: any pass, for the order.
pub fn host_tensors(
    gguf: &Gguf,
    weights: &[WeightInfo],
    places: &[Place],
    graph: &Graph,
) -> Vec<HostTensor> {
    let used = graph.ops.iter().flat_map(Op::weights).map(|w| w.id);
    let streamed = used.filter_map(|id| {
        let (w, place) = (&weights[id.0 as usize], places[id.0 as usize]);
        is_streamed(w, place).then_some((id, w))
    });
    streamed
        .map(|(id, w)| {
            let info = &gguf.tensors()[w.tensor];
            HostTensor {
                weight: id,
                tensor: w.tensor,
                file: FileTensor {
                    part: info.part,
                    offset: info.offset,
                    n_expert: w.weight.n_expert,
                    matrix_bytes: w.matrix_bytes,
                },
                il: w.layer,
                name: w.name.clone(),
            }
        })
        .collect()
}
