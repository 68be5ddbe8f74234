//! The bounce ring: host memory that the device can copy from, through which experts pass that are
//! pinned nowhere. [`layout`] and [`cut`] are pure.
//!
//! A piece of the ring is filled by several threads, copied on the copy lane, and filled again once
//! that copy's point is reached.

use super::packing::WEIGHT_ALIGN;
use crate::error::Result;
use crate::gguf::Part;
use crate::vk::{Buffer, Device, MemoryKind, Point};
use std::ops::Range;
use std::sync::Arc;

/// Threads come together once a piece: with pieces of 16 MiB that halves the speed (H200, 16 threads).
const PIECE_BYTES: u64 = 64 << 20;
/// The ring is no larger.
const RING_BYTES: u64 = 512 << 20;
/// Fewer than this cannot be filled while others are copied.
const MIN_PIECES: u64 = 3;

/// Number and size of a ring's pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// How many.
    pub n: u32,
    /// Bytes of each.
    pub piece_bytes: u64,
}

impl Layout {
    /// Bytes of the ring.
    pub fn bytes(&self) -> u64 {
        u64::from(self.n) * self.piece_bytes
    }
}

/// The pieces of a ring. `total_bytes`: all that ever passes through; `free_bytes`: host memory that may
/// be used; `limit_bytes`: no piece is larger.
pub fn layout(total_bytes: u64, free_bytes: u64, limit_bytes: u64) -> Layout {
    let ring_bytes = RING_BYTES.min(free_bytes / 8).min(total_bytes.next_multiple_of(1 << 16));
    let piece_bytes = (ring_bytes / MIN_PIECES).clamp(1 << 16, PIECE_BYTES).min(limit_bytes);
    let n = (ring_bytes / piece_bytes).max(MIN_PIECES);
    Layout { n: n as u32, piece_bytes }
}

/// Cuts byte ranges of a tensor into pieces. The first byte of the tensor would lie at `phase` modulo
/// [`WEIGHT_ALIGN`], and so does every part, as in the slot.
pub fn cut(ranges: &[Range<u64>], piece_bytes: u64, phase: u64) -> Vec<Vec<Part>> {
    let mut pieces: Vec<Vec<Part>> = Vec::new();
    let mut used = piece_bytes;
    for range in ranges {
        let mut at = range.start;
        while at < range.end {
            let mut offset = used.next_multiple_of(WEIGHT_ALIGN) + (phase + at) % WEIGHT_ALIGN;
            if offset >= piece_bytes {
                pieces.push(Vec::new());
                offset = (phase + at) % WEIGHT_ALIGN;
            }
            let bytes = (range.end - at).min(piece_bytes - offset);
            if let Some(piece) = pieces.last_mut() {
                piece.push((at..at + bytes, offset));
            }
            at += bytes;
            used = offset + bytes;
        }
    }
    pieces
}

/// The ring's buffers.
pub struct Ring {
    /// Each with the copy that reads it.
    pieces: Vec<(Buffer, Option<Point>)>,
    next: usize,
    piece_bytes: u64,
}

impl Ring {
    /// Allocates the ring.
    pub fn new(device: &Arc<Device>, layout: Layout) -> Result<Self> {
        let Layout { n, piece_bytes } = layout;
        let piece = |i| {
            let name = format!("ring.{i}");
            Ok((Buffer::new(device, &name, piece_bytes, MemoryKind::HostRead)?, None))
        };
        let pieces = (0..n).map(piece).collect::<Result<_>>()?;
        Ok(Ring { pieces, next: 0, piece_bytes })
    }

    /// Bytes of a piece.
    pub fn piece_bytes(&self) -> u64 {
        self.piece_bytes
    }

    /// Has `fill` write the first `bytes` bytes of the next piece, once its last copy is done. Result: the
    /// piece, by index, and its buffer.
    pub fn fill(
        &mut self,
        device: &Device,
        bytes: u64,
        fill: impl FnOnce(&mut [u8]) -> Result<()>,
    ) -> Result<(usize, Buffer)> {
        let index = self.next;
        self.next = (self.next + 1) % self.pieces.len();
        let (buffer, copied) = &mut self.pieces[index];
        if let Some(point) = copied.take() {
            device.wait(point, "a copy out of the ring")?;
        }
        buffer.write_with(0, bytes, fill)?;
        Ok((index, buffer.clone()))
    }

    /// Whether the next piece can be filled without waiting.
    pub fn is_free(&self, device: &Device) -> Result<bool> {
        match self.pieces[self.next].1 {
            Some(Point { lane, value }) => Ok(device.timeline(lane).completed()? >= value),
            None => Ok(true),
        }
    }

    /// Waits for all copies out of the ring.
    pub fn finish(&mut self, device: &Device) -> Result<()> {
        for point in self.pieces.iter_mut().filter_map(|(_, copied)| copied.take()) {
            device.wait(point, "the last copies out of the ring")?;
        }
        Ok(())
    }

    /// The copy out of a piece was submitted.
    pub fn copied(&mut self, index: usize, point: Point) {
        self.pieces[index].1 = Some(point);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Parts cover the ranges in order, fit their piece, do not overlap, and keep the phase.
        #[test]
        fn pieces_carry_every_byte_once(
            gaps in prop::collection::vec((0u64..500, 1u64..3000), 1..20),
            piece_bytes in 512u64..4096,
            phase in 0u64..256,
        ) {
            let mut at = 0;
            let ranges: Vec<Range<u64>> = gaps
                .iter()
                .map(|&(gap, bytes)| {
                    let start = at + gap;
                    at = start + bytes;
                    start..at
                })
                .collect();
            let mut carried: Vec<u64> = Vec::new();
            for piece in cut(&ranges, piece_bytes, phase) {
                let mut used = 0;
                for (range, offset) in piece {
                    prop_assert!(offset >= used && range.start < range.end);
                    used = offset + range.end - range.start;
                    prop_assert!(used <= piece_bytes);
                    prop_assert_eq!(offset % WEIGHT_ALIGN, (phase + range.start) % WEIGHT_ALIGN);
                    carried.extend(range);
                }
            }
            let expected: Vec<u64> = ranges.into_iter().flatten().collect();
            prop_assert_eq!(carried, expected);
        }

        /// The ring stays within its share of memory, and can always make progress.
        #[test]
        fn rings_are_modest(
            total in 1u64..1 << 40,
            free in 1u64 << 24..1 << 40,
            limit in 1u64 << 12..1 << 30,
        ) {
            let ring = layout(total, free, limit);
            let Layout { n, piece_bytes } = ring;
            prop_assert!(u64::from(n) >= MIN_PIECES && piece_bytes >= limit.min(1 << 16));
            prop_assert!(piece_bytes <= limit);
            let bytes = ring.bytes();
            prop_assert!(bytes <= (free / 8).max(MIN_PIECES << 16) && bytes <= RING_BYTES);
        }
    }
}
