//! What a device is and can: asked once, then plain data that tests can make up.
#![allow(unsafe_code, reason = "asks the driver about a physical device")]

use std::ffi::{CStr, CString};

use ash::{ext, khr, vk};

use super::features::{Features, OPTIONAL_EXTENSIONS, REQUIRED_EXTENSIONS};
use super::instance::Instance;
pub use super::kind::{DeviceKind, Vendor};
use super::raw::c_text;
use crate::{Error, Result};

/// Everything the engine asks a device. `DeviceInfo::default()` is a device without anything.
#[derive(Clone, Debug, Default)]
pub struct DeviceInfo {
    pub(super) physical: vk::PhysicalDevice,
    pub(super) extensions: Vec<CString>,
    pub(super) pipeline_cache_uuid: [u8; vk::UUID_SIZE],
    /// Position in Vulkan's own list, which `GGML_VK_VISIBLE_DEVICES` counts by.
    pub vulkan_index: usize,
    /// The device's name: `NVIDIA H200`.
    pub name: String,
    /// What sort of device.
    pub kind: DeviceKind,
    /// Who made it.
    pub vendor: Vendor,
    /// PCI id of the device.
    pub device_id: u32,
    /// The driver: `radv`, `NVIDIA`, `llvmpipe`.
    pub driver: String,
    /// The driver's version in its own words: `Mesa 25.0.7`, `580.95.05`.
    pub driver_version: String,
    /// The driver's version as a number, for the pipeline cache.
    pub driver_number: u32,
    /// Vulkan version: (1, 3).
    pub api: (u32, u32),
    /// Limits.
    pub limits: Limits,
    /// Subgroup sizes.
    pub subgroup: SubgroupSizes,
    /// Memory heaps, with budgets as of the query.
    pub heaps: Vec<Heap>,
    /// Queue families.
    pub queue_families: Vec<QueueFamily>,
    /// Optional features that it has.
    pub optional: Optional,
    /// Matrix shapes of `VK_KHR_cooperative_matrix`.
    pub matrix_shapes: Vec<MatrixShape>,
    /// Required features that it lacks, by name; empty: the engine runs on it.
    pub missing: Vec<String>,
}

impl DeviceInfo {
    /// Whether its memory is the host's: nothing is gained by copying to it.
    pub fn shares_host_memory(&self) -> bool {
        matches!(self.kind, DeviceKind::Integrated | DeviceKind::Cpu)
    }

    /// The driver's mark for what it compiles, in hexadecimal digits: differs between devices and
    /// between builds of the driver.
    pub fn cache_uuid(&self) -> String {
        self.pipeline_cache_uuid.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// The matrix shape that kernels use: f16 times f16 into f32, of one subgroup; the largest up to 16×16×16.
    /// `None`: no usable matrix units.
    pub fn half_matrix(&self) -> Option<MatrixShape> {
        use vk::ComponentTypeKHR as Type;
        let has = &self.optional;
        if !(has.cooperative_matrix && has.float16 && has.vulkan_memory_model) {
            return None;
        }
        let usable = |s: &&MatrixShape| {
            (s.a, s.b, s.c, s.result)
                == (Type::FLOAT16, Type::FLOAT16, Type::FLOAT32, Type::FLOAT32)
                && s.scope == vk::ScopeKHR::SUBGROUP
                && s.m.max(s.n).max(s.k) <= 16
                && s.k.is_multiple_of(8)
                && s.m.is_multiple_of(4)
        };
        self.matrix_shapes.iter().filter(usable).max_by_key(|s| s.m * s.n * s.k).copied()
    }

    pub(super) fn has_extension(&self, name: &CStr) -> bool {
        self.extensions.iter().any(|other| other.as_c_str() == name)
    }
}

/// The limits that plans and kernels look at.
#[derive(Clone, Copy, Debug, Default)]
pub struct Limits {
    /// Largest range of one storage buffer binding.
    pub storage_range_bytes: u64,
    /// Largest buffer.
    pub buffer_bytes: u64,
    /// Largest allocation that is sure to be allowed; larger ones may work (NVIDIA).
    pub allocation_bytes: u64,
    /// Most workgroups of a dispatch along x, y, z.
    pub workgroups: [u32; 3],
    /// Most invocations of a workgroup.
    pub workgroup_invocations: u32,
    /// Largest workgroup along x, y, z.
    pub workgroup_size: [u32; 3],
    /// Shared memory of a workgroup.
    pub shared_bytes: u32,
    /// Push constants.
    pub push_bytes: u32,
    /// Bindings of a push descriptor set.
    pub push_descriptors: u32,
    /// Alignment of the offset of a storage buffer binding.
    pub storage_offset_alignment: u64,
    /// Alignment of pointer and size of imported host memory; 0: no import.
    pub import_alignment: u64,
    /// Nanoseconds in a timestamp tick.
    pub timestamp_period_ns: f32,
}

/// Larger imports bring nothing, and ANV silently cuts sizes to 32 bits.
const IMPORT_BYTES: u64 = 1 << 30;

impl Limits {
    /// The largest buffer that memory can be allocated for.
    pub fn allocated_buffer_bytes(&self) -> u64 {
        self.buffer_bytes.min(self.allocation_bytes)
    }

    /// The longest range of host pages to import at a time, a multiple of `import_alignment`; 0: no
    /// import.
    pub fn import_bytes(&self) -> u64 {
        let most = IMPORT_BYTES.min(self.buffer_bytes).min(self.allocation_bytes);
        match self.import_alignment {
            0 => 0,
            alignment => most / alignment * alignment,
        }
    }
}

/// Sizes of a subgroup, in invocations.
#[derive(Clone, Copy, Debug, Default)]
pub struct SubgroupSizes {
    /// Smallest that a pipeline can ask for.
    pub min: u32,
    /// Largest that a pipeline can ask for.
    pub max: u32,
    /// What it gets without asking.
    pub default: u32,
    /// Whether a compute pipeline can ask at all.
    pub selectable: bool,
}

/// A memory heap. The budget is the driver's (`VK_EXT_memory_budget`), or 80 % of the heap.
#[derive(Clone, Copy, Debug, Default)]
pub struct Heap {
    /// Size.
    pub bytes: u64,
    /// What this process may use of it, without trouble, now.
    pub budget_bytes: u64,
    /// What this process uses of it.
    pub usage_bytes: u64,
    /// The device's own memory.
    pub device_local: bool,
}

/// A queue family.
#[derive(Clone, Copy, Debug, Default)]
pub struct QueueFamily {
    /// What its queues can do.
    pub flags: vk::QueueFlags,
    /// How many queues.
    pub count: u32,
    /// Valid bits of its timestamps; 0: none.
    pub timestamp_bits: u32,
}

/// Optional features; all that are present get enabled.
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs, reason = "the names are Vulkan's")]
pub struct Optional {
    pub float16: bool,
    pub vulkan_memory_model: bool,
    pub memory_model_device_scope: bool,
    pub subgroup_extended_types: bool,
    pub integer_dot_product: bool,
    /// Packed 4×8-bit signed dot products run in hardware.
    pub integer_dot_accelerated: bool,
    pub cooperative_matrix: bool,
    pub cooperative_matrix2: CooperativeMatrix2,
    pub bfloat16: bool,
    pub bfloat16_dot_product: bool,
    pub bfloat16_cooperative_matrix: bool,
    pub memory_budget: bool,
    pub memory_priority: bool,
    pub pageable_device_local_memory: bool,
    pub external_memory_host: bool,
    pub device_fault: bool,
    /// Ticks can be compared with the host's clock.
    pub calibrated_timestamps: bool,
}

/// Parts of `VK_NV_cooperative_matrix2`.
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs, reason = "the names are Vulkan's")]
pub struct CooperativeMatrix2 {
    pub workgroup_scope: bool,
    pub flexible_dimensions: bool,
    pub reductions: bool,
    pub conversions: bool,
    pub per_element: bool,
    pub tensor_addressing: bool,
    pub block_loads: bool,
}

/// A shape of `VK_KHR_cooperative_matrix`: A is m×k, B k×n, C and the result m×n.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the names are Vulkan's")]
pub struct MatrixShape {
    pub m: u32,
    pub n: u32,
    pub k: u32,
    pub a: vk::ComponentTypeKHR,
    pub b: vk::ComponentTypeKHR,
    pub c: vk::ComponentTypeKHR,
    pub result: vk::ComponentTypeKHR,
    pub saturating: bool,
    pub scope: vk::ScopeKHR,
}

/// Asks everything. A device older than Vulkan 1.3 gets its name and one missing requirement.
pub(super) fn query(
    instance: &Instance,
    physical: vk::PhysicalDevice,
    vulkan_index: usize,
) -> Result<DeviceInfo> {
    let raw = instance.raw();
    // SAFETY: `physical` was listed by this instance.
    let properties = unsafe { raw.get_physical_device_properties(physical) };
    let mut info = DeviceInfo { physical, vulkan_index, ..basics(&properties) };
    // SAFETY: as above.
    let families = unsafe { raw.get_physical_device_queue_family_properties(physical) };
    info.queue_families = families.iter().map(QueueFamily::from).collect();
    if info.api < (1, 3) {
        info.missing.push(format!("Vulkan 1.3 (its driver has {}.{})", info.api.0, info.api.1));
        return Ok(info);
    }
    info.extensions = extension_names(raw, physical)?;
    let names: Vec<&CStr> = info.extensions.iter().map(CString::as_c_str).collect();

    let mut features = Features::query(raw, physical, &names);
    info.missing = features.missing();
    info.optional = features.optional();
    info.optional.memory_budget = names.contains(&ext::memory_budget::NAME);
    info.optional.external_memory_host = names.contains(&ext::external_memory_host::NAME);
    info.optional.calibrated_timestamps = names.contains(&ext::calibrated_timestamps::NAME)
        || names.contains(&khr::calibrated_timestamps::NAME);
    let missing = REQUIRED_EXTENSIONS.iter().filter(|name| !names.contains(name));
    info.missing.extend(missing.map(|name| name.to_string_lossy().into_owned()));
    if info.optional.cooperative_matrix {
        info.matrix_shapes = matrix_shapes(instance, physical)?;
    }
    let imports = info.optional.external_memory_host;
    add_properties(&mut info, raw, imports);
    info.heaps = heaps(raw, physical, info.optional.memory_budget);
    instance.faults().apply(&mut info);
    Ok(info)
}

/// What Vulkan 1.0 tells.
fn basics(properties: &vk::PhysicalDeviceProperties) -> DeviceInfo {
    let limits = &properties.limits;
    let version = properties.api_version;
    DeviceInfo {
        pipeline_cache_uuid: properties.pipeline_cache_uuid,
        name: c_text(properties.device_name_as_c_str()),
        kind: match properties.device_type {
            vk::PhysicalDeviceType::DISCRETE_GPU => DeviceKind::Discrete,
            vk::PhysicalDeviceType::INTEGRATED_GPU => DeviceKind::Integrated,
            vk::PhysicalDeviceType::VIRTUAL_GPU => DeviceKind::Virtual,
            vk::PhysicalDeviceType::CPU => DeviceKind::Cpu,
            _ => DeviceKind::Other,
        },
        vendor: Vendor::from_id(properties.vendor_id),
        device_id: properties.device_id,
        driver_number: properties.driver_version,
        api: (vk::api_version_major(version), vk::api_version_minor(version)),
        limits: Limits {
            storage_range_bytes: limits.max_storage_buffer_range.into(),
            workgroups: limits.max_compute_work_group_count,
            workgroup_invocations: limits.max_compute_work_group_invocations,
            workgroup_size: limits.max_compute_work_group_size,
            shared_bytes: limits.max_compute_shared_memory_size,
            push_bytes: limits.max_push_constants_size,
            storage_offset_alignment: limits.min_storage_buffer_offset_alignment,
            timestamp_period_ns: limits.timestamp_period,
            ..Limits::default()
        },
        ..DeviceInfo::default()
    }
}

/// What Vulkan 1.1 to 1.3 and the extensions tell.
fn add_properties(info: &mut DeviceInfo, raw: &ash::Instance, imports: bool) {
    let mut v11 = vk::PhysicalDeviceVulkan11Properties::default();
    let mut v12 = vk::PhysicalDeviceVulkan12Properties::default();
    let mut v13 = vk::PhysicalDeviceVulkan13Properties::default();
    let mut push = vk::PhysicalDevicePushDescriptorPropertiesKHR::default();
    let mut host = vk::PhysicalDeviceExternalMemoryHostPropertiesEXT::default();
    let mut chain = vk::PhysicalDeviceProperties2::default()
        .push_next(&mut v11)
        .push_next(&mut v12)
        .push_next(&mut v13);
    if info.has_extension(khr::push_descriptor::NAME) {
        chain = chain.push_next(&mut push);
    }
    if imports {
        chain = chain.push_next(&mut host);
    }
    // SAFETY: the device has Vulkan 1.3 and the extensions whose structs are in the chain.
    unsafe { raw.get_physical_device_properties2(info.physical, &mut chain) };

    info.driver = c_text(v12.driver_name_as_c_str());
    info.driver_version = c_text(v12.driver_info_as_c_str());
    info.limits.buffer_bytes = v13.max_buffer_size;
    info.limits.allocation_bytes = v11.max_memory_allocation_size;
    info.limits.push_descriptors = push.max_push_descriptors;
    info.limits.import_alignment = host.min_imported_host_pointer_alignment;
    info.optional.integer_dot_accelerated =
        v13.integer_dot_product4x8_bit_packed_signed_accelerated == vk::TRUE;
    info.subgroup = SubgroupSizes {
        min: v13.min_subgroup_size,
        max: v13.max_subgroup_size,
        default: v11.subgroup_size,
        selectable: v13.required_subgroup_size_stages.contains(vk::ShaderStageFlags::COMPUTE),
    };
    info.missing.extend(missing_subgroup_operations(&v11));
}

fn missing_subgroup_operations(v11: &vk::PhysicalDeviceVulkan11Properties<'_>) -> Vec<String> {
    use vk::SubgroupFeatureFlags as Flags;
    let required = [
        (Flags::BASIC, "subgroup basic operations"),
        (Flags::ARITHMETIC, "subgroup arithmetic operations"),
        (Flags::SHUFFLE, "subgroup shuffle operations"),
    ];
    let compute = v11.subgroup_supported_stages.contains(vk::ShaderStageFlags::COMPUTE);
    required
        .into_iter()
        .filter(|(flag, _)| !compute || !v11.subgroup_supported_operations.contains(*flag))
        .map(|(_, name)| name.to_owned())
        .collect()
}

/// The heaps and what is left of them now.
pub(super) fn heaps(raw: &ash::Instance, physical: vk::PhysicalDevice, budget: bool) -> Vec<Heap> {
    let mut budgets = vk::PhysicalDeviceMemoryBudgetPropertiesEXT::default();
    let mut chain = vk::PhysicalDeviceMemoryProperties2::default();
    if budget {
        chain = chain.push_next(&mut budgets);
    }
    // SAFETY: `physical` is the instance's, and has VK_EXT_memory_budget if `budget` says so.
    unsafe { raw.get_physical_device_memory_properties2(physical, &mut chain) };
    let memory = chain.memory_properties;
    let per_heap = budgets.heap_budget.iter().zip(&budgets.heap_usage);
    memory
        .memory_heaps_as_slice()
        .iter()
        .zip(per_heap)
        .map(|(heap, (&heap_budget, &usage_bytes))| Heap {
            bytes: heap.size,
            budget_bytes: if budget { heap_budget } else { heap.size / 10 * 8 },
            usage_bytes,
            device_local: heap.flags.contains(vk::MemoryHeapFlags::DEVICE_LOCAL),
        })
        .collect()
}

impl From<&vk::QueueFamilyProperties> for QueueFamily {
    fn from(family: &vk::QueueFamilyProperties) -> Self {
        Self {
            flags: family.queue_flags,
            count: family.queue_count,
            timestamp_bits: family.timestamp_valid_bits,
        }
    }
}

/// Extensions of the device that the engine knows.
fn extension_names(raw: &ash::Instance, physical: vk::PhysicalDevice) -> Result<Vec<CString>> {
    // SAFETY: `physical` was listed by this instance.
    let all = unsafe { raw.enumerate_device_extension_properties(physical) }
        .map_err(|result| Error::Vulkan { action: "list the device extensions".into(), result })?;
    Ok(all
        .iter()
        .filter_map(|property| property.extension_name_as_c_str().ok())
        .filter(|name| REQUIRED_EXTENSIONS.contains(name) || OPTIONAL_EXTENSIONS.contains(name))
        .map(CStr::to_owned)
        .collect())
}

fn matrix_shapes(instance: &Instance, physical: vk::PhysicalDevice) -> Result<Vec<MatrixShape>> {
    let matrix = khr::cooperative_matrix::Instance::new(instance.entry(), instance.raw());
    // SAFETY: the device has VK_KHR_cooperative_matrix: its feature was just seen.
    let shapes = unsafe { matrix.get_physical_device_cooperative_matrix_properties(physical) }
        .map_err(|result| Error::Vulkan { action: "list the matrix shapes".into(), result })?;
    Ok(shapes
        .iter()
        .map(|shape| MatrixShape {
            m: shape.m_size,
            n: shape.n_size,
            k: shape.k_size,
            a: shape.a_type,
            b: shape.b_type,
            c: shape.c_type,
            result: shape.result_type,
            saturating: shape.saturating_accumulation == vk::TRUE,
            scope: shape.scope,
        })
        .collect())
}
