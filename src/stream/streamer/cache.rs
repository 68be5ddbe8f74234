//! The streamer's part of the expert cache: what [`ExpertCache`] decides becomes copies on the copy lane and entries
//! of tables.
//!
//! Tables change between passes only, in [`Streamer::settle`], on the compute lane, so that the next pass sees them:
//! both the table that kernels take where experts are read in place, and those of the staging slots, so that what is
//! cached needs no copy to a slot. Copies are submitted in [`Streamer::promote`], once a pass is on its way, and run
//! beside it. They share the lane with copies to slots: those that follow come after them, which is why
//! what may be on its way at a time is a fraction of what a token reads.

use super::{Streamer, StreamerParts};
use crate::error::Result;
use crate::exec::residency::Residency;
use crate::gguf::Gguf;
use crate::stream::chaos::Chaos;
use crate::stream::copies::{CopyMarks, CopyRecord, Target, Transfer};
use crate::stream::entries::Entries;
use crate::stream::expert_cache::{
    Change, ExpertCache, ExpertId, LayerShape, Promotion, Reached, Temper, classes, divide,
};
use crate::stream::gate::Access;
use crate::stream::host_tensor::HostTensor;
use crate::stream::packing::{self, Piece, WEIGHT_ALIGN};
use crate::stream::pins::Pinned;
use crate::stream::ring::Ring;
use crate::stream::stats::StreamStats;
use crate::stream::units::Units;
use crate::vk::{Buffer, Device, Lane, Point, Recorder, Replay};
use std::ops::Range;
use std::sync::Arc;

/// Of the bytes that a token reads from the host so many may be copied as well: they take a third of the bus.
const PROMOTED_SHARE: u64 = 2;

/// A layer whose experts are in host memory.
#[derive(Debug)]
pub(super) struct Layer {
    il: u32,
    /// Its tensors, by index into the streamer's.
    tensors: Range<usize>,
    /// Where the matrix of each begins in a unit, but for its phase.
    starts: Vec<u64>,
    shape: LayerShape,
    /// Bytes of an expert.
    expert_bytes: u64,
}

/// The layers of tensors in the order of use.
pub(super) fn layers(tensors: &[HostTensor]) -> Vec<Layer> {
    let mut end = 0;
    let of_layer = |tensors: &[HostTensor]| {
        let start = end;
        end += tensors.len();
        let first = tensors.first()?;
        let is_even = tensors.iter().all(|t| t.file.n_expert == first.file.n_expert);
        let sizes = || tensors.iter().map(|t| t.file.matrix_bytes);
        let (starts, unit_bytes) = packing::unit(sizes());
        let shape = LayerShape { unit_bytes, n_expert: first.file.n_expert };
        is_even.then_some(Layer {
            il: first.il?,
            tensors: start..start + tensors.len(),
            starts,
            shape,
            expert_bytes: sizes().sum(),
        })
    };
    tensors.chunk_by(|a, b| a.il == b.il).filter_map(of_layer).collect()
}

/// Units and what is in them.
pub(super) struct Cache {
    policy: ExpertCache,
    units: Units,
    layers: Vec<Layer>,
    /// By tensor: its layer, and which of that layer's it is.
    of_tensor: Vec<Option<(u32, usize)>>,
    /// Bytes that a token reads from the host if nothing is cached.
    token_bytes: u64,
    /// The same of the last pass, as far as it waited for them.
    missed_bytes: u64,
    /// Since they were taken.
    stats: StreamStats,
    n_evicted: u64,
}

impl Cache {
    fn new(parts: &StreamerParts) -> Result<Option<Cache>> {
        let layers = layers(&parts.tensors);
        let shapes: Vec<LayerShape> = layers.iter().map(|layer| layer.shape).collect();
        let wanted = divide(&classes(&shapes), parts.cache_bytes);
        if wanted.iter().all(|class| class.n == 0) {
            return Ok(None);
        }
        let (units, given) = Units::new(&parts.device, &wanted)?;
        if given.iter().all(|class| class.n == 0) {
            return Ok(None);
        }
        let mut of_tensor = vec![None; parts.tensors.len()];
        for (i, layer) in (0..).zip(&layers) {
            for (place, tensor) in layer.tensors.clone().enumerate() {
                of_tensor[tensor] = Some((i, place));
            }
        }
        let read = |layer: &Layer| layer.expert_bytes * u64::from(parts.n_used);
        let temper = parts.chaos.as_ref().map_or(Temper::CALM, |_| Temper::RESTLESS);
        Ok(Some(Cache {
            policy: ExpertCache::new(&shapes, &given, temper),
            units,
            token_bytes: layers.iter().map(read).sum(),
            layers,
            of_tensor,
            missed_bytes: 0,
            stats: StreamStats::default(),
            n_evicted: 0,
        }))
    }

    pub(super) fn buffers(&self) -> &[Buffer] {
        self.units.buffers()
    }

    /// Whether passes find an expert of a tensor in a unit.
    pub(super) fn holds(&self, tensor: usize, expert: u32) -> bool {
        let id = self.of_tensor[tensor].map(|(layer, _)| ExpertId { layer, expert });
        id.is_some_and(|id| self.policy.unit(id).is_some())
    }

    /// How many experts of a tensor passes find in units.
    pub(super) fn n_held(&self, tensor: usize) -> u32 {
        self.of_tensor[tensor].map_or(0, |(layer, _)| self.policy.n_held(layer))
    }

    /// The tensors of an expert, with their places in its unit.
    fn tensors_of(&self, expert: ExpertId) -> impl Iterator<Item = (usize, u64)> + use<'_> {
        let layer = &self.layers[expert.layer as usize];
        layer.tensors.clone().zip(layer.starts.iter().copied())
    }

    /// What may be on its way to the device.
    fn budget_bytes(&self) -> u64 {
        let unit = self.layers.iter().map(|layer| layer.shape.unit_bytes).max().unwrap_or(0);
        (self.missed_bytes / PROMOTED_SHARE).max(unit)
    }
}

/// Where in its unit a matrix begins: at the phase that it has in the file.
fn phase(start: u64, t: &HostTensor, expert: u32) -> u64 {
    start + (t.file.offset + u64::from(expert) * t.file.matrix_bytes) % WEIGHT_ALIGN
}

impl Streamer {
    /// The layers of whose choices the expert cache wants to know, in order; none without a cache.
    pub fn cached_layers(&self) -> Vec<u32> {
        match self.parts.cache_bytes {
            0 => Vec::new(),
            _ => layers(&self.parts.tensors).iter().map(|layer| layer.il).collect(),
        }
    }

    /// Allocates the cache the first time, after the slots, which matter more.
    pub(super) fn reserve_cache(&mut self) -> Result<()> {
        if self.parts.cache_bytes == 0 || self.cache.is_some() {
            return Ok(());
        }
        if self.parts.n_slots > 0 && !self.no_prefetch {
            self.reserve_slots()?;
        }
        self.cache = Cache::new(&self.parts)?;
        if self.cache.is_none() {
            self.parts.cache_bytes = 0;
        }
        Ok(())
    }

    /// Takes over what became of promotions: what evicted experts and those that have arrived change in the tables.
    /// No pass runs now. Result: what the entries come after.
    pub(super) fn settle(
        &mut self,
        residency: &Residency,
        entries: &mut Entries,
    ) -> Result<Option<Point>> {
        let Some(cache) = self.cache.as_mut().filter(|cache| !cache.policy.is_settled()) else {
            return Ok(None);
        };
        let device = &self.parts.device;
        let copy = match self.parts.chaos.as_mut().is_some_and(Chaos::overlooks) {
            true => 0,
            false => device.timeline(Lane::Copy).completed()?,
        };
        let compute = device.timeline(Lane::Compute).completed()?;
        for change in cache.policy.between_passes(Reached { compute, copy }) {
            self.enter(change, Some(residency), entries);
        }
        Ok((copy > 0).then_some(Point { lane: Lane::Copy, value: copy }))
    }

    /// The entries of all cached experts in the tables of slots, which are new.
    pub(super) fn enter_all(&self) -> Result<()> {
        let mut entries = Entries::default();
        for change in self.cache.iter().flat_map(|cache| cache.policy.held()) {
            self.enter(change, None, &mut entries);
        }
        entries.submit(&self.parts.device, &[])
    }

    /// The entries of an expert that changes its place: in the slots' tables, and in that of `residency`.
    fn enter(&self, change: Change, residency: Option<&Residency>, entries: &mut Entries) {
        let Some(cache) = &self.cache else { return };
        let Change { expert: id, unit } = change;
        let (expert, entry) = (id.expert as usize, u64::from(id.expert) * 8);
        for (tensor, start) in cache.tensors_of(id) {
            let t = &self.parts.tensors[tensor];
            let in_unit = unit.map(|unit| {
                let (buffer, offset) = cache.units.place(unit);
                buffer.address() + offset + phase(start, t, id.expert)
            });
            if let Some(residency) = residency {
                let (table, offset) = residency.table_place(t.weight);
                let pinned = || self.pinned[tensor].as_ref().map_or(0, |p| p.address(expert));
                entries.add(table, offset + entry, in_unit.unwrap_or_else(pinned));
            }
            for (slots, slot) in self.slots.iter().flat_map(|s| s.all().map(move |slot| (s, slot)))
            {
                let (table, offset) = slots.table_place(tensor, slot);
                let in_slot = || slots.address(tensor, expert, slot);
                entries.add(table, offset + entry, in_unit.unwrap_or_else(in_slot));
            }
        }
    }

    /// A pass of `n_tokens` is done, or as much of it as is known, and these are the experts that it chose, by layer
    /// of [`cached_layers`](Self::cached_layers).
    pub fn used<'a>(&mut self, n_tokens: u32, chosen: impl Iterator<Item = &'a mut [u32]>) {
        let Some(cache) = &mut self.cache else { return };
        let weight = cache.policy.begin_uses(n_tokens);
        cache.missed_bytes = 0;
        let (mut direct_bytes, mut is_prefetched) = (0, false);
        for ((i, layer), ids) in (0..).zip(&cache.layers).zip(chosen) {
            let uses = cache.policy.use_experts(i, ids, weight);
            let access = self.access[layer.tensors.start];
            if access == Access::Prefetch {
                is_prefetched = true;
                continue;
            }
            cache.stats.cache_hits += uses.hits;
            cache.stats.cache_misses += uses.misses;
            cache.missed_bytes += uses.misses * layer.expert_bytes;
            let direct = layer.tensors.clone().filter(|&t| self.access[t] == Access::Direct);
            let bytes = direct.map(|t| self.parts.tensors[t].file.matrix_bytes).sum::<u64>();
            direct_bytes += uses.misses * bytes;
        }
        if is_prefetched {
            // What the next token would read.
            cache.missed_bytes = cache.token_bytes;
        }
        self.direct_bytes = (n_tokens == 1).then_some(direct_bytes);
    }

    /// What the cache did since the last call.
    pub fn take_cache_stats(&mut self) -> StreamStats {
        let Some(cache) = &mut self.cache else { return StreamStats::default() };
        let n_evicted = cache.policy.n_evicted();
        cache.stats.cache_evictions =
            n_evicted - std::mem::replace(&mut cache.n_evicted, n_evicted);
        std::mem::take(&mut cache.stats)
    }

    /// Promotes experts while a pass runs, all copies of which are submitted. What is not pinned goes through the
    /// ring, as much as there is room for.
    pub fn promote(&mut self) -> Result<()> {
        let Some(cache) = &mut self.cache else { return Ok(()) };
        cache.policy.choose(cache.budget_bytes());
        loop {
            let due: Vec<Promotion> = cache_due(&self.cache).collect();
            let n = self.n_together(&due)?;
            if n == 0 {
                return Ok(());
            }
            let point = self.submit_promotions(&due[..n])?;
            if let Some(cache) = &mut self.cache {
                cache.policy.copied(n, point.value);
            }
        }
    }

    /// How many copies go together: what of them is not pinned is in one piece of the ring.
    fn n_together(&self, due: &[Promotion]) -> Result<usize> {
        let Some(cache) = &self.cache else { return Ok(0) };
        let room = match &self.ring {
            Some(ring) if ring.is_free(&self.parts.device)? => ring.piece_bytes(),
            _ => 0,
        };
        let mut left = room;
        let fits = |p: &&Promotion| {
            let unpinned = cache.tensors_of(p.expert).filter(|(t, _)| self.pinned[*t].is_none());
            let bytes = unpinned.map(|(t, _)| self.parts.tensors[t].file.matrix_bytes + ROOM);
            let bytes = bytes.sum::<u64>();
            let fits = bytes <= left;
            left = left.saturating_sub(bytes);
            fits
        };
        let n = due.iter().take_while(fits).count();
        // One that is larger than a piece goes in several.
        Ok(if n == 0 && room > 0 { due.len().min(1) } else { n })
    }

    /// Submits copies together. The point of the last.
    fn submit_promotions(&mut self, promotions: &[Promotion]) -> Result<Point> {
        let Streamer { parts, pinned, ring, cache, .. } = self;
        let StreamerParts { device, gguf, tensors, chaos, .. } = parts;
        let Some(cache) = cache else { unreachable!("promotions without a cache") };
        let waits = waits(promotions);
        let mut recorder = Recorder::new(device, Lane::Copy, "promotions", Replay::Once)?;
        let mut unpinned = Vec::new();
        for p in promotions {
            let (buffer, start) = cache.units.place(p.unit);
            if let Some(chaos) = chaos {
                let end = start + cache.layers[p.expert.layer as usize].shape.unit_bytes;
                chaos.poison(&mut recorder, buffer, start..end);
            }
            for (tensor, offset) in cache.tensors_of(p.expert) {
                let t = &tensors[tensor];
                let first = u64::from(p.expert.expert) * t.file.matrix_bytes;
                let offset = start + phase(offset, t, p.expert.expert);
                let range = first..first + t.file.matrix_bytes;
                let matrix = Matrix { device, tensor: (tensor, t), range, buffer, offset };
                match &pinned[tensor] {
                    Some(pinned) => matrix.record(pinned, &mut recorder),
                    None => unpinned.push(matrix),
                }
            }
        }
        let bytes = promotions.iter().map(|p| cache.layers[p.expert.layer as usize].expert_bytes);
        cache.stats.promoted_bytes += bytes.sum::<u64>();
        let (mut piece, mut last) = (None, None);
        match ring.as_mut().filter(|_| !unpinned.is_empty()) {
            Some(ring) if room(&unpinned) <= ring.piece_bytes() => {
                piece = Some(record_through_piece(&unpinned, ring, gguf, &mut recorder)?);
            }
            Some(ring) => {
                // Also after the poison.
                let begun = device.submit(Lane::Copy, &[&recorder.finish()?], &waits)?;
                recorder = Recorder::new(device, Lane::Copy, "promotions", Replay::Once)?;
                for matrix in &unpinned {
                    last = Some(matrix.through_ring(&[begun], ring, gguf)?);
                }
            }
            None => {}
        }
        let waits = [waits, last.into_iter().collect()].concat();
        let point = device.submit(Lane::Copy, &[&recorder.finish()?], &waits)?;
        if let (Some(index), Some(ring)) = (piece, ring) {
            ring.copied(index, point);
        }
        Ok(point)
    }
}

/// Beside its bytes a matrix takes no more of a piece of the ring.
const ROOM: u64 = 2 * WEIGHT_ALIGN;

fn room(matrices: &[Matrix<'_>]) -> u64 {
    matrices.iter().map(|m| m.range.end - m.range.start + ROOM).sum()
}

fn cache_due(cache: &Option<Cache>) -> impl Iterator<Item = Promotion> + use<'_> {
    cache.iter().flat_map(|cache| cache.policy.due())
}

/// Fills the next piece of the ring with matrices, aligned as in the file, and records their copies. The piece.
fn record_through_piece(
    matrices: &[Matrix<'_>],
    ring: &mut Ring,
    gguf: &Gguf,
    recorder: &mut Recorder,
) -> Result<usize> {
    let mut used: u64 = 0;
    let place = |m: &Matrix<'_>| {
        let phase = (m.tensor.1.file.offset + m.range.start) % WEIGHT_ALIGN;
        let at = used.next_multiple_of(WEIGHT_ALIGN) + phase;
        used = at + m.range.end - m.range.start;
        at
    };
    let places: Vec<u64> = matrices.iter().map(place).collect();
    let read = |memory: &mut [u8]| {
        matrices.iter().zip(&places).try_for_each(|(m, &at)| {
            let tensor = &gguf.tensors()[m.tensor.1.tensor];
            gguf.read_parts(tensor, &[(m.range.clone(), at)], memory)
        })
    };
    let Some(first) = matrices.first() else { unreachable!("a piece of nothing") };
    let (index, piece) = ring.fill(first.device, used, read)?;
    gguf.check()?;
    for (m, at) in matrices.iter().zip(places) {
        recorder.copy(&piece, at, m.buffer, m.offset, m.range.end - m.range.start);
    }
    Ok(index)
}

/// What copies wait for: formally, for it is reached.
fn waits(promotions: &[Promotion]) -> Vec<Point> {
    let last = |value: fn(&Promotion) -> u64| promotions.iter().map(value).max().unwrap_or(0);
    let points = [(Lane::Compute, last(|p| p.after_compute)), (Lane::Copy, last(|p| p.after_copy))];
    let points = points.into_iter().filter(|(_, value)| *value > 0);
    points.map(|(lane, value)| Point { lane, value }).collect()
}

/// A matrix on its way into a unit.
struct Matrix<'a> {
    device: &'a Arc<Device>,
    tensor: (usize, &'a HostTensor),
    range: Range<u64>,
    buffer: &'a Buffer,
    offset: u64,
}

impl Matrix<'_> {
    fn record(&self, pinned: &Pinned, recorder: &mut Recorder) {
        self.with_transfer(&[], |transfer| transfer.record_out_of_pinned(pinned, recorder));
    }

    fn through_ring(&self, waits: &[Point], ring: &mut Ring, gguf: &Gguf) -> Result<Point> {
        self.with_transfer(waits, |transfer| transfer.through_ring(ring, gguf, &mut Unmarked))
    }

    fn with_transfer<T>(&self, waits: &[Point], with: impl FnOnce(&Transfer<'_>) -> T) -> T {
        let place = |at| Piece { chunk: 0, offset: self.offset + at - self.range.start };
        with(&Transfer {
            device: self.device,
            tensor: self.tensor,
            target: Target { place: &place, buffer: &|_| self.buffer },
            ranges: std::slice::from_ref(&self.range),
            waits,
            beside: false,
        })
    }
}

/// Promotions run on into later passes, whose timestamps these would be.
struct Unmarked;

impl CopyMarks for Unmarked {
    fn begin(&mut self, _: &mut Recorder, _: CopyRecord) {}

    fn end(&mut self, _: &mut Recorder) {}
}
