//! Stop strings: generation ends where one of them appears, and none of it is shown, even when it
//! arrives in pieces.

/// Watches streamed text for stop strings.
///
/// ```
/// use vkmoe::tokenizer::StopStrings;
/// let mut stop = StopStrings::new(["###".to_owned()]);
/// assert_eq!(stop.push("a #"), ("a ".to_owned(), false));
/// assert_eq!(stop.push("# b"), ("## b".to_owned(), false));
/// assert_eq!(stop.push("c### d"), ("c".to_owned(), true));
/// ```
#[derive(Debug, Clone, Default)]
pub struct StopStrings {
    strings: Vec<String>,
    /// Text that may be the beginning of a stop string.
    held: String,
    stopped: bool,
}

impl StopStrings {
    /// Empty strings are ignored.
    pub fn new(strings: impl IntoIterator<Item = String>) -> Self {
        let strings = strings.into_iter().filter(|s| !s.is_empty()).collect();
        StopStrings { strings, ..Self::default() }
    }

    /// Adds a piece. Returns the text that may be shown, and whether a stop string has appeared;
    /// from then on nothing is shown any more.
    pub fn push(&mut self, piece: &str) -> (String, bool) {
        if self.stopped {
            return (String::new(), true);
        }
        self.held.push_str(piece);
        let found = self.strings.iter().filter_map(|s| self.held.find(s.as_str())).min();
        self.stopped = found.is_some();
        let shown = found.unwrap_or_else(|| self.held.len() - self.partial_len());
        let rest = if self.stopped { String::new() } else { self.held.split_off(shown) };
        self.held.truncate(shown);
        (std::mem::replace(&mut self.held, rest), self.stopped)
    }

    /// The text still held back when generation ends otherwise.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Length in bytes of the longest end of `held` that begins a stop string.
    fn partial_len(&self) -> usize {
        let longest = |s: &String| {
            let prefixes = s.char_indices().map(|(i, _)| &s[..i]);
            prefixes.filter(|p| self.held.ends_with(*p)).map(str::len).max()
        };
        self.strings.iter().filter_map(longest).max().unwrap_or(0)
    }
}
