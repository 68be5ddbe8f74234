//! The slot protocol. Pure: values of the two timelines in, decisions out.
//!
//! A pass reads expert tensors in a known order. Use `j` of the pass gets the slot after that of use
//! `j - 1`. Several kernels may read a use; what counts is the last of them. Each slot has two points: `filled`, the copy lane's value after which a reader may start,
//! and `free`, the compute lane's value after which the next copy may. A copy may be *submitted* once
//! the submission of the slot's last reader is made: its value is then known, and the copy waits for it
//! on the device. So producers always come before consumers, and one queue is enough for both lanes.

/// A staging slot, by index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Slot(pub u32);

/// What is copied for a use of an expert tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fill {
    /// The whole tensor, any time ahead.
    Full,
    /// The experts that the router chose: not before it has.
    Used,
}

/// A copy that may be submitted now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copy {
    /// The use it is for, counted within the pass.
    pub index: usize,
    /// Where to.
    pub slot: Slot,
    /// What.
    pub fill: Fill,
    /// Compute value to wait for on the device; 0: none.
    pub after_compute: u64,
    /// Copy value to wait for on the device; 0: none. Only after a pass that was broken off.
    pub after_copy: u64,
}

/// The two points of a slot; 0: never used.
#[derive(Clone, Copy, Debug, Default)]
struct Points {
    filled: u64,
    free: u64,
    /// Filled for a pass that was broken off before the reader.
    unread: bool,
}

/// The slots and the progress of a pass through its uses.
#[derive(Debug)]
pub struct Rotation {
    slots: Vec<Points>,
    /// Slot of the next pass's first use.
    first: usize,
    fills: Vec<Fill>,
    /// Uses whose copies are submitted.
    n_copied: usize,
    /// Uses whose readers are submitted.
    n_read: usize,
    /// Uses whose experts are known to the host.
    n_routed: usize,
}

impl Rotation {
    /// `n_slots`: at least 1.
    pub fn new(n_slots: u32) -> Self {
        assert!(n_slots > 0, "a rotation of no slots");
        let slots = vec![Points::default(); n_slots as usize];
        Rotation { slots, first: 0, fills: Vec::new(), n_copied: 0, n_read: 0, n_routed: 0 }
    }

    /// Number of slots.
    pub fn n_slots(&self) -> u32 {
        self.slots.len() as u32
    }

    /// Begins a pass with these uses.
    pub fn begin(&mut self, fills: Vec<Fill>) {
        for index in self.n_read..self.n_copied {
            let slot = self.slot_index(index);
            self.slots[slot].unread = true;
        }
        self.first = self.slot_index(self.n_copied);
        (self.fills, self.n_copied, self.n_read, self.n_routed) = (fills, 0, 0, 0);
    }

    /// The slot of a use.
    pub fn slot(&self, index: usize) -> Slot {
        Slot(self.slot_index(index) as u32)
    }

    /// The host knows the chosen experts of all uses before `n`.
    pub fn routed(&mut self, n: usize) {
        self.n_routed = self.n_routed.max(n);
    }

    /// The next copy, if it may be submitted now.
    pub fn next_copy(&self) -> Option<Copy> {
        let index = self.n_copied;
        let fill = *self.fills.get(index)?;
        let reader_known = index < self.n_read + self.slots.len();
        let experts_known = fill == Fill::Full || index < self.n_routed;
        if !(reader_known && experts_known) {
            return None;
        }
        let slot = self.slot(index);
        let points = self.slots[slot.0 as usize];
        let after_copy = if points.unread { points.filled } else { 0 };
        Some(Copy { index, slot, fill, after_compute: points.free, after_copy })
    }

    /// [`next_copy`](Self::next_copy) was submitted; the copy lane has `filled` once it is done.
    pub fn copied(&mut self, filled: u64) {
        assert!(self.next_copy().is_some(), "a copy that was not due");
        let slot = self.slot_index(self.n_copied);
        self.slots[slot].filled = filled;
        self.slots[slot].unread = false;
        self.n_copied += 1;
    }

    /// The copy value that the reader of a use waits for, once its copy is submitted.
    pub fn filled(&self, index: usize) -> Option<u64> {
        (index < self.n_copied).then(|| self.slots[self.slot_index(index)].filled)
    }

    /// The reader of the next use was submitted, the last one if there are several; the compute lane has `free`
    /// once it is done.
    pub fn read(&mut self, free: u64) {
        assert!(self.n_read < self.n_copied, "a reader before its copy");
        let slot = self.slot_index(self.n_read);
        self.slots[slot].free = free;
        self.n_read += 1;
    }

    fn slot_index(&self, index: usize) -> usize {
        (self.first + index) % self.slots.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    /// A submission of the simulated device.
    struct Submission {
        lane: usize,
        value: u64,
        waits: [u64; 2],
        work: Work,
        cost: u32,
    }

    enum Work {
        Other,
        Copy { slot: Slot, stamp: usize },
        Read { slot: Slot, stamp: usize },
    }

    const COMPUTE: usize = 0;
    const COPY: usize = 1;

    /// A device with one queue or two, in which submissions take random times. It executes in order
    /// within a queue, but starts the next as soon as its waits allow: as Vulkan may, submissions of a
    /// lane overlap unless something orders them.
    struct Device {
        queues: Vec<VecDeque<Submission>>,
        running: Vec<Submission>,
        done: [u64; 2],
        finished: [Vec<u64>; 2],
        /// What each slot holds; `None` while a copy writes it.
        slots: Vec<Option<usize>>,
        in_flight_most: usize,
    }

    impl Device {
        fn new(n_queues: usize, n_slots: u32) -> Self {
            Device {
                queues: (0..n_queues).map(|_| VecDeque::new()).collect(),
                running: Vec::new(),
                done: [0, 0],
                finished: Default::default(),
                slots: vec![Some(usize::MAX); n_slots as usize],
                in_flight_most: 0,
            }
        }

        fn submit(&mut self, submission: Submission) {
            let queue = submission.lane % self.queues.len();
            self.queues[queue].push_back(submission);
        }

        /// One step of time. Returns whether anything is left.
        fn step(&mut self) -> bool {
            for queue in 0..self.queues.len() {
                while let Some(next) = self.queues[queue].front() {
                    let ready = (0..2).all(|lane| next.waits[lane] <= self.done[lane]);
                    if !ready {
                        break;
                    }
                    if let Some(submission) = self.queues[queue].pop_front() {
                        self.start(&submission);
                        self.running.push(submission);
                    }
                }
            }
            let before = self.running.len();
            for submission in &mut self.running {
                submission.cost = submission.cost.saturating_sub(1);
            }
            let ended: Vec<_> = self.running.extract_if(.., |s| s.cost == 0).collect();
            for submission in &ended {
                self.end(submission);
            }
            let waiting: usize = self.queues.iter().map(VecDeque::len).sum();
            assert!(before > 0 || waiting == 0, "a deadlock: {waiting} wait");
            before > 0 || waiting > 0
        }

        fn users(&self, wanted: Slot) -> usize {
            let uses = |s: &&Submission| match s.work {
                Work::Copy { slot, .. } | Work::Read { slot, .. } => slot == wanted,
                Work::Other => false,
            };
            self.running.iter().filter(uses).count()
        }

        fn start(&mut self, submission: &Submission) {
            match submission.work {
                Work::Copy { slot, .. } => {
                    assert_eq!(self.users(slot), 0, "a copy into a slot in use");
                    self.slots[slot.0 as usize] = None;
                    let copies = self.running.iter().filter(|s| s.lane == COPY).count() + 1;
                    self.in_flight_most = self.in_flight_most.max(copies);
                }
                Work::Read { slot, stamp } => {
                    assert_eq!(self.slots[slot.0 as usize], Some(stamp), "read of other bytes");
                }
                Work::Other => {}
            }
        }

        fn end(&mut self, submission: &Submission) {
            if let Work::Copy { slot, stamp } = submission.work {
                self.slots[slot.0 as usize] = Some(stamp);
            }
            // A timeline has a value once everything up to it is done.
            let finished = &mut self.finished[submission.lane];
            finished.push(submission.value);
            while let Some(at) = finished.iter().position(|&v| v == self.done[submission.lane] + 1)
            {
                finished.swap_remove(at);
                self.done[submission.lane] += 1;
            }
        }
    }

    /// The engine: what recording a pass does with the rotation.
    struct Engine {
        rotation: Rotation,
        device: Device,
        values: [u64; 2],
        stamp: usize,
    }

    impl Engine {
        fn submit(&mut self, lane: usize, waits: [u64; 2], work: Work, cost: u32) -> u64 {
            self.values[lane] += 1;
            let value = self.values[lane];
            self.device.submit(Submission { lane, value, waits, work, cost });
            value
        }

        fn copies(&mut self, costs: &mut impl Iterator<Item = u32>) {
            while let Some(copy) = self.rotation.next_copy() {
                let work = Work::Copy { slot: copy.slot, stamp: self.stamp + copy.index };
                let waits = [copy.after_compute, copy.after_copy];
                let filled = self.submit(COPY, waits, work, costs.next().unwrap());
                self.rotation.copied(filled);
            }
        }

        /// Runs the first `n_read` uses of a pass, while the device moves on now and then.
        fn pass(&mut self, fills: &[Fill], n_read: usize, costs: &mut impl Iterator<Item = u32>) {
            self.rotation.begin(fills.to_vec());
            self.copies(costs);
            for (index, &fill) in fills.iter().enumerate().take(n_read) {
                let router = self.submit(COMPUTE, [0, 0], Work::Other, costs.next().unwrap());
                if fill == Fill::Used {
                    while self.device.done[COMPUTE] < router {
                        assert!(self.device.step());
                    }
                    self.rotation.routed(index + 1);
                }
                self.copies(costs);
                let Some(filled) = self.rotation.filled(index) else {
                    panic!("no progress: the copy of {index} is not submitted")
                };
                let slot = self.rotation.slot(index);
                let work = Work::Read { slot, stamp: self.stamp + index };
                let free = self.submit(COMPUTE, [0, filled], work, costs.next().unwrap());
                self.rotation.read(free);
                self.copies(costs);
                for _ in 0..costs.next().unwrap() % 3 {
                    self.device.step();
                }
            }
            self.stamp += fills.len();
        }

        /// Runs a batch layer by layer: every ubatch reads the uses of a layer, so many for each, before those of
        /// the next layer are read. The first reader waits for the copy, the last one frees the slot. Broken off
        /// after `n_readers`, and then waited for.
        fn batch(
            &mut self,
            layers: &[usize],
            n_ubatches: usize,
            mut n_readers: usize,
            costs: &mut impl Iterator<Item = u32>,
        ) {
            let n_uses: usize = layers.iter().sum();
            self.rotation.begin(vec![Fill::Full; n_uses]);
            self.copies(costs);
            let mut first = 0;
            for width in layers {
                let uses = first..first + width;
                first = uses.end;
                for (ubatch, index) in
                    (0..n_ubatches).flat_map(|u| uses.clone().map(move |i| (u, i)))
                {
                    if n_readers == 0 {
                        while self.device.step() {}
                        break;
                    }
                    n_readers -= 1;
                    self.submit(COMPUTE, [0, 0], Work::Other, costs.next().unwrap());
                    let Some(filled) = self.rotation.filled(index) else {
                        panic!("no progress: the copy of {index} is not submitted")
                    };
                    let work =
                        Work::Read { slot: self.rotation.slot(index), stamp: self.stamp + index };
                    let waits = [0, if ubatch == 0 { filled } else { 0 }];
                    let free = self.submit(COMPUTE, waits, work, costs.next().unwrap());
                    if ubatch + 1 == n_ubatches {
                        self.rotation.read(free);
                        self.copies(costs);
                    }
                    for _ in 0..costs.next().unwrap() % 3 {
                        self.device.step();
                    }
                }
            }
            self.stamp += n_uses;
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1000))]

        /// Over random models, passes, delays and break-offs, with one queue and two: no slot is
        /// overwritten under its reader, no reader starts before its copy or sees other bytes, it never
        /// stops, and no more copies run than there are slots.
        #[test]
        fn slots_are_never_confused(
            n_slots in 1u32..9,
            n_queues in 1usize..3,
            passes in prop::collection::vec(
                (prop::collection::vec(any::<bool>(), 0..30), any::<prop::sample::Index>(), 0u8..4),
                1..6,
            ),
            costs in prop::collection::vec(1u32..40, 1..50),
        ) {
            let mut engine = Engine {
                rotation: Rotation::new(n_slots),
                device: Device::new(n_queues, n_slots),
                values: [0, 0],
                stamp: 0,
            };
            let mut costs = costs.iter().copied().cycle();
            for (used, stop, broken) in passes {
                let fill = |used: &bool| if *used { Fill::Used } else { Fill::Full };
                let fills: Vec<Fill> = used.iter().map(fill).collect();
                let n_read = if broken == 0 { stop.index(fills.len() + 1) } else { fills.len() };
                engine.pass(&fills, n_read, &mut costs);
            }
            while engine.device.step() {}
            prop_assert_eq!(engine.device.done, engine.values);
            prop_assert!(engine.device.in_flight_most <= n_slots as usize);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(500))]

        /// The same over batches that go layer by layer, some broken off, with other passes between them; every
        /// tensor is copied once a batch.
        #[test]
        fn slots_are_never_confused_layer_by_layer(
            n_slots in 1u32..9,
            n_queues in 1usize..3,
            batches in prop::collection::vec(
                (prop::collection::vec(1usize..4, 0..10), 1usize..5, prop::option::of(0usize..60)),
                1..5,
            ),
            costs in prop::collection::vec(1u32..40, 1..50),
        ) {
            let mut engine = Engine {
                rotation: Rotation::new(n_slots),
                device: Device::new(n_queues, n_slots),
                values: [0, 0],
                stamp: 0,
            };
            let mut costs = costs.iter().copied().cycle();
            for (mut layers, n_ubatches, stop) in batches {
                layers.iter_mut().for_each(|width| *width = (*width).min(n_slots as usize));
                let n_copies = engine.values[COPY];
                engine.batch(&layers, n_ubatches, stop.unwrap_or(usize::MAX), &mut costs);
                let n_uses = layers.iter().sum::<usize>() as u64;
                prop_assert!(stop.is_some() || engine.values[COPY] == n_copies + n_uses);
                engine.pass(&[Fill::Used, Fill::Full], 2, &mut costs);
            }
            while engine.device.step() {}
            prop_assert_eq!(engine.device.done, engine.values);
            prop_assert!(engine.device.in_flight_most <= n_slots as usize);
        }
    }

    #[test]
    fn the_first_copies_go_out_at_once_and_later_ones_with_the_readers() {
        let mut rotation = Rotation::new(2);
        rotation.begin(vec![Fill::Full; 3]);
        assert_eq!(rotation.next_copy().map(|c| (c.slot, c.after_compute)), Some((Slot(0), 0)));
        rotation.copied(1);
        rotation.copied(2);
        assert_eq!(rotation.next_copy(), None, "both slots await readers");
        rotation.read(7);
        assert_eq!(rotation.next_copy().map(|c| (c.slot, c.after_compute)), Some((Slot(0), 7)));
    }

    #[test]
    fn chosen_experts_are_copied_only_once_they_are_known() {
        let mut rotation = Rotation::new(3);
        rotation.begin(vec![Fill::Used, Fill::Full]);
        assert_eq!(rotation.next_copy(), None);
        rotation.routed(1);
        rotation.copied(1);
        assert_eq!(rotation.next_copy().map(|c| c.index), Some(1));
    }
}
