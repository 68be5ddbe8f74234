//! Anonymous memory to be filled by the host and imported: what every driver with the import extension
//! accepts. Huge pages where the system has them: pinning 1 GiB takes 0.05 s then (NVIDIA), not 0.7 s.
#![allow(unsafe_code, reason = "promises that its memory may be imported")]

use std::ops::Range;

use memmap2::MmapMut;

use super::import::HostPages;
use crate::{Error, Result};

/// Size of a huge page; address and length are multiples of it, and so of every import alignment.
const HUGE_BYTES: usize = 2 << 20;

/// Zeroed private memory. Fill it, then share it as [`HostPages`].
#[derive(Debug)]
pub struct Arena {
    /// With as much before and behind the window as the alignment takes; never touched, so never there.
    map: MmapMut,
    window: Range<usize>,
}

impl Arena {
    /// At least `bytes` bytes, zeros. `what` names it in errors: `the arena`. The memory is taken page
    /// by page as it is written.
    pub fn new(what: &str, bytes: u64) -> Result<Self> {
        let failed = |source| Error::HostMemory { what: what.to_owned(), bytes, source };
        let too_large = || failed(std::io::Error::from(std::io::ErrorKind::OutOfMemory));
        let wanted = usize::try_from(bytes.max(1)).ok();
        let len = wanted.and_then(|n| n.checked_next_multiple_of(HUGE_BYTES));
        let whole = len.and_then(|len| len.checked_add(HUGE_BYTES));
        let (Some(len), Some(whole)) = (len, whole) else { return Err(too_large()) };
        let map = MmapMut::map_anon(whole).map_err(failed)?;
        let start = (map.as_ptr() as usize).next_multiple_of(HUGE_BYTES) - map.as_ptr() as usize;
        let arena = Self { map, window: start..start + len };
        arena.ask_for_huge_pages();
        Ok(arena)
    }

    /// The memory, to be filled.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.map[self.window.clone()]
    }

    #[cfg(target_os = "linux")]
    fn ask_for_huge_pages(&self) {
        let Range { start, end } = self.window;
        if let Err(error) = self.map.advise_range(memmap2::Advice::HugePage, start, end - start) {
            log::debug!("no huge pages for the arena: {error}");
        }
    }

    #[cfg(not(target_os = "linux"))]
    fn ask_for_huge_pages(&self) {}
}

// SAFETY: the mapping is private, readable and writable; nothing moves or unmaps it before the drop.
unsafe impl HostPages for Arena {
    fn bytes(&self) -> &[u8] {
        &self.map[self.window.clone()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_arena_is_aligned_and_long_enough() {
        for bytes in [0, 1, HUGE_BYTES as u64, HUGE_BYTES as u64 + 1] {
            let mut arena = Arena::new("a test", bytes).unwrap();
            let at = arena.bytes().as_ptr() as usize;
            assert_eq!((at % HUGE_BYTES, arena.bytes().len() % HUGE_BYTES), (0, 0));
            assert!(arena.bytes().len() as u64 >= bytes && !arena.bytes().is_empty());
            let last = arena.bytes().len() - 1;
            arena.bytes_mut()[last] = 7;
            assert_eq!((arena.bytes()[0], arena.bytes()[last]), (0, 7));
        }
    }

    #[test]
    fn more_than_there_is_is_refused_by_name() {
        for bytes in [1 << 60, u64::MAX] {
            let error = Arena::new("the arena", bytes).unwrap_err().to_string();
            assert!(error.contains("of host memory for the arena: "), "{error}");
        }
    }
}
