//! Times what is recorded, alone on the device: for benchmarks.

use crate::error::Result;
use crate::vk::{Device, Lane, QueryPool, Recorder, Replay};
use std::sync::Arc;

/// Two timestamps around a submission.
pub(super) struct Stopwatch {
    device: Arc<Device>,
    pool: QueryPool,
}

impl Stopwatch {
    pub(super) fn new(device: &Arc<Device>) -> Result<Self> {
        let pool = QueryPool::new(device, Lane::Compute, "stopwatch", 2)?;
        Ok(Stopwatch { device: device.clone(), pool })
    }

    /// Submits what `record` records and waits for it. Nanoseconds from where all before it is done to
    /// where it is done.
    pub(super) fn time(&self, name: &str, record: impl FnOnce(&mut Recorder)) -> Result<f64> {
        let mut recorder = Recorder::new(&self.device, Lane::Compute, name, Replay::Once)?;
        recorder.reset_timestamps(&self.pool, 0..2);
        recorder.barrier();
        recorder.write_timestamp(&self.pool, 0);
        record(&mut recorder);
        recorder.write_timestamp(&self.pool, 1);
        recorder.host_barrier();
        let commands = recorder.finish()?;
        let point = self.device.submit(Lane::Compute, &[&commands], &[])?;
        self.device.wait(point, name)?;
        let ns = self.pool.read_ns(0..2)?;
        // Clocks tick every 32 ns on some devices: nothing takes no time.
        Ok(ns[1].max(1) as f64)
    }
}

/// The middle one; of an even number the upper of the two.
pub(super) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}
