//! Where each weight's bytes are on the device: packing into buffers, loading, and the addresses
//! that kernels use.
//!
//! Weights are packed into chunks of at most 1 GiB. An expert tensor may be spread over chunks, since
//! kernels find each expert by its own address in a table. Experts that stay on the host are the
//! business of [`crate::stream`]; here they only have a table, which is filled when they can be read.

use crate::error::Result;
use crate::gguf::Gguf;
use crate::graph::WeightId;
use crate::model::weights::{Role, WeightInfo};
use crate::plan::Place;
use crate::stream::packing::{CHUNK_BYTES, Matrices, TAIL_BYTES, WEIGHT_ALIGN, pack};
use crate::vk::{Buffer, Device, Lane, MemoryKind, Point, Recorder, Replay};
use indicatif::ProgressBar;
use std::sync::Arc;

/// All weights of a model, loaded.
pub struct Residency {
    /// Owners of the memory that the addresses point into.
    buffers: Vec<Buffer>,
    /// By weight: address of its first matrix.
    addresses: Vec<u64>,
    /// By weight: address of its table of expert addresses.
    tables: Vec<u64>,
    /// Holds all tables.
    table: Buffer,
}

/// Whether a weight's bytes are moved by [`crate::stream`] instead of being loaded.
pub fn is_streamed(weight: &WeightInfo, place: Place) -> bool {
    place == Place::Host && weight.role == Role::Experts
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
            let loads = |&w: &usize| places[w] == place && !is_streamed(&weights[w], place);
            let chosen: Vec<usize> = (0..weights.len()).filter(loads).collect();
            loader.load(weights, &chosen, kind, &mut pieces)?;
        }
        let addresses = pieces.iter().map(|p| p.first().map_or(0, address)).collect();
        let (table, tables) = loader.write_tables(weights, &pieces)?;
        loader.finish()?;
        loader.buffers.push(table.clone());
        Ok(Residency { buffers: loader.buffers, addresses, tables, table })
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

    /// The buffer of all tables, and where in it a weight's table begins.
    pub fn table_place(&self, weight: WeightId) -> (&Buffer, u64) {
        (&self.table, self.table(weight) - self.table.address())
    }

    /// The buffers behind the addresses, to be kept alive by commands.
    pub fn buffers(&self) -> &[Buffer] {
        &self.buffers
    }
}

/// Copies weights through a ring of staging buffers on the copy lane.
struct Loader<'a> {
    device: &'a Arc<Device>,
    gguf: &'a Gguf,
    bar: &'a ProgressBar,
    ring: Vec<(Buffer, Option<Point>)>,
    slot_bytes: u64,
    next: usize,
    buffers: Vec<Buffer>,
}

const RING_SLOTS: usize = 4;
const RING_SLOT_BYTES: u64 = 16 << 20;

impl<'a> Loader<'a> {
    fn new(device: &'a Arc<Device>, gguf: &'a Gguf, bar: &'a ProgressBar) -> Result<Self> {
        let slot_bytes = RING_SLOT_BYTES.min(device.info().limits.allocated_buffer_bytes());
        let slot = |i| Buffer::new(device, &format!("load.{i}"), slot_bytes, MemoryKind::Upload);
        let ring = (0..RING_SLOTS).map(|i| Ok((slot(i)?, None))).collect::<Result<_>>()?;
        Ok(Loader { device, gguf, bar, ring, slot_bytes, next: 0, buffers: Vec::new() })
    }

    /// Allocates and fills the chunks of the chosen weights.
    fn load(
        &mut self,
        weights: &[WeightInfo],
        chosen: &[usize],
        kind: MemoryKind,
        pieces: &mut [Vec<(Buffer, u64)>],
    ) -> Result<()> {
        let limit = self.device.info().limits.allocated_buffer_bytes();
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
            .map(|&w| Matrices {
                n: weights[w].weight.n_expert,
                bytes: weights[w].matrix_bytes,
                phase: 0,
            })
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
            for (i, part) in data.chunks(self.slot_bytes as usize).enumerate() {
                let to = offset + i as u64 * self.slot_bytes;
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

    /// The address tables of all weights, one after the other in one buffer, and where each begins.
    /// Experts that were not loaded have zeros.
    fn write_tables(
        &mut self,
        weights: &[WeightInfo],
        pieces: &[Vec<(Buffer, u64)>],
    ) -> Result<(Buffer, Vec<u64>)> {
        let (mut entries, mut starts): (Vec<u64>, Vec<usize>) = (Vec::new(), Vec::new());
        for (w, pieces) in weights.iter().zip(pieces) {
            starts.push(entries.len());
            entries.extend(pieces.iter().map(address));
            entries.resize(starts[starts.len() - 1] + w.weight.n_expert as usize, 0);
        }
        let bytes = (entries.len() * 8).max(8) as u64;
        let buffer = Buffer::new(self.device, "weights.table", bytes, MemoryKind::Device)?;
        let bytes: &[u8] = bytemuck::cast_slice(&entries);
        for (i, part) in bytes.chunks(self.slot_bytes as usize).enumerate() {
            self.stage(&buffer, i as u64 * self.slot_bytes, part)?;
        }
        let table_of = |(w, start): (&WeightInfo, usize)| match w.role {
            Role::Experts => buffer.address() + start as u64 * 8,
            Role::Dense | Role::Vector => 0,
        };
        let tables = weights.iter().zip(starts).map(table_of).collect();
        Ok((buffer, tables))
    }

    fn finish(&mut self) -> Result<()> {
        for point in self.ring.iter_mut().filter_map(|(_, busy)| busy.take()) {
            self.device.wait(point, "the last weights")?;
        }
        self.gguf.check()
    }
}

fn address((buffer, offset): &(Buffer, u64)) -> u64 {
    buffer.address() + offset
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
