//! SentencePiece's BPE (`tokenizer.ggml.model` = `llama`): of all adjacent pairs whose
//! concatenation is a token, the one with the best score is merged first, the leftmost among equals;
//! what remains unknown becomes one token per byte.
//!
//! This is not done with HF `tokenizers`: its BPE ranks *pairs*, and no order of pairs reproduces
//! "leftmost of equal score" where a token has several splits (runs of one character).

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};

use crate::{Error, Result};

/// What SentencePiece writes for a space.
pub(super) const SPACE: char = '\u{2581}';

/// Encodes text that holds no special token.
#[derive(Debug)]
pub(super) struct Spm {
    /// Tokens that text may become, with id and score.
    tokens: HashMap<String, (u32, f32)>,
    /// Ids of `<0x00>` to `<0xFF>`.
    bytes: Vec<Option<u32>>,
    unk: Option<u32>,
}

impl Spm {
    /// `tokens`: text, id, score.
    pub(super) fn new<'a>(
        tokens: impl Iterator<Item = (&'a str, u32, f32)>,
        bytes: Vec<Option<u32>>,
        unk: Option<u32>,
    ) -> Self {
        let tokens = tokens.map(|(text, id, score)| (text.to_owned(), (id, score))).collect();
        Spm { tokens, bytes, unk }
    }

    /// Appends the ids of `text`, in which spaces are spaces.
    pub(super) fn encode(&self, text: &str, ids: &mut Vec<u32>) -> Result<()> {
        let text = text.replace(' ', SPACE.encode_utf8(&mut [0; 4]));
        for piece in self.merge(&text) {
            match self.tokens.get(piece) {
                Some(&(id, _)) => ids.push(id),
                None => self.fall_back(piece, ids)?,
            }
        }
        Ok(())
    }

    /// The pieces of `text` once no pair can be merged any more.
    fn merge<'t>(&self, text: &'t str) -> impl Iterator<Item = &'t str> {
        let mut symbols = Symbols::new(text);
        let mut queue = BinaryHeap::new();
        for left in 1..symbols.list.len() {
            queue.extend(self.candidate(&symbols, left - 1, left));
        }
        while let Some(best) = queue.pop() {
            if !symbols.holds(&best) {
                continue;
            }
            symbols.join(best.left, best.right);
            let joined = symbols.list[best.left];
            queue.extend(joined.prev.and_then(|p| self.candidate(&symbols, p, best.left)));
            queue.extend(joined.next.and_then(|n| self.candidate(&symbols, best.left, n)));
        }
        symbols.list.into_iter().filter(|s| s.len > 0).map(|s| &text[s.start..s.start + s.len])
    }

    fn candidate(&self, symbols: &Symbols<'_>, left: usize, right: usize) -> Option<Candidate> {
        let (a, b) = (symbols.list[left], symbols.list[right]);
        let len = a.len + b.len;
        let &(_, score) = self.tokens.get(&symbols.text[a.start..a.start + len])?;
        Some(Candidate { score, left, right, len })
    }

    fn fall_back(&self, piece: &str, ids: &mut Vec<u32>) -> Result<()> {
        let bytes: Option<Vec<u32>> =
            piece.bytes().map(|b| self.bytes.get(usize::from(b)).copied().flatten()).collect();
        match (bytes, self.unk) {
            (Some(bytes), _) => ids.extend(bytes),
            (None, Some(unk)) => ids.push(unk),
            (None, None) => {
                let problem = format!("the vocabulary has no token for `{piece}`, nor <unk>");
                return Err(Error::Tokenizer(problem));
            }
        }
        Ok(())
    }
}

/// A doubly linked list of adjacent slices, by index.
struct Symbols<'t> {
    text: &'t str,
    list: Vec<Symbol>,
}

/// `len` 0: merged into its left neighbour.
#[derive(Clone, Copy)]
struct Symbol {
    start: usize,
    len: usize,
    prev: Option<usize>,
    next: Option<usize>,
}

impl<'t> Symbols<'t> {
    /// One symbol per character.
    fn new(text: &'t str) -> Self {
        let n = text.chars().count();
        let symbol = |(i, (start, c)): (usize, (usize, char))| Symbol {
            start,
            len: c.len_utf8(),
            prev: i.checked_sub(1),
            next: (i + 1 < n).then_some(i + 1),
        };
        Symbols { text, list: text.char_indices().enumerate().map(symbol).collect() }
    }

    /// Whether both halves of `c` are still what they were when it was queued.
    fn holds(&self, c: &Candidate) -> bool {
        let (left, right) = (self.list[c.left], self.list[c.right]);
        left.len > 0 && right.len > 0 && left.len + right.len == c.len
    }

    fn join(&mut self, left: usize, right: usize) {
        let gone = self.list[right];
        self.list[right].len = 0;
        self.list[left].len += gone.len;
        self.list[left].next = gone.next;
        if let Some(next) = gone.next {
            self.list[next].prev = Some(left);
        }
    }
}

struct Candidate {
    score: f32,
    left: usize,
    right: usize,
    /// Bytes of both halves.
    len: usize,
}

impl Ord for Candidate {
    fn cmp(&self, other: &Self) -> Ordering {
        self.score.total_cmp(&other.score).then_with(|| other.left.cmp(&self.left))
    }
}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Candidate {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Candidate {}
