//! The barriers: full memory access over the stages that the engine uses, or less where only kernels come
//! before and after, as in all but a few places of a pass.

use ash::vk;

/// Which accesses a barrier puts after those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum After {
    /// Kernels and copies.
    Device,
    /// Kernels.
    Kernels,
    /// Reads by the host, once the submission's point is reached.
    HostRead,
}

/// The stages of a queue family in which the engine touches memory.
pub(super) fn stages(family: vk::QueueFlags) -> vk::PipelineStageFlags2 {
    match family.contains(vk::QueueFlags::COMPUTE) {
        true => vk::PipelineStageFlags2::COMPUTE_SHADER | vk::PipelineStageFlags2::ALL_TRANSFER,
        false => vk::PipelineStageFlags2::ALL_TRANSFER,
    }
}

/// A full memory barrier; `stages` are those of the queue family.
pub(super) fn full(stages: vk::PipelineStageFlags2, after: After) -> vk::MemoryBarrier2<'static> {
    let written = vk::AccessFlags2::MEMORY_READ | vk::AccessFlags2::MEMORY_WRITE;
    let barrier = vk::MemoryBarrier2::default().src_stage_mask(stages).src_access_mask(written);
    match after {
        After::Device => barrier.dst_stage_mask(stages).dst_access_mask(written),
        After::Kernels => to_kernels(barrier),
        After::HostRead => barrier
            .dst_stage_mask(vk::PipelineStageFlags2::HOST)
            .dst_access_mask(vk::AccessFlags2::HOST_READ),
    }
}

/// Kernels after kernels.
pub(super) fn between_kernels() -> vk::MemoryBarrier2<'static> {
    let barrier = vk::MemoryBarrier2::default()
        .src_stage_mask(vk::PipelineStageFlags2::COMPUTE_SHADER)
        .src_access_mask(vk::AccessFlags2::SHADER_STORAGE_WRITE);
    to_kernels(barrier)
}

fn to_kernels(barrier: vk::MemoryBarrier2<'static>) -> vk::MemoryBarrier2<'static> {
    let storage = vk::AccessFlags2::SHADER_STORAGE_READ | vk::AccessFlags2::SHADER_STORAGE_WRITE;
    barrier.dst_stage_mask(vk::PipelineStageFlags2::COMPUTE_SHADER).dst_access_mask(storage)
}
