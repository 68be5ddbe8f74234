//! What a tensor's random values look like.
//!
//! Weights have a standard deviation of about 0.02, as trained ones do, times a gain: large embeddings
//! and small writes into the residual stream keep tokens apart through all layers, so that the routers
//! spread them over all experts, as trained models do; equal gains make every token choose the same few.

use crate::gguf::write::TensorSpec;

/// Values of a tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fill {
    /// All the same.
    Constant(f32),
    /// Random, around 0.
    Random {
        /// Standard deviation.
        std: f32,
    },
}

/// Standard deviation at gain 1.
const STD: f32 = 0.02;
const EMBEDDING_GAIN: f32 = 50.0;
/// Of the matrices that write into the residual stream.
const WRITE_GAIN: f32 = 0.1;
const WRITERS: [&str; 3] = ["attn_output.", "ffn_down", "ssm_out."];
/// Logits of normed activations then differ by some units, enough to choose by.
const ROUTER_STD: f32 = 0.05;
/// Trained sinks are of this order.
const SINK_STD: f32 = 1.0;
/// Four taps keep about the variance of what passes.
const CONVOLUTION_STD: f32 = 0.5;
/// A memory that fades over some tokens; trained values are negative throughout.
const DECAY: f32 = -1.0;

/// What a tensor holds, by its name.
pub(super) fn of(tensor: &TensorSpec) -> Fill {
    let name = tensor.name.as_str();
    let has = |part: &str| name.contains(part);
    let random = |std| Fill::Random { std };
    match name {
        _ if has("norm.weight") => Fill::Constant(1.0),
        _ if name.ends_with(".ssm_a") => Fill::Constant(DECAY),
        _ if has("ssm_dt.") => Fill::Constant(1.0),
        _ if has("ffn_gate_inp") && name.ends_with(".weight") => random(ROUTER_STD),
        _ if has("attn_sinks.") => random(SINK_STD),
        _ if has("ssm_conv1d.") => random(CONVOLUTION_STD),
        // Also the embedding of the layer that predicts further tokens.
        _ if has("token_embd.") || has("embed_tokens.") => random(STD * EMBEDDING_GAIN),
        _ if WRITERS.iter().any(|part| has(part)) => random(STD * WRITE_GAIN),
        _ => random(STD),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::GgmlType;

    #[test]
    fn names_decide() {
        let of = |name: &str| {
            let spec = TensorSpec { name: name.into(), ty: GgmlType::F32, shape: vec![32] };
            super::of(&spec)
        };
        let std = |name: &str| match of(name) {
            Fill::Random { std } => std,
            Fill::Constant(_) => 0.0,
        };
        for norm in ["output_norm.weight", "blk.3.attn_q_norm.weight", "blk.46.nextn.enorm.weight"]
        {
            assert_eq!(of(norm), Fill::Constant(1.0));
        }
        assert_eq!(std("token_embd.weight"), 1.0);
        assert_eq!(std("output.weight"), 0.02);
        for writer in ["attn_output", "ffn_down_exps", "ffn_down", "ffn_down_shexp", "ssm_out"] {
            assert!((std(&format!("blk.0.{writer}.weight")) - 0.002).abs() < 1e-6, "{writer}");
        }
        assert_eq!(std("blk.0.ffn_gate_inp.weight"), 0.05);
        assert_eq!(std("blk.0.ffn_gate_inp.bias"), 0.02);
        assert_eq!(std("blk.0.ffn_gate_exps.weight"), 0.02);
    }
}
