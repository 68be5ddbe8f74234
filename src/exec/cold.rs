//! A launch timed many times finds its weights in the device's caches; in a pass they come from memory.
//! So each run gets other ones of the same size: copies of a matrix, another choice of experts (tables
//! whose entries are moved on), another layer's cache.
//!
//! Which weights a launch uses is read off its push constants: 64-bit words that are addresses of
//! weights or tables. So new kernels need nothing here.

use super::kernels::{Bound, Launch};
use super::residency::Residency;
use crate::error::Result;
use crate::model::weights::{Role, WeightInfo};
use crate::vk::{Buffer, Device, DeviceKind, Lane, MemoryKind, Recorder, Replay};
use std::collections::HashMap;
use std::sync::Arc;

/// The runs of a launch together touch so much before they begin anew: some times the largest caches.
const COLD_BYTES: u64 = 256 << 20;
/// The same for a CPU.
const CPU_COLD_BYTES: u64 = 32 << 20;
/// Variants of a launch, at most.
const MAX_VARIANTS: u64 = 512;
/// What decoders may read past a matrix, and its alignment.
const PADDING: u64 = 256;

fn cold_bytes(device: &Device) -> u64 {
    if device.info().kind == DeviceKind::Cpu { CPU_COLD_BYTES } else { COLD_BYTES }
}

/// What differs from run to run.
#[derive(Clone, Debug)]
pub(super) struct Variant {
    pub(super) push: Vec<u8>,
    pub(super) bindings: Vec<Bound>,
}

/// Makes variants.
pub(super) struct Cold<'a> {
    device: &'a Arc<Device>,
    residency: &'a Residency,
    weights: &'a [WeightInfo],
    /// Weights by the address of their bytes or their table.
    by_address: HashMap<u64, usize>,
    /// For copies.
    arena: Buffer,
    /// Layers of the cache.
    kv_layers: u32,
}

/// A word of the push constants that is to differ.
enum Word {
    /// A matrix of so many bytes.
    Matrix { at: usize, weight: usize },
    /// A table of experts.
    Table { at: usize, weight: usize },
}

impl<'a> Cold<'a> {
    pub(super) fn new(
        device: &'a Arc<Device>,
        residency: &'a Residency,
        weights: &'a [WeightInfo],
        kv_layers: u32,
    ) -> Result<Self> {
        let mut by_address = HashMap::new();
        for (i, w) in weights.iter().enumerate() {
            match w.role {
                Role::Dense => by_address.insert(residency.address(w.weight.id), i),
                Role::Experts => by_address.insert(residency.table(w.weight.id), i),
                Role::Vector => None,
            };
        }
        let arena = Buffer::new(device, "cold", cold_bytes(device), MemoryKind::Device)?;
        Ok(Cold { device, residency, weights, by_address, arena, kv_layers })
    }

    /// Layers that a cache of `layer_bytes` each should have.
    pub(super) fn kv_layers(device: &Device, layer_bytes: u64, n_layer: u32) -> u32 {
        n_layer.max((cold_bytes(device) / layer_bytes.max(1)).min(32) as u32)
    }

    /// The buffer behind the copies.
    pub(super) fn buffer(&self) -> &Buffer {
        &self.arena
    }

    /// The launch, then others like it. `n_pairs`: pairs of tokens and used experts.
    pub(super) fn variants(&self, launch: &Launch, n_pairs: u32) -> Result<Vec<Variant>> {
        let own = Variant { push: launch.push.clone(), bindings: launch.bindings.clone() };
        let mut variants = self.copies(&own, n_pairs)?;
        if variants.is_empty() {
            variants.push(own);
        }
        for i in 0..self.kv_variants(launch, variants.len()) {
            if i == variants.len() {
                variants.push(variants[0].clone());
            }
            for bound in &mut variants[i].bindings {
                if let Bound::Kv { il, .. } = bound {
                    *il = (*il + i as u32) % self.kv_layers;
                }
            }
        }
        Ok(variants)
    }

    /// How many variants have a cache of their own.
    fn kv_variants(&self, launch: &Launch, n: usize) -> usize {
        match launch.bindings.iter().any(|b| matches!(b, Bound::Kv { .. })) {
            true => n.max(self.kv_layers as usize),
            false => 0,
        }
    }

    /// Variants with other weights; none if there would be only one.
    fn copies(&self, own: &Variant, n_pairs: u32) -> Result<Vec<Variant>> {
        let words = self.words(&own.push);
        let bytes: u64 = words.iter().map(|word| self.bytes(word)).sum();
        let touched: u64 = words.iter().map(|word| self.touched_bytes(word, n_pairs)).sum();
        if touched == 0 || bytes == 0 {
            return Ok(Vec::new());
        }
        let arena = &self.arena;
        let wanted = (arena.bytes() / touched.max(bytes)).min(MAX_VARIANTS);
        if wanted < 2 {
            return Ok(Vec::new());
        }
        let mut recorder = Recorder::new(self.device, Lane::Compute, "cold", Replay::Once)?;
        self.residency.buffers().iter().for_each(|buffer| recorder.keep(buffer));
        recorder.barrier();
        let mut variants = Vec::new();
        let mut next = 0;
        for i in 0..wanted {
            let mut variant = own.clone();
            for word in &words {
                let at = match word {
                    Word::Matrix { at, weight } => {
                        self.copy_matrix(&mut recorder, arena, next, *weight);
                        *at
                    }
                    Word::Table { at, weight } => {
                        self.copy_table(
                            &mut recorder,
                            arena,
                            next,
                            *weight,
                            i * u64::from(n_pairs),
                        );
                        *at
                    }
                };
                let address = arena.address() + next;
                variant.push[at..at + 8].copy_from_slice(&address.to_le_bytes());
                next += self.bytes(word);
            }
            variants.push(variant);
        }
        let point = self.device.submit(Lane::Compute, &[&recorder.finish()?], &[])?;
        self.device.wait(point, "copying weights")?;
        Ok(variants)
    }

    fn words(&self, push: &[u8]) -> Vec<Word> {
        let words = push.chunks_exact(8).enumerate();
        words
            .filter_map(|(i, word)| {
                let address = u64::from_le_bytes(word.try_into().ok()?);
                let &weight = self.by_address.get(&address).filter(|_| address != 0)?;
                let at = i * 8;
                Some(match self.weights[weight].role {
                    Role::Experts => Word::Table { at, weight },
                    _ => Word::Matrix { at, weight },
                })
            })
            .collect()
    }

    /// Bytes of a copy.
    fn bytes(&self, word: &Word) -> u64 {
        let bytes = match *word {
            Word::Matrix { weight, .. } => self.weights[weight].bytes() + PADDING,
            Word::Table { weight, .. } => u64::from(self.weights[weight].weight.n_expert) * 8,
        };
        bytes.next_multiple_of(PADDING)
    }

    /// Bytes that a run reads of it.
    fn touched_bytes(&self, word: &Word, n_pairs: u32) -> u64 {
        match *word {
            Word::Matrix { weight, .. } => self.weights[weight].bytes(),
            Word::Table { weight, .. } => {
                let w = &self.weights[weight];
                // With all experts in use there are no others.
                match u64::from(n_pairs.min(w.weight.n_expert)) {
                    n if 2 * n > u64::from(w.weight.n_expert) => self.arena.bytes(),
                    n => n * w.matrix_bytes,
                }
            }
        }
    }

    fn copy_matrix(&self, recorder: &mut Recorder, arena: &Buffer, to: u64, weight: usize) {
        let w = &self.weights[weight];
        let Some((from, offset)) = self.residency.place(w.weight.id) else { return };
        recorder.copy(from, offset, arena, to, w.bytes());
    }

    /// The table from entry `by` on, then its beginning.
    fn copy_table(&self, recorder: &mut Recorder, arena: &Buffer, to: u64, weight: usize, by: u64) {
        let w = &self.weights[weight].weight;
        let (table, start) = self.residency.table_place(w.id);
        let n = u64::from(w.n_expert);
        let by = by % n;
        recorder.copy(table, start + by * 8, arena, to, (n - by) * 8);
        if by > 0 {
            recorder.copy(table, start, arena, to + (n - by) * 8, by * 8);
        }
    }
}
