//! From a file and options to a plan: opens the device for its budget, adds up what is needed, places
//! the weights, and says what would help if they do not fit. Nothing is loaded.

use super::EngineOptions;
use super::advice::{self, Situation};
use crate::error::{Error, Result};
use crate::exec::kv::KvShape;
use crate::exec::pace;
use crate::exec::residency::packing_overhead_bytes;
use crate::exec::routes;
use crate::exec::tuning::Tuning;
use crate::gguf::Gguf;
use crate::graph::parts::BatchLayout;
use crate::graph::scratch::{self, SCRATCH_ALIGN};
use crate::model::hparams::HParams;
use crate::model::weights::WeightInfo;
use crate::model::{Model, Part, PassShape};
use crate::plan::usage::{LayerUse, Parts};
use crate::plan::{self, BatchNeeds, Budget, Bytes, Needs, Place, Plan, Rates, Sharing};
use crate::stream::options::{CacheSize, LINK_GBPS};
use crate::vk::{self, Device, DeviceOptions, Instance, InstanceOptions};
use std::cell::RefCell;
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

/// Room left for the driver, the desktop and other programs, if the user does not say; on small devices
/// this share of the memory.
const MARGIN_BYTES: u64 = 1 << 30;
const MARGIN_SHARE: u64 = 20;
/// Without `-c`, the cache takes at most this share of the device's memory, and a context of at
/// least [`MIN_AUTO_CTX`] is tried.
const AUTO_KV_SHARE: u64 = 5;
const MIN_AUTO_CTX: u32 = 4096;
/// Logits computed together take at most this.
const OUTPUT_BYTES: u64 = 64 << 20;

/// A model, a device, and what will live where.
pub struct Planned {
    pub(super) gguf: Arc<Gguf>,
    pub(super) model: Model,
    pub(super) device: Arc<Device>,
    pub(super) tuning: Tuning,
    pub(super) kv_shape: KvShape,
    pub(super) n_ubatch: u32,
    pub(super) options: EngineOptions,
    pub(super) plan: Plan,
    budget: Budget,
}

impl Planned {
    /// Reads the file's header, opens the device, and decides.
    pub fn new(path: &Path, options: &EngineOptions) -> Result<Planned> {
        let gguf = Arc::new(Gguf::open(path)?);
        let model = Model::load(&gguf)?;
        warn_of_idle_rules(options, &model.weights);
        let device = open_device(options)?;
        let tuning = Tuning::new(device.info());
        let planner = Planner {
            model: &model,
            tuning: &tuning,
            free: free_memory(&device),
            storage_range_bytes: device.info().limits.storage_range_bytes,
            buffer_bytes: device.info().limits.allocated_buffer_bytes(),
            scratch: RefCell::default(),
        };
        let Draft { kv_shape, n_ubatch, budget, plan } =
            planner.draft(options).map_err(|e| planner.advised(e, options))?;
        if let Some(n) = plan.refused_batch() {
            log::warn!("-b {n}: memory and slots allow batches of {} tokens", plan.n_batch);
        }
        if let CacheSize::Fixed(bytes) = options.stream.expert_cache
            && plan.cache_is_short
        {
            let (mib, left) = (bytes >> 20, Bytes(plan.cache_bytes));
            log::warn!("--expert-cache {mib}: {left} are left for it");
        }
        let options = options.clone();
        Ok(Planned { gguf, model, device, tuning, kv_shape, n_ubatch, options, plan, budget })
    }

    /// The file.
    pub fn gguf(&self) -> &Gguf {
        &self.gguf
    }

    /// Hyper-parameters.
    pub fn hparams(&self) -> &HParams {
        &self.model.hparams
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// What will live where.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// What there is to fit into.
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Size and types of a session's cache.
    pub fn kv_shape(&self) -> KvShape {
        self.kv_shape
    }

    /// Tokens that one kernel launch handles.
    pub fn n_ubatch(&self) -> u32 {
        self.n_ubatch
    }

    /// The device's budget in parts that add up to it.
    pub fn device_parts(&self) -> Parts {
        self.plan.device_parts(&self.model.weights, &self.budget)
    }

    /// The host's budget in parts that add up to it.
    pub fn host_parts(&self) -> Parts {
        self.plan.host_parts(&self.model.weights, &self.budget)
    }

    /// What each layer takes, then what belongs to none.
    pub fn layers(&self) -> Vec<LayerUse> {
        self.plan.layers(&self.model.weights)
    }

    /// Name, place and bytes of every weight.
    pub fn weights(&self) -> impl Iterator<Item = (&str, Place, u64)> {
        let placed = self.model.weights.iter().zip(&self.plan.places);
        placed.map(|(w, &place)| (w.name.as_str(), place, w.bytes()))
    }
}

/// A plan and the sizes that it was made for.
struct Draft {
    kv_shape: KvShape,
    n_ubatch: u32,
    budget: Budget,
    plan: Plan,
}

/// Makes plans for one model on one device, with any options.
struct Planner<'a> {
    model: &'a Model,
    tuning: &'a Tuning,
    /// What is free, without the user's limit.
    free: Budget,
    storage_range_bytes: u64,
    /// No buffer is larger.
    buffer_bytes: u64,
    /// Scratch bytes by ubatch and context: advice asks for the same again and again.
    scratch: RefCell<HashMap<(u32, u32), u64>>,
}

impl Planner<'_> {
    fn draft(&self, options: &EngineOptions) -> Result<Draft> {
        let hp = &self.model.hparams;
        let budget = self.budget(options);
        let kv_shape = kv_shape(hp, options, budget, self.storage_range_bytes)?;
        // Nothing launches more tokens than there are cells, or than a batch has.
        let n_batch = options.n_batch.unwrap_or(u32::MAX).min(kv_shape.n_ctx);
        let n_ubatch = options.n_ubatch.min(n_batch).max(1);
        let largest = pass_shape(hp, self.tuning, n_ubatch, n_ubatch, kv_shape.n_ctx, None);
        check_ubatch(self.model, &largest, self.storage_range_bytes)?;
        let usual_margin = MARGIN_BYTES.min(budget.device_bytes / MARGIN_SHARE);
        let routes_bytes = match options.stream.expert_cache {
            CacheSize::Fixed(0) => 0,
            CacheSize::Auto if budget.sharing != Sharing::None => 0,
            _ => routes::bytes(hp.n_layer, n_ubatch, hp.experts.n_used),
        };
        let scratch_bytes = self.scratch_bytes(n_ubatch, kv_shape.n_ctx);
        let scratch_bytes = scratch_bytes.next_multiple_of(SCRATCH_ALIGN) + routes_bytes;
        let needs = Needs {
            kv_bytes: kv_shape.bytes(hp),
            scratch_bytes,
            packing_bytes: packing_overhead_bytes(&self.model.weights),
            margin_bytes: options.placement.margin_bytes.unwrap_or(usual_margin),
            batch: self.batch_needs(options, n_ubatch, kv_shape.n_ctx, scratch_bytes),
            rates: self.rates(n_ubatch, kv_shape.n_ctx),
        };
        let weights = &self.model.weights;
        let plan = plan::place(weights, needs, budget, &options.placement, &options.stream)?;
        Ok(Draft { kv_shape, n_ubatch, budget, plan })
    }

    /// What is free, up to the user's limit.
    fn budget(&self, options: &EngineOptions) -> Budget {
        let limit = options.vram_limit_bytes.unwrap_or(u64::MAX);
        Budget { device_bytes: self.free.device_bytes.min(limit), ..self.free }
    }

    fn scratch_bytes(&self, n_ubatch: u32, n_ctx: u32) -> u64 {
        let bytes = || scratch_bytes(self.model, self.tuning, n_ubatch, n_ctx);
        *self.scratch.borrow_mut().entry((n_ubatch, n_ctx)).or_insert_with(bytes)
    }

    /// What batches of several ubatches need. They lie behind the activations, in one buffer with them.
    fn batch_needs(
        &self,
        options: &EngineOptions,
        n_ubatch: u32,
        n_ctx: u32,
        scratch_bytes: u64,
    ) -> BatchNeeds {
        let layout = BatchLayout::new(scratch_bytes, n_ubatch, self.model.hparams.n_embd);
        let room = self.buffer_bytes.saturating_sub(layout.end(0));
        let n_ubatches = (room / layout.ubatch_bytes()).min(u64::from(n_ctx.div_ceil(n_ubatch)));
        let n_max = (n_ubatches as u32).max(1).saturating_mul(n_ubatch);
        BatchNeeds {
            n_ubatch,
            // Whole ubatches: where they begin does not depend on the batch.
            n_batch: options.n_batch.map(|n| match n >= n_ctx {
                true => n_max,
                false => (n / n_ubatch).max(1) * n_ubatch,
            }),
            n_max,
            ubatch_bytes: layout.ubatch_bytes(),
        }
    }

    /// What predictions go by: nothing is measured yet.
    fn rates(&self, n_ubatch: u32, n_ctx: u32) -> Rates {
        let hp = &self.model.hparams;
        let shape = pass_shape(hp, self.tuning, n_ubatch, 0, n_ctx, None);
        let graph = self.model.graph(&shape);
        // On average a token sees half of the context.
        let flops: f64 = graph.ops.iter().map(|op| pace::cost(&graph, op, n_ctx / 2).flops).sum();
        let n = f64::from(n_ubatch) * f64::from(hp.n_layer.max(1));
        Rates {
            link_gbps: LINK_GBPS,
            token_ns: flops / n / self.tuning.flops_per_ns(),
            used_share: f64::from(hp.experts.n_used) / f64::from(hp.experts.n_expert.max(1)),
            n_prompt: n_ctx,
        }
    }

    /// Adds to an error about memory which flags would make the plan work.
    fn advised(&self, error: Error, options: &EngineOptions) -> Error {
        let Error::OutOfMemory { what, needed_bytes, available_bytes, .. } = error else {
            return error;
        };
        let hp = &self.model.hparams;
        let shape = kv_shape(hp, options, self.budget(options), self.storage_range_bytes);
        let situation = Situation {
            n_layer: hp.n_layer,
            n_ctx: shape.map_or(options.n_ctx, |s| s.n_ctx),
            free_device_bytes: self.free.device_bytes,
        };
        let hint = advice::hint(options, &situation, &|o| self.draft(o).is_ok());
        Error::OutOfMemory { what, needed_bytes, available_bytes, hint }
    }
}

/// Opens the chosen device.
fn open_device(options: &EngineOptions) -> Result<Arc<Device>> {
    let validation = options.validation;
    let instance = Arc::new(Instance::new(InstanceOptions { validation })?);
    let devices = instance.devices()?;
    let visible = std::env::var("GGML_VK_VISIBLE_DEVICES").ok();
    let index = vk::choose(&devices, options.device.as_deref(), visible.as_deref())?;
    log::info!("device: {}", devices[index].name);
    let copy_queue = options.stream.copy_queue;
    Device::open(&instance, &devices[index], DeviceOptions { copy_queue, ..Default::default() })
}

/// Free memory of a device: its largest local heap, and the largest of the others.
fn free_memory(device: &Device) -> Budget {
    let free = |local: bool| {
        let heaps = device.memory_budget();
        let fitting = heaps.iter().filter(|h| h.device_local == local);
        fitting.map(|h| h.budget_bytes.saturating_sub(h.usage_bytes)).max()
    };
    let device_bytes = free(true).unwrap_or(0);
    let host = free(false);
    let sharing = match host {
        None => Sharing::Heap,
        Some(_) if device.info().shares_host_memory() => Sharing::Chips,
        Some(_) => Sharing::None,
    };
    Budget { device_bytes, host_bytes: host.unwrap_or(device_bytes), sharing }
}

/// One line for each rule of `-ot` under which no tensor falls: it is misspelled more often than not.
fn warn_of_idle_rules(options: &EngineOptions, weights: &[WeightInfo]) {
    let names: Vec<&str> = weights.iter().map(|w| w.name.as_str()).collect();
    for rule in options.placement.overrides.unmatched(&names) {
        log::warn!("-ot {rule}: no tensor of the model has such a name");
    }
}

/// The cache of a session: as asked for, else as much of the trained context as is reasonable.
fn kv_shape(
    hp: &HParams,
    options: &EngineOptions,
    budget: Budget,
    storage_range_bytes: u64,
) -> Result<KvShape> {
    let shape = |n_ctx| KvShape { n_ctx, type_k: options.type_k, type_v: options.type_v };
    let range = storage_range_bytes;
    if options.n_ctx > 0 {
        shape(options.n_ctx).check(hp, range)?;
        return Ok(shape(options.n_ctx));
    }
    let mut n_ctx = hp.n_ctx_train;
    let reasonable = |n_ctx| {
        let fits = shape(n_ctx).bytes(hp) <= budget.device_bytes / AUTO_KV_SHARE;
        fits && shape(n_ctx).check(hp, range).is_ok()
    };
    while n_ctx / 2 >= MIN_AUTO_CTX && !reasonable(n_ctx) {
        n_ctx /= 2;
    }
    shape(n_ctx).check(hp, range)?;
    Ok(shape(n_ctx))
}

/// The sizes of a pass. `n_kv`: tokens in the cache afterwards.
pub(super) fn pass_shape(
    hp: &HParams,
    tuning: &Tuning,
    n_tokens: u32,
    n_outputs: u32,
    n_kv: u32,
    top: Option<u32>,
) -> PassShape {
    let output_rows = OUTPUT_BYTES / (u64::from(hp.n_vocab) * 4);
    let n_pairs = u64::from(n_tokens) * u64::from(hp.experts.n_used);
    let per_expert = n_pairs / u64::from(hp.experts.n_expert.max(1));
    PassShape {
        n_tokens,
        n_outputs,
        output_rows: output_rows.clamp(1, 256) as u32,
        top,
        n_splits: tuning.attention_splits(&hp.attention, n_tokens, n_kv),
        group_from: tuning.group_from,
        group_tile: tuning.group_tile(per_expert.min(u64::from(u32::MAX)) as u32),
        fusions: tuning.fusions(&hp.attention),
    }
}

/// Refuses a ubatch whose activations are larger than a kernel can bind.
fn check_ubatch(model: &Model, shape: &PassShape, storage_range_bytes: u64) -> Result<()> {
    let graph = model.graph(shape);
    let largest = graph.tensors.iter().map(|t| t.bytes()).max().unwrap_or(0);
    if largest <= storage_range_bytes {
        return Ok(());
    }
    let possible = u64::from(shape.n_tokens) * storage_range_bytes / largest;
    let problem =
        format!("{} tokens are too many for this device; {possible} are possible", shape.n_tokens);
    Err(Error::usage("-ub", problem))
}

/// Scratch memory for every pass of up to `n_ubatch` tokens in a context of `n_ctx`.
fn scratch_bytes(model: &Model, tuning: &Tuning, n_ubatch: u32, n_ctx: u32) -> u64 {
    // Small passes split their keys, and more so the smaller they are: for each number of splits the
    // largest pass counts.
    let splits = |n_tokens| tuning.attention_splits(&model.hparams.attention, n_tokens, n_ctx);
    let is_largest = |&n: &u32| n == n_ubatch || splits(n) != splits(n + 1);
    let bytes = (1..=n_ubatch).filter(is_largest).map(|n_tokens| {
        let shape = pass_shape(&model.hparams, tuning, n_tokens, n_tokens, n_ctx, None);
        scratch::plan(&model.graph(&shape)).bytes.max(part_bytes(model, &shape))
    });
    bytes.max().unwrap_or(0)
}

/// Scratch memory for the parts of a pass, whose residual stream lies elsewhere.
fn part_bytes(model: &Model, shape: &PassShape) -> u64 {
    let layers = (0..model.hparams.n_layer).map(Part::Layer);
    let bytes = layers.chain([Part::Embedding, Part::Head]).map(|part| {
        let graph = model.part(part, shape);
        let batch = BatchLayout::new(0, shape.n_tokens, model.hparams.n_embd);
        scratch::plan_beside(&graph, &batch.fixed(&graph, 0)).bytes
    });
    bytes.max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::Graph;
    use crate::graph::parts::Stream;
    use crate::vk::{DeviceInfo, DeviceKind};
    use regex::{Captures, Regex};

    /// Every pass finds the scratch memory that was planned, however its keys are split.
    #[test]
    fn scratch_memory_is_enough_for_every_pass() -> Result<()> {
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo-q4_k_m.gguf");
        let model = Model::load(&Gguf::open(&demo)?)?;
        for (kind, subgroup) in [(DeviceKind::Cpu, 8), (DeviceKind::Discrete, 32)] {
            let mut info = DeviceInfo::default();
            info.kind = kind;
            info.subgroup.default = subgroup;
            let tuning = Tuning::new(&info);
            for n_ubatch in [1, 40, 100, 512] {
                let planned = scratch_bytes(&model, &tuning, n_ubatch, 4096);
                for n_tokens in 1..=n_ubatch {
                    for n_kv in [n_tokens, 700, 4096] {
                        let shape =
                            pass_shape(&model.hparams, &tuning, n_tokens, n_tokens, n_kv, None);
                        let needed = scratch::plan(&model.graph(&shape)).bytes;
                        let needed = needed.max(part_bytes(&model, &shape));
                        assert!(needed <= planned, "{n_tokens} of {n_ubatch} tokens: {needed}");
                    }
                }
            }
        }
        Ok(())
    }

    /// Ops as text, in which tensors are numbered in the order of their first use.
    struct Texts {
        tensor: Regex,
        n: usize,
    }

    impl Texts {
        fn new() -> Self {
            let tensor = Regex::new(r"Tensor\((\d+)\)").unwrap_or_else(|e| panic!("{e}"));
            Texts { tensor, n: 0 }
        }

        fn of(&mut self, graph: &Graph, known: &mut HashMap<String, usize>) -> Vec<String> {
            let mut number = |found: &Captures<'_>| {
                let number = known.entry(found[0].to_string()).or_insert_with(|| {
                    self.n += 1;
                    self.n
                });
                format!("t{number}")
            };
            let text = |op| self.tensor.replace_all(&format!("{op:?}"), &mut number).into_owned();
            graph.ops.iter().map(text).collect()
        }
    }

    /// The tensors of a stream, as [`Texts`] finds them.
    fn tensors(stream: Option<Stream>) -> impl Iterator<Item = String> {
        let tensors = stream.into_iter().flat_map(|s| [Some(s.x), s.delta]).flatten();
        tensors.map(|t| format!("{t:?}"))
    }

    fn parts(model: &Model) -> impl Iterator<Item = Part> {
        let layers = (0..model.hparams.n_layer).map(Part::Layer);
        [Part::Embedding].into_iter().chain(layers).chain([Part::Head])
    }

    /// A pass in parts has the ops of the whole pass, on every device and for any number of tokens, and what it
    /// keeps between parts is not overwritten while it is read.
    #[test]
    fn parts_are_the_whole() -> Result<()> {
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo-q4_k_m.gguf");
        let model = Model::load(&Gguf::open(&demo)?)?;
        for (kind, half_from) in
            [(DeviceKind::Cpu, None), (DeviceKind::Discrete, None), (DeviceKind::Discrete, Some(9))]
        {
            let mut info = DeviceInfo::default();
            (info.kind, info.subgroup.default) = (kind, 8);
            let tuning = Tuning::new(&info);
            for n_tokens in [1, 2, 5, 8, 9, 32, 33, 80] {
                let mut shape = pass_shape(&model.hparams, &tuning, n_tokens, 1, 4096, Some(1));
                shape.fusions.half_from = half_from;
                let whole = Texts::new().of(&model.graph(&shape), &mut HashMap::new());
                let (mut texts, mut ops, mut stream) = (Texts::new(), Vec::new(), Vec::new());
                for part in parts(&model) {
                    let graph = model.part(part, &shape);
                    let mut known = tensors(graph.border.enters).zip(stream).collect();
                    ops.extend(texts.of(&graph, &mut known));
                    stream = tensors(graph.border.leaves).map(|t| known[&t]).collect();
                    let batch = BatchLayout::new(1000, n_tokens, model.hparams.n_embd);
                    let fixed = batch.fixed(&graph, 3);
                    scratch::plan_beside(&graph, &fixed);
                    let ends = fixed.iter().map(|&(t, offset)| offset + graph.shape(t).bytes());
                    assert!(fixed.iter().all(|&(_, offset)| offset >= batch.ids(3)));
                    assert!(ends.max().is_some_and(|end| end <= batch.ids(4)), "{part:?}");
                }
                assert_eq!(ops, whole, "{n_tokens} tokens");
            }
        }
        Ok(())
    }
}
