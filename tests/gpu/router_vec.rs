//! router_vec: norm, logits and choice, every gating, any number of tokens and experts, with and without a
//! sum before the norm.

use crate::harness::{Checked, gpu};
use crate::operands::NormRows;
use crate::reference::mul_mat::{assert_close, mul_mat_row};
use crate::reference::quants::Quant;
use crate::reference::random::Random;
use crate::reference::router::{Gating, Router};
use crate::router::assert_choices;
use vkmoe::push::RouterVec;

const IL: u32 = 4;

#[derive(Clone, Copy)]
struct Case {
    quant: &'static str,
    k: usize,
    n_tokens: usize,
    router: Router,
    bias: bool,
    delta: bool,
    /// Specialization constants: workgroup size, ROWS, COLS.
    sizes: [u32; 3],
}

const PLAIN: Case = Case {
    quant: "f32",
    k: 256,
    n_tokens: 1,
    router: Router {
        n_expert: 16,
        n_used: 4,
        gating: Gating::Softmax,
        norm: true,
        norm_min: 6.1e-5,
        scale: 1.0,
        groups: (0, 0),
    },
    bias: false,
    delta: true,
    sizes: [64, 1, 1],
};

#[test]
fn types_and_row_lengths() {
    for quant in ["f32", "f16", "bf16"] {
        for k in [8, 40, 512, 2048] {
            check(Case { quant, k, ..PLAIN });
            check(Case { quant, k, delta: false, sizes: [128, 2, 1], ..PLAIN });
        }
    }
}

#[test]
fn experts_and_gatings() {
    for gating in [Gating::Softmax, Gating::Sigmoid, Gating::SoftmaxOfChosen] {
        for (n_expert, n_used) in [(1, 1), (5, 2), (128, 8), (512, 10)] {
            let router = Router { n_expert, n_used, gating, scale: 2.5, ..PLAIN.router };
            for bias in [false, true] {
                check(Case { router, bias, sizes: [64, 3, 1], ..PLAIN });
            }
        }
    }
    check(Case { router: Router { groups: (4, 2), ..PLAIN.router }, ..PLAIN });
}

#[test]
fn tokens() {
    for n_tokens in [2, 3, 8, 11] {
        for cols in [1, 2, 8] {
            check(Case { n_tokens, sizes: [64, 2, cols], ..PLAIN });
        }
    }
}

/// A workgroup of one subgroup goes over many experts, for several tokens.
#[test]
fn one_subgroup_and_many_experts() {
    let router = Router { n_expert: 512, n_used: 10, ..PLAIN.router };
    let local = gpu().info().subgroup.default;
    for (n_tokens, cols) in [(1, 1), (5, 2), (8, 8), (11, 8)] {
        check(Case { k: 64, n_tokens, router, sizes: [local, 4, cols], ..PLAIN });
    }
}

#[test]
fn what_is_no_number_is_reported() {
    let case = Case { n_tokens: 3, sizes: [64, 1, 2], ..PLAIN };
    let mut rows = NormRows::new(2, case.k, case.n_tokens);
    rows.x[case.k + 3] = f32::NAN;
    let found = run(&gpu(), &case, &rows, &data(&case));
    assert_eq!(found.status, IL + 1);
    assert_eq!(found.ids[4..8], [0, 1, 2, 3]);
    assert!(found.weights.iter().all(|w| w.is_finite()));
}

struct Data {
    matrix: Vec<u8>,
    bias: Vec<f32>,
}

fn data(case: &Case) -> Data {
    let mut random = Random(case.router.n_expert as u64);
    Data {
        matrix: Quant::named(case.quant).random(&mut random, case.k * case.router.n_expert),
        bias: random.units(case.router.n_expert),
    }
}

#[derive(PartialEq)]
struct Found {
    sum: Vec<f32>,
    normed: Vec<f32>,
    logits: Vec<f32>,
    ids: Vec<u32>,
    weights: Vec<f32>,
    status: u32,
}

fn run(gpu: &Checked, case: &Case, rows: &NormRows, data: &Data) -> Found {
    let Case { k, n_tokens, router: r, sizes: [local, per_group, cols], .. } = *case;
    let norm = gpu.upload_weights(bytemuck::cast_slice(&rows.weight));
    let (matrix, bias) = (gpu.upload_weights(&data.matrix), gpu.upload(&data.bias));
    let push = RouterVec {
        matrix: matrix.address(),
        norm: norm.address(),
        bias: if case.bias { bias.address() } else { 0 },
        k: k as u32,
        n_tokens: n_tokens as u32,
        n_expert: r.n_expert as u32,
        n_used: r.n_used as u32,
        n_group: r.groups.0 as u32,
        n_group_used: r.groups.1 as u32,
        il: IL,
        eps: NormRows::EPS,
        scale: r.scale,
        norm_min: r.norm_min,
    };
    let flags = [r.gating as u32, u32::from(r.norm), u32::from(case.bias)];
    let spec = [&[local, per_group, cols, u32::from(case.delta)], &flags[..]].concat();
    let (x, delta) = (gpu.upload(&rows.x), gpu.upload(&rows.delta));
    let (sum, normed) = (gpu.nans(k * n_tokens), gpu.nans(k * n_tokens));
    let logits = gpu.nans(r.n_expert * n_tokens);
    let (ids, weights) = (gpu.nans(r.n_used * n_tokens), gpu.nans(r.n_used * n_tokens));
    let status = gpu.zeros::<u32>(1 + n_tokens);
    let blocks = (n_tokens as u32).div_ceil(cols);
    gpu.run(
        &format!("router_vec.{}", case.quant),
        &spec,
        &push,
        &[&x, &delta, &sum, &normed, &logits, &ids, &weights, &status],
        [push.n_expert.div_ceil(per_group), blocks, 1],
    );
    let status = gpu.read::<u32>(&status);
    assert!(status[1..].iter().all(|&counter| counter == 0), "{status:?}");
    Found {
        sum: if case.delta { gpu.read(&sum) } else { Vec::new() },
        normed: gpu.read(&normed),
        logits: gpu.read(&logits),
        ids: gpu.read(&ids),
        weights: gpu.read(&weights),
        status: status[0],
    }
}

fn check(case: Case) {
    let gpu = gpu();
    let rows = NormRows::new(if case.delta { 2 } else { 1 }, case.k, case.n_tokens);
    let data = data(&case);
    let found = run(&gpu, &case, &rows, &data);
    assert_eq!(found.status, 0);
    if case.delta {
        assert_eq!(found.sum, rows.sum);
    }
    for (f, e) in found.normed.iter().zip(&rows.normed) {
        assert!((f - e).abs() <= 1e-6 * e.abs() + 1e-9, "{f} is not {e}");
    }
    let w = Quant::named(case.quant).dequantize(&data.matrix);
    let expected: Vec<_> =
        rows.normed.chunks_exact(case.k).flat_map(|row| mul_mat_row(&w, row, &[])).collect();
    assert_close(case.quant, &found.logits, &expected, 1e-5);
    let bias = case.bias.then_some(&data.bias[..]);
    assert_choices(&case.router, &found.logits, bias, &found.ids, &found.weights);
    assert!(run(&gpu, &case, &rows, &data) == found, "a second run differs");
}
