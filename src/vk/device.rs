//! A device with its queues, allocator and pipeline cache; submitting and waiting.
#![allow(unsafe_code, reason = "creates the VkDevice and its allocator, submits to queues")]

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ash::vk;

use super::barrier;
pub use super::cache::CacheFile;
use super::cache::PipelineCache;
use super::calibrate::Calibrator;
use super::clock::Calibration;
use super::command::Commands;
use super::debug;
use super::faults::FaultState;
use super::features::{Features, is_enabled};
use super::info::{self, DeviceInfo, DeviceKind, Heap};
use super::instance::Instance;
use super::lanes::{CopyQueue, Lane, LanePlan, QueueId, plan_lanes};
use super::late::Submission;
use super::raw::RawDevice;
use super::retire::{Garbage, LaneValues, PooledCommands, Retired};
use super::timeline::{Point, Timeline};
use super::{COMING_AND_GOING, lock};
use crate::{Error, Result};

/// How long a point that is reached soon is asked for.
const SOON: Duration = Duration::from_millis(20);

/// How to open a device.
#[derive(Clone, Debug, Default)]
pub struct DeviceOptions {
    /// Where the copy lane runs; `None`: the table in `plan_lanes` decides.
    pub copy_queue: Option<CopyQueue>,
    /// How long [`Device::wait`] waits; `None`: 60 s, and an hour on a CPU that plays GPU.
    pub wait_limit: Option<Duration>,
    /// Where compiled pipelines are kept.
    pub cache: CacheFile,
}

/// An open device. Its objects hold an `Arc` of it.
pub struct Device {
    // The order of the fields is the order of destruction: the first waits for the queues.
    retired: Retired,
    lanes: [LaneState; Lane::ALL.len()],
    cache: PipelineCache,
    allocator: Arc<vk_mem::Allocator>,
    calibrator: Option<Calibrator>,
    raw: Arc<RawDevice>,
    info: DeviceInfo,
    plan: LanePlan,
    wait_limit: Duration,
    instance: Arc<Instance>,
}

/// A lane: its queue, which another lane may share, and its timeline.
struct LaneState {
    queue: Arc<Mutex<vk::Queue>>,
    /// For every other one of those submissions that may run beside the one before.
    beside: Option<Mutex<vk::Queue>>,
    flags: vk::QueueFlags,
    timeline: Timeline,
    /// The last value submitted. Held during a submission, so that values ascend.
    submitted: Mutex<u64>,
}

impl Device {
    /// Opens a device that `instance` listed.
    pub fn open(
        instance: &Arc<Instance>,
        info: &DeviceInfo,
        options: DeviceOptions,
    ) -> Result<Arc<Self>> {
        if !info.missing.is_empty() {
            let missing = info.missing.join(", ");
            return Err(Error::NoDevice(format!("{} lacks {missing}", info.name)));
        }
        let plan = plan_lanes(info, options.copy_queue)?;
        let raw = Arc::new(create(instance, info, &plan)?);
        debug::name(&raw, raw.vk().handle(), "device");
        let allocator = Arc::new(create_allocator(instance, info, &raw)?);
        let lanes = open_lanes(&raw, info, &plan)?;
        let cache = PipelineCache::open(&raw, info, &options.cache)?;
        let default_limit = match info.kind {
            DeviceKind::Cpu => Duration::from_secs(3600),
            _ => Duration::from_secs(60),
        };
        log::debug!("{}: {plan:?}", info.name);
        Ok(Arc::new(Self {
            retired: Retired::new(&raw, &allocator),
            lanes,
            cache,
            allocator,
            calibrator: Calibrator::new(instance, info, &raw)?,
            raw,
            info: info.clone(),
            plan,
            wait_limit: options.wait_limit.unwrap_or(default_limit),
            instance: instance.clone(),
        }))
    }

    /// This device, or the same opened anew if its copy lane runs on another queue.
    pub fn with_copy_queue(self: Arc<Self>, queue: CopyQueue) -> Result<Arc<Self>> {
        if plan_lanes(&self.info, Some(queue))? == self.plan {
            return Ok(self);
        }
        let options = DeviceOptions { copy_queue: Some(queue), ..DeviceOptions::default() };
        Self::open(&self.instance, &self.info, options)
    }

    /// What was asked when the device was listed; budgets are of then.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// The instance.
    pub fn instance(&self) -> &Arc<Instance> {
        &self.instance
    }

    /// The queues of the lanes.
    pub fn lane_plan(&self) -> LanePlan {
        self.plan
    }

    /// The heaps and their budgets, now.
    pub fn memory_budget(&self) -> Vec<Heap> {
        let mut heaps = self.true_budget();
        if let Some(injected) = self.raw.injected() {
            injected.budget(&mut heaps);
        }
        heaps
    }

    /// [`Self::memory_budget`] without injected faults.
    pub(super) fn true_budget(&self) -> Vec<Heap> {
        let budget = self.info.optional.memory_budget;
        let mut heaps = info::heaps(self.instance.raw(), self.info.physical, budget);
        if !budget && let Ok(own) = self.allocator.get_heap_budgets() {
            for (heap, own) in heaps.iter_mut().zip(own) {
                heap.usage_bytes = own.usage;
            }
        }
        heaps
    }

    /// The memory types, in the driver's order.
    pub(super) fn memory_types(&self) -> Vec<vk::MemoryType> {
        let raw = self.instance.raw();
        // SAFETY: the physical device is the instance's, which lives as long as `self`.
        let memory = unsafe { raw.get_physical_device_memory_properties(self.info.physical) };
        let mut types = memory.memory_types_as_slice().to_vec();
        if self.raw.injected().is_some_and(FaultState::non_coherent) {
            for kind in &mut types {
                kind.property_flags &= !vk::MemoryPropertyFlags::HOST_COHERENT;
            }
        }
        types
    }

    /// The same moment on the device's clock and on the host's: what makes ticks of all queues and
    /// instants of the host comparable, see [`Clock`](super::Clock). `None`: this device cannot tell.
    /// Takes some microseconds.
    pub fn calibration(&self) -> Result<Option<Calibration>> {
        self.calibrator.as_ref().map(|calibrator| calibrator.sample(&self.raw)).transpose()
    }

    /// The timeline of a lane.
    pub fn timeline(&self, lane: Lane) -> &Timeline {
        &self.lane(lane).timeline
    }

    /// Submits recorded commands to a lane, which start once `waits` are reached (all earlier work
    /// of those lanes, its memory writes included). The result is reached once they are done.
    ///
    /// Submissions to one lane start in order but overlap: commands that use what an earlier
    /// submission of the same lane wrote begin with [`Recorder::barrier`](super::Recorder::barrier).
    /// Submit producers before consumers: lanes may share a queue.
    pub fn submit(&self, lane: Lane, commands: &[&Commands], waits: &[Point]) -> Result<Point> {
        self.submit_as(false, lane, commands, waits)
    }

    /// As [`Self::submit`], for commands that need nothing of what earlier submissions of the lane do, unless `waits` says
    /// so: they may run beside the one before, on a queue of their own. Points are still reached in order.
    pub fn submit_beside(
        &self,
        lane: Lane,
        commands: &[&Commands],
        waits: &[Point],
    ) -> Result<Point> {
        self.submit_as(true, lane, commands, waits)
    }

    fn submit_as(
        &self,
        beside: bool,
        lane: Lane,
        commands: &[&Commands],
        waits: &[Point],
    ) -> Result<Point> {
        let mut submitted = lock(&self.lane(lane).submitted);
        let point = Point { lane, value: *submitted + 1 };
        let submission = Submission {
            beside,
            point,
            commands: commands.iter().map(|commands| commands.begin_submit(lane)).collect(),
            waits: waits.to_vec(),
        };
        match self.raw.injected() {
            None => self.pass_on(&submission)?,
            Some(injected) => {
                let uses_import = commands.iter().any(|commands| commands.use_import());
                let alive = injected.submit(uses_import);
                alive.map_err(|result| self.submit_error(point, result))?;
                match injected.late() {
                    Some(late) => late.take(submission, |due| self.pass_on(due))?,
                    None => self.pass_on(&submission)?,
                }
            }
        }
        *submitted = point.value;
        drop(submitted);

        self.collect();
        Ok(point)
    }

    /// Gives a submission to the queue of its lane.
    fn pass_on(&self, submission: &Submission) -> Result<()> {
        let Submission { beside, point, commands, waits } = submission;
        let state = self.lane(point.lane);
        let before = Point { value: point.value - 1, ..*point };
        let buffers: Vec<_> = commands
            .iter()
            .map(|&buffer| vk::CommandBufferSubmitInfo::default().command_buffer(buffer))
            .collect();
        let mut waits: Vec<_> =
            waits.iter().map(|wait| self.wait_info(point.lane, *wait)).collect();
        // With two queues the order of submissions is only what is waited for.
        let in_order = self.wait_info(point.lane, before);
        if state.beside.is_some() && !beside {
            waits.push(in_order);
        }
        let signals = [vk::SemaphoreSubmitInfo::default()
            .semaphore(state.timeline.semaphore())
            .value(point.value)
            .stage_mask(vk::PipelineStageFlags2::ALL_COMMANDS)];
        let submit =
            vk::SubmitInfo2::default().command_buffer_infos(&buffers).wait_semaphore_infos(&waits);
        let in_order = [in_order];
        let (queue, submits) = match &state.beside {
            Some(other) if *beside => {
                let queue = if point.value.is_multiple_of(2) { other } else { &*state.queue };
                let signal = vk::SubmitInfo2::default()
                    .wait_semaphore_infos(&in_order)
                    .signal_semaphore_infos(&signals);
                (queue, vec![submit, signal])
            }
            _ => (&*state.queue, vec![submit.signal_semaphore_infos(&signals)]),
        };
        let queue = lock(queue);
        // SAFETY: the queue is locked; the command buffers' owners destroy them, and what they use,
        // through `Retired`, after the point that this submission signals.
        unsafe { self.raw.vk().queue_submit2(*queue, &submits, vk::Fence::null()) }
            .map_err(|result| self.submit_error(*point, result))
    }

    fn submit_error(&self, point: Point, result: vk::Result) -> Error {
        self.raw.error(format!("submit {} to {}", point.value, point.lane.name()), result)
    }

    /// Before a point is waited for: a late lane goes on that far.
    fn release(&self, point: Point) -> Result<()> {
        match self.raw.injected().and_then(FaultState::late) {
            Some(late) => late.release(point, |due| self.pass_on(due)),
            None => Ok(()),
        }
    }

    /// Waits for a point within the device's limit. `what` names it in errors: "layer 3".
    pub fn wait(&self, point: Point, what: &str) -> Result<()> {
        self.wait_within(point, what, self.wait_limit)
    }

    /// As [`Self::wait`], for a point that is reached soon: being woken up takes a driver tens of
    /// microseconds, which counts where a submission takes two milliseconds. A CPU that plays GPU has
    /// better things to do than to be asked.
    pub fn wait_soon(&self, point: Point, what: &str) -> Result<()> {
        self.release(point)?;
        if self.info.kind != DeviceKind::Cpu {
            self.timeline(point.lane).poll(point.value, SOON)?;
        }
        self.wait(point, what)
    }

    /// As [`Self::wait`], with a limit of its own.
    pub fn wait_within(&self, point: Point, what: &str, limit: Duration) -> Result<()> {
        self.release(point)?;
        self.timeline(point.lane).wait(point.value, what, limit)?;
        self.collect();
        Ok(())
    }

    /// Whether a point is reached, without waiting.
    pub fn is_reached(&self, point: Point) -> Result<bool> {
        self.release(point)?;
        self.timeline(point.lane).is_reached(point.value)
    }

    /// Waits until nothing that was submitted is left.
    pub fn wait_all(&self, what: &str) -> Result<()> {
        for (lane, value) in Lane::ALL.into_iter().zip(self.submitted()) {
            self.wait(Point { lane, value }, what)?;
        }
        Ok(())
    }

    /// Whether the device is gone; then every further call fails.
    pub fn is_lost(&self) -> bool {
        self.raw.is_lost()
    }

    /// Writes the pipeline cache to its file; also done when the device is closed.
    pub fn save_pipeline_cache(&self) {
        self.cache.save();
    }

    fn lane(&self, lane: Lane) -> &LaneState {
        &self.lanes[lane.index()]
    }

    fn wait_info(&self, waiting: Lane, point: Point) -> vk::SemaphoreSubmitInfo<'static> {
        vk::SemaphoreSubmitInfo::default()
            .semaphore(self.timeline(point.lane).semaphore())
            .value(point.value)
            .stage_mask(self.stages(waiting))
    }

    /// The last values submitted to the lanes.
    fn submitted(&self) -> LaneValues {
        Lane::ALL.map(|lane| *lock(&self.lane(lane).submitted))
    }

    /// Destroys what was dropped and is no longer used.
    pub(super) fn collect(&self) {
        if self.retired.is_empty() {
            return;
        }
        // A lost device completes nothing more; `Retired::drop` clears the list then.
        if let (Ok(compute), Ok(copy)) =
            (self.timeline(Lane::Compute).completed(), self.timeline(Lane::Copy).completed())
        {
            self.retired.collect([compute, copy]);
        }
    }

    /// Takes a dropped object: destroyed at once if both lanes are idle, else later.
    pub(super) fn retire(&self, garbage: Garbage) {
        self.retired.add(self.submitted(), garbage);
        self.collect();
    }

    pub(super) fn take_commands(&self, lane: Lane) -> Option<PooledCommands> {
        self.retired.take_commands(lane)
    }

    pub(super) fn raw(&self) -> &RawDevice {
        &self.raw
    }

    pub(super) fn allocator(&self) -> &vk_mem::Allocator {
        &self.allocator
    }

    pub(super) fn cache(&self) -> &PipelineCache {
        &self.cache
    }

    /// What the queue family of a lane can do.
    pub(super) fn queue_flags(&self, lane: Lane) -> vk::QueueFlags {
        self.lane(lane).flags
    }

    /// The stages in which a lane's commands touch memory.
    pub(super) fn stages(&self, lane: Lane) -> vk::PipelineStageFlags2 {
        barrier::stages(self.queue_flags(lane))
    }
}

/// Creates the VkDevice with all known extensions and features that it has. Robustness stays off:
/// it costs speed, and the kernels keep their bounds themselves.
fn create(instance: &Instance, info: &DeviceInfo, plan: &LanePlan) -> Result<RawDevice> {
    let queues = queue_counts(plan);
    let priorities = [1.0f32; 2];
    let queue_infos: Vec<_> = queues
        .iter()
        .map(|(&family, &count)| {
            vk::DeviceQueueCreateInfo::default()
                .queue_family_index(family)
                .queue_priorities(&priorities[..count])
        })
        .collect();
    let present = info.extensions.iter().map(|name| name.as_c_str());
    let names: Vec<&CStr> = present.filter(|name| is_enabled(name, &info.extensions)).collect();
    let name_pointers: Vec<_> = names.iter().map(|name| name.as_ptr()).collect();
    let mut features = Features::to_enable(&info.optional);
    let mut features = features.link(&names);
    let create = vk::DeviceCreateInfo::default()
        .queue_create_infos(&queue_infos)
        .enabled_extension_names(&name_pointers)
        .push_next(&mut features);
    let alone = lock(&COMING_AND_GOING);
    // SAFETY: `info` came from this instance, which the new device's owner keeps; extensions and
    // features are ones that it has.
    let device = unsafe { instance.raw().create_device(info.physical, &create, None) }
        .map_err(|result| Error::Vulkan { action: format!("open {}", info.name), result })?;
    drop(alone);
    Ok(RawDevice::new(instance, device, info))
}

/// How many queues of each family the plan uses: at most two.
fn queue_counts(plan: &LanePlan) -> BTreeMap<u32, usize> {
    let mut counts = BTreeMap::new();
    for QueueId { family, index } in [plan.compute, plan.copy].into_iter().chain(plan.copy_beside) {
        let count = counts.entry(family).or_insert(0);
        *count = (index as usize + 1).max(*count);
    }
    counts
}

fn create_allocator(
    instance: &Instance,
    info: &DeviceInfo,
    raw: &RawDevice,
) -> Result<vk_mem::Allocator> {
    use vk_mem::AllocatorCreateFlags as Flags;
    let mut create = vk_mem::AllocatorCreateInfo::new(instance.raw(), raw.vk(), info.physical);
    create.vulkan_api_version = vk::API_VERSION_1_3;
    create.flags = Flags::BUFFER_DEVICE_ADDRESS;
    create.flags.set(Flags::EXT_MEMORY_BUDGET, info.optional.memory_budget);
    create.flags.set(Flags::EXT_MEMORY_PRIORITY, info.optional.memory_priority);
    // SAFETY: the owner of the allocator keeps the device and, after it, the instance.
    unsafe { vk_mem::Allocator::new(create) }
        .map_err(|result| raw.error("create the memory allocator", result))
}

/// Makes the lanes; those on the same queue share its lock.
fn open_lanes(
    raw: &Arc<RawDevice>,
    info: &DeviceInfo,
    plan: &LanePlan,
) -> Result<[LaneState; Lane::ALL.len()]> {
    let compute = Arc::new(open_queue(raw, plan.compute, "queue.compute"));
    let copy = match plan.copy == plan.compute {
        true => compute.clone(),
        false => Arc::new(open_queue(raw, plan.copy, "queue.copy")),
    };
    let beside = plan.copy_beside.map(|id| open_queue(raw, id, "queue.copy-beside"));
    let lane = |lane, queue, beside| -> Result<LaneState> {
        let family = info.queue_families.get(plan.queue(lane).family as usize);
        Ok(LaneState {
            queue,
            beside,
            flags: family.map(|family| family.flags).unwrap_or_default(),
            timeline: Timeline::new(raw, lane)?,
            submitted: Mutex::new(0),
        })
    };
    Ok([lane(Lane::Compute, compute, None)?, lane(Lane::Copy, copy, beside)?])
}

fn open_queue(raw: &RawDevice, id: QueueId, name: &str) -> Mutex<vk::Queue> {
    // SAFETY: the device was created with this queue, see `queue_counts`.
    let queue = unsafe { raw.vk().get_device_queue(id.family, id.index) };
    debug::name(raw, queue, name);
    Mutex::new(queue)
}
