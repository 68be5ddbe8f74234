//! Names and labels for the validation layer, RenderDoc and the vendors' profilers.
#![allow(unsafe_code, reason = "calls VK_EXT_debug_utils")]

use std::ffi::CString;

use ash::vk;

use super::raw::RawDevice;

/// Names an object `vkmoe.<name>`. Without `VK_EXT_debug_utils` it does nothing.
pub(super) fn name<H: vk::Handle>(raw: &RawDevice, handle: H, name: &str) {
    let Some(utils) = raw.debug_utils() else { return };
    let Some(name) = c_name(name) else { return };
    let info = vk::DebugUtilsObjectNameInfoEXT::default().object_handle(handle).object_name(&name);
    // SAFETY: `handle` was just created from `raw`'s device by the caller, who owns it.
    if let Err(result) = unsafe { utils.set_debug_utils_object_name(&info) } {
        log::debug!("the driver refused the debug name {name:?}: {result}");
    }
}

/// Opens a label region in a command buffer.
pub(super) fn begin(raw: &RawDevice, buffer: vk::CommandBuffer, label: &str) {
    let Some(utils) = raw.debug_utils() else { return };
    let label = c_name(label).unwrap_or_default();
    let info = vk::DebugUtilsLabelEXT::default().label_name(&label);
    // SAFETY: the caller's recorder owns `buffer`, which is being recorded.
    unsafe { utils.cmd_begin_debug_utils_label(buffer, &info) };
}

/// Closes the region that [`begin`] opened.
pub(super) fn end(raw: &RawDevice, buffer: vk::CommandBuffer) {
    let Some(utils) = raw.debug_utils() else { return };
    // SAFETY: the caller's recorder owns `buffer`, which is being recorded in an open label.
    unsafe { utils.cmd_end_debug_utils_label(buffer) };
}

/// `vkmoe.<name>` for C; `None` for a name with a NUL.
fn c_name(name: &str) -> Option<CString> {
    CString::new(format!("vkmoe.{}", name.trim_start_matches("vkmoe."))).ok()
}
