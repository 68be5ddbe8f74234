//! What lives where: pure arithmetic over sizes and a budget, no Vulkan type, no clock.
//!
//! Everything goes into device memory if it fits. If not, the experts of the first layers stay in
//! host memory, as few layers as possible; kernels read them there.

use crate::error::{Error, Result};
use crate::model::weights::{Role, WeightInfo};
use std::fmt;

/// Where a weight lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// Device-local memory.
    Device,
    /// Host memory that kernels read directly.
    Host,
}

/// Bytes that are needed beside the weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// KV cache of the session.
    pub kv_bytes: u64,
    /// Activations of a ubatch.
    pub scratch_bytes: u64,
    /// Left free for the driver, the desktop and other programs.
    pub margin_bytes: u64,
}

/// Bytes that are there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Budget {
    /// Free device-local memory.
    pub device_bytes: u64,
    /// Free host memory that the device can read; counted apart from `device_bytes` even where both
    /// are the same chips.
    pub host_bytes: u64,
}

/// A decided placement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// By weight.
    pub places: Vec<Place>,
    /// Layers, from the first, whose experts are in host memory.
    pub n_host_layers: u32,
    /// Weights in device memory.
    pub device_weight_bytes: u64,
    /// Weights in host memory.
    pub host_weight_bytes: u64,
    /// What else is needed.
    pub needs: Needs,
}

impl Plan {
    /// Device memory in use when everything is loaded; the margin is not in it.
    pub fn device_bytes(&self) -> u64 {
        self.device_weight_bytes + self.needs.kv_bytes + self.needs.scratch_bytes
    }
}

/// Places the weights: the fewest layers of experts in host memory that let the rest fit.
pub fn place(weights: &[WeightInfo], needs: Needs, budget: Budget) -> Result<Plan> {
    let n_layers = weights.iter().filter_map(|w| w.layer).max().map_or(0, |il| il + 1);
    let beside = needs.kv_bytes + needs.scratch_bytes + needs.margin_bytes;
    let room = budget.device_bytes.saturating_sub(beside);
    let fits = |n: &u32| split_bytes(weights, *n).0 <= room;
    let Some(n_host_layers) = (0..=n_layers).find(fits) else {
        return Err(too_small(weights, n_layers, beside, budget));
    };
    let (device_weight_bytes, host_weight_bytes) = split_bytes(weights, n_host_layers);
    if host_weight_bytes > budget.host_bytes {
        return Err(Error::OutOfMemory {
            what: format!("experts of {n_host_layers} layers in host memory"),
            needed_bytes: host_weight_bytes,
            available_bytes: budget.host_bytes,
            hint: "; a smaller quantization would do".into(),
        });
    }
    let places = weights.iter().map(|w| place_of(w, n_host_layers)).collect();
    Ok(Plan { places, n_host_layers, device_weight_bytes, host_weight_bytes, needs })
}

fn place_of(w: &WeightInfo, n_host_layers: u32) -> Place {
    let on_host = w.role == Role::Experts && w.layer.is_some_and(|il| il < n_host_layers);
    if on_host { Place::Host } else { Place::Device }
}

/// Bytes in device and host memory with the experts of the first layers on the host.
fn split_bytes(weights: &[WeightInfo], n_host_layers: u32) -> (u64, u64) {
    weights.iter().fold((0, 0), |(device, host), w| match place_of(w, n_host_layers) {
        Place::Device => (device + w.bytes(), host),
        Place::Host => (device, host + w.bytes()),
    })
}

fn too_small(weights: &[WeightInfo], n_layers: u32, beside: u64, budget: Budget) -> Error {
    Error::OutOfMemory {
        what: "the model with all experts in host memory, its KV cache and its activations".into(),
        needed_bytes: split_bytes(weights, n_layers).0 + beside,
        available_bytes: budget.device_bytes,
        hint: "; a smaller context (-c) or ubatch (-ub) needs less".into(),
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "device memory {} (weights {}, KV cache {}, activations {}), host memory {}",
            Bytes(self.device_bytes()),
            Bytes(self.device_weight_bytes),
            Bytes(self.needs.kv_bytes),
            Bytes(self.needs.scratch_bytes),
            Bytes(self.host_weight_bytes),
        )?;
        match self.n_host_layers {
            0 => Ok(()),
            n => write!(f, " (experts of the first {n} layers)"),
        }
    }
}

/// A byte count as people read it: `17.3 GiB`.
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = ["B", "KiB", "MiB", "GiB", "TiB"];
        let mut value = self.0 as f64;
        let mut unit = 0;
        while value >= 1024.0 && unit + 1 < units.len() {
            value /= 1024.0;
            unit += 1;
        }
        let decimals = usize::from(unit > 0);
        write!(f, "{value:.decimals$} {}", units[unit])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::GgmlType;
    use crate::graph::{Weight, WeightId};
    use proptest::prelude::*;

    fn weight(role: Role, layer: Option<u32>, bytes: u64) -> WeightInfo {
        let weight = Weight { id: WeightId(0), ty: GgmlType::F32, k: 1, n: 1, n_expert: 1 };
        WeightInfo { name: String::new(), tensor: 0, role, layer, weight, matrix_bytes: bytes }
    }

    proptest! {
        /// A plan fits, wastes no layer, and moves nothing but experts of the first layers.
        #[test]
        fn plans_fit_and_are_minimal(
            sizes in prop::collection::vec((1u64..1000, 1u64..9000), 1..20),
            device_bytes in 0u64..120_000,
            kv_bytes in 0u64..2000,
        ) {
            let weights: Vec<_> = sizes.iter().enumerate().flat_map(|(il, &(dense, experts))| {
                let il = Some(il as u32);
                [weight(Role::Dense, il, dense), weight(Role::Experts, il, experts)]
            }).collect();
            let needs = Needs { kv_bytes, scratch_bytes: 10, margin_bytes: 5 };
            let budget = Budget { device_bytes, host_bytes: u64::MAX };
            let dense: u64 = sizes.iter().map(|s| s.0).sum();
            match place(&weights, needs, budget) {
                Err(_) => prop_assert!(dense + kv_bytes + 15 > device_bytes),
                Ok(plan) => {
                    prop_assert!(plan.device_bytes() + 5 <= device_bytes);
                    if let Some(last) = plan.n_host_layers.checked_sub(1) {
                        let experts = sizes[last as usize].1;
                        prop_assert!(plan.device_bytes() + experts + 5 > device_bytes);
                    }
                    for (w, place) in weights.iter().zip(&plan.places) {
                        let host = w.role == Role::Experts && w.layer < Some(plan.n_host_layers);
                        prop_assert_eq!(*place == Place::Host, host);
                    }
                }
            }
        }
    }

    #[test]
    fn sizes_read_well() {
        assert_eq!(Bytes(512).to_string(), "512 B");
        assert_eq!(Bytes(18_576_000_000).to_string(), "17.3 GiB");
    }
}
