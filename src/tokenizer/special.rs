//! Finds token texts verbatim inside a string: the leftmost match, the longest at one place.

use std::collections::HashMap;

/// A part of a string.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Part<'t> {
    /// Text between matches; never empty.
    Text(&'t str),
    /// A matched token.
    Token(u32),
}

/// A set of token texts to look for.
#[derive(Debug)]
pub(super) struct Matcher {
    /// By first byte; within a bucket the longest text comes first.
    by_first: HashMap<u8, Vec<(String, u32)>>,
}

impl Matcher {
    /// Empty texts match nothing.
    pub(super) fn new<'a>(tokens: impl Iterator<Item = (&'a str, u32)>) -> Self {
        let mut by_first: HashMap<u8, Vec<(String, u32)>> = HashMap::new();
        for (text, id) in tokens {
            if let Some(&first) = text.as_bytes().first() {
                by_first.entry(first).or_default().push((text.to_owned(), id));
            }
        }
        for bucket in by_first.values_mut() {
            bucket.sort_by_key(|(text, _)| std::cmp::Reverse(text.len()));
        }
        Matcher { by_first }
    }

    /// Cuts `text` at every match.
    pub(super) fn split<'t>(&self, text: &'t str) -> Vec<Part<'t>> {
        let mut parts = Vec::new();
        let mut end = 0;
        for (start, len, id) in self.matches(text) {
            if end < start {
                parts.push(Part::Text(&text[end..start]));
            }
            parts.push(Part::Token(id));
            end = start + len;
        }
        if end < text.len() {
            parts.push(Part::Text(&text[end..]));
        }
        parts
    }

    /// The ids of all matches, in order.
    pub(super) fn ids(&self, text: &str) -> Vec<u32> {
        self.matches(text).map(|(_, _, id)| id).collect()
    }

    /// Start and length in bytes, and id, of all matches, in order.
    pub(super) fn matches(&self, text: &str) -> impl Iterator<Item = (usize, usize, u32)> {
        let mut at = 0;
        std::iter::from_fn(move || {
            while at < text.len() {
                let start = at;
                if let Some((len, id)) = self.match_at(&text.as_bytes()[start..]) {
                    at += len;
                    return Some((start, len, id));
                }
                at += 1;
            }
            None
        })
    }

    /// Whether a match could start with `c`.
    pub(super) fn may_start_with(&self, c: char) -> bool {
        self.by_first
            .get(&c.encode_utf8(&mut [0; 4]).as_bytes()[0])
            .is_some_and(|bucket| bucket.iter().any(|(text, _)| text.starts_with(c)))
    }

    /// Length in bytes and id. Works on bytes: a UTF-8 text matches at character borders only.
    fn match_at(&self, rest: &[u8]) -> Option<(usize, u32)> {
        let bucket = self.by_first.get(rest.first()?)?;
        let (text, id) = bucket.iter().find(|(text, _)| rest.starts_with(text.as_bytes()))?;
        Some((text.len(), *id))
    }
}
