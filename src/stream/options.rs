//! What the user may choose about experts in host memory.

use crate::vk::CopyQueue;
use std::fmt;

/// Where the copy lane, or a kernel, reads experts from that stay in host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HostSource {
    /// The file's own pages, mapped `MAP_PRIVATE` for writing and imported.
    Mmap,
    /// Anonymous memory with huge pages, filled from the file and imported.
    Arena,
    /// Host memory that the driver allocates, filled from the file.
    Host,
    /// Nothing is pinned but a ring of bounce buffers, filled ahead of every copy.
    Ring,
}

impl HostSource {
    /// All, in the order of the ladder.
    pub const ALL: [HostSource; 4] =
        [HostSource::Mmap, HostSource::Arena, HostSource::Host, HostSource::Ring];

    /// As on the command line: `mmap`.
    pub fn name(self) -> &'static str {
        match self {
            HostSource::Mmap => "mmap",
            HostSource::Arena => "arena",
            HostSource::Host => "host",
            HostSource::Ring => "ring",
        }
    }
}

impl fmt::Display for HostSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How many staging slots full expert tensors are prefetched into.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SlotCount {
    /// The engine chooses: up to [`FULL_SLOTS`] on a card with memory of its own, else none.
    #[default]
    Auto,
    /// 0: no prefetching; else [`MIN_SLOTS`] to [`MAX_SLOTS`].
    Fixed(u32),
}

/// Device memory for experts that stay in host memory and are used often.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheSize {
    /// What the plan leaves of a card's own memory.
    #[default]
    Auto,
    /// So many bytes, or what the plan leaves if that is less; 0: none.
    Fixed(u64),
}

/// With one slot a copy could never run beside the kernel that reads the slot.
pub const MIN_SLOTS: u32 = 2;
/// More bring nothing: two layers are in flight.
pub const MAX_SLOTS: u32 = 8;
/// The three tensors of a layer and those of the next.
pub const FULL_SLOTS: u32 = 6;
/// What 1 means where the variable asks for prefetching.
pub const USUAL_SLOTS: u32 = 3;

/// Speed of the bus before anything was copied: PCIe 4 at 16 lanes.
pub const LINK_GBPS: f64 = 25.0;

/// The choices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StreamOptions {
    /// `--host-source`; `None`: a probe decides.
    pub host_source: Option<HostSource>,
    /// `--prefetch-experts-slots`
    pub slots: SlotCount,
    /// `--expert-cache`
    pub expert_cache: CacheSize,
    /// `--pin-max-mib`: pin no more host memory than this.
    pub pin_max_bytes: Option<u64>,
    /// `--copy-queue`: where the copy lane runs; `None`: table and measurement decide.
    pub copy_queue: Option<CopyQueue>,
    /// For tests: the seed of a disorderly schedule.
    pub chaos: Option<u64>,
}
