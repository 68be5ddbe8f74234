//! mul_mat_cm: all types, ragged tiles everywhere, dense, grouped, and with a gated activation. Where there
//! are no matrix units, nothing is tested, and said so.

use crate::half_rows::convert;
use crate::harness::{Gpu, gpu};
use crate::mul_mat::sort;
use crate::operands::{Operands, Shape, twice};
use crate::reference::mul_mat::{Sum, assert_close};
use crate::reference::quants::{ALL, Quant};
use crate::reference::rows::glu;
use vkmoe::push::MulMatCm;

/// Of the sum of magnitudes: weights and activations are rounded to 11 bits each.
const TOLERANCE: f64 = 2e-3;
const ALPHA: f32 = 1.702;
const LIMIT: f32 = 7.0;

/// Specialization constants BM, BN, BK, WARPS_M, WARPS_N, in matrices but for BK; STAGES.
type Tiles = [u32; 6];
const TILES: Tiles = [2, 2, 32, 1, 1, 2];

#[derive(Clone, Copy)]
struct Case {
    shape: Shape,
    tiles: Tiles,
}

impl Case {
    fn new(q: Quant, k: usize, n: usize, m: usize) -> Self {
        Case { shape: Shape { q, k, n, m, bias: m.is_multiple_of(2) }, tiles: TILES }
    }

    fn with(self, tiles: Tiles) -> Self {
        Case { tiles, ..self }
    }
}

/// How gate and up of a gated activation lie.
#[derive(Clone, Copy, PartialEq)]
enum Glu {
    None,
    TwoMatrices,
    OneMatrix,
}

fn types() -> impl Iterator<Item = Quant> {
    ALL.iter().copied().filter(|q| q.name != "f32")
}

/// The device and its matrix shape m, n, k, if it has one.
fn matrix_gpu() -> Option<(crate::harness::Checked, [u32; 3])> {
    let gpu = gpu();
    let shape = gpu.info().half_matrix().map(|s| [s.m, s.n, s.k]);
    if shape.is_none() {
        eprintln!("no matrix units: not tested");
    }
    Some((gpu, shape?))
}

#[test]
fn dense_of_all_types() {
    for q in types() {
        dense(Case::new(q, 512, 45, 35), 1.0);
    }
}

#[test]
fn dense_with_any_number_of_columns() {
    for m in 1..=70 {
        dense(Case::new(Quant::named("q4_0"), 64, 33, m), 1.0);
    }
}

#[test]
fn dense_with_any_number_of_rows() {
    for n in [1, 2, 31, 32, 33, 64, 65, 127] {
        dense(Case::new(Quant::named("q4_k"), 256, n, 6), 1.0);
    }
}

/// Activations of any size neither overflow nor vanish.
#[test]
fn activations_of_any_size() {
    for size in [1e-6, 1e5, 1e30] {
        dense(Case::new(Quant::named("q8_0"), 96, 34, 33), size);
        dense(Case::new(Quant::named("f16"), 96, 34, 33), size);
    }
}

#[test]
fn other_tiles() {
    for tiles in [[4, 2, 64, 4, 1, 2], [2, 4, 64, 1, 4, 1], [2, 4, 96, 1, 2, 1]] {
        dense(Case::new(Quant::named("q8_0"), 160, 70, 67).with(tiles), 1.0);
    }
    // Tiles of four columns of matrices: with one of them in use, with two, with all.
    grouped(Case::new(Quant::named("q5_0"), 96, 70, 67).with([2, 4, 32, 1, 1, 1]), 3, 2, Glu::None);
}

#[test]
fn grouped_with_any_number_of_experts() {
    for (experts, x_div) in [(1, 1), (3, 2), (5, 4)] {
        for m in [1, 32, 33, 130] {
            grouped(Case::new(Quant::named("q6_k"), 256, 33, m), experts, x_div, Glu::None);
        }
    }
}

#[test]
fn gated() {
    for (name, glu) in [("q6_k", Glu::TwoMatrices), ("mxfp4", Glu::OneMatrix)] {
        grouped(Case::new(Quant::named(name), 256, 66, 53), 3, 2, glu);
    }
    for (tiles, glu) in [(TILES, Glu::TwoMatrices), ([4, 2, 32, 2, 2, 1], Glu::OneMatrix)] {
        gated_dense(Case::new(Quant::named("q8_0"), 96, 70, 35).with(tiles), glu);
    }
}

fn dense(case: Case, size: f32) {
    let Some((gpu, matrix)) = matrix_gpu() else { return };
    let bias = case.shape.bias && size == 1.0;
    let mut operands = Operands::dense(&gpu, Shape { bias, ..case.shape });
    operands.x.iter_mut().for_each(|x| *x *= size);
    operands.expected.iter_mut().for_each(|sum| *sum = sum.scaled(size.into()));
    let tiles = (case.shape.m as u32).div_ceil(case.tiles[1] * matrix[1]);
    let found = run(&gpu, matrix, &case, 1, &operands, (Glu::None, 0), &[], tiles);
    assert_close(case.shape.q.name, &found, &operands.expected, TOLERANCE);
}

fn gated_dense(case: Case, kind: Glu) {
    let Some((gpu, matrix)) = matrix_gpu() else { return };
    let operands = Operands::dense(&gpu, case.shape);
    let tiles = (case.shape.m as u32).div_ceil(case.tiles[1] * matrix[1]);
    for act in 0..4 {
        let found = run(&gpu, matrix, &case, 1, &operands, (kind, act), &[], tiles);
        assert_gated(&case, act, &found, &operands.expected);
    }
}

/// With a gated activation the matrices' first half of rows is gate, the second up.
fn grouped(case: Case, n_expert: usize, x_div: usize, kind: Glu) {
    let Some((gpu, matrix)) = matrix_gpu() else { return };
    let operands = Operands::grouped(&gpu, case.shape, n_expert, x_div);
    let (pairs, tiles) = sort(&operands.ids, n_expert, case.tiles[1] * matrix[1]);
    let lists = [&pairs[..], tiles.as_flattened()];
    let n_tiles = tiles.len() as u32;
    let found = run(&gpu, matrix, &case, x_div, &operands, (kind, 0), &lists, n_tiles);
    match kind {
        Glu::None => assert_close(case.shape.q.name, &found, &operands.expected, TOLERANCE),
        _ => assert_gated(&case, 0, &found, &operands.expected),
    }
}

/// The errors of gate and up go through the activation, whose slopes are below 1.2 for gates near zero
/// and everywhere else.
fn assert_gated(case: &Case, act: u32, found: &[f32], expected: &[Sum]) {
    let (width, n) = (case.shape.n, case.shape.n / 2);
    for (i, &f) in found.iter().enumerate() {
        let (gate, up) = (expected[i / n * width + i % n], expected[i / n * width + n + i % n]);
        let y = glu(act, gate.value as f32, up.value as f32, ALPHA, LIMIT);
        let (d_gate, d_up) = (TOLERANCE * gate.magnitude, TOLERANCE * up.magnitude);
        let bound =
            1.2 * d_gate * (up.value.abs() + 1.0 + d_up) + (gate.value.abs() + d_gate) * d_up;
        let error = (f64::from(f) - y).abs();
        assert!(error <= bound + 1e-6, "{} act {act} [{i}]: {f} is not {y}", case.shape.q.name);
    }
}

#[expect(clippy::too_many_arguments, reason = "a test's own")]
fn run(
    gpu: &Gpu,
    [mm, mn, mk]: [u32; 3],
    case: &Case,
    x_div: usize,
    operands: &Operands,
    (kind, act): (Glu, u32),
    lists: &[&[u32]],
    tiles: u32,
) -> Vec<f32> {
    let [bm, bn, bk, warps_m, warps_n, stages] = case.tiles;
    let (bm, bn) = (bm * mm, bn * mn);
    let Shape { q, k, n, m, .. } = case.shape;
    let gated = kind != Glu::None;
    let n = if gated { n / 2 } else { n };
    let half_bytes = (q.row_bytes(k) * n) as u64;
    let second: Vec<u64> = operands.addresses.iter().map(|a| a + half_bytes).collect();
    let second_table = gpu.upload(&second);
    let spec = [
        gpu.info().subgroup.default * warps_m * warps_n,
        u32::from(operands.table != 0),
        kind as u32,
        act,
        bm,
        bn,
        bk,
        warps_m,
        warps_n,
        mm,
        mn,
        mk,
        stages,
    ];
    let two = kind == Glu::TwoMatrices;
    let push = MulMatCm {
        weights: operands.weights,
        table: operands.table,
        weights2: if two { operands.weights + half_bytes } else { 0 },
        table2: if two { second_table.address() } else { 0 },
        bias: operands.bias,
        k: k as u32,
        n: n as u32,
        m: m as u32,
        x_div: x_div as u32,
        alpha: ALPHA,
        limit: LIMIT,
    };
    let name = format!("mul_mat_cm.{}", q.name);
    let (x, scales) = convert(gpu, &operands.x, k);
    let lists: Vec<_> = lists.iter().map(|list| gpu.upload(list)).collect();
    let rows = if gated { bm / 2 } else { bm };
    twice(&name, || {
        let y = gpu.nans(n * m);
        let [pairs, tile_list] = [0, 1].map(|i| lists.get(i).unwrap_or(&x));
        let buffers = [&x, &y, pairs, tile_list, &scales];
        gpu.run(&name, &spec, &push, &buffers, [(n as u32).div_ceil(rows), tiles, 1]);
        gpu.read(&y)
    })
}
