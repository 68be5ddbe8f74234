//! What is pinned together: import chunks over a file, or chunks of memory to be filled. Pure.

use super::packing::{Matrices, Piece, TAIL_BYTES, pack};
use std::ops::Range;

/// An expert tensor in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileTensor {
    /// The file of a split model.
    pub part: usize,
    /// First byte in the file.
    pub offset: u64,
    /// Experts.
    pub n_expert: u32,
    /// Bytes of one expert's matrix.
    pub matrix_bytes: u64,
}

impl FileTensor {
    /// Bytes of the tensor.
    pub fn bytes(&self) -> u64 {
        u64::from(self.n_expert) * self.matrix_bytes
    }

    fn end(&self) -> u64 {
        self.offset + self.bytes()
    }
}

/// Memory to be pinned in one go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Size.
    pub bytes: u64,
    /// What is in it.
    pub content: Content,
}

/// What is in a chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// Pages of a file.
    Pages {
        /// The file.
        part: usize,
        /// Bytes of the file, page-aligned.
        range: Range<u64>,
    },
    /// Bytes of tensors to be read: tensor, its bytes, and the offset in the chunk.
    Reads(Vec<(usize, Range<u64>, u64)>),
}

/// What to pin, in order, and where the matrices then are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChunkPlan {
    /// In the order of first use.
    pub chunks: Vec<Chunk>,
    /// By tensor and expert. `None`: no chunk has the matrix whole; it needs a copy of its own.
    pub pieces: Vec<Vec<Option<Piece>>>,
}

impl ChunkPlan {
    /// Imports the pages of a file in place. `tensors` are in the order of use; `page_bytes` is the
    /// alignment of imports; `mapped_bytes`, by part, how far the pages reach.
    ///
    /// No page is imported twice: where two tensors share one, both go into one chunk if it does not
    /// grow over the limit, and otherwise the page is the first one's.
    pub fn pages(
        tensors: &[FileTensor],
        page_bytes: u64,
        limit: u64,
        mapped_bytes: &[u64],
    ) -> Self {
        let limit = (limit / page_bytes * page_bytes).max(page_bytes);
        let mut in_file_order: Vec<&FileTensor> = tensors.iter().collect();
        in_file_order.sort_by_key(|t| (t.part, t.offset));
        let mut spans: Vec<(usize, Range<u64>)> = Vec::new();
        for t in in_file_order {
            let mapped = mapped_bytes.get(t.part).copied().unwrap_or(0);
            let start = t.offset / page_bytes * page_bytes;
            let end = (t.end() + TAIL_BYTES).next_multiple_of(page_bytes).min(mapped);
            add_span(&mut spans, t.part, start..end, limit);
        }
        let chunks: Vec<(usize, Range<u64>)> =
            spans.into_iter().flat_map(|(part, span)| cut(part, span, limit)).collect();
        Self::from_pages(tensors, chunks)
    }

    fn from_pages(tensors: &[FileTensor], mut chunks: Vec<(usize, Range<u64>)>) -> Self {
        let first_use = |(part, range): &(usize, Range<u64>)| {
            tensors
                .iter()
                .position(|t| t.part == *part && t.offset < range.end && range.start < t.end())
        };
        chunks.sort_by_key(|chunk| first_use(chunk).unwrap_or(usize::MAX));
        let find = |part: usize, start: u64, end: u64| {
            let holds = |(p, range): &(usize, Range<u64>)| {
                *p == part && range.start <= start && end <= range.end
            };
            let chunk = chunks.iter().position(holds)?;
            Some(Piece { chunk, offset: start - chunks[chunk].1.start })
        };
        let pieces = tensors
            .iter()
            .map(|t| {
                (0..u64::from(t.n_expert))
                    .map(|e| {
                        let start = t.offset + e * t.matrix_bytes;
                        find(t.part, start, start + t.matrix_bytes + TAIL_BYTES)
                    })
                    .collect()
            })
            .collect();
        let chunks = chunks.into_iter().map(|(part, range)| Chunk {
            bytes: range.end - range.start,
            content: Content::Pages { part, range },
        });
        ChunkPlan { chunks: chunks.collect(), pieces }
    }

    /// Reads tensors, in the order of use, into memory of our own.
    pub fn reads(tensors: &[FileTensor], limit: u64) -> Self {
        let largest = tensors.iter().map(|t| t.matrix_bytes + TAIL_BYTES).max().unwrap_or(0);
        let matrices: Vec<Matrices> = tensors
            .iter()
            .map(|t| Matrices { n: t.n_expert, bytes: t.matrix_bytes, phase: t.offset })
            .collect();
        let (pieces, sizes) = pack(&matrices, limit.max(largest));
        let mut reads = vec![Vec::new(); sizes.len()];
        for (index, (t, pieces)) in tensors.iter().zip(&pieces).enumerate() {
            let mut at = 0;
            for run in pieces.chunk_by(|a, b| a.chunk == b.chunk) {
                let bytes = run.len() as u64 * t.matrix_bytes;
                if let Some(first) = run.first() {
                    reads[first.chunk].push((index, at..at + bytes, first.offset));
                }
                at += bytes;
            }
        }
        let chunk = |(bytes, reads)| Chunk { bytes, content: Content::Reads(reads) };
        let chunks = sizes.into_iter().zip(reads).map(chunk).collect();
        let pieces = pieces.into_iter().map(|p| p.into_iter().map(Some).collect()).collect();
        ChunkPlan { chunks, pieces }
    }

    /// The tensors that are complete once the first `n_chunks` chunks are pinned and the last of these
    /// was not before.
    pub fn completed_by(&self, n_chunks: usize) -> impl Iterator<Item = usize> {
        let last = |pieces: &[Option<Piece>]| pieces.iter().flatten().map(|p| p.chunk + 1).max();
        // A tensor of which no chunk has a matrix comes with the first.
        let due = move |pieces: &Vec<Option<Piece>>| last(pieces).unwrap_or(1) == n_chunks;
        self.pieces.iter().enumerate().filter(move |(_, p)| due(p)).map(|(index, _)| index)
    }
}

/// Adds a span of pages after the others of the file.
fn add_span(spans: &mut Vec<(usize, Range<u64>)>, part: usize, mut span: Range<u64>, limit: u64) {
    if let Some((_, last)) =
        spans.last_mut().filter(|(p, last)| *p == part && span.start <= last.end)
    {
        if span.end - last.start <= limit {
            last.end = last.end.max(span.end);
            return;
        }
        span.start = last.end;
    }
    if span.start < span.end {
        spans.push((part, span));
    }
}

fn cut(part: usize, span: Range<u64>, limit: u64) -> impl Iterator<Item = (usize, Range<u64>)> {
    let starts = (span.start..span.end).step_by(limit as usize);
    starts.map(move |start| (part, start..(start + limit).min(span.end)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PAGE: u64 = 64;

    /// Tensors in a file, with gaps between them, at multiples of 32 bytes.
    fn tensors() -> impl Strategy<Value = Vec<FileTensor>> {
        prop::collection::vec((0u64..10, 1u32..9, 1u64..200, 0usize..2), 1..15).prop_map(|list| {
            let mut ends = [96u64; 2];
            let place = |(gap, n_expert, matrix_bytes, part): (u64, u32, u64, usize)| {
                let offset = ends[part].next_multiple_of(32) + gap * 32;
                let tensor = FileTensor { part, offset, n_expert, matrix_bytes };
                ends[part] = tensor.end();
                tensor
            };
            list.into_iter().map(place).collect()
        })
    }

    fn mapped(tensors: &[FileTensor]) -> Vec<u64> {
        let end = |part| tensors.iter().filter(|t| t.part == part).map(|t| t.end()).max();
        (0..2).map(|part| end(part).unwrap_or(0).next_multiple_of(PAGE)).collect()
    }

    proptest! {
        /// Chunks are aligned, within the limit and the file, and share no page; every matrix is whole
        /// in one with its tail, or is reported as not.
        #[test]
        fn pages_are_imported_once(tensors in tensors(), limit in 64u64..3000) {
            let mapped = mapped(&tensors);
            let plan = ChunkPlan::pages(&tensors, PAGE, limit, &mapped);
            let mut seen = Vec::new();
            for chunk in &plan.chunks {
                let Content::Pages { part, range } = &chunk.content else { panic!("pages") };
                prop_assert!(range.start % PAGE == 0 && range.end % PAGE == 0);
                prop_assert!(range.start < range.end && range.end <= mapped[*part]);
                prop_assert!(chunk.bytes == range.end - range.start && chunk.bytes <= limit);
                seen.push((*part, range.start, range.end));
            }
            seen.sort();
            prop_assert!(seen.windows(2).all(|w| w[0].0 < w[1].0 || w[0].2 <= w[1].1));
            for (t, pieces) in tensors.iter().zip(&plan.pieces) {
                for (e, piece) in pieces.iter().enumerate() {
                    let Some(piece) = piece else { continue };
                    let chunk = &plan.chunks[piece.chunk];
                    let Content::Pages { part, range } = &chunk.content else { panic!("pages") };
                    let start = t.offset + e as u64 * t.matrix_bytes;
                    prop_assert_eq!((*part, range.start + piece.offset), (t.part, start));
                    prop_assert!(piece.offset + t.matrix_bytes + TAIL_BYTES <= chunk.bytes);
                }
            }
            // With room, only matrices at a border or at the file's end need a copy.
            if limit > 2500 {
                let missing = plan.pieces.iter().flatten().filter(|p| p.is_none()).count();
                prop_assert!(missing <= 4 * plan.chunks.len() + 4);
            }
        }

        /// Reads cover each tensor once, where its pieces are.
        #[test]
        fn reads_cover_the_tensors(tensors in tensors(), limit in 600u64..3000) {
            let plan = ChunkPlan::reads(&tensors, limit);
            let mut covered = vec![0; tensors.len()];
            for (c, chunk) in plan.chunks.iter().enumerate() {
                let Content::Reads(reads) = &chunk.content else { panic!("reads") };
                for (index, range, offset) in reads {
                    let t = &tensors[*index];
                    prop_assert_eq!(covered[*index], range.start);
                    covered[*index] = range.end;
                    for e in range.start / t.matrix_bytes..range.end / t.matrix_bytes {
                        let at = offset + e * t.matrix_bytes - range.start;
                        let piece = Some(Piece { chunk: c, offset: at });
                        prop_assert_eq!(plan.pieces[*index][e as usize], piece);
                    }
                    prop_assert!(offset + (range.end - range.start) + TAIL_BYTES <= chunk.bytes);
                }
            }
            for (t, covered) in tensors.iter().zip(covered) {
                prop_assert_eq!(t.bytes(), covered);
            }
        }

        /// Every tensor is complete at exactly one time.
        #[test]
        fn every_tensor_completes_once(tensors in tensors(), limit in 64u64..3000) {
            let pages = ChunkPlan::pages(&tensors, PAGE, limit, &mapped(&tensors));
            for plan in [pages, ChunkPlan::reads(&tensors, limit.max(600))] {
                let n = plan.chunks.len();
                let mut all: Vec<_> = (1..=n).flat_map(|n| plan.completed_by(n)).collect();
                all.sort();
                prop_assert_eq!(all, (0..tensors.len()).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn neighbours_share_a_chunk_and_a_crowded_page_belongs_to_the_first() {
        let tensor =
            |offset, matrix_bytes| FileTensor { part: 0, offset, n_expert: 1, matrix_bytes };
        let close = [tensor(64, 100), tensor(192, 100)];
        assert_eq!(ChunkPlan::pages(&close, PAGE, 1000, &[384]).chunks.len(), 1);
        let plan = ChunkPlan::pages(&close, PAGE, 200, &[384]);
        assert_eq!(plan.chunks.len(), 2);
        assert!(plan.pieces[0][0].is_some() && plan.pieces[1][0].is_none());
    }
}
