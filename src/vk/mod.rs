//! The Vulkan base: everything that touches a driver, and nothing that knows a model.
//!
//! Reading order: `instance` finds the devices that `info` describes and `choose` picks from;
//! `lanes` maps the two logical lanes to queues; `device` owns allocator, queues and the list of
//! things to destroy later (`retire`); `memory`, `pipeline`, `query` are the objects, `import` makes
//! buffers of host pages, such as an `arena`'s; `clock` and `calibrate` put ticks of all queues and the
//! host on one clock; `command` records with them, `barrier` being the only barrier; `timeline` says
//! when submitted work is done. `faults` lets tests have bad drivers, and `late` lanes.
//!
//! Rules of this zone: one `unsafe` operation a block, with a `// SAFETY:` line that names the
//! owner of every handle and the timeline point after which it may go; every object is RAII and has
//! a debug name; an object that is dropped while the device may still use it is destroyed once both
//! lanes passed the last submission made before the drop.

mod arena;
mod barrier;
mod cache;
mod calibrate;
mod choose;
mod clock;
mod command;
mod debug;
mod device;
mod faults;
mod features;
mod import;
mod info;
mod instance;
mod kind;
mod lanes;
mod late;
mod memory;
mod messages;
mod pipeline;
mod query;
mod raw;
mod retire;
mod timeline;

pub use arena::Arena;
pub(crate) use cache::replace_file;
pub use choose::{choose, visible_devices};
pub use clock::{Calibration, Clock, HostClock, TickFormat};
pub use command::{Binding, Commands, Recorder, Region, Replay};
pub use device::{CacheFile, Device, DeviceOptions};
pub use faults::Faults;
pub use import::HostPages;
pub use info::{
    DeviceInfo, DeviceKind, Heap, Limits, MatrixShape, Optional, QueueFamily, SubgroupSizes, Vendor,
};
pub use instance::{Instance, InstanceOptions, Validation};
pub use lanes::{CopyQueue, Lane, LanePlan, QueueId, plan_lanes};
pub use memory::{Buffer, MemoryKind};
pub use pipeline::{MAX_BINDINGS, MAX_PUSH_BYTES, Pipeline, PipelineInfo, Subgroups};
pub use query::QueryPool;
pub use timeline::{Point, Timeline};

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Held while an instance or a device comes or goes: with NVIDIA's driver (580.159) tests that do so on
/// many threads hung now and then, and did not since.
static COMING_AND_GOING: Mutex<()> = Mutex::new(());

/// Locks, also after a panic of another thread: what our mutexes guard is valid at every step.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
