//! Where each weight's bytes are on the device: packing into buffers, loading, and the addresses
//! that kernels use.
//!
//! Weights are packed into chunks of at most 1 GiB. An expert tensor may be spread over chunks, since
//! kernels find each expert by its own address in a table; so may the experts of later placements.
//! Kernels may read up to [`TAIL_BYTES`] past a matrix.

use crate::error::Result;
use crate::gguf::Gguf;
use crate::graph::WeightId;
use crate::model::weights::{Role, WeightInfo};
use crate::plan::Place;
use crate::vk::{Buffer, Device, Lane, MemoryKind, Point, Recorder, Replay};
use indicatif::ProgressBar;
use std::sync::Arc;

/// Readable bytes behind every matrix.
pub const TAIL_BYTES: u64 = 64;
/// Chunks are no larger, unless a single matrix is.
const CHUNK_BYTES: u64 = 1 << 30;
/// A weight starts at a multiple of this. Experts follow each other without gaps, as in the file.
const WEIGHT_ALIGN: u64 = 256;

/// A piece of a weight: one matrix, in one chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    chunk: usize,
    offset: u64,
}

/// Matrices to pack: how many of how many bytes.
struct Matrices {
    n: u32,
    bytes: u64,
}

/// Packs weights in order. Result: the pieces of each weight, and the chunks' sizes.
fn pack(weights: &[Matrices], limit: u64) -> (Vec<Vec<Piece>>, Vec<u64>) {
    let mut chunks: Vec<u64> = Vec::new();
    let pieces = weights.iter().map(|w| {
        (0..w.n)
            .map(|i| {
                let align = if i == 0 { WEIGHT_ALIGN } else { 1 };
                let at = chunks.last().map(|used| used.next_multiple_of(align));
                let fits = at.is_some_and(|at| at + w.bytes + TAIL_BYTES <= limit);
                let offset = if fits { at.unwrap_or(0) } else { 0 };
                if !fits {
                    chunks.push(0);
                }
                if let Some(used) = chunks.last_mut() {
                    *used = offset + w.bytes;
                }
                Piece { chunk: chunks.len() - 1, offset }
            })
            .collect()
    });
    let pieces = pieces.collect();
    (pieces, chunks.iter().map(|used| used + TAIL_BYTES).collect())
}

/// All weights of a model, loaded.
pub struct Residency {
    /// Owners of the memory that the addresses point into.
    buffers: Vec<Buffer>,
    /// By weight: address of its first matrix.
    addresses: Vec<u64>,
    /// By weight: address of its table of expert addresses.
    tables: Vec<u64>,
}

impl Residency {
    /// Loads all weights where `places` says. The mapping is checked for a file that shrank.
    pub fn load(
        device: &Arc<Device>,
        gguf: &Gguf,
        weights: &[WeightInfo],
        places: &[Place],
        bar: &ProgressBar,
    ) -> Result<Residency> {
        let mut loader = Loader::new(device, gguf, bar)?;
        let mut pieces = vec![Vec::new(); weights.len()];
        for (place, kind) in
            [(Place::Device, MemoryKind::Device), (Place::Host, MemoryKind::HostRead)]
        {
            let chosen: Vec<usize> = (0..weights.len()).filter(|&w| places[w] == place).collect();
            loader.load(weights, &chosen, kind, &mut pieces)?;
        }
        let (addresses, tables) = loader.write_tables(weights, &pieces)?;
        loader.finish()?;
        Ok(Residency { buffers: loader.buffers, addresses, tables })
    }

    /// Address of a weight that is one matrix or vector.
    pub fn address(&self, weight: WeightId) -> u64 {
        self.addresses[weight.0 as usize]
    }

    /// Address of a weight's table: one u64 address per expert.
    pub fn table(&self, weight: WeightId) -> u64 {
        self.tables[weight.0 as usize]
    }

    /// Address of an optional vector; kernels take 0 for none.
    pub fn optional(&self, weight: Option<WeightId>) -> u64 {
        weight.map_or(0, |w| self.address(w))
    }

    /// The buffers behind the addresses, to be kept alive by commands.
    pub fn buffers(&self) -> &[Buffer] {
        &self.buffers
    }
}

/// Largest buffer of a device.
fn buffer_limit(device: &Device) -> u64 {
    let limits = &device.info().limits;
    limits.buffer_bytes.min(limits.allocation_bytes)
}

/// Copies weights through a ring of staging buffers on the copy lane.
struct Loader<'a> {
    device: &'a Arc<Device>,
    gguf: &'a Gguf,
    bar: &'a ProgressBar,
    ring: Vec<(Buffer, Option<Point>)>,
    next: usize,
    buffers: Vec<Buffer>,
}

const RING_SLOTS: usize = 4;
const RING_SLOT_BYTES: u64 = 16 << 20;

impl<'a> Loader<'a> {
    fn new(device: &'a Arc<Device>, gguf: &'a Gguf, bar: &'a ProgressBar) -> Result<Self> {
        let slot =
            |i| Buffer::new(device, &format!("load.{i}"), RING_SLOT_BYTES, MemoryKind::Upload);
        let ring = (0..RING_SLOTS).map(|i| Ok((slot(i)?, None))).collect::<Result<_>>()?;
        Ok(Loader { device, gguf, bar, ring, next: 0, buffers: Vec::new() })
    }

    /// Allocates and fills the chunks of the chosen weights.
    fn load(
        &mut self,
        weights: &[WeightInfo],
        chosen: &[usize],
        kind: MemoryKind,
        pieces: &mut [Vec<(Buffer, u64)>],
    ) -> Result<()> {
        let limit = buffer_limit(self.device);
        let largest = chosen.iter().max_by_key(|&&w| weights[w].matrix_bytes);
        if let Some(w) =
            largest.map(|&w| &weights[w]).filter(|w| w.matrix_bytes + TAIL_BYTES > limit)
        {
            let problem =
                format!("one matrix has {} bytes, a buffer of this device {limit}", w.matrix_bytes);
            return Err(self.gguf.error(format!("tensor `{}`", w.name), problem));
        }
        let matrices: Vec<Matrices> = chosen
            .iter()
            .map(|&w| Matrices { n: weights[w].weight.n_expert, bytes: weights[w].matrix_bytes })
            .collect();
        let (packed, sizes) = pack(&matrices, limit.min(CHUNK_BYTES.max(largest_bytes(&matrices))));
        let first = self.buffers.len();
        for (i, &bytes) in sizes.iter().enumerate() {
            let name = format!("weights.{}", first + i);
            self.buffers.push(Buffer::new(self.device, &name, bytes, kind)?);
        }
        for (&w, packed) in chosen.iter().zip(packed) {
            let at: Vec<(Buffer, u64)> =
                packed.iter().map(|p| (self.buffers[first + p.chunk].clone(), p.offset)).collect();
            self.fill(&weights[w], &at)?;
            pieces[w] = at;
        }
        Ok(())
    }

    /// Copies one weight, consecutive matrices of a chunk together.
    fn fill(&mut self, w: &WeightInfo, at: &[(Buffer, u64)]) -> Result<()> {
        let gguf = self.gguf;
        let mut rest = gguf.bytes(&gguf.tensors()[w.tensor]);
        for run in at.chunk_by(|a, b| a.1 + w.matrix_bytes == b.1) {
            let Some((buffer, offset)) = run.first() else { continue };
            let (data, after) = rest.split_at(run.len() * w.matrix_bytes as usize);
            rest = after;
            for (i, part) in data.chunks(RING_SLOT_BYTES as usize).enumerate() {
                let to = offset + i as u64 * RING_SLOT_BYTES;
                if buffer.is_mapped() {
                    buffer.write(to, part)?
                } else {
                    self.stage(buffer, to, part)?
                }
                self.bar.inc(part.len() as u64);
            }
        }
        gguf.check()
    }

    /// One copy through the next slot of the ring, once the slot's last copy is done.
    fn stage(&mut self, to: &Buffer, offset: u64, data: &[u8]) -> Result<()> {
        let (slot, busy) = &mut self.ring[self.next];
        self.next = (self.next + 1) % RING_SLOTS;
        if let Some(point) = busy.take() {
            self.device.wait(point, "a copy of weights")?;
        }
        slot.write(0, data)?;
        let mut recorder = Recorder::new(self.device, Lane::Copy, "load", Replay::Once)?;
        recorder.copy(slot, 0, to, offset, data.len() as u64);
        let commands = recorder.finish()?;
        *busy = Some(self.device.submit(Lane::Copy, &[&commands], &[])?);
        Ok(())
    }

    /// The address tables of all weights, one after the other in one buffer.
    fn write_tables(
        &mut self,
        weights: &[WeightInfo],
        pieces: &[Vec<(Buffer, u64)>],
    ) -> Result<(Vec<u64>, Vec<u64>)> {
        let address = |(buffer, offset): &(Buffer, u64)| buffer.address() + offset;
        let addresses = pieces.iter().map(|p| p.first().map_or(0, address)).collect();
        let entries: Vec<u64> = pieces.iter().flatten().map(address).collect();
        let bytes = (entries.len() * 8).max(8) as u64;
        let buffer = Buffer::new(self.device, "weights.table", bytes, MemoryKind::Device)?;
        for (i, part) in bytemuck::cast_slice(&entries).chunks(RING_SLOT_BYTES as usize).enumerate()
        {
            self.stage(&buffer, i as u64 * RING_SLOT_BYTES, part)?;
        }
        let mut table = buffer.address();
        let tables = weights
            .iter()
            .map(|w| {
                let this = if w.role == Role::Experts { table } else { 0 };
                table += u64::from(w.weight.n_expert) * 8;
                this
            })
            .collect();
        self.buffers.push(buffer);
        Ok((addresses, tables))
    }

    fn finish(&mut self) -> Result<()> {
        for point in self.ring.iter_mut().filter_map(|(_, busy)| busy.take()) {
            self.device.wait(point, "the last weights")?;
        }
        self.gguf.check()
    }
}

fn largest_bytes(matrices: &[Matrices]) -> u64 {
    matrices.iter().map(|m| m.bytes).max().unwrap_or(0) + TAIL_BYTES
}

/// Device bytes that packing adds to the weights themselves, at most.
pub fn packing_overhead_bytes(weights: &[WeightInfo]) -> u64 {
    let total: u64 = weights.iter().map(WeightInfo::bytes).sum();
    let chunks = total / CHUNK_BYTES + 2;
    weights.len() as u64 * WEIGHT_ALIGN + chunks * (TAIL_BYTES + (1 << 20))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Pieces lie inside their chunks, apart from each other, experts back to back.
        #[test]
        fn packing_is_sound(
            sizes in prop::collection::vec((1u32..6, 1u64..700), 1..40),
            limit in 800u64..3000,
        ) {
            let weights: Vec<_> = sizes.iter().map(|&(n, bytes)| Matrices { n, bytes }).collect();
            let (pieces, chunks) = pack(&weights, limit);
            let mut ranges = Vec::new();
            for (w, pieces) in weights.iter().zip(&pieces) {
                prop_assert_eq!(pieces.len(), w.n as usize);
                prop_assert_eq!(pieces[0].offset % WEIGHT_ALIGN, 0);
                for p in pieces {
                    prop_assert!(p.offset + w.bytes + TAIL_BYTES <= chunks[p.chunk]);
                    ranges.push((p.chunk, p.offset, p.offset + w.bytes));
                }
                for (a, b) in pieces.iter().zip(&pieces[1..]) {
                    let next_to = a.chunk == b.chunk && a.offset + w.bytes == b.offset;
                    prop_assert!(next_to || (b.chunk == a.chunk + 1 && b.offset == 0));
                }
            }
            prop_assert!(chunks.iter().all(|&c| c <= limit));
            ranges.sort();
            prop_assert!(ranges.windows(2).all(|w| w[0].0 < w[1].0 || w[0].2 <= w[1].1));
        }
    }
}
