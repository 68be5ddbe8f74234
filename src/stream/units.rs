//! The units of the expert cache on the device.

use super::expert_cache::{ClassShape, UnitId, divide, total_bytes};
use super::packing::CHUNK_BYTES;
use crate::error::{Error, Result};
use crate::plan::Bytes;
use crate::vk::{Buffer, Device, MemoryKind};
use std::sync::Arc;

/// Allocated units.
pub(super) struct Units {
    buffers: Vec<Buffer>,
    /// By class and unit: buffer and offset.
    places: Vec<Vec<(usize, u64)>>,
}

impl Units {
    /// Allocates units of these classes, or fewer of all where memory is short; and how many it is. Says so once.
    pub(super) fn new(
        device: &Arc<Device>,
        wanted: &[ClassShape],
    ) -> Result<(Units, Vec<ClassShape>)> {
        let limit = device.info().limits.allocated_buffer_bytes().min(CHUNK_BYTES);
        let in_buffers = |class: &ClassShape| ClassShape {
            n: if class.unit_bytes <= limit { class.n } else { 0 },
            ..*class
        };
        let wanted_bytes = total_bytes(wanted);
        let mut given: Vec<ClassShape> = wanted.iter().map(in_buffers).collect();
        let units = loop {
            match allocate(device, &given, limit) {
                Ok(units) => break units,
                Err(Error::OutOfMemory { .. }) => given = divide(&given, total_bytes(&given) / 2),
                Err(e) => return Err(e),
            }
        };
        match (total_bytes(&given), Bytes(wanted_bytes)) {
            (bytes, _) if bytes == wanted_bytes => {}
            (0, wanted) => log::warn!("no memory for an expert cache of {wanted}: there is none"),
            (bytes, wanted) => {
                let bytes = Bytes(bytes);
                log::warn!("no memory for an expert cache of {wanted}: it has {bytes}");
            }
        }
        Ok((units, given))
    }

    /// Buffer and offset of a unit.
    pub(super) fn place(&self, unit: UnitId) -> (&Buffer, u64) {
        let (buffer, offset) = self.places[unit.class as usize][unit.index as usize];
        (&self.buffers[buffer], offset)
    }

    /// All buffers.
    pub(super) fn buffers(&self) -> &[Buffer] {
        &self.buffers
    }
}

fn allocate(device: &Arc<Device>, classes: &[ClassShape], limit: u64) -> Result<Units> {
    let mut units = Units { buffers: Vec::new(), places: Vec::new() };
    for class in classes {
        let mut places = Vec::new();
        while places.len() < class.n as usize {
            let left = u64::from(class.n) - places.len() as u64;
            let n = left.min(limit / class.unit_bytes.max(1)).max(1);
            let name = format!("cache.{}", units.buffers.len());
            let bytes = n * class.unit_bytes;
            places.extend((0..n).map(|i| (units.buffers.len(), i * class.unit_bytes)));
            units.buffers.push(Buffer::new(device, &name, bytes, MemoryKind::Device)?);
        }
        units.places.push(places);
    }
    Ok(units)
}
