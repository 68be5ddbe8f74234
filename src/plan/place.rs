//! The decision: which weights go where, and how many staging slots there are.

use super::options::n_layers;
use super::{Budget, Bytes, Needs, Place, PlacementOptions, Plan, Sharing};
use crate::error::{Error, Result};
use crate::model::weights::{Role, WeightInfo};
use crate::stream::options::{AUTO_SLOTS, MIN_SLOTS, SlotCount, StreamOptions};

/// Beside the tensor a slot holds what aligning its start costs, and the bytes that kernels may read
/// behind its end.
pub const SLOT_SLACK_BYTES: u64 = 512;

/// Places the weights: what the options fix goes where they say, and of the other experts the fewest
/// first layers go to host memory, so that the rest fits.
///
/// `needs.margin_bytes` stays free. The engine's own choice of slots is [`AUTO_SLOTS`] on a card with
/// memory of its own; [`MIN_SLOTS`], then none, where even all free experts in host memory leave no
/// room for so many.
pub fn place(
    weights: &[WeightInfo],
    needs: Needs,
    budget: Budget,
    placement: &PlacementOptions,
    stream: &StreamOptions,
) -> Result<Plan> {
    let fixed = placement.fixed(weights);
    let job = Job { weights, fixed, needs, budget };
    let (rather, last): (&[u32], u32) = match stream.slots {
        SlotCount::Fixed(n) => (&[], n),
        SlotCount::Auto if budget.sharing == Sharing::None => (&[AUTO_SLOTS, MIN_SLOTS], 0),
        SlotCount::Auto => (&[], 0),
    };
    let found = rather.iter().find_map(|&n_slots| job.fit(n_slots).ok());
    found.map_or_else(|| job.fit(last), Ok)
}

/// What is given.
struct Job<'a> {
    weights: &'a [WeightInfo],
    /// By weight; `None`: free to choose.
    fixed: Vec<Option<Place>>,
    needs: Needs,
    budget: Budget,
}

impl Job<'_> {
    /// The plan with so many slots and the fewest layers of free experts in host memory.
    fn fit(&self, n_slots: u32) -> Result<Plan> {
        let mut smallest: Option<Plan> = None;
        for n_host in 0..=n_layers(self.weights) {
            let plan = self.draft(n_host, n_slots);
            if self.device_needs(&plan) <= self.budget.device_bytes {
                return self.check_host(plan);
            }
            // Not always the last one: the first layer on the host brings the slots with it.
            if smallest.as_ref().is_none_or(|s| self.device_needs(&plan) < self.device_needs(s)) {
                smallest = Some(plan);
            }
        }
        let plan = smallest.unwrap_or_else(|| self.draft(0, n_slots));
        Err(Error::OutOfMemory {
            what: self.device_contents(&plan),
            needed_bytes: self.device_needs(&plan),
            available_bytes: self.budget.device_bytes,
            hint: String::new(),
        })
    }

    /// Free experts of the first `n_host` layers in host memory, all others in device memory.
    fn draft(&self, n_host: u32, n_slots: u32) -> Plan {
        let place = |(w, fixed): (&WeightInfo, &Option<Place>)| {
            let among_first = w.layer.is_some_and(|il| il < n_host);
            fixed.unwrap_or(if among_first { Place::Host } else { Place::Device })
        };
        let places: Vec<Place> = self.weights.iter().zip(&self.fixed).map(place).collect();
        let on_host = || self.placed(&places, Place::Host);
        let experts = || on_host().filter(|w| w.role == Role::Experts);
        let largest = experts().map(WeightInfo::bytes).max();
        let mut host_layers: Vec<u32> = experts().filter_map(|w| w.layer).collect();
        host_layers.sort_unstable();
        host_layers.dedup();
        let with_slots = largest.filter(|_| n_slots > 0);
        Plan {
            n_host_layers: host_layers.len() as u32,
            device_weight_bytes: self.placed(&places, Place::Device).map(WeightInfo::bytes).sum(),
            host_weight_bytes: on_host().map(WeightInfo::bytes).sum(),
            n_slots: with_slots.map_or(0, |_| n_slots),
            slot_bytes: with_slots.map_or(0, |bytes| bytes + SLOT_SLACK_BYTES),
            needs: self.needs,
            places,
        }
    }

    /// The weights in one place.
    fn placed<'a>(
        &'a self,
        places: &'a [Place],
        place: Place,
    ) -> impl Iterator<Item = &'a WeightInfo> {
        self.weights.iter().zip(places).filter(move |(_, p)| **p == place).map(|(w, _)| w)
    }

    fn device_needs(&self, plan: &Plan) -> u64 {
        // The margin may be any number that a user can type.
        plan.device_bytes().saturating_add(self.needs.margin_bytes)
    }

    /// Experts are not counted: those that cannot be pinned stay in the page cache.
    fn check_host(&self, plan: Plan) -> Result<Plan> {
        let loaded = |w: &&WeightInfo| w.role != Role::Experts;
        let weights = self.placed(&plan.places, Place::Host).filter(loaded);
        let needed_bytes = weights.map(WeightInfo::bytes).sum();
        let available_bytes = match self.budget.sharing {
            Sharing::Heap => self.budget.host_bytes.saturating_sub(self.device_needs(&plan)),
            Sharing::None | Sharing::Chips => self.budget.host_bytes,
        };
        if needed_bytes <= available_bytes {
            return Ok(plan);
        }
        let what = "what -ot puts into host memory beside experts".into();
        Err(Error::OutOfMemory { what, needed_bytes, available_bytes, hint: String::new() })
    }

    /// What device memory is needed for, in words.
    fn device_contents(&self, plan: &Plan) -> String {
        let experts = match plan.n_host_layers {
            0 => "the model".to_string(),
            n => format!("the model without the experts of {n} layers"),
        };
        let slots = match plan.n_slots {
            0 => String::new(),
            n => format!(", {n} staging slots"),
        };
        let margin = Bytes(self.needs.margin_bytes);
        format!("{experts} with KV cache, activations{slots} and {margin} of margin")
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::{CpuMoe, GpuLayers, Overrides};
    use super::*;
    use crate::gguf::GgmlType;
    use crate::graph::{Weight, WeightId};
    use proptest::prelude::*;

    pub(in super::super) fn weight(
        name: &str,
        role: Role,
        layer: Option<u32>,
        bytes: u64,
    ) -> WeightInfo {
        let weight = Weight { id: WeightId(0), ty: GgmlType::F32, k: 1, n: 1, n_expert: 1 };
        WeightInfo { name: name.into(), tensor: 0, role, layer, weight, matrix_bytes: bytes }
    }

    /// A model, some room, and wishes: anything that a user may come with.
    #[derive(Clone, Debug)]
    struct Case {
        weights: Vec<WeightInfo>,
        needs: Needs,
        budget: Budget,
        placement: PlacementOptions,
        stream: StreamOptions,
    }

    impl Case {
        fn place(&self) -> Result<Plan> {
            place(&self.weights, self.needs, self.budget, &self.placement, &self.stream)
        }

        /// Bytes that a plan takes of the device, margin included, added up once more.
        fn device_bytes(&self, places: &[Place], n_slots: u32) -> u64 {
            let sum = |place| {
                let of = self.weights.iter().zip(places).filter(move |(_, p)| **p == place);
                of.map(|(w, _)| w)
            };
            let experts = sum(Place::Host).filter(|w| w.role == Role::Experts);
            let slot = experts.map(|w| w.bytes() + 512).max().unwrap_or(0);
            let n = self.needs;
            let beside = n.kv_bytes + n.scratch_bytes + n.packing_bytes + n.margin_bytes;
            sum(Place::Device).map(WeightInfo::bytes).sum::<u64>()
                + u64::from(n_slots) * slot
                + beside
        }

        /// All places that the fit may choose from with the free experts of `n` layers on the host.
        fn places(&self, n: u32) -> Vec<Place> {
            let fixed = self.placement.fixed(&self.weights);
            let choose = |(w, fixed): (&WeightInfo, Option<Place>)| {
                let host = w.role == Role::Experts && w.layer.is_some_and(|il| il < n);
                fixed.unwrap_or(if host { Place::Host } else { Place::Device })
            };
            self.weights.iter().zip(fixed).map(choose).collect()
        }

        fn slot_counts(&self) -> Vec<u32> {
            match (self.stream.slots, self.budget.sharing) {
                (SlotCount::Fixed(n), _) => vec![n],
                (SlotCount::Auto, Sharing::None) => vec![3, 2, 0],
                (SlotCount::Auto, _) => vec![0],
            }
        }
    }

    fn rules() -> impl Strategy<Value = Overrides> {
        let rule = (0u32..12, prop::sample::select(vec!["attn", "up_exps", "down", "blk"]));
        let rule = (rule, prop::sample::select(vec!["HOST", "VRAM"]));
        let text = |((il, what), place): ((u32, &str), &str)| match il {
            10.. => format!("{what}={place}"),
            il => format!(r"blk\.{il}\..*{what}={place}"),
        };
        let parse = |rules: Vec<String>| match rules.is_empty() {
            true => Overrides::default(),
            false => rules.join(",").parse().unwrap_or_default(),
        };
        prop::collection::vec(rule.prop_map(text), 0..4).prop_map(parse)
    }

    fn placements() -> impl Strategy<Value = PlacementOptions> {
        let moe = prop_oneof![
            4 => Just(CpuMoe::Unset),
            2 => (0u32..12).prop_map(CpuMoe::First),
            1 => Just(CpuMoe::All),
        ];
        let layers = prop_oneof![
            4 => Just(GpuLayers::Auto),
            2 => (0u32..12).prop_map(GpuLayers::Last),
            1 => Just(GpuLayers::All),
        ];
        (rules(), moe, layers).prop_map(|(overrides, cpu_moe, gpu_layers)| PlacementOptions {
            overrides,
            cpu_moe,
            gpu_layers,
            margin_bytes: None,
        })
    }

    fn streams() -> impl Strategy<Value = StreamOptions> {
        let slots = prop_oneof![
            2 => Just(SlotCount::Auto),
            1 => Just(SlotCount::Fixed(0)),
            2 => (2u32..9).prop_map(SlotCount::Fixed),
        ];
        slots.prop_map(|slots| StreamOptions { slots, ..StreamOptions::default() })
    }

    fn budgets() -> impl Strategy<Value = Budget> {
        let sharing = vec![Sharing::None, Sharing::Chips, Sharing::Heap];
        let host = prop_oneof![Just(u64::MAX / 2), 0u64..120_000];
        (0u64..150_000, host, prop::sample::select(sharing)).prop_map(
            |(device_bytes, host_bytes, sharing)| Budget { device_bytes, host_bytes, sharing },
        )
    }

    fn cases() -> impl Strategy<Value = Case> {
        let sizes = prop::collection::vec((1u64..1000, 1u64..5000, 1u64..5000), 1..10);
        let needs = (0u64..2000, 0u64..500).prop_map(|(kv_bytes, margin_bytes)| Needs {
            kv_bytes,
            scratch_bytes: 10,
            packing_bytes: 7,
            margin_bytes,
        });
        let layer = |(il, (dense, up, down)): (u32, (u64, u64, u64))| {
            let named = |what, role, bytes| {
                weight(&format!("blk.{il}.{what}.weight"), role, Some(il), bytes)
            };
            [
                named("attn_q", Role::Dense, dense),
                named("ffn_up_exps", Role::Experts, up),
                named("ffn_down_exps", Role::Experts, down),
            ]
        };
        let weights = sizes.prop_map(move |sizes| -> Vec<WeightInfo> {
            let head = weight("output.weight", Role::Dense, None, 50);
            (0u32..).zip(sizes).flat_map(layer).chain([head]).collect()
        });
        (weights, needs, budgets(), placements(), streams()).prop_map(
            |(weights, needs, budget, placement, stream)| Case {
                weights,
                needs,
                budget,
                placement,
                stream,
            },
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        /// A plan fits, keeps what is fixed, moves nothing but experts of the first layers beside that,
        /// wastes no layer, and has as many slots as it says.
        #[test]
        fn plans_fit_keep_overrides_and_are_minimal(case in cases()) {
            let Ok(plan) = case.place() else { return Ok(()) };
            let weights = &case.weights;
            let on_host = || weights.iter().zip(&plan.places).filter(|(_, p)| **p == Place::Host);
            prop_assert_eq!(plan.places.len(), weights.len());

            // It fits.
            let used = case.device_bytes(&plan.places, plan.n_slots);
            prop_assert_eq!(used, plan.device_bytes() + case.needs.margin_bytes);
            prop_assert!(used <= case.budget.device_bytes);
            let host: u64 = on_host().map(|(w, _)| w.bytes()).sum();
            prop_assert_eq!(host, plan.host_weight_bytes);
            let paged: u64 =
                on_host().filter(|(w, _)| w.role == Role::Experts).map(|(w, _)| w.bytes()).sum();
            let beside = if case.budget.sharing == Sharing::Heap { used } else { 0 };
            prop_assert!(host - paged + beside <= case.budget.host_bytes.max(beside));

            // What is fixed is kept, and the rest is a choice of first layers: the smallest.
            let n = (0..=10).find(|&n| case.places(n) == plan.places);
            prop_assert!(n.is_some(), "neither fixed nor experts of the first layers");
            let slots = match plan.n_slots {
                0 if case.slot_counts() == [0] => 0,
                0 if on_host().any(|(w, _)| w.role == Role::Experts) => 0,
                0 => case.slot_counts()[0],
                n => n,
            };
            prop_assert!(case.slot_counts().contains(&slots));
            for fewer in 0..n.unwrap_or(0) {
                prop_assert!(case.device_bytes(&case.places(fewer), slots) > case.budget.device_bytes);
            }

            // Slots hold any expert tensor on the host, and are there only for those.
            let experts = on_host().filter(|(w, _)| w.role == Role::Experts);
            let largest = experts.map(|(w, _)| w.bytes()).max();
            match largest.filter(|_| plan.n_slots > 0) {
                Some(bytes) => prop_assert_eq!(plan.slot_bytes, bytes + SLOT_SLACK_BYTES),
                None => prop_assert_eq!((plan.n_slots, plan.slot_bytes), (0, 0)),
            }
        }

        /// What is refused could not have been placed: no number of host layers fits, with any number of
        /// slots that may be chosen.
        #[test]
        fn nothing_is_refused_that_fits(case in cases()) {
            let Err(refused) = case.place() else { return Ok(()) };
            let Error::OutOfMemory { needed_bytes, available_bytes, .. } = refused else {
                return Err(TestCaseError::fail("another error"));
            };
            prop_assert!(needed_bytes > available_bytes);
            // Host memory is asked least of by the first choice that fits the device.
            for &slots in &case.slot_counts() {
                let fits = |n: &u32| {
                    case.device_bytes(&case.places(*n), slots) <= case.budget.device_bytes
                };
                let Some(n) = (0..=10).find(fits) else { continue };
                let places = case.places(n);
                let counted = |w: &&WeightInfo| w.role != Role::Experts;
                let placed = case.weights.iter().zip(&places);
                let host = placed.filter(|(_, p)| **p == Place::Host).map(|(w, _)| w);
                let host: u64 = host.filter(counted).map(WeightInfo::bytes).sum();
                let used = match case.budget.sharing {
                    Sharing::Heap => case.device_bytes(&places, slots),
                    _ => 0,
                };
                prop_assert!(host > case.budget.host_bytes.saturating_sub(used));
            }
        }

        /// More slots are never taken at the price of not fitting, and fewer only if they do not fit.
        #[test]
        fn the_engines_own_slots_are_as_many_as_fit(case in cases()) {
            let fixed = |n| {
                let stream = StreamOptions { slots: SlotCount::Fixed(n), ..case.stream.clone() };
                Case { stream, ..case.clone() }.place().ok()
            };
            let auto = StreamOptions { slots: SlotCount::Auto, ..case.stream.clone() };
            let auto = Case { stream: auto, ..case.clone() };
            let expected = auto.slot_counts().into_iter().find_map(fixed);
            prop_assert_eq!(auto.place().ok(), expected);
        }
    }

    fn two_layers() -> Case {
        let layer = |il: u32| {
            [
                weight(&format!("blk.{il}.attn_q.weight"), Role::Dense, Some(il), 10),
                weight(&format!("blk.{il}.ffn_up_exps.weight"), Role::Experts, Some(il), 10_000),
            ]
        };
        Case {
            weights: (0..2).flat_map(layer).collect(),
            needs: Needs::default(),
            budget: Budget { device_bytes: 25_000, host_bytes: 50_000, sharing: Sharing::None },
            placement: PlacementOptions::default(),
            stream: StreamOptions::default(),
        }
    }

    /// Three slots of 10,512 bytes have no room beside 20 bytes, two do.
    #[test]
    fn slots_go_before_resident_experts() -> Result<()> {
        let mut case = two_layers();
        let plan = case.place()?;
        assert_eq!((plan.n_slots, plan.n_host_layers), (0, 0), "all of it fits");
        case.placement.cpu_moe = CpuMoe::First(1);
        let plan = case.place()?;
        assert_eq!((plan.n_slots, plan.n_host_layers), (2, 2));
        case.budget.device_bytes = 15_000;
        let plan = case.place()?;
        assert_eq!((plan.n_slots, plan.n_host_layers), (0, 1));
        Ok(())
    }

    #[test]
    fn refusals_say_what_needs_how_much() {
        let mut case = two_layers();
        case.placement.gpu_layers = GpuLayers::All;
        case.budget.device_bytes = 20_000;
        case.needs.margin_bytes = 1024;
        let refused = case.place().map(|_| ()).map_err(|e| e.to_string());
        let words = "out of memory: the model with KV cache, activations and 1.0 KiB of margin needs \
                     20.6 KiB, 19.5 KiB are free";
        assert_eq!(refused, Err(words.to_string()));
        case.placement.gpu_layers = GpuLayers::Last(0);
        case.budget = Budget { host_bytes: 15, ..case.budget };
        assert!(case.place().is_ok(), "experts need not be pinned");
        case.placement.overrides = "attn=HOST".parse().unwrap_or_default();
        let refused = case.place().map(|_| ()).map_err(|e| e.to_string());
        let words = "out of memory: what -ot puts into host memory beside experts needs";
        assert!(refused.is_err_and(|e| e.starts_with(words)));
    }
}
