//! The Vulkan instance: loader, validation layer, message counting, list of devices.
#![allow(unsafe_code, reason = "loads Vulkan and calls instance-level functions")]

use std::borrow::Cow;
use std::ffi::{CStr, c_char};
use std::sync::OnceLock;

use ash::{ext, khr, vk};

use super::faults::Faults;
use super::info::{self, DeviceInfo};
use super::messages::{Messages, Messenger, messenger_info};
use super::{COMING_AND_GOING, lock};
use crate::{Error, Result};

const LAYER: &CStr = c"VK_LAYER_KHRONOS_validation";
const INSTALL: &str = "install a Vulkan driver and the loader (Debian, Ubuntu: `mesa-vulkan-drivers` or \
     NVIDIA's driver, and `libvulkan1`; Windows: the vendor's graphics driver)";

/// The first layer whose GPU-assisted checks know push descriptors. 1.3.239 takes each binding for
/// uninitialized, skips the kernel, and needs ten seconds for every wait on a timeline.
const GPU_ASSISTED_LAYER: (u32, u32, u32) = (1, 3, 296);

/// Which checks of the validation layer run: one group at a time, as the layer itself advises.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Validation {
    /// None: no layer is loaded.
    #[default]
    Off,
    /// Valid usage: parameters, lifetimes, states.
    Core,
    /// Hazards: missing barriers and semaphore waits.
    Sync,
    /// Accesses of kernels outside their buffers and addresses.
    GpuAssisted,
}

impl Validation {
    /// What the variable `VKMOE_VALIDATION` asks for: `core`, `sync`, `gpu`, or nothing.
    pub fn from_env() -> Result<Self> {
        match std::env::var("VKMOE_VALIDATION").unwrap_or_default().as_str() {
            "" | "off" | "0" => Ok(Self::Off),
            "core" => Ok(Self::Core),
            "sync" => Ok(Self::Sync),
            "gpu" => Ok(Self::GpuAssisted),
            other => Err(Error::usage(
                "VKMOE_VALIDATION",
                format!("`{other}` is none of core, sync, gpu, off"),
            )),
        }
    }
}

/// How to make an [`Instance`].
#[derive(Clone, Copy, Debug, Default)]
pub struct InstanceOptions {
    /// Checks to run; with [`Validation::Off`] the variable `VKMOE_VALIDATION` decides.
    pub validation: Validation,
}

/// A loaded Vulkan with its instance.
pub struct Instance {
    // The order of the fields is the order of destruction.
    _messenger: Option<Messenger>,
    raw: RawInstance,
    messages: Box<Messages>,
    validation: Validation,
    debug_utils: bool,
    faults: Faults,
    entry: ash::Entry,
}

impl Instance {
    /// Loads Vulkan and creates the instance.
    pub fn new(options: InstanceOptions) -> Result<Self> {
        Self::with_faults(options, Faults::from_env()?)
    }

    /// As [`Self::new`], with these faults instead of those of the environment.
    pub fn with_faults(options: InstanceOptions, faults: Faults) -> Result<Self> {
        let validation = match options.validation {
            Validation::Off => Validation::from_env()?,
            wanted => wanted,
        };
        // From here on: asking for extensions loads drivers and layers, too.
        let alone = lock(&COMING_AND_GOING);
        let entry = load()?;
        let extensions = Extensions::choose(&entry, validation)?;
        let messages = Box::<Messages>::default();
        let raw = create(&entry, validation, &extensions, &messages)?;
        drop(alone);
        let messenger = match validation {
            Validation::Off => None,
            _ => Some(Messenger::new(&entry, &raw.0, &messages)?),
        };
        let debug_utils = extensions.has(ext::debug_utils::NAME);
        Ok(Self { _messenger: messenger, raw, messages, validation, debug_utils, faults, entry })
    }

    /// All devices: discrete ones first, then integrated, virtual, CPU, other; Vulkan's own order
    /// within each kind.
    pub fn devices(&self) -> Result<Vec<DeviceInfo>> {
        let _alone = lock(&COMING_AND_GOING);
        // SAFETY: the instance lives as long as `self`.
        let physical = unsafe { self.raw.0.enumerate_physical_devices() }.map_err(|result| {
            Error::NoDevice(format!("the Vulkan drivers list no device ({result}); {INSTALL}"))
        })?;
        let mut devices = physical
            .into_iter()
            .enumerate()
            .map(|(index, device)| info::query(self, device, index))
            .collect::<Result<Vec<_>>>()?;
        devices.sort_by_key(|device| (device.kind, device.vulkan_index));
        Ok(devices)
    }

    /// Which checks run.
    pub fn validation(&self) -> Validation {
        self.validation
    }

    /// Warnings and errors of the validation layer so far, without the allowed ones.
    pub fn validation_messages(&self) -> u64 {
        self.messages.count()
    }

    /// The first few of [`Self::validation_messages`], for a test's report.
    pub fn validation_report(&self) -> Vec<String> {
        self.messages.first()
    }

    /// What goes wrong on its devices on purpose.
    pub fn faults(&self) -> &Faults {
        &self.faults
    }

    pub(super) fn entry(&self) -> &ash::Entry {
        &self.entry
    }

    pub(super) fn raw(&self) -> &ash::Instance {
        &self.raw.0
    }

    pub(super) fn has_debug_utils(&self) -> bool {
        self.debug_utils
    }
}

/// Loads the loader and checks that it knows more than Vulkan 1.0.
/// The loader, which stays loaded until the process ends: unloading takes the drivers with it, whose
/// threads may still be ending.
fn load() -> Result<ash::Entry> {
    static LOADED: OnceLock<ash::Entry> = OnceLock::new();
    if let Some(entry) = LOADED.get() {
        return Ok(entry.clone());
    }
    // SAFETY: loading runs the library's initializers; the Vulkan loader's have no preconditions.
    let entry = unsafe { ash::Entry::load() }.map_err(|source| {
        Error::NoDevice(format!("no Vulkan loader on this machine ({source}); {INSTALL}"))
    })?;
    // SAFETY: a global function of the library that `entry` keeps loaded.
    let version = unsafe { entry.try_enumerate_instance_version() };
    match version {
        Ok(Some(_)) => Ok(LOADED.get_or_init(|| entry).clone()),
        _ => Err(Error::NoDevice(format!("the Vulkan loader is one of Vulkan 1.0; {INSTALL}"))),
    }
}

/// The instance extensions to enable.
struct Extensions(Vec<&'static CStr>);

impl Extensions {
    fn choose(entry: &ash::Entry, validation: Validation) -> Result<Self> {
        let mut available = extension_names(entry, None)?;
        let mut wanted = vec![ext::debug_utils::NAME, khr::portability_enumeration::NAME];
        if validation != Validation::Off {
            check_layer(entry, validation)?;
            let of_layer = extension_names(entry, Some(LAYER))?;
            // The newer of the two ways to switch checks on, if the layer knows it.
            let newer = of_layer.iter().any(|name| name == ext::layer_settings::NAME);
            wanted.push(match newer {
                true => ext::layer_settings::NAME,
                false => ext::validation_features::NAME,
            });
            available.extend(of_layer);
        }
        wanted.retain(|&name| available.iter().any(|other| other.as_ref() == name));
        Ok(Self(wanted))
    }

    fn has(&self, name: &CStr) -> bool {
        self.0.contains(&name)
    }
}

/// Refuses checks that the installed layer cannot do.
fn check_layer(entry: &ash::Entry, validation: Validation) -> Result<()> {
    // SAFETY: a global function of the library that `entry` keeps loaded.
    let layers = unsafe { entry.enumerate_instance_layer_properties() }
        .map_err(|result| vulkan_error("list the layers", result))?;
    let layer = layers.iter().find(|layer| layer.layer_name_as_c_str() == Ok(LAYER));
    let refuse = |problem: String| Err(Error::usage("VKMOE_VALIDATION", problem));
    let Some(layer) = layer else {
        return refuse(format!(
            "{} is not installed (Debian: `vulkan-validationlayers`)",
            LAYER.to_string_lossy()
        ));
    };
    let version = layer.spec_version;
    let (major, minor) = (vk::api_version_major(version), vk::api_version_minor(version));
    let patch = vk::api_version_patch(version);
    if validation == Validation::GpuAssisted && (major, minor, patch) < GPU_ASSISTED_LAYER {
        let (a, b, c) = GPU_ASSISTED_LAYER;
        return refuse(format!(
            "GPU-assisted validation needs a validation layer from {a}.{b}.{c} on; \
             {major}.{minor}.{patch} is installed"
        ));
    }
    Ok(())
}

/// Names of the extensions of the loader and drivers, or of a layer.
fn extension_names(entry: &ash::Entry, layer: Option<&CStr>) -> Result<Vec<Cow<'static, CStr>>> {
    // SAFETY: a global function of the library that `entry` keeps loaded.
    let properties = unsafe { entry.enumerate_instance_extension_properties(layer) }
        .map_err(|result| vulkan_error("list the instance extensions", result))?;
    Ok(properties
        .iter()
        .filter_map(|property| property.extension_name_as_c_str().ok())
        .map(|name| Cow::Owned(name.to_owned()))
        .collect())
}

fn vulkan_error(action: &str, result: vk::Result) -> Error {
    Error::Vulkan { action: action.into(), result }
}

/// Creates the instance with the layer's switches set.
fn create(
    entry: &ash::Entry,
    validation: Validation,
    extensions: &Extensions,
    messages: &Messages,
) -> Result<RawInstance> {
    let application = vk::ApplicationInfo::default()
        .application_name(c"vkmoe")
        .engine_name(c"vkmoe")
        .api_version(vk::API_VERSION_1_3);
    let names: Vec<*const c_char> = extensions.0.iter().map(|name| name.as_ptr()).collect();
    let layers = [LAYER.as_ptr()];
    let enables = enabled_features(validation);
    let mut features = vk::ValidationFeaturesEXT::default()
        .enabled_validation_features(enables)
        .disabled_validation_features(disabled_features(validation));
    let switches = layer_switches(validation);
    let settings = switches.each_ref().map(|(name, value)| layer_setting(name, value));
    let mut settings = vk::LayerSettingsCreateInfoEXT::default().settings(&settings);
    let mut messenger = messenger_info(messages);

    let mut info = vk::InstanceCreateInfo::default()
        .application_info(&application)
        .enabled_extension_names(&names);
    if extensions.has(khr::portability_enumeration::NAME) {
        info = info.flags(vk::InstanceCreateFlags::ENUMERATE_PORTABILITY_KHR);
    }
    if validation != Validation::Off {
        info = info.enabled_layer_names(&layers).push_next(&mut messenger);
        info = match extensions.has(ext::layer_settings::NAME) {
            true => info.push_next(&mut settings),
            false => info.push_next(&mut features),
        };
    }
    // SAFETY: everything `info` points to lives in this function, `messages` as long as the caller's
    // instance.
    let instance = unsafe { entry.create_instance(&info, None) }.map_err(|result| {
        Error::NoDevice(format!("Vulkan cannot be initialized ({result}); {INSTALL}"))
    })?;
    Ok(RawInstance(instance))
}

/// Switches of `VK_EXT_validation_features`, for layers too old for the GPU-assisted checks.
fn enabled_features(validation: Validation) -> &'static [vk::ValidationFeatureEnableEXT] {
    match validation {
        Validation::Sync => &[vk::ValidationFeatureEnableEXT::SYNCHRONIZATION_VALIDATION],
        _ => &[],
    }
}

fn disabled_features(validation: Validation) -> &'static [vk::ValidationFeatureDisableEXT] {
    match validation {
        Validation::Sync => &[vk::ValidationFeatureDisableEXT::CORE_CHECKS],
        _ => &[],
    }
}

/// Switches of `VK_EXT_layer_settings`.
fn layer_switches(validation: Validation) -> [(&'static CStr, vk::Bool32); 4] {
    let is = |which| vk::Bool32::from(validation == which);
    [
        (c"validate_core", is(Validation::Core)),
        (c"validate_sync", is(Validation::Sync)),
        (c"gpuav_enable", is(Validation::GpuAssisted)),
        // On by default, with a warning on every device without ray queries.
        (c"gpuav_validate_ray_query", vk::FALSE),
    ]
}

/// ash's `values` counts bytes, Vulkan counts values: hence by hand.
fn layer_setting<'a>(name: &'a CStr, value: &'a vk::Bool32) -> vk::LayerSettingEXT<'a> {
    let mut setting = vk::LayerSettingEXT::default()
        .layer_name(LAYER)
        .setting_name(name)
        .ty(vk::LayerSettingTypeEXT::BOOL32);
    setting.value_count = 1;
    setting.p_values = std::ptr::from_ref(value).cast();
    setting
}

/// Owner of the VkInstance.
struct RawInstance(ash::Instance);

impl Drop for RawInstance {
    fn drop(&mut self) {
        let _alone = lock(&COMING_AND_GOING);
        // SAFETY: devices hold an `Arc<Instance>`, the messenger is an earlier field: all are gone.
        unsafe { self.0.destroy_instance(None) };
    }
}
