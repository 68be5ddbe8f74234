//! Ops of passes of few tokens, on the kernels that read each weight once.

use super::{Lowering, NORM_MIN, attention_shape, glu_parts, router_spec};
use crate::exec::kernels::{Bound, KernelKey, Launch};
use crate::graph::{GluOp, Input, KvHalf, Normed, Op, Product, Routing, Shape, Tensor, Weight};
use crate::push;
use glam::UVec3;

/// Bindings and constants of a product's rows of x, and of the norm that is part of it.
struct Rows {
    /// x, delta, sum.
    bindings: [Bound; 3],
    /// NORM of shaders/include/staged_norm.glsl.
    norm: u32,
    /// Address of the norm's weight.
    weight: u64,
    eps: f32,
    store_sum: u32,
}

impl Lowering<'_> {
    fn rows(&self, input: Input, out: Tensor) -> Rows {
        let (x, unused) = match input {
            Input::Full(x) => (x, self.bound(out)),
            Input::Normed(n) => return self.normed_rows(n, out),
            Input::Half(_) | Input::Int8(_) => unreachable!("converted rows are many"),
        };
        let x = self.bound(x);
        Rows { bindings: [x, x, unused], norm: 0, weight: 0, eps: 0.0, store_sum: 0 }
    }

    /// Bindings that nothing reads or writes are x and the output.
    fn normed_rows(&self, n: Normed, out: Tensor) -> Rows {
        let bindings = [n.x, n.delta.unwrap_or(n.x), n.sum.unwrap_or(out)].map(|t| self.bound(t));
        Rows {
            bindings,
            norm: if n.delta.is_some() { 2 } else { 1 },
            weight: self.residency.address(n.weight),
            eps: n.eps,
            store_sum: n.sum.is_some().into(),
        }
    }

    /// Dense products of few rows, with matrices of one type.
    pub(super) fn mul_mat_vec(&self, x: Input, products: &[Product]) -> Launch {
        let [first, second, third] = [0, 1, 2].map(|i| products.get(i));
        let Some(&Product { weights: w, out, .. }) = first else {
            unreachable!("there is a product")
        };
        let m = self.shape(out).rows;
        let n: Vec<u32> = products.iter().map(|p| p.weights.n).collect();
        let t = self.tuning.mat_vec.several(w, &n, m);
        let Rows { bindings: [x, delta, sum], norm, weight, eps, store_sum } = self.rows(x, out);
        let kernel = t.kernel::<push::MulMatVec>(w.ty, &t.spec(false, norm));
        let address = |p: Option<&Product>| p.map_or(0, |p| self.residency.address(p.weights.id));
        let bias = |p: Option<&Product>| self.residency.optional(p.and_then(|p| p.bias));
        let n_rows = |p: Option<&Product>| p.map_or(0, |p| p.weights.n);
        let push = push::MulMatVec {
            weights: address(first),
            weights2: address(second),
            weights3: address(third),
            table: 0,
            bias: bias(first),
            bias2: bias(second),
            bias3: bias(third),
            norm: weight,
            k: w.k,
            n: w.n,
            n2: n_rows(second),
            n3: n_rows(third),
            m,
            x_div: 1,
            eps,
            store_sum,
        };
        let [y, y2, y3] = [first, second, third].map(|p| self.bound(p.map_or(out, |p| p.out)));
        Launch::new(kernel, push, &[x, y, x, delta, sum, y2, y3], t.groups).striding()
    }

    /// Products of few pairs with an expert each.
    pub(super) fn mul_mat_vec_id(
        &self,
        w: Weight,
        bias: u64,
        (x, x_div): (Tensor, u32),
        routing: Routing,
        out: Tensor,
    ) -> Launch {
        let m = self.shape(out).rows;
        let t = self.tuning.mat_vec.by_expert(w, m);
        let kernel = t.kernel::<push::MulMatVec>(w.ty, &t.spec(true, 0));
        let table = self.table(w.id);
        let push = push::MulMatVec { table, bias, k: w.k, n: w.n, m, x_div, ..Default::default() };
        let [x, y, ids] = [x, out, routing.ids].map(|t| self.bound(t));
        Launch::new(kernel, push, &[x, y, ids, x, y, y, y], t.groups).striding()
    }

    /// Gate, up and their activation, of few rows or pairs. Without `up` both are in `gate`.
    pub(super) fn gate_up_vec(
        &self,
        (gate, up): (Weight, Option<Weight>),
        glu: GluOp,
        (x, x_div): (Input, u32),
        routing: Option<Routing>,
        out: Tensor,
    ) -> Launch {
        let Shape { rows: m, cols: n } = self.shape(out);
        let t = self.tuning.mat_vec.gate_up(gate, n, m, routing.map(|_| m));
        let Rows { bindings: [x, delta, sum], norm, weight, eps, store_sum } = self.rows(x, out);
        let (op, alpha, limit) = glu_parts(glu);
        let spec = [&t.spec(routing.is_some(), norm)[..], &[op]].concat();
        let address = |w: Weight| match routing {
            Some(_) => self.table(w.id),
            None => self.residency.address(w.id),
        };
        let push = push::GateUpVec {
            gate: address(gate),
            up: address(up.unwrap_or(gate)),
            norm: weight,
            k: gate.k,
            n,
            m,
            x_div,
            up_first: if up.is_some() { 0 } else { n },
            eps,
            alpha,
            limit,
            store_sum,
            _pad: 0,
        };
        let ids = routing.map_or(x, |r| self.bound(r.ids));
        let bindings = [x, self.bound(out), ids, delta, sum];
        let kernel = t.kernel::<push::GateUpVec>(gate.ty, &spec);
        Launch::new(kernel, push, &bindings, t.groups).striding()
    }

    /// Down projections and their weighted sum.
    pub(super) fn down_combine(
        &self,
        w: Weight,
        x: Tensor,
        routing: Routing,
        out: Tensor,
    ) -> Launch {
        let n_used = routing.n_used;
        let t = self.tuning.mat_vec.down_combine(w, n_used, self.shape(out).rows);
        let kernel = t.kernel::<push::DownCombineVec>(w.ty, &[t.local, t.rows, t.units, t.chunk]);
        let push =
            push::DownCombineVec { table: self.table(w.id), k: w.k, n: w.n, n_used, _pad: 0 };
        let bindings = [x, out, routing.ids, routing.weights].map(|t| self.bound(t));
        Launch::new(kernel, push, &bindings, t.groups).striding()
    }

    /// A norm, the router and the choice of experts.
    pub(super) fn norm_router(&self, op: &Op) -> Launch {
        let Op::NormRouter { rows, normed, matrix, router: r, logits, ids, weights } = *op else {
            unreachable!("called for fused routers only")
        };
        let n_tokens = self.shape(logits).rows;
        let t = self.tuning.mat_vec.router(matrix, n_tokens);
        let [gating, renormalize, has_bias] = router_spec(&r);
        let has_delta = u32::from(rows.delta.is_some());
        let spec = [t.local, t.rows, t.cols, has_delta, gating, renormalize, has_bias];
        let push = push::RouterVec {
            matrix: self.residency.address(matrix.id),
            norm: self.residency.address(rows.weight),
            bias: self.residency.optional(r.bias),
            k: matrix.k,
            n_tokens,
            n_expert: r.n_expert,
            n_used: r.n_used,
            n_group: r.n_group,
            n_group_used: r.n_group_used,
            il: r.il,
            eps: rows.eps,
            scale: r.scale,
            norm_min: NORM_MIN,
        };
        let tensors = [
            rows.x,
            rows.delta.unwrap_or(rows.x),
            rows.sum.unwrap_or(normed),
            normed,
            logits,
            ids,
            weights,
        ];
        let bindings: Vec<Bound> =
            tensors.into_iter().map(|t| self.bound(t)).chain([Bound::Status]).collect();
        let kernel = KernelKey::of_type::<push::RouterVec>(matrix.ty, &spec);
        Launch::new(kernel, push, &bindings, t.groups).striding()
    }

    /// Attention, with what comes before it from the products on.
    pub(super) fn decode_attention(&self, op: &Op) -> Launch {
        let Op::DecodeAttention { il, attention: a, q, k, v, heads, out, partial, n_splits } = *op
        else {
            unreachable!("called for fused attention only")
        };
        let n_tokens = self.shape(q).rows;
        let shape = attention_shape(&a, n_tokens);
        let Some(t) = self.tuning.decode_attention.tile(shape, n_tokens, n_splits > 1) else {
            unreachable!("fused where there is a tile")
        };
        let rope = heads.rope;
        let push = push::FlashDecode {
            sinks: self.residency.optional(a.sinks),
            q_norm: self.residency.optional(heads.q_norm),
            k_norm: self.residency.optional(heads.k_norm),
            freqs: self.rope_freqs,
            n_tokens,
            n_head: a.n_head,
            n_kv_head: a.n_head_kv,
            n_splits,
            window: a.window,
            scale: a.scale,
            softcap: a.softcap,
            eps: heads.eps,
            n_rot: rope.map_or(0, |r| r.n_rot),
            rot_offset: rope.map_or(0, |r| r.rot_offset),
            mscale: rope.map_or(1.0, |r| r.mscale),
            _pad: 0,
        };
        let [q, k, v, out_bound] = [q, k, v, out].map(|t| self.bound(t));
        let [keys, values] = [KvHalf::K, KvHalf::V].map(|half| Bound::Kv { il, half });
        let partial = self.bound(partial.unwrap_or(out));
        let bindings = [q, k, v, keys, values, Bound::Positions, out_bound, partial, Bound::Status];
        let kernel = t.kernel(&a, &heads, self.kv.type_k, self.kv.type_v);
        Launch::new(kernel, push, &bindings, UVec3::new(t.row_blocks, a.n_head_kv, n_splits))
    }
}
