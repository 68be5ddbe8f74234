//! router: every gating, expert counts up to 512, bias, groups, ties, NaN.

use crate::harness::{fold, gpu};
use crate::reference::random::Random;
use crate::reference::router::{Gating, Router};
use vkmoe::push;

const WORKGROUP: u32 = 32;
const IL: u32 = 6;
const GATINGS: [Gating; 3] = [Gating::Softmax, Gating::Sigmoid, Gating::SoftmaxOfChosen];
const PLAIN: Router = Router {
    n_expert: 0,
    n_used: 0,
    gating: Gating::Softmax,
    norm: false,
    norm_min: 0.0,
    scale: 1.0,
    groups: (0, 0),
};

#[test]
fn expert_counts() {
    for gating in GATINGS {
        for norm in [false, true] {
            for (n_expert, n_used) in [
                (1, 1),
                (3, 2),
                (5, 5),
                (16, 4),
                (40, 40),
                (128, 8),
                (257, 3),
                (512, 1),
                (512, 10),
                (512, 512),
            ] {
                let router = Router { n_expert, n_used, gating, norm, ..PLAIN };
                let n_tokens = if n_used > 100 { 2 } else { 33 };
                let logits = distinct_logits(n_expert, n_tokens);
                check(&router, &logits, None);
                let scaled = Router { scale: 2.5, norm_min: 6.1e-5, ..router };
                check(&scaled, &logits, Some(&Random(9).units(n_expert)));
            }
        }
    }
}

#[test]
fn groups() {
    for gating in [Gating::Softmax, Gating::Sigmoid] {
        for (n_expert, n_used, groups) in [
            (16, 4, (4, 2)),
            (256, 8, (8, 4)),
            (40, 6, (5, 1)),
            (8, 2, (8, 3)),
            (12, 6, (1, 1)),
            (8, 3, (4, 1)),
        ] {
            let router = Router { n_expert, n_used, gating, groups, ..PLAIN };
            let logits = distinct_logits(n_expert, 7);
            check(&router, &logits, None);
            check(&router, &logits, Some(&Random(4).units(n_expert)));
        }
    }
}

#[test]
fn ties_go_to_the_lower_index() {
    for gating in GATINGS {
        let router = Router { n_expert: 40, n_used: 12, gating, ..PLAIN };
        check(&router, &[0.25; 80], None);
        let steps: Vec<f32> = (0..40).map(|i| (i * 7 % 4) as f32).collect();
        check(&router, &steps, None);
        check(&Router { groups: (4, 2), ..router }, &steps, None);
        let zeros: Vec<f32> = (0..40).map(|i| if i % 3 == 0 { -0.0 } else { 0.0 }).collect();
        check(&router, &zeros, None);
    }
}

#[test]
fn minus_infinity_is_a_score() {
    let mut logits = distinct_logits(16, 1);
    logits[2] = f32::NEG_INFINITY;
    logits[9] = f32::NEG_INFINITY;
    for gating in [Gating::Softmax, Gating::Sigmoid] {
        check(&Router { n_expert: 16, n_used: 16, gating, ..PLAIN }, &logits, None);
    }
}

#[test]
fn what_is_no_number_is_reported_once() {
    for nan in [f32::NAN, -f32::NAN, f32::INFINITY] {
        let router = Router { n_expert: 128, n_used: 8, ..PLAIN };
        let mut logits = distinct_logits(128, 3);
        logits[128 + 77] = nan;
        let (ids, weights, status) = run(&router, &logits, None, 0);
        assert_eq!(status, IL + 1);
        assert_eq!(ids[8..16], [0, 1, 2, 3, 4, 5, 6, 7]);
        let expected = router.choose(&router.scores(&logits[..128]), None);
        assert_eq!(ids[..8], expected, "the tokens beside it are as ever");
        assert!(weights.iter().all(|w| w.is_finite()));
        assert_eq!(run(&router, &logits, None, 3).2, 3, "the first report stays");
    }
}

/// Logits that no rounding can put into another order.
fn distinct_logits(n_expert: usize, n_tokens: usize) -> Vec<f32> {
    let mut random = Random(n_expert as u64);
    let mut token = || {
        let mut logits: Vec<f32> =
            (0..n_expert).map(|i| 4.0 * (i as f32 / n_expert as f32) - 2.0).collect();
        for i in (1..n_expert).rev() {
            logits.swap(i, random.below(i as u32 + 1) as usize);
        }
        logits
    };
    (0..n_tokens).flat_map(|_| token()).collect()
}

fn run(
    router: &Router,
    logits: &[f32],
    bias: Option<&[f32]>,
    status: u32,
) -> (Vec<u32>, Vec<f32>, u32) {
    let gpu = gpu();
    let n_tokens = logits.len() / router.n_expert;
    let bias_buffer = gpu.upload(bias.unwrap_or_default());
    let push = push::Router {
        bias: if bias.is_some() { bias_buffer.address() } else { 0 },
        n_expert: router.n_expert as u32,
        n_used: router.n_used as u32,
        n_tokens: n_tokens as u32,
        n_group: router.groups.0 as u32,
        n_group_used: router.groups.1 as u32,
        il: IL,
        scale: router.scale,
        norm_min: router.norm_min,
    };
    let ids = gpu.upload(&vec![u32::MAX; n_tokens * router.n_used]);
    let weights = gpu.nans(n_tokens * router.n_used);
    let status = gpu.upload(&[status]);
    let [x, y] = fold(push.n_tokens);
    let spec = [WORKGROUP, router.gating as u32, u32::from(router.norm), u32::from(bias.is_some())];
    gpu.run("router", &spec, &push, &[&gpu.upload(logits), &ids, &weights, &status], [x, y, 1]);
    (gpu.read(&ids), gpu.read(&weights), gpu.read(&status)[0])
}

fn check(router: &Router, logits: &[f32], bias: Option<&[f32]>) {
    let (ids, weights, status) = run(router, logits, bias, 0);
    assert_eq!(status, 0);
    assert_choices(router, logits, bias, &ids, &weights);
    let again = run(router, logits, bias, 0);
    assert!(again == (ids, weights, status), "a second run differs");
}

/// The choices of all tokens are those of their logits.
pub(crate) fn assert_choices(
    router: &Router,
    logits: &[f32],
    bias: Option<&[f32]>,
    ids: &[u32],
    weights: &[f32],
) {
    let found = ids.chunks_exact(router.n_used).zip(weights.chunks_exact(router.n_used));
    for (token, (logits, (ids, weights))) in
        logits.chunks_exact(router.n_expert).zip(found).enumerate()
    {
        let scores = router.scores(logits);
        assert_same_choice(router, &scores, bias, ids, token);
        for (slot, (w, e)) in weights.iter().zip(router.weights(&scores, ids)).enumerate() {
            let good = (f64::from(*w) - e).abs() <= 3e-6 * e.abs() + 1e-12;
            assert!(good, "{router:?}, token {token}, slot {slot}: {w} is not {e}");
        }
    }
}

/// The twin's ids, but that scores which f32 cannot tell apart may swap.
fn assert_same_choice(
    router: &Router,
    scores: &[f64],
    bias: Option<&[f32]>,
    ids: &[u32],
    token: usize,
) {
    let expected = router.choose(scores, bias);
    let biased = |id: u32| scores[id as usize] + bias.map_or(0.0, |b| f64::from(b[id as usize]));
    for (slot, (&f, &e)) in ids.iter().zip(&expected).enumerate() {
        let close = bias.is_some() && (biased(f) - biased(e)).abs() < 1e-6;
        assert!(f == e || close, "{router:?}, token {token}, slot {slot}: expert {f} is not {e}");
    }
}
