//! A model's metadata, as llama.cpp's converter writes it (`conversion/*.py`), and a vocabulary of
//! bytes, padded to the model's size: text goes in and out, though what comes out means nothing.

use super::Synth;
use super::presets::{Arch, DeltaNet, Shape};
use crate::gguf::{Array, Value};

/// Tokens with a meaning of their own, after those of the 256 bytes.
const SPECIAL: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];
/// The only merge, since readers want some; its two bytes together are a token.
const MERGED: (char, char) = ('t', 'h');
const CHAT_TEMPLATE: &str = include_str!("../tokenizer/templates/chatml.jinja");
/// Numbers in `tokenizer.ggml.token_type`.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const UNUSED: i32 = 5;

/// All keys in order.
pub(super) fn keys(synth: &Synth) -> Vec<(String, Value)> {
    let shape = &synth.shape;
    let mut keys = Keys { arch: shape.arch.name(), list: Vec::new() };
    keys.general(synth);
    keys.shape(shape);
    match &shape.arch {
        Arch::Qwen3Moe => {}
        Arch::Mixtral => keys.mixtral(shape),
        Arch::GptOss => keys.gpt_oss(),
        Arch::Glm4Moe => keys.glm4_moe(shape),
        Arch::Qwen3Next(net) => keys.delta_net(net),
        Arch::Qwen35Moe(net) => {
            let sections = Array::I32(vec![11, 11, 10, 0]);
            keys.own("rope.dimension_sections", Value::Array(sections));
            keys.delta_net(net);
        }
    }
    keys.tokenizer(shape.n_vocab);
    keys.list
}

struct Keys {
    arch: &'static str,
    list: Vec<(String, Value)>,
}

impl Keys {
    fn add(&mut self, key: &str, value: Value) {
        self.list.push((key.into(), value));
    }

    /// A key of the architecture.
    fn own(&mut self, key: &str, value: Value) {
        self.add(&format!("{}.{key}", self.arch), value);
    }

    fn own_u32(&mut self, key: &str, n: u32) {
        self.own(key, Value::U32(n));
    }

    fn own_f32(&mut self, key: &str, x: f32) {
        self.own(key, Value::F32(x));
    }

    fn general(&mut self, synth: &Synth) {
        self.add("general.architecture", text(self.arch));
        self.add("general.type", text("model"));
        self.add("general.name", Value::String(format!("Synthetic {}", synth.title)));
        self.add("general.size_label", text(synth.size));
        self.add("general.file_type", Value::U32(synth.mix.file_type()));
        self.add("general.quantization_version", Value::U32(2));
    }

    fn shape(&mut self, shape: &Shape) {
        self.own_u32("block_count", shape.n_block());
        self.own_u32("context_length", shape.n_ctx);
        self.own_u32("embedding_length", shape.n_embd);
        if shape.n_ff > 0 {
            self.own_u32("feed_forward_length", shape.n_ff);
        }
        self.own_u32("attention.head_count", shape.n_head);
        self.own_u32("attention.head_count_kv", shape.n_head_kv);
        self.own_u32("attention.key_length", shape.head);
        self.own_u32("attention.value_length", shape.head);
        self.own_f32("attention.layer_norm_rms_epsilon", shape.norm_eps);
        self.own_f32("rope.freq_base", shape.rope_base);
        self.own_u32("expert_count", shape.n_expert);
        self.own_u32("expert_used_count", shape.n_used);
        // Mixtral's experts have the dense width.
        if !matches!(shape.arch, Arch::Mixtral) {
            self.own_u32("expert_feed_forward_length", shape.n_ff_exp);
        }
    }

    fn mixtral(&mut self, shape: &Shape) {
        self.own_u32("vocab_size", shape.n_vocab);
        self.own_u32("rope.dimension_count", shape.head);
    }

    fn gpt_oss(&mut self) {
        self.own_u32("attention.sliding_window", 128);
        self.own("rope.scaling.type", text("yarn"));
        self.own_f32("rope.scaling.factor", 32.0);
        self.own_u32("rope.scaling.original_context_length", 4096);
    }

    fn glm4_moe(&mut self, shape: &Shape) {
        self.own_u32("rope.dimension_count", shape.head / 2);
        self.own_u32("expert_shared_count", 1);
        self.own_u32("leading_dense_block_count", 1);
        // The sigmoid.
        self.own_u32("expert_gating_func", 2);
        self.own_f32("expert_weights_scale", 1.0);
        self.own("expert_weights_norm", Value::Bool(true));
        self.own_u32("nextn_predict_layers", shape.n_block() - shape.n_layer);
    }

    fn delta_net(&mut self, net: &DeltaNet) {
        self.own_u32("expert_shared_feed_forward_length", net.n_ff_shexp);
        self.own_u32("ssm.conv_kernel", net.kernel);
        self.own_u32("ssm.state_size", net.head);
        self.own_u32("ssm.group_count", net.n_head_k);
        self.own_u32("ssm.time_step_rank", net.n_head_v);
        self.own_u32("ssm.inner_size", net.n_head_v * net.head);
        self.own_u32("full_attention_interval", net.interval);
        self.own_u32("rope.dimension_count", net.n_rot);
    }

    fn tokenizer(&mut self, n_vocab: u32) {
        let n_vocab = n_vocab as usize;
        let mut tokens: Vec<String> = byte_characters().map(String::from).collect();
        let n_bytes = tokens.len();
        tokens.extend(SPECIAL.map(String::from));
        let (a, b) = MERGED;
        tokens.push(format!("{a}{b}"));
        let n_used = tokens.len();
        tokens.extend((n_used..n_vocab).map(|i| format!("[PAD{i}]")));
        let kind = |i| match i {
            i if i < n_bytes || i == n_used - 1 => NORMAL,
            i if i < n_used => CONTROL,
            _ => UNUSED,
        };
        let kinds = (0..tokens.len()).map(kind).collect();
        let id = |name: &str| tokens.iter().zip(0..).find(|(t, _)| *t == name).map(|(_, id)| id);
        let (pad, end) = (id(SPECIAL[0]), id(SPECIAL[2]));
        self.add("tokenizer.ggml.model", text("gpt2"));
        self.add("tokenizer.ggml.pre", text("qwen2"));
        self.add("tokenizer.ggml.tokens", Value::Array(Array::String(tokens)));
        self.add("tokenizer.ggml.token_type", Value::Array(Array::I32(kinds)));
        let merges = Array::String(vec![format!("{a} {b}")]);
        self.add("tokenizer.ggml.merges", Value::Array(merges));
        for (key, id) in [("eos", end), ("padding", pad)] {
            if let Some(id) = id {
                self.add(&format!("tokenizer.ggml.{key}_token_id"), Value::U32(id));
            }
        }
        self.add("tokenizer.ggml.add_bos_token", Value::Bool(false));
        self.add("tokenizer.chat_template", text(CHAT_TEMPLATE));
    }
}

fn text(value: &str) -> Value {
    Value::String(value.into())
}

/// GPT-2's characters for the 256 bytes: printable ones stand for themselves, the others are U+0100
/// and up. In the order of their characters, which is as good as any.
fn byte_characters() -> impl Iterator<Item = char> {
    let printable = ('!'..='~').chain('¡'..='¬').chain('®'..='ÿ');
    printable.chain(('\u{100}'..).take(256 - 94 - 12 - 82))
}
