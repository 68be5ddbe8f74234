//! Rewrites the plain ops of a pass into those that the device's kernels do in one. Pure: a peephole pass
//! over the op list, which knows no device, only what [`Fusions`] says.

use super::fuse_decode;
use super::uses::{Uses, replace};
use super::{Graph, Half, Input, Int8, Op, Routing, Tensor, Weight};
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
pub fn fuse(mut graph: Graph, fusions: Fusions) -> Graph {
    gate_up(&mut graph, fusions);
    let n_tokens = graph.n_tokens().unwrap_or(u32::MAX);
    if n_tokens <= fusions.few_to {
        fuse_decode::fuse(&mut graph, n_tokens <= fusions.attention_to);
    }
    match (fusions.half_from, fusions.int8_from) {
        (Some(rows), _) => convert_inputs(graph, Format::Half, rows),
        (None, Some(rows)) => convert_inputs(graph, Format::Int8, rows),
        (None, None) => graph,
    }
}

/// gate · x, up · x and the activation, where nothing else reads the products.
fn gate_up(graph: &mut Graph, fusions: Fusions) {
    let uses = Uses::of(graph);
    let mut by = HashMap::new();
    for (at, op) in graph.ops.iter().enumerate() {
        let Some((fused, products)) = fuse_glu(graph, &uses, at, op) else { continue };
        if is_possible(graph, &fused, fusions) {
            by.extend(products.into_iter().map(|product| (product, None)));
            by.insert(at, Some(fused));
        }
    }
    replace(graph, by);
}

/// The fused op of the activation at `at`, and where the products are that it replaces, if they fit together.
fn fuse_glu(graph: &Graph, uses: &Uses, at: usize, op: &Op) -> Option<(Op, Vec<usize>)> {
    let Op::Glu { glu, gate, up, out } = *op else { return None };
    let product = |t| product_of(graph, uses, t, at, out);
    let (first, g) = product(gate)?;
    let second = match up {
        Some(up) => Some(product(up)?),
        None => None,
    };
    let same = second.as_ref().is_none_or(|(_, u)| {
        (u.x, u.x_div, u.routing) == (g.x, g.x_div, g.routing)
            && (u.weights.ty, u.weights.k, u.weights.n) == (g.weights.ty, g.weights.k, g.weights.n)
    });
    let up = second.as_ref().map(|(_, u)| u.weights);
    let products = std::iter::once(first).chain(second.map(|(at, _)| at)).collect();
    let Product { weights, x, x_div, routing } = g;
    same.then_some((Op::GateUp { gate: weights, up, glu, x, x_div, routing, out }, products))
}

/// One product of a gated activation.
struct Product {
    weights: Weight,
    x: Input,
    x_div: u32,
    routing: Option<Routing>,
}

/// The product that writes `t` for the activation at `at` with result `out`, if it is one without bias that
/// nothing else reads and that could be computed there as well.
fn product_of(
    graph: &Graph,
    uses: &Uses,
    t: Tensor,
    at: usize,
    out: Tensor,
) -> Option<(usize, Product)> {
    let made = uses.writer_before(t, at)?;
    let product = match graph.ops[made] {
        Op::MulMat { weights, bias: None, x, .. } => {
            Product { weights, x, x_div: 1, routing: None }
        }
        Op::MulMatId { weights, bias: None, x, x_div, routing, .. } => {
            Product { weights, x, x_div, routing: Some(routing) }
        }
        _ => return None,
    };
    // What the activation overwrites may be read later: that is its result then.
    let is_private = (t == out || uses.readers(t) == [at])
        && !uses.readers(t).iter().any(|reader| (made + 1..at).contains(reader));
    let is_movable = product.x.tensors().into_iter().all(|x| uses.is_unchanged(x, made, at));
    (is_private && is_movable).then_some((made, product))
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
