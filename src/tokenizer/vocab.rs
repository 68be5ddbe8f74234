//! What a GGUF's `tokenizer.*` keys hold, checked, and the facts that follow from token texts.

use std::collections::{HashMap, HashSet};

use crate::{Error, Result};

/// The `tokenizer.*` keys of a GGUF. Absent arrays are empty. The token arrays are indexed by id.
#[derive(Debug, Clone, Default, serde::Deserialize)]
#[serde(default)]
pub struct Vocab {
    /// `tokenizer.ggml.model`: `gpt2` or `llama`.
    pub model: String,
    /// `tokenizer.ggml.pre`.
    pub pre: Option<String>,
    /// `tokenizer.ggml.tokens`.
    pub tokens: Vec<String>,
    /// `tokenizer.ggml.scores`.
    pub scores: Vec<f32>,
    /// `tokenizer.ggml.token_type`: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte.
    pub token_types: Vec<i32>,
    /// `tokenizer.ggml.merges`: two tokens and a space between them.
    pub merges: Vec<String>,
    /// `tokenizer.ggml.bos_token_id`.
    pub bos: Option<u32>,
    /// `tokenizer.ggml.eos_token_id`.
    pub eos: Option<u32>,
    /// `tokenizer.ggml.eot_token_id`.
    pub eot: Option<u32>,
    /// `tokenizer.ggml.eom_token_id`.
    pub eom: Option<u32>,
    /// `tokenizer.ggml.unknown_token_id`.
    pub unk: Option<u32>,
    /// `tokenizer.ggml.padding_token_id`.
    pub pad: Option<u32>,
    /// `tokenizer.ggml.add_bos_token`.
    pub add_bos: Option<bool>,
    /// `tokenizer.ggml.add_eos_token`.
    pub add_eos: Option<bool>,
    /// `tokenizer.ggml.add_space_prefix`.
    pub add_space_prefix: Option<bool>,
    /// `tokenizer.chat_template`.
    pub chat_template: Option<String>,
}

/// What a token is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

/// Control tokens that output shows, since they tell the parts of an answer apart (gpt-oss).
pub(super) const SHOWN_CONTROL: &[&str] =
    &["<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"];

/// Texts of tokens that end a turn in some model, whatever type the file gives them.
const END_OF_TURN: &[&str] = &[
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|calls|>",
    "<|flush|>",
    "<end_of_turn>",
    "<turn|>",
    "<|tool_response>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "</s>",
    "<eos>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "[e~[",
    "<｜end▁of▁sentence｜>",
];

/// Texts of tokens of code completion after which nothing sensible follows.
const END_OF_INFILL: &[&str] = &[
    "<|fim_pad|>",
    "<fim-pad>",
    "<fim_pad>",
    "<PAD>",
    "[PAD]",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<fim-repo>",
    "<REPO>",
    "<reponame>",
    "<|file_sep|>",
];

/// The value of a token of the form `<0x41>`.
pub(super) fn byte_value(text: &str) -> Option<u8> {
    let hex = text.strip_prefix("<0x")?.strip_suffix('>')?;
    (hex.len() == 2).then(|| u8::from_str_radix(hex, 16).ok())?
}

impl Vocab {
    /// Refuses arrays that do not belong together, ids outside the vocabulary, and duplicates.
    pub(super) fn check(&self) -> Result<()> {
        if self.tokens.is_empty() {
            return Err(Error::Tokenizer("tokenizer.ggml.tokens is missing or empty".into()));
        }
        self.check_len("scores", self.scores.len())?;
        self.check_len("token_type", self.token_types.len())?;
        if let Some(id) = self.scores.iter().position(|score| score.is_nan()) {
            return Err(Error::Tokenizer(format!("tokenizer.ggml.scores: entry {id} is NaN")));
        }
        self.check_ids()?;
        self.check_unique()
    }

    fn check_len(&self, key: &str, len: usize) -> Result<()> {
        let n = self.tokens.len();
        if len == 0 || len == n {
            return Ok(());
        }
        Err(Error::Tokenizer(format!("tokenizer.ggml.{key} has {len} entries for {n} tokens")))
    }

    fn check_ids(&self) -> Result<()> {
        let ids = [
            ("bos", self.bos),
            ("eos", self.eos),
            ("eot", self.eot),
            ("eom", self.eom),
            ("unknown", self.unk),
            ("padding", self.pad),
        ];
        for (key, id) in ids {
            let n = self.tokens.len();
            if let Some(id) = id.filter(|&id| id as usize >= n) {
                return Err(Error::Tokenizer(format!(
                    "tokenizer.ggml.{key}_token_id is {id}, but there are {n} tokens"
                )));
            }
        }
        Ok(())
    }

    fn check_unique(&self) -> Result<()> {
        let mut seen = HashMap::with_capacity(self.tokens.len());
        for (id, text) in self.tokens.iter().enumerate() {
            if let Some(first) = seen.insert(text, id) {
                return Err(Error::Tokenizer(format!(
                    "tokenizer.ggml.tokens: entries {first} and {id} are both `{text}`"
                )));
            }
        }
        Ok(())
    }

    /// One kind per token. Tokens that end a turn are control tokens even where the file types
    /// them otherwise: user text must not be able to spell them.
    pub(super) fn kinds(&self) -> Result<Vec<Kind>> {
        if self.token_types.is_empty() {
            return Ok(self.tokens.iter().map(|text| override_kind(text, Kind::Normal)).collect());
        }
        let kind = |(id, (text, &number)): (usize, (&String, &i32))| {
            let kind = kind_from(number).ok_or_else(|| {
                let problem = format!("tokenizer.ggml.token_type: entry {id} is {number}, not 1–6");
                Error::Tokenizer(problem)
            })?;
            Ok(override_kind(text, kind))
        };
        self.tokens.iter().zip(&self.token_types).enumerate().map(kind).collect()
    }

    /// The conventions of SentencePiece models whose files leave keys out.
    pub(super) fn set_spm_defaults(&mut self) {
        let n = self.tokens.len();
        let default = |slot: &mut Option<u32>, id: u32| {
            if slot.is_none() && (id as usize) < n {
                *slot = Some(id);
            }
        };
        default(&mut self.unk, 0);
        default(&mut self.bos, 1);
        default(&mut self.eos, 2);
        self.add_bos.get_or_insert(true);
    }

    /// The pre-tokenizer's name; old files have none.
    pub(super) fn pre_or_default(&self) -> &str {
        self.pre.as_deref().unwrap_or_else(|| {
            log::warn!("the file has no tokenizer.ggml.pre; long words may be cut wrongly");
            "default"
        })
    }

    /// Tokens after which generation stops.
    pub(super) fn end_of_generation(&self) -> HashSet<u32> {
        let named = |names: &[&str]| -> Vec<u32> {
            let tokens = self.tokens.iter().zip(0..);
            tokens.filter(|(text, _)| names.contains(&text.as_str())).map(|(_, id)| id).collect()
        };
        let mut ids: HashSet<u32> = named(END_OF_TURN).into_iter().collect();
        ids.extend(named(END_OF_INFILL));
        ids.extend([self.eos, self.eot, self.eom].into_iter().flatten());
        // gpt-oss and Solar end messages with <|end|> and turns with other tokens.
        let has = |name: &str| self.tokens.iter().any(|text| text == name);
        let calls = has("<|call|>") || has("<|calls|>");
        if calls && (has("<|return|>") || has("<|flush|>")) {
            for id in named(&["<|end|>"]) {
                ids.remove(&id);
            }
        }
        ids
    }
}

fn kind_from(number: i32) -> Option<Kind> {
    Some(match number {
        0 | 1 => Kind::Normal,
        2 => Kind::Unknown,
        3 => Kind::Control,
        4 => Kind::UserDefined,
        5 => Kind::Unused,
        6 => Kind::Byte,
        _ => return None,
    })
}

fn override_kind(text: &str, kind: Kind) -> Kind {
    if END_OF_TURN.contains(&text) { Kind::Control } else { kind }
}
