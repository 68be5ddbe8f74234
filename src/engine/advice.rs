//! Which flags would make a plan work that does not: values are found by trying, so that what is
//! advised works. Pure but for the trial itself, which the caller brings.

use super::EngineOptions;
use crate::exec::kv::KvType;
use crate::plan::{CpuMoe, GpuLayers, Overrides, Place, PlacementOptions};
use crate::stream::options::{MIN_SLOTS, SlotCount, StreamOptions};

/// What is known beside the options.
pub(super) struct Situation {
    /// Layers of the model.
    pub(super) n_layer: u32,
    /// The context that the options amount to.
    pub(super) n_ctx: u32,
    /// What is free of the device, without the user's limit.
    pub(super) free_device_bytes: u64,
}

/// Flags, as the user would write them, and the options with them.
type Change = (String, EngineOptions);
/// Changes of one kind, the smallest first.
type Kind = fn(&EngineOptions, &Situation) -> Vec<Change>;

/// One change at a time; those that cost least come first.
const SINGLE: &[Kind] = &[
    fewer_slots,
    layers_on_host,
    smaller_margin,
    without_vram_rules,
    smaller_ubatch,
    smaller_context,
    smaller_cache,
    embedding_on_host,
    higher_limit,
];
/// What is left if no single change is enough.
const TOGETHER: [Kind; 2] = [smaller_everything, all_on_host];

/// Ways to name at most.
const MAX_WAYS: usize = 3;
/// Contexts and ubatches are not advised to be smaller.
const MIN_CTX: u32 = 256;
const MIN_UBATCH: u32 = 16;

/// `; -ub 256 or -c 8192 would do`
pub(super) fn hint(
    options: &EngineOptions,
    situation: &Situation,
    works: &dyn Fn(&EngineOptions) -> bool,
) -> String {
    let first = |kind: &Kind| {
        let mut changes = kind(options, situation).into_iter();
        changes.find(|(_, changed)| works(changed)).map(|(flags, _)| flags)
    };
    let mut ways: Vec<String> = SINGLE.iter().filter_map(first).take(MAX_WAYS).collect();
    if ways.is_empty() {
        ways.extend(TOGETHER.iter().find_map(first));
    }
    match ways.split_last() {
        None => "; a smaller quantization is needed".into(),
        Some((only, [])) => format!("; {only} would do"),
        Some((last, rest)) => format!("; {} or {last} would do", rest.join(", ")),
    }
}

fn fewer_slots(o: &EngineOptions, _: &Situation) -> Vec<Change> {
    let SlotCount::Fixed(n) = o.stream.slots else { return Vec::new() };
    let fewer = (MIN_SLOTS..n).rev().chain((n > 0).then_some(0));
    let change = |n| {
        let stream = StreamOptions { slots: SlotCount::Fixed(n), ..o.stream.clone() };
        (format!("--prefetch-experts-slots {n}"), EngineOptions { stream, ..o.clone() })
    };
    fewer.map(change).collect()
}

/// Other numbers of layers, where the user set one; otherwise the fit has tried them all.
fn layers_on_host(o: &EngineOptions, s: &Situation) -> Vec<Change> {
    let p = &o.placement;
    if p.cpu_moe == CpuMoe::Unset && p.gpu_layers == GpuLayers::Auto {
        return Vec::new();
    }
    let change = |n| {
        let flags = format!("--n-cpu-moe {n}");
        (flags, placed(o, PlacementOptions { cpu_moe: CpuMoe::First(n), ..p.clone() }))
    };
    (0..=s.n_layer).map(change).collect()
}

fn smaller_margin(o: &EngineOptions, _: &Situation) -> Vec<Change> {
    let Some(bytes) = o.placement.margin_bytes else { return Vec::new() };
    let change = |mib: u64| {
        let margin_bytes = Some(mib << 20);
        let flags = format!("--fit-target {mib}");
        (flags, placed(o, PlacementOptions { margin_bytes, ..o.placement.clone() }))
    };
    halves(bytes >> 20, 1).chain([0]).map(change).collect()
}

fn without_vram_rules(o: &EngineOptions, _: &Situation) -> Vec<Change> {
    let rules = &o.placement.overrides.0;
    let (vram, rest): (Vec<_>, Vec<_>) =
        rules.iter().cloned().partition(|rule| rule.place == Place::Device);
    if vram.is_empty() {
        return Vec::new();
    }
    let names: Vec<String> = vram.iter().map(|rule| format!("-ot {rule}")).collect();
    let placement = PlacementOptions { overrides: Overrides(rest), ..o.placement.clone() };
    vec![(format!("leaving out {}", names.join(" and ")), placed(o, placement))]
}

fn smaller_ubatch(o: &EngineOptions, s: &Situation) -> Vec<Change> {
    let change = |n: u64| {
        let n_ubatch = n as u32;
        (format!("-ub {n}"), EngineOptions { n_ubatch, ..o.clone() })
    };
    halves(o.n_ubatch.min(s.n_ctx).into(), MIN_UBATCH.into()).map(change).collect()
}

fn smaller_context(o: &EngineOptions, s: &Situation) -> Vec<Change> {
    let change = |n: u64| (format!("-c {n}"), EngineOptions { n_ctx: n as u32, ..o.clone() });
    halves(s.n_ctx.into(), MIN_CTX.into()).map(change).collect()
}

fn smaller_cache(o: &EngineOptions, _: &Situation) -> Vec<Change> {
    let smaller = |a: KvType, b: KvType| if b.row_bytes(32) < a.row_bytes(32) { b } else { a };
    let change = |ty: KvType| {
        let (type_k, type_v) = (smaller(o.type_k, ty), smaller(o.type_v, ty));
        (format!("-ctk {type_k} -ctv {type_v}"), EngineOptions { type_k, type_v, ..o.clone() })
    };
    let changes = [KvType::Q8_0, KvType::Q4_0].map(change);
    changes.into_iter().filter(|(_, c)| (c.type_k, c.type_v) != (o.type_k, o.type_v)).collect()
}

/// A row a token is read of it: the bus hardly notices, unless it is the head as well.
fn embedding_on_host(o: &EngineOptions, _: &Situation) -> Vec<Change> {
    with_rule(o, "token_embd=HOST")
}

/// A higher limit, where the user's is below what the device has.
fn higher_limit(o: &EngineOptions, s: &Situation) -> Vec<Change> {
    let Some(limit) = o.vram_limit_bytes else { return Vec::new() };
    let change = |mib: u64| {
        let vram_limit_bytes = Some(mib << 20);
        (format!("--vram-limit {mib}"), EngineOptions { vram_limit_bytes, ..o.clone() })
    };
    // Steps of a sixteenth: few trials, and close enough.
    let next = |mib: &u64| Some(mib + (mib / 16).max(1));
    let steps = std::iter::successors(next(&(limit >> 20)), next);
    steps.take_while(|mib| *mib <= s.free_device_bytes >> 20).map(change).collect()
}

/// Ubatch, context and cache types together, by halves.
fn smaller_everything(o: &EngineOptions, s: &Situation) -> Vec<Change> {
    let ubatch = halves(o.n_ubatch.min(s.n_ctx).into(), MIN_UBATCH.into()).collect::<Vec<_>>();
    let context = halves(s.n_ctx.into(), MIN_CTX.into()).collect::<Vec<_>>();
    let nth = |values: &[u64], i: usize| values.get(i).or(values.last()).map(|&n| n as u32);
    let change = |i: usize| {
        let mut changed = o.clone();
        let mut flags = Vec::new();
        if let Some(n) = nth(&ubatch, i) {
            changed.n_ubatch = n;
            flags.push(format!("-ub {n}"));
        }
        if let Some(n) = nth(&context, i) {
            changed.n_ctx = n;
            flags.push(format!("-c {n}"));
        }
        if let Some((cache, c)) = smaller_cache(o, s).into_iter().next() {
            (changed.type_k, changed.type_v) = (c.type_k, c.type_v);
            flags.push(cache);
        }
        (flags.join(" "), changed)
    };
    (0..ubatch.len().max(context.len())).map(change).collect()
}

/// Kernels read everything over the bus: slow, but it runs.
fn all_on_host(o: &EngineOptions, _: &Situation) -> Vec<Change> {
    with_rule(o, ".=HOST")
}

/// A rule behind the user's own.
fn with_rule(o: &EngineOptions, rule: &str) -> Vec<Change> {
    let Ok(added) = rule.parse::<Overrides>() else { return Vec::new() };
    let mut placement = o.placement.clone();
    placement.overrides.0.extend(added.0);
    vec![(format!("-ot {rule}"), placed(o, placement))]
}

fn placed(o: &EngineOptions, placement: PlacementOptions) -> EngineOptions {
    EngineOptions { placement, ..o.clone() }
}

/// Half of `n`, a quarter, … down to `least`.
fn halves(n: u64, least: u64) -> impl Iterator<Item = u64> {
    let half = move |n: &u64| Some(n / 2).filter(|half| *half >= least);
    std::iter::successors(half(&n), half)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SITUATION: Situation = Situation { n_layer: 4, n_ctx: 8192, free_device_bytes: 1 << 30 };

    fn hint_if(o: &EngineOptions, works: impl Fn(&EngineOptions) -> bool) -> String {
        hint(o, &SITUATION, &works)
    }

    #[test]
    fn the_smallest_change_of_each_kind_is_named() {
        let o = EngineOptions::default();
        let works = |o: &EngineOptions| o.n_ubatch <= 100 || (1..3000).contains(&o.n_ctx);
        assert_eq!(hint_if(&o, works), "; -ub 64 or -c 2048 would do");
        let smaller_k = |o: &EngineOptions| o.type_k != KvType::F16;
        assert_eq!(hint_if(&o, smaller_k), "; -ctk q8_0 -ctv q8_0 would do");
        let half = EngineOptions { type_k: KvType::Q4_0, ..EngineOptions::default() };
        let smaller_v = |o: &EngineOptions| o.type_v == KvType::Q4_0;
        assert_eq!(hint_if(&half, smaller_v), "; -ctk q4_0 -ctv q4_0 would do");
    }

    #[test]
    fn at_most_three_ways_are_named_and_the_cheapest_first() {
        let stream = StreamOptions { slots: SlotCount::Fixed(6), ..Default::default() };
        let placement = PlacementOptions { gpu_layers: GpuLayers::All, ..Default::default() };
        let o = EngineOptions { stream, placement, ..Default::default() };
        let works = |o: &EngineOptions| match (o.stream.slots, o.placement.cpu_moe) {
            (SlotCount::Fixed(n), CpuMoe::Unset) => n <= 4 || o.n_ubatch < 512 || o.n_ctx == 4096,
            (_, moe) => moe == CpuMoe::First(3),
        };
        let words = "; --prefetch-experts-slots 4, --n-cpu-moe 3 or -ub 256 would do";
        assert_eq!(hint_if(&o, works), words);
    }

    #[test]
    fn what_the_user_asked_for_is_what_is_taken_back() -> Result<(), String> {
        let overrides: Overrides = "blk.1=VRAM,blk.2=HOST,blk.3=VRAM".parse()?;
        let placement =
            PlacementOptions { overrides, margin_bytes: Some(100 << 20), ..Default::default() };
        let vram_limit_bytes = Some(64 << 20);
        let o = EngineOptions { placement, vram_limit_bytes, ..Default::default() };
        let no_vram = |o: &EngineOptions| {
            o.placement.overrides.0.iter().all(|rule| rule.place == Place::Host)
        };
        assert_eq!(
            hint_if(&o, no_vram),
            "; leaving out -ot blk.1=VRAM and -ot blk.3=VRAM would do"
        );
        let margin = |o: &EngineOptions| o.placement.margin_bytes < Some(10 << 20);
        assert_eq!(hint_if(&o, margin), "; --fit-target 6 would do");
        let limit = |o: &EngineOptions| o.vram_limit_bytes >= Some(70 << 20);
        assert_eq!(hint_if(&o, limit), "; --vram-limit 72 would do");
        let embedding = |o: &EngineOptions| o.placement.overrides.place("token_embd").is_some();
        assert_eq!(hint_if(&o, embedding), "; -ot token_embd=HOST would do");
        Ok(())
    }

    #[test]
    fn if_nothing_alone_helps_several_together_may() {
        let o = EngineOptions::default();
        let all = |o: &EngineOptions| o.n_ubatch <= 128 && o.n_ctx != 0 && o.type_v == KvType::Q8_0;
        assert_eq!(hint_if(&o, all), "; -ub 128 -c 2048 -ctk q8_0 -ctv q8_0 would do");
        let host = |o: &EngineOptions| o.placement.overrides.place("x") == Some(Place::Host);
        assert_eq!(hint_if(&o, host), "; -ot .=HOST would do");
        assert_eq!(hint_if(&o, |_| false), "; a smaller quantization is needed");
    }
}
