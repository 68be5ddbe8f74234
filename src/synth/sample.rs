//! A model of a few layers that stand for all of a larger one: layers whose tensors have the same shapes
//! and types take the same time.

use super::{Plan, fill};
use crate::gguf::write::TensorSpec;
use crate::gguf::{GgmlType, Gguf, Value};

/// Kinds of layers that a sample has at most; further ones are counted with the most frequent.
const MAX_KINDS: usize = 4;
const COUNT_KEY: &str = ".block_count";

/// A small model, and for how much of the large one its layers stand.
#[derive(Clone, Debug)]
pub struct Sample {
    /// The model.
    pub plan: Plan,
    /// For each of its layers, the layers of the large model that are like it.
    pub layers: Vec<u32>,
}

/// What a layer's time depends on: its tensors without their prefix.
type Kind = Vec<(String, GgmlType, Vec<u64>)>;

impl Plan {
    /// A file's tensors of these names, and its keys, with random weights.
    pub fn like(gguf: &Gguf, names: &[&str], seed: u64) -> Plan {
        let used = gguf.tensors().iter().filter(|t| names.contains(&t.name.as_str()));
        let tensors: Vec<TensorSpec> = used
            .map(|t| {
                let shape = t.shape.iter().take(t.n_dims as usize).copied().collect();
                TensorSpec { name: t.name.clone(), ty: t.ty, shape }
            })
            .collect();
        let keys = gguf.metadata().iter().map(|(key, value)| (key.to_owned(), value.clone()));
        // The new file is in one part, and aligned as usual.
        let is_of_file = |key: &str| key.starts_with("split.") || key == "general.alignment";
        let keys = keys.filter(|(key, _)| !is_of_file(key)).collect();
        Plan { keys, fills: tensors.iter().map(fill::of).collect(), tensors, seed }
    }

    /// One layer of each kind.
    pub fn sample(&self) -> Sample {
        let mut kinds: Vec<(Kind, u32, u32)> = Vec::new();
        for il in 0..self.n_layer() {
            let kind = self.kind(il);
            match kinds.iter_mut().find(|(known, ..)| *known == kind) {
                Some((.., count)) => *count += 1,
                None => kinds.push((kind, il, 1)),
            }
        }
        kinds.sort_by_key(|&(_, il, count)| (std::cmp::Reverse(count), il));
        let rest: u32 = kinds.iter().skip(MAX_KINDS).map(|&(.., count)| count).sum();
        kinds.truncate(MAX_KINDS);
        if let Some((.., count)) = kinds.first_mut() {
            *count += rest;
        }
        kinds.sort_by_key(|&(_, il, _)| il);
        let chosen: Vec<u32> = kinds.iter().map(|&(_, il, _)| il).collect();
        Sample {
            plan: self.only(&chosen),
            layers: kinds.iter().map(|&(.., count)| count).collect(),
        }
    }

    fn n_layer(&self) -> u32 {
        let layers = self.tensors.iter().filter_map(|t| layer_of(&t.name));
        layers.map(|(il, _)| il + 1).max().unwrap_or(0)
    }

    fn kind(&self, il: u32) -> Kind {
        let own = |t: &TensorSpec| {
            let (layer, rest) = layer_of(&t.name)?;
            (layer == il).then(|| (rest.to_owned(), t.ty, t.shape.clone()))
        };
        let mut kind: Kind = self.tensors.iter().filter_map(own).collect();
        kind.sort_by(|a, b| a.0.cmp(&b.0));
        kind
    }

    /// The model with these layers only.
    fn only(&self, layers: &[u32]) -> Plan {
        let mut plan = Plan { tensors: Vec::new(), fills: Vec::new(), ..self.clone() };
        for (tensor, &fill) in self.tensors.iter().zip(&self.fills) {
            let mut tensor = tensor.clone();
            if let Some((il, rest)) = layer_of(&tensor.name) {
                let Some(new) = layers.iter().position(|&l| l == il) else { continue };
                tensor.name = format!("blk.{new}.{rest}");
            }
            plan.tensors.push(tensor);
            plan.fills.push(fill);
        }
        for (key, value) in &mut plan.keys {
            if key.ends_with(COUNT_KEY) {
                *value = Value::U32(layers.len() as u32);
            }
        }
        plan
    }
}

/// Layer and rest of `blk.{il}.{rest}`.
fn layer_of(name: &str) -> Option<(u32, &str)> {
    let (il, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    Some((il.parse().ok()?, rest))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synth::{Synth, presets};

    #[test]
    fn two_layers_stand_for_qwen3_s_48() {
        let preset = presets::find("qwen3-30b-a3b").unwrap_or(&presets::PRESETS[0]);
        let plan = Synth::new(preset, None, None, 1).plan();
        let sample = plan.sample();
        assert_eq!(sample.layers, [24, 24], "half of the layers have better types");
        assert_eq!(sample.plan.n_layer(), 2);
        let downs = sample.plan.tensors.iter().filter(|t| t.name.ends_with("ffn_down_exps.weight"));
        assert_eq!(downs.map(|t| t.ty).collect::<Vec<_>>(), [GgmlType::Q6_K, GgmlType::Q4_K]);
        let count = sample.plan.keys.iter().find(|(key, _)| key.ends_with(COUNT_KEY));
        assert_eq!(count.map(|(_, n)| n.integer()), Some(Some(2)));
        assert!(sample.plan.tensors.iter().any(|t| t.name == "output.weight"));
        assert!(sample.plan.elements() < plan.elements() / 10);
    }
}
