//! An architecture's tensors: names, shapes, order. Source: `load_arch_tensors` in llama.cpp's
//! `src/models/{qwen3moe,llama,openai-moe,glm4-moe,qwen3next,qwen35moe}.cpp`, names of
//! `src/llama-arch.cpp`.

use super::presets::{Arch, DeltaNet, Shape};
use crate::gguf::GgmlType;
use crate::gguf::write::TensorSpec;

/// All tensors in the order in which llama.cpp's quantizer writes and counts them: those of no layer,
/// then layer by layer, by name. Types are not chosen yet.
pub(super) fn tensors(shape: &Shape) -> Vec<TensorSpec> {
    let (n_embd, n_vocab) = (shape.n_embd, shape.n_vocab);
    let mut all = vec![
        spec("output.weight", &[n_embd, n_vocab]),
        spec("output_norm.weight", &[n_embd]),
        spec("token_embd.weight", &[n_embd, n_vocab]),
    ];
    for il in 0..shape.n_block() {
        let mut block = Block { shape, tensors: Vec::new() };
        block.fill(il);
        block.tensors.sort_by(|a, b| a.name.cmp(&b.name));
        for tensor in &mut block.tensors {
            tensor.name = format!("blk.{il}.{}", tensor.name);
        }
        all.append(&mut block.tensors);
    }
    all
}

fn spec(name: &str, dims: &[u32]) -> TensorSpec {
    let shape = dims.iter().map(|&dim| dim.into()).collect();
    TensorSpec { name: name.into(), ty: GgmlType::F32, shape }
}

/// The tensors of one layer, named without their prefix.
struct Block<'a> {
    shape: &'a Shape,
    tensors: Vec<TensorSpec>,
}

impl Block<'_> {
    fn fill(&mut self, il: u32) {
        self.add("attn_norm.weight", &[self.shape.n_embd]);
        match self.shape.arch {
            Arch::Qwen3Moe => {
                self.attention(self.shape.n_q());
                self.head_norms();
                self.add("ffn_norm.weight", &[self.shape.n_embd]);
                self.experts();
            }
            Arch::Mixtral => {
                self.attention(self.shape.n_q());
                self.add("ffn_norm.weight", &[self.shape.n_embd]);
                self.experts();
            }
            Arch::GptOss => self.gpt_oss(),
            Arch::Glm4Moe => self.glm4_moe(il),
            Arch::Qwen3Next(net) => {
                self.qwen3_next(il, &net, &[("ssm_ba.weight", 2 * net.n_head_v)]);
            }
            Arch::Qwen35Moe(net) => {
                let beta = ("ssm_beta.weight", net.n_head_v);
                self.qwen3_next(il, &net, &[beta, ("ssm_alpha.weight", net.n_head_v)]);
            }
        }
    }

    fn add(&mut self, name: &str, dims: &[u32]) {
        self.tensors.push(spec(name, dims));
    }

    /// Projections; `n_q` rows of queries.
    fn attention(&mut self, n_q: u32) {
        let Shape { n_embd, .. } = *self.shape;
        self.add("attn_q.weight", &[n_embd, n_q]);
        self.add("attn_k.weight", &[n_embd, self.shape.n_kv()]);
        self.add("attn_v.weight", &[n_embd, self.shape.n_kv()]);
        self.add("attn_output.weight", &[self.shape.n_q(), n_embd]);
    }

    fn attention_biases(&mut self) {
        self.add("attn_q.bias", &[self.shape.n_q()]);
        self.add("attn_k.bias", &[self.shape.n_kv()]);
        self.add("attn_v.bias", &[self.shape.n_kv()]);
    }

    fn head_norms(&mut self) {
        self.add("attn_q_norm.weight", &[self.shape.head]);
        self.add("attn_k_norm.weight", &[self.shape.head]);
    }

    fn experts(&mut self) {
        let Shape { n_embd, n_expert, n_ff_exp, .. } = *self.shape;
        self.add("ffn_gate_inp.weight", &[n_embd, n_expert]);
        self.add("ffn_gate_exps.weight", &[n_embd, n_ff_exp, n_expert]);
        self.add("ffn_up_exps.weight", &[n_embd, n_ff_exp, n_expert]);
        self.add("ffn_down_exps.weight", &[n_ff_exp, n_embd, n_expert]);
    }

    /// A feed-forward block that every token passes; `suffix`: what its names end in.
    fn feed_forward(&mut self, suffix: &str, n_ff: u32) {
        let Shape { n_embd, .. } = *self.shape;
        self.add(&format!("ffn_gate{suffix}.weight"), &[n_embd, n_ff]);
        self.add(&format!("ffn_up{suffix}.weight"), &[n_embd, n_ff]);
        self.add(&format!("ffn_down{suffix}.weight"), &[n_ff, n_embd]);
    }

    /// Biases everywhere, and a sink per head.
    fn gpt_oss(&mut self) {
        let Shape { n_embd, n_head, n_expert, n_ff_exp, .. } = *self.shape;
        self.attention(self.shape.n_q());
        self.attention_biases();
        self.add("attn_output.bias", &[n_embd]);
        self.add("attn_sinks.weight", &[n_head]);
        self.add("post_attention_norm.weight", &[n_embd]);
        self.experts();
        self.add("ffn_gate_inp.bias", &[n_expert]);
        self.add("ffn_gate_exps.bias", &[n_ff_exp, n_expert]);
        self.add("ffn_up_exps.bias", &[n_ff_exp, n_expert]);
        self.add("ffn_down_exps.bias", &[n_embd, n_expert]);
    }

    fn glm4_moe(&mut self, il: u32) {
        let Shape { n_embd, n_vocab, n_expert, n_ff, n_ff_exp, .. } = *self.shape;
        self.attention(self.shape.n_q());
        self.attention_biases();
        self.add("post_attention_norm.weight", &[n_embd]);
        if il == 0 {
            self.feed_forward("", n_ff);
        } else {
            self.experts();
            self.add("exp_probs_b.bias", &[n_expert]);
            self.feed_forward("_shexp", n_ff_exp);
        }
        if il == self.shape.n_layer {
            self.add("nextn.eh_proj.weight", &[2 * n_embd, n_embd]);
            self.add("nextn.enorm.weight", &[n_embd]);
            self.add("nextn.hnorm.weight", &[n_embd]);
            self.add("nextn.embed_tokens.weight", &[n_embd, n_vocab]);
            self.add("nextn.shared_head_head.weight", &[n_embd, n_vocab]);
            self.add("nextn.shared_head_norm.weight", &[n_embd]);
        }
    }

    /// `gates`: the projections that give the net's gates, which differ between the architectures.
    fn qwen3_next(&mut self, il: u32, net: &DeltaNet, gates: &[(&str, u32)]) {
        let Shape { n_embd, .. } = *self.shape;
        if (il + 1).is_multiple_of(net.interval) {
            // Queries come with a gate each.
            self.attention(2 * self.shape.n_q());
            self.head_norms();
        } else {
            let (n_k, n_v) = (net.n_head_k * net.head, net.n_head_v * net.head);
            self.add("attn_qkv.weight", &[n_embd, 2 * n_k + n_v]);
            self.add("attn_gate.weight", &[n_embd, n_v]);
            self.add("ssm_conv1d.weight", &[net.kernel, 2 * n_k + n_v]);
            self.add("ssm_dt.bias", &[net.n_head_v]);
            self.add("ssm_a", &[net.n_head_v]);
            gates.iter().for_each(|(name, n)| self.add(name, &[n_embd, *n]));
            self.add("ssm_norm.weight", &[net.head]);
            self.add("ssm_out.weight", &[n_v, n_embd]);
        }
        self.add("post_attention_norm.weight", &[n_embd]);
        self.experts();
        self.add("ffn_gate_inp_shexp.weight", &[n_embd]);
        self.feed_forward("_shexp", net.n_ff_shexp);
    }
}
