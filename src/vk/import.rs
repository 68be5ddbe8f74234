//! Host pages as buffers, through `VK_EXT_external_memory_host`: the copy engine, or a kernel, reads
//! them where they are.
//!
//! Drivers differ in what they accept (file pages, read-only pages, how much) and in how they say no:
//! any error means refused. Some accept and fail at the first use. So a caller tries a source with
//! copies on a device of its own first (`stream::probe`), and imports once, at start: pinning costs up
//! to 0.4 s/GiB (NVIDIA).
//!
//! The device only reads the pages: their owner hands out shared references to them. Memory that is not
//! coherent is refused rather than flushed: a flush needs a mapping by Vulkan, and the pages already
//! have one. No driver is known to have no coherent type for host pages.
#![allow(unsafe_code, reason = "imports memory, and defines what may be imported")]

use std::ops::Range;
use std::sync::Arc;

use ash::vk;

use super::debug;
use super::device::Device;
use super::memory::{Backing, Buffer, buffer_info, families};
use crate::{Error, Result};

const HANDLE: vk::ExternalMemoryHandleTypeFlags =
    vk::ExternalMemoryHandleTypeFlags::HOST_ALLOCATION_EXT;

/// The largest alignment that the specification allows a driver to ask for, and that owners of pages
/// (`Arena`, `PrivateMapping`) keep to.
const MAX_ALIGNMENT: u64 = 64 << 10;

/// Memory of this process that a device may read.
///
/// # Safety
/// From the first call of `bytes` until the value is dropped, address and length stay the same, and the
/// pages stay mapped, readable and writable. The value may move.
pub unsafe trait HostPages: Send + Sync {
    /// The memory.
    fn bytes(&self) -> &[u8];
}

/// The memory of a buffer of host pages.
#[derive(Clone)]
pub(super) struct Imported {
    pub(super) memory: vk::DeviceMemory,
    /// Outlives `memory`: see `retire`.
    pub(super) pages: Arc<dyn HostPages>,
}

impl Buffer {
    /// Imports a range of `pages`. Address and length of the range are multiples of
    /// `Limits::import_alignment`, and no longer than `Limits::import_bytes`; no page may be imported
    /// twice. What the host writes to the pages
    /// before a submission is seen by it. The pages live as long as the buffer needs them.
    ///
    /// # Errors
    /// [`Error::ImportRefused`] if the driver, whatever its answer, does not take these pages.
    pub fn import(
        device: &Arc<Device>,
        name: &str,
        pages: &Arc<dyn HostPages>,
        range: Range<u64>,
    ) -> Result<Self> {
        check_limits(device)
            .and_then(|()| Self::import_within_limits(device, name, pages, range))
            .map_err(|Refusal { problem, result }| match result {
                vk::Result::ERROR_DEVICE_LOST => {
                    device.raw().error(format!("import the pages of buffer {name}"), result)
                }
                _ => {
                    let what = format!("the pages of buffer {name}{problem}");
                    Error::ImportRefused { what, result }
                }
            })
    }

    fn import_within_limits(
        device: &Arc<Device>,
        name: &str,
        pages: &Arc<dyn HostPages>,
        range: Range<u64>,
    ) -> Result<Self, Refusal> {
        let limits = &device.info().limits;
        let pages = match device.raw().injected() {
            Some(injected) => injected.pages(pages)?,
            None => pages.clone(),
        };
        let slice = aligned(pages.bytes(), &range, limits.import_alignment);
        let bytes = slice.len() as u64;
        if bytes > limits.import_bytes() {
            let problem = format!(" ({bytes} bytes; at most {} at a time)", limits.import_bytes());
            return Err(Refusal { problem, result: vk::Result::ERROR_OUT_OF_DEVICE_MEMORY });
        }
        let (buffer, memory) = Unbound::new(device, slice)?.keep();
        debug::name(device.raw(), memory, name);
        let backing = Backing::Imported(Imported { memory, pages });
        Ok(Self::assemble(device, name, bytes, buffer, backing))
    }
}

/// Whether the device imports at all.
fn check_limits(device: &Device) -> Result<(), Refusal> {
    let alignment = device.info().limits.import_alignment;
    if device.raw().import().is_none() || alignment == 0 {
        let problem = " (the driver lacks VK_EXT_external_memory_host)".into();
        return Err(Refusal { problem, result: vk::Result::ERROR_EXTENSION_NOT_PRESENT });
    }
    if alignment > MAX_ALIGNMENT || !alignment.is_power_of_two() {
        let problem = format!(" (the driver aligns them to {alignment} bytes)");
        return Err(Refusal { problem, result: vk::Result::ERROR_INVALID_EXTERNAL_HANDLE });
    }
    if device.info().limits.import_bytes() == 0 {
        let problem = " (the driver allocates less than one page at a time)".into();
        return Err(Refusal { problem, result: vk::Result::ERROR_OUT_OF_DEVICE_MEMORY });
    }
    Ok(())
}

/// The range of the pages. Panics, for it is our bug, if it is not aligned or not inside.
fn aligned<'a>(pages: &'a [u8], range: &Range<u64>, alignment: u64) -> &'a [u8] {
    let inside = range.start < range.end && range.end <= pages.len() as u64;
    assert!(inside, "import of {range:?} of {} bytes", pages.len());
    let slice = &pages[range.start as usize..range.end as usize];
    let is_aligned = |n: u64| n.is_multiple_of(alignment);
    assert!(
        is_aligned(slice.as_ptr() as u64) && is_aligned(slice.len() as u64),
        "import of {range:?} at {:?}, not aligned to {alignment}",
        slice.as_ptr()
    );
    slice
}

/// Why there is no buffer.
#[derive(Debug)]
struct Refusal {
    /// In parentheses after a blank, or empty.
    problem: String,
    result: vk::Result,
}

impl From<vk::Result> for Refusal {
    fn from(result: vk::Result) -> Self {
        Refusal { problem: String::new(), result }
    }
}

/// A buffer and its memory, destroyed unless they are kept. Either may still be null.
struct Unbound<'a> {
    device: &'a Device,
    buffer: vk::Buffer,
    memory: vk::DeviceMemory,
}

impl<'a> Unbound<'a> {
    /// A buffer over `slice`, which stays mapped.
    fn new(device: &'a Device, slice: &[u8]) -> Result<Self, Refusal> {
        if let Some(injected) = device.raw().injected() {
            injected.import(slice)?;
        }
        let mut parts =
            Self { device, buffer: vk::Buffer::null(), memory: vk::DeviceMemory::null() };
        parts.create(slice.len() as u64)?;
        let kind = parts.memory_type(slice)?;
        parts.allocate(slice, kind)?;
        // SAFETY: both were just created; the type is one of the buffer's; nothing is bound yet.
        unsafe { device.raw().vk().bind_buffer_memory(parts.buffer, parts.memory, 0) }?;
        Ok(parts)
    }

    fn create(&mut self, bytes: u64) -> Result<(), Refusal> {
        let families = families(self.device);
        let mut external = vk::ExternalMemoryBufferCreateInfo::default().handle_types(HANDLE);
        let info = buffer_info(bytes, &families).push_next(&mut external);
        // SAFETY: the device outlives the buffer, whose owner holds an `Arc` of it.
        self.buffer = unsafe { self.device.raw().vk().create_buffer(&info, None) }?;
        Ok(())
    }

    /// The memory type to import `slice` as.
    fn memory_type(&self, slice: &[u8]) -> Result<u32, Refusal> {
        let raw = self.device.raw();
        let not_present = vk::Result::ERROR_EXTENSION_NOT_PRESENT;
        let import = raw.import().ok_or(Refusal::from(not_present))?;
        // SAFETY: the buffer is owned here.
        let needs = unsafe { raw.vk().get_buffer_memory_requirements(self.buffer) };
        if needs.size > slice.len() as u64 {
            let result = vk::Result::ERROR_INVALID_EXTERNAL_HANDLE;
            let problem = " (the driver wants a longer range)".into();
            return Err(Refusal { problem, result });
        }
        let mut of_pointer = vk::MemoryHostPointerPropertiesEXT::default();
        let ask = import.fp().get_memory_host_pointer_properties_ext;
        // SAFETY: the pointer is that of a slice of mapped pages, aligned as the device asks.
        unsafe { ask(import.device(), HANDLE, slice.as_ptr().cast(), &mut of_pointer) }.result()?;
        let types = self.device.memory_types();
        choose_type(&types, of_pointer.memory_type_bits, needs.memory_type_bits).ok_or_else(|| {
            let problem = " (no memory type for them is coherent)".into();
            Refusal { problem, result: vk::Result::ERROR_INVALID_EXTERNAL_HANDLE }
        })
    }

    fn allocate(&mut self, slice: &[u8], kind: u32) -> Result<(), Refusal> {
        let mut flags =
            vk::MemoryAllocateFlagsInfo::default().flags(vk::MemoryAllocateFlags::DEVICE_ADDRESS);
        let mut import = vk::ImportMemoryHostPointerInfoEXT::default()
            .handle_type(HANDLE)
            .host_pointer(slice.as_ptr().cast_mut().cast());
        let info = vk::MemoryAllocateInfo::default()
            .allocation_size(slice.len() as u64)
            .memory_type_index(kind)
            .push_next(&mut flags)
            .push_next(&mut import);
        // SAFETY: by the contract of `HostPages` the range stays mapped, readable and writable until
        // the last `Arc` of the pages is dropped, which `Retired` does after freeing this memory.
        self.memory = unsafe { self.device.raw().vk().allocate_memory(&info, None) }?;
        Ok(())
    }

    /// Gives the handles to a new owner.
    fn keep(mut self) -> (vk::Buffer, vk::DeviceMemory) {
        (std::mem::take(&mut self.buffer), std::mem::take(&mut self.memory))
    }
}

impl Drop for Unbound<'_> {
    fn drop(&mut self) {
        let device = self.device.raw().vk();
        // SAFETY: owned here alone, and never used by the device; null is allowed.
        unsafe { device.destroy_buffer(self.buffer, None) };
        // SAFETY: as the buffer, which is gone.
        unsafe { device.free_memory(self.memory, None) };
    }
}

/// A type that the host can reach without flushing, cached if there is one. Drivers of AMD on Windows
/// report no types for buffers of imported memory: then the pointer's count alone. Drivers of Intel on
/// Windows report a type that the host cannot reach: then there is none.
fn choose_type(types: &[vk::MemoryType], of_pointer: u32, of_buffer: u32) -> Option<u32> {
    use vk::MemoryPropertyFlags as Flags;
    let allowed = if of_buffer == 0 { of_pointer } else { of_pointer & of_buffer };
    let fits = |cached: Flags| {
        let wanted = Flags::HOST_VISIBLE | Flags::HOST_COHERENT | cached;
        (0u32..).zip(types).find_map(|(index, kind)| {
            let is_allowed = allowed & (1 << index) != 0;
            (is_allowed && kind.property_flags.contains(wanted)).then_some(index)
        })
    };
    fits(Flags::HOST_CACHED).or_else(|| fits(Flags::empty()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn types(flags: &[vk::MemoryPropertyFlags]) -> Vec<vk::MemoryType> {
        flags
            .iter()
            .map(|&property_flags| vk::MemoryType { property_flags, heap_index: 0 })
            .collect()
    }

    #[test]
    fn a_coherent_type_is_chosen_and_a_cached_one_preferred() {
        use vk::MemoryPropertyFlags as Flags;
        let visible = Flags::HOST_VISIBLE;
        let coherent = visible | Flags::HOST_COHERENT;
        let types = types(&[
            Flags::DEVICE_LOCAL,
            visible | Flags::HOST_CACHED,
            coherent,
            coherent | Flags::HOST_CACHED,
        ]);
        assert_eq!(choose_type(&types, 0b1111, 0b1111), Some(3));
        assert_eq!(choose_type(&types, 0b1111, 0b0111), Some(2));
        assert_eq!(choose_type(&types, 0b0111, 0b1111), Some(2));
        assert_eq!(choose_type(&types, 0b1000, 0), Some(3), "AMD on Windows");
        assert_eq!(choose_type(&types, 0b0001, 0b0001), None, "Intel on Windows");
        assert_eq!(choose_type(&types, 0b0010, 0b0010), None, "cached without coherence");
        assert_eq!(choose_type(&types, 0, 0b1111), None);
    }

    #[test]
    #[should_panic(expected = "not aligned to 4096")]
    fn a_range_that_is_not_aligned_is_our_bug() {
        aligned(&[0; 3 * 4096], &(1..2), 4096);
    }
}
