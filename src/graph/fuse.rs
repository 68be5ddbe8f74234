//! Rewrites the plain ops of a pass into those that the device's kernels do in one. Pure: a peephole pass
//! over the op list, which knows no device, only what [`Fusions`] says.

use super::fuse_decode;
use super::{GluOp, Graph, Half, Input, Int8, Op, Routing, Tensor, Weight};
use crate::gguf::GgmlType;
use std::collections::HashMap;

/// What the kernels of a pass can do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Fusions {
    /// Products of so many rows and more take f16 rows, also gate, up and their activation in one; `None`:
    /// none does.
    pub half_from: Option<u32>,
    /// Products of so many rows and more take rows of bytes; `None`: none does. Not beside `half_from`.
    pub int8_from: Option<u32>,
    /// Products of up to so many rows, or that go by a choice that is not grouped, take gate, up and their
    /// activation in one; 0: none does.
    pub gate_up_to: u32,
    /// Passes of up to so many tokens take norms into the products after them, and more: see `fuse_decode`;
    /// 0: none does.
    pub few_to: u32,
    /// Of them, passes of up to so many tokens have attention in one with what comes before it.
    pub attention_to: u32,
}

/// k of a product of converted rows is a multiple of this.
const CONVERTED_K: u32 = 32;

/// What rows are converted to.
#[derive(Clone, Copy, PartialEq)]
enum Format {
    Half,
    Int8,
}

impl Format {
    /// Whether there is a kernel for weights of a type.
    fn takes(self, ty: GgmlType) -> bool {
        match self {
            Format::Half => ty != GgmlType::F32,
            // Weights that are bytes with scales themselves.
            Format::Int8 => ty.block_len() > 1,
        }
    }
}

/// Fuses what `fusions` names.
pub fn fuse(graph: Graph, fusions: Fusions) -> Graph {
    let mut graph = gate_up(graph, fusions);
    let n_tokens = graph.tokens.map_or(u32::MAX, |t| graph.shape(t).rows);
    if n_tokens <= fusions.few_to {
        fuse_decode::fuse(&mut graph, n_tokens <= fusions.attention_to);
    }
    match (fusions.half_from, fusions.int8_from) {
        (Some(rows), _) => convert_inputs(graph, Format::Half, rows),
        (None, Some(rows)) => convert_inputs(graph, Format::Int8, rows),
        (None, None) => graph,
    }
}

/// How often each tensor is read.
fn n_reads(graph: &Graph) -> HashMap<Tensor, u32> {
    let mut reads = HashMap::new();
    for t in graph.ops.iter().flat_map(|op| op.access().0) {
        *reads.entry(t).or_insert(0) += 1;
    }
    reads
}

/// One product of a gated activation.
struct Product {
    weights: Weight,
    x: Input,
    x_div: u32,
    routing: Option<Routing>,
}

/// The product that writes `t`, if it is one without bias that nothing but the activation reads.
fn product_of(ops: &[Op], t: Tensor) -> Option<(usize, Product)> {
    let (at, op) = ops.iter().enumerate().rev().find(|(_, op)| op.access().1.contains(&t))?;
    let product = match *op {
        Op::MulMat { weights, bias: None, x, .. } => {
            Product { weights, x, x_div: 1, routing: None }
        }
        Op::MulMatId { weights, bias: None, x, x_div, routing, .. } => {
            Product { weights, x, x_div, routing: Some(routing) }
        }
        _ => return None,
    };
    Some((at, product))
}

/// gate · x, up · x and the activation, where nothing else reads the products.
fn gate_up(mut graph: Graph, fusions: Fusions) -> Graph {
    let reads = n_reads(&graph);
    let ops = std::mem::take(&mut graph.ops);
    let mut done: Vec<Op> = Vec::with_capacity(ops.len());
    for op in ops {
        let fused = match op {
            Op::Glu { glu, gate, up, out } => {
                let fused = fuse_glu(&done, glu, (gate, up), out);
                fused.filter(|(op, taken)| {
                    let since = taken.first().map_or(&[][..], |&at| &done[at..]);
                    // What the activation overwrites may be read later: that is its result then.
                    let is_private = |t: Tensor| {
                        (t == out || reads.get(&t) == Some(&1))
                            && !since.iter().any(|op| op.access().0.contains(&t))
                    };
                    is_private(gate)
                        && up.is_none_or(is_private)
                        && is_possible(&graph, op, fusions)
                })
            }
            _ => None,
        };
        if let Some((_, taken)) = &fused {
            for &at in taken.iter().rev() {
                done.remove(at);
            }
        }
        done.push(fused.map_or(op, |(op, _)| op));
    }
    graph.ops = done;
    graph
}

/// Whether there is a kernel for a fused op.
fn is_possible(graph: &Graph, op: &Op, fusions: Fusions) -> bool {
    let Op::GateUp { routing, out, .. } = *op else { return false };
    let few = match routing {
        Some(routing) => routing.groups.is_none(),
        None => graph.shape(out).rows <= fusions.gate_up_to,
    };
    match few {
        true => fusions.gate_up_to > 0,
        false => fusions
            .half_from
            .is_some_and(|from| convertible(graph, op, Format::Half, from).is_some()),
    }
}

/// The fused op and the indices of the products that it replaces, ascending, if they fit together.
fn fuse_glu(
    ops: &[Op],
    glu: GluOp,
    (gate, up): (Tensor, Option<Tensor>),
    out: Tensor,
) -> Option<(Op, Vec<usize>)> {
    let (first, g) = product_of(ops, gate)?;
    let second = match up {
        Some(up) => Some(product_of(ops, up)?),
        None => None,
    };
    let same = second.as_ref().is_none_or(|(_, u)| {
        (u.x, u.x_div, u.routing) == (g.x, g.x_div, g.routing)
            && (u.weights.ty, u.weights.k, u.weights.n) == (g.weights.ty, g.weights.k, g.weights.n)
    });
    let up = second.as_ref().map(|(_, u)| u.weights);
    let mut taken: Vec<usize> = std::iter::once(first).chain(second.map(|(at, _)| at)).collect();
    taken.sort_unstable();
    let Product { weights, x, x_div, routing } = g;
    same.then_some((Op::GateUp { gate: weights, up, glu, x, x_div, routing, out }, taken))
}

/// Converts the inputs of large products once, before the first that takes them.
fn convert_inputs(mut graph: Graph, format: Format, from: u32) -> Graph {
    let ops = std::mem::take(&mut graph.ops);
    // Of tensors that were not written since.
    let mut known: HashMap<Tensor, Input> = HashMap::new();
    for mut op in ops {
        if let Some(x) = convertible(&graph, &op, format, from) {
            let converted = *known.entry(x).or_insert_with(|| convert(&mut graph, format, x));
            set_input(&mut op, converted);
        }
        for written in op.access().1 {
            known.remove(&written);
        }
        graph.push(op);
    }
    graph
}

/// The input of a product that takes converted rows.
fn convertible(graph: &Graph, op: &Op, format: Format, from: u32) -> Option<Tensor> {
    let (w, x, out) = match *op {
        Op::MulMat { weights, x, out, .. } => (weights, x, out),
        Op::MulMatId { weights, x, routing, out, .. } if routing.groups.is_some() => {
            (weights, x, out)
        }
        Op::GateUp { gate, x, routing, out, .. } if routing.is_none_or(|r| r.groups.is_some()) => {
            (gate, x, out)
        }
        _ => return None,
    };
    let Input::Full(x) = x else { return None };
    let takes =
        graph.shape(out).rows >= from && format.takes(w.ty) && w.k.is_multiple_of(CONVERTED_K);
    takes.then_some(x)
}

pub(super) fn set_input(op: &mut Op, input: Input) {
    if let Op::MulMat { x, .. } | Op::MulMatId { x, .. } | Op::GateUp { x, .. } = op {
        *x = input;
    }
}

fn convert(graph: &mut Graph, format: Format, x: Tensor) -> Input {
    let shape = graph.shape(x);
    match format {
        Format::Half => {
            let rows = graph.tensor(shape.rows, shape.cols / 2);
            let out = Half { rows, scales: graph.tensor(shape.rows, 1) };
            graph.push(Op::HalfRows { x, out });
            Input::Half(out)
        }
        Format::Int8 => {
            let rows = graph.tensor(shape.rows, shape.cols / 4);
            let out = Int8 { rows, scales: graph.tensor(shape.rows, shape.cols / 32) };
            graph.push(Op::Int8Rows { x, out });
            Input::Int8(out)
        }
    }
}
