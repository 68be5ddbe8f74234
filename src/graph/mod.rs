//! A forward pass as data: tensors that live in scratch memory, and the ops on them in order.
//!
//! The graph knows weights by id and shape only, no addresses and no Vulkan type. `model/` builds it,
//! `scratch` decides where its tensors live, `exec/` turns each op into dispatches.
//! All tensors are row-major matrices of 32-bit values: `[rows][cols]`, a row per token (or per
//! token and head, or per pair of token and used expert).

pub mod fuse;
mod fuse_decode;
pub mod parts;
pub mod scratch;
mod uses;

use crate::gguf::GgmlType;

/// A tensor of the graph, by index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tensor(pub u32);

/// A weight of the model, by index into [`crate::model::Model::weights`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WeightId(pub u32);

/// What the graph needs to know of a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Weight {
    /// Which one.
    pub id: WeightId,
    /// Tensor type of the file.
    pub ty: GgmlType,
    /// Input features: the length of a row (`ne0`).
    pub k: u32,
    /// Output features: rows of one matrix (`ne1`), 1 for a vector.
    pub n: u32,
    /// Matrices, one per expert (`ne2`); 1 for a dense weight.
    pub n_expert: u32,
}

/// Shape of a tensor: `rows * cols` values of 4 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Rows.
    pub rows: u32,
    /// Values of a row.
    pub cols: u32,
}

impl Shape {
    /// Bytes of the whole tensor.
    pub fn bytes(self) -> u64 {
        u64::from(self.rows) * u64::from(self.cols) * 4
    }
}

/// How the pairs of a rotation are laid out in a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RopePairing {
    /// (2i, 2i + 1)
    Adjacent,
    /// (i, i + n_rot / 2)
    Neox,
}

/// Rotary embedding of `n_rot` dimensions of each head, starting at `rot_offset`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeOp {
    /// Which dimensions belong together.
    pub pairing: RopePairing,
    /// Dimensions rotated, even.
    pub n_rot: u32,
    /// First rotated dimension.
    pub rot_offset: u32,
    /// Factor on the rotated values (YaRN's attention factor).
    pub mscale: f32,
}

/// What an attention op computes besides softmax(q·k)·v.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionOp {
    /// Query heads.
    pub n_head: u32,
    /// KV heads; divides `n_head`.
    pub n_head_kv: u32,
    /// Size of a query and key head.
    pub head_k: u32,
    /// Size of a value head.
    pub head_v: u32,
    /// Factor on q·k.
    pub scale: f32,
    /// Soft cap of the scores, 0 for none.
    pub softcap: f32,
    /// Sliding window in tokens, 0 for none.
    pub window: u32,
    /// Attention sinks, one value a head.
    pub sinks: Option<WeightId>,
}

/// What becomes of heads of q and k before attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadPrep {
    /// Norm of each query head, `[head_k]`.
    pub q_norm: Option<WeightId>,
    /// Norm of each key head, `[head_k]`.
    pub k_norm: Option<WeightId>,
    /// Added under the root.
    pub eps: f32,
    /// The rotation.
    pub rope: Option<RopeOp>,
}

/// How router logits become scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Gating {
    /// Softmax over all experts.
    Softmax,
    /// Sigmoid of each.
    Sigmoid,
    /// Softmax over the chosen experts' logits.
    SoftmaxChosen,
}

/// The choice of experts: top `n_used` of `n_expert`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterOp {
    /// Layer, for messages.
    pub il: u32,
    /// Experts.
    pub n_expert: u32,
    /// Experts chosen per token.
    pub n_used: u32,
    /// Scores.
    pub gating: Gating,
    /// Chosen weights are divided by their sum.
    pub renormalize: bool,
    /// Factor on the weights.
    pub scale: f32,
    /// Added to the scores for choosing only.
    pub bias: Option<WeightId>,
    /// Groups of experts, 0 or 1 for none.
    pub n_group: u32,
    /// Groups kept.
    pub n_group_used: u32,
}

/// The gated activation of a feed-forward layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GluOp {
    /// silu(gate) * up
    Swiglu,
    /// gelu(gate) * up
    Geglu,
    /// max(gate, 0) * up
    Reglu,
    /// gpt-oss: clamped, sigmoid with slope `alpha`, up + 1
    SwigluOai {
        /// Slope of the sigmoid.
        alpha: f32,
        /// Clamp.
        limit: f32,
    },
}

/// Key or value half of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvHalf {
    /// Keys.
    K,
    /// Values.
    V,
}

/// Where the pairs (token, used expert) of a layer come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Routing {
    /// `[n_tokens][n_used]` expert ids.
    pub ids: Tensor,
    /// `[n_tokens][n_used]` weights, f32.
    pub weights: Tensor,
    /// Experts used per token.
    pub n_used: u32,
    /// The pairs grouped by expert, for many tokens.
    pub groups: Option<PairGroups>,
}

impl Routing {
    /// The tensors by which products go.
    fn tensors(&self) -> impl Iterator<Item = Tensor> + use<> {
        let groups = self.groups.map(|g| [g.pairs, g.tiles]);
        std::iter::once(self.ids).chain(groups.into_iter().flatten())
    }
}

/// Pairs grouped by expert, and the tiles of the grouped matrix product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PairGroups {
    /// `[n_pairs]` pair indices, ascending within an expert.
    pub pairs: Tensor,
    /// `[n_tiles][3]`: expert, first, count.
    pub tiles: Tensor,
    /// Pairs per tile.
    pub tile: u32,
}

/// Rows as f16 for matrix units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Half {
    /// `[rows][k / 2]`: two values each.
    pub rows: Tensor,
    /// `[rows][1]`: what a row must be multiplied by, f32.
    pub scales: Tensor,
}

/// Rows whose norm is part of the product that takes them: s / rms(s) * weight, s = x (+ delta).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Normed {
    /// `[rows][k]`
    pub x: Tensor,
    /// Added first.
    pub delta: Option<Tensor>,
    /// Where s goes; of several products with the same rows one stores it.
    pub sum: Option<Tensor>,
    /// Factor per element.
    pub weight: WeightId,
    /// Added under the root.
    pub eps: f32,
}

impl Normed {
    fn reads(self) -> impl Iterator<Item = Tensor> {
        std::iter::once(self.x).chain(self.delta)
    }
}

/// Rows as bytes for integer products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Int8 {
    /// `[rows][k / 4]`: four values each.
    pub rows: Tensor,
    /// `[rows][k / 32]`: what each 32 values must be multiplied by, f32.
    pub scales: Tensor,
}

/// What a product multiplies with: rows of f32, or the same as f16 or bytes, or before a norm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Input {
    /// f32
    Full(Tensor),
    /// f16
    Half(Half),
    /// Bytes
    Int8(Int8),
    /// f32 before the norm
    Normed(Normed),
}

impl Input {
    /// The tensors that it is.
    fn tensors(self) -> Vec<Tensor> {
        match self {
            Input::Full(x) => vec![x],
            Input::Half(h) => vec![h.rows, h.scales],
            Input::Int8(i) => vec![i.rows, i.scales],
            Input::Normed(n) => n.reads().collect(),
        }
    }

    /// What is stored beside the product.
    fn stored(self) -> Option<Tensor> {
        match self {
            Input::Normed(n) => n.sum,
            Input::Full(_) | Input::Half(_) | Input::Int8(_) => None,
        }
    }
}

/// Runs of logits that are searched apart: `RUNS` of shaders/top_logits.comp.
pub const TOP_RUNS: u32 = 512;

/// One of several products with the same rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Product {
    /// `[n][k]`
    pub weights: Weight,
    /// `[n]`, f32.
    pub bias: Option<WeightId>,
    /// `[rows][n]`
    pub out: Tensor,
}

/// One step of a forward pass.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// out `[n_tokens][k]` = rows of `weights` by token id, times `scale`.
    GetRows {
        /// The embedding matrix.
        weights: Weight,
        /// `[n_tokens][1]` ids.
        ids: Tensor,
        /// The rows.
        out: Tensor,
        /// Factor.
        scale: f32,
    },
    /// s = x (+ residual); sum = s if there is a residual; out = s / rms(s) * weight, per `n` values.
    RmsNorm {
        /// Input.
        x: Tensor,
        /// What is added first, and where the sum goes.
        residual: Option<(Tensor, Tensor)>,
        /// Factor per element.
        weight: Option<WeightId>,
        /// Row length; divides the tensor's columns (a norm per head).
        n: u32,
        /// Added under the root.
        eps: f32,
        /// Output; may be `x` when there is no residual.
        out: Tensor,
    },
    /// out = x · weightsᵀ + bias, per row.
    MulMat {
        /// `[n][k]`
        weights: Weight,
        /// `[n]`, f32.
        bias: Option<WeightId>,
        /// `[rows][k]`
        x: Input,
        /// `[rows][n]`
        out: Tensor,
    },
    /// The same with up to three matrices of one type and input size.
    MulMats {
        /// `[rows][k]`
        x: Input,
        /// The products.
        products: [Option<Product>; 3],
    },
    /// The same per pair (token, used expert) with that expert's matrix.
    MulMatId {
        /// `[n_expert][n][k]`
        weights: Weight,
        /// `[n_expert][n]`, f32.
        bias: Option<WeightId>,
        /// `[n_tokens][k]` (`x_div` = used experts) or `[n_pairs][k]` (`x_div` = 1).
        x: Input,
        /// Pairs per row of x.
        x_div: u32,
        /// Who goes where.
        routing: Routing,
        /// `[n_pairs][n]`
        out: Tensor,
    },
    /// The first half of a feed-forward block: out = act(gate · x) * (up · x), per row or pair.
    GateUp {
        /// `[n][k]` or `[n_expert][n][k]`; without `up` both, `[2 n][k]`, gate first.
        gate: Weight,
        /// As gate.
        up: Option<Weight>,
        /// The activation.
        glu: GluOp,
        /// `[rows][k]`
        x: Input,
        /// Pairs per row of x.
        x_div: u32,
        /// Who goes where; `None` for a dense block.
        routing: Option<Routing>,
        /// `[rows][n]` or `[n_pairs][n]`
        out: Tensor,
    },
    /// The second half of a mixture of experts: out = weighted sum of down · x over each token's pairs, in
    /// order.
    DownCombine {
        /// `[n_expert][n][k]`
        weights: Weight,
        /// `[n_pairs][k]`
        x: Tensor,
        /// Who goes where; not grouped.
        routing: Routing,
        /// `[n_tokens][n]`
        out: Tensor,
    },
    /// Rows as f16, each with a scale.
    HalfRows {
        /// `[rows][k]`
        x: Tensor,
        /// The same.
        out: Half,
    },
    /// Rows as bytes, with a scale for each 32.
    Int8Rows {
        /// `[rows][k]`
        x: Tensor,
        /// The same.
        out: Int8,
    },
    /// Rotation of x in place, by the positions of its rows.
    Rope {
        /// `[n_tokens][n_head * head_dim]`
        x: Tensor,
        /// Size of a head.
        head_dim: u32,
        /// The rotation.
        rope: RopeOp,
    },
    /// Rows of x go into the cache cells of their positions.
    KvStore {
        /// Layer.
        il: u32,
        /// Keys or values.
        half: KvHalf,
        /// `[n_tokens][n_head_kv * head_dim]`
        x: Tensor,
        /// Size of a head.
        head_dim: u32,
    },
    /// out = attention of q over the layer's cache, causal.
    Attention {
        /// Layer.
        il: u32,
        /// Shapes and variations.
        attention: AttentionOp,
        /// `[n_tokens][n_head * head_k]`
        q: Tensor,
        /// `[n_tokens][n_head * head_v]`
        out: Tensor,
        /// Partial results of split keys, if the keys are split.
        partial: Option<Tensor>,
        /// Ranges of keys computed apart and merged.
        n_splits: u32,
    },
    /// Norms and rotation of heads, k and v into the layer's cache, and attention over it. The positions
    /// are one after the other.
    DecodeAttention {
        /// Layer.
        il: u32,
        /// Shapes and variations.
        attention: AttentionOp,
        /// `[n_tokens][n_head * head_k]`
        q: Tensor,
        /// `[n_tokens][n_head_kv * head_k]`
        k: Tensor,
        /// `[n_tokens][n_head_kv * head_v]`
        v: Tensor,
        /// What becomes of q and k first.
        heads: HeadPrep,
        /// `[n_tokens][n_head * head_v]`
        out: Tensor,
        /// Partial results of split cells, if they are split.
        partial: Option<Tensor>,
        /// Ranges of cells computed apart and joined.
        n_splits: u32,
    },
    /// Expert ids and weights from router logits.
    Router {
        /// The choice.
        router: RouterOp,
        /// `[n_tokens][n_expert]`
        logits: Tensor,
        /// `[n_tokens][n_used]` expert ids out.
        ids: Tensor,
        /// `[n_tokens][n_used]` weights out.
        weights: Tensor,
    },
    /// A norm, router logits, and the choice.
    NormRouter {
        /// What the norm is of.
        rows: Normed,
        /// `[n_tokens][k]`: after the norm.
        normed: Tensor,
        /// `[n_expert][k]`
        matrix: Weight,
        /// The choice.
        router: RouterOp,
        /// `[n_tokens][n_expert]`
        logits: Tensor,
        /// `[n_tokens][n_used]` expert ids out.
        ids: Tensor,
        /// `[n_tokens][n_used]` weights out.
        weights: Tensor,
    },
    /// Pairs grouped by expert.
    GroupPairs {
        /// `[n_tokens][n_used]` expert ids.
        ids: Tensor,
        /// `[n_expert][1]`: pairs of each expert.
        counts: Tensor,
        /// The groups.
        groups: PairGroups,
    },
    /// out = act(gate) * up.
    Glu {
        /// The activation.
        glu: GluOp,
        /// Gate, `[rows][n]`; without `up` both side by side, `[rows][2 n]`.
        gate: Tensor,
        /// Up, `[rows][n]`.
        up: Option<Tensor>,
        /// `[rows][n]`; may be `gate` if there is `up`.
        out: Tensor,
    },
    /// out `[n_tokens][n]` = weighted sum of each token's pairs, in order.
    Combine {
        /// `[n_pairs][n]`
        x: Tensor,
        /// `[n_tokens][n_used]`
        weights: Tensor,
        /// Sum.
        out: Tensor,
    },
    /// Consecutive rows of a tensor.
    CopyRows {
        /// Source.
        x: Tensor,
        /// First row taken.
        first: u32,
        /// Destination, all rows.
        out: Tensor,
    },
    /// The `k` largest logits of each row, descending, go to the host.
    ReadTop {
        /// `[rows][n_vocab]`
        logits: Tensor,
        /// `[rows][2 * TOP_RUNS]`: what the kernel finds first.
        runs: Tensor,
        /// `[2 * rows][k]`: ids, then values.
        top: Tensor,
    },
    /// Rows of logits go to the host.
    ReadLogits {
        /// `[rows][n_vocab]`
        logits: Tensor,
        /// Row of the host's buffer that the first of them becomes.
        first: u32,
    },
}

impl Op {
    /// Tensors read and tensors written. A tensor changed in place is in both.
    pub fn access(&self) -> (Vec<Tensor>, Vec<Tensor>) {
        match *self {
            Op::GetRows { ids, out, .. } => (vec![ids], vec![out]),
            Op::RmsNorm { x, residual: None, out, .. } => (vec![x], vec![out]),
            Op::RmsNorm { x, residual: Some((r, sum)), out, .. } => (vec![x, r], vec![sum, out]),
            Op::MulMat { x, out, .. } => {
                (x.tensors(), [out].into_iter().chain(x.stored()).collect())
            }
            Op::MulMats { x, products } => {
                let out = products.into_iter().flatten().map(|p| p.out);
                (x.tensors(), out.chain(x.stored()).collect())
            }
            Op::MulMatId { x, routing, out, .. } => {
                (x.tensors().into_iter().chain(routing.tensors()).collect(), vec![out])
            }
            Op::GateUp { x, routing, out, .. } => {
                let routing = routing.iter().flat_map(|r| r.tensors());
                let written = [out].into_iter().chain(x.stored()).collect();
                (x.tensors().into_iter().chain(routing).collect(), written)
            }
            Op::DownCombine { x, routing, out, .. } => {
                (vec![x, routing.ids, routing.weights], vec![out])
            }
            Op::HalfRows { x, out } => (vec![x], vec![out.rows, out.scales]),
            Op::Int8Rows { x, out } => (vec![x], vec![out.rows, out.scales]),
            Op::Rope { x, .. } => (vec![x], vec![x]),
            Op::KvStore { x, .. } => (vec![x], vec![]),
            Op::Attention { q, out, partial, .. } => {
                (vec![q], std::iter::once(out).chain(partial).collect())
            }
            Op::DecodeAttention { q, k, v, out, partial, .. } => {
                (vec![q, k, v], std::iter::once(out).chain(partial).collect())
            }
            Op::Router { logits, ids, weights, .. } => (vec![logits], vec![ids, weights]),
            Op::NormRouter { rows, normed, logits, ids, weights, .. } => {
                let written = [normed, logits, ids, weights].into_iter().chain(rows.sum);
                (rows.reads().collect(), written.collect())
            }
            Op::GroupPairs { ids, counts, groups, .. } => {
                (vec![ids], vec![counts, groups.pairs, groups.tiles])
            }
            Op::Glu { gate, up, out, .. } => (std::iter::once(gate).chain(up).collect(), vec![out]),
            Op::Combine { x, weights, out } => (vec![x, weights], vec![out]),
            Op::CopyRows { x, out, .. } => (vec![x], vec![out]),
            Op::ReadTop { logits, runs, top } => (vec![logits], vec![runs, top]),
            Op::ReadLogits { logits, .. } => (vec![logits], vec![]),
        }
    }

    /// What the op is called in traces.
    pub fn name(&self) -> &'static str {
        match self {
            Op::GetRows { .. } => "get_rows",
            Op::RmsNorm { .. } => "rms_norm",
            Op::MulMat { .. } => "mul_mat",
            Op::MulMats { .. } => "mul_mats",
            Op::MulMatId { .. } => "mul_mat_id",
            Op::GateUp { .. } => "gate_up",
            Op::DownCombine { .. } => "down_combine",
            Op::HalfRows { .. } => "half_rows",
            Op::Int8Rows { .. } => "int8_rows",
            Op::Rope { .. } => "rope",
            Op::KvStore { .. } => "kv_store",
            Op::Attention { .. } => "attention",
            Op::DecodeAttention { .. } => "decode_attention",
            Op::Router { .. } => "router",
            Op::NormRouter { .. } => "norm_router",
            Op::GroupPairs { .. } => "group_pairs",
            Op::Glu { .. } => "glu",
            Op::Combine { .. } => "combine",
            Op::CopyRows { .. } => "copy_rows",
            Op::ReadTop { .. } => "read_top",
            Op::ReadLogits { .. } => "read_logits",
        }
    }

    /// The weight matrices that the op multiplies with or looks up, in the order of the file.
    pub fn weights(&self) -> impl Iterator<Item = Weight> + use<> {
        let weights = match *self {
            Op::GetRows { weights, .. }
            | Op::MulMat { weights, .. }
            | Op::MulMatId { weights, .. }
            | Op::DownCombine { weights, .. }
            | Op::NormRouter { matrix: weights, .. } => [Some(weights), None, None],
            Op::MulMats { products, .. } => products.map(|p| p.map(|p| p.weights)),
            Op::GateUp { gate, up, .. } => [Some(gate), up, None],
            _ => [None; 3],
        };
        weights.into_iter().flatten()
    }

    /// By whose choice of experts the op goes, if any.
    pub fn routing(&self) -> Option<Routing> {
        match *self {
            Op::MulMatId { routing, .. } | Op::DownCombine { routing, .. } => Some(routing),
            Op::GateUp { routing, .. } => routing,
            _ => None,
        }
    }
}

/// The ops of one forward pass over one ubatch, or of a part of it.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    /// Shapes, by [`Tensor`].
    pub tensors: Vec<Shape>,
    /// In order of execution.
    pub ops: Vec<Op>,
    /// Token ids, `[n_tokens][1]`, filled by the host. Positions are bound by `exec/` itself.
    pub tokens: Option<Tensor>,
    /// What the ops share with those of other graphs.
    pub border: parts::Border,
}

impl Graph {
    /// A new tensor.
    pub fn tensor(&mut self, rows: u32, cols: u32) -> Tensor {
        self.tensors.push(Shape { rows, cols });
        Tensor(self.tensors.len() as u32 - 1)
    }

    /// Shape of a tensor of this graph.
    pub fn shape(&self, t: Tensor) -> Shape {
        self.tensors[t.0 as usize]
    }

    /// Appends an op.
    pub fn push(&mut self, op: Op) {
        self.ops.push(op);
    }

    /// x · weightsᵀ, into a new tensor.
    pub fn mul_mat(&mut self, weights: Weight, bias: Option<WeightId>, x: Tensor) -> Tensor {
        debug_assert_eq!(self.shape(x).cols, weights.k);
        let out = self.tensor(self.shape(x).rows, weights.n);
        self.push(Op::MulMat { weights, bias, x: Input::Full(x), out });
        out
    }

    /// The norm of whole rows, into a new tensor.
    pub fn rms_norm(&mut self, x: Tensor, weight: WeightId, eps: f32) -> Tensor {
        let Shape { rows, cols } = self.shape(x);
        let out = self.tensor(rows, cols);
        self.push(Op::RmsNorm { x, residual: None, weight: Some(weight), n: cols, eps, out });
        out
    }

    /// `x + residual` and its norm, both new tensors.
    pub fn add_rms_norm(
        &mut self,
        x: Tensor,
        residual: Tensor,
        weight: WeightId,
        eps: f32,
    ) -> (Tensor, Tensor) {
        let Shape { rows, cols } = self.shape(x);
        let (sum, out) = (self.tensor(rows, cols), self.tensor(rows, cols));
        let residual = Some((residual, sum));
        self.push(Op::RmsNorm { x, residual, weight: Some(weight), n: cols, eps, out });
        (sum, out)
    }
}
