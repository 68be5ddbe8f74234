//! Turns a stream of token bytes into text without ever cutting a character in two.

/// Collects bytes and hands out complete characters.
///
/// Bytes that can no longer become a character come out as U+FFFD at once, the way
/// [`String::from_utf8_lossy`] would show them.
#[derive(Debug, Default, Clone)]
pub struct Utf8Stream {
    /// The beginning of a character; at most 3 bytes.
    held: Vec<u8>,
}

impl Utf8Stream {
    /// An empty stream.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds bytes; returns all text that is complete now.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.held.extend_from_slice(bytes);
        let rest = self.held.split_off(complete_len(&self.held));
        let done = std::mem::replace(&mut self.held, rest);
        String::from_utf8_lossy(&done).into_owned()
    }

    /// Ends the stream; a held beginning of a character becomes U+FFFD.
    pub fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.held)).into_owned()
    }
}

/// Length of the part of `bytes` that no later byte can change.
fn complete_len(bytes: &[u8]) -> usize {
    match bytes.utf8_chunks().last() {
        Some(last) if is_beginning(last.invalid()) => bytes.len() - last.invalid().len(),
        _ => bytes.len(),
    }
}

/// Whether `bytes`, which end the input, are a character's beginning rather than garbage.
fn is_beginning(bytes: &[u8]) -> bool {
    // error_len() is None exactly for an unexpected end of input.
    std::str::from_utf8(bytes).is_err_and(|e| e.valid_up_to() == 0 && e.error_len().is_none())
}
