//! Moves experts: the thin part that puts the decisions of [`rotation`](super::rotation),
//! [`gate`](super::gate) and [`ring`] into submissions on the copy lane.
//!
//! A pass calls [`begin`](Streamer::begin), then for each use of a streamed tensor, in order,
//! [`advance`](Streamer::advance), [`filled`](Streamer::filled) before the submission that reads it, and
//! [`read`](Streamer::read) after it. A batch of several ubatches that goes layer by layer calls
//! [`begin_layers`](Streamer::begin_layers) instead: then the first ubatch waits for `filled`, and `read`
//! follows the last.

mod cache;

use super::chaos::Chaos;
use super::copies::{CopyMarks, Target, Transfer};
use super::entries::Entries;
use super::fetch::{Fetch, FetchTables, MAX_PAIRS};
use super::gate::{Access, Gate, Outlook, Speeds};
use super::host_tensor::HostTensor;
use super::options::{HostSource, LINK_GBPS, MIN_SLOTS};
use super::packing;
use super::pin_budget::{Limit, PinReport};
use super::pins::{Pinned, Pins};
use super::ring::{self, Ring};
use super::rotation::{Copy, Fill, Rotation, Slot};
use super::slots::{SlotLayout, Slots};
use crate::error::{Error, Result};
use crate::exec::residency::{Residency, check_matrix};
use crate::gguf::Gguf;
use crate::graph::WeightId;
use crate::vk::{Buffer, Device, Lane, MemoryKind, Point};
use cache::Cache;
use std::collections::HashMap;
use std::sync::Arc;

/// Kernels load so many bytes at once.
const LOAD_ALIGN: u64 = 16;

/// Share of the bus that the kernel gets that copies chosen experts (H200: 47 of 49 GB/s).
const FETCH_SHARE: f64 = 0.95;

/// What the streamer is made for.
pub struct StreamerParts {
    /// The device.
    pub device: Arc<Device>,
    /// The file.
    pub gguf: Arc<Gguf>,
    /// What stays on the host, in the order of use.
    pub tensors: Vec<HostTensor>,
    /// Experts that a token uses.
    pub n_used: u32,
    /// Slots to prefetch into; 0: no prefetching.
    pub n_slots: u32,
    /// Device memory for the expert cache; 0: none.
    pub cache_bytes: u64,
    /// The pinning, unless everything goes through the ring.
    pub pins: Option<Pins>,
    /// The ring, where one is needed.
    pub ring: ring::Layout,
    /// Measured speed of the bus.
    pub link_gbps: Option<f64>,
    /// Disorder for tests.
    pub chaos: Option<Chaos>,
}

/// Sizes of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tokens {
    /// Of each ubatch but the last, which may have fewer.
    pub n_ubatch: u32,
    /// Of all of them.
    pub n_batch: u32,
}

/// See the module.
pub struct Streamer {
    parts: StreamerParts,
    by_weight: HashMap<WeightId, usize>,
    /// By tensor.
    pinned: Vec<Option<Pinned>>,
    /// By tensor: whether its table has its addresses.
    readable: Vec<bool>,
    /// Pinned, and not in the tables yet.
    fresh: Vec<usize>,
    /// Whether the pinning is over and all that it brought is in `pinned`.
    settled: bool,
    slots: Option<Slots>,
    /// By tensor: its place among those of its layer, which is its slot where a kernel copies experts.
    in_layer: Vec<u32>,
    /// For that kernel.
    fetch_tables: Option<FetchTables>,
    /// Whether it runs in this pass.
    fetches: bool,
    /// Whether this pass goes layer by layer.
    by_layer: bool,
    /// Prefetching was given up for lack of memory.
    no_prefetch: bool,
    rotation: Rotation,
    ring: Option<Ring>,
    cache: Option<Cache>,
    /// What kernels of the last pass read from host memory, if that is known.
    direct_bytes: Option<u64>,
    speeds: Speeds,
    /// By tensor: how this pass gets at it.
    access: Vec<Access>,
    /// Tensors that this pass moves, in order.
    uses: Vec<usize>,
    /// By tensor: its place in `uses`.
    use_of: Vec<Option<usize>>,
    /// By use: chosen experts, ascending, once the router has run.
    experts: Vec<Vec<u32>>,
}

impl Streamer {
    /// With nothing allocated yet.
    pub fn new(parts: StreamerParts) -> Result<Self> {
        let limit = parts.device.info().limits.allocated_buffer_bytes();
        let slack = packing::TAIL_BYTES + packing::WEIGHT_ALIGN;
        for t in &parts.tensors {
            check_matrix(&parts.gguf, &t.name, t.file.matrix_bytes, slack, limit)?;
            check_alignment(&parts.gguf, t)?;
        }
        let by_weight = parts.tensors.iter().enumerate().map(|(i, t)| (t.weight, i)).collect();
        let n = parts.tensors.len();
        Ok(Streamer {
            by_weight,
            pinned: (0..n).map(|_| None).collect(),
            readable: vec![false; n],
            fresh: Vec::new(),
            settled: parts.pins.is_none(),
            slots: None,
            in_layer: in_layer(&parts.tensors),
            fetch_tables: None,
            fetches: false,
            by_layer: false,
            no_prefetch: false,
            rotation: Rotation::new(parts.n_slots.max(MIN_SLOTS)),
            ring: None,
            cache: None,
            direct_bytes: None,
            speeds: Speeds::new(parts.link_gbps.unwrap_or(LINK_GBPS)),
            access: vec![Access::Direct; n],
            uses: Vec::new(),
            use_of: vec![None; n],
            experts: Vec::new(),
            parts,
        })
    }

    /// Decides how a pass of `n_tokens` gets at every tensor. `outlook`: see [`Gate`]; `None`: nothing
    /// is prefetched, as in decode.
    pub fn begin(
        &mut self,
        residency: &Residency,
        n_tokens: u32,
        outlook: Option<Outlook>,
    ) -> Result<()> {
        self.adopt(residency)?;
        let tokens = Tokens { n_ubatch: n_tokens, n_batch: n_tokens };
        self.decide(tokens, outlook);
        if self.access.iter().any(|&a| a != Access::Direct) {
            self.reserve_slots()?;
            // There may be fewer than wanted.
            self.decide(tokens, outlook);
        }
        self.start()?;
        let is_far = (0..self.access.len()).any(|tensor| self.host_bytes(tensor) > 0);
        let can = is_far && self.can_fetch(n_tokens) && !self.moves();
        self.fetches = can && self.reserve_fetch()?;
        Ok(())
    }

    /// Whether a kernel copies what this pass would read directly.
    pub fn fetches(&self) -> bool {
        self.fetches
    }

    /// Whether a kernel may copy what a pass of so many tokens uses. The slots are idle then, and have room for
    /// the tensors of a layer.
    fn can_fetch(&self, n_tokens: u32) -> bool {
        let n_slots = self.slots.as_ref().map_or(self.parts.n_slots, Slots::n);
        let fits = |&place: &u32| place < n_slots;
        !self.no_prefetch
            && n_tokens * self.parts.n_used <= MAX_PAIRS
            && self.in_layer.iter().all(fits)
            && self.parts.tensors.iter().all(|t| t.file.matrix_bytes <= u32::MAX.into())
    }

    /// Allocates slots and tables for that; whether there are.
    fn reserve_fetch(&mut self) -> Result<bool> {
        self.reserve_slots()?;
        let Some(slots) = self.slots.as_ref().filter(|_| self.can_fetch(1)) else {
            return Ok(false);
        };
        // What is in the cache as a whole may not be pinned yet: nothing is fetched by its addresses, which are 0.
        let n_pinned = self.pinned.iter().flatten().count();
        if self.fetch_tables.as_ref().is_none_or(|tables| tables.n_pinned() < n_pinned) {
            let of_tensor = |(pinned, t): (&Option<Pinned>, &HostTensor)| {
                let address = |e| pinned.as_ref().map_or(0, |pinned| pinned.address(e as usize));
                (0..t.file.n_expert).map(address).collect()
            };
            let tensors = self.pinned.iter().zip(&self.parts.tensors);
            let hosts: Vec<Vec<u64>> = tensors.map(of_tensor).collect();
            let tables = FetchTables::new(&self.parts.device, &hosts, slots.n(), n_pinned)?;
            self.fetch_tables = Some(tables);
        }
        Ok(true)
    }

    /// What the kernel takes that copies chosen experts of a tensor, if this pass reads them that way.
    pub fn fetch(&self, weight: WeightId) -> Option<Fetch> {
        let tensor = *self.by_weight.get(&weight).filter(|_| self.fetches)?;
        let (slots, tables) = (self.slots.as_ref()?, self.fetch_tables.as_ref()?);
        let slot = self.in_layer[tensor];
        Some(Fetch {
            hosts: tables.hosts(tensor),
            slot: slots.table(tensor, Slot(slot)),
            found: tables.found(slot),
            bytes: self.parts.tensors[tensor].file.matrix_bytes as u32,
        })
    }

    /// Begins a pass of several ubatches that goes through the model layer by layer, if that is worth it:
    /// something is prefetched then, once for all ubatches, and the slots hold what a layer prefetches. If not,
    /// nothing is begun, and the ubatches go one by one.
    pub fn begin_layers(
        &mut self,
        residency: &Residency,
        tokens: Tokens,
        outlook: Outlook,
    ) -> Result<bool> {
        self.adopt(residency)?;
        self.decide(tokens, Some(outlook));
        if !self.access.contains(&Access::Prefetch) {
            return Ok(false);
        }
        self.reserve_slots()?;
        self.decide(tokens, Some(outlook));
        if !self.goes_by_layer() {
            return Ok(false);
        }
        self.start()?;
        self.by_layer = true;
        Ok(true)
    }

    /// Whether something is prefetched, and of each layer no more than there are slots, and nothing is
    /// gathered: what is depends on the ubatch.
    fn goes_by_layer(&self) -> bool {
        let n_slots = self.rotation.n_slots() as usize;
        let prefetched = |t: usize| self.access[t] == Access::Prefetch;
        let layers = self.parts.tensors.iter().map(|t| t.il).enumerate().collect::<Vec<_>>();
        let of_layer = |layer: &[(usize, _)]| layer.iter().filter(|(t, _)| prefetched(*t)).count();
        let widest = layers.chunk_by(|(_, a), (_, b)| a == b).map(of_layer).max().unwrap_or(0);
        !self.access.contains(&Access::Gather) && (1..=n_slots).contains(&widest)
    }

    /// Begins the pass that was decided on.
    fn start(&mut self) -> Result<()> {
        (self.fetches, self.by_layer) = (false, false);
        self.uses = (0..self.access.len()).filter(|&t| self.access[t] != Access::Direct).collect();
        self.reserve_ring()?;
        self.use_of.fill(None);
        for (index, &tensor) in self.uses.iter().enumerate() {
            self.use_of[tensor] = Some(index);
        }
        self.direct_bytes = None;
        self.experts = vec![Vec::new(); self.uses.len()];
        let fill = |&t: &usize| match self.access[t] {
            Access::Prefetch => Fill::Full,
            Access::Gather | Access::Direct => Fill::Used,
        };
        self.rotation.begin(self.uses.iter().map(fill).collect());
        Ok(())
    }

    fn decide(&mut self, tokens: Tokens, outlook: Option<Outlook>) {
        let outlook = match outlook {
            Some(outlook) if self.parts.n_slots > 0 && self.can_fetch(tokens.n_ubatch) => {
                Some(Outlook { direct_share: FETCH_SHARE, ..outlook })
            }
            outlook => outlook,
        };
        let prefetch = self.parts.n_slots > 0 && !self.no_prefetch && outlook.is_some();
        for (tensor, t) in self.parts.tensors.iter().enumerate() {
            let bytes = self.host_bytes(tensor);
            if bytes == 0 {
                // In the cache, all of it.
                self.access[tensor] = Access::Direct;
                continue;
            }
            let gate = Gate {
                readable: self.readable[tensor],
                prefetch,
                bytes,
                n_expert: t.file.n_expert,
                n_used: self.parts.n_used,
                n_tokens: tokens.n_ubatch,
                n_batch: tokens.n_batch,
                outlook: outlook.unwrap_or(Outlook { idle_ns: 0.0, direct_share: 1.0 }),
            };
            self.access[tensor] = gate.access(&self.speeds);
        }
    }

    /// Bytes of a tensor that are on the host only.
    fn host_bytes(&self, tensor: usize) -> u64 {
        let file = &self.parts.tensors[tensor].file;
        let n_held = self.cache.as_ref().map_or(0, |cache| cache.n_held(tensor));
        u64::from(file.n_expert - n_held) * file.matrix_bytes
    }

    /// Whether an expert of a tensor needs no copy to a slot: the slots' tables know it in the cache.
    fn is_cached(&self, tensor: usize, expert: u32) -> bool {
        self.cache.as_ref().is_some_and(|cache| cache.holds(tensor, expert))
    }

    /// Whether this pass moves anything.
    pub fn moves(&self) -> bool {
        !self.uses.is_empty()
    }

    /// The table of a tensor that this pass reads in a slot.
    pub fn table(&self, weight: WeightId) -> Option<u64> {
        if let Some(fetch) = self.fetch(weight) {
            return Some(fetch.found);
        }
        let tensor = *self.by_weight.get(&weight)?;
        let index = self.use_of[tensor]?;
        Some(self.slots.as_ref()?.table(tensor, self.rotation.slot(index)))
    }

    /// The place of a weight among this pass's uses.
    pub fn use_of(&self, weight: WeightId) -> Option<usize> {
        self.use_of[*self.by_weight.get(&weight)?]
    }

    /// Whether kernels of this pass read the weight in host memory.
    pub fn is_direct(&self, weight: WeightId) -> bool {
        self.by_weight.get(&weight).is_some_and(|&t| self.access[t] == Access::Direct)
    }

    /// Whether a use waits for the router's choice, which is not known yet.
    pub fn awaits_router(&self, index: usize) -> bool {
        let gathers = self.access[self.uses[index]] == Access::Gather;
        gathers && self.experts[index].is_empty()
    }

    /// The router chose these experts for the uses from `first` on, `n` of them.
    pub fn routed(&mut self, first: usize, n: usize, ids: &[u32]) {
        for index in first..first + n {
            let n_expert = self.parts.tensors[self.uses[index]].file.n_expert;
            let mut experts: Vec<u32> = ids.iter().copied().filter(|&e| e < n_expert).collect();
            experts.sort_unstable();
            experts.dedup();
            self.experts[index] = experts;
        }
        self.rotation.routed(first + n);
    }

    /// Submits the copies that are due. `before` records ahead of each copy and `after` behind it, for
    /// timestamps.
    pub fn advance(&mut self, marks: &mut dyn CopyMarks) -> Result<()> {
        while let Some(copy) = self.rotation.next_copy() {
            if let Some(chaos) = &mut self.parts.chaos
                && chaos.postpones(&copy)
            {
                return Ok(());
            }
            let point = self.submit(copy, marks)?;
            self.rotation.copied(point.value);
        }
        Ok(())
    }

    /// The point that the reader of a use waits for. Its copy is submitted if it was not.
    pub fn filled(&mut self, index: usize, marks: &mut dyn CopyMarks) -> Result<Point> {
        loop {
            if let Some(value) = self.rotation.filled(index) {
                return Ok(Point { lane: Lane::Copy, value });
            }
            let Some(copy) = self.rotation.next_copy() else {
                unreachable!("use {index} cannot be copied before it is read")
            };
            let point = self.submit(copy, marks)?;
            self.rotation.copied(point.value);
        }
    }

    /// The last reader of the next use was submitted.
    pub fn read(&mut self, point: Point) {
        self.rotation.read(point.value);
    }

    /// Whether disorder for tests wants a stage of the pass to end.
    pub fn ends_stage(&mut self) -> bool {
        self.parts.chaos.as_mut().is_some_and(Chaos::ends_stage)
    }

    /// Buffers that kernels of this pass reach by address.
    pub fn buffers(&self) -> impl Iterator<Item = &Buffer> {
        let direct = self.pinned.iter().flatten().flat_map(|p| &p.buffers);
        let cache = self.cache.iter().flat_map(Cache::buffers);
        let tables = self.fetch_tables.iter().flat_map(FetchTables::buffers);
        self.slots.iter().flat_map(Slots::buffers).chain(cache).chain(tables).chain(direct)
    }

    /// An error if kernels of the last pass read pages of a file that changed meanwhile. What was copied
    /// was checked when it was read.
    pub fn check_pages(&self) -> Result<()> {
        let pins = self.parts.pins.as_ref();
        match pins.is_some_and(|pins| pins.source() == HostSource::Mmap) {
            true => self.parts.gguf.check(),
            false => Ok(()),
        }
    }

    /// Bytes that kernels of the last pass, which had `n_tokens`, read from host memory; by estimate, unless the
    /// cache knows.
    pub fn direct_bytes(&self, n_tokens: u32) -> u64 {
        if let Some(bytes) = self.direct_bytes {
            return bytes;
        }
        let direct = (0..self.access.len()).filter(|&t| self.access[t] == Access::Direct);
        let read = |t: usize| {
            let file = &self.parts.tensors[t].file;
            let share = super::gate::touched_share(file.n_expert, self.parts.n_used, n_tokens);
            (share * self.host_bytes(t) as f64) as u64
        };
        direct.map(read).sum()
    }

    /// Waits until everything that will be pinned is.
    pub fn wait_for_pins(&mut self) {
        if let Some(pins) = &mut self.parts.pins {
            pins.wait();
        }
    }

    /// What the pinning came to, so far.
    pub fn pin_report(&self) -> PinReport {
        let not_pinned = || PinReport {
            pinned_bytes: 0,
            wanted_bytes: self.parts.tensors.iter().map(|t| t.file.bytes()).sum(),
            source: HostSource::Ring,
            limit: Limit::Ring,
        };
        self.parts.pins.as_ref().map_or_else(not_pinned, Pins::report)
    }

    /// Shows no more how far the pinning is.
    pub fn hide_progress(&self) {
        if let Some(pins) = &self.parts.pins {
            pins.hide_progress();
        }
    }

    /// The tensors that stay on the host.
    pub fn tensors(&self) -> &[HostTensor] {
        &self.parts.tensors
    }

    /// Learns the speed of the bus from the copies of a pass.
    pub fn learn_link(&mut self, bytes: u64, ns: u64) {
        self.speeds.learn_link(bytes, ns);
    }

    /// Learns from a pass of `n_tokens` that took `ns`, if it got at all experts in one way: `bytes` of
    /// them, copied or read directly.
    pub fn learn_pass(&mut self, n_tokens: u32, bytes: u64, ns: u64) {
        let Some((&first, rest)) = self.access.split_first() else { return };
        if rest.iter().all(|&access| access == first) {
            self.speeds.learn_pass(first, n_tokens, bytes, ns);
        }
    }

    /// Takes over tensors that were pinned meanwhile, so that kernels find them from this pass on. No
    /// pass runs now.
    fn adopt(&mut self, residency: &Residency) -> Result<()> {
        // Without slots, or without anything to copy to, the ring is the exception.
        if let Some(pins) = self.parts.pins.as_mut().filter(|_| self.parts.n_slots == 0) {
            pins.wait();
        }
        self.take_pinned()?;
        self.reserve_cache()?;
        let mut entries = Entries::default();
        let arrived = self.settle(residency, &mut entries)?;
        entries.submit(&self.parts.device, arrived.as_slice())?;
        let mut entries = Entries::default();
        for tensor in std::mem::take(&mut self.fresh) {
            let Some(pinned) = &self.pinned[tensor] else { continue };
            let (table, offset) = residency.table_place(self.parts.tensors[tensor].weight);
            let n_expert = self.parts.tensors[tensor].file.n_expert;
            for expert in (0..n_expert).filter(|&e| !self.is_cached(tensor, e)) {
                let address = pinned.address(expert as usize);
                entries.add(table, offset + u64::from(expert) * 8, address);
            }
            self.readable[tensor] = true;
        }
        entries.submit(&self.parts.device, &[])
    }

    /// Takes over tensors that were pinned meanwhile: copies read them where they are from now on.
    fn take_pinned(&mut self) -> Result<()> {
        let Some(pins) = self.parts.pins.as_ref().filter(|_| !self.settled) else { return Ok(()) };
        let finished = pins.is_finished();
        for (tensor, pinned) in pins.take()? {
            self.pinned[tensor] = Some(pinned);
            self.fresh.push(tensor);
        }
        self.settled = finished;
        Ok(())
    }

    /// Allocates the slots: as many as wanted, or fewer. What is not pinned needs two at least, since a kernel
    /// may read gate and up, if need be in host memory; what is pinned, kernels can read where it is.
    fn reserve_slots(&mut self) -> Result<()> {
        if self.slots.is_some() {
            return Ok(());
        }
        let device = &self.parts.device;
        let limit = device.info().limits.allocated_buffer_bytes();
        let mut layout = SlotLayout::new(&self.parts.tensors, limit);
        let wanted = self.parts.n_slots.max(MIN_SLOTS);
        let is_must = self.pinned.iter().any(Option::is_none);
        let of_device = (MIN_SLOTS..=wanted).rev().map(|n| (n, MemoryKind::Device));
        for (n, kind) in of_device.chain(is_must.then_some((MIN_SLOTS, MemoryKind::HostRead))) {
            match Slots::new(device, layout, n, kind) {
                Ok(slots) => {
                    tell_fewer(wanted, n, kind);
                    self.rotation = Rotation::new(n);
                    self.no_prefetch = kind != MemoryKind::Device;
                    self.slots = Some(slots);
                    return self.enter_all();
                }
                Err((Error::OutOfMemory { .. }, same)) => layout = same,
                Err((e, _)) => return Err(e),
            }
        }
        if !is_must {
            tell_fewer(wanted, 0, MemoryKind::Device);
            self.no_prefetch = true;
            return Ok(());
        }
        Err(Error::OutOfMemory {
            what: format!("{MIN_SLOTS} staging slots"),
            needed_bytes: u64::from(MIN_SLOTS) * layout.bytes(),
            available_bytes: 0,
            hint: "; a smaller context (-c) or ubatch (-ub) leaves room".into(),
        })
    }

    /// Allocates the ring if this pass needs it, and frees it once nothing will.
    fn reserve_ring(&mut self) -> Result<()> {
        let unpinned = |&&t: &&usize| self.pinned[t].is_none();
        if self.uses.iter().any(|t| unpinned(&t)) {
            if self.ring.is_none() {
                self.ring = Some(Ring::new(&self.parts.device, self.parts.ring)?);
            }
        } else if self.settled && self.pinned.iter().all(Option::is_some) {
            self.ring = None;
        }
        Ok(())
    }

    /// Submits one copy of the rotation, in as many submissions as it needs.
    fn submit(&mut self, copy: Copy, marks: &mut dyn CopyMarks) -> Result<Point> {
        self.take_pinned()?;
        let tensor = self.uses[copy.index];
        let file = self.parts.tensors[tensor].file;
        let all: Vec<u32>;
        let wanted = match copy.fill {
            Fill::Full => {
                all = (0..file.n_expert).collect();
                &all
            }
            Fill::Used => &self.experts[copy.index],
        };
        let on_host = |e: &u32| !self.is_cached(tensor, *e);
        let experts: Vec<u32> = wanted.iter().copied().filter(on_host).collect();
        let ranges = packing::expert_ranges(&experts, file.matrix_bytes);
        let mut waits = waits(&copy);
        if let Some(chaos) = &mut self.parts.chaos
            && let Some(slots) = &self.slots
        {
            waits.push(chaos.disturb(&self.parts.device, slots, copy.slot, &waits)?);
        }
        let Some(slots) = &self.slots else {
            unreachable!("a pass that copies reserved its slots")
        };
        let pieces = slots.layout().pieces(tensor);
        let transfer = Transfer {
            device: &self.parts.device,
            tensor: (tensor, &self.parts.tensors[tensor]),
            target: Target {
                place: &|at| packing::locate(pieces, file.matrix_bytes, at),
                buffer: &|chunk| slots.buffer(copy.slot, chunk),
            },
            ranges: &ranges,
            waits: &waits,
            // Where the bus is the bound, two at a time are a little faster. Where kernels are, what is needed next
            // is better there sooner.
            beside: !self.by_layer,
        };
        match (&self.pinned[tensor], &mut self.ring) {
            (Some(pinned), _) => transfer.out_of_pinned(pinned, marks),
            (None, Some(ring)) => transfer.through_ring(ring, &self.parts.gguf, marks),
            (None, None) => unreachable!("a pass that copies what is not pinned reserved the ring"),
        }
    }
}

/// By tensor: how many of its layer come before it. Those of a layer follow each other.
fn in_layer(tensors: &[HostTensor]) -> Vec<u32> {
    let of_layer = |layer: &[HostTensor]| 0..layer.len() as u32;
    tensors.chunk_by(|a, b| a.il == b.il).flat_map(of_layer).collect()
}

/// Refuses a tensor that kernels could not read where the file has it, nor where it is copied to: copies keep
/// the offset's low bits.
fn check_alignment(gguf: &Gguf, t: &HostTensor) -> Result<()> {
    if t.file.offset.is_multiple_of(LOAD_ALIGN) {
        return Ok(());
    }
    let problem = format!(
        "it begins at byte {}; experts in host memory need a multiple of {LOAD_ALIGN} (`general.alignment`)",
        t.file.offset
    );
    Err(gguf.error(format!("tensor `{}`", t.name), problem))
}

/// One line if there are fewer slots than wanted.
fn tell_fewer(wanted: u32, n: u32, kind: MemoryKind) {
    match (n, kind) {
        _ if n == wanted && kind == MemoryKind::Device => {}
        (0, MemoryKind::Device) => {
            log::warn!("no memory for {wanted} staging slots: experts are not prefetched");
        }
        (_, MemoryKind::Device) => {
            log::warn!("no memory for {wanted} staging slots: {n} are used");
        }
        _ => log::warn!("no device memory for staging slots: they are in host memory"),
    }
}

fn waits(copy: &Copy) -> Vec<Point> {
    let points = [(Lane::Compute, copy.after_compute), (Lane::Copy, copy.after_copy)];
    let points = points.into_iter().filter(|(_, value)| *value > 0);
    points.map(|(lane, value)| Point { lane, value }).collect()
}
