//! The sampler: order of steps, distributions, determinism, refusals.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use proptest::prelude::*;
use vkmoe::sampler::{Sampler, SamplerParams};

/// Every filter off: a plain draw at temperature 1.
fn plain(seed: u64) -> SamplerParams {
    SamplerParams {
        temperature: 1.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        seed: Some(seed),
        ..SamplerParams::default()
    }
}

fn counts(params: SamplerParams, logits: &[f32], draws: usize) -> Vec<usize> {
    let mut sampler = Sampler::new(params).unwrap();
    let mut counts = vec![0; logits.len()];
    for _ in 0..draws {
        counts[sampler.sample(logits).unwrap() as usize] += 1;
    }
    counts
}

fn logits_of(probabilities: &[f32]) -> Vec<f32> {
    probabilities.iter().map(|p| p.ln()).collect()
}

#[test]
fn greedy_takes_the_best_and_the_lower_of_equals() {
    let mut sampler = Sampler::new(SamplerParams::greedy()).unwrap();
    assert_eq!(sampler.sample(&[1.0, 3.0, 2.0]).unwrap(), 1);
    assert_eq!(sampler.sample(&[1.0, 3.0, 3.0, 3.0]).unwrap(), 1);
    assert_eq!(sampler.sample(&[-0.0, 0.0]).unwrap(), 0);
    assert_eq!(sampler.sample(&[f32::NEG_INFINITY, -5.0]).unwrap(), 1);
    let params = SamplerParams { temperature: -1.0, ..plain(1) };
    assert_eq!(counts(params, &[0.0, 0.1], 50), [0, 50]);
}

#[test]
fn draws_follow_the_softmax() {
    let probabilities = [0.5, 0.3, 0.15, 0.05];
    let counts = counts(plain(7), &logits_of(&probabilities), 20_000);
    for (count, p) in counts.iter().zip(probabilities) {
        assert!((*count as f32 / 20_000.0 - p).abs() < 0.012, "{counts:?}");
    }
}

#[test]
fn temperature_sharpens_and_flattens() {
    let logits = logits_of(&[0.8, 0.2]);
    // Odds of 4 become 16 at temperature 1/2 and 2 at temperature 2.
    for (temperature, share) in [(0.5, 16.0 / 17.0), (2.0, 2.0 / 3.0)] {
        let counts = counts(SamplerParams { temperature, ..plain(3) }, &logits, 20_000);
        assert!((counts[0] as f32 / 20_000.0 - share).abs() < 0.012, "{counts:?}");
    }
}

#[test]
fn filters_keep_what_they_should() {
    let logits = logits_of(&[0.05, 0.5, 0.15, 0.3]);
    let kept = |params| -> Vec<usize> {
        let counts = counts(params, &logits, 2000);
        (0..4).filter(|&i| counts[i] > 0).collect()
    };
    assert_eq!(kept(plain(1)), [0, 1, 2, 3]);
    assert_eq!(kept(SamplerParams { top_k: 2, ..plain(1) }), [1, 3]);
    assert_eq!(kept(SamplerParams { top_k: 100, ..plain(1) }), [0, 1, 2, 3]);
    assert_eq!(kept(SamplerParams { top_p: 0.79, ..plain(1) }), [1, 3]);
    assert_eq!(kept(SamplerParams { top_p: 0.81, ..plain(1) }), [1, 2, 3]);
    assert_eq!(kept(SamplerParams { top_p: 0.0, ..plain(1) }), [1]);
    assert_eq!(kept(SamplerParams { min_p: 0.2, ..plain(1) }), [1, 2, 3]);
    assert_eq!(kept(SamplerParams { min_p: 0.5, ..plain(1) }), [1, 3]);
    assert_eq!(kept(SamplerParams { min_p: 7.0, ..plain(1) }), [1]);
    // top-p sees what top-k left (0.5 of 0.8), and no temperature.
    assert_eq!(kept(SamplerParams { top_k: 2, top_p: 0.6, ..plain(1) }), [1]);
    assert_eq!(kept(SamplerParams { top_p: 0.79, temperature: 9.0, ..plain(1) }), [1, 3]);
}

#[test]
fn penalties_move_toward_less_likely() {
    let params = |change: fn(&mut SamplerParams)| {
        let mut params = SamplerParams::greedy();
        change(&mut params);
        params
    };
    let next = |params: SamplerParams, accepted: &[u32], logits: &[f32]| {
        let mut sampler = Sampler::new(params).unwrap();
        accepted.iter().for_each(|&id| sampler.accept(id));
        sampler.sample(logits).unwrap()
    };
    let repeat = params(|p| p.repeat_penalty = 2.0);
    assert_eq!(next(repeat.clone(), &[0], &[3.0, 2.0]), 1);
    assert_eq!(next(repeat.clone(), &[0], &[-1.0, -1.5]), 1);
    assert_eq!(next(repeat, &[0, 0, 0], &[5.0, 2.0]), 0, "repeating counts once");
    let frequency = params(|p| p.frequency_penalty = 1.0);
    assert_eq!(next(frequency.clone(), &[0], &[3.5, 2.0]), 0);
    assert_eq!(next(frequency, &[0, 0], &[3.5, 2.0]), 1);
    let presence = params(|p| p.presence_penalty = 1.0);
    assert_eq!(next(presence.clone(), &[0, 0, 0], &[3.5, 2.0]), 0);
    assert_eq!(next(presence, &[0], &[2.5, 2.0]), 1);
    let window = |n: i32| {
        let p = SamplerParams { repeat_last_n: n, ..params(|p| p.presence_penalty = 9.0) };
        next(p, &[0, 2, 2], &[3.0, 2.0, 1.0])
    };
    assert_eq!([window(2), window(3), window(0), window(-1)], [0, 1, 0, 1]);
}

#[test]
fn bad_logits_and_parameters_are_refused() {
    let mut sampler = Sampler::new(plain(0)).unwrap();
    let mut error = |logits: &[f32]| sampler.sample(logits).unwrap_err().to_string();
    assert!(error(&[0.0, f32::NAN]).contains("token 1 is NaN"));
    assert!(error(&[f32::INFINITY]).contains("token 0 is inf"));
    assert!(error(&[f32::NEG_INFINITY]).contains("no token"));
    assert!(error(&[]).contains("no token"));
    let flag = |params| Sampler::new(params).unwrap_err().to_string();
    assert!(flag(SamplerParams { temperature: f32::NAN, ..plain(0) }).starts_with("--temp"));
    assert!(flag(SamplerParams { repeat_penalty: 0.0, ..plain(0) }).contains("repeat-penalty"));
    assert!(flag(SamplerParams { repeat_last_n: -2, ..plain(0) }).contains("repeat-last-n"));
}

#[test]
fn the_stream_of_a_seed_is_fixed() {
    let logits: Vec<f32> = (0..100).map(|i| (i as f32 * 0.37).sin() * 3.0).collect();
    let draw = |seed| -> Vec<u32> {
        let mut sampler = Sampler::new(plain(seed)).unwrap();
        (0..12).map(|_| sampler.sample(&logits).unwrap()).collect()
    };
    assert_eq!(draw(42), draw(42));
    assert_ne!(draw(42), draw(43));
    let random = Sampler::new(SamplerParams::default()).unwrap();
    assert_eq!(random.seed(), random.seed());
}

proptest! {
    #[test]
    fn a_choice_is_always_possible_and_allowed(
        logits in prop::collection::vec(prop_oneof![9 => -50f32..50.0, 1 => Just(f32::NEG_INFINITY)], 1..200),
        temperature in -1f32..3.0, top_k in -1i32..60, top_p in 0f32..1.2, min_p in 0f32..1.2, seed: u64,
    ) {
        prop_assume!(logits.iter().any(|l| l.is_finite()));
        let params = SamplerParams { temperature, top_k, top_p, min_p, ..plain(seed) };
        let id = Sampler::new(params).unwrap().sample(&logits).unwrap() as usize;
        prop_assert!(logits[id].is_finite());
        let better = logits.iter().filter(|l| **l > logits[id]).count();
        if top_k > 0 { prop_assert!(better < top_k as usize); }
        if temperature <= 0.0 { prop_assert_eq!(better, 0); }
    }
}
