//! What the user may ask of a placement. Names and meanings are llama.cpp's, with one difference:
//! every layer is computed on the device, so that `-ngl` only says whose experts lie there.
//!
//! The order: a rule of `-ot` goes first, then `-cmoe` and `-ncmoe`, then `-ngl`; the fit decides
//! about what is left.

use super::{Overrides, Place};
use crate::model::weights::{Role, WeightInfo};

/// `-ngl`: the layers, from the last, whose experts are in device memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GpuLayers {
    /// As many as fit.
    #[default]
    Auto,
    /// So many. The output layer counts as one, as in llama.cpp: `Last(n_layer + 1)` is all.
    Last(u32),
    /// All.
    All,
}

impl GpuLayers {
    /// As llama.cpp's tools print it: -1 for what fits, 99 for all.
    pub fn number(self) -> i64 {
        match self {
            GpuLayers::Auto => -1,
            GpuLayers::Last(n) => n.into(),
            GpuLayers::All => 99,
        }
    }
}

/// `-cmoe` and `-ncmoe`: the layers whose experts are in host memory in any case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CpuMoe {
    /// None in particular.
    #[default]
    Unset,
    /// The first so many.
    First(u32),
    /// All.
    All,
}

/// The choices.
#[derive(Clone, Debug, Default)]
pub struct PlacementOptions {
    /// `-ot`: the first rule that matches a tensor's name decides.
    pub overrides: Overrides,
    /// `-cmoe`, `-ncmoe`
    pub cpu_moe: CpuMoe,
    /// `-ngl`
    pub gpu_layers: GpuLayers,
    /// `-fitt`: leave exactly this much device memory free; `None`: a gibibyte, less on small devices.
    pub margin_bytes: Option<u64>,
}

impl PlacementOptions {
    /// Where each weight has to be; `None`: the fit decides.
    pub fn fixed(&self, weights: &[WeightInfo]) -> Vec<Option<Place>> {
        let n_layers = n_layers(weights);
        let place = |w: &WeightInfo| {
            let ruled = self.overrides.place(&w.name);
            ruled.or_else(|| match w.role {
                Role::Experts => self.experts(w.layer, n_layers),
                Role::Dense | Role::Vector => Some(Place::Device),
            })
        };
        weights.iter().map(place).collect()
    }

    /// Where the flags want a layer's experts.
    fn experts(&self, layer: Option<u32>, n_layers: u32) -> Option<Place> {
        let among_first = |n: u32| layer.is_some_and(|il| il < n);
        let on_host = match self.cpu_moe {
            CpuMoe::Unset => false,
            CpuMoe::First(n) => among_first(n),
            CpuMoe::All => true,
        };
        match self.gpu_layers {
            _ if on_host => Some(Place::Host),
            GpuLayers::Auto => None,
            GpuLayers::All => Some(Place::Device),
            GpuLayers::Last(n) if among_first((n_layers + 1).saturating_sub(n)) => {
                Some(Place::Host)
            }
            GpuLayers::Last(_) => Some(Place::Device),
        }
    }
}

/// Layers of a model.
pub(super) fn n_layers(weights: &[WeightInfo]) -> u32 {
    weights.iter().filter_map(|w| w.layer).max().map_or(0, |il| il.saturating_add(1))
}

#[cfg(test)]
mod tests {
    use super::super::place::tests::weight;
    use super::*;

    /// Four layers: a dense tensor and one of experts each.
    fn weights() -> Vec<WeightInfo> {
        let layer = |il| {
            let name = |what: &str| format!("blk.{il}.{what}.weight");
            [
                weight(&name("attn_q"), Role::Dense, Some(il), 1),
                weight(&name("ffn_up_exps"), Role::Experts, Some(il), 1),
            ]
        };
        (0..4).flat_map(layer).collect()
    }

    /// One letter a layer: where its experts have to be.
    fn experts(options: &PlacementOptions) -> String {
        let fixed = options.fixed(&weights());
        let letter = |place: &Option<Place>| match place {
            Some(Place::Device) => 'v',
            Some(Place::Host) => 'h',
            None => '.',
        };
        fixed.iter().skip(1).step_by(2).map(letter).collect()
    }

    fn options(cpu_moe: CpuMoe, gpu_layers: GpuLayers, rules: &str) -> PlacementOptions {
        let overrides = rules.parse().unwrap_or_default();
        PlacementOptions { cpu_moe, gpu_layers, overrides, margin_bytes: None }
    }

    #[test]
    fn layers_count_from_the_last_and_the_output_is_one() {
        let last = |n| experts(&options(CpuMoe::Unset, GpuLayers::Last(n), ""));
        assert_eq!([0, 1, 2, 4, 5, 99].map(last), ["hhhh", "hhhh", "hhhv", "hvvv", "vvvv", "vvvv"]);
        assert_eq!(experts(&options(CpuMoe::Unset, GpuLayers::Auto, "")), "....");
    }

    #[test]
    fn rules_go_before_cpu_moe_and_that_before_gpu_layers() {
        assert_eq!(experts(&options(CpuMoe::All, GpuLayers::Last(99), "")), "hhhh");
        assert_eq!(experts(&options(CpuMoe::First(2), GpuLayers::All, "")), "hhvv");
        assert_eq!(experts(&options(CpuMoe::First(2), GpuLayers::Auto, "")), "hh..");
        assert_eq!(experts(&options(CpuMoe::First(9), GpuLayers::Auto, "")), "hhhh");
        let rules = r"blk\.0\..*_exps=VRAM,\.3\.=HOST";
        assert_eq!(experts(&options(CpuMoe::First(2), GpuLayers::Auto, rules)), "vh.h");
        assert_eq!(experts(&options(CpuMoe::Unset, GpuLayers::All, rules)), "vvvh");
    }

    #[test]
    fn dense_weights_move_by_rules_only() {
        let dense = |o: &PlacementOptions| -> Vec<_> {
            o.fixed(&weights()).into_iter().step_by(2).flatten().collect()
        };
        assert_eq!(dense(&options(CpuMoe::All, GpuLayers::Last(0), "")), [Place::Device; 4]);
        let some = options(CpuMoe::Unset, GpuLayers::Auto, r"blk\.[12]\.attn=HOST");
        assert_eq!(dense(&some).iter().filter(|&&p| p == Place::Host).count(), 2);
    }
}
