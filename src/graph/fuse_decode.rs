//! Fusions for passes of few tokens. There, each op is over almost before the next one can start, and what a
//! token takes is how many ops wait for one another: a norm becomes part of the products after it, the
//! router's product part of its choice, and down projections part of their sum. Pure.

use super::fuse::set_input;
use super::uses::{Uses, replace};
use super::{Graph, HeadPrep, Input, KvHalf, Normed, Op, Product, RopeOp, Tensor, WeightId};
use crate::gguf::GgmlType;
use std::collections::HashMap;

/// Row lengths of products that take in a norm, and of fused routers, are multiples of these.
const NORM_K: u32 = 4;
const ROUTER_K: u32 = 8;

/// Fuses what the kernels for few tokens can do.
pub(super) fn fuse(graph: &mut Graph, with_attention: bool) {
    if with_attention {
        attention(graph);
    }
    down_combine(graph);
    norm_router(graph);
    norms(graph);
    products(graph);
}

/// Down projections and the weighted sum that alone reads them.
fn down_combine(graph: &mut Graph) {
    let uses = Uses::of(graph);
    let mut by = HashMap::new();
    for (i, op) in graph.ops.iter().enumerate() {
        let Op::MulMatId { weights, bias: None, x: Input::Full(x), x_div: 1, routing, out: rows } =
            *op
        else {
            continue;
        };
        let Some(at) = uses.only_reader(rows, i) else { continue };
        let Op::Combine { weights: shares, out, .. } = graph.ops[at] else { continue };
        let is_same = shares == routing.weights
            && routing.groups.is_none()
            && [x, routing.ids].iter().all(|&t| uses.is_unchanged(t, i, at));
        if is_same {
            by.insert(i, None);
            by.insert(at, Some(Op::DownCombine { weights, x, routing, out }));
        }
    }
    replace(graph, by);
}

/// Attention, with the norms and the rotation of its heads and the stores into its cache.
fn attention(graph: &mut Graph) {
    let uses = Uses::of(graph);
    let stores = kv_stores(graph);
    let mut by = HashMap::new();
    for (at, op) in graph.ops.iter().enumerate() {
        let Op::Attention { il, attention, q, out, partial, n_splits } = *op else { continue };
        let store = |half| stores.get(&(il, half)).copied();
        let (Some((k_at, k)), Some((v_at, v))) = (store(KvHalf::K), store(KvHalf::V)) else {
            continue;
        };
        let head = attention.head_k;
        let (Some(of_q), Some(of_k)) =
            (head_ops(graph, &uses, q, at, head), head_ops(graph, &uses, k, k_at, head))
        else {
            continue;
        };
        let Some(heads) = of_q.with(&of_k) else { continue };
        let is_possible = k_at < at && v_at < at && uses.readers(v) == [v_at];
        if !is_possible {
            continue;
        }
        let fused = Op::DecodeAttention { il, attention, q, k, v, heads, out, partial, n_splits };
        by.extend(of_q.ops.iter().chain(&of_k.ops).map(|&i| (i, None)));
        by.extend([(k_at, None), (v_at, None), (at, Some(fused))]);
    }
    replace(graph, by);
}

/// Where a layer's keys and values are stored, and what of them, if once.
fn kv_stores(graph: &Graph) -> HashMap<(u32, KvHalf), (usize, Tensor)> {
    let mut stores = HashMap::new();
    for (i, op) in graph.ops.iter().enumerate() {
        if let Op::KvStore { il, half, x, .. } = *op {
            stores.insert((il, half), (i, x));
        }
    }
    stores
}

/// What is done in place to the heads of a tensor.
struct HeadOps {
    norm: Option<(WeightId, f32)>,
    rope: Option<RopeOp>,
    /// Where.
    ops: Vec<usize>,
}

impl HeadOps {
    /// That of q together with that of k, if one kernel can do both.
    fn with(&self, k: &HeadOps) -> Option<HeadPrep> {
        let eps = self.norm.or(k.norm).map_or(0.0, |(_, eps)| eps);
        let is_same = self.rope == k.rope && k.norm.is_none_or(|(_, k_eps)| k_eps == eps);
        let [q_norm, k_norm] = [self.norm, k.norm].map(|norm| norm.map(|(weight, _)| weight));
        is_same.then_some(HeadPrep { q_norm, k_norm, eps, rope: self.rope })
    }
}

/// What is done to the heads of `x` before the op at `last` takes them, if it is a norm, a rotation, or
/// both in this order, and nothing else looks at `x`.
fn head_ops(graph: &Graph, uses: &Uses, x: Tensor, last: usize, head: u32) -> Option<HeadOps> {
    let mut done = HeadOps { norm: None, rope: None, ops: Vec::new() };
    let (&end, before) = uses.readers(x).split_last()?;
    for &i in before {
        match graph.ops[i] {
            Op::RmsNorm { residual: None, weight: Some(weight), n, eps, out, .. }
                if n == head && out == x && done.ops.is_empty() =>
            {
                done.norm = Some((weight, eps));
            }
            Op::Rope { head_dim, rope, .. } if head_dim == head && done.rope.is_none() => {
                done.rope = Some(rope);
            }
            _ => return None,
        }
        done.ops.push(i);
    }
    (end == last).then_some(done)
}

/// A norm of whole rows with a weight: what it is of, and the result.
fn norm_of(graph: &Graph, op: &Op) -> Option<(Normed, Tensor)> {
    let Op::RmsNorm { x, residual, weight: Some(weight), n, eps, out } = *op else { return None };
    let (delta, sum) = residual.unzip();
    (n == graph.shape(x).cols && out != x).then_some((Normed { x, delta, sum, weight, eps }, out))
}

/// A norm, the router's product and its choice.
fn norm_router(graph: &mut Graph) {
    let uses = Uses::of(graph);
    let mut by = HashMap::new();
    for (i, op) in graph.ops.iter().enumerate() {
        let Some((rows, normed)) = norm_of(graph, op) else { continue };
        let fused = uses.readers(normed).iter().find_map(|&product| {
            let (op, choice) = router_after(graph, &uses, product)?;
            Some((product, choice, op(rows, normed)))
        });
        if let Some((product, choice, op)) = fused.filter(|_| uses.is_written_once(normed)) {
            by.insert(i, Some(op));
            by.insert(product, None);
            by.insert(choice, None);
        }
    }
    replace(graph, by);
}

/// The fused op of the product at `product`, if it is a router's, and where the choice is.
fn router_after(
    graph: &Graph,
    uses: &Uses,
    product: usize,
) -> Option<(impl Fn(Normed, Tensor) -> Op + use<>, usize)> {
    let Op::MulMat { weights: matrix, bias: None, out: logits, .. } = graph.ops[product] else {
        return None;
    };
    let choice = uses.only_reader(logits, product)?;
    let Op::Router { router, ids, weights, .. } = graph.ops[choice] else { return None };
    let has_kernel = matches!(matrix.ty, GgmlType::F32 | GgmlType::F16 | GgmlType::BF16)
        && matrix.k.is_multiple_of(ROUTER_K);
    let is_new = uses.is_written_once(ids) && uses.is_written_once(weights);
    let op =
        move |rows, normed| Op::NormRouter { rows, normed, matrix, router, logits, ids, weights };
    (has_kernel && is_new).then_some((op, choice))
}

/// Norms that only products read. Each of these norms the rows for itself; the first stores the sum.
fn norms(graph: &mut Graph) {
    let uses = Uses::of(graph);
    let mut by = HashMap::new();
    for (i, op) in graph.ops.iter().enumerate() {
        let Some((rows, normed)) = norm_of(graph, op) else { continue };
        let readers = uses.readers(normed);
        let (Some(&first), Some(&last)) = (readers.first(), readers.last()) else { continue };
        let is_possible = first > i
            && uses.is_written_once(normed)
            && readers.iter().all(|&at| takes_norm(&graph.ops[at], normed))
            && rows.reads().all(|t| uses.is_unchanged(t, i, last))
            && rows.sum.is_none_or(|sum| uses.readers(sum).iter().all(|&at| at > first));
        if !is_possible {
            continue;
        }
        by.insert(i, None);
        for &at in readers {
            let mut product = graph.ops[at].clone();
            let sum = rows.sum.filter(|_| at == first);
            set_input(&mut product, Input::Normed(Normed { sum, ..rows }));
            by.insert(at, Some(product));
        }
    }
    replace(graph, by);
}

/// Whether a product can take in the norm whose result is `normed`.
fn takes_norm(op: &Op, normed: Tensor) -> bool {
    match *op {
        Op::MulMat { weights, x, .. } | Op::GateUp { gate: weights, x, routing: None, .. } => {
            x == Input::Full(normed) && weights.k.is_multiple_of(NORM_K)
        }
        _ => false,
    }
}

/// Products of one after the other with the same rows, where their weights are of one type.
fn products(graph: &mut Graph) {
    for op in std::mem::take(&mut graph.ops) {
        let joined = graph.ops.iter_mut().rev().map_while(mul_mats_of).find_map(|before| {
            let both = join(before, &op)?;
            *before = both;
            Some(())
        });
        if joined.is_none() {
            graph.push(op);
        }
    }
}

/// The op, if it is a product or several.
fn mul_mats_of(op: &mut Op) -> Option<&mut Op> {
    matches!(op, Op::MulMat { .. } | Op::MulMats { .. }).then_some(op)
}

/// `before` and `op` in one.
fn join(before: &Op, op: &Op) -> Option<Op> {
    let Op::MulMat { weights, bias, x, out } = *op else { return None };
    let (first, mut products) = match *before {
        Op::MulMat { weights, bias, x, out } => {
            (x, [Some(Product { weights, bias, out }), None, None])
        }
        Op::MulMats { x, products } => (x, products),
        _ => return None,
    };
    let is_one_type =
        products.iter().flatten().all(|p| (p.weights.ty, p.weights.k) == (weights.ty, weights.k));
    // Only the first stores the sum.
    let is_same = match (first, x) {
        (Input::Normed(a), Input::Normed(b)) => b.sum.is_none() && a == Normed { sum: a.sum, ..b },
        (Input::Full(a), Input::Full(b)) => a == b,
        _ => false,
    };
    let free = products.iter_mut().find(|p| p.is_none())?;
    *free = Some(Product { weights, bias, out });
    (is_one_type && is_same).then_some(Op::MulMats { x: first, products })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{
        AttentionOp, Gating, GluOp, RopePairing, RouterOp, Routing, Weight, fuse::Fusions,
    };

    const FEW: Fusions =
        Fusions { half_from: None, int8_from: None, gate_up_to: 8, few_to: 8, attention_to: 8 };
    const ROPE: RopeOp =
        RopeOp { pairing: RopePairing::Neox, n_rot: 64, rot_offset: 0, mscale: 1.0 };

    fn weight(id: u32, ty: GgmlType, k: u32, n: u32) -> Weight {
        Weight { id: WeightId(id), ty, k, n, n_expert: 8 }
    }

    fn heads_norm(g: &mut Graph, x: Tensor, id: u32) {
        let weight = Some(WeightId(id));
        g.push(Op::RmsNorm { x, residual: None, weight, n: 64, eps: 1e-6, out: x });
    }

    /// Products, norms, rotation, stores and attention of 4 heads of 64 that share 2.
    fn attend(g: &mut Graph, x: Tensor) -> Tensor {
        let rows = g.shape(x).rows;
        let [q, k, v] = [(10, 256), (11, 128), (12, 128)]
            .map(|(id, n)| g.mul_mat(weight(id, GgmlType::Q4_K, 256, n), None, x));
        heads_norm(g, q, 13);
        heads_norm(g, k, 14);
        for x in [q, k] {
            g.push(Op::Rope { x, head_dim: 64, rope: ROPE });
        }
        for (half, x) in [(KvHalf::K, k), (KvHalf::V, v)] {
            g.push(Op::KvStore { il: 0, half, x, head_dim: 64 });
        }
        let attention = AttentionOp {
            n_head: 4,
            n_head_kv: 2,
            head_k: 64,
            head_v: 64,
            scale: 0.125,
            softcap: 0.0,
            window: 0,
            sinks: None,
        };
        let out = g.tensor(rows, 256);
        g.push(Op::Attention { il: 0, attention, q, out, partial: None, n_splits: 1 });
        g.mul_mat(weight(15, GgmlType::Q4_K, 256, 256), None, out)
    }

    /// A router over 8 experts and two of them, with a router of some type.
    fn experts(g: &mut Graph, x: Tensor, router: GgmlType) -> Tensor {
        let rows = g.shape(x).rows;
        let logits = g.mul_mat(weight(20, router, 256, 8), None, x);
        let (ids, weights) = (g.tensor(rows, 2), g.tensor(rows, 2));
        let router = RouterOp {
            il: 0,
            n_expert: 8,
            n_used: 2,
            gating: Gating::Softmax,
            renormalize: true,
            scale: 1.0,
            bias: None,
            n_group: 0,
            n_group_used: 0,
        };
        g.push(Op::Router { router, logits, ids, weights });
        let routing = Routing { ids, weights, n_used: 2, groups: None };
        let product = |g: &mut Graph, id, (k, n), x, x_div| {
            let out = g.tensor(rows * 2, n);
            let weights = weight(id, GgmlType::Q4_K, k, n);
            g.push(Op::MulMatId { weights, bias: None, x: Input::Full(x), x_div, routing, out });
            out
        };
        let gate = product(g, 21, (256, 512), x, 2);
        let up = product(g, 22, (256, 512), x, 2);
        g.push(Op::Glu { glu: GluOp::Swiglu, gate, up: Some(up), out: gate });
        let down = product(g, 23, (512, 256), gate, 1);
        let out = g.tensor(rows, 256);
        g.push(Op::Combine { x: down, weights, out });
        out
    }

    fn start(rows: u32) -> (Graph, Tensor, Tensor) {
        let mut g = Graph::default();
        g.tokens = Some(g.tensor(rows, 1));
        let (x, delta) = (g.tensor(rows, 256), g.tensor(rows, 256));
        (g, x, delta)
    }

    fn layer(rows: u32, router: GgmlType) -> Graph {
        let (mut g, x, delta) = start(rows);
        let (x, normed) = g.add_rms_norm(delta, x, WeightId(1), 1e-6);
        let attended = attend(&mut g, normed);
        let (x, normed) = g.add_rms_norm(attended, x, WeightId(2), 1e-6);
        let delta = experts(&mut g, normed, router);
        let (_, normed) = g.add_rms_norm(delta, x, WeightId(3), 1e-6);
        g.mul_mat(weight(30, GgmlType::Q6_K, 256, 1000), None, normed);
        g
    }

    fn names(g: &Graph) -> Vec<&'static str> {
        g.ops.iter().map(Op::name).collect()
    }

    fn fused(g: Graph) -> Graph {
        super::super::fuse::fuse(g, FEW)
    }

    #[test]
    fn a_layer_is_six_ops_one_after_the_other() {
        let g = fused(layer(1, GgmlType::F32));
        let expected = [
            "mul_mats",
            "decode_attention",
            "mul_mat",
            "norm_router",
            "gate_up",
            "down_combine",
            "mul_mat",
        ];
        assert_eq!(names(&g), expected);
    }

    #[test]
    fn of_products_with_one_norm_the_first_stores_the_sum() {
        let g = fused(layer(3, GgmlType::F32));
        let stored = |op: &Op| match *op {
            Op::MulMat { x: Input::Normed(n), .. } => Some((1, n.delta.is_some(), n.sum.is_some())),
            Op::MulMats { x: Input::Normed(n), products } => {
                Some((products.iter().flatten().count(), n.delta.is_some(), n.sum.is_some()))
            }
            _ => None,
        };
        let stored: Vec<_> = g.ops.iter().filter_map(stored).collect();
        assert_eq!(stored, [(3, true, true), (1, true, true)]);
        // The sum that the router's norm stores is what the next norm adds to.
        let router_sum = g.ops.iter().find_map(|op| match *op {
            Op::NormRouter { rows, .. } => rows.sum,
            _ => None,
        });
        let Some(Op::MulMat { x: Input::Normed(last), .. }) = g.ops.last() else {
            panic!("the head has a norm")
        };
        assert_eq!(last.delta, router_sum);
    }

    /// Products whose weights are of another type are an op of their own, which stores nothing.
    #[test]
    fn products_of_one_type_are_one_op() {
        let (mut g, x, delta) = start(1);
        let (sum, normed) = g.add_rms_norm(delta, x, WeightId(1), 1e-6);
        let types =
            [GgmlType::Q4_K, GgmlType::Q6_K, GgmlType::Q4_K, GgmlType::Q4_K, GgmlType::Q4_K];
        for (id, ty) in (2..).zip(types) {
            g.mul_mat(weight(id, ty, 256, 8), None, normed);
        }
        let g = fused(g);
        let ids = |op: &Op| op.weights().map(|w| w.id.0).collect::<Vec<_>>();
        assert_eq!(g.ops.iter().map(ids).collect::<Vec<_>>(), [vec![2, 4, 5], vec![3], vec![6]]);
        let writes = |op: &Op| op.access().1.contains(&sum);
        assert_eq!(g.ops.iter().map(writes).collect::<Vec<_>>(), [true, false, false]);
    }

    /// Every tensor that is read is written before, but for those that nothing writes.
    #[test]
    fn nothing_is_read_before_it_is_written() {
        for rows in [1, 8] {
            let plain = layer(rows, GgmlType::F32);
            let g = fused(plain.clone());
            let mut written: Vec<Tensor> = plain.tokens.into_iter().collect();
            let writes =
                |g: &Graph| -> Vec<Tensor> { g.ops.iter().flat_map(|op| op.access().1).collect() };
            let inputs = writes(&plain);
            for op in &g.ops {
                let (reads, writes) = op.access();
                for t in reads {
                    assert!(written.contains(&t) || !inputs.contains(&t), "{op:?} reads {t:?}");
                }
                written.extend(writes);
            }
        }
    }

    #[test]
    fn many_tokens_stay_as_they_are() {
        let (g, plain) = (layer(9, GgmlType::F32), Fusions { few_to: 0, attention_to: 0, ..FEW });
        assert_eq!(fused(g.clone()).ops, super::super::fuse::fuse(g, plain).ops);
    }

    #[test]
    fn a_router_without_kernel_keeps_its_norm() {
        let names = names(&fused(layer(1, GgmlType::Q8_0)));
        assert_eq!(names[3..6], ["rms_norm", "mul_mat", "router"]);
    }

    #[test]
    fn what_something_else_reads_is_not_fused() {
        // The normed rows leave the graph: the norm stays.
        let (mut g, x, _) = start(1);
        let normed = g.rms_norm(x, WeightId(1), 1e-6);
        g.mul_mat(weight(2, GgmlType::Q4_K, 256, 8), None, normed);
        let out = g.tensor(1, 256);
        g.push(Op::CopyRows { x: normed, first: 0, out });
        assert_eq!(names(&fused(g)), ["rms_norm", "mul_mat", "copy_rows"]);

        // The rows are overwritten before the product.
        let (mut g, x, other) = start(1);
        let normed = g.rms_norm(x, WeightId(1), 1e-6);
        g.push(Op::CopyRows { x: other, first: 0, out: x });
        g.mul_mat(weight(2, GgmlType::Q4_K, 256, 8), None, normed);
        assert_eq!(names(&fused(g)), ["rms_norm", "copy_rows", "mul_mat"]);

        // Somebody looks at the rotated queries.
        let mut g = layer(1, GgmlType::F32);
        let attention = |op: &Op| matches!(op, Op::Attention { .. });
        let (Some(at), out) = (g.ops.iter().position(attention), g.tensor(1, 256)) else {
            panic!("a layer attends")
        };
        let Op::Attention { q, .. } = g.ops[at] else { panic!("found above") };
        g.ops.insert(at, Op::CopyRows { x: q, first: 0, out });
        let names = names(&fused(g));
        assert!(names.contains(&"attention") && names.contains(&"rope"), "{names:?}");
    }

    /// Rotation before the norm, or another one of k: nothing that the kernel does.
    #[test]
    fn other_orders_are_not_fused() {
        let position = |g: &Graph, name| g.ops.iter().position(|op| op.name() == name);
        let mut g = layer(1, GgmlType::F32);
        let Some(rope) = position(&g, "rope") else { panic!("a layer rotates") };
        g.ops.swap(rope, rope - 2);
        assert!(names(&fused(g)).contains(&"attention"));

        let mut g = layer(1, GgmlType::F32);
        let Some(Op::Rope { rope, .. }) = g.ops.get_mut(rope + 1) else {
            panic!("k's follows q's")
        };
        rope.n_rot = 32;
        assert!(names(&fused(g)).contains(&"attention"));
    }
}
