//! Compute pipelines: storage buffers as push descriptors, one block of push constants,
//! specialization constants.
#![allow(unsafe_code, reason = "creates pipelines, layouts and shader modules")]

use std::sync::Arc;

use ash::vk;

use super::debug;
use super::device::Device;
use super::retire::Garbage;
use crate::{Error, Result};

/// Most storage buffers of a kernel.
pub const MAX_BINDINGS: u32 = 16;
/// Most push constant bytes: what every Vulkan device has.
pub const MAX_PUSH_BYTES: u32 = 128;

/// What a kernel asks of subgroups.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Subgroups {
    /// Nothing.
    #[default]
    Any,
    /// All invocations of each are there (the workgroup's x is a multiple of the size).
    Full,
    /// Full ones of this size.
    FullOf(u32),
}

/// What a pipeline is made of.
#[derive(Clone, Copy, Debug, Default)]
pub struct PipelineInfo<'a> {
    /// Its name: `mul_mat_id.q4_k`.
    pub name: &'a str,
    /// The module, whose entry point is `main`.
    pub spirv: &'a [u32],
    /// Storage buffers: bindings 0 to n of set 0.
    pub n_bindings: u32,
    /// Size of the push constants.
    pub push_bytes: u32,
    /// Specialization constants with ids 0 to n.
    pub spec: &'a [u32],
    /// Subgroups.
    pub subgroups: Subgroups,
}

/// A compute pipeline. A clone is another handle of the same one.
#[derive(Clone)]
pub struct Pipeline(Arc<Inner>);

struct Inner {
    device: Arc<Device>,
    name: String,
    pipeline: vk::Pipeline,
    layout: vk::PipelineLayout,
    set: vk::DescriptorSetLayout,
    n_bindings: u32,
    push_bytes: u32,
}

impl Pipeline {
    /// Compiles, or takes from the pipeline cache.
    pub fn new(device: &Arc<Device>, info: &PipelineInfo<'_>) -> Result<Self> {
        assert!(info.n_bindings <= MAX_BINDINGS, "{}: {} bindings", info.name, info.n_bindings);
        assert!(
            info.push_bytes <= MAX_PUSH_BYTES && info.push_bytes.is_multiple_of(4),
            "{}: {} bytes of push constants",
            info.name,
            info.push_bytes
        );
        check_subgroups(device, info)?;
        // From here on `inner` destroys what has been made, null handles included.
        let mut inner = Inner {
            device: device.clone(),
            name: info.name.to_owned(),
            pipeline: vk::Pipeline::null(),
            layout: vk::PipelineLayout::null(),
            set: vk::DescriptorSetLayout::null(),
            n_bindings: info.n_bindings,
            push_bytes: info.push_bytes,
        };
        let fail =
            |result| device.raw().error(format!("create the pipeline {}", info.name), result);
        inner.set = create_set_layout(device, info.n_bindings).map_err(fail)?;
        inner.layout = create_layout(device, inner.set, info.push_bytes).map_err(fail)?;
        inner.pipeline = create_pipeline(device, inner.layout, info).map_err(fail)?;
        debug::name(device.raw(), inner.set, &format!("set_layout.{}", info.name));
        debug::name(device.raw(), inner.layout, &format!("layout.{}", info.name));
        debug::name(device.raw(), inner.pipeline, &format!("kernel.{}", info.name));
        Ok(Self(Arc::new(inner)))
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Number of storage buffers.
    pub fn n_bindings(&self) -> u32 {
        self.0.n_bindings
    }

    /// Size of the push constants.
    pub fn push_bytes(&self) -> u32 {
        self.0.push_bytes
    }

    pub(super) fn vk(&self) -> vk::Pipeline {
        self.0.pipeline
    }

    pub(super) fn layout(&self) -> vk::PipelineLayout {
        self.0.layout
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let Inner { pipeline, layout, set, .. } = *self;
        self.device.retire(Garbage::Pipeline { pipeline, layout, set });
    }
}

fn check_subgroups(device: &Device, info: &PipelineInfo<'_>) -> Result<()> {
    let Subgroups::FullOf(size) = info.subgroups else { return Ok(()) };
    let has = device.info().subgroup;
    if has.selectable && size.is_power_of_two() && (has.min..=has.max).contains(&size) {
        return Ok(());
    }
    Err(Error::Vulkan {
        action: format!(
            "create the pipeline {}: subgroups of {size}, the device has {} to {}",
            info.name, has.min, has.max
        ),
        result: vk::Result::ERROR_FEATURE_NOT_PRESENT,
    })
}

fn create_set_layout(
    device: &Device,
    n_bindings: u32,
) -> std::result::Result<vk::DescriptorSetLayout, vk::Result> {
    let bindings: Vec<_> = (0..n_bindings)
        .map(|binding| {
            vk::DescriptorSetLayoutBinding::default()
                .binding(binding)
                .descriptor_type(vk::DescriptorType::STORAGE_BUFFER)
                .descriptor_count(1)
                .stage_flags(vk::ShaderStageFlags::COMPUTE)
        })
        .collect();
    let info = vk::DescriptorSetLayoutCreateInfo::default()
        .flags(vk::DescriptorSetLayoutCreateFlags::PUSH_DESCRIPTOR_KHR)
        .bindings(&bindings);
    // SAFETY: the device outlives the layout, whose owner holds an `Arc` of it.
    unsafe { device.raw().vk().create_descriptor_set_layout(&info, None) }
}

fn create_layout(
    device: &Device,
    set: vk::DescriptorSetLayout,
    push_bytes: u32,
) -> std::result::Result<vk::PipelineLayout, vk::Result> {
    let sets = [set];
    let ranges = [vk::PushConstantRange::default()
        .stage_flags(vk::ShaderStageFlags::COMPUTE)
        .size(push_bytes)];
    let ranges = if push_bytes > 0 { &ranges[..] } else { &[] };
    let info =
        vk::PipelineLayoutCreateInfo::default().set_layouts(&sets).push_constant_ranges(ranges);
    // SAFETY: as the set layout, which is alive.
    unsafe { device.raw().vk().create_pipeline_layout(&info, None) }
}

fn create_pipeline(
    device: &Device,
    layout: vk::PipelineLayout,
    info: &PipelineInfo<'_>,
) -> std::result::Result<vk::Pipeline, vk::Result> {
    let raw = device.raw().vk();
    let module_info = vk::ShaderModuleCreateInfo::default().code(info.spirv);
    // SAFETY: the code is SPIR-V that our build made and checked.
    let module = unsafe { raw.create_shader_module(&module_info, None) }?;

    let entries: Vec<_> = (0..)
        .zip(info.spec)
        .map(|(id, _)| vk::SpecializationMapEntry { constant_id: id, offset: id * 4, size: 4 })
        .collect();
    let spec = vk::SpecializationInfo::default()
        .map_entries(&entries)
        .data(bytemuck::cast_slice(info.spec));
    let mut size = vk::PipelineShaderStageRequiredSubgroupSizeCreateInfo::default();
    let mut stage = vk::PipelineShaderStageCreateInfo::default()
        .stage(vk::ShaderStageFlags::COMPUTE)
        .module(module)
        .name(c"main")
        .specialization_info(&spec);
    if info.subgroups != Subgroups::Any {
        stage = stage.flags(vk::PipelineShaderStageCreateFlags::REQUIRE_FULL_SUBGROUPS);
    }
    if let Subgroups::FullOf(wanted) = info.subgroups {
        size = size.required_subgroup_size(wanted);
        stage = stage.push_next(&mut size);
    }
    let create = vk::ComputePipelineCreateInfo::default()
        .flags(vk::PipelineCreateFlags::DISPATCH_BASE)
        .stage(stage)
        .layout(layout);
    let cache = device.cache().vk();
    // SAFETY: module and layout are alive, the cache as long as the device.
    let pipelines = unsafe { raw.create_compute_pipelines(cache, &[create], None) };
    // SAFETY: a pipeline does not need its module any more.
    unsafe { raw.destroy_shader_module(module, None) };
    match pipelines {
        Ok(pipelines) => pipelines.first().copied().ok_or(vk::Result::ERROR_UNKNOWN),
        Err((_, result)) => Err(result),
    }
}
