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
use crate::stream::ring::{self, Ring};
use crate::vk::{Buffer, Device, Lane, MemoryKind, Recorder, Replay};
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

/// Refuses a tensor one matrix of which, with `slack` bytes around it, is larger than a buffer may be.
pub fn check_matrix(
    gguf: &Gguf,
    name: &str,
    matrix_bytes: u64,
    slack: u64,
    limit: u64,
) -> Result<()> {
    if matrix_bytes + slack <= limit {
        return Ok(());
    }
    let problem = format!("one matrix has {matrix_bytes} bytes, a buffer of this device {limit}");
    Err(gguf.error(format!("tensor `{name}`"), problem))
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

    /// Buffer and offset of a weight that is one matrix or vector, if it was loaded.
    pub fn place(&self, weight: WeightId) -> Option<(&Buffer, u64)> {
        let address = self.address(weight);
        let holds = |b: &&Buffer| (b.address()..b.address() + b.bytes()).contains(&address);
        self.buffers.iter().find(holds).map(|buffer| (buffer, address - buffer.address()))
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
    ring: Ring,
    buffers: Vec<Buffer>,
}

/// The ring that loads takes an eighth of this: enough to be filled and copied at a time.
const RING_SHARE_OF: u64 = 1 << 30;

impl<'a> Loader<'a> {
    fn new(device: &'a Arc<Device>, gguf: &'a Gguf, bar: &'a ProgressBar) -> Result<Self> {
        let limit = device.info().limits.allocated_buffer_bytes();
        let ring = Ring::new(device, ring::layout(gguf.total_bytes(), RING_SHARE_OF, limit))?;
        Ok(Loader { device, gguf, bar, ring, buffers: Vec::new() })
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
        for w in chosen.iter().map(|&w| &weights[w]) {
            check_matrix(self.gguf, &w.name, w.matrix_bytes, TAIL_BYTES, limit)?;
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
        let tensor = &gguf.tensors()[w.tensor];
        let mut from = 0;
        for run in at.chunk_by(|a, b| a.1 + w.matrix_bytes == b.1) {
            let Some((buffer, offset)) = run.first() else { continue };
            let bytes = run.len() as u64 * w.matrix_bytes;
            if buffer.is_mapped() {
                buffer.write_with(*offset, bytes, |memory| {
                    gguf.read_parallel(tensor, from, memory)
                })?;
                self.bar.inc(bytes);
            } else {
                self.stage(buffer, *offset, bytes, |at, memory| {
                    gguf.read_parallel(tensor, from + at, memory)
                })?;
            }
            from += bytes;
        }
        gguf.check()
    }

    /// Copies through the ring: `fill` gives the bytes from a position on.
    fn stage(
        &mut self,
        to: &Buffer,
        offset: u64,
        bytes: u64,
        fill: impl Fn(u64, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let piece_bytes = self.ring.piece_bytes();
        for at in (0..bytes).step_by(piece_bytes as usize) {
            let n = piece_bytes.min(bytes - at);
            let (index, piece) = self.ring.fill(self.device, n, |memory| fill(at, memory))?;
            let mut recorder = Recorder::new(self.device, Lane::Copy, "load", Replay::Once)?;
            recorder.copy(&piece, 0, to, offset + at, n);
            let commands = recorder.finish()?;
            self.ring.copied(index, self.device.submit(Lane::Copy, &[&commands], &[])?);
            self.bar.inc(n);
        }
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
        self.stage(&buffer, 0, bytes.len() as u64, |at, memory| {
            memory.copy_from_slice(&bytes[at as usize..at as usize + memory.len()]);
            Ok(())
        })?;
        let table_of = |(w, start): (&WeightInfo, usize)| match w.role {
            Role::Experts => buffer.address() + start as u64 * 8,
            Role::Dense | Role::Vector => 0,
        };
        let tables = weights.iter().zip(starts).map(table_of).collect();
        Ok((buffer, tables))
    }

    fn finish(&mut self) -> Result<()> {
        self.ring.finish(self.device)?;
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
