//! The two logical lanes and the queues they run on. Pure: a table over what was queried.

use std::fmt;

use ash::vk;
use serde::{Deserialize, Serialize};

use super::info::{DeviceInfo, DeviceKind, QueueFamily, Vendor};
use crate::{Error, Result};

/// A logical stream of submissions with a timeline of its own. Two lanes may share a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lane {
    /// Kernels.
    Compute,
    /// Copies that run beside them.
    Copy,
}

impl Lane {
    /// Both lanes, in the order of `Lane::index`.
    pub const ALL: [Lane; 2] = [Lane::Compute, Lane::Copy];

    pub(super) fn index(self) -> usize {
        self as usize
    }

    /// `compute` or `copy`.
    pub fn name(self) -> &'static str {
        match self {
            Lane::Compute => "compute",
            Lane::Copy => "copy",
        }
    }
}

/// Where the copy lane runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CopyQueue {
    /// On the compute lane's queue.
    Same,
    /// On another queue that can compute.
    SecondCompute,
    /// On a queue that can only copy: the DMA engine's.
    Transfer,
}

impl CopyQueue {
    /// All.
    pub const ALL: [CopyQueue; 3] =
        [CopyQueue::Same, CopyQueue::SecondCompute, CopyQueue::Transfer];

    /// As on the command line: `transfer`.
    pub fn name(self) -> &'static str {
        match self {
            CopyQueue::Same => "same",
            CopyQueue::SecondCompute => "compute",
            CopyQueue::Transfer => "transfer",
        }
    }
}

impl fmt::Display for CopyQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A queue of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueId {
    /// The family.
    pub family: u32,
    /// The index within the family.
    pub index: u32,
}

/// The queues of the lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LanePlan {
    /// Of [`Lane::Compute`].
    pub compute: QueueId,
    /// Of [`Lane::Copy`].
    pub copy: QueueId,
    /// A second one of its family, for copies that may run beside the one before: where queues only copy, each may
    /// have an engine of its own.
    pub copy_beside: Option<QueueId>,
}

impl LanePlan {
    /// The queue of a lane.
    pub fn queue(&self, lane: Lane) -> QueueId {
        match lane {
            Lane::Compute => self.compute,
            Lane::Copy => self.copy,
        }
    }
}

/// Chooses the queues. `wanted` overrules the table, and is refused if the device has no such queue.
pub fn plan_lanes(info: &DeviceInfo, wanted: Option<CopyQueue>) -> Result<LanePlan> {
    let compute = compute_queue(&info.queue_families)
        .ok_or_else(|| Error::NoDevice(format!("{} has no compute queue", info.name)))?;
    let find = |kind| copy_queue(&info.queue_families, compute, kind);
    let copy = match wanted {
        Some(kind) => find(kind).ok_or_else(|| {
            let problem = match kind {
                CopyQueue::SecondCompute => "no second compute queue",
                _ => "no queue that only copies",
            };
            Error::usage("--copy-queue", format!("{kind}: {} has {problem}", info.name))
        })?,
        None => preferences(info).iter().find_map(|&kind| find(kind)).unwrap_or(compute),
    };
    let copy_beside = info.queue_families.get(copy.family as usize).and_then(|family| {
        let beside = QueueId { index: copy.index + 1, ..copy };
        (is_pure_transfer(family.flags) && family.count > beside.index).then_some(beside)
    });
    Ok(LanePlan { compute, copy, copy_beside })
}

/// The table, best first.
/// NVIDIA: copy engines overlap fully (measured on an H200: kernels are not slowed). AMD cards: the
/// DMA engine if the driver exposes it (RADV by default does not), else a second queue, since CP DMA
/// blocks its own. AMD and Intel devices that share the host's memory have nothing to copy. Intel's
/// copy engine (xe) has not been shown to be faster. All others have one queue.
fn preferences(info: &DeviceInfo) -> &'static [CopyQueue] {
    match (info.vendor, info.kind) {
        (Vendor::Nvidia, _) => &[CopyQueue::Transfer],
        (Vendor::Amd, DeviceKind::Discrete) => &[CopyQueue::Transfer, CopyQueue::SecondCompute],
        _ => &[],
    }
}

/// A family that computes, best without graphics: a desktop's compositor then stays out of the way.
fn compute_queue(families: &[QueueFamily]) -> Option<QueueId> {
    let without_graphics = |flags: vk::QueueFlags| {
        flags.contains(vk::QueueFlags::COMPUTE) && !flags.contains(vk::QueueFlags::GRAPHICS)
    };
    first_queue(families, without_graphics)
        .or_else(|| first_queue(families, |flags| flags.contains(vk::QueueFlags::COMPUTE)))
}

fn copy_queue(families: &[QueueFamily], compute: QueueId, kind: CopyQueue) -> Option<QueueId> {
    match kind {
        CopyQueue::Same => Some(compute),
        CopyQueue::Transfer => first_queue(families, is_pure_transfer),
        // A sibling in the family needs no sharing between families.
        CopyQueue::SecondCompute => {
            let family = families.get(compute.family as usize)?;
            match family.count > compute.index + 1 {
                true => Some(QueueId { index: compute.index + 1, ..compute }),
                false => other_compute_family(families, compute.family),
            }
        }
    }
}

fn other_compute_family(families: &[QueueFamily], not: u32) -> Option<QueueId> {
    (0u32..)
        .zip(families)
        .find(|(index, family)| {
            *index != not && family.count > 0 && family.flags.contains(vk::QueueFlags::COMPUTE)
        })
        .map(|(family, _)| QueueId { family, index: 0 })
}

/// Nothing but copies: NVIDIA's video families can copy as well, and are not meant.
fn is_pure_transfer(flags: vk::QueueFlags) -> bool {
    let beside = vk::QueueFlags::SPARSE_BINDING | vk::QueueFlags::PROTECTED;
    flags & !beside == vk::QueueFlags::TRANSFER
}

fn first_queue(families: &[QueueFamily], fits: impl Fn(vk::QueueFlags) -> bool) -> Option<QueueId> {
    (0u32..)
        .zip(families)
        .find(|(_, family)| family.count > 0 && fits(family.flags))
        .map(|(family, _)| QueueId { family, index: 0 })
}
