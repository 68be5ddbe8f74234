//! Text to token ids and back, from what a GGUF says about its vocabulary, and chat templates.
//!
//! Knows nothing of GGUF's binary format: the caller copies the `tokenizer.*` keys into a [`Vocab`].
//! What text becomes follows llama.cpp: no Unicode normalization (bytes survive a round trip), tokens
//! of type user-defined always match, control tokens only where the caller asks for it
//! ([`Special::Parse`]).
//!
//! Reading order: [`Vocab`], [`Tokenizer`], then `chat` (messages to ids), `template`, `utf8_stream`
//! and `stop` (streaming output); `bpe`, `pre` and `spm` are the two algorithms.

mod bpe;
mod chat;
mod json;
mod pre;
mod special;
mod spm;
mod stop;
mod template;
mod utf8_stream;
mod vocab;
mod from_gguf;

pub use stop::StopStrings;
pub use template::{ChatTemplate, Message, TemplateArgs};
pub use utf8_stream::Utf8Stream;
pub use vocab::Vocab;

use std::collections::HashSet;

use crate::{Error, Result};
use special::{Matcher, Part};
use vocab::Kind;

/// Whether control tokens written out in a text are recognized.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Special {
    /// They are plain text: for everything a user or a document says.
    Plain,
    /// They become their tokens: for prompts that are a template's output.
    Parse,
}

/// A vocabulary, ready to encode and decode.
#[derive(Debug)]
pub struct Tokenizer {
    vocab: Vocab,
    kinds: Vec<Kind>,
    algorithm: Algorithm,
    /// User-defined tokens.
    always: Matcher,
    /// User-defined, control and unknown tokens.
    parsed: Matcher,
    /// Control and unknown tokens.
    control: Matcher,
    end_of_generation: HashSet<u32>,
}

#[derive(Debug)]
enum Algorithm {
    ByteBpe(Box<bpe::ByteBpe>),
    Spm(spm::Spm),
}

impl Tokenizer {
    /// Checks `vocab` and builds the tokenizer.
    pub fn new(mut vocab: Vocab) -> Result<Self> {
        let is_spm = match vocab.model.as_str() {
            "gpt2" => false,
            "llama" => true,
            other => {
                let problem = format!("tokenizer.ggml.model is `{other}`, not gpt2 or llama");
                return Err(Error::Tokenizer(problem));
            }
        };
        vocab.check()?;
        let kinds = vocab.kinds()?;
        let algorithm = if is_spm {
            vocab.set_spm_defaults();
            Algorithm::Spm(new_spm(&vocab, &kinds)?)
        } else {
            let pre = pre::find(vocab.pre_or_default())?;
            vocab.add_bos.get_or_insert(pre.add_bos);
            Algorithm::ByteBpe(Box::new(new_bpe(&vocab, &kinds, pre)?))
        };
        let of_kind = |wanted: &'static [Kind]| {
            let ids = vocab.tokens.iter().zip(0..).zip(&kinds);
            Matcher::new(
                ids.filter(|(_, kind)| wanted.contains(kind)).map(|((text, id), _)| (&**text, id)),
            )
        };
        Ok(Tokenizer {
            always: of_kind(&[Kind::UserDefined]),
            parsed: of_kind(&[Kind::UserDefined, Kind::Control, Kind::Unknown]),
            control: of_kind(&[Kind::Control, Kind::Unknown]),
            end_of_generation: vocab.end_of_generation(),
            kinds,
            algorithm,
            vocab,
        })
    }

    /// The ids of `text`, without BOS or EOS.
    pub fn encode(&self, text: &str, special: Special) -> Result<Vec<u32>> {
        let matcher = match special {
            Special::Plain => &self.always,
            Special::Parse => &self.parsed,
        };
        let mut ids = Vec::with_capacity(text.len() / 3);
        // SentencePiece's leading space goes before every text that does not follow other text.
        let mut after_text = false;
        for part in matcher.split(text) {
            match part {
                Part::Token(id) => ids.push(id),
                Part::Text(text) => self.encode_text(text, !after_text, &mut ids)?,
            }
            after_text = matches!(part, Part::Text(_));
        }
        Ok(ids)
    }

    fn encode_text(&self, text: &str, may_prefix: bool, ids: &mut Vec<u32>) -> Result<()> {
        match &self.algorithm {
            Algorithm::ByteBpe(bpe) => bpe.encode(text, ids),
            Algorithm::Spm(spm) if may_prefix && self.adds_space_prefix() => {
                spm.encode(&format!(" {text}"), ids)
            }
            Algorithm::Spm(spm) => spm.encode(text, ids),
        }
    }

    /// The text of `ids`. `render_special`: show control tokens instead of dropping them.
    /// The space that [`Self::encode`] puts before a SentencePiece text is taken off again.
    pub fn decode(&self, ids: &[u32], render_special: bool) -> String {
        let mut bytes = Vec::new();
        let mut after_text = false;
        for &id in ids {
            if render_special || !self.is_hidden(id) {
                let token = self.token_bytes(id);
                let prefix = !after_text && self.adds_space_prefix() && self.is_text(id);
                let token = if prefix { strip_space(&token) } else { &token };
                bytes.extend_from_slice(token);
            }
            after_text = self.is_text(id);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The bytes of one token as they appear in running text; control tokens give their name.
    /// Empty for unused tokens and for ids outside the vocabulary.
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        let Some((text, kind)) = self.token_str(id).zip(self.kinds.get(id as usize)) else {
            return Vec::new();
        };
        match (kind, &self.algorithm) {
            (Kind::Unused, _) => Vec::new(),
            (Kind::Byte, _) => vocab::byte_value(text).map_or_else(Vec::new, |byte| vec![byte]),
            (Kind::Normal, Algorithm::ByteBpe(_)) => bpe::token_bytes(text),
            (Kind::Normal, Algorithm::Spm(_)) => text.replace(spm::SPACE, " ").into_bytes(),
            (Kind::Control | Kind::Unknown | Kind::UserDefined, _) => text.as_bytes().to_vec(),
        }
    }

    /// The token as the vocabulary writes it.
    pub fn token_str(&self, id: u32) -> Option<&str> {
        self.vocab.tokens.get(id as usize).map(String::as_str)
    }

    /// Whether output for a reader leaves this token out: a control token, save for the ones that
    /// structure the answers of gpt-oss.
    pub fn is_hidden(&self, id: u32) -> bool {
        matches!(self.kinds.get(id as usize), Some(Kind::Control | Kind::Unknown))
            && !self.token_str(id).is_some_and(|text| vocab::SHOWN_CONTROL.contains(&text))
    }

    /// Whether the token stands for text, as opposed to a matched special token.
    fn is_text(&self, id: u32) -> bool {
        matches!(self.kinds.get(id as usize), Some(Kind::Normal | Kind::Byte))
    }

    fn adds_space_prefix(&self) -> bool {
        matches!(self.algorithm, Algorithm::Spm(_)) && self.vocab.add_space_prefix.unwrap_or(true)
    }

    /// Whether the model ends its turn with this token: EOS, EOT, EOM, and tokens known by name.
    pub fn is_end_of_generation(&self, id: u32) -> bool {
        self.end_of_generation.contains(&id)
    }

    /// Number of tokens.
    pub fn n_vocab(&self) -> usize {
        self.vocab.tokens.len()
    }

    /// Beginning of a sequence.
    pub fn bos(&self) -> Option<u32> {
        self.vocab.bos
    }

    /// End of a sequence.
    pub fn eos(&self) -> Option<u32> {
        self.vocab.eos
    }

    /// End of a turn.
    pub fn eot(&self) -> Option<u32> {
        self.vocab.eot
    }

    /// Stands for what the vocabulary cannot express.
    pub fn unk(&self) -> Option<u32> {
        self.vocab.unk
    }

    /// Padding.
    pub fn pad(&self) -> Option<u32> {
        self.vocab.pad
    }

    /// Whether a prompt starts with [`Self::bos`]; never true without one.
    pub fn add_bos(&self) -> bool {
        self.vocab.bos.is_some() && self.vocab.add_bos.unwrap_or(false)
    }

    /// Whether a text that is not a prompt ends with [`Self::eos`]; never true without one.
    pub fn add_eos(&self) -> bool {
        self.vocab.eos.is_some() && self.vocab.add_eos.unwrap_or(false)
    }

    /// The model's own chat template, or ChatML where it has none.
    pub fn chat_template(&self) -> Result<ChatTemplate> {
        match &self.vocab.chat_template {
            Some(source) => ChatTemplate::parse(source),
            None => ChatTemplate::builtin("chatml"),
        }
    }
}

fn strip_space(bytes: &[u8]) -> &[u8] {
    bytes.strip_prefix(b" ").unwrap_or(bytes)
}

fn new_bpe(vocab: &Vocab, kinds: &[Kind], pre: &pre::PreTokenizer) -> Result<bpe::ByteBpe> {
    let mut tokens = Vec::with_capacity(vocab.tokens.len());
    let mut reserved = HashSet::new();
    for ((text, id), kind) in vocab.tokens.iter().zip(0..).zip(kinds) {
        match kind {
            Kind::Normal | Kind::UserDefined | Kind::Byte => tokens.push((text.as_str(), id)),
            Kind::Control | Kind::Unknown | Kind::Unused => {
                reserved.insert(text.as_str());
            }
        }
    }
    bpe::ByteBpe::new(&tokens, &reserved, &vocab.merges, pre)
}

fn new_spm(vocab: &Vocab, kinds: &[Kind]) -> Result<spm::Spm> {
    if vocab.scores.is_empty() {
        return Err(Error::Tokenizer("tokenizer.ggml.scores is missing".into()));
    }
    let mut bytes = vec![None; 256];
    for (text, id) in vocab.tokens.iter().zip(0..) {
        if let Some(byte) = vocab::byte_value(text) {
            bytes[usize::from(byte)] = Some(id);
        }
    }
    let rows = vocab.tokens.iter().zip(0..).zip(&vocab.scores).zip(kinds);
    let tokens = rows
        .filter(|(_, kind)| matches!(kind, Kind::Normal | Kind::UserDefined))
        .map(|(((text, id), &score), _)| (text.as_str(), id, score));
    Ok(spm::Spm::new(tokens, bytes, vocab.unk))
}
