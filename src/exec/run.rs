//! One forward pass: records the graph's steps, submits them while recording goes on, waits, and hands
//! the results to the host.
//!
//! Passes over one token are recorded once and replayed: what changes from token to token (the token,
//! its position) is read from buffers, and so are the addresses of experts.

use super::kernels::{KernelKey, Kernels};
use super::kv::KvCache;
use super::lower::{Lowering, Step};
use super::pace::{self, Pace};
use super::profile::Profile;
use super::record::{Recorded, Recording, Sink, Unit};
use super::residency::Residency;
use super::routes::{self, Routes};
use super::tuning::{MAX_COUNTERS, Tuning};
use crate::error::{Error, Result};
use crate::graph::parts::BatchLayout;
use crate::graph::scratch::{self, Layout, SCRATCH_ALIGN};
use crate::graph::{Graph, Op};
use crate::model::{Model, PassShape};
use crate::stream::stats::StreamStats;
use crate::stream::{Outlook, Streamer};
use crate::trace::Span;
use crate::vk::{Buffer, Device, Lane, MemoryKind, Point, QueryPool, Validation};
use std::sync::Arc;
use std::time::Instant;

/// Recorded passes kept for replay.
const MAX_REPLAYS: usize = 8;
/// Results start here in their buffer; before them is the status word.
pub(super) const RESULTS_OFFSET: u64 = 256;
/// The status word, and counters behind it: of workgroups that are done, for the last one to go on.
pub(super) const STATUS_BYTES: u64 = 4 * (1 + MAX_COUNTERS as u64);
/// A dispatch with its barrier takes this long even if it does nothing (H200: 2.6 µs).
const DISPATCH_NS: f64 = 3e3;

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

/// What an executor is made for.
pub struct ExecutorOptions<'a> {
    /// Sizes of workgroups and tiles.
    pub tuning: Tuning,
    /// Tokens of a pass, at most.
    pub n_ubatch: u32,
    /// Tokens of a batch that goes through the model layer by layer, at most; no more than `n_ubatch`: none
    /// does.
    pub n_batch: u32,
    /// Width of the residual stream.
    pub n_embd: u32,
    /// Activations of a pass, and behind them the experts that it chose if the streamer has a cache.
    pub scratch_bytes: u64,
    /// Radians per position.
    pub rope_freqs: &'a [f32],
    /// Experts per token.
    pub n_expert_used: u32,
    /// Brings experts that stay in host memory.
    pub streamer: Option<Streamer>,
    /// Times every dispatch.
    pub tracing: bool,
}

/// A device with everything that passes share.
pub struct Executor {
    pub(super) workspace: Workspace,
    pub(super) streamer: Option<Streamer>,
    pub(super) profile: Profile,
    replays: Vec<(ReplayKey, Recorded)>,
}

/// What recording a pass needs of its executor.
pub(super) struct Workspace {
    pub(super) device: Arc<Device>,
    pub(super) kernels: Kernels,
    pub(super) tuning: Tuning,
    pub(super) pace: Pace,
    pub(super) timestamps: QueryPool,
    /// Times every dispatch.
    pub(super) per_op: bool,
    /// Every dispatch is a submission of its own: GPU-assisted validation (layer 1.4.309) checks one with
    /// the push descriptors of the next where a submission has several.
    pub(super) one_by_one: bool,
    /// Activations, reused from op to op; behind them what passes leave for the expert cache, and what a batch
    /// keeps from layer to layer.
    pub(super) scratch: Buffer,
    /// Bytes of the activations.
    pub(super) scratch_bytes: u64,
    pub(super) routes: Option<Routes>,
    /// Tokens of a pass, at most.
    pub(super) n_ubatch: u32,
    /// What a batch keeps, and ubatches that there is room for.
    pub(super) batch: BatchLayout,
    pub(super) n_ubatches: usize,
    /// Token ids of each ubatch, then positions of each, written by the host.
    pub(super) inputs: Buffer,
    pub(super) positions: Buffer,
    /// Bytes from the ids, or the positions, of one ubatch to the next one's.
    pub(super) ids_bytes: u64,
    pub(super) status: Buffer,
    /// Status, then logits, read by the host.
    pub(super) results: Buffer,
    /// Chosen experts of a layer, read by the host.
    pub(super) routing: Buffer,
    pub(super) rope_freqs: Buffer,
}

/// A pass, its cache, and whether a kernel fetches experts.
type ReplayKey = (PassShape, u64, bool);

impl Executor {
    /// Allocates what passes need.
    pub fn new(device: &Arc<Device>, options: ExecutorOptions<'_>) -> Result<Self> {
        let device_buffer = |name, bytes| Buffer::new(device, name, bytes, MemoryKind::Device);
        let host_buffer = |name, bytes| Buffer::new(device, name, bytes, MemoryKind::HostRead);
        let ids_bytes = BatchLayout::ids_bytes(options.n_ubatch);
        let routing_bytes = match options.streamer {
            Some(_) => ids_bytes * u64::from(options.n_expert_used.max(1)),
            None => 4,
        };
        let scratch_bytes = options.scratch_bytes.max(RESULTS_OFFSET);
        let batch = BatchLayout::new(scratch_bytes, options.n_ubatch, options.n_embd);
        let n_ubatches = u64::from(options.n_batch.div_ceil(options.n_ubatch.max(1)).max(1));
        let (scratch, n_ubatches) = scratch_buffer(device, scratch_bytes, &batch, n_ubatches)?;
        let cached = options.streamer.as_ref().map_or_else(Vec::new, Streamer::cached_layers);
        let n_used = options.n_expert_used;
        let routes_bytes = routes::bytes(cached.len() as u32, options.n_ubatch, n_used);
        let routes_start = (scratch_bytes - routes_bytes) / SCRATCH_ALIGN * SCRATCH_ALIGN;
        let freqs = options.rope_freqs;
        let workspace = Workspace {
            kernels: Kernels::new(device.clone()),
            tuning: options.tuning,
            pace: Pace::default(),
            timestamps: Profile::compute_pool(device)?,
            per_op: options.tracing,
            one_by_one: device.instance().validation() == Validation::GpuAssisted,
            scratch,
            scratch_bytes: routes_start,
            routes: Routes::new(device, cached, options.n_ubatch, n_used, routes_start)?,
            n_ubatch: options.n_ubatch,
            batch,
            n_ubatches: n_ubatches as usize,
            inputs: Buffer::new(device, "inputs", 2 * n_ubatches * ids_bytes, MemoryKind::Upload)?,
            positions: device_buffer("positions", n_ubatches * ids_bytes)?,
            ids_bytes,
            status: device_buffer("status", STATUS_BYTES)?,
            results: host_buffer("results", RESULTS_OFFSET)?,
            routing: host_buffer("routing", routing_bytes)?,
            rope_freqs: device_buffer("rope.freqs", freqs.len().max(1) as u64 * 4)?,
            device: device.clone(),
        };
        workspace.upload_freqs(freqs)?;
        let profile = Profile::new(device, options.tracing, options.streamer.is_some())?;
        Ok(Executor { workspace, streamer: options.streamer, profile, replays: Vec::new() })
    }

    /// The device's sizes.
    pub fn tuning(&self) -> &Tuning {
        &self.workspace.tuning
    }

    /// Takes other sizes, for comparisons. No pass runs now.
    pub fn set_tuning(&mut self, tuning: Tuning) {
        self.replays.clear();
        self.workspace.tuning = tuning;
    }

    /// Brings experts that stay in host memory.
    pub fn streamer(&self) -> Option<&Streamer> {
        self.streamer.as_ref()
    }

    /// The same, to wait for its pinning.
    pub fn streamer_mut(&mut self) -> Option<&mut Streamer> {
        self.streamer.as_mut()
    }

    /// What moved since the last call, and how long it took.
    pub fn take_stats(&mut self) -> StreamStats {
        self.profile.take_stats()
    }

    /// Spans since the last call, if tracing is on.
    pub fn take_trace(&mut self) -> Option<Vec<Span>> {
        self.profile.take_trace()
    }

    /// Runs a pass and waits for its results.
    pub fn run(&mut self, pass: &Pass<'_>) -> Result<()> {
        let since = Instant::now();
        self.workspace.write_inputs(std::slice::from_ref(pass))?;
        self.profile.begin_pass()?;
        if pass.shape.n_tokens > 1 {
            let (recorded, points) = self.record(pass, Sink::Submit(Vec::new()))?;
            return self.finish(pass, &recorded, &points, since);
        }
        if let Some(streamer) = &mut self.streamer {
            streamer.begin(pass.residency, 1, None)?;
            if streamer.moves() {
                let (recorded, points) = self.record(pass, Sink::Submit(Vec::new()))?;
                return self.finish(pass, &recorded, &points, since);
            }
        }
        let fetches = self.streamer.as_ref().is_some_and(Streamer::fetches);
        let key = (pass.shape, pass.kv.id(), fetches);
        let recorded = match self.take_replay(&key) {
            Some(recorded) => recorded,
            None => self.record(pass, Sink::Keep)?.0,
        };
        let submit = |commands| self.workspace.device.submit(Lane::Compute, &[commands], &[]);
        let points: Result<Vec<Point>> = recorded.segments.iter().map(submit).collect();
        let result = points.and_then(|points| self.finish(pass, &recorded, &points, since));
        self.replays.truncate(MAX_REPLAYS - 1);
        self.replays.insert(0, (key, recorded));
        result
    }

    /// Writes a pass's inputs, for the steps that [`time_ops`](Self::time_ops) takes apart.
    pub(super) fn prepare_ops(&mut self, pass: &Pass<'_>) -> Result<&mut Workspace> {
        self.workspace.write_inputs(std::slice::from_ref(pass))?;
        Ok(&mut self.workspace)
    }

    /// Forgets what was recorded for a cache that is about to be dropped.
    pub fn forget(&mut self, kv: &KvCache) {
        self.replays.retain(|((_, id, _), _)| *id != kv.id());
    }

    /// Copies results of the last pass: `out.len()` values from value `first` on.
    pub fn read(&self, first: u64, out: &mut [f32]) -> Result<()> {
        let bytes = bytemuck::cast_slice_mut(out);
        self.workspace.results.read(RESULTS_OFFSET + first * 4, bytes)
    }

    /// A recorded pass; the caller puts it back in front.
    fn take_replay(&mut self, key: &ReplayKey) -> Option<Recorded> {
        let index = self.replays.iter().position(|(k, _)| k == key)?;
        Some(self.replays.remove(index).1)
    }

    /// Records a pass, and submits it meanwhile if the sink says so.
    fn record(&mut self, pass: &Pass<'_>, sink: Sink) -> Result<(Recorded, Vec<Point>)> {
        let graph = pass.model.graph(&pass.shape);
        let layout = self.workspace.layout(&graph, pass.shape.n_tokens);
        self.reserve_results(pass)?;
        self.workspace.check_scratch(pass, &layout)?;
        if pass.shape.n_tokens > 1 {
            let outlook = self.workspace.outlook(pass, &graph);
            if let Some(streamer) = &mut self.streamer {
                streamer.begin(pass.residency, pass.shape.n_tokens, Some(outlook))?;
            }
        }
        let steps = self.workspace.steps(pass, &graph, &layout, self.streamer.as_ref());
        self.profile.is_typical &= !self.workspace.kernels.prepare(kernels_of(&steps))?;
        let (layout, steps) = (&layout, &steps[..]);
        let unit = Unit { pass, graph: &graph, layout, steps, ubatch: 0, frees_slots: true };
        let (workspace, profile) = (&self.workspace, &mut self.profile);
        Recording::new(workspace, self.streamer.as_mut(), profile, pass, sink).all(&unit)
    }

    /// Makes the result buffer large enough.
    pub(super) fn reserve_results(&mut self, pass: &Pass<'_>) -> Result<()> {
        let rows = u64::from(pass.shape.n_outputs);
        let row = pass.shape.top.map_or(pass.model.hparams.n_vocab, |k| 2 * k);
        let bytes = RESULTS_OFFSET + rows * u64::from(row) * 4;
        let workspace = &mut self.workspace;
        if workspace.results.bytes() < bytes {
            self.replays.clear();
            workspace.results =
                Buffer::new(&workspace.device, "results", bytes, MemoryKind::HostRead)?;
        }
        Ok(())
    }

    /// Waits, learns how fast device and bus are, and looks at what kernels reported.
    fn finish(
        &mut self,
        pass: &Pass<'_>,
        recorded: &Recorded,
        points: &[Point],
        since: Instant,
    ) -> Result<()> {
        if let Some(streamer) = &mut self.streamer {
            streamer.promote()?;
        }
        self.wait(pass, points)?;
        if let Some(streamer) = &self.streamer {
            streamer.check_pages()?;
        }
        self.learn(recorded)?;
        let n_tokens = pass.shape.n_tokens;
        self.tell_routes(n_tokens, n_tokens)?;
        self.profile.end_pass(self.streamer.as_mut(), &[n_tokens], since.elapsed())?;
        self.check_status()
    }

    /// Tells the expert cache what a pass of `n_rows` tokens chose; ids lie as in one of `n_tokens`.
    pub(super) fn tell_routes(&mut self, n_tokens: u32, n_rows: u32) -> Result<()> {
        if let (Some(routes), Some(streamer)) = (&self.workspace.routes, &mut self.streamer) {
            let mut ids = routes.read(n_tokens)?;
            streamer.used(n_rows, routes.rows(&mut ids, n_tokens, n_rows));
        }
        Ok(())
    }

    /// Waits for all submissions of a pass.
    pub(super) fn wait(&self, pass: &Pass<'_>, points: &[Point]) -> Result<()> {
        // One by one: the time limit is that of a submission, however long the pass is.
        for (i, &point) in points.iter().enumerate() {
            let what = format!("part {} of {} of a forward pass", i + 1, points.len());
            match pass.shape.n_tokens {
                1 => self.workspace.device.wait_soon(point, &what)?,
                _ => self.workspace.device.wait(point, &what)?,
            }
        }
        Ok(())
    }

    /// Learns how fast the device is.
    pub(super) fn learn(&mut self, recorded: &Recorded) -> Result<()> {
        let learned = self.profile.end_stage(&self.workspace.timestamps, &recorded.marks)?;
        for (estimate_ns, ns) in learned {
            self.workspace.pace.learn(estimate_ns, ns);
        }
        Ok(())
    }

    /// An error if a kernel of the last pass reported one.
    pub(super) fn check_status(&self) -> Result<()> {
        let mut status = [0u8; 4];
        self.workspace.results.read(0, &mut status)?;
        match u32::from_le_bytes(status) {
            0 => Ok(()),
            layer => Err(Error::NanRouter { il: layer - 1 }),
        }
    }
}

impl Workspace {
    fn upload_freqs(&self, freqs: &[f32]) -> Result<()> {
        let bytes: &[u8] = bytemuck::cast_slice(freqs);
        if bytes.is_empty() {
            return Ok(());
        }
        let point = self.rope_freqs.upload(0, bytes)?;
        self.device.wait(point, "uploading rope frequencies")
    }

    /// Writes ids and positions of the ubatches of a batch.
    pub(super) fn write_inputs(&self, batch: &[Pass<'_>]) -> Result<()> {
        for (ubatch, pass) in batch.iter().enumerate() {
            let offset = ubatch as u64 * self.ids_bytes;
            let positions: Vec<u32> =
                (0..pass.shape.n_tokens).map(|i| pass.first_position + i).collect();
            self.inputs.write(offset, bytemuck::cast_slice(pass.tokens))?;
            let half = self.inputs.bytes() / 2;
            self.inputs.write(half + offset, bytemuck::cast_slice(&positions))?;
        }
        Ok(())
    }

    /// Checks what the plan promised of scratch memory.
    pub(super) fn check_scratch(&self, pass: &Pass<'_>, layout: &Layout) -> Result<()> {
        if layout.bytes <= self.scratch_bytes {
            return Ok(());
        }
        Err(Error::OutOfMemory {
            what: format!("activations of {} tokens", pass.shape.n_tokens),
            needed_bytes: layout.bytes,
            available_bytes: self.scratch_bytes,
            hint: String::new(),
        })
    }

    /// What a pass can expect without prefetching. `graph`: all of it.
    pub(super) fn outlook(&self, pass: &Pass<'_>, graph: &Graph) -> Outlook {
        let n_kv = pass.first_position + pass.shape.n_tokens;
        Outlook {
            idle_ns: idle_ns(graph, &self.pace, n_kv),
            direct_share: self.tuning.host_read_share(pass.shape.n_tokens),
        }
    }

    /// Where the tensors of a whole pass are.
    fn layout(&self, graph: &Graph, n_tokens: u32) -> Layout {
        let routes = self.routes.as_ref();
        scratch::plan_beside(graph, &routes.map_or_else(Vec::new, |r| r.fixed(graph, n_tokens)))
    }

    /// The steps of a graph, by op.
    pub(super) fn steps(
        &self,
        pass: &Pass<'_>,
        graph: &Graph,
        layout: &Layout,
        streamer: Option<&Streamer>,
    ) -> Vec<Vec<Step>> {
        let lowering = Lowering {
            graph,
            layout,
            residency: pass.residency,
            streamer,
            rope_freqs: self.rope_freqs.address(),
            kv: pass.kv.shape(),
            tuning: &self.tuning,
        };
        graph.ops.iter().map(|op| lowering.steps(op)).collect()
    }
}

/// The buffer of activations, with room for so many ubatches behind them if memory is there, else for none. The
/// number of ubatches that a batch can have.
fn scratch_buffer(
    device: &Arc<Device>,
    scratch_bytes: u64,
    batch: &BatchLayout,
    n_ubatches: u64,
) -> Result<(Buffer, u64)> {
    let buffer = |bytes| Buffer::new(device, "scratch", bytes, MemoryKind::Device);
    if n_ubatches > 1 {
        match buffer(batch.end(n_ubatches)) {
            Ok(scratch) => return Ok((scratch, n_ubatches)),
            Err(Error::OutOfMemory { .. }) => {
                log::warn!("no memory for the residual stream of a batch: ubatches go one by one");
            }
            Err(e) => return Err(e),
        }
    }
    Ok((buffer(scratch_bytes)?, 1))
}

/// The kernels that steps launch.
pub(super) fn kernels_of(steps: &[Vec<Step>]) -> impl Iterator<Item = &KernelKey> {
    steps.iter().flatten().filter_map(|step| match step {
        Step::Launch(launch) => Some(&launch.kernel),
        Step::Copy { .. } | Step::Result { .. } => None,
    })
}

/// Time per expert tensor in which a pass does other things than multiply with experts.
fn idle_ns(graph: &Graph, pace: &Pace, n_kv: u32) -> f64 {
    let is_expert = |op: &&Op| op.routing().is_some();
    let experts = graph.ops.iter().filter(is_expert).flat_map(Op::weights);
    let n_expert_tensors = experts.count().max(1);
    let others = graph.ops.iter().filter(|op| !is_expert(op));
    let estimate_ns: f64 = others.map(|op| pace::estimate_ns(graph, op, n_kv)).sum();
    let dispatches_ns = graph.ops.len() as f64 * DISPATCH_NS;
    (pace.expected_ns(estimate_ns) + dispatches_ns) / n_expert_tensors as f64
}
