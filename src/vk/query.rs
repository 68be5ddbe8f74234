//! Timestamps.
#![allow(unsafe_code, reason = "creates, resets and reads query pools")]

use std::ops::Range;
use std::sync::Arc;

use ash::vk;

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
    /// Ticks are counted modulo a power of two.
    tick_mask: u64,
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
        let tick_mask = u64::MAX >> (64 - bits.min(64));
        let pool = Self(Arc::new(Inner { device: device.clone(), pool, count, tick_mask }));
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

    /// The timestamps in nanoseconds of the device's clock, once the submission that wrote them is
    /// done; the first is 0, which also takes care of a clock that wrapped.
    pub fn read_ns(&self, queries: Range<u32>) -> Result<Vec<u64>> {
        self.check_range(&queries);
        let mut ticks = vec![0u64; queries.len()];
        let raw = self.0.device.raw();
        let flags = vk::QueryResultFlags::TYPE_64;
        // SAFETY: the pool is owned here; `ticks` has a place for each query.
        unsafe { raw.vk().get_query_pool_results(self.0.pool, queries.start, &mut ticks, flags) }
            .map_err(|result| raw.error("read timestamps", result))?;
        let period_ns = f64::from(self.0.device.info().limits.timestamp_period_ns);
        let first = ticks.first().copied().unwrap_or(0);
        let since = |tick: u64| tick.wrapping_sub(first) & self.0.tick_mask;
        Ok(ticks.iter().map(|&tick| (since(tick) as f64 * period_ns) as u64).collect())
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
