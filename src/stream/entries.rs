//! Entries of address tables on their way to the device: all in one submission, between passes.

use crate::error::Result;
use crate::vk::{Buffer, Device, Lane, MemoryKind, Point, Recorder, Region, Replay};
use std::sync::Arc;

/// Entries of tables.
#[derive(Default)]
pub(super) struct Entries {
    /// By buffer: offset and address.
    tables: Vec<(Buffer, Vec<(u64, u64)>)>,
}

impl Entries {
    /// Adds the entry at an offset. None is there twice.
    pub(super) fn add(&mut self, table: &Buffer, offset: u64, address: u64) {
        match self.tables.iter_mut().find(|(buffer, _)| buffer.address() == table.address()) {
            Some((_, entries)) => entries.push((offset, address)),
            None => self.tables.push((table.clone(), vec![(offset, address)])),
        }
    }

    /// Writes the tables on the compute lane: its later submissions see them. No pass runs now.
    pub(super) fn submit(mut self, device: &Arc<Device>, waits: &[Point]) -> Result<()> {
        let n: usize = self.tables.iter().map(|(_, entries)| entries.len()).sum();
        if n == 0 {
            return Ok(());
        }
        let staging = Buffer::new(device, "entries.load", n as u64 * 8, MemoryKind::Upload)?;
        let mut recorder = Recorder::new(device, Lane::Compute, "entries", Replay::Once)?;
        recorder.barrier();
        let mut addresses = Vec::with_capacity(n);
        for (table, entries) in &mut self.tables {
            entries.sort_unstable();
            let mut regions: Vec<Region> = Vec::new();
            for run in entries.chunk_by(|a, b| a.0 + 8 == b.0) {
                let (from, bytes) = (addresses.len() as u64 * 8, run.len() as u64 * 8);
                regions.extend(run.first().map(|&(to, _)| Region { from, to, bytes }));
                addresses.extend(run.iter().map(|&(_, address)| address));
            }
            recorder.copy_regions(&staging, table, &regions);
        }
        staging.write(0, bytemuck::cast_slice(&addresses))?;
        device.submit(Lane::Compute, &[&recorder.finish()?], waits).map(drop)
    }
}
