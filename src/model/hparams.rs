//! Hyper-parameters, read from the file's metadata and bounded.

use super::weights::WeightLoader;
use crate::error::Result;
use crate::gguf::Gguf;
use crate::graph::{Gating, RopePairing};
use crate::model::rope::{RopeParams, RopeScaling};

/// What the layers and the engine need to know of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct HParams {
    /// `general.architecture`
    pub arch: String,
    /// `general.name`, or empty.
    pub name: String,
    /// Layers.
    pub n_layer: u32,
    /// Width of the residual stream.
    pub n_embd: u32,
    /// Tokens of the vocabulary.
    pub n_vocab: u32,
    /// Context that the model was trained for, in tokens.
    pub n_ctx_train: u32,
    /// Epsilon of the norms.
    pub norm_eps: f32,
    /// Factor on the embedding.
    pub embedding_scale: f32,
    /// Width of dense feed-forward layers, 0 if the file names none.
    pub n_ff: u32,
    /// Attention.
    pub attention: AttentionParams,
    /// Experts.
    pub experts: ExpertParams,
}

/// Attention of one model, the same in all layers.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionParams {
    /// Query heads.
    pub n_head: u32,
    /// KV heads.
    pub n_head_kv: u32,
    /// Size of a query and key head.
    pub head_k: u32,
    /// Size of a value head.
    pub head_v: u32,
    /// Factor on q·k.
    pub scale: f32,
    /// Rotary embedding.
    pub rope: RopeParams,
}

/// The mixture of experts of one model.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertParams {
    /// Experts of a layer.
    pub n_expert: u32,
    /// Experts that a token uses.
    pub n_used: u32,
    /// Width of an expert.
    pub n_ff: u32,
    /// Scores.
    pub gating: Gating,
    /// Chosen weights are divided by their sum.
    pub renormalize: bool,
    /// Factor on the weights.
    pub scale: f32,
}

const ORIGINAL: &str = "rope.scaling.original_context_length";
/// No model has more experts; the router's shared memory is sized for it.
pub const MAX_EXPERTS: u32 = 512;

/// Reads one model's keys; every error names file and key.
pub struct KeyReader<'a, 'b> {
    loader: &'b WeightLoader<'a>,
}

impl<'a, 'b> KeyReader<'a, 'b> {
    /// Keys of the loader's architecture.
    pub fn new(loader: &'b WeightLoader<'a>) -> Self {
        KeyReader { loader }
    }

    fn gguf(&self) -> &'a Gguf {
        self.loader.gguf()
    }

    /// An error about `{arch}.{name}`.
    pub fn error(&self, name: &str, problem: impl Into<String>) -> crate::Error {
        self.gguf().error(format!("key `{}`", self.loader.key(name)), problem)
    }

    /// A required count between 1 and `max`.
    pub fn count(&self, name: &str, max: u32) -> Result<u32> {
        let value = self.gguf().metadata().require_u32(&self.loader.key(name))?;
        self.bounded(name, value, max)
    }

    /// A count that may be absent.
    pub fn optional_count(&self, name: &str, max: u32) -> Result<Option<u32>> {
        let value = self.gguf().metadata().u32(&self.loader.key(name))?;
        value.map(|v| self.bounded(name, v, max)).transpose()
    }

    fn bounded(&self, name: &str, value: u32, max: u32) -> Result<u32> {
        if (1..=max).contains(&value) {
            return Ok(value);
        }
        Err(self.error(name, format!("is {value}, 1 to {max} is possible")))
    }

    /// A finite number, or its default.
    pub fn number(&self, name: &str, default: f32) -> Result<f32> {
        let value = self.gguf().metadata().f32(&self.loader.key(name))?.unwrap_or(default);
        if value.is_finite() {
            return Ok(value);
        }
        Err(self.error(name, format!("is {value}, a finite number is needed")))
    }

    /// A positive number, or its default.
    pub fn positive(&self, name: &str, default: f32) -> Result<f32> {
        let value = self.number(name, default)?;
        if value > 0.0 {
            return Ok(value);
        }
        Err(self.error(name, format!("is {value}, a positive number is needed")))
    }

    /// What all architectures share; an architecture changes what is its own.
    pub fn hparams(
        &self,
        pairing: RopePairing,
        gating: Gating,
        renormalize: bool,
    ) -> Result<HParams> {
        let metadata = self.gguf().metadata();
        let n_embd = self.count("embedding_length", 1 << 20)?;
        Ok(HParams {
            arch: metadata.require_str("general.architecture")?.to_string(),
            name: metadata.str("general.name")?.unwrap_or_default().to_string(),
            n_layer: self.count("block_count", 1024)?,
            n_embd,
            n_vocab: self.n_vocab()?,
            n_ctx_train: self.count("context_length", u32::MAX)?,
            norm_eps: self.positive("attention.layer_norm_rms_epsilon", 1e-6)?,
            embedding_scale: 1.0,
            // Files without dense layers may say 0.
            n_ff: metadata.u32(&self.loader.key("feed_forward_length"))?.unwrap_or(0),
            attention: self.attention(n_embd, pairing)?,
            experts: self.experts(gating, renormalize)?,
        })
    }

    /// Tokens of the vocabulary: the rows of the embedding.
    fn n_vocab(&self) -> Result<u32> {
        let rows = self.gguf().require("token_embd.weight")?.shape[1];
        u32::try_from(rows).ok().filter(|&n| n <= 1 << 24).ok_or_else(|| {
            self.gguf().error("tensor `token_embd.weight`", format!("has {rows} rows"))
        })
    }

    /// Heads, head sizes, scale and rotation.
    fn attention(&self, n_embd: u32, pairing: RopePairing) -> Result<AttentionParams> {
        let n_head = self.count("attention.head_count", 1024)?;
        let n_head_kv = self.optional_count("attention.head_count_kv", 1024)?.unwrap_or(n_head);
        if n_head % n_head_kv != 0 {
            let problem = format!("is {n_head_kv}, which does not divide {n_head} heads");
            return Err(self.error("attention.head_count_kv", problem));
        }
        let head_k = self.head_size("attention.key_length", n_embd / n_head)?;
        let head_v = self.head_size("attention.value_length", n_embd / n_head)?;
        let scale = self.positive("attention.scale", 1.0 / (head_k as f32).sqrt())?;
        let rope = self.rope(head_k, pairing)?;
        Ok(AttentionParams { n_head, n_head_kv, head_k, head_v, scale, rope })
    }

    fn head_size(&self, name: &str, default: u32) -> Result<u32> {
        let size = self.optional_count(name, u32::MAX)?.unwrap_or(default);
        if (32..=256).contains(&size) && size % 8 == 0 {
            return Ok(size);
        }
        Err(self
            .error(name, format!("is {size}; heads of 32 to 256, in steps of 8, are supported")))
    }

    fn rope(&self, head_k: u32, pairing: RopePairing) -> Result<RopeParams> {
        let n_rot = self.optional_count("rope.dimension_count", head_k)?.unwrap_or(head_k);
        if n_rot % 2 != 0 {
            return Err(
                self.error("rope.dimension_count", format!("is {n_rot}, an even count is needed"))
            );
        }
        let freq_base = self.positive("rope.freq_base", 10000.0)?;
        Ok(RopeParams { pairing, n_rot, freq_base, scaling: self.rope_scaling()? })
    }

    /// YaRN without an original context counts from the stated one, as in llama.cpp.
    fn rope_scaling(&self) -> Result<RopeScaling> {
        let key = self.loader.key("rope.scaling.type");
        let kind = self.gguf().metadata().str(&key)?.unwrap_or_default();
        // The factor's former name.
        let legacy = self.positive("rope.scale_linear", 1.0)?;
        let factor = self.positive("rope.scaling.factor", legacy)?;
        match kind {
            // Old files name a factor and no type.
            "" | "linear" if factor != 1.0 => Ok(RopeScaling::Linear { factor }),
            "" | "linear" | "none" => Ok(RopeScaling::None),
            "yarn" => Ok(RopeScaling::Yarn {
                factor,
                n_ctx_orig: match self.optional_count(ORIGINAL, u32::MAX)? {
                    Some(n_ctx) => n_ctx,
                    None => self.count("context_length", u32::MAX)?,
                },
                attn_factor: self.positive("rope.scaling.attn_factor", 1.0)?,
                beta_fast: self.positive("rope.scaling.yarn_beta_fast", 32.0)?,
                beta_slow: self.positive("rope.scaling.yarn_beta_slow", 1.0)?,
                ext_factor: self.number("rope.scaling.yarn_ext_factor", 1.0)?,
            }),
            other => {
                let problem = format!("`{other}` is not supported; supported: none, linear, yarn");
                Err(self.error("rope.scaling.type", problem))
            }
        }
    }

    /// Expert counts and width. Gating and normalization are the architecture's.
    fn experts(&self, gating: Gating, renormalize: bool) -> Result<ExpertParams> {
        let n_expert = self.count("expert_count", MAX_EXPERTS)?;
        let n_used = self.count("expert_used_count", n_expert)?;
        let n_ff = self.count("expert_feed_forward_length", 1 << 20)?;
        let scale = self.positive("expert_weights_scale", 1.0)?;
        Ok(ExpertParams { n_expert, n_used, n_ff, gating, renormalize, scale })
    }
}
