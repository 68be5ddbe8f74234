//! A lane that is late on purpose, one of the `faults`: its submissions are held back until a submission
//! of the other lane, or the host, waits for them. Of all orders that the waits allow, the latest: where
//! one is missing, readers come before their copies, or copies before the readers of what they overwrite,
//! also on a device with a single queue that works in order.

use std::collections::VecDeque;
use std::sync::Mutex;

use ash::vk;

use super::lanes::Lane;
use super::lock;
use super::timeline::Point;
use crate::Result;

/// What goes to a queue.
pub(super) struct Submission {
    /// See [`Device::submit_beside`](super::Device::submit_beside).
    pub(super) beside: bool,
    /// What it signals.
    pub(super) point: Point,
    pub(super) commands: Vec<vk::CommandBuffer>,
    pub(super) waits: Vec<Point>,
}

/// The late lane.
pub(super) struct Late {
    lane: Lane,
    /// Ascending. Locked while submissions go to the queue, so that they stay in order.
    held: Mutex<VecDeque<Submission>>,
}

impl Late {
    pub(super) fn new(lane: Lane) -> Self {
        Self { lane, held: Mutex::default() }
    }

    /// Holds a submission back, or passes it on, after those that it waits for.
    pub(super) fn take(
        &self,
        submission: Submission,
        mut pass_on: impl FnMut(&Submission) -> Result<()>,
    ) -> Result<()> {
        if submission.point.lane == self.lane {
            lock(&self.held).push_back(submission);
            return Ok(());
        }
        submission.waits.iter().try_for_each(|&point| self.release(point, &mut pass_on))?;
        pass_on(&submission)
    }

    /// Passes on what must be done to reach a point. What it waits for on the other lane was never held.
    pub(super) fn release(
        &self,
        point: Point,
        mut pass_on: impl FnMut(&Submission) -> Result<()>,
    ) -> Result<()> {
        let mut held = lock(&self.held);
        let is_due = |held: &Submission| point.lane == self.lane && held.point.value <= point.value;
        let n_due = held.iter().take_while(|held| is_due(held)).count();
        held.drain(..n_due).try_for_each(|submission| pass_on(&submission))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(lane: Lane, value: u64) -> Point {
        Point { lane, value }
    }

    #[test]
    fn copies_wait_until_somebody_waits_for_them() {
        let late = Late::new(Lane::Copy);
        let mut order = Vec::new();
        let mut submit = |lane, value, waits: &[Point]| {
            let waits = waits.to_vec();
            let submission = Submission {
                beside: false,
                point: point(lane, value),
                commands: Vec::new(),
                waits,
            };
            let pass_on = |passed: &Submission| {
                order.push((passed.point.lane, passed.point.value));
                Ok(())
            };
            assert!(late.take(submission, pass_on).is_ok());
        };
        for value in 1..5 {
            submit(Lane::Copy, value, &[]);
        }
        submit(Lane::Compute, 1, &[]);
        submit(Lane::Compute, 2, &[point(Lane::Copy, 2), point(Lane::Compute, 1)]);
        let copy = |value| (Lane::Copy, value);
        let compute = |value| (Lane::Compute, value);
        assert_eq!(order, [compute(1), copy(1), copy(2), compute(2)]);
        let mut released = Vec::new();
        for waited in [point(Lane::Compute, 9), point(Lane::Copy, 3), point(Lane::Copy, 3)] {
            let done = late.release(waited, |passed| {
                released.push(passed.point.value);
                Ok(())
            });
            assert!(done.is_ok());
        }
        assert_eq!(released, [3]);
    }
}
