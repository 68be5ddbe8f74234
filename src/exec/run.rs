//! One forward pass: records the graph's steps into submissions of bounded length, submits them while
//! recording goes on, waits, and hands the results to the host.
//!
//! Passes over one token are recorded once and replayed: what changes from token to token (the token,
//! its position) is read from buffers.

use super::kernels::{Bound, Kernels, Launch};
use super::kv::KvCache;
use super::lower::{Lowering, Step};
use super::pace::{self, Pace};
use super::residency::Residency;
use super::tuning::Tuning;
use crate::error::{Error, Result};
use crate::graph::scratch::{self, Layout};
use crate::graph::{Graph, KvHalf, Op};
use crate::model::{Model, PassShape};
use crate::vk::{
    Binding, Buffer, Commands, Device, Lane, MemoryKind, Point, QueryPool, Recorder, Replay,
};
use glam::UVec3;
use std::sync::Arc;

/// Submissions that are timed, two timestamps each; later ones of a pass go untimed.
const TIMED_SEGMENTS: u32 = 128;
/// Recorded passes kept for replay.
const MAX_REPLAYS: usize = 8;
/// Results start here in their buffer; before them is the status word.
const RESULTS_OFFSET: u64 = 256;

/// What a pass runs on.
pub struct Pass<'a> {
    /// Structure.
    pub model: &'a Model,
    /// Weights.
    pub residency: &'a Residency,
    /// The session's cache.
    pub kv: &'a KvCache,
    /// Sizes.
    pub shape: PassShape,
    /// `shape.n_tokens` ids.
    pub tokens: &'a [u32],
    /// Position of the first token; the others follow.
    pub first_position: u32,
}

/// A device with everything that passes share.
pub struct Executor {
    device: Arc<Device>,
    kernels: Kernels,
    tuning: Tuning,
    pace: Pace,
    timestamps: QueryPool,
    /// Activations, reused from op to op.
    scratch: Buffer,
    /// Token ids, then positions, written by the host.
    inputs: Buffer,
    positions: Buffer,
    status: Buffer,
    /// Status, then logits, read by the host.
    results: Buffer,
    rope_freqs: Buffer,
    replays: Vec<(ReplayKey, Recorded)>,
}

type ReplayKey = (PassShape, u64);

/// A recorded pass.
struct Recorded {
    segments: Vec<Segment>,
}

/// One submission.
struct Segment {
    commands: Commands,
    estimate_ns: f64,
}

impl Executor {
    /// Allocates what passes of up to `n_ubatch` tokens need. `rope_freqs`: radians per position.
    pub fn new(
        device: &Arc<Device>,
        tuning: Tuning,
        n_ubatch: u32,
        scratch_bytes: u64,
        rope_freqs: &[f32],
    ) -> Result<Self> {
        let device_buffer = |name, bytes| Buffer::new(device, name, bytes, MemoryKind::Device);
        let ids_bytes = u64::from(n_ubatch) * 4;
        let executor = Executor {
            kernels: Kernels::new(device.clone()),
            tuning,
            pace: Pace::default(),
            timestamps: QueryPool::new(device, Lane::Compute, "pass", 2 * TIMED_SEGMENTS)?,
            scratch: device_buffer("scratch", scratch_bytes.max(RESULTS_OFFSET))?,
            inputs: Buffer::new(device, "inputs", 2 * ids_bytes, MemoryKind::Upload)?,
            positions: device_buffer("positions", ids_bytes)?,
            status: device_buffer("status", 4)?,
            results: Buffer::new(device, "results", RESULTS_OFFSET, MemoryKind::HostRead)?,
            rope_freqs: device_buffer("rope.freqs", rope_freqs.len().max(1) as u64 * 4)?,
            replays: Vec::new(),
            device: device.clone(),
        };
        executor.upload_freqs(rope_freqs)?;
        Ok(executor)
    }

    fn upload_freqs(&self, freqs: &[f32]) -> Result<()> {
        let bytes: &[u8] = bytemuck::cast_slice(freqs);
        if bytes.is_empty() {
            return Ok(());
        }
        let staging =
            Buffer::new(&self.device, "rope.load", bytes.len() as u64, MemoryKind::Upload)?;
        staging.write(0, bytes)?;
        let mut recorder = Recorder::new(&self.device, Lane::Compute, "rope.load", Replay::Once)?;
        recorder.copy(&staging, 0, &self.rope_freqs, 0, bytes.len() as u64);
        let point = self.device.submit(Lane::Compute, &[&recorder.finish()?], &[])?;
        self.device.wait(point, "uploading rope frequencies")
    }

    /// The device's sizes.
    pub fn tuning(&self) -> &Tuning {
        &self.tuning
    }

    /// Runs a pass and waits for its results.
    pub fn run(&mut self, pass: &Pass<'_>) -> Result<()> {
        self.write_inputs(pass)?;
        let key = (pass.shape, pass.kv.id());
        if pass.shape.n_tokens == 1 {
            let recorded = match self.take_replay(&key) {
                Some(recorded) => recorded,
                None => self.record(pass, Replay::Many)?,
            };
            let result = self.replay(&recorded);
            self.replays.truncate(MAX_REPLAYS - 1);
            self.replays.insert(0, (key, recorded));
            return result;
        }
        let (recorded, points) = self.record_and_submit(pass)?;
        self.finish(&recorded, &points)
    }

    /// Forgets what was recorded for a cache that is about to be dropped.
    pub fn forget(&mut self, kv: &KvCache) {
        self.replays.retain(|((_, id), _)| *id != kv.id());
    }

    /// Copies results of the last pass: `out.len()` values from value `first` on.
    pub fn read(&self, first: u64, out: &mut [f32]) -> Result<()> {
        self.results.read(RESULTS_OFFSET + first * 4, bytemuck::cast_slice_mut(out))
    }

    fn write_inputs(&self, pass: &Pass<'_>) -> Result<()> {
        let positions: Vec<u32> =
            (0..pass.shape.n_tokens).map(|i| pass.first_position + i).collect();
        self.inputs.write(0, bytemuck::cast_slice(pass.tokens))?;
        self.inputs.write(self.inputs.bytes() / 2, bytemuck::cast_slice(&positions))
    }

    /// A recorded pass; the caller puts it back in front.
    fn take_replay(&mut self, key: &ReplayKey) -> Option<Recorded> {
        let index = self.replays.iter().position(|(k, _)| k == key)?;
        Some(self.replays.remove(index).1)
    }

    fn replay(&mut self, recorded: &Recorded) -> Result<()> {
        let submit = |s: &Segment| self.device.submit(Lane::Compute, &[&s.commands], &[]);
        let points: Vec<Point> = recorded.segments.iter().map(submit).collect::<Result<_>>()?;
        self.finish(recorded, &points)
    }

    /// Records without submitting.
    fn record(&mut self, pass: &Pass<'_>, replay: Replay) -> Result<Recorded> {
        let mut segments = Vec::new();
        self.record_each(pass, replay, |_, segment| {
            segments.push(segment);
            Ok(())
        })?;
        Ok(Recorded { segments })
    }

    /// Submits each segment as soon as it is recorded.
    fn record_and_submit(&mut self, pass: &Pass<'_>) -> Result<(Recorded, Vec<Point>)> {
        let (mut segments, mut points) = (Vec::new(), Vec::new());
        self.record_each(pass, Replay::Once, |device, segment| {
            points.push(device.submit(Lane::Compute, &[&segment.commands], &[])?);
            segments.push(segment);
            Ok(())
        })?;
        Ok((Recorded { segments }, points))
    }

    fn record_each(
        &mut self,
        pass: &Pass<'_>,
        replay: Replay,
        mut emit: impl FnMut(&Device, Segment) -> Result<()>,
    ) -> Result<()> {
        let graph = pass.model.graph(&pass.shape);
        let layout = scratch::plan(&graph);
        self.reserve_results(pass, &layout)?;
        let lowering = Lowering {
            graph: &graph,
            layout: &layout,
            residency: pass.residency,
            rope_freqs: self.rope_freqs.address(),
            kv: pass.kv.shape(),
            tuning: &self.tuning,
        };
        let steps: Vec<Vec<Step>> = graph.ops.iter().map(|op| lowering.steps(op)).collect();
        let launches = steps.iter().flatten().filter_map(|s| match s {
            Step::Launch(launch) => Some(&launch.kernel),
            _ => None,
        });
        self.kernels.prepare(launches)?;
        let mut recording = Recording {
            executor: self,
            pass,
            graph: &graph,
            layout: &layout,
            replay,
            n_segments: 0,
            recorder: None,
            estimate_ns: 0.0,
            hazards: Hazards::default(),
            emit: &mut emit,
        };
        recording.all(&steps)
    }

    /// Makes the result buffer large enough, and checks what the plan promised of scratch memory.
    fn reserve_results(&mut self, pass: &Pass<'_>, layout: &Layout) -> Result<()> {
        let rows = u64::from(pass.shape.n_outputs);
        let row = pass.shape.top.map_or(pass.model.hparams.n_vocab, |k| 2 * k);
        let bytes = RESULTS_OFFSET + rows * u64::from(row) * 4;
        if self.results.bytes() < bytes {
            self.replays.clear();
            self.results = Buffer::new(&self.device, "results", bytes, MemoryKind::HostRead)?;
        }
        if layout.bytes <= self.scratch.bytes() {
            return Ok(());
        }
        Err(Error::OutOfMemory {
            what: format!("activations of {} tokens", pass.shape.n_tokens),
            needed_bytes: layout.bytes,
            available_bytes: self.scratch.bytes(),
            hint: String::new(),
        })
    }

    /// Waits, learns how fast the device is, and looks at what kernels reported.
    fn finish(&mut self, recorded: &Recorded, points: &[Point]) -> Result<()> {
        // One by one: the time limit is that of a submission, however long the pass is.
        for (i, &point) in points.iter().enumerate() {
            self.device
                .wait(point, &format!("part {} of {} of a forward pass", i + 1, points.len()))?;
        }
        let timed = recorded.segments.len().min(TIMED_SEGMENTS as usize) as u32;
        let ns = self.timestamps.read_ns(0..2 * timed)?;
        for (segment, ns) in recorded.segments.iter().zip(ns.chunks_exact(2)) {
            self.pace.learn(segment.estimate_ns, ns[1].saturating_sub(ns[0]) as f64);
        }
        let mut status = [0u8; 4];
        self.results.read(0, &mut status)?;
        match u32::from_le_bytes(status) {
            0 => Ok(()),
            layer => Err(Error::NanRouter { il: layer - 1 }),
        }
    }
}

/// The state of recording one pass.
struct Recording<'a> {
    executor: &'a Executor,
    pass: &'a Pass<'a>,
    graph: &'a Graph,
    layout: &'a Layout,
    replay: Replay,
    n_segments: u32,
    recorder: Option<Recorder>,
    /// Of what is recorded and not yet emitted.
    estimate_ns: f64,
    hazards: Hazards,
    emit: &'a mut dyn FnMut(&Device, Segment) -> Result<()>,
}

impl Recording<'_> {
    fn all(&mut self, steps: &[Vec<Step>]) -> Result<()> {
        self.inputs()?;
        let n_kv = self.pass.first_position + self.pass.shape.n_tokens;
        for (op, steps) in self.graph.ops.iter().zip(steps) {
            let estimate_ns = pace::estimate_ns(self.graph, op, n_kv);
            let expected = self.executor.pace.expected_ns(self.estimate_ns + estimate_ns);
            if expected > pace::TARGET_NS && self.estimate_ns > 0.0 {
                self.flush()?;
            }
            self.op(op, steps, estimate_ns)?;
        }
        self.results()
    }

    /// Takes over what the host wrote.
    fn inputs(&mut self) -> Result<()> {
        let executor = self.executor;
        let bytes = u64::from(self.pass.shape.n_tokens) * 4;
        let tokens = self.graph.tokens.map_or(0, |t| self.layout.offsets[t.0 as usize]);
        let recorder = self.recorder()?;
        recorder.copy(&executor.inputs, 0, &executor.scratch, tokens, bytes);
        recorder.copy(&executor.inputs, executor.inputs.bytes() / 2, &executor.positions, 0, bytes);
        recorder.fill(&executor.status, 0..4, 0);
        recorder.barrier();
        Ok(())
    }

    /// Hands the status to the host.
    fn results(&mut self) -> Result<()> {
        let executor = self.executor;
        let recorder = self.recorder()?;
        recorder.barrier();
        recorder.copy(&executor.status, 0, &executor.results, 0, 4);
        recorder.host_barrier();
        self.flush()
    }

    /// The steps of an op: a barrier before if it depends on what runs, and between its own steps.
    fn op(&mut self, op: &Op, steps: &[Step], estimate_ns: f64) -> Result<()> {
        let access = Access::of(op, self.graph, self.layout);
        let mut barrier = self.hazards.conflict(&access);
        if barrier {
            self.hazards = Hazards::default();
        }
        for step in steps {
            if barrier {
                self.recorder()?.barrier();
            }
            barrier = true;
            match step {
                Step::Launch(launch) => self.launch(launch, estimate_ns)?,
                Step::Copy { from, to, bytes } => {
                    let scratch = &self.executor.scratch;
                    self.recorder()?.copy(scratch, *from, scratch, *to, *bytes);
                }
                Step::Result { from, to, bytes } => {
                    let executor = self.executor;
                    let to = RESULTS_OFFSET + to;
                    self.recorder()?.copy(&executor.scratch, *from, &executor.results, to, *bytes);
                }
            }
        }
        // After the steps: a cut dispatch ends submissions, and its last part runs in the newest.
        self.hazards.add(access);
        self.estimate_ns += estimate_ns;
        Ok(())
    }

    /// A dispatch, cut into several submissions if it would run too long.
    fn launch(&mut self, launch: &Launch, estimate_ns: f64) -> Result<()> {
        let parts = split(launch.groups, self.executor.pace.parts(estimate_ns));
        let n = parts.len();
        for (i, (base, groups)) in parts.into_iter().enumerate() {
            let executor = self.executor;
            let pipeline = executor.kernels.get(&launch.kernel)?;
            let bindings: Vec<Binding<'_>> =
                launch.bindings.iter().map(|b| executor.binding(*b, self.pass.kv)).collect();
            self.recorder()?.dispatch(pipeline, &launch.push, &bindings, groups, base);
            if i + 1 < n {
                self.estimate_ns += estimate_ns / n as f64;
                self.flush()?;
                self.estimate_ns -= estimate_ns / n as f64;
            }
        }
        Ok(())
    }

    /// The recorder of the current submission.
    fn recorder(&mut self) -> Result<&mut Recorder> {
        let recorder = match self.recorder.take() {
            Some(recorder) => recorder,
            None => self.begin()?,
        };
        Ok(self.recorder.insert(recorder))
    }

    /// A new submission, which starts after all earlier ones.
    fn begin(&self) -> Result<Recorder> {
        let executor = self.executor;
        let name = format!("pass.{}", self.n_segments);
        let mut recorder = Recorder::new(&executor.device, Lane::Compute, &name, self.replay)?;
        for buffer in self.pass.residency.buffers() {
            recorder.keep(buffer);
        }
        recorder.keep(&executor.rope_freqs);
        if let Some(first) = self.first_query() {
            recorder.reset_timestamps(&executor.timestamps, first..first + 2);
            recorder.write_timestamp(&executor.timestamps, first);
        }
        recorder.barrier();
        Ok(recorder)
    }

    fn first_query(&self) -> Option<u32> {
        (self.n_segments < TIMED_SEGMENTS).then_some(2 * self.n_segments)
    }

    /// Ends the current submission.
    fn flush(&mut self) -> Result<()> {
        let Some(mut recorder) = self.recorder.take() else { return Ok(()) };
        if let Some(first) = self.first_query() {
            recorder.write_timestamp(&self.executor.timestamps, first + 1);
        }
        let segment = Segment { commands: recorder.finish()?, estimate_ns: self.estimate_ns };
        self.n_segments += 1;
        self.estimate_ns = 0.0;
        self.hazards = Hazards::default();
        (self.emit)(&self.executor.device, segment)
    }
}

impl Executor {
    fn binding<'a>(&'a self, bound: Bound, kv: &'a KvCache) -> Binding<'a> {
        match bound {
            Bound::Scratch { offset, bytes } => Binding { buffer: &self.scratch, offset, bytes },
            Bound::Positions => Binding::from(&self.positions),
            Bound::Status => Binding::from(&self.status),
            Bound::Kv { il, half } => Binding::from(kv.buffer(il, half)),
        }
    }
}

/// Cuts a grid into at most `parts` slices along its longest side: (base, groups) each.
fn split(groups: UVec3, parts: u32) -> Vec<(UVec3, UVec3)> {
    let axis = (0..3).max_by_key(|&a| groups[a]).unwrap_or(0);
    let step = groups[axis].div_ceil(parts).max(1);
    let slices = (0..groups[axis]).step_by(step as usize).map(|start| {
        let (mut base, mut size) = (UVec3::ZERO, groups);
        base[axis] = start;
        size[axis] = step.min(groups[axis] - start);
        (base, size)
    });
    slices.collect()
}

/// A piece of memory that ops share.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Area {
    Scratch { start: u64, end: u64 },
    Kv(u32, KvHalf),
    Status,
}

impl Area {
    fn meets(&self, other: &Area) -> bool {
        match (self, other) {
            (Area::Scratch { start: a, end: b }, Area::Scratch { start: c, end: d }) => {
                a < d && c < b
            }
            (a, b) => a == b,
        }
    }
}

/// What an op reads and writes.
#[derive(Default)]
struct Access {
    reads: Vec<Area>,
    writes: Vec<Area>,
}

impl Access {
    fn of(op: &Op, graph: &Graph, layout: &Layout) -> Self {
        let (reads, writes) = op.access();
        let area = |t: crate::graph::Tensor| {
            let start = layout.offsets[t.0 as usize];
            Area::Scratch { start, end: start + graph.shape(t).bytes() }
        };
        let mut access = Access {
            reads: reads.into_iter().map(area).collect(),
            writes: writes.into_iter().map(area).collect(),
        };
        match *op {
            Op::KvStore { il, half, .. } => access.writes.push(Area::Kv(il, half)),
            Op::Attention { il, .. } => {
                access.reads.extend([Area::Kv(il, KvHalf::K), Area::Kv(il, KvHalf::V)]);
            }
            Op::Router { .. } => access.writes.push(Area::Status),
            _ => {}
        }
        access
    }
}

/// What runs since the last barrier.
#[derive(Default)]
struct Hazards(Access);

impl Hazards {
    /// Whether an op must wait for what runs.
    fn conflict(&self, op: &Access) -> bool {
        let any =
            |ours: &[Area], theirs: &[Area]| ours.iter().any(|a| theirs.iter().any(|b| a.meets(b)));
        let running = &self.0;
        any(&op.reads, &running.writes)
            || any(&op.writes, &running.reads)
            || any(&op.writes, &running.writes)
    }

    /// The op is among what runs.
    fn add(&mut self, op: Access) {
        self.0.reads.extend(op.reads);
        self.0.writes.extend(op.writes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Slices of a grid cover it once.
        #[test]
        fn slices_cover_the_grid(x in 1u32..500, y in 1u32..20, z in 1u32..5, parts in 1u32..40) {
            let groups = UVec3::new(x, y, z);
            let slices = split(groups, parts);
            prop_assert!(slices.len() <= parts as usize);
            let axis = (0..3).max_by_key(|&a| groups[a]).unwrap();
            let mut next = 0;
            for (base, size) in slices {
                prop_assert_eq!(base[axis], next);
                next += size[axis];
                let full = (0..3).all(|a| a == axis || (base[a] == 0 && size[a] == groups[a]));
                prop_assert!(full);
            }
            prop_assert_eq!(next, groups[axis]);
        }
    }

    fn access(reads: &[(u64, u64)], writes: &[(u64, u64)]) -> Access {
        let areas = |ranges: &[(u64, u64)]| {
            ranges.iter().map(|&(start, end)| Area::Scratch { start, end }).collect()
        };
        Access { reads: areas(reads), writes: areas(writes) }
    }

    #[test]
    fn products_of_one_input_run_together_and_dependent_ops_wait() {
        let mut hazards = Hazards::default();
        hazards.add(access(&[(0, 10)], &[(10, 20)]));
        assert!(!hazards.conflict(&access(&[(0, 10)], &[(20, 30)])), "reads the same input");
        assert!(hazards.conflict(&access(&[(15, 20)], &[(30, 40)])), "reads what is written");
        assert!(hazards.conflict(&access(&[], &[(9, 10)])), "overwrites what is read");
        assert!(hazards.conflict(&access(&[], &[(19, 22)])), "overwrites what is written");
    }

    #[test]
    fn attention_waits_for_its_own_layer_only() {
        let mut hazards = Hazards::default();
        hazards.add(Access { reads: vec![], writes: vec![Area::Kv(3, KvHalf::K)] });
        let attend = |il| Access { reads: vec![Area::Kv(il, KvHalf::K)], writes: vec![] };
        assert!(!hazards.conflict(&attend(2)));
        assert!(hazards.conflict(&attend(3)));
    }
}
