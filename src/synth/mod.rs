//! Models with a real one's shape and tensor types, and random weights: what a model's speed will be on
//! a machine, before it is downloaded.
//!
//! Reading order: [`presets`] (the table of models), `layout` (an architecture's tensors), `keys` (its
//! metadata and a vocabulary), [`mix`] (which tensor gets which type), `fill` (what a tensor's random
//! values look like), `blocks` (random blocks of a type), [`mod@file`] (all of it to disk, in
//! parallel), `sample` (a model of few layers that stand for all).
//!
//! Layouts, keys and mixes follow llama.cpp (`src/models/*.cpp`, `conversion/*.py`,
//! `src/llama-quant.cpp`): a file has the tensors, the types and so the bytes of the one that people
//! download. Its vocabulary is of bytes, padded to the real one's size.

mod blocks;
mod fill;
mod keys;
mod layout;
pub mod file;
pub mod mix;
pub mod presets;
mod sample;

use crate::gguf::Value;
use crate::gguf::write::TensorSpec;
pub use fill::Fill;
use mix::Mix;
use presets::{Preset, Shape};
pub use sample::Sample;

/// What is to be written.
#[derive(Clone, Debug)]
pub struct Synth {
    /// The model's name.
    pub title: &'static str,
    /// How large people call it.
    pub size: &'static str,
    /// Its shape.
    pub shape: Shape,
    /// Its tensor types.
    pub mix: Mix,
    /// Of the random weights.
    pub seed: u64,
}

/// A file as it will be, without its tensors' bytes.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Keys and values.
    pub keys: Vec<(String, Value)>,
    /// Tensors, in file order.
    pub tensors: Vec<TensorSpec>,
    /// What each tensor holds.
    pub fills: Vec<Fill>,
    /// Of the random weights.
    pub seed: u64,
}

impl Synth {
    /// `n_layer`: as many layers instead of the model's own.
    pub fn new(preset: &Preset, mix: Option<Mix>, n_layer: Option<u32>, seed: u64) -> Synth {
        let mut shape = preset.shape;
        shape.n_layer = n_layer.unwrap_or(shape.n_layer);
        Synth {
            title: preset.title,
            size: preset.size,
            shape,
            mix: mix.unwrap_or(preset.mix),
            seed,
        }
    }

    /// Everything but the random numbers.
    pub fn plan(&self) -> Plan {
        let mut tensors = layout::tensors(&self.shape);
        let types = mix::types(self.mix, &self.shape, &tensors);
        tensors.iter_mut().zip(types).for_each(|(tensor, ty)| tensor.ty = ty);
        let fills = tensors.iter().map(fill::of).collect();
        let keys = keys::keys(self);
        Plan { keys, tensors, fills, seed: self.seed }
    }
}

impl Plan {
    /// Weights of the model.
    pub fn elements(&self) -> u64 {
        self.tensors.iter().map(TensorSpec::elements).sum()
    }
}
