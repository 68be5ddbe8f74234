//! Buffers. VMA sub-allocates the device memory; the host reaches it only within bounds. Buffers of
//! imported host pages are made in `import`.
#![allow(unsafe_code, reason = "allocates buffers and reaches mapped memory")]

use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use ash::vk;
use vk_mem::{Alloc, AllocationCreateFlags as Flags, AllocationCreateInfo, MemoryUsage};

use super::command::{Recorder, Replay};
use super::debug;
use super::device::Device;
use super::import::Imported;
use super::lanes::Lane;
use super::lock;
use super::retire::Garbage;
use super::timeline::Point;
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
    backing: Backing,
    address: vk::DeviceAddress,
    bytes: u64,
    mapped: Option<Mutex<Mapped>>,
}

/// The memory behind a buffer.
pub(super) enum Backing {
    /// VMA's.
    Allocated(vk_mem::Allocation),
    /// Host pages.
    Imported(Imported),
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
        Ok(Self::assemble(device, name, bytes, buffer, Backing::Allocated(allocation)))
    }

    /// Takes ownership of a buffer with memory bound and the usage of [`buffer_info`].
    pub(super) fn assemble(
        device: &Arc<Device>,
        name: &str,
        bytes: u64,
        buffer: vk::Buffer,
        backing: Backing,
    ) -> Self {
        debug::name(device.raw(), buffer, name);
        let info = vk::BufferDeviceAddressInfo::default().buffer(buffer);
        // SAFETY: the caller created the buffer with memory bound and SHADER_DEVICE_ADDRESS.
        let address = unsafe { device.raw().vk().get_buffer_device_address(&info) };
        let pointer = match &backing {
            Backing::Allocated(allocation) => {
                device.allocator().get_allocation_info(allocation).mapped_data
            }
            Backing::Imported(_) => std::ptr::null_mut(),
        };
        let mapped = NonNull::new(pointer.cast()).map(|start| Mutex::new(Mapped(start)));
        let device = device.clone();
        let name = name.to_owned();
        Self(Arc::new(Inner { device, name, buffer, backing, address, bytes, mapped }))
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

    /// Whether the host can reach it through this handle; imported pages have their owner for that.
    pub fn is_mapped(&self) -> bool {
        self.0.mapped.is_some()
    }

    /// Whether its memory is imported host pages, which the device only reads.
    pub fn is_imported(&self) -> bool {
        matches!(self.0.backing, Backing::Imported(_))
    }

    /// Copies `data` into the buffer. The device sees it in submissions made afterwards; none made
    /// before may still use that range.
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<()> {
        self.write_with(offset, data.len() as u64, |to| {
            to.copy_from_slice(data);
            Ok(())
        })
    }

    /// Lets `fill` write a range in place: it may cut it into pieces for several threads. What the
    /// range holds before is anything, and reading it may be slow. Visibility is as with
    /// [`Self::write`]; other host accesses to the buffer wait meanwhile.
    pub fn write_with(
        &self,
        offset: u64,
        bytes: u64,
        fill: impl FnOnce(&mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let target = self.mapped_range(offset, bytes);
        {
            let mapped = lock(target);
            // SAFETY: `mapped_range` keeps offset and length inside the mapping.
            let start = unsafe { mapped.0.add(offset as usize) };
            // SAFETY: the range lies in the mapping, which lives as long as the buffer; the lock
            // excludes other host accesses, the caller's timeline point the device's.
            let range = unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), bytes as usize) };
            fill(range)?;
        }
        let Some(allocation) = self.allocation() else { return Ok(()) };
        let allocator = self.0.device.allocator();
        allocator
            .flush_allocation(allocation, offset, bytes)
            .map_err(|result| self.0.device.raw().error(format!("flush {}", self.0.name), result))
    }

    /// Copies `data` into a buffer that the host cannot reach, through a staging buffer, on the compute
    /// lane, whose later submissions begin with a barrier. No submission may use the range now.
    pub fn upload(&self, offset: u64, data: &[u8]) -> Result<Point> {
        let (device, bytes) = (&self.0.device, data.len() as u64);
        let name = format!("{}.load", self.0.name);
        let staging = Self::new(device, &name, bytes, MemoryKind::Upload)?;
        staging.write(0, data)?;
        let mut recorder = Recorder::new(device, Lane::Compute, &name, Replay::Once)?;
        recorder.copy(&staging, 0, self, offset, bytes);
        device.submit(Lane::Compute, &[&recorder.finish()?], &[])
    }

    /// Copies from the buffer into `data`. The submission that wrote the range ended with
    /// [`Recorder::host_barrier`](super::Recorder::host_barrier), and its point is reached.
    pub fn read(&self, offset: u64, data: &mut [u8]) -> Result<()> {
        let source = self.mapped_range(offset, data.len() as u64);
        if let Some(allocation) = self.allocation() {
            let allocator = self.0.device.allocator();
            allocator.invalidate_allocation(allocation, offset, data.len() as u64).map_err(
                |result| self.0.device.raw().error(format!("invalidate {}", self.0.name), result),
            )?;
        }
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

    /// As [`Self::check_range`], for a range that the device writes.
    pub(super) fn check_target(&self, offset: u64, bytes: u64) {
        assert!(!self.is_imported(), "the device does not write imported pages: {}", self.0.name);
        self.check_range(offset, bytes);
    }

    fn allocation(&self) -> Option<&vk_mem::Allocation> {
        match &self.0.backing {
            Backing::Allocated(allocation) => Some(allocation),
            Backing::Imported(_) => None,
        }
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
        let buffer = self.buffer;
        self.device.retire(match &self.backing {
            Backing::Allocated(allocation) => Garbage::Buffer { buffer, allocation: *allocation },
            Backing::Imported(imported) => Garbage::Import { buffer, imported: imported.clone() },
        });
        if let Some(injected) = self.device.raw().injected() {
            injected.free(&self.name);
        }
    }
}

/// Start of a mapping, valid as long as the allocation.
struct Mapped(NonNull<u8>);

// SAFETY: it points to the memory of an allocation, which belongs to no thread.
unsafe impl Send for Mapped {}

/// What every buffer is used for.
pub(super) const READ: vk::BufferUsageFlags = vk::BufferUsageFlags::from_raw(
    vk::BufferUsageFlags::STORAGE_BUFFER.as_raw()
        | vk::BufferUsageFlags::TRANSFER_SRC.as_raw()
        | vk::BufferUsageFlags::SHADER_DEVICE_ADDRESS.as_raw(),
);

/// The queue families of the lanes.
pub(super) fn families(device: &Device) -> [u32; 2] {
    let plan = device.lane_plan();
    [plan.compute.family, plan.copy.family]
}

/// A buffer of both lanes. CONCURRENT costs nothing for buffers and spares ownership transfers.
pub(super) fn buffer_info(bytes: u64, families: &[u32; 2]) -> vk::BufferCreateInfo<'_> {
    let info = vk::BufferCreateInfo::default().size(bytes).usage(READ);
    match families[0] == families[1] {
        true => info,
        false => info.sharing_mode(vk::SharingMode::CONCURRENT).queue_family_indices(families),
    }
}

fn allocate(
    device: &Arc<Device>,
    name: &str,
    bytes: u64,
    kind: MemoryKind,
) -> Result<(vk::Buffer, vk_mem::Allocation)> {
    let families = families(device);
    let info = buffer_info(bytes, &families).usage(READ | vk::BufferUsageFlags::TRANSFER_DST);
    let mut create = allocation_info(kind);
    // VMA compares with the budget only where an allocation is asked to stand alone, or where a
    // new block is made.
    if bytes >= DEDICATED_BYTES {
        create.flags |= Flags::DEDICATED_MEMORY;
    }
    let once = || {
        let local = (kind == MemoryKind::Device).then_some(bytes);
        if let Some(injected) = device.raw().injected() {
            injected.allocate(name, local, || device.true_budget())?;
        }
        // SAFETY: the device outlives the buffer, whose owner holds an `Arc` of it.
        unsafe { device.allocator().create_buffer(&info, &create) }.inspect_err(|_| {
            if let Some(injected) = device.raw().injected() {
                injected.free(name);
            }
        })
    };
    let result = match once() {
        Err(result) if is_out_of_memory(result) => {
            // What was dropped but still in use may be all that is in the way.
            device.wait_all("work that holds freed memory")?;
            device.collect();
            once()
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
