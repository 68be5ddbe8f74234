//! A vocabulary from the `tokenizer.*` keys of a GGUF file.

use super::Vocab;
use crate::error::Result;
use crate::gguf::Gguf;

impl Vocab {
    /// Copies the keys; what they mean is checked by [`Tokenizer::new`](super::Tokenizer::new).
    pub fn from_gguf(gguf: &Gguf) -> Result<Vocab> {
        let m = gguf.metadata();
        let id = |name: &str| m.u32(&format!("tokenizer.ggml.{name}_token_id"));
        let strings = |key| m.strings(key).map(|s| s.map(<[String]>::to_vec).unwrap_or_default());
        let text = |key| m.str(key).map(|s| s.map(str::to_string));
        Ok(Vocab {
            model: m.require_str("tokenizer.ggml.model")?.to_string(),
            pre: text("tokenizer.ggml.pre")?,
            tokens: m.require_strings("tokenizer.ggml.tokens")?.to_vec(),
            scores: m.f32s("tokenizer.ggml.scores")?.unwrap_or_default(),
            token_types: m.i32s("tokenizer.ggml.token_type")?.unwrap_or_default(),
            merges: strings("tokenizer.ggml.merges")?,
            bos: id("bos")?,
            eos: id("eos")?,
            eot: id("eot")?,
            eom: id("eom")?,
            unk: id("unknown")?,
            pad: id("padding")?,
            add_bos: m.bool("tokenizer.ggml.add_bos_token")?,
            add_eos: m.bool("tokenizer.ggml.add_eos_token")?,
            add_space_prefix: m.bool("tokenizer.ggml.add_space_prefix")?,
            chat_template: text("tokenizer.chat_template")?,
        })
    }
}
