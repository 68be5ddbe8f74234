//! The kernels of a pass, timed one by one: launched again and again as the engine launches them, with a
//! barrier between, on the data that they have in a pass (so the router's own choice of experts), but
//! with weights that no cache holds. New ops and kernels appear here by themselves.

use super::cold::{Cold, Variant};
use super::kernels::{Bound, KernelKey, Launch};
use super::lower::{Lowering, Step};
use super::pace::{self, Cost};
use super::record::{joined_names, split};
use super::run::{Executor, Pass, RESULTS_OFFSET, Workspace};
use super::stopwatch::{Stopwatch, median};
use super::tuning::Tuning;
use crate::error::Result;
use crate::graph::scratch::{self, Layout};
use crate::graph::{Graph, Op, Tensor, WeightId};
use crate::vk::{Binding, Buffer, Device, Lane, MemoryKind, Recorder, Replay};
use glam::UVec3;
use std::collections::{HashMap, HashSet};

/// Launches of a sample together take this long at least.
const SAMPLE_NS: f64 = 5e5;
/// Launches of a sample, at most.
const MAX_RUNS: u32 = 2000;
/// No further sample is taken of a kernel once it took this long.
const PATIENCE_NS: f64 = 2e9;

/// How to measure.
#[derive(Clone, Copy, Debug)]
pub struct Repeat {
    /// Samples of a kernel.
    pub samples: u32,
}

/// One step of a pass.
#[derive(Clone, Debug, PartialEq)]
pub struct OpTime {
    /// The op, by its weight (`ffn_gate_exps`) or its kind, without the layer.
    pub op: String,
    /// Its kernel; `None` for a copy.
    pub kernel: Option<KernelKey>,
    /// Workgroups.
    pub groups: UVec3,
    /// What it has to do.
    pub cost: Cost,
    /// It multiplies matrices.
    pub is_product: bool,
    /// Nanoseconds; `None`: not wanted.
    pub ns: Option<f64>,
    /// Layers of the steps that are the same, one entry each.
    pub layers: Vec<Option<u32>>,
}

/// What tells steps apart: op, kernel, workgroups.
type Key = (String, Option<KernelKey>, UVec3);

impl OpTime {
    /// What the bench tells kernels apart by.
    pub fn key(&self) -> Key {
        (self.op.clone(), self.kernel.clone(), self.groups)
    }
}

impl Executor {
    /// Layers that a cache should have whose kernels are timed.
    pub fn kv_layers(device: &Device, layer_bytes: u64, n_layer: u32) -> u32 {
        Cold::kv_layers(device, layer_bytes, n_layer)
    }

    /// Times the steps of a pass for which `wanted` holds, with the sizes of `tuning`. `kv_layers`: those
    /// of the pass's cache, at least the model's. The pass was run before: it taught how fast the device
    /// is.
    pub fn time_ops(
        &mut self,
        pass: &Pass<'_>,
        tuning: &Tuning,
        kv_layers: u32,
        repeat: Repeat,
        wanted: &dyn Fn(&OpTime) -> bool,
    ) -> Result<Vec<OpTime>> {
        let graph = pass.model.graph(&pass.shape);
        let layout = scratch::apart(&graph);
        let workspace = self.prepare_ops(pass)?;
        let lowering = Lowering {
            graph: &graph,
            layout: &layout,
            residency: pass.residency,
            streamer: None,
            rope_freqs: workspace.rope_freqs.address(),
            kv: pass.kv.shape(),
            tuning,
        };
        let mut list = List::of(pass, &graph, &lowering);
        list.cut(wanted);
        let keys = list.steps.iter().filter_map(|(.., step)| match step {
            Step::Launch(launch) => Some(&launch.kernel),
            _ => None,
        });
        workspace.kernels.prepare(keys)?;
        let device = &workspace.device;
        let largest = graph.tensors.iter().map(|t| t.bytes()).max().unwrap_or(4);
        let timing = Timing {
            scratch: Buffer::new(device, "ops.scratch", layout.bytes, MemoryKind::Device)?,
            saved: Buffer::new(device, "ops.saved", largest, MemoryKind::Device)?,
            cold: Cold::new(device, pass.residency, &pass.model.weights, kv_layers)?,
            watch: Stopwatch::new(device)?,
            workspace,
            pass,
            graph: &graph,
            layout: &layout,
            samples: repeat.samples.max(1),
        };
        timing.inputs()?;
        let List { mut times, steps } = list;
        for (op, index, step) in &steps {
            let time = &mut times[*index];
            if time.ns.is_none() && wanted(time) {
                time.ns = Some(timing.time(op, step, time.cost)?);
            }
            timing.once(step)?;
        }
        Ok(times)
    }
}

/// The steps of a pass in order, those that are the same counted together.
struct List<'a> {
    times: Vec<OpTime>,
    /// Op, index into `times`, step.
    steps: Vec<(&'a Op, usize, Step)>,
}

impl<'a> List<'a> {
    fn of(pass: &Pass<'_>, graph: &'a Graph, lowering: &Lowering<'_>) -> Self {
        let mut list = List { times: Vec::new(), steps: Vec::new() };
        let mut known: HashMap<Key, usize> = HashMap::new();
        let mut il = None;
        for op in &graph.ops {
            let weights = named_weights(op);
            let weights: Vec<_> =
                weights.iter().map(|w| &pass.model.weights[w.0 as usize]).collect();
            il = match (weights.first(), op) {
                (Some(weight), _) => weight.layer,
                (None, Op::CopyRows { .. }) => None, // only what follows the layers does that
                _ => il,
            };
            let name = joined_names(&weights).unwrap_or_else(|| op.name().to_owned());
            for (i, step) in lowering.steps(op).into_iter().enumerate() {
                // What an op has to do is done by its first launch, but for what prepares or joins.
                let cost = (i == 0).then(|| pace::cost(graph, op, n_kv(pass)));
                let time = describe(name.clone(), &step, cost);
                let index = *known.entry(time.key()).or_insert(list.times.len());
                if index == list.times.len() {
                    list.times.push(time);
                }
                list.times[index].layers.push(il);
                list.steps.push((op, index, step));
            }
        }
        list
    }

    /// Leaves out what comes after all that is wanted.
    fn cut(&mut self, wanted: &dyn Fn(&OpTime) -> bool) {
        let mut seen = HashSet::new();
        let is_first = |&(_, index, _): &(&Op, usize, Step)| seen.insert(index);
        let firsts: Vec<bool> = self.steps.iter().map(is_first).collect();
        let is_wanted = |((_, index, _), first): (&(&Op, usize, Step), &bool)| {
            *first && wanted(&self.times[*index])
        };
        let last = self.steps.iter().zip(&firsts).rposition(is_wanted);
        self.steps.truncate(last.map_or(0, |last| last + 1));
    }
}

/// A step without its time. `cost`: of its op, if it is the one to have it.
fn describe(op: String, step: &Step, cost: Option<Cost>) -> OpTime {
    let (kernel, groups, own_bytes) = match step {
        Step::Launch(launch) => (Some(launch.kernel.clone()), launch.groups, bound_bytes(launch)),
        Step::Copy { bytes, .. } | Step::Result { bytes, .. } => (None, UVec3::ONE, 2 * bytes),
    };
    let is_product = cost.is_some_and(|cost| cost.flops > 0.0);
    let cost = cost.unwrap_or(Cost { flops: 0.0, bytes: own_bytes as f64 });
    OpTime { op, kernel, groups, cost, is_product, ns: None, layers: Vec::new() }
}

/// Keys in the cache after a pass.
fn n_kv(pass: &Pass<'_>) -> u32 {
    pass.first_position + pass.shape.n_tokens
}

/// What is known while a pass is timed.
struct Timing<'a> {
    workspace: &'a Workspace,
    pass: &'a Pass<'a>,
    graph: &'a Graph,
    layout: &'a Layout,
    /// Activations, none of which share bytes.
    scratch: Buffer,
    /// A tensor that is changed in place, as it was.
    saved: Buffer,
    cold: Cold<'a>,
    watch: Stopwatch,
    samples: u32,
}

impl Timing<'_> {
    fn inputs(&self) -> Result<()> {
        let n_tokens = self.pass.shape.n_tokens;
        self.run("ops.inputs", |recorder| {
            let places = (self.graph, self.layout);
            self.workspace.record_inputs(recorder, &self.scratch, n_tokens, places);
        })
    }

    /// The middle of some samples, in nanoseconds.
    fn time(&self, op: &Op, step: &Step, cost: Cost) -> Result<f64> {
        let (reads, writes) = op.access();
        let in_place: Vec<Tensor> = writes.into_iter().filter(|t| reads.contains(t)).collect();
        self.save(&in_place)?;
        let n_pairs = self.pass.shape.n_tokens * self.pass.model.hparams.experts.n_used;
        let variants = match step {
            Step::Launch(launch) => self.cold.variants(launch, n_pairs)?,
            _ => Vec::new(),
        };
        let guess = pace::estimate_ns(self.graph, op, n_kv(self.pass));
        let guess = self.workspace.pace.expected_ns(guess);
        let mut batch = Batch { timing: self, step, variants: &variants, next: 0 };
        // The first run is slow: of it only the number of runs of a sample is learned.
        let mut each = batch.time(1, guess)?;
        each = batch.time(1, each)?.min(each);
        let n = (SAMPLE_NS / each).ceil().clamp(1.0, f64::from(MAX_RUNS)) as u32;
        let (mut samples, mut spent) = (Vec::new(), 0.0);
        while samples.len() < self.samples as usize && spent < PATIENCE_NS {
            let ns = batch.time(n, each)?;
            spent += ns;
            samples.push(ns / f64::from(n));
        }
        log::debug!(
            "{} {}: {n} runs, {} variants, {samples:?}",
            op.name(),
            cost.flops,
            variants.len()
        );
        self.restore(&in_place)?;
        Ok(median(samples))
    }

    fn save(&self, tensors: &[Tensor]) -> Result<()> {
        self.move_saved(tensors, |recorder, at, saved, bytes| {
            recorder.copy(&self.scratch, at, &self.saved, saved, bytes);
        })
    }

    fn restore(&self, tensors: &[Tensor]) -> Result<()> {
        self.move_saved(tensors, |recorder, at, saved, bytes| {
            recorder.copy(&self.saved, saved, &self.scratch, at, bytes);
        })
    }

    fn move_saved(
        &self,
        tensors: &[Tensor],
        copy: impl Fn(&mut Recorder, u64, u64, u64),
    ) -> Result<()> {
        // One is what ops have; of more, those that fit.
        let mut saved = 0;
        self.run("ops.saved", |recorder| {
            for t in tensors {
                let bytes = self.graph.shape(*t).bytes();
                if saved + bytes <= self.saved.bytes() {
                    copy(recorder, self.layout.offsets[t.0 as usize], saved, bytes);
                    saved += bytes;
                }
            }
        })
    }

    /// Runs a step as it is in the pass.
    fn once(&self, step: &Step) -> Result<()> {
        let variants = match step {
            Step::Launch(Launch { push, bindings, .. }) => {
                vec![Variant { push: push.clone(), bindings: bindings.clone() }]
            }
            _ => Vec::new(),
        };
        let mut batch = Batch { timing: self, step, variants: &variants, next: 0 };
        batch.time(1, 0.0).map(|_| ())
    }

    /// Submits and waits.
    fn run(&self, name: &str, record: impl FnOnce(&mut Recorder)) -> Result<()> {
        let device = &self.workspace.device;
        let mut recorder = Recorder::new(device, Lane::Compute, name, Replay::Once)?;
        recorder.barrier();
        record(&mut recorder);
        let point = device.submit(Lane::Compute, &[&recorder.finish()?], &[])?;
        device.wait(point, name)
    }

    fn binding(&self, bound: Bound) -> Binding<'_> {
        match bound {
            Bound::Scratch { offset, bytes } => Binding { buffer: &self.scratch, offset, bytes },
            other => self.workspace.binding(other, self.pass.kv, 0),
        }
    }
}

/// Runs of one step.
struct Batch<'a> {
    timing: &'a Timing<'a>,
    step: &'a Step,
    variants: &'a [Variant],
    /// Variant of the next run.
    next: usize,
}

impl Batch<'_> {
    /// Nanoseconds of `n` runs, each of which takes about `each_ns`. As in the engine no submission is
    /// longer than [`pace::TARGET_NS`], even if a dispatch must be cut for that.
    fn time(&mut self, n: u32, each_ns: f64) -> Result<f64> {
        let parts = (each_ns / pace::TARGET_NS).ceil().clamp(1.0, 1024.0) as u32;
        let at_once = (pace::TARGET_NS / each_ns.max(1.0)).clamp(1.0, f64::from(MAX_RUNS)) as u32;
        let mut ns = 0.0;
        let mut left = n;
        while left > 0 {
            let runs = left.min(at_once);
            left -= runs;
            ns += self.submit(runs, parts)?;
        }
        Ok(ns)
    }

    /// Some runs in one submission, or one run in several.
    fn submit(&mut self, runs: u32, parts: u32) -> Result<f64> {
        let timing = self.timing;
        let launch = match self.step {
            Step::Launch(launch) => launch,
            _ => return timing.watch.time("ops.copy", |recorder| self.copies(recorder, runs)),
        };
        let slices = split(launch.groups, parts, launch.cuts);
        let mut ns = 0.0;
        for &(base, groups) in &slices {
            let pipeline = timing.workspace.kernels.get(&launch.kernel)?;
            ns += timing.watch.time(&launch.kernel.module, |recorder| {
                let by_address = timing.pass.residency.buffers().iter();
                let by_address = by_address.chain([timing.cold.buffer()]);
                by_address.for_each(|buffer| recorder.keep(buffer));
                recorder.keep(&timing.workspace.rope_freqs);
                for run in 0..runs as usize {
                    let variant = &self.variants[(self.next + run) % self.variants.len()];
                    let bindings: Vec<Binding<'_>> =
                        variant.bindings.iter().map(|b| timing.binding(*b)).collect();
                    recorder.dispatch(pipeline, &variant.push, &bindings, groups, base);
                    recorder.barrier();
                }
            })?;
        }
        self.next = (self.next + runs as usize) % self.variants.len();
        Ok(ns)
    }

    fn copies(&self, recorder: &mut Recorder, runs: u32) {
        let (workspace, scratch) = (self.timing.workspace, &self.timing.scratch);
        for _ in 0..runs {
            match *self.step {
                Step::Copy { from, to, bytes } => recorder.copy(scratch, from, scratch, to, bytes),
                Step::Result { from, to, bytes } => {
                    recorder.copy(scratch, from, &workspace.results, RESULTS_OFFSET + to, bytes);
                }
                Step::Launch(_) => {}
            }
            recorder.barrier();
        }
    }
}

/// The weights that an op is called by.
fn named_weights(op: &Op) -> Vec<WeightId> {
    match op {
        Op::RmsNorm { weight, .. } => weight.iter().copied().collect(),
        op => op.weights().map(|weight| weight.id).collect(),
    }
}

/// Bytes of the activations that a launch may touch.
fn bound_bytes(launch: &Launch) -> u64 {
    let mut seen: Vec<&Bound> = Vec::new();
    for bound in &launch.bindings {
        if !seen.contains(&bound) {
            seen.push(bound);
        }
    }
    let bytes = |bound: &&Bound| match bound {
        Bound::Scratch { bytes, .. } => *bytes,
        _ => 0,
    };
    seen.iter().map(bytes).sum()
}
