//! What a plan uses, added up by heap and by layer, and as cells of bars. Every byte of a budget has a
//! name here: the parts of a heap add up to its total.

use super::options::n_layers;
use super::{Budget, Place, Plan, Sharing};
use crate::model::weights::{Role, WeightInfo};

/// What memory is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// Weights that every token needs: attention, norms, routers, embedding and head.
    Dense,
    /// Experts.
    Experts,
    /// KV cache.
    Kv,
    /// Activations of a ubatch.
    Activations,
    /// What a batch keeps from layer to layer.
    Residual,
    /// Staging slots for experts in host memory.
    Slots,
    /// Device memory for experts in host memory that are used often.
    Cache,
    /// Gaps between weights, at most.
    Packing,
    /// Left to the driver, the desktop and other programs.
    Margin,
    /// In the host's heap: what the device's part of the same heap takes.
    DevicePart,
    /// Nothing.
    Free,
}

impl Part {
    /// In tables.
    pub fn name(self) -> &'static str {
        match self {
            Part::Dense => "dense weights",
            Part::Experts => "experts",
            Part::Kv => "KV cache",
            Part::Activations => "activations",
            Part::Residual => "residual stream",
            Part::Slots => "staging slots",
            Part::Cache => "expert cache",
            Part::Packing => "gaps",
            Part::Margin => "margin",
            Part::DevicePart => "device memory",
            Part::Free => "free",
        }
    }

    /// In bars, where colours are missing: no two look alike.
    pub fn glyph(self) -> char {
        match self {
            Part::Dense => '█',
            Part::Experts => '▓',
            Part::Kv => '▒',
            Part::Activations => '▚',
            Part::Residual => '▌',
            Part::Slots => '▞',
            Part::Cache => '▩',
            Part::Packing => '▖',
            Part::Margin => '░',
            Part::DevicePart => '▤',
            Part::Free => '·',
        }
    }
}

/// Parts in the order in which they are drawn.
pub type Parts = Vec<(Part, u64)>;

/// One layer, or what belongs to none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerUse {
    /// The layer; `None`: embedding, last norm and head.
    pub layer: Option<u32>,
    /// In device memory.
    pub device: Parts,
    /// In host memory.
    pub host: Parts,
}

impl Plan {
    /// The device's budget in parts that add up to it.
    pub fn device_parts(&self, weights: &[WeightInfo], budget: &Budget) -> Parts {
        let [dense, experts] = self.weight_parts(weights, Place::Device, |_| true);
        let n = &self.needs;
        let used = vec![
            dense,
            experts,
            (Part::Kv, n.kv_bytes),
            (Part::Activations, n.scratch_bytes),
            (Part::Residual, self.batch_bytes()),
            (Part::Slots, self.slots_bytes()),
            (Part::Cache, self.cache_bytes),
            (Part::Packing, n.packing_bytes),
            (Part::Margin, n.margin_bytes),
        ];
        with_free(used, budget.device_bytes)
    }

    /// The host's budget in parts that add up to it.
    pub fn host_parts(&self, weights: &[WeightInfo], budget: &Budget) -> Parts {
        let [dense, experts] = self.weight_parts(weights, Place::Host, |_| true);
        let beside = match budget.sharing {
            Sharing::Heap => self.device_bytes() + self.needs.margin_bytes,
            Sharing::None | Sharing::Chips => 0,
        };
        with_free(vec![dense, experts, (Part::DevicePart, beside)], budget.host_bytes)
    }

    /// The layers in order, then what belongs to none.
    pub fn layers(&self, weights: &[WeightInfo]) -> Vec<LayerUse> {
        let n_layers = n_layers(weights);
        let kv_bytes = self.needs.kv_bytes / u64::from(n_layers.max(1));
        let layers = (0..n_layers).map(Some).chain([None]);
        let of_layer = |layer: Option<u32>| {
            let [dense, experts] = self.weight_parts(weights, Place::Device, |w| w.layer == layer);
            let kv = (Part::Kv, layer.map_or(0, |_| kv_bytes));
            let host = self.weight_parts(weights, Place::Host, |w| w.layer == layer).into();
            LayerUse { layer, device: vec![dense, experts, kv], host }
        };
        layers.map(of_layer).collect()
    }

    /// Bytes of the chosen weights in one place, dense ones and experts.
    fn weight_parts(
        &self,
        weights: &[WeightInfo],
        place: Place,
        chosen: impl Fn(&WeightInfo) -> bool,
    ) -> [(Part, u64); 2] {
        let sum = |experts: bool| {
            let placed = weights.iter().zip(&self.places).filter(|(_, p)| **p == place);
            let of_role = placed.filter(|(w, _)| (w.role == Role::Experts) == experts && chosen(w));
            of_role.map(|(w, _)| w.bytes()).sum()
        };
        [(Part::Dense, sum(false)), (Part::Experts, sum(true))]
    }
}

fn with_free(mut parts: Parts, total_bytes: u64) -> Parts {
    parts.push((Part::Free, total_bytes.saturating_sub(sum(&parts))));
    parts
}

/// Bytes of all parts.
pub fn sum(parts: &[(Part, u64)]) -> u64 {
    parts.iter().map(|(_, bytes)| bytes).sum()
}

/// Parts as cells of a bar that is `width` cells long at `scale_bytes`. A part that is there has a cell
/// at least; the largest part pays for that, and takes what rounding leaves.
pub fn cells(parts: &[(Part, u64)], scale_bytes: u64, width: usize) -> Vec<(Part, usize)> {
    let exact = |bytes: u64| bytes as f64 * width as f64 / scale_bytes.max(1) as f64;
    let there = parts.iter().filter(|(_, bytes)| *bytes > 0);
    let mut cells: Vec<(Part, usize)> =
        there.clone().map(|&(part, bytes)| (part, (exact(bytes) as usize).max(1))).collect();
    let wanted =
        (exact(sum(parts)).round() as usize).min(width).max(usize::from(!cells.is_empty()));
    let used: usize = cells.iter().map(|(_, n)| n).sum();
    let largest = there.map(|(_, bytes)| *bytes).enumerate().max_by_key(|&(_, bytes)| bytes);
    if let Some((_, n)) = largest.and_then(|(i, _)| cells.get_mut(i)) {
        *n = (*n + wanted).saturating_sub(used).max(1);
    }
    cells
}

#[cfg(test)]
mod tests {
    use super::super::place::tests::weight;
    use super::super::{BatchNeeds, CpuMoe, Needs, PlacementOptions, place};
    use super::*;
    use crate::error::Result;
    use crate::stream::options::{CacheSize, SlotCount, StreamOptions};
    use proptest::prelude::*;

    const ALL: [Part; 11] = [
        Part::Dense,
        Part::Experts,
        Part::Kv,
        Part::Activations,
        Part::Residual,
        Part::Slots,
        Part::Cache,
        Part::Packing,
        Part::Margin,
        Part::DevicePart,
        Part::Free,
    ];

    #[test]
    fn no_two_parts_look_alike() {
        let glyphs: std::collections::BTreeSet<char> = ALL.into_iter().map(Part::glyph).collect();
        assert_eq!(glyphs.len(), ALL.len());
    }

    /// Two layers, one with its experts on the host; slots, cache, everything.
    #[test]
    fn every_byte_has_a_name() -> Result<()> {
        let weights = [
            weight("token_embd.weight", Role::Dense, None, 11),
            weight("blk.0.attn_q.weight", Role::Dense, Some(0), 20),
            weight("blk.0.ffn_up_exps.weight", Role::Experts, Some(0), 300),
            weight("blk.1.attn_norm.weight", Role::Vector, Some(1), 5),
            weight("blk.1.ffn_up_exps.weight", Role::Experts, Some(1), 400),
        ];
        let batch = BatchNeeds { n_ubatch: 4, n_batch: Some(10), n_max: 100, ubatch_bytes: 7 };
        let needs = Needs {
            kv_bytes: 60,
            scratch_bytes: 70,
            packing_bytes: 8,
            margin_bytes: 90,
            batch,
            ..Needs::default()
        };
        let budget = Budget { device_bytes: 9000, host_bytes: 9000, sharing: Sharing::Heap };
        let placement = PlacementOptions { cpu_moe: CpuMoe::First(1), ..Default::default() };
        let slots = SlotCount::Fixed(2);
        let stream =
            StreamOptions { slots, expert_cache: CacheSize::Fixed(800), ..Default::default() };
        let plan = place(&weights, needs, budget, &placement, &stream)?;

        let device = plan.device_parts(&weights, &budget);
        let bytes: Vec<u64> = device.iter().map(|(_, bytes)| *bytes).collect();
        // One unit, of a matrix of 300 bytes at any phase and the bytes behind it that kernels may read.
        assert_eq!(bytes, [36, 400, 60, 70, 21, 1624, 768, 8, 90, 5923]);
        assert_eq!(sum(&device), 9000);
        assert_eq!(plan.device_bytes(), 9000 - 90 - 5923);
        let host = plan.host_parts(&weights, &budget);
        let bytes: Vec<u64> = host.iter().map(|(_, bytes)| *bytes).collect();
        assert_eq!(bytes, [0, 300, 3077, 5623]);

        let layers = plan.layers(&weights);
        let lines: Vec<_> =
            layers.iter().map(|l| (l.layer, sum(&l.device), sum(&l.host))).collect();
        assert_eq!(lines, [(Some(0), 50, 300), (Some(1), 435, 0), (None, 11, 0)]);
        Ok(())
    }

    proptest! {
        /// A bar is as long as its bytes, and shows every part.
        #[test]
        fn bars_show_every_part(
            sizes in prop::collection::vec(0u64..1_000_000, 1..10),
            rest in 0u64..1_000_000,
            width in 12usize..200,
        ) {
            let parts: Parts = ALL.into_iter().zip(sizes).collect();
            let scale = sum(&parts) + rest;
            let cells = cells(&parts, scale, width);
            let there: Vec<Part> = parts.iter().filter(|p| p.1 > 0).map(|p| p.0).collect();
            prop_assert_eq!(cells.iter().map(|c| c.0).collect::<Vec<_>>(), there.clone());
            prop_assert!(cells.iter().all(|c| c.1 > 0));
            let length: usize = cells.iter().map(|c| c.1).sum();
            let exact = sum(&parts) as f64 * width as f64 / scale.max(1) as f64;
            prop_assert!(length <= width.max(there.len()));
            prop_assert!((length as f64 - exact).abs() <= 0.5 + there.len() as f64);
            if exact >= 10.0 * 10.0 {
                prop_assert!((length as f64 - exact).abs() <= 0.5, "{length} for {exact}");
            }
        }
    }
}
