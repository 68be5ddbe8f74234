//! A forward pass of `qwen3moe` on the CPU, to compare the engine with: written from the architecture,
//! in f64 over the weights' exact values, and sharing nothing with the engine but the file's parser.
//!
//! A matrix is read row by row, and of the experts only those in use: the file may be larger than
//! memory.

#![allow(dead_code, reason = "each test binary uses a part of it")]
#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "../gpu/reference/quants.rs"]
mod quants;
#[path = "../gpu/reference/random.rs"]
mod random;
pub(crate) mod tiny;

pub(crate) use quants::Quant;
pub(crate) use random::Random;
use std::f64::consts::TAU;
use vkmoe::gguf::{GgmlType, Gguf};

/// One vector for each token.
type Rows = Vec<Vec<f64>>;

/// A model in a file.
pub(crate) struct ReferenceModel<'a> {
    gguf: &'a Gguf,
    n_layer: usize,
    n_head: usize,
    n_head_kv: usize,
    head_k: usize,
    head_v: usize,
    n_expert: usize,
    n_used: usize,
    norm_eps: f64,
    rotation: Rotation,
}

/// What a pass computed.
pub(crate) struct Forward {
    /// After each token, `[n_vocab]`.
    pub(crate) logits: Rows,
    /// How near a router came to choosing another expert: the smallest lead, in logits, of a chosen
    /// expert over one not chosen. Below the rounding of f32 both choices are right.
    pub(crate) closest_call: f64,
    /// How many tokens use each expert, `[n_layer][n_expert]`.
    pub(crate) uses: Vec<Vec<usize>>,
}

/// What the routers did so far; see [`Forward`].
struct Routing {
    closest_call: f64,
    uses: Vec<Vec<usize>>,
}

impl<'a> ReferenceModel<'a> {
    pub(crate) fn new(gguf: &'a Gguf) -> Self {
        let count = |name: &str| {
            let value = gguf.metadata().u32(&format!("qwen3moe.{name}")).unwrap();
            value.map(|value| value as usize)
        };
        let n_head = count("attention.head_count").unwrap();
        let head = count("embedding_length").unwrap() / n_head;
        let head_k = count("attention.key_length").unwrap_or(head);
        ReferenceModel {
            gguf,
            n_layer: count("block_count").unwrap(),
            n_head,
            n_head_kv: count("attention.head_count_kv").unwrap_or(n_head),
            head_k,
            head_v: count("attention.value_length").unwrap_or(head),
            n_expert: count("expert_count").unwrap(),
            n_used: count("expert_used_count").unwrap(),
            norm_eps: number(gguf, "attention.layer_norm_rms_epsilon").unwrap(),
            rotation: Rotation::new(gguf, count("rope.dimension_count").unwrap_or(head_k)),
        }
    }

    /// All tokens of a new context at once.
    pub(crate) fn forward(&self, tokens: &[u32]) -> Forward {
        let embed = |&id: &u32| self.row("token_embd.weight", 0, id as usize);
        let mut x: Rows = tokens.iter().map(embed).collect();
        let mut routing = Routing {
            closest_call: f64::INFINITY,
            uses: vec![vec![0; self.n_expert]; self.n_layer],
        };
        for il in 0..self.n_layer {
            let normed = self.norm(&x, &format!("blk.{il}.attn_norm.weight"));
            add(&mut x, &self.attention(il, &normed));
            let normed = self.norm(&x, &format!("blk.{il}.ffn_norm.weight"));
            add(&mut x, &self.experts(il, &normed, &mut routing));
        }
        let normed = self.norm(&x, "output_norm.weight");
        let tied = self.gguf.tensor("output.weight").is_none();
        let head = if tied { "token_embd.weight" } else { "output.weight" };
        let Routing { closest_call, uses } = routing;
        Forward { logits: self.mul(head, 0, &normed), closest_call, uses }
    }

    /// Causal attention, groups of query heads sharing a KV head.
    fn attention(&self, il: usize, x: &Rows) -> Rows {
        let name = |part: &str| format!("blk.{il}.attn_{part}.weight");
        let [mut q, mut k, v] = ["q", "k", "v"].map(|part| self.mul(&name(part), 0, x));
        for (rows, norm) in [(&mut q, "q_norm"), (&mut k, "k_norm")] {
            let norm = self.row(&name(norm), 0, 0);
            for (position, row) in rows.iter_mut().enumerate() {
                for head in row.chunks_exact_mut(self.head_k) {
                    rms_norm(head, &norm, self.norm_eps);
                    self.rotation.rotate(head, position as f64);
                }
            }
        }
        let attend = |t: usize| {
            let heads = (0..self.n_head).map(|h| self.attend(h, &q[t], &k[..=t], &v[..=t]));
            heads.collect::<Rows>().concat()
        };
        let attended: Rows = (0..x.len()).map(attend).collect();
        self.mul(&name("output"), 0, &attended)
    }

    /// One head of one token: its result, `[head_v]`.
    fn attend(&self, h: usize, q: &[f64], k: &[Vec<f64>], v: &[Vec<f64>]) -> Vec<f64> {
        let kv_head = h / (self.n_head / self.n_head_kv);
        let q = &q[h * self.head_k..][..self.head_k];
        let scale = 1.0 / (self.head_k as f64).sqrt();
        let scores = k.iter().map(|k| scale * dot(q, &k[kv_head * self.head_k..][..self.head_k]));
        let mut out = vec![0.0; self.head_v];
        for (p, v) in softmax(&scores.collect::<Vec<_>>()).into_iter().zip(v) {
            let v = &v[kv_head * self.head_v..][..self.head_v];
            out.iter_mut().zip(v).for_each(|(out, v)| *out += p * v);
        }
        out
    }

    /// A gated feed-forward block: the matrices `names` (gate, up, down) of one expert.
    fn feed_forward(&self, names: [&str; 3], expert: usize, x: &Rows) -> Rows {
        let [gate, up, down] = names;
        let mut hidden = self.mul(gate, expert, x);
        let up = self.mul(up, expert, x);
        for (gate, up) in hidden.iter_mut().flatten().zip(up.iter().flatten()) {
            *gate = *gate / (1.0 + (-*gate).exp()) * up;
        }
        self.mul(down, expert, &hidden)
    }

    /// The mixture of experts, or the dense block of a layer that has one.
    fn experts(&self, il: usize, x: &Rows, routing: &mut Routing) -> Rows {
        let name = |part: &str| format!("blk.{il}.ffn_{part}.weight");
        if self.gguf.tensor(&name("gate")).is_some() {
            return self.feed_forward([&name("gate"), &name("up"), &name("down")], 0, x);
        }
        let logits = self.mul(&name("gate_inp"), 0, x);
        let choices: Vec<_> =
            logits.iter().map(|row| self.choose(row, &mut routing.closest_call)).collect();
        let mut out = vec![vec![0.0; x[0].len()]; x.len()];
        for expert in 0..self.n_expert {
            let users: Vec<(usize, f64)> = (0..x.len())
                .filter_map(|t| Some((t, choices[t].iter().find(|(e, _)| *e == expert)?.1)))
                .collect();
            routing.uses[il][expert] = users.len();
            if users.is_empty() {
                continue;
            }
            let x: Rows = users.iter().map(|&(t, _)| x[t].clone()).collect();
            let names = ["gate_exps", "up_exps", "down_exps"].map(name);
            let down = self.feed_forward(names.each_ref().map(String::as_str), expert, &x);
            for (&(t, weight), down) in users.iter().zip(&down) {
                out[t].iter_mut().zip(down).for_each(|(out, down)| *out += weight * down);
            }
        }
        out
    }

    /// Softmax over all experts, the `n_used` likeliest (of equals the lower index), their
    /// probabilities divided by their sum.
    fn choose(&self, logits: &[f64], closest_call: &mut f64) -> Vec<(usize, f64)> {
        let p = softmax(logits);
        let mut order: Vec<usize> = (0..logits.len()).collect();
        // A stable sort: equals stay in ascending order.
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
        let (chosen, others) = order.split_at(self.n_used);
        if let (Some(&last), Some(&next)) = (chosen.last(), others.first()) {
            *closest_call = closest_call.min(logits[last] - logits[next]);
        }
        let sum: f64 = chosen.iter().map(|&e| p[e]).sum();
        chosen.iter().map(|&e| (e, p[e] / sum)).collect()
    }

    fn norm(&self, x: &Rows, weight: &str) -> Rows {
        let (mut x, weight) = (x.clone(), self.row(weight, 0, 0));
        x.iter_mut().for_each(|row| rms_norm(row, &weight, self.norm_eps));
        x
    }

    /// x times the transposed matrix of `expert`, a matrix of a tensor `[n_expert][n][k]`.
    fn mul(&self, name: &str, expert: usize, x: &Rows) -> Rows {
        let n = self.gguf.require(name).unwrap().shape[1] as usize;
        let mut out = vec![Vec::with_capacity(n); x.len()];
        for r in 0..n {
            let w = self.row(name, expert, r);
            out.iter_mut().zip(x).for_each(|(out, x)| out.push(dot(&w, x)));
        }
        out
    }

    /// Row r of a matrix.
    fn row(&self, name: &str, expert: usize, r: usize) -> Vec<f64> {
        let tensor = self.gguf.require(name).unwrap();
        let quant = quant(tensor.ty);
        let (k, n) = (tensor.shape[0] as usize, tensor.shape[1] as usize);
        let row_bytes = quant.row_bytes(k);
        let bytes = &self.gguf.bytes(tensor)[(expert * n + r) * row_bytes..][..row_bytes];
        quant.dequantize(bytes).into_iter().map(f64::from).collect()
    }
}

/// The twin of a tensor type.
pub(crate) fn quant(ty: GgmlType) -> Quant {
    Quant::named(&ty.name().to_lowercase())
}

fn number(gguf: &Gguf, name: &str) -> Option<f64> {
    gguf.metadata().f32(&format!("qwen3moe.{name}")).unwrap().map(f64::from)
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(x: &mut Rows, y: &Rows) {
    for (x, y) in x.iter_mut().flatten().zip(y.iter().flatten()) {
        *x += y;
    }
}

fn rms_norm(x: &mut [f64], weight: &[f64], eps: f64) {
    let scale = 1.0 / (dot(x, x) / x.len() as f64 + eps).sqrt();
    assert_eq!(x.len(), weight.len());
    x.iter_mut().zip(weight).for_each(|(x, w)| *x *= scale * w);
}

fn softmax(scores: &[f64]) -> Vec<f64> {
    let top = scores.iter().fold(f64::NEG_INFINITY, |a, &b| a.max(b));
    let powers: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
    let sum: f64 = powers.iter().sum();
    powers.iter().map(|p| p / sum).collect()
}

/// Rotary embedding of the first dimensions of a head, dimension i paired with i + half.
struct Rotation {
    /// Radians per position, for each pair.
    frequencies: Vec<f64>,
    /// Factor on the rotated dimensions.
    amplitude: f64,
}

impl Rotation {
    fn new(gguf: &Gguf, n_rot: usize) -> Self {
        let scaling = gguf.metadata().str("qwen3moe.rope.scaling.type").unwrap();
        let factor = number(gguf, "rope.scaling.factor").unwrap_or(1.0);
        let base = number(gguf, "rope.freq_base").unwrap_or(10000.0);
        let pairs = (0..n_rot / 2).map(|i| i as f64);
        let plain: Vec<f64> = pairs.map(|i| base.powf(-2.0 * i / n_rot as f64)).collect();
        match scaling.unwrap_or("linear") {
            "linear" => {
                let frequencies = plain.iter().map(|f| f / factor).collect();
                Rotation { frequencies, amplitude: 1.0 }
            }
            "yarn" => {
                let key = "qwen3moe.rope.scaling.original_context_length";
                let n_ctx = f64::from(gguf.metadata().require_u32(key).unwrap());
                let frequencies = yarn(&plain, n_rot as f64, base, factor, n_ctx);
                Rotation { frequencies, amplitude: 0.1 * factor.ln() + 1.0 }
            }
            other => panic!("{other}"),
        }
    }

    fn rotate(&self, head: &mut [f64], position: f64) {
        let half = self.frequencies.len();
        for (i, frequency) in self.frequencies.iter().enumerate() {
            let (sin, cos) = (position * frequency).sin_cos();
            let (a, b) = (head[i], head[i + half]);
            head[i] = self.amplitude * (a * cos - b * sin);
            head[i + half] = self.amplitude * (a * sin + b * cos);
        }
    }
}

/// YaRN with the paper's α = 1 and β = 32: pairs that turn more than 32 times within the original
/// context keep their frequency, those that turn less than once are slowed down by `factor`, and in
/// between a linear ramp over the pairs' indices blends, its ends rounded outward.
fn yarn(plain: &[f64], n_rot: f64, base: f64, factor: f64, n_ctx: f64) -> Vec<f64> {
    let pair_that_turns = |n: f64| n_rot * (n_ctx / (n * TAU)).ln() / (2.0 * base.ln());
    let low = pair_that_turns(32.0).floor().max(0.0);
    let high = pair_that_turns(1.0).ceil().min(n_rot - 1.0);
    let width = if low == high { 0.001 } else { high - low };
    let blend = |(i, f): (usize, &f64)| {
        let slowed = ((i as f64 - low) / width).clamp(0.0, 1.0);
        f * (1.0 - slowed) + f / factor * slowed
    };
    plain.iter().enumerate().map(blend).collect()
}
