//! The size of the expert cache.

use crate::model::weights::WeightInfo;
use crate::stream::expert_cache::{LayerShape, classes, divide, total_bytes};
use crate::stream::packing;
use std::collections::BTreeMap;

/// Bytes of a cache for experts in host memory, and what would be of use if there were room: no more than is wanted,
/// nor than all of them take. Less than an expert takes is none.
pub(super) fn bytes<'a>(
    experts: impl Iterator<Item = &'a WeightInfo>,
    wanted_bytes: u64,
    left_bytes: u64,
) -> (u64, u64) {
    let classes = classes(&layers(experts));
    let useful = wanted_bytes.min(total_bytes(&classes));
    let bytes = useful.min(left_bytes);
    (if total_bytes(&divide(&classes, bytes)) > 0 { bytes } else { 0 }, useful)
}

/// Layers with experts in host memory.
fn layers<'a>(experts: impl Iterator<Item = &'a WeightInfo>) -> Vec<LayerShape> {
    let mut layers: BTreeMap<u32, Vec<&WeightInfo>> = BTreeMap::new();
    for (il, w) in experts.filter_map(|w| Some((w.layer?, w))) {
        layers.entry(il).or_default().push(w);
    }
    let shape = |tensors: &Vec<&WeightInfo>| LayerShape {
        unit_bytes: packing::unit(tensors.iter().map(|w| w.matrix_bytes)).1,
        n_expert: tensors.first().map_or(0, |w| w.weight.n_expert),
    };
    layers.values().map(shape).collect()
}
