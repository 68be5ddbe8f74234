//! Disorder on purpose, for finding races: copies come late, slots and units are poisoned before they are filled,
//! queues are delayed and stages are short, all by chance. Results must not change by a bit.

use super::rotation::{Copy, Slot};
use super::slots::Slots;
use crate::error::Result;
use crate::vk::{Buffer, Device, Lane, Point, Recorder, Replay};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// As f16, f32 or a scale of any block type: NaN.
const POISON: u32 = 0xffff_ffff;

/// A random schedule.
pub struct Chaos {
    rng: ChaCha8Rng,
}

impl Chaos {
    /// The schedule of a seed.
    pub fn new(seed: u64) -> Self {
        Chaos { rng: ChaCha8Rng::seed_from_u64(seed) }
    }

    /// Whether a copy is submitted only when its reader needs it.
    pub fn postpones(&mut self, _copy: &Copy) -> bool {
        self.rng.random_bool(0.3)
    }

    /// Whether a stage of a long pass ends here, however short it is.
    pub fn ends_stage(&mut self) -> bool {
        self.rng.random_bool(0.5)
    }

    /// Whether it is not noticed yet that promoted experts have arrived.
    pub fn overlooks(&mut self) -> bool {
        self.rng.random_bool(0.3)
    }

    /// Poisons a unit of the expert cache ahead of a copy.
    pub fn poison(&mut self, recorder: &mut Recorder, buffer: &Buffer, range: Range<u64>) {
        for _ in 0..self.rng.random_range(1..4) {
            recorder.fill(buffer, range.clone(), POISON);
            recorder.barrier();
        }
    }

    /// Poisons a slot, and keeps queues and the host busy for a while.
    pub fn disturb(
        &mut self,
        device: &Arc<Device>,
        slots: &Slots,
        slot: Slot,
        waits: &[Point],
    ) -> Result<Point> {
        if self.rng.random_bool(0.2) {
            std::thread::sleep(Duration::from_micros(self.rng.random_range(0..500)));
        }
        let mut recorder = Recorder::new(device, Lane::Copy, "chaos", Replay::Once)?;
        for chunk in 0..slots.layout().n_chunks() {
            let buffer = slots.buffer(slot, chunk);
            for _ in 0..self.rng.random_range(1..4) {
                recorder.fill(buffer, 0..buffer.bytes() / 4 * 4, POISON);
                recorder.barrier();
            }
        }
        device.submit(Lane::Copy, &[&recorder.finish()?], waits)
    }
}
