//! The staging slots on the device: buffers that hold any of the streamed tensors, and for each pair
//! of tensor and slot the table of expert addresses that kernels take.

use super::host_tensor::HostTensor;
use super::packing::{Matrices, Piece, pack};
use super::rotation::Slot;
use crate::error::Result;
use crate::vk::{Buffer, Device, MemoryKind};
use std::sync::Arc;

/// Where each streamed tensor lies in a slot; the same in every slot.
pub struct SlotLayout {
    /// By tensor and expert.
    pieces: Vec<Vec<Piece>>,
    /// Bytes of a slot's buffers. More than one only where a tensor is larger than a buffer may be.
    chunks: Vec<u64>,
}

impl SlotLayout {
    /// For slots that hold any one of `tensors`, in buffers of at most `limit` bytes.
    pub fn new(tensors: &[HostTensor], limit: u64) -> Self {
        let mut chunks: Vec<u64> = Vec::new();
        let place = |t: &HostTensor| {
            let matrices =
                Matrices { n: t.file.n_expert, bytes: t.file.matrix_bytes, phase: t.file.offset };
            let (mut pieces, sizes) = pack(&[matrices], limit);
            chunks.resize(chunks.len().max(sizes.len()), 0);
            for (chunk, size) in chunks.iter_mut().zip(sizes) {
                *chunk = size.max(*chunk);
            }
            pieces.pop().unwrap_or_default()
        };
        let pieces = tensors.iter().map(place).collect();
        SlotLayout { pieces, chunks }
    }

    /// Bytes of a slot.
    pub fn bytes(&self) -> u64 {
        self.chunks.iter().sum()
    }

    /// Buffers of a slot.
    pub fn n_chunks(&self) -> usize {
        self.chunks.len()
    }

    /// Where a tensor's matrices are.
    pub fn pieces(&self, tensor: usize) -> &[Piece] {
        &self.pieces[tensor]
    }
}

/// Allocated slots.
pub struct Slots {
    layout: SlotLayout,
    /// By slot and chunk.
    buffers: Vec<Vec<Buffer>>,
    tables: Buffer,
    /// By tensor: first entry of its table for slot 0; tables for the other slots follow.
    starts: Vec<u64>,
    /// By tensor: entries of one table.
    lens: Vec<u64>,
}

impl Slots {
    /// Allocates `n` slots. `kind`: the device's memory, or the host's where that is refused.
    pub fn new(
        device: &Arc<Device>,
        layout: SlotLayout,
        n: u32,
        kind: MemoryKind,
    ) -> Result<Self, (crate::Error, SlotLayout)> {
        match allocate(device, &layout, n, kind) {
            Ok((buffers, tables, starts, lens)) => {
                Ok(Slots { layout, buffers, tables, starts, lens })
            }
            Err(e) => Err((e, layout)),
        }
    }

    /// Number of slots.
    pub fn n(&self) -> u32 {
        self.buffers.len() as u32
    }

    /// Where tensors lie in a slot.
    pub fn layout(&self) -> &SlotLayout {
        &self.layout
    }

    /// A buffer of a slot.
    pub fn buffer(&self, slot: Slot, chunk: usize) -> &Buffer {
        &self.buffers[slot.0 as usize][chunk]
    }

    /// All buffers that kernels reach by address.
    pub fn buffers(&self) -> impl Iterator<Item = &Buffer> {
        self.buffers.iter().flatten().chain([&self.tables])
    }

    /// Address of the table of a tensor that lies in a slot.
    pub fn table(&self, tensor: usize, slot: Slot) -> u64 {
        self.tables.address() + self.entry(tensor, slot)
    }

    /// The buffer of all tables, and where in it that of a tensor in a slot begins.
    pub fn table_place(&self, tensor: usize, slot: Slot) -> (&Buffer, u64) {
        (&self.tables, self.entry(tensor, slot))
    }

    /// Address of a tensor's expert in a slot.
    pub fn address(&self, tensor: usize, expert: usize, slot: Slot) -> u64 {
        let piece = self.layout.pieces[tensor][expert];
        self.buffer(slot, piece.chunk).address() + piece.offset
    }

    /// All slots.
    pub fn all(&self) -> impl Iterator<Item = Slot> + use<> {
        (0..self.n()).map(Slot)
    }

    /// Where in the tables that of a tensor in a slot begins, in bytes.
    fn entry(&self, tensor: usize, slot: Slot) -> u64 {
        (self.starts[tensor] + u64::from(slot.0) * self.lens[tensor]) * 8
    }
}

type Allocated = (Vec<Vec<Buffer>>, Buffer, Vec<u64>, Vec<u64>);

fn allocate(
    device: &Arc<Device>,
    layout: &SlotLayout,
    n: u32,
    kind: MemoryKind,
) -> Result<Allocated> {
    let slot = |slot: u32| -> Result<Vec<Buffer>> {
        let chunk = |(i, &bytes): (usize, &u64)| {
            // Two names, since only what the device lacks is refused where slots are made to fail.
            let place = if kind == MemoryKind::Device { "slot" } else { "host-slot" };
            let name = match i {
                0 => format!("{place}.{slot}"),
                i => format!("{place}.{slot}.{i}"),
            };
            Buffer::new(device, &name, bytes, kind)
        };
        layout.chunks.iter().enumerate().map(chunk).collect()
    };
    let buffers: Vec<Vec<Buffer>> = (0..n).map(slot).collect::<Result<_>>()?;
    let (mut entries, mut starts, mut lens) = (Vec::new(), Vec::new(), Vec::new());
    for pieces in &layout.pieces {
        starts.push(entries.len() as u64);
        lens.push(pieces.len() as u64);
        for buffers in &buffers {
            let address = |p: &Piece| buffers[p.chunk].address() + p.offset;
            entries.extend(pieces.iter().map(address));
        }
    }
    let tables_bytes = (entries.len() * 8).max(8) as u64;
    let tables = Buffer::new(device, "slots.table", tables_bytes, MemoryKind::Device)?;
    if !entries.is_empty() {
        let point = tables.upload(0, bytemuck::cast_slice(&entries))?;
        device.wait(point, "writing the slots' tables")?;
    }
    Ok((buffers, tables, starts, lens))
}
