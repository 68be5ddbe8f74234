//! Records the steps of a pass into submissions of bounded length. A submission also ends before the first
//! and after the last kernel that reads a streamed expert tensor: before, because what follows waits for the
//! copy; after, so that the slot is free as soon as possible.

use super::hazards::{Access, Hazards};
use super::kernels::{Bound, Cuts, Launch};
use super::kv::KvCache;
use super::lower::Step;
use super::pace;
use super::pace::Pace;
use super::profile::{MarkList, Marks, Profile};
use super::run::{Pass, RESULTS_OFFSET, STATUS_BYTES, Workspace};
use crate::error::Result;
use crate::graph::parts::BatchLayout;
use crate::graph::scratch::Layout;
use crate::graph::{Graph, Op};
use crate::model::weights::WeightInfo;
use crate::stream::Streamer;
use crate::vk::{Binding, Buffer, Commands, Lane, Point, Recorder, Replay};
use glam::UVec3;

/// A recorded pass.
pub(super) struct Recorded {
    /// In order.
    pub(super) segments: Vec<Commands>,
    /// What the timestamps belong to.
    pub(super) marks: MarkList,
}

/// The ops of a ubatch, or a part of them.
pub(super) struct Unit<'a> {
    pub(super) pass: &'a Pass<'a>,
    pub(super) graph: &'a Graph,
    pub(super) layout: &'a Layout,
    /// By op.
    pub(super) steps: &'a [Vec<Step>],
    /// The ubatch's number in its batch.
    pub(super) ubatch: usize,
    /// Whether nothing afterwards reads the slots that it reads.
    pub(super) frees_slots: bool,
}

/// A long pass is recorded in stages of this length: while one runs, the next is recorded, and what the one
/// before took is learned.
const STAGE_NS: f64 = 2.0 * pace::TARGET_NS;

/// What was recorded and submitted together.
struct Stage {
    segments: Vec<Commands>,
    points: Vec<Point>,
    marks: MarkList,
    /// What the pass has done at its end.
    done: u64,
}

/// What becomes of a submission once it is recorded.
pub(super) enum Sink {
    /// Kept, to be submitted later.
    Keep,
    /// Submitted at once; the points so far.
    Submit(Vec<Point>),
}

/// The state of recording one pass.
pub(super) struct Recording<'a> {
    pub(super) workspace: &'a Workspace,
    pub(super) streamer: Option<&'a mut Streamer>,
    profile: &'a mut Profile,
    /// For model, weights and cache.
    pass: &'a Pass<'a>,
    sink: Sink,
    marks: Marks,
    pub(super) pace: Pace,
    segments: Vec<Commands>,
    /// The stage before this one.
    running: Option<Stage>,
    n_stages: usize,
    /// Estimate of the stage so far.
    stage_ns: f64,
    /// Uses of streamed tensors whose copies this lane has waited for.
    n_awaited: usize,
    recorder: Option<Recorder>,
    /// What the next submission waits for.
    waits: Vec<Point>,
    /// Of what is recorded and not yet submitted.
    estimate_ns: f64,
    /// Some of it reads weights in host memory.
    reads_host: bool,
    hazards: Hazards,
    /// A kernel was recorded since the last barrier.
    launched: bool,
    /// Layer of the op being recorded, as far as weights tell.
    il: Option<u32>,
}

impl<'a> Recording<'a> {
    pub(super) fn new(
        workspace: &'a Workspace,
        streamer: Option<&'a mut Streamer>,
        profile: &'a mut Profile,
        pass: &'a Pass<'a>,
        sink: Sink,
    ) -> Self {
        Recording {
            marks: Marks::new(workspace.timestamps.clone(), workspace.per_op),
            pace: workspace.pace,
            workspace,
            streamer,
            profile,
            pass,
            sink,
            segments: Vec::new(),
            running: None,
            n_stages: 0,
            stage_ns: 0.0,
            n_awaited: 0,
            recorder: None,
            waits: Vec::new(),
            estimate_ns: 0.0,
            reads_host: false,
            hazards: Hazards::default(),
            launched: false,
            il: None,
        }
    }

    /// Records a pass of one unit. The points are empty if the sink keeps.
    pub(super) fn all(mut self, unit: &Unit<'_>) -> Result<(Recorded, Vec<Point>)> {
        if unit.graph.tokens.is_some() {
            self.inputs(unit)?;
        }
        self.advance()?;
        self.unit(unit)?;
        self.results(unit.pass.shape.n_tokens)?;
        let points = match self.sink {
            Sink::Keep => Vec::new(),
            Sink::Submit(points) => points,
        };
        Ok((Recorded { segments: self.segments, marks: self.marks.into_list() }, points))
    }

    /// Records the ops of a unit.
    pub(super) fn unit(&mut self, unit: &Unit<'_>) -> Result<()> {
        let n_kv = unit.pass.first_position + unit.pass.shape.n_tokens;
        for (i, (op, steps)) in unit.graph.ops.iter().zip(unit.steps).enumerate() {
            let estimate_ns = pace::estimate_ns(unit.graph, op, n_kv);
            let expected = self.pace.expected_ns(self.estimate_ns + estimate_ns);
            if expected > pace::TARGET_NS && self.estimate_ns > 0.0 {
                self.flush()?;
            }
            let streamed = self.streamed_uses(op);
            for &index in &streamed {
                self.before_read(unit, i, index)?;
            }
            self.op(unit, op, steps, estimate_ns)?;
            if unit.frees_slots && !streamed.is_empty() {
                self.after_read(streamed.len())?;
            }
        }
        Ok(())
    }

    /// Ends the stage if it is long, or in any case, and waits for the one before. What the pass has done at
    /// the end of this one: `done`; at the end of the other: the result.
    pub(super) fn end_stage(&mut self, done: u64, in_any_case: bool) -> Result<Option<u64>> {
        let is_long = self.pace.expected_ns(self.stage_ns) > STAGE_NS;
        let is_over = is_long || self.marks.is_nearly_full();
        let is_cut = self.streamer.as_mut().is_some_and(|streamer| streamer.ends_stage());
        if !(is_over || is_cut || in_any_case) {
            return Ok(None);
        }
        self.flush()?;
        let Sink::Submit(points) = &mut self.sink else {
            unreachable!("passes of several stages are submitted as they are recorded")
        };
        let points = std::mem::take(points);
        let segments = std::mem::take(&mut self.segments);
        self.stage_ns = 0.0;
        self.n_stages += 1;
        let marks = self.marks.begin_stage(self.n_stages);
        let before = self.running.replace(Stage { segments, points, marks, done });
        before.map(|stage| self.finish(stage)).transpose()
    }

    /// Waits for the last stage.
    pub(super) fn end_last_stage(&mut self) -> Result<Option<u64>> {
        self.running.take().map(|stage| self.finish(stage)).transpose()
    }

    /// Waits for a stage, and learns what it took.
    fn finish(&mut self, stage: Stage) -> Result<u64> {
        let what = format!("layer {} of a batch", self.il.unwrap_or(0));
        for &point in &stage.points {
            self.workspace.device.wait(point, &what)?;
        }
        drop(stage.segments);
        let learned = self.profile.end_stage(&self.workspace.timestamps, &stage.marks)?;
        for (estimate_ns, ns) in learned {
            self.pace.learn(estimate_ns, ns);
        }
        Ok(stage.done)
    }

    /// The uses of streamed tensors that this op is, ascending.
    fn streamed_uses(&mut self, op: &Op) -> Vec<usize> {
        let mut uses = Vec::new();
        for weight in op.weights() {
            if let Some(il) = self.pass.model.weights[weight.id.0 as usize].layer {
                self.il = Some(il);
            }
            let Some(streamer) = &self.streamer else { continue };
            self.reads_host |= streamer.is_direct(weight.id);
            uses.extend(streamer.use_of(weight.id));
        }
        uses
    }

    /// Ends the submission before the first kernel that reads a slot, and makes the next wait for its copy.
    /// What is submitted later comes after it.
    fn before_read(&mut self, unit: &Unit<'_>, op: usize, index: usize) -> Result<()> {
        if index < self.n_awaited {
            return Ok(());
        }
        self.n_awaited = index + 1;
        if self.streamer.as_ref().is_some_and(|s| s.awaits_router(index)) {
            self.read_routing(unit, op, index)?;
        }
        self.flush()?;
        self.advance()?;
        if let Some(streamer) = &mut self.streamer {
            self.waits.push(streamer.filled(index, &mut self.profile.copy_times)?);
        }
        Ok(())
    }

    /// Ends the submission that reads slots: its point frees them.
    fn after_read(&mut self, n_uses: usize) -> Result<()> {
        self.flush()?;
        let Sink::Submit(points) = &self.sink else {
            unreachable!("passes that move experts are submitted as they are recorded")
        };
        if let (Some(&point), Some(streamer)) = (points.last(), &mut self.streamer) {
            (0..n_uses).for_each(|_| streamer.read(point));
        }
        self.advance()
    }

    /// Submits the copies that are due.
    pub(super) fn advance(&mut self) -> Result<()> {
        match &mut self.streamer {
            Some(streamer) => streamer.advance(&mut self.profile.copy_times),
            None => Ok(()),
        }
    }

    /// Waits for the router and tells the streamer which experts it chose.
    fn read_routing(&mut self, unit: &Unit<'_>, op: usize, index: usize) -> Result<()> {
        let graph = unit.graph;
        let Some(ids) = graph.ops[op].routing().map(|r| r.ids) else { return Ok(()) };
        let (offset, bytes) = (unit.layout.offsets[ids.0 as usize], graph.shape(ids).bytes());
        let workspace = self.workspace;
        let recorder = self.recorder()?;
        recorder.barrier();
        recorder.copy(&workspace.scratch, offset, &workspace.routing, 0, bytes);
        recorder.host_barrier();
        self.flush()?;
        if let Sink::Submit(points) = &self.sink
            && let Some(&point) = points.last()
        {
            let what = format!("the router of layer {}", self.il.unwrap_or(0));
            workspace.device.wait(point, &what)?;
        }
        let mut chosen = vec![0u32; (bytes / 4) as usize];
        workspace.routing.read(0, bytemuck::cast_slice_mut(&mut chosen))?;
        let n = graph.ops[op..]
            .iter()
            .filter(|later| later.routing().is_some_and(|r| r.ids == ids))
            .flat_map(Op::weights)
            .filter_map(|weight| self.streamer.as_ref()?.use_of(weight.id))
            .count();
        if let Some(streamer) = &mut self.streamer {
            streamer.routed(index, n, &chosen);
        }
        Ok(())
    }

    /// Takes over what the host wrote.
    fn inputs(&mut self, unit: &Unit<'_>) -> Result<()> {
        let (workspace, n_tokens) = (self.workspace, unit.pass.shape.n_tokens);
        let (graph, layout) = (unit.graph, unit.layout);
        let recorder = self.recorder()?;
        workspace.record_inputs(recorder, &workspace.scratch, n_tokens, (graph, layout));
        recorder.barrier();
        Ok(())
    }

    /// Begins a pass of several stages: takes over the same for all ubatches of a batch.
    pub(super) fn batch_inputs(&mut self, n_ubatches: usize, batch: &BatchLayout) -> Result<()> {
        self.marks.begin_stage(0);
        let workspace = self.workspace;
        let recorder = self.recorder()?;
        let (inputs, bytes) = (&workspace.inputs, workspace.ids_bytes);
        for ubatch in 0..n_ubatches {
            let from = ubatch as u64 * bytes;
            recorder.copy(inputs, from, &workspace.scratch, batch.ids(ubatch), bytes);
        }
        let bytes = n_ubatches as u64 * bytes;
        recorder.copy(inputs, inputs.bytes() / 2, &workspace.positions, 0, bytes);
        recorder.fill(&workspace.status, 0..STATUS_BYTES, 0);
        recorder.barrier();
        Ok(())
    }

    /// Hands the status to the host, and what was chosen, which lies as in a pass of `n_tokens`.
    pub(super) fn results(&mut self, n_tokens: u32) -> Result<()> {
        let workspace = self.workspace;
        let routes = workspace.routes.as_ref().filter(|_| self.streamer.is_some());
        if self.launched {
            self.barrier()?;
        }
        let recorder = self.recorder()?;
        recorder.copy(&workspace.status, 0, &workspace.results, 0, 4);
        if let Some(routes) = routes {
            routes.record(recorder, &workspace.scratch, n_tokens);
        }
        recorder.host_barrier();
        self.flush()
    }

    /// The steps of an op: a barrier before if it depends on what runs, and between its own steps, if they are not
    /// beside each other.
    fn op(&mut self, unit: &Unit<'_>, op: &Op, steps: &[Step], estimate_ns: f64) -> Result<()> {
        let access = Access::of(op, unit.graph, unit.layout);
        let mut barrier = self.hazards.conflict(&access);
        if barrier {
            self.hazards = Hazards::default();
        }
        for step in steps {
            let beside = matches!(step, Step::Launch(launch) if launch.beside);
            if barrier && !beside {
                self.barrier()?;
            }
            barrier = true;
            match step {
                Step::Launch(launch) => self.launch(unit.ubatch, op, launch, estimate_ns)?,
                Step::Copy { from, to, bytes } => {
                    let scratch = &self.workspace.scratch;
                    self.recorder()?.copy(scratch, *from, scratch, *to, *bytes);
                }
                Step::Result { from, to, bytes } => {
                    let workspace = self.workspace;
                    let to = RESULTS_OFFSET + to;
                    let (scratch, results) = (&workspace.scratch, &workspace.results);
                    self.recorder()?.copy(scratch, *from, results, to, *bytes);
                }
            }
        }
        // After the steps: a cut dispatch ends submissions, and its last part runs in the newest.
        self.hazards.add(access);
        self.estimate_ns += estimate_ns;
        self.stage_ns += estimate_ns;
        Ok(())
    }

    /// A dispatch, cut into several submissions if it would run too long.
    fn launch(&mut self, ubatch: usize, op: &Op, launch: &Launch, estimate_ns: f64) -> Result<()> {
        let parts = split(launch.groups, self.pace.parts(estimate_ns), launch.cuts);
        let n = parts.len();
        for (i, (base, groups)) in parts.into_iter().enumerate() {
            let workspace = self.workspace;
            let pipeline = workspace.kernels.get(&launch.kernel)?;
            let binding = |bound: &Bound| workspace.binding(*bound, self.pass.kv, ubatch);
            let bindings: Vec<Binding<'_>> = launch.bindings.iter().map(binding).collect();
            self.recorder()?;
            let (model, il) = (self.pass.model, self.il);
            self.launched = true;
            if let Some(recorder) = &mut self.recorder {
                self.marks.begin_op(recorder, || op_label(op, model, il), il);
                recorder.dispatch(pipeline, &launch.push, &bindings, groups, base);
                self.marks.end_op(recorder);
            }
            if i + 1 < n || workspace.one_by_one {
                self.estimate_ns += estimate_ns / n as f64;
                self.flush()?;
                self.estimate_ns -= estimate_ns / n as f64;
            }
        }
        Ok(())
    }

    /// Puts what follows after what was recorded.
    fn barrier(&mut self) -> Result<()> {
        self.launched = false;
        self.recorder()?.barrier();
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
    fn begin(&mut self) -> Result<Recorder> {
        let workspace = self.workspace;
        let name = format!("pass.{}", self.segments.len());
        let replay = match self.sink {
            Sink::Keep => Replay::Many,
            Sink::Submit(_) => Replay::Once,
        };
        let mut recorder = Recorder::new(&workspace.device, Lane::Compute, &name, replay)?;
        for buffer in self.pass.residency.buffers() {
            recorder.keep(buffer);
        }
        for buffer in self.streamer.iter().flat_map(|s| s.buffers()) {
            recorder.keep(buffer);
        }
        recorder.keep(&workspace.rope_freqs);
        self.marks.begin_segment(&mut recorder);
        recorder.barrier();
        Ok(recorder)
    }

    /// Ends the current submission.
    fn flush(&mut self) -> Result<()> {
        let Some(mut recorder) = self.recorder.take() else { return Ok(()) };
        self.marks.end_segment(&mut recorder, self.estimate_ns, self.reads_host);
        let commands = recorder.finish()?;
        self.estimate_ns = 0.0;
        self.reads_host = false;
        self.hazards = Hazards::default();
        if let Sink::Submit(points) = &mut self.sink {
            let waits = std::mem::take(&mut self.waits);
            points.push(self.workspace.device.submit(Lane::Compute, &[&commands], &waits)?);
        }
        self.segments.push(commands);
        Ok(())
    }
}

impl Workspace {
    /// Copies tokens and positions to where kernels look for them, and clears status and counters.
    pub(super) fn record_inputs(
        &self,
        recorder: &mut Recorder,
        scratch: &Buffer,
        n_tokens: u32,
        (graph, layout): (&Graph, &Layout),
    ) {
        let bytes = u64::from(n_tokens) * 4;
        let tokens = graph.tokens.map_or(0, |t| layout.offsets[t.0 as usize]);
        recorder.copy(&self.inputs, 0, scratch, tokens, bytes);
        recorder.copy(&self.inputs, self.inputs.bytes() / 2, &self.positions, 0, bytes);
        recorder.fill(&self.status, 0..STATUS_BYTES, 0);
    }

    /// `ubatch`: its number in the batch.
    pub(super) fn binding<'a>(
        &'a self,
        bound: Bound,
        kv: &'a KvCache,
        ubatch: usize,
    ) -> Binding<'a> {
        match bound {
            Bound::Scratch { offset, bytes } => Binding { buffer: &self.scratch, offset, bytes },
            Bound::Positions => {
                let bytes = self.ids_bytes;
                Binding { buffer: &self.positions, offset: ubatch as u64 * bytes, bytes }
            }
            Bound::Status => Binding::from(&self.status),
            Bound::Kv { il, half } => Binding::from(kv.buffer(il, half)),
        }
    }
}

/// How an op is called in a trace: by its weights, or by layer and kind.
fn op_label(op: &Op, model: &crate::model::Model, il: Option<u32>) -> String {
    let weights: Vec<_> = op.weights().map(|w| &model.weights[w.id.0 as usize]).collect();
    let layer = match weights.first() {
        Some(weight) => weight.layer,
        None => il,
    };
    let kind = joined_names(&weights).unwrap_or_else(|| op.name().to_owned());
    match layer {
        Some(il) => format!("blk.{il}.{kind}"),
        None => kind,
    }
}

/// `ffn_gate_exps+ffn_up_exps`: weights without their layer; `None` for none.
pub(super) fn joined_names(weights: &[&WeightInfo]) -> Option<String> {
    let names: Vec<&str> = weights.iter().map(|weight| weight.name_in_layer()).collect();
    (!names.is_empty()).then(|| names.join("+"))
}

/// Cuts a grid into at most `parts` slices along one side: (base, groups) each.
pub(super) fn split(groups: UVec3, parts: u32, cuts: Cuts) -> Vec<(UVec3, UVec3)> {
    let axis = match cuts {
        Cuts::Any => (0..3).max_by_key(|&a| groups[a]).unwrap_or(0),
        Cuts::Z => 2,
    };
    let step = groups[axis].div_ceil(parts).max(1);
    let slices = (0..groups[axis]).step_by(step as usize).map(|start| {
        let (mut base, mut size) = (UVec3::ZERO, groups);
        base[axis] = start;
        size[axis] = step.min(groups[axis] - start);
        (base, size)
    });
    slices.collect()
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
            let whole_plane = |(_, size): &(UVec3, UVec3)| size.truncate() == groups.truncate();
            prop_assert!(split(groups, parts, Cuts::Z).iter().all(whole_plane));
            let slices = split(groups, parts, Cuts::Any);
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
}
