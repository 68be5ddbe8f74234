//! Ops to dispatches: which kernel, which constants, which grid. One short function per op.

mod decode;
mod fetch;

use super::attention::{AttentionKind, AttentionShape};
use super::kernels::{Bound, KernelKey, Launch};
use super::kv::KvShape;
use super::residency::Residency;
use super::tuning::Tuning;
use crate::graph::scratch::Layout;
use crate::graph::{
    AttentionOp, Gating, GluOp, Graph, Half, Input, Int8, KvHalf, Op, PairGroups, Product, RopeOp,
    RopePairing, RouterOp, Routing, Shape, Tensor, Weight, WeightId,
};
use crate::push;
use crate::stream::Streamer;
use glam::UVec3;

/// One step of an op. Steps of an op depend on each other in order.
#[derive(Clone, Debug)]
pub enum Step {
    /// A dispatch.
    Launch(Launch),
    /// A copy within scratch memory.
    Copy {
        /// Source offset.
        from: u64,
        /// Target offset.
        to: u64,
        /// Length.
        bytes: u64,
    },
    /// A copy from scratch memory to the results that the host reads.
    Result {
        /// Source offset.
        from: u64,
        /// Offset behind the status word.
        to: u64,
        /// Length.
        bytes: u64,
    },
}

/// What lowering needs to know of the pass.
pub struct Lowering<'a> {
    /// Shapes.
    pub graph: &'a Graph,
    /// Places in scratch memory.
    pub layout: &'a Layout,
    /// Addresses of weights.
    pub residency: &'a Residency,
    /// Addresses of experts that this pass reads in staging slots.
    pub streamer: Option<&'a Streamer>,
    /// Address of the rotation's frequencies.
    pub rope_freqs: u64,
    /// The cache's types.
    pub kv: KvShape,
    /// Sizes of workgroups and tiles.
    pub tuning: &'a Tuning,
}

impl Lowering<'_> {
    /// The steps of an op.
    pub fn steps(&self, op: &Op) -> Vec<Step> {
        let mut steps: Vec<Step> = self.fetches(op).into_iter().map(Step::Launch).collect();
        let first = steps.len();
        steps.extend(self.own_steps(op));
        // What is fetched for a later op may come meanwhile.
        if let (2.., Some(Step::Launch(launch))) = (first, steps.get_mut(first)) {
            launch.beside = true;
        }
        steps
    }

    fn own_steps(&self, op: &Op) -> Vec<Step> {
        let launches = match *op {
            Op::GetRows { weights, ids, out, scale } => {
                vec![self.get_rows(weights, ids, out, scale)]
            }
            Op::RmsNorm { .. } => vec![self.rms_norm(op)],
            Op::MulMats { x, products } => {
                let products: Vec<Product> = products.into_iter().flatten().collect();
                vec![self.mul_mat_vec(x, &products)]
            }
            Op::MulMat { weights, bias, x, out } => {
                let product = Product { weights, bias, out };
                let bias = self.residency.optional(bias);
                vec![match x {
                    Input::Half(x) => self.products(Products::new(weights, bias), x, out),
                    Input::Full(x) if !self.tuning.is_few(self.shape(out).rows) => {
                        self.products_f32(Products::new(weights, bias), x, out)
                    }
                    Input::Full(_) | Input::Normed(_) => self.mul_mat_vec(x, &[product]),
                    Input::Int8(x) => self.products_int8(Products::new(weights, bias), x, out),
                }]
            }
            Op::MulMatId { weights, bias, x, x_div, routing, out } => {
                let bias = self.residency.optional(bias);
                let grouped = Products::new(weights, bias).grouped(routing, x_div);
                vec![match (x, routing.groups) {
                    (Input::Half(x), _) => self.products(grouped, x, out),
                    (Input::Int8(x), _) => self.products_int8(grouped, x, out),
                    (Input::Full(x), Some(_)) => self.products_f32(grouped, x, out),
                    (Input::Full(x), None) => {
                        self.mul_mat_vec_id(weights, bias, (x, x_div), routing, out)
                    }
                    (Input::Normed(_), _) => unreachable!("norms are taken in by dense products"),
                }]
            }
            Op::GateUp { gate, up, glu, x, x_div, routing, out } => {
                let products = Products { glu: Some((glu, up)), ..Products::new(gate, 0) };
                vec![match (x, routing) {
                    (Input::Half(x), Some(routing)) => {
                        self.products(products.grouped(routing, x_div), x, out)
                    }
                    (Input::Half(x), None) => self.products(products, x, out),
                    (x, routing) => self.gate_up_vec((gate, up), glu, (x, x_div), routing, out),
                }]
            }
            Op::DownCombine { weights, x, routing, out } => {
                vec![self.down_combine(weights, x, routing, out)]
            }
            Op::NormRouter { .. } => vec![self.norm_router(op)],
            Op::HalfRows { x, out } => vec![self.half_rows(x, out)],
            Op::Int8Rows { x, out } => vec![self.int8_rows(x, out)],
            Op::Rope { x, head_dim, rope } => vec![self.rope(x, head_dim, rope)],
            Op::KvStore { il, half, x, head_dim } => vec![self.kv_store(il, half, x, head_dim)],
            Op::Attention { il, attention, q, out, partial, n_splits } => {
                self.attention(il, attention, q, out, partial, n_splits)
            }
            Op::DecodeAttention { .. } => vec![self.decode_attention(op)],
            Op::Router { router, logits, ids, weights } => {
                vec![self.router(router, logits, ids, weights)]
            }
            Op::GroupPairs { ids, counts, groups } => self.group_pairs(ids, counts, groups),
            Op::Glu { glu, gate, up, out } => vec![self.glu(glu, gate, up, out)],
            Op::Combine { x, weights, out } => vec![self.combine(x, weights, out)],
            Op::CopyRows { x, first, out } => return vec![self.copy_rows(x, first, out)],
            Op::ReadTop { logits, runs, top } => return self.read_top(logits, runs, top),
            Op::ReadLogits { logits, first } => return vec![self.read_logits(logits, first)],
        };
        launches.into_iter().map(Step::Launch).collect()
    }

    /// The bytes of a tensor.
    fn bound(&self, t: Tensor) -> Bound {
        Bound::Scratch { offset: self.offset(t), bytes: self.shape(t).bytes() }
    }

    fn offset(&self, t: Tensor) -> u64 {
        self.layout.offsets[t.0 as usize]
    }

    fn shape(&self, t: Tensor) -> Shape {
        self.graph.shape(t)
    }

    fn get_rows(&self, w: Weight, ids: Tensor, out: Tensor, scale: f32) -> Launch {
        let n_rows = self.shape(out).rows;
        let kernel = KernelKey::of_type::<push::GetRows>(w.ty, &[self.tuning.elementwise]);
        let push = push::GetRows {
            weights: self.residency.address(w.id),
            n: w.k,
            n_rows,
            scale,
            n_weight_rows: w.n,
        };
        Launch::over(kernel, push, &[self.bound(ids), self.bound(out)], n_rows.into())
    }

    fn rms_norm(&self, op: &Op) -> Launch {
        let Op::RmsNorm { x, residual, weight, n, eps, out } = *op else {
            unreachable!("called for norms only")
        };
        let Shape { rows, cols } = self.shape(x);
        let n_rows = rows * (cols / n);
        let (local, rows_per_group) = self.tuning.rms_norm(n, n_rows);
        let spec =
            [local, u32::from(residual.is_some()), rows_per_group, u32::from(weight.is_some())];
        let weight = self.residency.optional(weight);
        let push = push::RmsNorm { weight, n, n_rows, eps, _pad: 0 };
        let (residual, sum) = residual.unwrap_or((x, out));
        let bindings = [x, out, residual, sum].map(|t| self.bound(t));
        let items = n_rows.div_ceil(rows_per_group);
        Launch::over(KernelKey::new::<push::RmsNorm>(&spec), push, &bindings, items.into())
    }

    /// Products of f32 rows.
    fn products_f32(&self, products: Products, x: Tensor, out: Tensor) -> Launch {
        let Products { weights: w, bias, grouped, .. } = products;
        let m = self.shape(out).rows;
        let t = match grouped {
            // The list is made for the pass, whatever its weights run on.
            Some((groups, _)) => self.tuning.mul_mat.with_columns(groups.tile),
            None => self.tuning.mul_mat_dense(w.n, m),
        };
        let (weights, table) = self.addresses(w.id, grouped.is_some());
        let push =
            push::MulMat { weights, table, bias, k: w.k, n: w.n, m, x_div: products.x_div() };
        let x = self.bound(x);
        let ([pairs, tiles], columns) = self.columns(grouped, x, m, t.bn);
        let kernel = KernelKey::of_type::<push::MulMat>(w.ty, &t.spec(grouped.is_some()));
        let groups = UVec3::new(w.n.div_ceil(t.bm), columns, 1);
        Launch::new(kernel, push, &[x, self.bound(out), pairs, tiles], groups)
    }

    /// Address of a matrix and of the table of the experts' matrices; a kernel takes one of them.
    fn addresses(&self, weight: WeightId, is_grouped: bool) -> (u64, u64) {
        match is_grouped {
            true => (0, self.table(weight)),
            false => (self.residency.address(weight), 0),
        }
    }

    /// Pairs and tiles of grouped products, or `unused` twice, and how many tiles of `bn` of the `m` rows.
    fn columns(
        &self,
        grouped: Option<(PairGroups, u32)>,
        unused: Bound,
        m: u32,
        bn: u32,
    ) -> ([Bound; 2], u32) {
        match grouped {
            Some((g, _)) => ([g.pairs, g.tiles].map(|t| self.bound(t)), self.shape(g.tiles).rows),
            None => ([unused; 2], m.div_ceil(bn)),
        }
    }

    /// Address of the table of an expert tensor's addresses: in slots, or where the experts stay.
    fn table(&self, weight: WeightId) -> u64 {
        let slot = self.streamer.and_then(|s| s.table(weight));
        slot.unwrap_or_else(|| self.residency.table(weight))
    }

    fn half_rows(&self, x: Tensor, out: Half) -> Launch {
        let Shape { rows: n_rows, cols: n } = self.shape(x);
        let kernel = KernelKey::new::<push::HalfRows>(&[self.tuning.scan]);
        let bindings = [x, out.rows, out.scales].map(|t| self.bound(t));
        Launch::over(kernel, push::HalfRows { n, n_rows }, &bindings, n_rows.into())
    }

    /// Products of f16 rows, on matrix units.
    fn products(&self, products: Products, x: Half, out: Tensor) -> Launch {
        let Products { weights: w, bias, glu, grouped } = products;
        let Shape { rows: m, cols: n } = self.shape(out);
        let Some(units) = &self.tuning.matrix else {
            unreachable!("f16 rows are for matrix units")
        };
        let is_glu = glu.is_some();
        let chosen = match grouped {
            Some((groups, _)) => units.grouped(groups.tile, is_glu),
            None => units.dense(n, m, is_glu),
        };
        let Some(t) = chosen else { unreachable!("a device with matrix units has a tile") };
        let (act, alpha, limit) = glu.map_or((0, 0.0, 0.0), |(glu, _)| glu_parts(glu));
        let up = glu.and_then(|(_, up)| up);
        let halves = match (glu, up) {
            (None, _) => 0,
            (Some(_), Some(_)) => 1,
            (Some(_), None) => 2,
        };
        let [mm, mn, mk] = units.shape;
        let spec = [
            units.local_size(t),
            u32::from(grouped.is_some()),
            halves,
            act,
            t.bm,
            t.bn,
            t.bk,
            t.warps_m,
            t.warps_n,
            mm,
            mn,
            mk,
            t.stages,
        ];
        let (weights, table) = self.addresses(w.id, grouped.is_some());
        let (weights2, table2) = up.map_or((0, 0), |up| self.addresses(up.id, grouped.is_some()));
        let push = push::MulMatCm {
            weights,
            table,
            weights2,
            table2,
            bias,
            k: w.k,
            n,
            m,
            x_div: products.x_div(),
            alpha,
            limit,
        };
        let rows = self.bound(x.rows);
        let ([pairs, tiles], columns) = self.columns(grouped, rows, m, t.bn);
        let bindings = [rows, self.bound(out), pairs, tiles, self.bound(x.scales)];
        let rows = if is_glu { t.bm / 2 } else { t.bm };
        let kernel = KernelKey::of_type::<push::MulMatCm>(w.ty, &spec);
        Launch::new(kernel, push, &bindings, UVec3::new(n.div_ceil(rows), columns, 1))
    }

    fn int8_rows(&self, x: Tensor, out: Int8) -> Launch {
        let Shape { rows, cols } = self.shape(out.scales);
        let n_blocks = rows * cols;
        let local = self.tuning.elementwise;
        let kernel = KernelKey::new::<push::Int8Rows>(&[local]);
        let bindings = [x, out.rows, out.scales].map(|t| self.bound(t));
        let items = u64::from(n_blocks).div_ceil(local.into());
        Launch::over(kernel, push::Int8Rows { n_blocks }, &bindings, items)
    }

    /// Products of rows of bytes.
    fn products_int8(&self, products: Products, x: Int8, out: Tensor) -> Launch {
        let Products { weights: w, bias, grouped, .. } = products;
        let m = self.shape(out).rows;
        let Some(int8) = self.tuning.int8 else {
            unreachable!("rows of bytes are for integer products")
        };
        let t = if grouped.is_some() { int8.tile } else { int8.dense(w.n, m) };
        let (weights, table) = self.addresses(w.id, grouped.is_some());
        let push =
            push::MulMatInt8 { weights, table, bias, k: w.k, n: w.n, m, x_div: products.x_div() };
        let rows = self.bound(x.rows);
        let ([pairs, tiles], columns) = self.columns(grouped, rows, m, t.bn);
        let bindings = [rows, self.bound(out), pairs, tiles, self.bound(x.scales)];
        let kernel = KernelKey::of_type::<push::MulMatInt8>(w.ty, &t.spec(grouped.is_some()));
        Launch::new(kernel, push, &bindings, UVec3::new(w.n.div_ceil(t.bm), columns, 1))
    }

    fn rope(&self, x: Tensor, head_dim: u32, rope: RopeOp) -> Launch {
        let Shape { rows: n_tokens, cols } = self.shape(x);
        let n_head = cols / head_dim;
        let pairing = match rope.pairing {
            RopePairing::Adjacent => 0,
            RopePairing::Neox => 1,
        };
        let push = push::Rope {
            freqs: self.rope_freqs,
            n_head,
            head_dim,
            n_rot: rope.n_rot,
            rot_offset: rope.rot_offset,
            n_tokens,
            mscale: rope.mscale,
        };
        let pairs = u64::from(n_tokens) * u64::from(n_head) * u64::from(rope.n_rot / 2);
        self.elementwise(&[pairing], push, &[self.bound(x), Bound::Positions], pairs)
    }

    fn kv_store(&self, il: u32, half: KvHalf, x: Tensor, head_dim: u32) -> Launch {
        let Shape { rows: n_tokens, cols } = self.shape(x);
        let n_head = cols / head_dim;
        let ty = match half {
            KvHalf::K => self.kv.type_k,
            KvHalf::V => self.kv.type_v,
        };
        let units = u64::from(head_dim.div_ceil(ty.unit()));
        let items = u64::from(n_tokens) * u64::from(n_head) * units;
        let bindings = [self.bound(x), Bound::Kv { il, half }, Bound::Positions];
        self.elementwise(
            &[ty.spec()],
            push::KvStore { n_head, head_dim, n_tokens },
            &bindings,
            items,
        )
    }

    fn attention(
        &self,
        il: u32,
        a: AttentionOp,
        q: Tensor,
        out: Tensor,
        partial: Option<Tensor>,
        n_splits: u32,
    ) -> Vec<Launch> {
        let n_tokens = self.shape(q).rows;
        let sinks = self.residency.optional(a.sinks);
        let shape = attention_shape(&a, n_tokens);
        let kind = AttentionKind {
            type_k: self.kv.type_k,
            type_v: self.kv.type_v,
            sinks: a.sinks.is_some(),
            softcap: a.softcap != 0.0,
        };
        let t = self.tuning.attention(shape, kind.type_k, kind.type_v);
        let push = push::FlashAttn {
            sinks,
            n_tokens,
            n_head: a.n_head,
            n_kv_head: a.n_head_kv,
            n_splits,
            window: a.window,
            scale: a.scale,
            softcap: a.softcap,
            _pad: 0,
        };
        let (k, v) = (Bound::Kv { il, half: KvHalf::K }, Bound::Kv { il, half: KvHalf::V });
        let parts = self.bound(partial.unwrap_or(out));
        let bindings = [self.bound(q), k, v, Bound::Positions, self.bound(out), parts];
        let groups = UVec3::new(shape.row_blocks(t), a.n_head_kv, n_splits);
        let kernel = t.kernel(shape, kind);
        let flash = match t.matrix {
            None => Launch::new(kernel, push, &bindings, groups),
            // The same struct but for its name.
            Some(_) => {
                let push: push::FlashAttnCm = bytemuck::cast(push);
                Launch::new(kernel, push, &bindings, groups)
            }
        };
        if n_splits == 1 {
            return vec![flash];
        }
        let n_rows = n_tokens * a.n_head;
        let push =
            push::FlashAttnMerge { sinks, n_rows, n_head: a.n_head, head_v: a.head_v, n_splits };
        let kernel =
            KernelKey::new::<push::FlashAttnMerge>(&[self.tuning.subgroup, u32::from(kind.sinks)]);
        vec![flash, Launch::over(kernel, push, &[parts, self.bound(out)], n_rows.into())]
    }

    fn router(&self, r: RouterOp, logits: Tensor, ids: Tensor, weights: Tensor) -> Launch {
        let n_tokens = self.shape(logits).rows;
        let [gating, renormalize, has_bias] = router_spec(&r);
        let spec = [self.tuning.subgroup, gating, renormalize, has_bias];
        let push = push::Router {
            bias: self.residency.optional(r.bias),
            n_expert: r.n_expert,
            n_used: r.n_used,
            n_tokens,
            n_group: r.n_group,
            n_group_used: r.n_group_used,
            il: r.il,
            scale: r.scale,
            norm_min: NORM_MIN,
        };
        let bindings = [self.bound(logits), self.bound(ids), self.bound(weights), Bound::Status];
        Launch::over(KernelKey::new::<push::Router>(&spec), push, &bindings, n_tokens.into())
    }

    fn group_pairs(&self, ids: Tensor, counts: Tensor, groups: PairGroups) -> Vec<Launch> {
        let n_pairs = self.shape(groups.pairs).rows;
        let n_expert = self.shape(counts).rows;
        let n_tiles_max = self.shape(groups.tiles).rows;
        let spec = [self.tuning.scan];
        let (ids, counts) = (self.bound(ids), self.bound(counts));
        let count = Launch::over(
            KernelKey::new::<push::ExpertCount>(&spec),
            push::ExpertCount { n_pairs, n_expert },
            &[ids, counts],
            n_expert.into(),
        );
        let sort = Launch::over(
            KernelKey::new::<push::ExpertSort>(&spec),
            push::ExpertSort { n_pairs, n_expert, tile: groups.tile, n_tiles_max },
            &[ids, counts, self.bound(groups.pairs), self.bound(groups.tiles)],
            n_expert.into(),
        );
        vec![count, sort]
    }

    fn glu(&self, glu: GluOp, gate: Tensor, up: Option<Tensor>, out: Tensor) -> Launch {
        let Shape { rows, cols } = self.shape(out);
        let (op, alpha, limit) = glu_parts(glu);
        let push = push::Glu { count: rows * cols, n: cols, alpha, limit };
        let bindings = [gate, up.unwrap_or(gate), out].map(|t| self.bound(t));
        let fused = u32::from(up.is_none());
        self.elementwise(&[op, fused], push, &bindings, (rows * cols).into())
    }

    fn combine(&self, x: Tensor, weights: Tensor, out: Tensor) -> Launch {
        let Shape { rows: n_tokens, cols: n } = self.shape(out);
        let n_used = self.shape(weights).cols;
        let bindings = [x, weights, out].map(|t| self.bound(t));
        let items = u64::from(n_tokens) * u64::from(n);
        self.elementwise(&[0], push::MoeCombine { n, n_tokens, n_used }, &bindings, items)
    }

    fn copy_rows(&self, x: Tensor, first: u32, out: Tensor) -> Step {
        let Shape { rows, cols } = self.shape(out);
        let row_bytes = u64::from(cols) * 4;
        let from = self.offset(x) + u64::from(first) * row_bytes;
        Step::Copy { from, to: self.offset(out), bytes: u64::from(rows) * row_bytes }
    }

    fn read_top(&self, logits: Tensor, runs: Tensor, top: Tensor) -> Vec<Step> {
        let Shape { rows: n_rows, cols: n } = self.shape(logits);
        let (k, n_parts) = (self.shape(top).cols, self.tuning.top_parts);
        let kernel = KernelKey::new::<push::TopLogits>(&[self.tuning.scan]);
        let scratch = [logits, top, runs].map(|t| self.bound(t));
        let bindings = [&scratch[..], &[Bound::Status]].concat();
        let push = push::TopLogits { n, n_rows, n_parts, k };
        let launch = Launch::new(kernel, push, &bindings, UVec3::new(n_parts, n_rows, 1));
        let bytes = self.shape(top).bytes();
        vec![Step::Launch(launch), Step::Result { from: self.offset(top), to: 0, bytes }]
    }

    fn read_logits(&self, logits: Tensor, first: u32) -> Step {
        let shape = self.shape(logits);
        let to = u64::from(first) * u64::from(shape.cols) * 4;
        Step::Result { from: self.offset(logits), to, bytes: shape.bytes() }
    }

    /// A launch with one invocation per item. `spec` follows the workgroup size.
    fn elementwise<P: push::PushConstants>(
        &self,
        spec: &[u32],
        push: P,
        bindings: &[Bound],
        items: u64,
    ) -> Launch {
        let local = self.tuning.elementwise;
        let spec: Vec<u32> = std::iter::once(local).chain(spec.iter().copied()).collect();
        Launch::over(KernelKey::new::<P>(&spec), push, bindings, items.div_ceil(local.into()))
    }
}

/// What the tile of attention of `n_tokens` is chosen for.
fn attention_shape(a: &AttentionOp, n_tokens: u32) -> AttentionShape {
    AttentionShape::new((a.n_head, a.n_head_kv), (a.head_k, a.head_v), n_tokens)
}

/// Products of many rows with one matrix or two.
#[derive(Clone, Copy)]
struct Products {
    weights: Weight,
    /// Address of the bias; 0: none.
    bias: u64,
    /// The activation, and the second matrix unless both are in one.
    glu: Option<(GluOp, Option<Weight>)>,
    /// By expert, and pairs per row of x.
    grouped: Option<(PairGroups, u32)>,
}

impl Products {
    fn new(weights: Weight, bias: u64) -> Self {
        Products { weights, bias, glu: None, grouped: None }
    }

    /// Pairs per row of x.
    fn x_div(&self) -> u32 {
        self.grouped.map_or(1, |(_, x_div)| x_div)
    }

    fn grouped(self, routing: Routing, x_div: u32) -> Self {
        Products { grouped: routing.groups.map(|groups| (groups, x_div)), ..self }
    }
}

/// An activation as shaders/include/glu.glsl numbers it, its slope and its clamp.
fn glu_parts(glu: GluOp) -> (u32, f32, f32) {
    match glu {
        GluOp::Swiglu => (0, 0.0, 0.0),
        GluOp::Geglu => (1, 0.0, 0.0),
        GluOp::Reglu => (2, 0.0, 0.0),
        GluOp::SwigluOai { alpha, limit } => (3, alpha, limit),
    }
}

/// GATING, NORM_WEIGHTS and HAS_BIAS of shaders/include/choose.glsl.
fn router_spec(r: &RouterOp) -> [u32; 3] {
    let gating = match r.gating {
        Gating::Softmax => 0,
        Gating::Sigmoid => 1,
        Gating::SoftmaxChosen => 2,
    };
    [gating, u32::from(r.renormalize), u32::from(r.bias.is_some())]
}

/// Least sum that chosen weights are divided by, as in llama.cpp: the smallest normal f16.
const NORM_MIN: f32 = 6.103_515_6e-5;
