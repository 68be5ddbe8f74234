//! Matrices in chunks of memory: where each lies, and the regions of copies between two such places.
//! Pure.
//!
//! A weight is a row of matrices of equal size, one per expert. Kernels find each by an address of its
//! own, so a weight may be spread over chunks, but a matrix may not. Kernels may read up to
//! [`TAIL_BYTES`] past a matrix.

use std::ops::Range;

/// Readable bytes behind every matrix.
pub const TAIL_BYTES: u64 = 64;
/// Chunks are no larger, unless a single matrix is: drivers cut sizes to 32 bits, or refuse more.
pub const CHUNK_BYTES: u64 = 1 << 30;
/// A weight starts at a multiple of this, plus its phase. Experts follow each other without gaps, as
/// in the file.
pub const WEIGHT_ALIGN: u64 = 256;

/// The place of one matrix: a chunk, and the offset of the first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Which chunk.
    pub chunk: usize,
    /// Where in it.
    pub offset: u64,
}

/// Matrices to pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matrices {
    /// How many.
    pub n: u32,
    /// Bytes of each.
    pub bytes: u64,
    /// Offset of the first from a multiple of [`WEIGHT_ALIGN`]: copy engines are fastest where source
    /// and target are aligned alike, so both take over the file's.
    pub phase: u64,
}

/// Packs weights in order into chunks of at most `limit` bytes. Result: the pieces of each weight, and
/// the chunks' sizes.
pub fn pack(weights: &[Matrices], limit: u64) -> (Vec<Vec<Piece>>, Vec<u64>) {
    let mut chunks: Vec<u64> = Vec::new();
    let pieces = weights.iter().map(|w| {
        let place = |i| {
            let start = |used: u64| match i {
                0 => used.next_multiple_of(WEIGHT_ALIGN) + w.phase % WEIGHT_ALIGN,
                _ => used,
            };
            let at = chunks.last().map(|&used| start(used));
            let fits = |at: &u64| at + w.bytes + TAIL_BYTES <= limit;
            let offset = at.filter(fits).unwrap_or_else(|| {
                chunks.push(0);
                Some(start(0)).filter(fits).unwrap_or(0)
            });
            if let Some(used) = chunks.last_mut() {
                *used = offset + w.bytes;
            }
            Piece { chunk: chunks.len() - 1, offset }
        };
        (0..w.n).map(place).collect()
    });
    let pieces = pieces.collect();
    (pieces, chunks.iter().map(|used| used + TAIL_BYTES).collect())
}

/// A unit of the expert cache for experts with matrices of these sizes: where each matrix begins, but for its phase,
/// which is the file's as in [`Matrices`]; and the unit's bytes.
pub fn unit(matrix_bytes: impl IntoIterator<Item = u64>) -> (Vec<u64>, u64) {
    let mut end = 0;
    let place = |bytes: u64| {
        let start = end;
        end = (start + WEIGHT_ALIGN - 1 + bytes + TAIL_BYTES).next_multiple_of(WEIGHT_ALIGN);
        start
    };
    let starts = matrix_bytes.into_iter().map(place).collect();
    (starts, end)
}

/// A copy from one chunk into another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkRegion {
    /// Chunk and offset copied from.
    pub from: Piece,
    /// Chunk and offset copied to.
    pub to: Piece,
    /// Length.
    pub bytes: u64,
}

/// The copies that bring `range` of a weight's bytes from one place to another, as few as possible. A
/// place says where a byte of the weight is, and is contiguous within a matrix.
pub fn regions(
    range: Range<u64>,
    matrix_bytes: u64,
    from: impl Fn(u64) -> Piece,
    to: impl Fn(u64) -> Piece,
) -> Vec<ChunkRegion> {
    let mut regions: Vec<ChunkRegion> = Vec::new();
    let mut at = range.start;
    while at < range.end {
        let matrix_end = (at / matrix_bytes + 1) * matrix_bytes;
        let bytes = matrix_end.min(range.end) - at;
        let next = ChunkRegion { from: from(at), to: to(at), bytes };
        match regions.last_mut() {
            Some(last)
                if follows(last.from, last.bytes, next.from)
                    && follows(last.to, last.bytes, next.to) =>
            {
                last.bytes += bytes
            }
            _ => regions.push(next),
        }
        at += bytes;
    }
    regions
}

fn follows(a: Piece, bytes: u64, b: Piece) -> bool {
    a.chunk == b.chunk && a.offset + bytes == b.offset
}

/// Where the byte `at` of a weight is, given the pieces of its matrices.
pub fn locate(pieces: &[Piece], matrix_bytes: u64, at: u64) -> Piece {
    let piece = pieces[(at / matrix_bytes) as usize];
    Piece { chunk: piece.chunk, offset: piece.offset + at % matrix_bytes }
}

/// The byte ranges of the chosen experts; neighbours together. `experts`: ascending, without doubles.
pub fn expert_ranges(experts: &[u32], matrix_bytes: u64) -> Vec<Range<u64>> {
    let runs = experts.chunk_by(|a, b| a + 1 == *b);
    runs.filter_map(|run| {
        let (first, last) = (*run.first()?, *run.last()?);
        Some(u64::from(first) * matrix_bytes..(u64::from(last) + 1) * matrix_bytes)
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn matrices(sizes: &[(u32, u64, u64)]) -> Vec<Matrices> {
        sizes.iter().map(|&(n, bytes, phase)| Matrices { n, bytes, phase }).collect()
    }

    proptest! {
        /// Pieces lie inside their chunks, apart from each other, experts back to back.
        #[test]
        fn packing_is_sound(
            sizes in prop::collection::vec((1u32..6, 1u64..700, 0u64..256), 1..40),
            limit in 1000u64..3000,
        ) {
            let weights = matrices(&sizes);
            let (pieces, chunks) = pack(&weights, limit);
            let mut ranges = Vec::new();
            for (w, pieces) in weights.iter().zip(&pieces) {
                prop_assert_eq!(pieces.len(), w.n as usize);
                prop_assert_eq!(pieces[0].offset % WEIGHT_ALIGN, w.phase);
                for p in pieces {
                    prop_assert!(p.offset + w.bytes + TAIL_BYTES <= chunks[p.chunk]);
                    ranges.push((p.chunk, p.offset, p.offset + w.bytes));
                }
                for (a, b) in pieces.iter().zip(&pieces[1..]) {
                    let next_to = a.chunk == b.chunk && a.offset + w.bytes == b.offset;
                    prop_assert!(next_to || b.chunk == a.chunk + 1);
                }
            }
            prop_assert!(chunks.iter().all(|&c| c <= limit));
            ranges.sort();
            prop_assert!(ranges.windows(2).all(|w| w[0].0 < w[1].0 || w[0].2 <= w[1].1));
        }

        /// Copies between any two packings bring every byte of the range to its place, no other, and
        /// none twice.
        #[test]
        fn every_byte_copied_is_the_right_one(
            (n, bytes) in (1u32..12, 1u64..90),
            limits in (400u64..1500, 400u64..1500),
            phases in (0u64..256, 0u64..256),
            cut in any::<(prop::sample::Index, prop::sample::Index)>(),
        ) {
            let packed = |phase, limit| {
                let (mut pieces, chunks) = pack(&[Matrices { n, bytes, phase }], limit);
                (pieces.remove(0), chunks)
            };
            let (from, from_chunks) = packed(phases.0, limits.0);
            let (to, to_chunks) = packed(phases.1, limits.1);
            let total = u64::from(n) * bytes;
            let (a, b) = (cut.0.index(total as usize + 1), cut.1.index(total as usize + 1));
            let range = a.min(b) as u64..a.max(b) as u64;

            let mut source: Vec<Vec<u64>> =
                from_chunks.iter().map(|&c| vec![u64::MAX; c as usize]).collect();
            for at in 0..total {
                let p = locate(&from, bytes, at);
                source[p.chunk][p.offset as usize] = at;
            }
            let mut target: Vec<Vec<u64>> =
                to_chunks.iter().map(|&c| vec![u64::MAX; c as usize]).collect();
            let regions = regions(
                range.clone(),
                bytes,
                |at| locate(&from, bytes, at),
                |at| locate(&to, bytes, at),
            );
            for r in &regions {
                for i in 0..r.bytes {
                    let value = source[r.from.chunk][(r.from.offset + i) as usize];
                    let place = &mut target[r.to.chunk][(r.to.offset + i) as usize];
                    prop_assert_eq!(*place, u64::MAX, "written twice");
                    *place = value;
                }
            }
            for at in 0..total {
                let p = locate(&to, bytes, at);
                let expected = if range.contains(&at) { at } else { u64::MAX };
                prop_assert_eq!(target[p.chunk][p.offset as usize], expected);
            }
            prop_assert!(regions.len() < from_chunks.len() + to_chunks.len());
        }
    }

    #[test]
    fn units_hold_matrices_of_any_phase() {
        let (starts, bytes) = unit([1000, 1, 256]);
        assert_eq!((&starts[..], bytes), (&[0, 1536, 2048][..], 2816));
        assert_eq!(unit([]), (Vec::new(), 0));
    }

    #[test]
    fn neighbouring_experts_are_one_range() {
        assert_eq!(expert_ranges(&[0, 1, 4], 10), [0..20, 40..50]);
        assert_eq!(expert_ranges(&[], 10), []);
    }
}
