//! The VkDevice with its function tables, and the one way in which a failed call becomes an error.
#![allow(unsafe_code, reason = "destroys the VkDevice and asks it for faults")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ash::prelude::VkResult;
use ash::{ext, khr, vk};

use super::faults::FaultState;
use super::info::DeviceInfo;
use super::instance::Instance;
use super::{COMING_AND_GOING, lock};
use crate::{Error, Result};

/// Owner of the VkDevice. Every object that must outlive no device holds an `Arc` of it.
pub(super) struct RawDevice {
    device: ash::Device,
    push_descriptor: khr::push_descriptor::Device,
    debug_utils: Option<ext::debug_utils::Device>,
    fault: Option<ext::device_fault::Device>,
    import: Option<ext::external_memory_host::Device>,
    injected: Option<Box<FaultState>>,
    name: String,
    lost: AtomicBool,
}

impl RawDevice {
    /// Takes ownership of `device`, which `info` describes.
    pub(super) fn new(instance: &Instance, device: ash::Device, info: &DeviceInfo) -> Self {
        let raw = instance.raw();
        let utils = instance.has_debug_utils();
        let optional = &info.optional;
        Self {
            push_descriptor: khr::push_descriptor::Device::new(raw, &device),
            debug_utils: utils.then(|| ext::debug_utils::Device::new(raw, &device)),
            fault: optional.device_fault.then(|| ext::device_fault::Device::new(raw, &device)),
            import: optional
                .external_memory_host
                .then(|| ext::external_memory_host::Device::new(raw, &device)),
            injected: FaultState::new(instance.faults()),
            device,
            name: info.name.clone(),
            lost: AtomicBool::new(false),
        }
    }

    pub(super) fn vk(&self) -> &ash::Device {
        &self.device
    }

    pub(super) fn push_descriptor(&self) -> &khr::push_descriptor::Device {
        &self.push_descriptor
    }

    pub(super) fn debug_utils(&self) -> Option<&ext::debug_utils::Device> {
        self.debug_utils.as_ref()
    }

    /// Functions of `VK_EXT_external_memory_host`, if the device has it.
    pub(super) fn import(&self) -> Option<&ext::external_memory_host::Device> {
        self.import.as_ref()
    }

    /// Faults injected on purpose.
    pub(super) fn injected(&self) -> Option<&FaultState> {
        self.injected.as_deref()
    }

    /// Fails once an injected fault lost the device: then every call does.
    pub(super) fn alive(&self) -> VkResult<()> {
        self.injected().map_or(Ok(()), FaultState::alive)
    }

    /// Whether a call has reported the device lost.
    pub(super) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// What a failed call means; `action` is a verb with its object, for "cannot …".
    pub(super) fn error(&self, action: impl Into<String>, result: vk::Result) -> Error {
        let action = action.into();
        if result != vk::Result::ERROR_DEVICE_LOST {
            return Error::Vulkan { action, result };
        }
        self.lost.store(true, Ordering::Relaxed);
        Error::DeviceLost(format!("{}: cannot {action}; {}", self.name, self.fault_text()))
    }

    /// Waits until `semaphore` reaches `value`; `false` if it did not within `limit`.
    pub(super) fn wait_semaphore(
        &self,
        semaphore: vk::Semaphore,
        value: u64,
        limit: Duration,
        what: &str,
    ) -> Result<bool> {
        let (semaphores, values) = ([semaphore], [value]);
        let info = vk::SemaphoreWaitInfo::default().semaphores(&semaphores).values(&values);
        let limit_ns = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        let waited = self.alive().and_then(|()| {
            // SAFETY: the caller's Timeline owns the semaphore for the time of this borrow.
            unsafe { self.device.wait_semaphores(&info, limit_ns) }
        });
        match waited {
            Ok(()) => Ok(true),
            Err(vk::Result::TIMEOUT) => Ok(false),
            Err(result) => Err(self.error(format!("wait for {what}"), result)),
        }
    }

    /// What `VK_EXT_device_fault` knows about the loss.
    fn fault_text(&self) -> String {
        // The driver knows of no loss then, and must not be asked for its cause.
        if self.injected().is_some_and(FaultState::is_lost) {
            return "a fault injected by VKMOE_FAULTS".into();
        }
        let Some(fault) = &self.fault else {
            return "the driver gives no cause (no VK_EXT_device_fault)".into();
        };
        let get = fault.fp().get_device_fault_info_ext;
        let mut counts = vk::DeviceFaultCountsEXT::default();
        // SAFETY: the device is lost, as this query requires; a null info asks for the counts.
        let result = unsafe { get(self.device.handle(), &mut counts, std::ptr::null_mut()) };
        if result != vk::Result::SUCCESS {
            return format!("the driver gives no cause ({result})");
        }
        let mut addresses =
            vec![vk::DeviceFaultAddressInfoEXT::default(); counts.address_info_count as usize];
        let mut vendor =
            vec![vk::DeviceFaultVendorInfoEXT::default(); counts.vendor_info_count as usize];
        counts.vendor_binary_size = 0;
        let mut info = vk::DeviceFaultInfoEXT {
            p_address_infos: addresses.as_mut_ptr(),
            p_vendor_infos: vendor.as_mut_ptr(),
            ..Default::default()
        };
        // SAFETY: the arrays have the lengths that `counts` says and outlive the call.
        let result = unsafe { get(self.device.handle(), &mut counts, &mut info) };
        if result.as_raw() < 0 {
            return format!("the driver gives no cause ({result})");
        }
        let mut text = format!("cause: {}", c_text(info.description_as_c_str()));
        for address in addresses.iter().take(counts.address_info_count as usize) {
            text += &format!("; {:?} at {:#x}", address.address_type, address.reported_address);
        }
        for entry in vendor.iter().take(counts.vendor_info_count as usize) {
            text += &format!(
                "; {} (code {:#x}, data {:#x})",
                c_text(entry.description_as_c_str()),
                entry.vendor_fault_code,
                entry.vendor_fault_data
            );
        }
        text
    }
}

impl Drop for RawDevice {
    fn drop(&mut self) {
        let _alone = lock(&COMING_AND_GOING);
        // SAFETY: every child holds an `Arc` of this, or is an earlier field of the `Device` that
        // waited for the queues (`Retired::drop`): nothing of this device is left.
        unsafe { self.device.destroy_device(None) };
    }
}

/// A text that a driver wrote into a fixed array.
pub(super) fn c_text<E>(text: std::result::Result<&std::ffi::CStr, E>) -> String {
    text.map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
}
