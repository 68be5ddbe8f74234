//! The decision: which weights go where, how many staging slots there are, and how large batches are.

use super::cache;
use super::options::n_layers;
use super::predict::{HostLayer, Prediction, Way};
use super::{BatchNeeds, Budget, Bytes, Needs, Place, PlacementOptions, Plan, RunnerUp, Sharing};
use crate::error::{Error, Result};
use crate::model::weights::{Role, WeightInfo};
use crate::stream::options::{CacheSize, FULL_SLOTS, MIN_SLOTS, SlotCount, StreamOptions};
use std::collections::BTreeMap;

/// Beside the tensor a slot holds what aligning its start costs, and the bytes that kernels may read
/// behind its end.
pub const SLOT_SLACK_BYTES: u64 = 512;
/// Predictions that differ by less are the same: then batches are as large as they can be.
const SAME: f64 = 1.005;

/// Places the weights: what the options fix goes where they say, and of the other experts the fewest
/// first layers go to host memory, so that the rest fits.
///
/// `needs.margin_bytes` stays free. More slots, larger batches and more layers on the device compete for
/// memory: of all that the options leave open, what is predicted to be fastest is taken. On a card with
/// memory of its own the engine's choice is from [`MIN_SLOTS`] to [`FULL_SLOTS`] slots, and none only where
/// even all free experts in host memory leave no room for so many. A batch is as large as the options say,
/// or a half, a quarter, … of the largest. What is left then is the expert cache's, as far as it is wanted.
pub fn place(
    weights: &[WeightInfo],
    needs: Needs,
    budget: Budget,
    placement: &PlacementOptions,
    stream: &StreamOptions,
) -> Result<Plan> {
    let fixed = placement.fixed(weights);
    let job = Job { weights, fixed, needs, budget };
    let drafts: Vec<Draft> = (0..=n_layers(weights)).map(|n| job.draft(n)).collect();
    let (rather, last): (Vec<u32>, u32) = match stream.slots {
        SlotCount::Fixed(n) => (vec![n], n),
        SlotCount::Auto if budget.sharing == Sharing::None => {
            ((MIN_SLOTS..=FULL_SLOTS).rev().collect(), 0)
        }
        SlotCount::Auto => (vec![0], 0),
    };
    let plan = match job.fastest(&drafts, &rather) {
        Some(plan) => plan,
        None => {
            let n_batch = needs.batch.n_ubatch;
            job.fit(&drafts, last, n_batch).map(|draft| job.plan(draft, last, n_batch))?
        }
    };
    Ok(job.with_cache(plan, stream.expert_cache))
}

/// Sizes of batches in the order of preference, the last of one ubatch; of later lists only if nothing fits of
/// those before.
fn batches(needs: &BatchNeeds) -> Vec<Vec<u32>> {
    let n_ubatch = needs.n_ubatch.max(1);
    let halves = |n: u32| std::iter::successors(Some(n / n_ubatch), |n| Some(n / 2));
    let sizes = |n| halves(n).take_while(|&n| n > 0).map(|n| n * n_ubatch).collect::<Vec<u32>>();
    match needs.n_batch.map(|n| n.min(needs.n_max)) {
        None => vec![sizes(needs.n_max.max(n_ubatch))],
        // What does not fit goes as several batches.
        Some(n) => vec![vec![n], sizes(n)],
    }
}

/// What is given.
struct Job<'a> {
    weights: &'a [WeightInfo],
    /// By weight; `None`: free to choose.
    fixed: Vec<Option<Place>>,
    needs: Needs,
    budget: Budget,
}

/// Places, before slots and batches.
struct Draft {
    places: Vec<Place>,
    device_weight_bytes: u64,
    host_weight_bytes: u64,
    /// The largest expert tensor in host memory.
    largest: Option<u64>,
    host_layers: Vec<HostLayer>,
}

impl Job<'_> {
    /// The fastest plan that fits.
    fn fastest(&self, drafts: &[Draft], slots: &[u32]) -> Option<Plan> {
        let sizes = batches(&self.needs.batch);
        let found = sizes.iter().map(|sizes| self.plans(drafts, slots, sizes));
        let plans = found.into_iter().find(|plans| !plans.is_empty())?;
        let ns = |plan: &Plan| plan.prediction.map_or(0.0, |p| p.total_ns());
        let best_ns = plans.iter().map(ns).fold(f64::INFINITY, f64::min);
        let at = plans.iter().position(|plan| ns(plan) <= best_ns * SAME)?;
        let chosen = &plans[at];
        let differs = |other: &&Plan| {
            (other.n_host_layers, other.n_slots) != (chosen.n_host_layers, chosen.n_slots)
        };
        let rest = plans.iter().filter(differs);
        let runner_up = rest.min_by(|a, b| ns(a).total_cmp(&ns(b))).and_then(RunnerUp::of);
        Some(Plan {
            runner_up: runner_up.filter(|_| chosen.prediction.is_some()),
            ..chosen.clone()
        })
    }

    /// What fits with each of the slots and batches, in the order of preference.
    fn plans(&self, drafts: &[Draft], slots: &[u32], sizes: &[u32]) -> Vec<Plan> {
        let ways = sizes.iter().flat_map(|&size| slots.iter().map(move |&n| (n, size)));
        let fit = |(n, size)| self.fit(drafts, n, size).ok().map(|draft| self.plan(draft, n, size));
        let is_own = |plan: &Plan, size: u32| plan.n_batch == size;
        ways.filter_map(|way| fit(way).filter(|plan| is_own(plan, way.1))).collect()
    }

    /// The fewest layers of free experts in host memory with which so many slots and such batches fit.
    fn fit<'d>(&self, drafts: &'d [Draft], n_slots: u32, n_batch: u32) -> Result<&'d Draft> {
        let needs = |draft: &Draft| self.device_needs(draft, n_slots, n_batch);
        let fits = |draft: &&Draft| needs(draft) <= self.budget.device_bytes;
        if let Some(draft) = drafts.iter().find(fits) {
            return self.check_host(draft, n_slots, n_batch).map(|()| draft);
        }
        // Not always the last one: the first layer on the host brings the slots with it.
        let smallest = drafts.iter().min_by_key(|draft| needs(draft));
        Err(Error::OutOfMemory {
            what: smallest.map_or_else(String::new, |draft| self.device_contents(draft, n_slots)),
            needed_bytes: smallest.map_or(0, needs),
            available_bytes: self.budget.device_bytes,
            hint: String::new(),
        })
    }

    /// Free experts of the first `n_host` layers in host memory, all others in device memory.
    fn draft(&self, n_host: u32) -> Draft {
        let place = |(w, fixed): (&WeightInfo, &Option<Place>)| {
            let among_first = w.layer.is_some_and(|il| il < n_host);
            fixed.unwrap_or(if among_first { Place::Host } else { Place::Device })
        };
        let places: Vec<Place> = self.weights.iter().zip(&self.fixed).map(place).collect();
        let on_host = || self.placed(&places, Place::Host);
        let experts = || on_host().filter(|w| w.role == Role::Experts);
        let mut layers: BTreeMap<u32, HostLayer> = BTreeMap::new();
        for (il, w) in experts().filter_map(|w| Some((w.layer?, w))) {
            let layer = layers.entry(il).or_default();
            layer.bytes += w.bytes();
            layer.n_tensors += 1;
        }
        Draft {
            device_weight_bytes: self.placed(&places, Place::Device).map(WeightInfo::bytes).sum(),
            host_weight_bytes: on_host().map(WeightInfo::bytes).sum(),
            largest: experts().map(WeightInfo::bytes).max(),
            host_layers: layers.into_values().collect(),
            places,
        }
    }

    /// The plan of a draft.
    fn plan(&self, draft: &Draft, n_slots: u32, n_batch: u32) -> Plan {
        let needs = self.needs;
        let n_batch = self.batch(draft, n_slots, n_batch);
        let way = Way {
            n_layers: n_layers(self.weights),
            host: &draft.host_layers,
            n_slots,
            n_batch,
            n_ubatch: needs.batch.n_ubatch,
        };
        let with_slots = draft.largest.filter(|_| n_slots > 0);
        let on_host = !draft.host_layers.is_empty() && needs.rates.link_gbps > 0.0;
        Plan {
            places: draft.places.clone(),
            n_host_layers: draft.host_layers.len() as u32,
            device_weight_bytes: draft.device_weight_bytes,
            host_weight_bytes: draft.host_weight_bytes,
            n_slots: with_slots.map_or(0, |_| n_slots),
            slot_bytes: with_slots.map_or(0, |bytes| bytes + SLOT_SLACK_BYTES),
            n_batch,
            cache_bytes: 0,
            cache_is_short: false,
            needs,
            prediction: on_host.then(|| Prediction::of(way, &needs.rates)),
            runner_up: None,
        }
    }

    /// The plan with a cache for its experts in host memory, in what is left.
    fn with_cache(&self, plan: Plan, size: CacheSize) -> Plan {
        let wanted = match size {
            CacheSize::Fixed(bytes) => bytes,
            CacheSize::Auto if self.budget.sharing == Sharing::None => u64::MAX,
            CacheSize::Auto => 0,
        };
        let used = plan.device_bytes().saturating_add(self.needs.margin_bytes);
        let left = self.budget.device_bytes.saturating_sub(used);
        let left = match self.budget.sharing {
            Sharing::Heap => {
                let beside = used.saturating_add(self.loaded_host_bytes(&plan.places));
                left.min(self.budget.host_bytes.saturating_sub(beside))
            }
            Sharing::None | Sharing::Chips => left,
        };
        let experts = self.placed(&plan.places, Place::Host).filter(|w| w.role == Role::Experts);
        let (cache_bytes, useful_bytes) = cache::bytes(experts, wanted, left);
        let is_fixed = size != CacheSize::Auto;
        Plan { cache_bytes, cache_is_short: is_fixed && cache_bytes < useful_bytes, ..plan }
    }

    /// The batch that slots make possible: a layer's tensors have to be in them together.
    fn batch(&self, draft: &Draft, n_slots: u32, n_batch: u32) -> u32 {
        let widest = draft.host_layers.iter().map(|layer| layer.n_tensors).max();
        let by_layer = widest.is_some_and(|n| n_slots >= n);
        if by_layer { n_batch } else { self.needs.batch.n_ubatch }
    }

    /// Device memory with everything, the margin included.
    fn device_needs(&self, draft: &Draft, n_slots: u32, n_batch: u32) -> u64 {
        let n = &self.needs;
        let slot_bytes = draft.largest.map_or(0, |bytes| bytes + SLOT_SLACK_BYTES);
        let batch_bytes = n.batch.bytes(self.batch(draft, n_slots, n_batch));
        let beside = n.kv_bytes + n.scratch_bytes + n.packing_bytes + batch_bytes;
        let bytes = draft.device_weight_bytes + u64::from(n_slots) * slot_bytes + beside;
        // The margin may be any number that a user can type.
        bytes.saturating_add(n.margin_bytes)
    }

    /// The weights in one place.
    fn placed<'a>(
        &'a self,
        places: &'a [Place],
        place: Place,
    ) -> impl Iterator<Item = &'a WeightInfo> {
        self.weights.iter().zip(places).filter(move |(_, p)| **p == place).map(|(w, _)| w)
    }

    /// Experts are not counted: those that cannot be pinned stay in the page cache.
    fn loaded_host_bytes(&self, places: &[Place]) -> u64 {
        let loaded = |w: &&WeightInfo| w.role != Role::Experts;
        self.placed(places, Place::Host).filter(loaded).map(WeightInfo::bytes).sum()
    }

    fn check_host(&self, draft: &Draft, n_slots: u32, n_batch: u32) -> Result<()> {
        let needed_bytes = self.loaded_host_bytes(&draft.places);
        let available_bytes = match self.budget.sharing {
            Sharing::Heap => {
                let used = self.device_needs(draft, n_slots, n_batch);
                self.budget.host_bytes.saturating_sub(used)
            }
            Sharing::None | Sharing::Chips => self.budget.host_bytes,
        };
        if needed_bytes <= available_bytes {
            return Ok(());
        }
        let what = "what -ot puts into host memory beside experts".into();
        Err(Error::OutOfMemory { what, needed_bytes, available_bytes, hint: String::new() })
    }

    /// What device memory is needed for, in words.
    fn device_contents(&self, draft: &Draft, n_slots: u32) -> String {
        let experts = match draft.host_layers.len() {
            0 => "the model".to_string(),
            n => format!("the model without the experts of {n} layers"),
        };
        let slots = match n_slots {
            n if n > 0 && draft.largest.is_some() => format!(", {n} staging slots"),
            _ => String::new(),
        };
        let margin = Bytes(self.needs.margin_bytes);
        format!("{experts} with KV cache, activations{slots} and {margin} of margin")
    }
}

impl RunnerUp {
    fn of(plan: &Plan) -> Option<Self> {
        let &Plan { n_host_layers, n_slots, n_batch, prediction, .. } = plan;
        Some(RunnerUp { n_host_layers, n_slots, n_batch, prediction: prediction? })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::{CpuMoe, GpuLayers, Overrides, Rates};
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
        fn device_bytes(&self, places: &[Place], n_slots: u32, n_batch: u32) -> u64 {
            let sum = |place| {
                let of = self.weights.iter().zip(places).filter(move |(_, p)| **p == place);
                of.map(|(w, _)| w)
            };
            let experts = sum(Place::Host).filter(|w| w.role == Role::Experts);
            let slot = experts.map(|w| w.bytes() + 512).max().unwrap_or(0);
            let n = self.needs;
            let batch = match self.widest(places) {
                1.. if n_slots >= self.widest(places) && n_batch > n.batch.n_ubatch => {
                    u64::from(n_batch.div_ceil(n.batch.n_ubatch)) * n.batch.ubatch_bytes
                }
                _ => 0,
            };
            let beside = n.kv_bytes + n.scratch_bytes + n.packing_bytes + n.margin_bytes + batch;
            sum(Place::Device).map(WeightInfo::bytes).sum::<u64>()
                + u64::from(n_slots) * slot
                + beside
        }

        /// Most expert tensors that a layer has in host memory.
        fn widest(&self, places: &[Place]) -> u32 {
            let on_host = |(w, place): (&WeightInfo, &Place)| {
                (w.role == Role::Experts && *place == Place::Host).then_some(w.layer)?
            };
            let layers: Vec<u32> = self.weights.iter().zip(places).filter_map(on_host).collect();
            let count = |il: &u32| layers.iter().filter(|other| *other == il).count() as u32;
            layers.iter().map(count).max().unwrap_or(0)
        }

        fn with_slots(&self, slots: SlotCount) -> Case {
            let stream = StreamOptions { slots, ..self.stream.clone() };
            Case { stream, ..self.clone() }
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

        /// What the cache may take.
        fn cache_bytes(&self) -> u64 {
            match (self.stream.expert_cache, self.budget.sharing) {
                (CacheSize::Fixed(n), _) => n,
                (CacheSize::Auto, Sharing::None) => u64::MAX,
                (CacheSize::Auto, _) => 0,
            }
        }

        fn slot_counts(&self) -> Vec<u32> {
            match (self.stream.slots, self.budget.sharing) {
                (SlotCount::Fixed(n), _) => vec![n],
                (SlotCount::Auto, Sharing::None) => vec![6, 5, 4, 3, 2, 0],
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
        let cache = prop_oneof![Just(CacheSize::Auto), (0u64..30_000).prop_map(CacheSize::Fixed),];
        (slots, cache).prop_map(|(slots, expert_cache)| StreamOptions {
            slots,
            expert_cache,
            ..StreamOptions::default()
        })
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
        let batch = (prop::option::of(1u32..40), 1u32..40, 0u64..3000).prop_map(
            |(n_batch, n_max, ubatch_bytes)| BatchNeeds {
                n_ubatch: 4,
                n_batch: n_batch.map(|n| 4 * n),
                n_max: 4 * n_max,
                ubatch_bytes,
            },
        );
        let rates = (0.1f64..100.0, 0f64..100.0).prop_map(|(link_gbps, token_ns)| Rates {
            link_gbps,
            token_ns,
            used_share: 0.1,
            n_prompt: 150,
        });
        let needs = (0u64..2000, 0u64..500, batch, rates).prop_map(
            |(kv_bytes, margin_bytes, batch, rates)| Needs {
                kv_bytes,
                scratch_bytes: 10,
                packing_bytes: 7,
                margin_bytes,
                batch,
                rates,
            },
        );
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
            let used = case.device_bytes(&plan.places, plan.n_slots, plan.n_batch) + plan.cache_bytes;
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
                let bytes = case.device_bytes(&case.places(fewer), slots, plan.n_batch);
                prop_assert!(bytes > case.budget.device_bytes);
            }

            // The cache has what was asked for, unless something else has it or all experts fit.
            let left = match case.budget.sharing {
                Sharing::Heap => case.budget.host_bytes.saturating_sub(used + host - paged),
                _ => u64::MAX,
            };
            let left = left.min(case.budget.device_bytes - used);
            let most = case.cache_bytes();
            prop_assert!(plan.cache_bytes <= most);
            let experts = on_host().filter(|(w, _)| w.role == Role::Experts);
            let unit = |(w, _): (&WeightInfo, &Place)| w.bytes() + 1024;
            let is_enough = plan.cache_bytes == most
                || left == 0
                || experts.clone().map(unit).sum::<u64>() >= left.min(most)
                || plan.cache_bytes >= experts.map(|(w, _)| w.bytes()).sum();
            prop_assert!(is_enough, "{plan:?} leaves {left}");

            // Batches are whole ubatches, no more than asked for, and several only if slots hold a layer.
            let batch = case.needs.batch;
            prop_assert!(plan.n_batch.is_multiple_of(4) && plan.n_batch <= batch.n_max);
            prop_assert!(batch.n_batch.is_none_or(|n| plan.n_batch <= n));
            let widest = case.widest(&plan.places);
            prop_assert!(plan.n_batch == 4 || (1..=plan.n_slots).contains(&widest));
            prop_assert_eq!(plan.prediction.is_some(), widest > 0);

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
                    case.device_bytes(&case.places(*n), slots, 4) <= case.budget.device_bytes
                };
                let Some(n) = (0..=10).find(fits) else { continue };
                let places = case.places(n);
                let counted = |w: &&WeightInfo| w.role != Role::Experts;
                let placed = case.weights.iter().zip(&places);
                let host = placed.filter(|(_, p)| **p == Place::Host).map(|(w, _)| w);
                let host: u64 = host.filter(counted).map(WeightInfo::bytes).sum();
                let used = match case.budget.sharing {
                    Sharing::Heap => case.device_bytes(&places, slots, 4),
                    _ => 0,
                };
                prop_assert!(host > case.budget.host_bytes.saturating_sub(used));
            }
        }

        /// The engine's own number of slots is as fast as any that fits, and so is its own batch.
        #[test]
        fn the_engines_own_choice_is_the_fastest(case in cases()) {
            let total_ns = |plan: &Plan| plan.prediction.map_or(0.0, |p| p.total_ns());
            let free = BatchNeeds { n_batch: None, ..case.needs.batch };
            let needs = Needs { batch: free, ..case.needs };
            let auto = Case { needs, ..case.with_slots(SlotCount::Auto) };
            let Ok(chosen) = auto.place() else { return Ok(()) };
            let counts = auto.slot_counts();
            let (rather, last) = counts.split_at(counts.len() - 1);
            let fits = |&&n: &&u32| auto.with_slots(SlotCount::Fixed(n)).place().is_ok();
            let counts = if rather.iter().any(|n| fits(&n)) { rather } else { last };
            for &n in counts {
                for n_batch in [None, case.needs.batch.n_batch, Some(4)] {
                    let needs = Needs { batch: BatchNeeds { n_batch, ..free }, ..case.needs };
                    let fixed = Case { needs, ..auto.with_slots(SlotCount::Fixed(n)) };
                    let Ok(other) = fixed.place() else { continue };
                    // Only halves of the largest batch are tried.
                    let is_tried = batches(&free)[0].contains(&other.n_batch);
                    let bound = total_ns(&other) * SAME * (1.0 + 1e-9);
                    prop_assert!(!is_tried || total_ns(&chosen) <= bound, "{other:?} {chosen:?}");
                }
            }
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

    /// Two layers of three tensors, which fill slots of 10,512 bytes; each ubatch keeps 5000 bytes; a layer is
    /// copied in 30,000 ns.
    #[test]
    fn slots_and_batches_compete() -> Result<()> {
        let mut case = two_layers();
        let tensor = |i: u32| {
            let name = format!("blk.{}.ffn_{i}_exps.weight", i / 3);
            weight(&name, Role::Experts, Some(i / 3), 10_000)
        };
        case.weights = (0..6).map(tensor).collect();
        case.placement.cpu_moe = CpuMoe::All;
        case.needs.batch = BatchNeeds { n_ubatch: 4, n_batch: None, n_max: 32, ubatch_bytes: 5000 };
        let mut chosen = |device_bytes, token_ns, n_batch| {
            case.budget.device_bytes = device_bytes;
            case.needs.batch.n_batch = n_batch;
            case.needs.rates = Rates { link_gbps: 1.0, token_ns, used_share: 0.0, n_prompt: 32 };
            case.place().map(|plan| (plan.n_slots, plan.n_batch))
        };
        // Where copies take longer than kernels, they are made once; where kernels do, copies hide.
        assert_eq!(chosen(72_000, 0.0, None)?, (3, 32));
        assert_eq!(chosen(72_000, 2e3, None)?, (3, 32));
        assert_eq!(chosen(72_000, 8e3, None)?, (6, 4));
        assert_eq!(chosen(62_600, 2e3, None)?, (4, 16));
        // What is asked for is kept, and cut where it does not fit.
        assert_eq!(chosen(62_600, 2e3, Some(8))?, (5, 8));
        assert_eq!(chosen(62_600, 2e3, Some(32))?, (4, 16));
        let choice = case.place()?.choice();
        assert_eq!(choice[0], "predicted: a prompt of 32 tokens and 256 more in 0.0 + 0.0 s");
        assert_eq!(choice[1], "2 layers on the host, 5 slots, batch 8: 0.0 + 0.0 s");
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
