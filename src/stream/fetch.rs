//! Experts that a kernel copies into staging slots once the router has chosen them
//! (shaders/fetch_experts.comp): what it takes beside the tables of weights and slots.

use super::host_tensor::HostTensor;
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
    /// By tensor: addresses in host memory, where pinned.
    hosts: Buffer,
    /// By tensor: its first entry in `hosts`.
    starts: Vec<u64>,
    /// By slot: where the experts of the tensor in it are found.
    found: Buffer,
    /// Entries of a slot in `found`.
    most: u64,
}

impl FetchTables {
    /// For so many slots.
    pub fn new(device: &Arc<Device>, tensors: &[HostTensor], n_slots: u32) -> Result<Self> {
        let mut n = 0;
        let starts = tensors.iter().map(|t| {
            let start = n;
            n += u64::from(t.file.n_expert);
            start
        });
        let starts: Vec<u64> = starts.collect();
        let most = tensors.iter().map(|t| u64::from(t.file.n_expert)).max().unwrap_or(1);
        let table =
            |name, entries: u64| Buffer::new(device, name, entries.max(1) * 8, MemoryKind::Device);
        let hosts = table("fetch.hosts", n)?;
        let found = table("fetch.found", most * u64::from(n_slots))?;
        Ok(FetchTables { hosts, starts, found, most })
    }

    /// Takes the addresses of a tensor in host memory.
    pub fn set_hosts(&self, tensor: usize, addresses: &[u64]) -> Result<()> {
        self.hosts.upload(self.starts[tensor] * 8, bytemuck::cast_slice(addresses))?;
        Ok(())
    }

    /// Address of those.
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
