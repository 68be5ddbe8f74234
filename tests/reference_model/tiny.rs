//! Tiny `qwen3moe` models of any shape with random weights.

use super::{Random, quant};
use crate::common::gguf_builder::GgufBuilder;
use vkmoe::gguf::{GgmlType, Value};

/// The shape of a model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tiny {
    pub(crate) n_layer: u32,
    pub(crate) n_vocab: u32,
    pub(crate) n_embd: u32,
    pub(crate) n_ff: u32,
    /// Layers, from the first, without experts.
    pub(crate) n_dense: u32,
    pub(crate) n_ff_dense: u32,
    pub(crate) n_expert: u32,
    pub(crate) n_used: u32,
    pub(crate) n_head: u32,
    pub(crate) n_head_kv: u32,
    pub(crate) head_k: u32,
    pub(crate) head_v: u32,
    /// The embedding is the head as well.
    pub(crate) tied: bool,
    /// Dimensions rotated, if not all.
    pub(crate) n_rot: Option<u32>,
    pub(crate) scaling: Scaling,
    /// Type of a matrix, by its name.
    pub(crate) types: fn(&str) -> GgmlType,
    pub(crate) seed: u64,
}

/// Stretching of the rotary embedding.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Scaling {
    None,
    Linear { factor: f32 },
    Yarn { factor: f32, n_ctx: u32 },
}

impl Default for Tiny {
    fn default() -> Self {
        Tiny {
            n_layer: 2,
            n_vocab: 48,
            n_embd: 64,
            n_ff: 32,
            n_dense: 0,
            n_ff_dense: 48,
            n_expert: 4,
            n_used: 2,
            n_head: 2,
            n_head_kv: 1,
            head_k: 32,
            head_v: 32,
            tied: false,
            n_rot: None,
            scaling: Scaling::None,
            types: |_| GgmlType::F32,
            seed: 1,
        }
    }
}

impl Tiny {
    /// The model's keys and tensors.
    pub(crate) fn build(&self) -> GgufBuilder {
        self.tensors(self.keys())
    }

    pub(crate) fn keys(&self) -> GgufBuilder {
        let counts = [
            ("block_count", self.n_layer),
            ("context_length", 256),
            ("embedding_length", self.n_embd),
            ("attention.head_count", self.n_head),
            ("attention.head_count_kv", self.n_head_kv),
            ("attention.key_length", self.head_k),
            ("attention.value_length", self.head_v),
            ("feed_forward_length", self.n_ff_dense),
            ("expert_count", self.n_expert),
            ("expert_used_count", self.n_used),
            ("expert_feed_forward_length", self.n_ff),
        ];
        let file =
            GgufBuilder::new().key("general.architecture", Value::String("qwen3moe".to_string()));
        let file = counts.iter().fold(file, |file, (name, n)| file.key(&key(name), Value::U32(*n)));
        let file = file
            .key(&key("attention.layer_norm_rms_epsilon"), Value::F32(1e-6))
            .key(&key("rope.freq_base"), Value::F32(1e4));
        let file = match self.n_rot {
            Some(n) => file.key(&key("rope.dimension_count"), Value::U32(n)),
            None => file,
        };
        let scaled = |file: GgufBuilder, kind: &str, factor| {
            file.key(&key("rope.scaling.type"), Value::String(kind.to_string()))
                .key(&key("rope.scaling.factor"), Value::F32(factor))
        };
        match self.scaling {
            Scaling::None => file,
            Scaling::Linear { factor } => scaled(file, "linear", factor),
            Scaling::Yarn { factor, n_ctx } => scaled(file, "yarn", factor)
                .key(&key("rope.scaling.original_context_length"), Value::U32(n_ctx)),
        }
    }

    fn tensors(&self, file: GgufBuilder) -> GgufBuilder {
        let mut random = Random(self.seed);
        let matrix = |file: GgufBuilder, random: &mut Random, name: &str, shape: &[u32]| {
            let ty = (self.types)(name);
            let shape: Vec<u64> = shape.iter().map(|&n| n.into()).collect();
            let n: u64 = shape.iter().product();
            file.tensor(name, ty, &shape, quant(ty).random(random, n as usize))
        };
        let norm = |file: GgufBuilder, random: &mut Random, name: &str, n: u32| {
            let values: Vec<f32> = (0..n).map(|_| 1.0 + 0.5 * random.unit()).collect();
            file.f32s(name, &[n.into()], &values)
        };
        let r = &mut random;
        let mut file = matrix(file, r, "token_embd.weight", &[self.n_embd, self.n_vocab]);
        for il in 0..self.n_layer {
            let name = |part: &str| format!("blk.{il}.{part}.weight");
            for (part, n) in [
                ("attn_norm", self.n_embd),
                ("attn_q_norm", self.head_k),
                ("attn_k_norm", self.head_k),
                ("ffn_norm", self.n_embd),
            ] {
                file = norm(file, r, &name(part), n);
            }
            let n_out = self.n_head * self.head_v;
            let dense = [
                ("ffn_gate", &[self.n_embd, self.n_ff_dense][..]),
                ("ffn_up", &[self.n_embd, self.n_ff_dense]),
                ("ffn_down", &[self.n_ff_dense, self.n_embd]),
            ];
            let experts = [
                ("ffn_gate_inp", &[self.n_embd, self.n_expert][..]),
                ("ffn_gate_exps", &[self.n_embd, self.n_ff, self.n_expert]),
                ("ffn_up_exps", &[self.n_embd, self.n_ff, self.n_expert]),
                ("ffn_down_exps", &[self.n_ff, self.n_embd, self.n_expert]),
            ];
            let ffn = if il < self.n_dense { &dense[..] } else { &experts[..] };
            for (part, shape) in [
                ("attn_q", &[self.n_embd, self.n_head * self.head_k][..]),
                ("attn_k", &[self.n_embd, self.n_head_kv * self.head_k]),
                ("attn_v", &[self.n_embd, self.n_head_kv * self.head_v]),
                ("attn_output", &[n_out, self.n_embd]),
            ]
            .iter()
            .chain(ffn)
            {
                file = matrix(file, r, &name(part), shape);
            }
        }
        file = norm(file, r, "output_norm.weight", self.n_embd);
        match self.tied {
            true => file,
            false => matrix(file, r, "output.weight", &[self.n_embd, self.n_vocab]),
        }
    }
}

/// `qwen3moe.{name}`
pub(crate) fn key(name: &str) -> String {
    format!("qwen3moe.{name}")
}
