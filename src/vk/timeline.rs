//! Timeline semaphores: when submitted work is done.
#![allow(unsafe_code, reason = "creates, reads and destroys a timeline semaphore")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ash::vk;

use super::debug;
use super::lanes::Lane;
use super::raw::RawDevice;
use crate::{Error, Result};

/// A submission: a lane and the value that its timeline has once the submission is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Point {
    /// The lane.
    pub lane: Lane,
    /// The value; the first submission of a lane has 1, each further one 1 more.
    pub value: u64,
}

/// The timeline of a lane.
pub struct Timeline {
    raw: Arc<RawDevice>,
    semaphore: vk::Semaphore,
    lane: Lane,
    /// The highest value seen; spares a call of the driver for points known to be done.
    reached: AtomicU64,
}

impl Timeline {
    pub(super) fn new(raw: &Arc<RawDevice>, lane: Lane) -> Result<Self> {
        let mut kind =
            vk::SemaphoreTypeCreateInfo::default().semaphore_type(vk::SemaphoreType::TIMELINE);
        let info = vk::SemaphoreCreateInfo::default().push_next(&mut kind);
        // SAFETY: the device lives as long as `raw`.
        let semaphore = unsafe { raw.vk().create_semaphore(&info, None) }
            .map_err(|result| raw.error("create a timeline semaphore", result))?;
        debug::name(raw, semaphore, &format!("timeline.{}", lane.name()));
        Ok(Self { raw: raw.clone(), semaphore, lane, reached: AtomicU64::new(0) })
    }

    pub(super) fn semaphore(&self) -> vk::Semaphore {
        self.semaphore
    }

    /// The value reached: all submissions up to it are done.
    pub fn completed(&self) -> Result<u64> {
        let read = self.raw.alive().and_then(|()| {
            // SAFETY: the semaphore is owned here.
            unsafe { self.raw.vk().get_semaphore_counter_value(self.semaphore) }
        });
        let value = read.map_err(|result| self.raw.error("read a timeline", result))?;
        self.reached.fetch_max(value, Ordering::AcqRel);
        Ok(value)
    }

    /// Whether `value` is reached.
    pub fn is_reached(&self, value: u64) -> Result<bool> {
        Ok(self.reached.load(Ordering::Acquire) >= value || self.completed()? >= value)
    }

    /// Asks for `value` again and again; whether it was reached within `limit`.
    pub fn poll(&self, value: u64, limit: Duration) -> Result<bool> {
        let since = Instant::now();
        while !self.is_reached(value)? {
            if since.elapsed() > limit {
                return Ok(false);
            }
            std::hint::spin_loop();
        }
        Ok(true)
    }

    /// Waits for `value`. `what` names it in the error: "layer 3".
    pub fn wait(&self, value: u64, what: &str, limit: Duration) -> Result<()> {
        if self.reached.load(Ordering::Acquire) >= value {
            return Ok(());
        }
        if self.raw.wait_semaphore(self.semaphore, value, limit, what)? {
            self.reached.fetch_max(value, Ordering::AcqRel);
            return Ok(());
        }
        log::error!(
            "{} lane: waited for {value}, {:?} is reached",
            self.lane.name(),
            self.completed()
        );
        let limit_ms = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        Err(Error::Timeout { what: what.to_owned(), limit_ms })
    }
}

impl Drop for Timeline {
    fn drop(&mut self) {
        // SAFETY: the `Device` drops its timelines after `Retired`, which waited for the queues; no
        // submission that signals or waits for this semaphore is pending.
        unsafe { self.raw.vk().destroy_semaphore(self.semaphore, None) };
    }
}
