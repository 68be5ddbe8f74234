//! Recording: copies, dispatches, barriers, timestamps.
#![allow(unsafe_code, reason = "records into command buffers")]

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ash::vk;
use glam::UVec3;

use super::barrier::{self, After};
use super::debug;
use super::device::Device;
use super::lanes::Lane;
use super::memory::Buffer;
use super::pipeline::{MAX_BINDINGS, Pipeline};
use super::query::QueryPool;
use super::retire::{Garbage, PooledCommands};
use crate::Result;

/// How often commands are submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replay {
    /// Once.
    Once,
    /// Any number of times, also again before the previous submission is done.
    Many,
}

/// A storage buffer range for a kernel.
#[derive(Clone, Copy)]
pub struct Binding<'a> {
    /// The buffer.
    pub buffer: &'a Buffer,
    /// Start of the range, a multiple of `Limits::storage_offset_alignment`.
    pub offset: u64,
    /// Length of the range.
    pub bytes: u64,
}

impl<'a> From<&'a Buffer> for Binding<'a> {
    /// The whole buffer.
    fn from(buffer: &'a Buffer) -> Self {
        Self { buffer, offset: 0, bytes: buffer.bytes() }
    }
}

/// A range to copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Start in the source.
    pub from: u64,
    /// Start in the target.
    pub to: u64,
    /// Length.
    pub bytes: u64,
}

/// Commands being recorded for a lane. Everything that they use is kept alive by them.
pub struct Recorder {
    commands: Commands,
    bound: Option<vk::Pipeline>,
    order: Order,
}

/// What is known of the order of commands. A barrier is recorded once it is known what comes after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Order {
    /// A barrier is due.
    due: bool,
    /// Something was copied since the last one; before the first, submissions before may have.
    copied: bool,
    /// Copies are behind the last one, too, not only kernels.
    holds_for_copies: bool,
}

/// Recorded commands, to be submitted. What they use lives as long as they do, and as the device
/// works on them; memory that kernels reach by address is theirs only after [`Recorder::keep`].
pub struct Commands {
    device: Arc<Device>,
    pooled: PooledCommands,
    lane: Lane,
    replay: Replay,
    used: AtomicBool,
    buffers: Vec<Buffer>,
    pipelines: Vec<Pipeline>,
    queries: Vec<QueryPool>,
}

impl Recorder {
    /// Begins to record. `name`: `layer.3`.
    pub fn new(device: &Arc<Device>, lane: Lane, name: &str, replay: Replay) -> Result<Self> {
        let pooled = match device.take_commands(lane) {
            Some(pooled) => pooled,
            None => create(device, lane)?,
        };
        let commands = Commands {
            device: device.clone(),
            pooled,
            lane,
            replay,
            used: AtomicBool::new(false),
            buffers: Vec::new(),
            pipelines: Vec::new(),
            queries: Vec::new(),
        };
        debug::name(device.raw(), pooled.buffer, name);
        let flags = match replay {
            Replay::Once => vk::CommandBufferUsageFlags::ONE_TIME_SUBMIT,
            Replay::Many => vk::CommandBufferUsageFlags::SIMULTANEOUS_USE,
        };
        let info = vk::CommandBufferBeginInfo::default().flags(flags);
        // SAFETY: the command buffer is new or was reset after its last submission.
        unsafe { device.raw().vk().begin_command_buffer(pooled.buffer, &info) }
            .map_err(|result| device.raw().error(format!("record {name}"), result))?;
        let order = Order { due: false, copied: true, holds_for_copies: true };
        Ok(Self { commands, bound: None, order })
    }

    /// The lane recorded for.
    pub fn lane(&self) -> Lane {
        self.commands.lane
    }

    /// Keeps a buffer alive as long as the commands: for those that kernels reach by address.
    pub fn keep(&mut self, buffer: &Buffer) {
        self.commands.buffers.push(buffer.clone());
    }

    /// Copies one range.
    pub fn copy(
        &mut self,
        from: &Buffer,
        from_offset: u64,
        to: &Buffer,
        to_offset: u64,
        bytes: u64,
    ) {
        self.copy_regions(from, to, &[Region { from: from_offset, to: to_offset, bytes }]);
    }

    /// Copies ranges of one buffer into another.
    pub fn copy_regions(&mut self, from: &Buffer, to: &Buffer, regions: &[Region]) {
        if regions.is_empty() {
            return;
        }
        let copies: Vec<_> = regions
            .iter()
            .map(|region| {
                from.check_range(region.from, region.bytes);
                to.check_target(region.to, region.bytes);
                vk::BufferCopy {
                    src_offset: region.from,
                    dst_offset: region.to,
                    size: region.bytes,
                }
            })
            .collect();
        self.keep(from);
        self.keep(to);
        self.before_copy();
        let device = self.commands.device.raw().vk();
        // SAFETY: the recorder owns the command buffer; the ranges were checked; both buffers are kept.
        unsafe { device.cmd_copy_buffer(self.buffer(), from.vk(), to.vk(), &copies) };
    }

    /// Fills a range, whose ends are multiples of 4, with copies of `value`.
    pub fn fill(&mut self, buffer: &Buffer, range: Range<u64>, value: u32) {
        assert!(range.start.is_multiple_of(4) && range.end.is_multiple_of(4), "fill of {range:?}");
        let bytes = range.end - range.start;
        buffer.check_target(range.start, bytes);
        self.keep(buffer);
        self.before_copy();
        let device = self.commands.device.raw().vk();
        // SAFETY: as in `copy_regions`.
        unsafe { device.cmd_fill_buffer(self.buffer(), buffer.vk(), range.start, bytes, value) };
    }

    /// Puts what follows after what was recorded or submitted to this lane before, memory included.
    pub fn barrier(&mut self) {
        self.order.due = true;
    }

    /// Makes what was written before readable by the host, once the submission's point is reached.
    pub fn host_barrier(&mut self) {
        self.record_barrier(barrier::full(self.stages(), After::HostRead));
    }

    fn before_copy(&mut self) {
        if self.order.due || !self.order.holds_for_copies {
            self.record_barrier(barrier::full(self.stages(), After::Device));
        }
        self.order = Order { due: false, copied: true, holds_for_copies: true };
    }

    fn before_kernel(&mut self) {
        if !self.order.due {
            return;
        }
        match self.order.copied {
            true => self.record_barrier(barrier::full(self.stages(), After::Kernels)),
            false => self.record_barrier(barrier::between_kernels()),
        }
        self.order = Order { due: false, copied: false, holds_for_copies: false };
    }

    fn stages(&self) -> vk::PipelineStageFlags2 {
        self.commands.device.stages(self.lane())
    }

    fn record_barrier(&mut self, barrier: vk::MemoryBarrier2<'static>) {
        let barriers = [barrier];
        let info = vk::DependencyInfo::default().memory_barriers(&barriers);
        // SAFETY: the recorder owns the command buffer; the stages are those of its queue family.
        unsafe { self.commands.device.raw().vk().cmd_pipeline_barrier2(self.buffer(), &info) };
    }

    /// Runs a kernel over the workgroups from `base` to `base + groups`; a grid can so be split over
    /// submissions. `push` are its push constants, `bindings` its storage buffers from binding 0.
    pub fn dispatch(
        &mut self,
        pipeline: &Pipeline,
        push: &[u8],
        bindings: &[Binding<'_>],
        groups: UVec3,
        base: UVec3,
    ) {
        self.check_grid(pipeline, groups, base);
        self.before_kernel();
        self.bind(pipeline);
        self.push_constants(pipeline, push);
        self.push_bindings(pipeline, bindings);
        let device = self.commands.device.raw().vk();
        let ([x, y, z], [base_x, base_y, base_z]) = (groups.to_array(), base.to_array());
        // SAFETY: pipeline, constants and bindings are set and kept; the grid was checked.
        unsafe { device.cmd_dispatch_base(self.buffer(), base_x, base_y, base_z, x, y, z) };
    }

    fn check_grid(&self, pipeline: &Pipeline, groups: UVec3, base: UVec3) {
        let device = &self.commands.device;
        let flags = device.queue_flags(self.lane());
        assert!(
            flags.contains(vk::QueueFlags::COMPUTE),
            "kernel {} on a copy queue",
            pipeline.name()
        );
        let most = device.info().limits.workgroups;
        for (axis, most) in most.into_iter().enumerate() {
            let end = u64::from(groups[axis]) + u64::from(base[axis]);
            assert!(end <= u64::from(most), "kernel {}: {end} workgroups", pipeline.name());
        }
    }

    fn bind(&mut self, pipeline: &Pipeline) {
        if self.bound == Some(pipeline.vk()) {
            return;
        }
        self.bound = Some(pipeline.vk());
        self.commands.pipelines.push(pipeline.clone());
        let device = self.commands.device.raw().vk();
        let point = vk::PipelineBindPoint::COMPUTE;
        // SAFETY: the recorder owns the command buffer, which keeps the pipeline.
        unsafe { device.cmd_bind_pipeline(self.buffer(), point, pipeline.vk()) };
    }

    fn push_constants(&mut self, pipeline: &Pipeline, push: &[u8]) {
        let expected = pipeline.push_bytes() as usize;
        assert_eq!(push.len(), expected, "push constants of {}", pipeline.name());
        if push.is_empty() {
            return;
        }
        let device = self.commands.device.raw().vk();
        let (layout, stage) = (pipeline.layout(), vk::ShaderStageFlags::COMPUTE);
        // SAFETY: the layout has one range of exactly this length.
        unsafe { device.cmd_push_constants(self.buffer(), layout, stage, 0, push) };
    }

    fn push_bindings(&mut self, pipeline: &Pipeline, bindings: &[Binding<'_>]) {
        let expected = pipeline.n_bindings() as usize;
        assert_eq!(bindings.len(), expected, "bindings of {}", pipeline.name());
        if bindings.is_empty() {
            return;
        }
        let limits = self.commands.device.info().limits;
        let mut infos = [vk::DescriptorBufferInfo::default(); MAX_BINDINGS as usize];
        for (info, binding) in infos.iter_mut().zip(bindings) {
            binding.buffer.check_range(binding.offset, binding.bytes);
            assert!(
                binding.bytes <= limits.storage_range_bytes
                    && binding.offset.is_multiple_of(limits.storage_offset_alignment),
                "kernel {}: {} bytes at {} of buffer {}",
                pipeline.name(),
                binding.bytes,
                binding.offset,
                binding.buffer.name()
            );
            self.keep(binding.buffer);
            *info = vk::DescriptorBufferInfo::default()
                .buffer(binding.buffer.vk())
                .offset(binding.offset)
                .range(binding.bytes);
        }
        // Consecutive bindings of one type: one write covers them all only within one binding's
        // array, so there is a write for each.
        let mut writes = [vk::WriteDescriptorSet::default(); MAX_BINDINGS as usize];
        for ((write, info), binding) in writes.iter_mut().zip(infos.chunks(1)).zip(0..) {
            *write = vk::WriteDescriptorSet::default()
                .dst_binding(binding)
                .descriptor_type(vk::DescriptorType::STORAGE_BUFFER)
                .buffer_info(info);
        }
        let push = self.commands.device.raw().push_descriptor();
        let point = vk::PipelineBindPoint::COMPUTE;
        let (layout, writes) = (pipeline.layout(), &writes[..bindings.len()]);
        // SAFETY: the set layout has these bindings; the buffers are kept and the ranges checked.
        unsafe { push.cmd_push_descriptor_set(self.buffer(), point, layout, 0, writes) };
    }

    /// Resets timestamps before they are written (again). Only on a lane that computes; else use
    /// [`QueryPool::reset`].
    pub fn reset_timestamps(&mut self, pool: &QueryPool, queries: Range<u32>) {
        pool.check_range(&queries);
        self.commands.queries.push(pool.clone());
        let device = self.commands.device.raw().vk();
        let count = queries.end - queries.start;
        // SAFETY: the recorder owns the command buffer, which keeps the pool; the range was checked.
        unsafe { device.cmd_reset_query_pool(self.buffer(), pool.vk(), queries.start, count) };
    }

    /// Writes a timestamp once everything before is done.
    pub fn write_timestamp(&mut self, pool: &QueryPool, query: u32) {
        pool.check_range(&(query..query + 1));
        self.commands.queries.push(pool.clone());
        let device = self.commands.device.raw().vk();
        let stage = vk::PipelineStageFlags2::ALL_COMMANDS;
        // SAFETY: as in `reset_timestamps`.
        unsafe { device.cmd_write_timestamp2(self.buffer(), stage, pool.vk(), query) };
    }

    /// Records `body` inside a debug label.
    pub fn label<R>(&mut self, name: &str, body: impl FnOnce(&mut Self) -> R) -> R {
        debug::begin(self.commands.device.raw(), self.buffer(), name);
        let result = body(self);
        debug::end(self.commands.device.raw(), self.buffer());
        result
    }

    /// Ends recording.
    pub fn finish(mut self) -> Result<Commands> {
        if self.order.due {
            self.record_barrier(barrier::full(self.stages(), After::Device));
        }
        let raw = self.commands.device.raw();
        // SAFETY: the recorder owns the command buffer; its labels are closed.
        unsafe { raw.vk().end_command_buffer(self.buffer()) }
            .map_err(|result| raw.error("end recording", result))?;
        Ok(self.commands)
    }

    fn buffer(&self) -> vk::CommandBuffer {
        self.commands.pooled.buffer
    }
}

impl Commands {
    /// The lane recorded for.
    pub fn lane(&self) -> Lane {
        self.lane
    }

    /// Whether they use imported memory, as far as they know: see [`Recorder::keep`].
    pub(super) fn use_import(&self) -> bool {
        self.buffers.iter().any(Buffer::is_imported)
    }

    /// The command buffer, to be submitted to `lane` now.
    pub(super) fn begin_submit(&self, lane: Lane) -> vk::CommandBuffer {
        assert_eq!(lane, self.lane, "commands recorded for another lane");
        let again = self.used.swap(true, Ordering::Relaxed);
        assert!(!again || self.replay == Replay::Many, "commands for one use submitted again");
        self.pooled.buffer
    }
}

impl Drop for Commands {
    fn drop(&mut self) {
        self.device.retire(Garbage::Commands { lane: self.lane, commands: self.pooled });
    }
}

/// A command buffer in a pool of its own.
fn create(device: &Device, lane: Lane) -> Result<PooledCommands> {
    let raw = device.raw();
    let family = device.lane_plan().queue(lane).family;
    let info = vk::CommandPoolCreateInfo::default().queue_family_index(family);
    // SAFETY: the device has this family.
    let pool = unsafe { raw.vk().create_command_pool(&info, None) }
        .map_err(|result| raw.error("create a command pool", result))?;
    let info = vk::CommandBufferAllocateInfo::default().command_pool(pool).command_buffer_count(1);
    // SAFETY: the pool was just created.
    match unsafe { raw.vk().allocate_command_buffers(&info) }.as_deref() {
        Ok(&[buffer]) => Ok(PooledCommands { pool, buffer }),
        other => {
            let result = other.err().unwrap_or(&vk::Result::ERROR_UNKNOWN);
            let error = raw.error("allocate a command buffer", *result);
            // SAFETY: nothing uses the pool.
            unsafe { raw.vk().destroy_command_pool(pool, None) };
            Err(error)
        }
    }
}
