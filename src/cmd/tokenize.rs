//! `vkmoe tokenize`: the token ids of a text.

use super::{emit, model_path, text_input, tokenizer};
use crate::cli::TokenizeArgs;
use crate::error::Result;
use crate::gguf::Gguf;
use crate::tokenizer::Special;

pub(super) fn run(args: &TokenizeArgs) -> Result<()> {
    let gguf = Gguf::open(&model_path(args.model.as_deref())?)?;
    let tokenizer = tokenizer(&gguf)?;
    let text = text_input(args.text.as_deref().or(args.prompt.as_deref()), args.file.as_deref())?;
    let special = if args.parse_special { Special::Parse } else { Special::Plain };
    let bos = tokenizer.bos().filter(|_| tokenizer.add_bos() && !args.no_bos);
    let ids: Vec<u32> = bos.into_iter().chain(tokenizer.encode(&text, special)?).collect();
    if args.ids {
        let words: Vec<String> = ids.iter().map(u32::to_string).collect();
        return emit(&(words.join(" ") + "\n"));
    }
    let lines = ids.iter().map(|&id| {
        let bytes = tokenizer.token_bytes(id);
        let piece = String::from_utf8_lossy(&bytes).escape_debug().to_string();
        let piece = if piece.is_empty() {
            tokenizer.token_str(id).unwrap_or_default().into()
        } else {
            piece
        };
        format!("{id:>7}  '{piece}'\n")
    });
    emit(&lines.collect::<String>())
}
