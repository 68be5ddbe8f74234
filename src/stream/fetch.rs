//! Experts that a kernel copies into staging slots once the router has chosen them
//! (shaders/fetch_experts.comp): what it takes beside the tables of weights and slots.

use crate::error::Result;
use crate::vk::{Buffer, Device, MemoryKind};
use std::sync::Arc;

/// Pairs of token and slot of a pass, at most: the kernel looks at each before it, and passes of more move
/// most experts anyway.
pub const MAX_PAIRS: u32 = 256;

/// What the kernel takes of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fetch {
    /// Address of the experts' addresses in host memory.
    pub hosts: u64,
    /// Address of their addresses in the slot.
    pub slot: u64,
    /// Address of where kernels find them after it.
    pub found: u64,
    /// Bytes of a matrix.
    pub bytes: u32,
}

/// Its tables on the device.
pub struct FetchTables {
    /// By tensor: its experts' addresses in host memory.
    hosts: Buffer,
    /// By tensor: its first entry in `hosts`.
    starts: Vec<u64>,
    /// By slot: where the experts of the tensor in it are found.
    found: Buffer,
    /// Entries of a slot in `found`.
    most: u64,
    /// Tensors whose addresses are known.
    n_pinned: usize,
}

impl FetchTables {
    /// For so many slots. `hosts`: by tensor, addresses of its experts; 0 for those of tensors that are not pinned.
    pub fn new(
        device: &Arc<Device>,
        hosts: &[Vec<u64>],
        n_slots: u32,
        n_pinned: usize,
    ) -> Result<Self> {
        let start = |n: &mut u64, tensor: &Vec<u64>| {
            let start = *n;
            *n += tensor.len() as u64;
            Some(start)
        };
        let starts = hosts.iter().scan(0, start).collect();
        let most = hosts.iter().map(Vec::len).max().unwrap_or(1) as u64;
        let table =
            |name, entries: u64| Buffer::new(device, name, entries.max(1) * 8, MemoryKind::Device);
        let entries = hosts.concat();
        let hosts = table("fetch.hosts", entries.len() as u64)?;
        hosts.upload(0, bytemuck::cast_slice(&entries))?;
        let found = table("fetch.found", most * u64::from(n_slots))?;
        Ok(FetchTables { hosts, starts, found, most, n_pinned })
    }

    /// Tensors whose addresses are known.
    pub fn n_pinned(&self) -> usize {
        self.n_pinned
    }

    /// Address of a tensor's addresses in host memory.
    pub fn hosts(&self, tensor: usize) -> u64 {
        self.hosts.address() + self.starts[tensor] * 8
    }

    /// Address of the table of what is in a slot.
    pub fn found(&self, slot: u32) -> u64 {
        self.found.address() + u64::from(slot) * self.most * 8
    }

    /// Both buffers.
    pub fn buffers(&self) -> [&Buffer; 2] {
        [&self.hosts, &self.found]
    }
}
