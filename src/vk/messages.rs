//! Messages of the validation layer: counted, logged, and some allowed.
#![allow(unsafe_code, reason = "owns the debug messenger and reads what Vulkan passes to it")]

use std::ffi::c_void;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use ash::{ext, vk};

use super::lock;
use crate::{Error, Result};

/// Messages that are not about our calls: (part of the id, part of the text, why).
const ALLOWED: &[(&str, &str, &str)] = &[
    (
        "GPU-Assisted-Validation",
        "Internal Warning: Setting VkPhysicalDevice",
        "the layer tells that it lowers a limit for its own descriptors",
    ),
    (
        "GPU-Assisted-Validation",
        "Internal Warning: Forcing ",
        "the layer tells that it enables a feature for its own shader code",
    ),
];

/// What the messenger saw.
#[derive(Default)]
pub(super) struct Messages {
    count: AtomicU64,
    first: Mutex<Vec<String>>,
}

impl Messages {
    const KEPT: usize = 16;

    /// How many were not allowed.
    pub(super) fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// The first few of those.
    pub(super) fn first(&self) -> Vec<String> {
        lock(&self.first).clone()
    }

    fn add(&self, severity: vk::DebugUtilsMessageSeverityFlagsEXT, id: &str, text: &str) {
        let allowed = ALLOWED.iter().find(|(of, part, _)| id.contains(of) && text.contains(part));
        if let Some((_, _, reason)) = allowed {
            return log::debug!("validation message {id} is allowed: {reason}");
        }
        self.count.fetch_add(1, Ordering::Relaxed);
        match severity.contains(vk::DebugUtilsMessageSeverityFlagsEXT::ERROR) {
            true => log::error!("validation: {id}: {text}"),
            false => log::warn!("validation: {id}: {text}"),
        }
        let mut first = lock(&self.first);
        if first.len() < Self::KEPT {
            first.push(format!("{id}: {text}"));
        }
    }
}

/// Owner of the debug messenger.
pub(super) struct Messenger {
    utils: ext::debug_utils::Instance,
    handle: vk::DebugUtilsMessengerEXT,
}

impl Messenger {
    /// `messages` must outlive the messenger.
    pub(super) fn new(
        entry: &ash::Entry,
        instance: &ash::Instance,
        messages: &Messages,
    ) -> Result<Self> {
        let utils = ext::debug_utils::Instance::new(entry, instance);
        let info = messenger_info(messages);
        // SAFETY: `messages` is boxed in the Instance that owns this messenger, a later field.
        let handle =
            unsafe { utils.create_debug_utils_messenger(&info, None) }.map_err(|result| {
                Error::Vulkan { action: "create the debug messenger".into(), result }
            })?;
        Ok(Self { utils, handle })
    }
}

impl Drop for Messenger {
    fn drop(&mut self) {
        // SAFETY: owned here alone; the VkInstance is a later field of the owner.
        unsafe { self.utils.destroy_debug_utils_messenger(self.handle, None) };
    }
}

/// What messages are sent to `messages`, which must outlive their sender.
pub(super) fn messenger_info(messages: &Messages) -> vk::DebugUtilsMessengerCreateInfoEXT<'static> {
    vk::DebugUtilsMessengerCreateInfoEXT::default()
        .message_severity(
            vk::DebugUtilsMessageSeverityFlagsEXT::WARNING
                | vk::DebugUtilsMessageSeverityFlagsEXT::ERROR,
        )
        .message_type(
            vk::DebugUtilsMessageTypeFlagsEXT::GENERAL
                | vk::DebugUtilsMessageTypeFlagsEXT::VALIDATION
                | vk::DebugUtilsMessageTypeFlagsEXT::PERFORMANCE,
        )
        .pfn_user_callback(Some(on_message))
        .user_data(std::ptr::from_ref(messages).cast_mut().cast())
}

/// Counts and logs. Messages of type GENERAL come from the loader (drivers that it skipped, its
/// "terminator" notes), not from checks of our calls: they are logged only.
unsafe extern "system" fn on_message(
    severity: vk::DebugUtilsMessageSeverityFlagsEXT,
    types: vk::DebugUtilsMessageTypeFlagsEXT,
    data: *const vk::DebugUtilsMessengerCallbackDataEXT<'_>,
    user: *mut c_void,
) -> vk::Bool32 {
    // SAFETY: `user` is the `Messages` that the Instance owns longer than its messenger.
    let messages = unsafe { user.cast::<Messages>().as_ref() };
    // SAFETY: Vulkan passes a valid pointer for the time of the call.
    let data = unsafe { data.as_ref() };
    if let (Some(messages), Some(data)) = (messages, data) {
        // SAFETY: the id is a C string or null, valid for the time of the call.
        let id = unsafe { data.message_id_name_as_c_str() }.unwrap_or_default().to_string_lossy();
        // SAFETY: as the id.
        let text = unsafe { data.message_as_c_str() }.unwrap_or_default().to_string_lossy();
        match types.contains(vk::DebugUtilsMessageTypeFlagsEXT::GENERAL)
            && !id.contains("UNASSIGNED")
        {
            true => log::debug!("Vulkan loader: {text}"),
            false => messages.add(severity, &id, &text),
        }
    }
    vk::FALSE
}
