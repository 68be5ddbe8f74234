//! Objects dropped while the device may still use them. They are destroyed once both lanes passed
//! the last submission made before the drop; what is dropped later cannot be used earlier.
#![allow(unsafe_code, reason = "destroys Vulkan objects")]

use std::sync::{Arc, Mutex};

use ash::vk;

use super::import::Imported;
use super::lanes::Lane;
use super::lock;
use super::raw::RawDevice;

/// An object that its owner gave up.
pub(super) enum Garbage {
    Buffer { buffer: vk::Buffer, allocation: vk_mem::Allocation },
    Import { buffer: vk::Buffer, imported: Imported },
    Pipeline { pipeline: vk::Pipeline, layout: vk::PipelineLayout, set: vk::DescriptorSetLayout },
    Commands { lane: Lane, commands: PooledCommands },
    QueryPool(vk::QueryPool),
}

/// A command buffer with a pool of its own: recording then needs no lock, on any thread.
#[derive(Clone, Copy)]
pub(super) struct PooledCommands {
    pub(super) pool: vk::CommandPool,
    pub(super) buffer: vk::CommandBuffer,
}

/// The last values submitted to the lanes, in the order of [`Lane::ALL`].
pub(super) type LaneValues = [u64; Lane::ALL.len()];

/// Owner of everything dropped, and of command buffers to be used again.
pub(super) struct Retired {
    raw: Arc<RawDevice>,
    allocator: Arc<vk_mem::Allocator>,
    waiting: Mutex<Vec<(LaneValues, Garbage)>>,
    idle_commands: [Mutex<Vec<PooledCommands>>; Lane::ALL.len()],
}

impl Retired {
    pub(super) fn new(raw: &Arc<RawDevice>, allocator: &Arc<vk_mem::Allocator>) -> Self {
        Self {
            raw: raw.clone(),
            allocator: allocator.clone(),
            waiting: Mutex::default(),
            idle_commands: Default::default(),
        }
    }

    /// Takes an object to be destroyed once `after` is reached.
    pub(super) fn add(&self, after: LaneValues, garbage: Garbage) {
        lock(&self.waiting).push((after, garbage));
    }

    /// Whether there is nothing to collect.
    pub(super) fn is_empty(&self) -> bool {
        lock(&self.waiting).is_empty()
    }

    /// Destroys what is no longer used, now that the lanes have reached `done`.
    pub(super) fn collect(&self, done: LaneValues) {
        let is_done =
            |after: &LaneValues| after.iter().zip(&done).all(|(after, done)| after <= done);
        let ready: Vec<_> =
            lock(&self.waiting).extract_if(.., |(after, _)| is_done(after)).collect();
        for (_, garbage) in ready {
            self.destroy(garbage);
        }
    }

    /// A command buffer that no submission uses, if there is one.
    pub(super) fn take_commands(&self, lane: Lane) -> Option<PooledCommands> {
        lock(&self.idle_commands[lane.index()]).pop()
    }

    fn destroy(&self, garbage: Garbage) {
        let device = self.raw.vk();
        match garbage {
            Garbage::Buffer { buffer, mut allocation } => {
                // SAFETY: its owner gave it up, and both lanes passed its last use.
                unsafe { self.allocator.destroy_buffer(buffer, &mut allocation) };
            }
            Garbage::Import { buffer, imported } => {
                // SAFETY: as the buffer.
                unsafe { device.destroy_buffer(buffer, None) };
                // SAFETY: the only buffer bound to it is gone.
                unsafe { device.free_memory(imported.memory, None) };
                // Unpinned before unmapped.
                drop(imported.pages);
            }
            Garbage::Pipeline { pipeline, layout, set } => {
                // SAFETY: as the buffer.
                unsafe { device.destroy_pipeline(pipeline, None) };
                // SAFETY: its only pipeline is gone.
                unsafe { device.destroy_pipeline_layout(layout, None) };
                // SAFETY: its only pipeline layout is gone; null is allowed.
                unsafe { device.destroy_descriptor_set_layout(set, None) };
            }
            Garbage::Commands { lane, commands } => self.recycle(lane, commands),
            Garbage::QueryPool(pool) => {
                // SAFETY: as the buffer.
                unsafe { device.destroy_query_pool(pool, None) };
            }
        }
    }

    fn recycle(&self, lane: Lane, commands: PooledCommands) {
        // SAFETY: its owner gave it up, and both lanes passed its last submission.
        let reset = unsafe {
            self.raw.vk().reset_command_pool(commands.pool, vk::CommandPoolResetFlags::empty())
        };
        match reset {
            Ok(()) => lock(&self.idle_commands[lane.index()]).push(commands),
            Err(_) => self.destroy_commands(commands),
        }
    }

    fn destroy_commands(&self, commands: PooledCommands) {
        // SAFETY: no submission uses the pool's only command buffer, which goes with it.
        unsafe { self.raw.vk().destroy_command_pool(commands.pool, None) };
    }
}

impl Drop for Retired {
    fn drop(&mut self) {
        // SAFETY: the `Device` is being dropped: no other thread can submit to its queues.
        if let Err(result) = unsafe { self.raw.vk().device_wait_idle() } {
            log::debug!("waiting for the device before closing it: {result}");
        }
        self.collect([u64::MAX; Lane::ALL.len()]);
        for lane in Lane::ALL {
            while let Some(commands) = self.take_commands(lane) {
                self.destroy_commands(commands);
            }
        }
    }
}
