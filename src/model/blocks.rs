//! The blocks that layers are made of: weights of a block, and how it becomes ops. What differs
//! between architectures is data here: an optional weight or an enum, never the architecture's name.

use super::hparams::{AttentionParams, ExpertParams, HParams};
use super::{PassShape, weights::WeightLoader};
use crate::error::Result;
use crate::graph::{
    AttentionOp, GluOp, Graph, Input, KvHalf, Op, PairGroups, RouterOp, Routing, Tensor, Weight,
    WeightId, parts::Stream,
};

/// One transformer layer: attention, then a feed-forward block, each after a norm.
#[derive(Debug)]
pub struct Layer {
    /// `[n_embd]`
    pub attn_norm: WeightId,
    /// Attention.
    pub attention: Attention,
    /// `[n_embd]`
    pub ffn_norm: WeightId,
    /// Feed-forward.
    pub ffn: MoeFfn,
}

impl Layer {
    /// Appends the layer; returns the residual stream anew.
    pub fn build(
        &self,
        g: &mut Graph,
        il: u32,
        hp: &HParams,
        pass: &PassShape,
        Stream { x, delta }: Stream,
    ) -> Stream {
        let (x, normed) = match delta {
            Some(delta) => g.add_rms_norm(delta, x, self.attn_norm, hp.norm_eps),
            None => (x, g.rms_norm(x, self.attn_norm, hp.norm_eps)),
        };
        let attended = self.attention.build(g, il, hp, pass, normed);
        let (x, normed) = g.add_rms_norm(attended, x, self.ffn_norm, hp.norm_eps);
        let delta = self.ffn.build(g, il, &hp.experts, pass, normed);
        Stream { x, delta: Some(delta) }
    }
}

/// Grouped-query attention with rotary embedding.
#[derive(Debug)]
pub struct Attention {
    /// `[n_head * head_k][n_embd]`
    pub q: Weight,
    /// `[n_head_kv * head_k][n_embd]`
    pub k: Weight,
    /// `[n_head_kv * head_v][n_embd]`
    pub v: Weight,
    /// `[n_embd][n_head * head_v]`
    pub output: Weight,
    /// Biases of q, k, v.
    pub bias: [Option<WeightId>; 3],
    /// Norm of each query head, `[head_k]`.
    pub q_norm: Option<WeightId>,
    /// Norm of each key head, `[head_k]`.
    pub k_norm: Option<WeightId>,
}

impl Attention {
    /// Looks up `blk.{il}.attn_*`.
    pub fn load(
        w: &mut WeightLoader<'_>,
        il: u32,
        n_embd: u32,
        p: &AttentionParams,
    ) -> Result<Self> {
        let name = |part: &str| format!("blk.{il}.attn_{part}");
        let (n_q, n_k) = (p.n_head * p.head_k, p.n_head_kv * p.head_k);
        let (n_v, n_out) = (p.n_head_kv * p.head_v, p.n_head * p.head_v);
        Ok(Attention {
            q: w.matrix(&name("q.weight"), n_embd, n_q)?,
            k: w.matrix(&name("k.weight"), n_embd, n_k)?,
            v: w.matrix(&name("v.weight"), n_embd, n_v)?,
            output: w.matrix(&name("output.weight"), n_out, n_embd)?,
            bias: [
                w.optional_vector(&name("q.bias"), n_q)?,
                w.optional_vector(&name("k.bias"), n_k)?,
                w.optional_vector(&name("v.bias"), n_v)?,
            ],
            q_norm: w.optional_vector(&name("q_norm.weight"), p.head_k)?,
            k_norm: w.optional_vector(&name("k_norm.weight"), p.head_k)?,
        })
    }

    fn build(&self, g: &mut Graph, il: u32, hp: &HParams, pass: &PassShape, x: Tensor) -> Tensor {
        let p = &hp.attention;
        let q = g.mul_mat(self.q, self.bias[0], x);
        let k = g.mul_mat(self.k, self.bias[1], x);
        let v = g.mul_mat(self.v, self.bias[2], x);
        for (x, norm) in [(q, self.q_norm), (k, self.k_norm)] {
            if norm.is_some() {
                let (n, eps) = (p.head_k, hp.norm_eps);
                g.push(Op::RmsNorm { x, residual: None, weight: norm, n, eps, out: x });
            }
        }
        for x in [q, k] {
            g.push(Op::Rope { x, head_dim: p.head_k, rope: p.rope.op() });
        }
        g.push(Op::KvStore { il, half: KvHalf::K, x: k, head_dim: p.head_k });
        g.push(Op::KvStore { il, half: KvHalf::V, x: v, head_dim: p.head_v });
        let out = g.tensor(pass.n_tokens, p.n_head * p.head_v);
        let split = pass.n_splits > 1;
        // A partial result is the unnormalized output, the maximum and the sum.
        let partial =
            split.then(|| g.tensor(pass.n_splits * pass.n_tokens, p.n_head * (p.head_v + 2)));
        let attention = AttentionOp {
            n_head: p.n_head,
            n_head_kv: p.n_head_kv,
            head_k: p.head_k,
            head_v: p.head_v,
            scale: p.scale,
            softcap: 0.0,
            window: 0,
            sinks: None,
        };
        g.push(Op::Attention { il, attention, q, out, partial, n_splits: pass.n_splits });
        g.mul_mat(self.output, None, out)
    }
}

/// A mixture of experts. A dense feed-forward block is one expert without a router.
#[derive(Debug)]
pub struct MoeFfn {
    /// `[n_expert][n_embd]`; without one there is a single expert.
    pub router: Option<Weight>,
    /// `[n_expert][n_ff][n_embd]`; without `up` both in one, `[n_expert][2 n_ff][n_embd]`, gate first.
    pub gate: Weight,
    /// `[n_expert][n_ff][n_embd]`
    pub up: Option<Weight>,
    /// `[n_expert][n_embd][n_ff]`
    pub down: Weight,
    /// The activation.
    pub glu: GluOp,
}

impl MoeFfn {
    /// The mixture of layer `il` if the file has its router, else a dense block.
    pub fn load(w: &mut WeightLoader<'_>, il: u32, hp: &HParams, glu: GluOp) -> Result<Self> {
        let router = format!("blk.{il}.ffn_gate_inp.weight");
        let dense = format!("blk.{il}.ffn_gate.weight");
        if w.gguf().tensor(&router).is_none() && w.gguf().tensor(&dense).is_some() {
            return Self::load_dense(w, il, hp, glu);
        }
        Self::load_experts(w, il, hp.n_embd, &hp.experts, glu)
    }

    /// Looks up `blk.{il}.ffn_{gate,up,down}`.
    fn load_dense(w: &mut WeightLoader<'_>, il: u32, hp: &HParams, glu: GluOp) -> Result<Self> {
        let name = |part: &str| format!("blk.{il}.ffn_{part}.weight");
        Ok(MoeFfn {
            router: None,
            gate: w.matrix(&name("gate"), hp.n_embd, hp.n_ff)?,
            up: Some(w.matrix(&name("up"), hp.n_embd, hp.n_ff)?),
            down: w.matrix(&name("down"), hp.n_ff, hp.n_embd)?,
            glu,
        })
    }

    /// Looks up `blk.{il}.ffn_gate_inp` and `blk.{il}.ffn_{gate,up,down}_exps`, or `ffn_gate_up_exps`.
    fn load_experts(
        w: &mut WeightLoader<'_>,
        il: u32,
        n_embd: u32,
        p: &ExpertParams,
        glu: GluOp,
    ) -> Result<Self> {
        let name = |part: &str| format!("blk.{il}.ffn_{part}.weight");
        let router = Some(w.matrix(&name("gate_inp"), n_embd, p.n_expert)?);
        let fused = name("gate_up_exps");
        let (gate, up) = match w.gguf().tensor(&fused) {
            Some(_) => (w.experts(&fused, n_embd, 2 * p.n_ff, p.n_expert)?, None),
            None => {
                let mut experts = |part| w.experts(&name(part), n_embd, p.n_ff, p.n_expert);
                (experts("gate_exps")?, Some(experts("up_exps")?))
            }
        };
        Ok(MoeFfn {
            router,
            gate,
            up,
            down: w.experts(&name("down_exps"), p.n_ff, n_embd, p.n_expert)?,
            glu,
        })
    }

    fn build(
        &self,
        g: &mut Graph,
        il: u32,
        p: &ExpertParams,
        pass: &PassShape,
        x: Tensor,
    ) -> Tensor {
        match self.router {
            Some(router) => self.build_experts(g, il, router, p, pass, x),
            None => self.build_dense(g, x),
        }
    }

    fn build_dense(&self, g: &mut Graph, x: Tensor) -> Tensor {
        let gate = g.mul_mat(self.gate, None, x);
        let up = self.up.map(|up| g.mul_mat(up, None, x));
        let hidden = self.activate(g, gate, up);
        g.mul_mat(self.down, None, hidden)
    }

    fn build_experts(
        &self,
        g: &mut Graph,
        il: u32,
        router: Weight,
        p: &ExpertParams,
        pass: &PassShape,
        x: Tensor,
    ) -> Tensor {
        let routing = route(g, il, router, p, pass, x);
        let n_pairs = pass.n_tokens * p.n_used;
        let product = |g: &mut Graph, weights: Weight, x, x_div| {
            let out = g.tensor(n_pairs, weights.n);
            g.push(Op::MulMatId { weights, bias: None, x: Input::Full(x), x_div, routing, out });
            out
        };
        let gate = product(g, self.gate, x, p.n_used);
        let up = self.up.map(|up| product(g, up, x, p.n_used));
        let hidden = self.activate(g, gate, up);
        let down = product(g, self.down, hidden, 1);
        let out = g.tensor(pass.n_tokens, self.down.n);
        g.push(Op::Combine { x: down, weights: routing.weights, out });
        out
    }
}

impl MoeFfn {
    /// act(gate) * up: in place, or out of rows that hold both.
    fn activate(&self, g: &mut Graph, gate: Tensor, up: Option<Tensor>) -> Tensor {
        let shape = g.shape(gate);
        let out = match up {
            Some(_) => gate,
            None => g.tensor(shape.rows, shape.cols / 2),
        };
        g.push(Op::Glu { glu: self.glu, gate, up, out });
        out
    }
}

/// Router logits, the choice of experts, and the pairs grouped by expert if there are many tokens.
fn route(
    g: &mut Graph,
    il: u32,
    router: Weight,
    p: &ExpertParams,
    pass: &PassShape,
    x: Tensor,
) -> Routing {
    let logits = g.mul_mat(router, None, x);
    let ids = g.tensor(pass.n_tokens, p.n_used);
    let weights = g.tensor(pass.n_tokens, p.n_used);
    let router = RouterOp {
        il,
        n_expert: p.n_expert,
        n_used: p.n_used,
        gating: p.gating,
        renormalize: p.renormalize,
        scale: p.scale,
        bias: None,
        n_group: 0,
        n_group_used: 0,
    };
    g.push(Op::Router { router, logits, ids, weights });
    let groups = (pass.n_tokens >= pass.group_from).then(|| {
        let n_pairs = pass.n_tokens * p.n_used;
        let n_tiles = n_pairs.div_ceil(pass.group_tile) + p.n_expert.min(n_pairs);
        let counts = g.tensor(p.n_expert, 1);
        let (pairs, tiles) = (g.tensor(n_pairs, 1), g.tensor(n_tiles, 3));
        let groups = PairGroups { pairs, tiles, tile: pass.group_tile };
        g.push(Op::GroupPairs { ids, counts, groups });
        groups
    });
    Routing { ids, weights, n_used: p.n_used, groups }
}
