//! Qwen3-MoE: per-head norms of Q and K, softmax over all experts, weights renormalized.

use super::blocks::{Attention, Layer, MoeFfn};
use super::hparams::{HParams, KeyReader};
use super::weights::WeightLoader;
use crate::error::Result;
use crate::graph::{Gating, GluOp, RopePairing};

/// Hyper-parameters and layers of a `qwen3moe` file.
pub(super) fn load(w: &mut WeightLoader<'_>) -> Result<(HParams, Vec<Layer>)> {
    let hp = KeyReader::new(w).hparams(RopePairing::Neox, Gating::Softmax, true)?;
    let layers = (0..hp.n_layer).map(|il| layer(w, il, &hp)).collect::<Result<_>>()?;
    Ok((hp, layers))
}

fn layer(w: &mut WeightLoader<'_>, il: u32, hp: &HParams) -> Result<Layer> {
    // Optional in the shared block, never absent in this architecture.
    for norm in ["attn_q_norm", "attn_k_norm"] {
        w.gguf().require(&format!("blk.{il}.{norm}.weight"))?;
    }
    Ok(Layer {
        attn_norm: w.vector(&format!("blk.{il}.attn_norm.weight"), hp.n_embd)?,
        attention: Attention::load(w, il, hp.n_embd, &hp.attention)?,
        ffn_norm: w.vector(&format!("blk.{il}.ffn_norm.weight"), hp.n_embd)?,
        ffn: MoeFfn::load(w, il, hp, GluOp::Swiglu)?,
    })
}
