//! Buffers. VMA sub-allocates the device memory; the host reaches it only through bounded copies.
#![allow(unsafe_code, reason = "allocates buffers and copies to and from mapped memory")]

use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use ash::vk;
use vk_mem::{Alloc, AllocationCreateFlags as Flags, AllocationCreateInfo, MemoryUsage};

use super::debug;
use super::device::Device;
use super::lock;
use super::retire::Garbage;
use crate::{Error, Result};

/// Where a buffer lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryKind {
    /// The device's own memory: weights, slots, activations. The host cannot reach it.
    Device,
    /// Host memory that both sides read fast: results, experts that kernels read over the bus.
    HostRead,
    /// Host memory that the host writes in order and the device copies from.
    Upload,
}

/// From this size on a buffer has an allocation of its own: half of VMA's block, as VMA itself would.
const DEDICATED_BYTES: u64 = 128 << 20;

/// A buffer with memory and a device address. A clone is another handle of the same memory, which is
/// freed after the last handle is dropped and both lanes passed what was submitted before that.
#[derive(Clone)]
pub struct Buffer(Arc<Inner>);

struct Inner {
    device: Arc<Device>,
    name: String,
    buffer: vk::Buffer,
    allocation: vk_mem::Allocation,
    address: vk::DeviceAddress,
    bytes: u64,
    mapped: Option<Mutex<Mapped>>,
}

impl Buffer {
    /// Allocates `bytes` within the budget of the heap. `name`: `slot.2`, `kv.k`.
    pub fn new(device: &Arc<Device>, name: &str, bytes: u64, kind: MemoryKind) -> Result<Self> {
        assert!(bytes > 0, "buffer {name} has no bytes");
        let largest = device.info().limits.buffer_bytes;
        if bytes > largest {
            return Err(Error::OutOfMemory {
                what: format!("buffer {name} (the driver's limit of one buffer)"),
                needed_bytes: bytes,
                available_bytes: largest,
                hint: String::new(),
            });
        }
        let (buffer, allocation) = allocate(device, name, bytes, kind)?;
        debug::name(device.raw(), buffer, name);
        let info = vk::BufferDeviceAddressInfo::default().buffer(buffer);
        // SAFETY: the buffer was just created with memory bound and SHADER_DEVICE_ADDRESS.
        let address = unsafe { device.raw().vk().get_buffer_device_address(&info) };
        let pointer = device.allocator().get_allocation_info(&allocation).mapped_data;
        let mapped = NonNull::new(pointer.cast()).map(|start| Mutex::new(Mapped(start)));
        let device = device.clone();
        let name = name.to_owned();
        Ok(Self(Arc::new(Inner { device, name, buffer, allocation, address, bytes, mapped })))
    }

    /// The address that kernels reach it by.
    pub fn address(&self) -> u64 {
        self.0.address
    }

    /// Its size.
    pub fn bytes(&self) -> u64 {
        self.0.bytes
    }

    /// Its name, as in errors.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Whether the host can reach it.
    pub fn is_mapped(&self) -> bool {
        self.0.mapped.is_some()
    }

    /// Copies `data` into the buffer. The device sees it in submissions made afterwards; none made
    /// before may still use that range.
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<()> {
        let target = self.mapped_range(offset, data.len() as u64);
        {
            let mapped = lock(target);
            // SAFETY: `mapped_range` keeps offset and length inside the mapping.
            let to = unsafe { mapped.0.add(offset as usize) };
            // SAFETY: both sides have `data.len()` bytes; the lock excludes other host accesses; the
            // caller's timeline point excludes the device's.
            unsafe { to.copy_from_nonoverlapping(NonNull::from_ref(data).cast(), data.len()) };
        }
        let allocator = self.0.device.allocator();
        allocator
            .flush_allocation(&self.0.allocation, offset, data.len() as u64)
            .map_err(|result| self.0.device.raw().error(format!("flush {}", self.0.name), result))
    }

    /// Copies from the buffer into `data`. The submission that wrote the range ended with
    /// [`Recorder::host_barrier`](super::Recorder::host_barrier), and its point is reached.
    pub fn read(&self, offset: u64, data: &mut [u8]) -> Result<()> {
        let source = self.mapped_range(offset, data.len() as u64);
        let allocator = self.0.device.allocator();
        allocator.invalidate_allocation(&self.0.allocation, offset, data.len() as u64).map_err(
            |result| self.0.device.raw().error(format!("invalidate {}", self.0.name), result),
        )?;
        let mapped = lock(source);
        // SAFETY: `mapped_range` keeps offset and length inside the mapping.
        let from = unsafe { mapped.0.add(offset as usize) };
        // SAFETY: both sides have `data.len()` bytes; the lock excludes other host accesses; the
        // caller's timeline point excludes the device's.
        unsafe { from.copy_to_nonoverlapping(NonNull::from_mut(data).cast(), data.len()) };
        Ok(())
    }

    pub(super) fn vk(&self) -> vk::Buffer {
        self.0.buffer
    }

    /// Panics, for it is our bug, unless the range lies within the buffer.
    pub(super) fn check_range(&self, offset: u64, bytes: u64) {
        let end = offset.checked_add(bytes);
        assert!(
            end.is_some_and(|end| end <= self.0.bytes),
            "{bytes} bytes at {offset} are outside buffer {} of {}",
            self.0.name,
            self.0.bytes
        );
    }

    fn mapped_range(&self, offset: u64, bytes: u64) -> &Mutex<Mapped> {
        self.check_range(offset, bytes);
        let Some(mapped) = &self.0.mapped else {
            panic!("the host cannot reach buffer {}", self.0.name)
        };
        mapped
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let (buffer, allocation) = (self.buffer, self.allocation);
        self.device.retire(Garbage::Buffer { buffer, allocation });
    }
}

/// Start of a mapping, valid as long as the allocation.
struct Mapped(NonNull<u8>);

// SAFETY: it points to the memory of an allocation, which belongs to no thread.
unsafe impl Send for Mapped {}

fn allocate(
    device: &Arc<Device>,
    name: &str,
    bytes: u64,
    kind: MemoryKind,
) -> Result<(vk::Buffer, vk_mem::Allocation)> {
    let plan = device.lane_plan();
    let families = [plan.compute.family, plan.copy.family];
    let mut info = vk::BufferCreateInfo::default().size(bytes).usage(
        vk::BufferUsageFlags::STORAGE_BUFFER
            | vk::BufferUsageFlags::TRANSFER_SRC
            | vk::BufferUsageFlags::TRANSFER_DST
            | vk::BufferUsageFlags::SHADER_DEVICE_ADDRESS,
    );
    // CONCURRENT costs nothing for buffers and spares ownership transfers.
    if families[0] != families[1] {
        info = info.sharing_mode(vk::SharingMode::CONCURRENT).queue_family_indices(&families);
    }
    let mut create = allocation_info(kind);
    // VMA compares with the budget only where an allocation is asked to stand alone, or where a
    // new block is made.
    if bytes >= DEDICATED_BYTES {
        create.flags |= Flags::DEDICATED_MEMORY;
    }
    // SAFETY: the device outlives the buffer, whose owner holds an `Arc` of it.
    let first = unsafe { device.allocator().create_buffer(&info, &create) };
    let result = match first {
        Err(result) if is_out_of_memory(result) => {
            // What was dropped but still in use may be all that is in the way.
            device.wait_all("work that holds freed memory")?;
            device.collect();
            // SAFETY: as above.
            unsafe { device.allocator().create_buffer(&info, &create) }
        }
        other => other,
    };
    result.map_err(|result| match is_out_of_memory(result) {
        true => out_of_memory(device, name, bytes, kind),
        false => device.raw().error(format!("create the buffer {name}"), result),
    })
}

/// Within the budget always: more is granted by some drivers (RADV's GTT) and then loses the device
/// at a later submission.
fn allocation_info(kind: MemoryKind) -> AllocationCreateInfo {
    use vk::MemoryPropertyFlags as Memory;
    let base = AllocationCreateInfo { priority: 1.0, ..Default::default() };
    match kind {
        MemoryKind::Device => AllocationCreateInfo {
            flags: Flags::WITHIN_BUDGET,
            usage: MemoryUsage::AutoPreferDevice,
            required_flags: Memory::DEVICE_LOCAL,
            ..base
        },
        // Intel's integrated GPUs have no memory that is cached and coherent: cached goes first.
        MemoryKind::HostRead => AllocationCreateInfo {
            flags: Flags::WITHIN_BUDGET | Flags::MAPPED | Flags::HOST_ACCESS_RANDOM,
            usage: MemoryUsage::AutoPreferHost,
            required_flags: Memory::HOST_VISIBLE,
            preferred_flags: Memory::HOST_CACHED | Memory::HOST_COHERENT,
            ..base
        },
        MemoryKind::Upload => AllocationCreateInfo {
            flags: Flags::WITHIN_BUDGET | Flags::MAPPED | Flags::HOST_ACCESS_SEQUENTIAL_WRITE,
            usage: MemoryUsage::AutoPreferHost,
            required_flags: Memory::HOST_VISIBLE,
            preferred_flags: Memory::HOST_COHERENT,
            ..base
        },
    }
}

fn is_out_of_memory(result: vk::Result) -> bool {
    matches!(
        result,
        vk::Result::ERROR_OUT_OF_DEVICE_MEMORY
            | vk::Result::ERROR_OUT_OF_HOST_MEMORY
            | vk::Result::ERROR_TOO_MANY_OBJECTS
    )
}

/// Names what is left in the heaps of that kind; where all memory is the device's, in those.
fn out_of_memory(device: &Device, name: &str, bytes: u64, kind: MemoryKind) -> Error {
    let heaps = device.memory_budget();
    let local = kind == MemoryKind::Device || heaps.iter().all(|heap| heap.device_local);
    let left = heaps
        .iter()
        .filter(|heap| heap.device_local == local)
        .map(|heap| heap.budget_bytes.saturating_sub(heap.usage_bytes));
    let place = if local { "device memory" } else { "host memory for the device" };
    Error::OutOfMemory {
        what: format!("buffer {name} ({place})"),
        needed_bytes: bytes,
        available_bytes: left.max().unwrap_or(0),
        hint: String::new(),
    }
}
