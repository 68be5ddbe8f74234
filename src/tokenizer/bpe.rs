//! Byte-level BPE (`tokenizer.ggml.model` = `gpt2`) on top of HF `tokenizers`, and the alphabet in
//! which such vocabularies write bytes as printable characters (GPT-2's `bytes_to_unicode`).

use std::collections::{HashMap, HashSet};
use std::sync::LazyLock;

use tokenizers::SplitDelimiterBehavior::Isolated;
use tokenizers::models::bpe::{BPE, Vocab as BpeVocab};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};

use super::pre::PreTokenizer;
use crate::{Error, Result};

/// Encodes text that holds no special token.
#[derive(Debug)]
pub(super) struct ByteBpe {
    inner: tokenizers::Tokenizer,
    /// Bytes that can occur in UTF-8 but have no token.
    missing: Vec<u8>,
}

impl ByteBpe {
    /// `tokens`: what plain text may become, with ids. `reserved`: tokens that it must never
    /// become; merges that mention them are left out.
    pub(super) fn new(
        tokens: &[(&str, u32)],
        reserved: &HashSet<&str>,
        merges: &[String],
        pre: &PreTokenizer,
    ) -> Result<Self> {
        let vocab: BpeVocab = tokens.iter().map(|&(text, id)| (text.to_owned(), id)).collect();
        let merges = split_merges(merges, &vocab, reserved)?;
        let missing = utf8_bytes().filter(|&b| !vocab.contains_key(byte_text(b).as_str()));
        let missing = missing.collect();
        let model = BPE::builder()
            .vocab_and_merges(vocab, merges)
            .ignore_merges(pre.ignore_merges)
            .build()
            .map_err(|e| Error::Tokenizer(format!("tokenizer.ggml.merges: {e}")))?;
        let mut inner = tokenizers::Tokenizer::new(model);
        inner.with_pre_tokenizer(Some(pre_tokenizer(pre)?));
        Ok(ByteBpe { inner, missing })
    }

    /// Appends the ids of `text`.
    pub(super) fn encode(&self, text: &str, ids: &mut Vec<u32>) -> Result<()> {
        if let Some(byte) = text.bytes().find(|b| self.missing.contains(b)) {
            let problem = format!("the vocabulary has no token for byte 0x{byte:02X}");
            return Err(Error::Tokenizer(problem));
        }
        let encoding = self
            .inner
            .encode_fast(text, false)
            .map_err(|e| Error::Tokenizer(format!("cannot encode: {e}")))?;
        ids.extend_from_slice(encoding.get_ids());
        Ok(())
    }
}

/// `a b` lines to pairs. The first of equal lines counts, and merges that name no token are ignored, as
/// in llama.cpp.
fn split_merges(
    merges: &[String],
    vocab: &BpeVocab,
    reserved: &HashSet<&str>,
) -> Result<Vec<(String, String)>> {
    let mut seen = HashSet::with_capacity(merges.len());
    let mut pairs = Vec::with_capacity(merges.len());
    let mut n_impossible = 0;
    for (i, line) in merges.iter().enumerate() {
        let bad = |why: &str| {
            Error::Tokenizer(format!("tokenizer.ggml.merges: entry {i} is `{line}`: {why}"))
        };
        let (a, b) = split_merge(line).ok_or_else(|| bad("expected two parts and one space"))?;
        let joined = format!("{a}{b}");
        if [a, b, &joined].iter().any(|part| reserved.contains(part)) || !seen.insert(line) {
            continue;
        }
        // A merge of or into what is no token can never happen.
        if [a, b, &joined].iter().any(|part| !vocab.contains_key(*part)) {
            n_impossible += 1;
            continue;
        }
        pairs.push((a.to_owned(), b.to_owned()));
    }
    if n_impossible > 0 {
        log::warn!("tokenizer.ggml.merges: {n_impossible} entries name no token and are ignored");
    }
    Ok(pairs)
}

fn split_merge(line: &str) -> Option<(&str, &str)> {
    let (a, b) = line.split_once(' ')?;
    (!a.is_empty() && !b.is_empty() && !b.contains(' ')).then_some((a, b))
}

fn pre_tokenizer(pre: &PreTokenizer) -> Result<Sequence> {
    let mut steps = Vec::with_capacity(pre.patterns.len() + 1);
    for pattern in pre.patterns {
        let split = Split::new(SplitPattern::Regex((*pattern).to_owned()), Isolated, false)
            .map_err(|e| Error::Tokenizer(format!("pre-tokenizer pattern `{pattern}`: {e}")))?;
        steps.push(PreTokenizerWrapper::Split(split));
    }
    steps.push(PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, false, false)));
    Ok(Sequence::new(steps))
}

/// The bytes that occur in valid UTF-8.
fn utf8_bytes() -> impl Iterator<Item = u8> {
    (0..=0xF4).filter(|b| !matches!(b, 0xC0 | 0xC1))
}

/// Bytes that stand for themselves in the alphabet; the others are U+0100 and up, in order.
fn is_printable(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF)
}

static BYTE_OF: LazyLock<HashMap<char, u8>> =
    LazyLock::new(|| CHAR_OF.iter().zip(0..=255).map(|(&c, b)| (c, b)).collect());

static CHAR_OF: LazyLock<[char; 256]> = LazyLock::new(|| {
    let mut next = 0x100;
    std::array::from_fn(|i| {
        let code = if is_printable(i as u8) {
            i as u32
        } else {
            next += 1;
            next - 1
        };
        char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)
    })
});

fn byte_text(byte: u8) -> String {
    CHAR_OF[usize::from(byte)].to_string()
}

/// The bytes that a token of a byte-level vocabulary stands for.
pub(super) fn token_bytes(token: &str) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(token.len());
    for c in token.chars() {
        match BYTE_OF.get(&c) {
            Some(&byte) => bytes.push(byte),
            // Not in the alphabet: a token that was added as plain text.
            None => bytes.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
    bytes
}
