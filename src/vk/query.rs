//! Timestamps.
#![allow(unsafe_code, reason = "creates, resets and reads query pools")]

use std::ops::Range;
use std::sync::Arc;

use ash::vk;

use super::clock::TickFormat;
use super::debug;
use super::device::Device;
use super::lanes::Lane;
use super::retire::Garbage;
use crate::{Error, Result};

/// A pool of timestamps. A clone is another handle of the same pool.
#[derive(Clone)]
pub struct QueryPool(Arc<Inner>);

struct Inner {
    device: Arc<Device>,
    pool: vk::QueryPool,
    count: u32,
    format: TickFormat,
}

impl QueryPool {
    /// Makes `count` timestamps for a lane, all reset.
    pub fn new(device: &Arc<Device>, lane: Lane, name: &str, count: u32) -> Result<Self> {
        let family = device.lane_plan().queue(lane).family as usize;
        let bits = device.info().queue_families.get(family).map_or(0, |f| f.timestamp_bits);
        if bits == 0 {
            let action = format!("take timestamps on the {} queue of this device", lane.name());
            return Err(Error::Vulkan { action, result: vk::Result::ERROR_FEATURE_NOT_PRESENT });
        }
        let info = vk::QueryPoolCreateInfo::default()
            .query_type(vk::QueryType::TIMESTAMP)
            .query_count(count);
        let raw = device.raw();
        // SAFETY: the device outlives the pool, whose owner holds an `Arc` of it.
        let pool = unsafe { raw.vk().create_query_pool(&info, None) }
            .map_err(|result| raw.error(format!("create the query pool {name}"), result))?;
        debug::name(raw, pool, name);
        let format = TickFormat::new(device.info().limits.timestamp_period_ns, bits);
        let pool = Self(Arc::new(Inner { device: device.clone(), pool, count, format }));
        pool.reset(0..count);
        Ok(pool)
    }

    /// Resets from the host; no submission that uses them is pending.
    pub fn reset(&self, queries: Range<u32>) {
        self.check_range(&queries);
        let count = queries.end - queries.start;
        let device = self.0.device.raw().vk();
        // SAFETY: the pool is owned here; hostQueryReset is a required feature; the caller's
        // timeline point says that no submission uses the range.
        unsafe { device.reset_query_pool(self.0.pool, queries.start, count) };
    }

    /// How the lane's queue counts; with a [`Calibration`](super::Calibration) it makes a
    /// [`Clock`](super::Clock).
    pub fn tick_format(&self) -> TickFormat {
        self.0.format
    }

    /// The timestamps as the queue counted them, once the submission that wrote them is done.
    pub fn read_ticks(&self, queries: Range<u32>) -> Result<Vec<u64>> {
        self.check_range(&queries);
        let mut ticks = vec![0u64; queries.len()];
        let raw = self.0.device.raw();
        let flags = vk::QueryResultFlags::TYPE_64;
        // SAFETY: the pool is owned here; `ticks` has a place for each query.
        unsafe { raw.vk().get_query_pool_results(self.0.pool, queries.start, &mut ticks, flags) }
            .map_err(|result| raw.error("read timestamps", result))?;
        ticks.iter_mut().for_each(|tick| *tick &= self.0.format.mask);
        Ok(ticks)
    }

    /// As [`Self::read_ticks`], in nanoseconds since the first, which also takes care of a clock that
    /// wrapped.
    pub fn read_ns(&self, queries: Range<u32>) -> Result<Vec<u64>> {
        let ticks = self.read_ticks(queries)?;
        let first = ticks.first().copied().unwrap_or(0);
        Ok(ticks.iter().map(|&tick| self.0.format.ns_between(first, tick)).collect())
    }

    pub(super) fn vk(&self) -> vk::QueryPool {
        self.0.pool
    }

    pub(super) fn check_range(&self, queries: &Range<u32>) {
        let inside = queries.start < queries.end && queries.end <= self.0.count;
        assert!(inside, "queries {queries:?} of {}", self.0.count);
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.device.retire(Garbage::QueryPool(self.pool));
    }
}
