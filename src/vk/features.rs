//! The device features: which are required, which are used where present. One table for asking a
//! device and for enabling. Also two structs that ash 0.38 (Vulkan 1.3.281) does not have yet.
#![allow(unsafe_code, reason = "reads features; marks two structs as members of pNext chains")]

use std::ffi::{CStr, CString, c_void};

use ash::{ext, khr, vk};

use super::info::Optional;

/// Present from Vulkan 1.4 headers on.
pub(super) const COOPERATIVE_MATRIX2_NAME: &CStr = c"VK_NV_cooperative_matrix2";
const BFLOAT16_NAME: &CStr = c"VK_KHR_shader_bfloat16";
pub(super) const PORTABILITY_SUBSET_NAME: &CStr = c"VK_KHR_portability_subset";

/// Device extensions without which the engine does not run.
pub(super) const REQUIRED_EXTENSIONS: &[&CStr] = &[khr::push_descriptor::NAME];

/// Device extensions that are enabled where present.
pub(super) const OPTIONAL_EXTENSIONS: &[&CStr] = &[
    ext::memory_budget::NAME,
    ext::memory_priority::NAME,
    ext::pageable_device_local_memory::NAME,
    ext::external_memory_host::NAME,
    ext::device_fault::NAME,
    ext::calibrated_timestamps::NAME,
    khr::calibrated_timestamps::NAME,
    khr::cooperative_matrix::NAME,
    COOPERATIVE_MATRIX2_NAME,
    BFLOAT16_NAME,
    // Must be enabled wherever a driver on top of another API (MoltenVK) lists it.
    PORTABILITY_SUBSET_NAME,
];

/// Whether an extension that a device has is enabled on it. Not bfloat16: no kernel uses it yet, and
/// validation layers up to 1.4.309 do not know it. Not both names of the same extension: old layers
/// (1.3.239) know only the older.
pub(super) fn is_enabled(name: &CStr, all: &[CString]) -> bool {
    let has = |name: &CStr| all.iter().any(|other| other.as_c_str() == name);
    let twice = name == khr::calibrated_timestamps::NAME && has(ext::calibrated_timestamps::NAME);
    name != BFLOAT16_NAME && !twice
}

type Field = fn(&mut Features) -> &mut vk::Bool32;
type Present = fn(&mut Optional) -> &mut bool;

/// Features without which the engine does not run. Each is mandatory in Vulkan 1.3, or had by
/// RADV, AMDVLK, ANV, NVIDIA, NVK, and lavapipe from 22.3.
const REQUIRED: &[(&str, Field)] = &[
    ("shaderInt16", |f| &mut f.core.shader_int16),
    ("shaderInt64", |f| &mut f.core.shader_int64),
    ("storageBuffer16BitAccess", |f| &mut f.v11.storage_buffer16_bit_access),
    ("storageBuffer8BitAccess", |f| &mut f.v12.storage_buffer8_bit_access),
    ("shaderInt8", |f| &mut f.v12.shader_int8),
    ("scalarBlockLayout", |f| &mut f.v12.scalar_block_layout),
    ("timelineSemaphore", |f| &mut f.v12.timeline_semaphore),
    ("bufferDeviceAddress", |f| &mut f.v12.buffer_device_address),
    ("hostQueryReset", |f| &mut f.v12.host_query_reset),
    ("synchronization2", |f| &mut f.v13.synchronization2),
    ("maintenance4", |f| &mut f.v13.maintenance4),
    ("subgroupSizeControl", |f| &mut f.v13.subgroup_size_control),
    ("computeFullSubgroups", |f| &mut f.v13.compute_full_subgroups),
];

/// Features enabled where present, and where [`Optional`] tells of them.
const OPTIONAL: &[(Field, Present)] = &[
    (|f| &mut f.v12.shader_float16, |o| &mut o.float16),
    (|f| &mut f.v12.vulkan_memory_model, |o| &mut o.vulkan_memory_model),
    (|f| &mut f.v12.vulkan_memory_model_device_scope, |o| &mut o.memory_model_device_scope),
    (|f| &mut f.v12.shader_subgroup_extended_types, |o| &mut o.subgroup_extended_types),
    (|f| &mut f.v13.shader_integer_dot_product, |o| &mut o.integer_dot_product),
    (|f| &mut f.matrix.cooperative_matrix, |o| &mut o.cooperative_matrix),
    (|f| &mut f.matrix2.workgroup_scope, |o| &mut o.cooperative_matrix2.workgroup_scope),
    (|f| &mut f.matrix2.flexible_dimensions, |o| &mut o.cooperative_matrix2.flexible_dimensions),
    (|f| &mut f.matrix2.reductions, |o| &mut o.cooperative_matrix2.reductions),
    (|f| &mut f.matrix2.conversions, |o| &mut o.cooperative_matrix2.conversions),
    (|f| &mut f.matrix2.per_element, |o| &mut o.cooperative_matrix2.per_element),
    (|f| &mut f.matrix2.tensor_addressing, |o| &mut o.cooperative_matrix2.tensor_addressing),
    (|f| &mut f.matrix2.block_loads, |o| &mut o.cooperative_matrix2.block_loads),
    (|f| &mut f.bfloat16.scalar, |o| &mut o.bfloat16),
    (|f| &mut f.bfloat16.dot_product, |o| &mut o.bfloat16_dot_product),
    (|f| &mut f.bfloat16.cooperative_matrix, |o| &mut o.bfloat16_cooperative_matrix),
    (|f| &mut f.priority.memory_priority, |o| &mut o.memory_priority),
    (|f| &mut f.pageable.pageable_device_local_memory, |o| &mut o.pageable_device_local_memory),
    (|f| &mut f.fault.device_fault, |o| &mut o.device_fault),
];

/// All feature structs that the tables name.
#[derive(Default)]
pub(super) struct Features {
    core: vk::PhysicalDeviceFeatures,
    v11: vk::PhysicalDeviceVulkan11Features<'static>,
    v12: vk::PhysicalDeviceVulkan12Features<'static>,
    v13: vk::PhysicalDeviceVulkan13Features<'static>,
    matrix: vk::PhysicalDeviceCooperativeMatrixFeaturesKHR<'static>,
    matrix2: CooperativeMatrix2Features,
    bfloat16: Bfloat16Features,
    priority: vk::PhysicalDeviceMemoryPriorityFeaturesEXT<'static>,
    pageable: vk::PhysicalDevicePageableDeviceLocalMemoryFeaturesEXT<'static>,
    fault: vk::PhysicalDeviceFaultFeaturesEXT<'static>,
}

impl Features {
    /// Asks a device of Vulkan 1.3 or newer. `extensions`: those it has.
    pub(super) fn query(
        instance: &ash::Instance,
        physical: vk::PhysicalDevice,
        extensions: &[&CStr],
    ) -> Self {
        let mut features = Self::default();
        let mut chain = features.link(extensions);
        // SAFETY: `physical` is the instance's; each struct in the chain belongs to Vulkan 1.3 or to
        // an extension that the device has.
        unsafe { instance.get_physical_device_features2(physical, &mut chain) };
        let core = chain.features;
        features.core = core;
        features
    }

    /// The features to enable: the required ones and those of `optional`.
    pub(super) fn to_enable(optional: &Optional) -> Self {
        let mut features = Self::default();
        for (_, field) in REQUIRED {
            *field(&mut features) = vk::TRUE;
        }
        let mut optional = *optional;
        for (field, present) in OPTIONAL {
            *field(&mut features) = vk::Bool32::from(*present(&mut optional));
        }
        features
    }

    /// The chain of this value's structs. Only once for each value: the structs keep their links.
    pub(super) fn link<'a>(&'a mut self, extensions: &[&CStr]) -> vk::PhysicalDeviceFeatures2<'a> {
        let has = |name: &CStr| extensions.contains(&name);
        let mut chain = vk::PhysicalDeviceFeatures2::default()
            .features(self.core)
            .push_next(&mut self.v11)
            .push_next(&mut self.v12)
            .push_next(&mut self.v13);
        if has(khr::cooperative_matrix::NAME) {
            chain = chain.push_next(&mut self.matrix);
        }
        if has(COOPERATIVE_MATRIX2_NAME) {
            chain = chain.push_next(&mut self.matrix2);
        }
        if has(BFLOAT16_NAME) {
            chain = chain.push_next(&mut self.bfloat16);
        }
        if has(ext::memory_priority::NAME) {
            chain = chain.push_next(&mut self.priority);
        }
        if has(ext::pageable_device_local_memory::NAME) {
            chain = chain.push_next(&mut self.pageable);
        }
        if has(ext::device_fault::NAME) {
            chain = chain.push_next(&mut self.fault);
        }
        chain
    }

    /// Names of the required features that are off.
    pub(super) fn missing(&mut self) -> Vec<String> {
        let mut missing = Vec::new();
        for (name, field) in REQUIRED {
            if *field(self) == vk::FALSE {
                missing.push((*name).to_owned());
            }
        }
        missing
    }

    /// The optional features that are on.
    pub(super) fn optional(&mut self) -> Optional {
        let mut optional = Optional::default();
        for (field, present) in OPTIONAL {
            *present(&mut optional) = *field(self) == vk::TRUE;
        }
        optional
    }
}

/// `VkPhysicalDeviceCooperativeMatrix2FeaturesNV`
#[repr(C)]
struct CooperativeMatrix2Features {
    s_type: vk::StructureType,
    p_next: *mut c_void,
    workgroup_scope: vk::Bool32,
    flexible_dimensions: vk::Bool32,
    reductions: vk::Bool32,
    conversions: vk::Bool32,
    per_element: vk::Bool32,
    tensor_addressing: vk::Bool32,
    block_loads: vk::Bool32,
}

impl Default for CooperativeMatrix2Features {
    fn default() -> Self {
        Self {
            s_type: vk::StructureType::from_raw(1_000_593_000),
            p_next: std::ptr::null_mut(),
            workgroup_scope: vk::FALSE,
            flexible_dimensions: vk::FALSE,
            reductions: vk::FALSE,
            conversions: vk::FALSE,
            per_element: vk::FALSE,
            tensor_addressing: vk::FALSE,
            block_loads: vk::FALSE,
        }
    }
}

// SAFETY: the layout is the header's, and the specification lets it extend VkPhysicalDeviceFeatures2.
unsafe impl vk::ExtendsPhysicalDeviceFeatures2 for CooperativeMatrix2Features {}

/// `VkPhysicalDeviceShaderBfloat16FeaturesKHR`
#[repr(C)]
struct Bfloat16Features {
    s_type: vk::StructureType,
    p_next: *mut c_void,
    scalar: vk::Bool32,
    dot_product: vk::Bool32,
    cooperative_matrix: vk::Bool32,
}

impl Default for Bfloat16Features {
    fn default() -> Self {
        Self {
            s_type: vk::StructureType::from_raw(1_000_141_000),
            p_next: std::ptr::null_mut(),
            scalar: vk::FALSE,
            dot_product: vk::FALSE,
            cooperative_matrix: vk::FALSE,
        }
    }
}

// SAFETY: the layout is the header's, and the specification lets it extend VkPhysicalDeviceFeatures2.
unsafe impl vk::ExtendsPhysicalDeviceFeatures2 for Bfloat16Features {}
