//! Names of keys and tensors: finding one in a list that stays in file order, and showing one in an
//! error message, where it must stay on one line whatever it holds.

/// Finds names without copying them: positions in the list, sorted by name.
#[derive(Debug, Clone, Default)]
pub(super) struct NameIndex(Vec<u32>);

/// Two positions with the same name, `first` before `second`.
#[derive(Debug, PartialEq)]
pub(super) struct Twice {
    pub(super) first: usize,
    pub(super) second: usize,
}

impl NameIndex {
    /// Indexes `len` names; an error if one is there twice. The parser keeps `len` below 2^32.
    pub(super) fn new<'a>(len: usize, name: impl Fn(usize) -> &'a str) -> Result<Self, Twice> {
        let mut order: Vec<u32> = (0..len as u32).collect();
        order.sort_unstable_by(|&a, &b| (name(a as usize), a).cmp(&(name(b as usize), b)));
        let twice = order.windows(2).find(|pair| name(pair[0] as usize) == name(pair[1] as usize));
        match twice {
            Some(pair) => Err(Twice { first: pair[0] as usize, second: pair[1] as usize }),
            None => Ok(NameIndex(order)),
        }
    }

    /// The position of a name in the list that was indexed.
    pub(super) fn find<'a>(&self, wanted: &str, name: impl Fn(usize) -> &'a str) -> Option<usize> {
        let found = self.0.binary_search_by(|&i| name(i as usize).cmp(wanted)).ok()?;
        Some(self.0[found] as usize)
    }
}

/// Longest part of a name that a message shows, in characters.
const SHOWN_CHARS: usize = 80;

/// ``tensor `output.weight` ``: control characters escaped, the end cut off if long.
pub(super) fn quoted(kind: &str, name: &str) -> String {
    let shown: String = name.chars().take(SHOWN_CHARS).flat_map(char::escape_debug).collect();
    let more = if name.chars().nth(SHOWN_CHARS).is_some() { "…" } else { "" };
    format!("{kind} `{shown}{more}`")
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may fail")]
mod tests {
    use super::{NameIndex, Twice, quoted};

    #[test]
    fn finds_every_name_and_no_other() {
        let names = ["d", "a", "c"];
        let index = NameIndex::new(3, |i| names[i]).unwrap();
        for (i, name) in names.iter().enumerate() {
            assert_eq!(index.find(name, |i| names[i]), Some(i));
        }
        assert_eq!(index.find("b", |i| names[i]), None);
    }

    #[test]
    fn a_name_there_twice_is_an_error_in_file_order() {
        let names = ["x", "b", "a", "b"];
        let twice = NameIndex::new(4, |i| names[i]).unwrap_err();
        assert_eq!(twice, Twice { first: 1, second: 3 });
    }

    #[test]
    fn messages_stay_short_and_on_one_line() {
        assert_eq!(quoted("key", "a\nb"), "key `a\\nb`");
        assert!(quoted("key", &"x".repeat(60_000)).len() < 100);
    }
}
