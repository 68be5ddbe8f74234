//! The policy against a device made up: tables, units, and copies that take a while.

use super::*;
use proptest::prelude::*;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::HashMap;

fn shapes(sizes: &[(u64, u32)]) -> Vec<LayerShape> {
    sizes.iter().map(|&(unit_bytes, n_expert)| LayerShape { unit_bytes, n_expert }).collect()
}

fn cache(layers: &[LayerShape], capacity_bytes: u64) -> ExpertCache {
    ExpertCache::new(layers, &divide(&classes(layers), capacity_bytes), Temper::CALM)
}

/// Tables and units of a device whose copies take a while.
struct Device {
    table: HashMap<ExpertId, UnitId>,
    units: HashMap<UnitId, Option<ExpertId>>,
    copies: VecDeque<(u64, Vec<Promotion>)>,
    submitted: u64,
    reached: Reached,
}

impl Device {
    fn new() -> Self {
        Device {
            table: HashMap::new(),
            units: HashMap::new(),
            copies: VecDeque::new(),
            submitted: 0,
            reached: Reached::default(),
        }
    }

    /// Completes the oldest copies.
    fn copy(&mut self, n: usize) {
        for (value, promotions) in self.copies.drain(..n.min(self.copies.len())) {
            self.units.extend(promotions.iter().map(|p| (p.unit, Some(p.expert))));
            self.reached.copy = value;
        }
    }

    fn change(&mut self, changes: &[Change]) {
        for change in changes {
            match change.unit {
                Some(unit) => assert_eq!(self.table.insert(change.expert, unit), None),
                None => assert!(self.table.remove(&change.expert).is_some()),
            }
        }
        let used: std::collections::HashSet<_> = self.table.values().collect();
        assert_eq!(used.len(), self.table.len(), "two experts in one unit");
    }

    /// What a pass finds.
    fn check(&self) {
        for (expert, unit) in &self.table {
            assert_eq!(self.units.get(unit), Some(&Some(*expert)), "a unit that is not whole");
        }
    }

    /// Submits what is due, in batches of at most `n`; from then on the units hold anything.
    fn submit(&mut self, cache: &mut ExpertCache, n: usize) {
        let due: Vec<Promotion> = cache.due().take(n).collect();
        if due.is_empty() {
            return;
        }
        for p in &due {
            assert!(p.after_compute <= self.reached.compute, "a copy that waits for a pass");
            assert!(p.after_copy <= self.reached.copy, "a copy over one that is not done");
            assert!(self.table.values().all(|unit| *unit != p.unit), "a unit that is read");
            self.units.insert(p.unit, None);
        }
        self.submitted += 1;
        cache.copied(due.len(), self.submitted);
        self.copies.push_back((self.submitted, due));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    /// Over random layers, uses, budgets and delays: what tables say lies in the unit, no unit is written that
    /// a pass may read, no more is on its way than was allowed, and counts agree.
    #[test]
    fn passes_find_whole_experts(
        sizes in prop::collection::vec((1u64..4, 1u32..9), 1..6),
        capacity in 0u64..60,
        passes in prop::collection::vec((any::<u64>(), 0u64..9, 0usize..4, 0usize..4), 1..80),
        temper in prop::sample::select(vec![Temper::CALM, Temper::RESTLESS]),
    ) {
        let layers = shapes(&sizes);
        let (mut cache, mut device) = (cache(&layers, capacity), Device::new());
        cache.temper = temper;
        for (seed, budget, n_submitted, n_done) in passes {
            let changes = cache.between_passes(device.reached);
            device.change(&changes);
            prop_assert_eq!(cache.held().count(), device.table.len());
            // A pass begins.
            device.check();
            device.submit(&mut cache, n_submitted);
            let before = cache.changing_bytes;
            cache.choose(budget);
            prop_assert!(cache.changing_bytes <= before.max(budget));
            device.submit(&mut cache, n_submitted);
            device.copy(n_done);
            device.check();
            device.reached.compute += 1;
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            let weight = cache.begin_uses(1 + seed as u32 % 3);
            for (layer, shape) in (0..).zip(&layers) {
                let n = rng.random_range(1..4);
                // Among them some that are not there.
                let mut ids: Vec<u32> =
                    (0..n).map(|_| rng.random_range(0..shape.n_expert + 1)).collect();
                let hits = |id: &u32| {
                    device.table.contains_key(&ExpertId { layer, expert: *id })
                };
                let mut known: Vec<u32> =
                    ids.iter().copied().filter(|id| *id < shape.n_expert).collect();
                known.sort_unstable();
                known.dedup();
                let n_hits = known.iter().filter(|id| hits(id)).count() as u64;
                let uses = cache.use_experts(layer, &mut ids, weight);
                prop_assert_eq!(uses, Uses { hits: n_hits, misses: known.len() as u64 - n_hits });
                let held = (0..shape.n_expert).filter(|e| hits(e)).count() as u32;
                prop_assert_eq!(cache.n_held(layer), held);
            }
        }
    }

    /// Units take no more than there is, leave less than one of each class, and hold all if all fit.
    #[test]
    fn classes_share_what_there_is(
        sizes in prop::collection::vec((1u64..50, 1u32..9), 1..20),
        capacity in 0u64..6000,
    ) {
        let wanted = classes(&shapes(&sizes));
        let given = divide(&wanted, capacity);
        let (total, used) = (total_bytes(&wanted), total_bytes(&given));
        prop_assert!(used <= capacity && used <= total);
        prop_assert!(given.iter().zip(&wanted).all(|(g, w)| g.n <= w.n));
        let smallest = wanted.iter().map(|c| c.unit_bytes).sum::<u64>();
        prop_assert!(used == total || capacity - used < smallest);
        prop_assert_eq!(used == total, capacity >= total);
    }
}

/// Tokens that choose `n_used` of each layer's experts, the likelier the more `skew`; the hit rate of the last
/// half, and bytes copied meanwhile per token. Copies are done before the next pass, if `budget` allows them.
fn simulate(skew: f64, capacity: u64, n_tokens: usize) -> (f64, f64, f64) {
    let (n_layer, n_expert, n_used) = (6, 64u32, 4);
    let layers = shapes(&vec![(1, n_expert); n_layer]);
    let (mut cache, mut device) = (cache(&layers, capacity), Device::new());
    let mut rng = ChaCha8Rng::seed_from_u64(7);
    let weights: Vec<f64> = (1..=n_expert).map(|rank| f64::from(rank).powf(-skew)).collect();
    let (mut sum, mut misses, mut copied) = (Uses::default(), 0, 0);
    let mut counts = vec![0u64; n_layer * n_expert as usize];
    for token in 0..n_tokens {
        let changes = cache.between_passes(device.reached);
        device.change(&changes);
        let before = device.submitted;
        device.submit(&mut cache, usize::MAX);
        cache.choose((misses / 2).max(1));
        device.submit(&mut cache, usize::MAX);
        let late = token * 2 >= n_tokens;
        if late {
            let submitted = device.copies.iter().filter(|(value, _)| *value > before);
            copied += submitted.map(|(_, copies)| copies.len()).sum::<usize>();
        }
        device.copy(usize::MAX);
        let weight = cache.begin_uses(1);
        misses = 0;
        for layer in 0..n_layer as u32 {
            let mut ids: Vec<u32> = Vec::new();
            while ids.len() < n_used {
                let mut at = rng.random_range(0.0..weights.iter().sum());
                let rank = weights.iter().position(|w| {
                    at -= w;
                    at < 0.0
                });
                // Another order in each layer.
                let expert = (rank.unwrap_or(0) as u32 * 13 + layer * 5) % n_expert;
                if !ids.contains(&expert) {
                    ids.push(expert);
                }
            }
            ids.iter().for_each(|e| counts[(layer * n_expert + e) as usize] += u64::from(late));
            let uses = cache.use_experts(layer, &mut ids, weight);
            misses += uses.misses;
            if late {
                sum = Uses { hits: sum.hits + uses.hits, misses: sum.misses + uses.misses };
            }
        }
    }
    counts.sort_unstable_by(|a, b| b.cmp(a));
    let total = counts.iter().sum::<u64>() as f64;
    let best = counts.iter().take(capacity as usize).sum::<u64>() as f64 / total;
    let rate = sum.hits as f64 / (sum.hits + sum.misses) as f64;
    (rate, best, copied as f64 / (n_tokens / 2) as f64)
}

/// 384 experts, a third of which fit.
#[test]
fn the_hottest_stay_in_the_cache() {
    let (rate, best, copied) = simulate(1.2, 128, 1000);
    assert!(best > 0.7 && rate > best - 0.04, "{rate} of {best}");
    assert!(copied < 0.6, "{copied} copies a token of 24 uses");
}

#[test]
fn half_of_evenly_used_experts_is_half_of_the_uses() {
    let (rate, _, copied) = simulate(0.0, 192, 1000);
    assert!((0.47..0.53).contains(&rate), "{rate}");
    assert!(copied < 0.6, "{copied} copies a token of 24 uses");
}

#[test]
fn where_all_fit_all_are_hits() {
    let (rate, _, copied) = simulate(0.5, 384, 1000);
    assert!(rate > 0.999 && copied < 0.1, "{rate}, {copied}");
}

/// A pass, and one promotion while it runs.
fn pass_with_promotion(cache: &mut ExpertCache, device: &mut Device) {
    let changes = cache.between_passes(device.reached);
    device.change(&changes);
    device.submit(cache, 9);
    cache.choose(1);
    device.submit(cache, 9);
    device.copy(9);
}

/// Two experts take turns at being hot: the cache follows.
#[test]
fn what_was_hot_long_ago_makes_room() {
    let layers = shapes(&[(1, 2)]);
    let (mut cache, mut device) = (cache(&layers, 1), Device::new());
    let mut hits = [0, 0];
    for token in 0..2000u32 {
        pass_with_promotion(&mut cache, &mut device);
        let (phase, weight) = (token as usize / 1000, cache.begin_uses(1));
        hits[phase] += cache.use_experts(0, &mut [phase as u32], weight).hits;
    }
    assert!(hits[0] > 990 && hits[1] > 800, "{hits:?}");
    assert_eq!(cache.n_evicted(), 1);
}

/// As where disorder is wanted.
#[test]
fn a_restless_cache_holds_what_was_used_last() {
    let layers = shapes(&[(1, 3)]);
    let (mut cache, mut device) = (cache(&layers, 1), Device::new());
    cache.temper = Temper::RESTLESS;
    for token in 0..30 {
        pass_with_promotion(&mut cache, &mut device);
        let weight = cache.begin_uses(1);
        cache.use_experts(0, &mut [token / 5 % 3], weight);
    }
    assert_eq!(cache.n_evicted(), 5);
}

/// As many tokens at once as one by one.
#[test]
fn a_prompt_counts_like_its_tokens() {
    let layers = shapes(&[(1, 2)]);
    let [mut whole, mut single] = [0, 1].map(|_| cache(&layers, 1));
    let weight = whole.begin_uses(500);
    whole.use_experts(0, &mut [0; 500], weight);
    for _ in 0..500 {
        let weight = single.begin_uses(1);
        assert_eq!(weight, 1.0);
        single.use_experts(0, &mut [0], weight);
    }
    let [whole, single] = [whole, single].map(|cache| cache.experts[0].heat);
    assert!((whole - single).abs() < 1e-9, "{whole} {single}");
}
