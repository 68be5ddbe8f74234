//! mul_mat_int8: all types, ragged tiles everywhere, dense and grouped: exact for rows that are bytes times
//! a scale, and for all others within what rounding to bytes costs.

use crate::harness::{Gpu, gpu};
use crate::int8_rows::convert;
use crate::mul_mat::sort;
use crate::operands::{Operands, Shape, twice};
use crate::reference::mul_mat::{Sum, assert_close};
use crate::reference::quants::{ALL, Quant};
use vkmoe::push::MulMatInt8;

/// Specialization constants after GROUPED: BM, BN, BK, TM, TN.
type Tiles = [u32; 5];
/// 64 invocations.
const TILES: Tiles = [32, 32, 32, 4, 4];

fn types() -> impl Iterator<Item = Quant> {
    ALL.iter().copied().filter(|q| q.block > 1)
}

fn shape(name: &str, k: usize, n: usize, m: usize) -> Shape {
    Shape { q: Quant::named(name), k, n, m, bias: m.is_multiple_of(2) }
}

#[test]
fn dense_of_all_types() {
    for q in types() {
        dense(Shape { q, k: 512, n: 45, m: 35, bias: true }, TILES, &multiples);
    }
}

#[test]
fn dense_with_any_number_of_columns() {
    for m in 1..=70 {
        dense(shape("q4_1", 96, 33, m), TILES, &multiples);
    }
}

#[test]
fn dense_with_any_number_of_rows() {
    for n in [1, 2, 31, 32, 33, 64, 65, 127] {
        dense(shape("q4_k", 256, n, 3), TILES, &multiples);
    }
}

#[test]
fn other_tiles() {
    for tiles in [[64, 32, 32, 8, 4], [64, 64, 64, 4, 4], [16, 8, 96, 2, 1], [32, 128, 128, 8, 8]] {
        for name in ["q8_0", "q5_1"] {
            dense(shape(name, 160, 70, 67), tiles, &multiples);
        }
        for name in ["q2_k", "q3_k"] {
            dense(shape(name, 256, 70, 67), tiles, &multiples);
        }
    }
}

#[test]
fn grouped_of_all_types() {
    for q in types() {
        grouped(Shape { q, k: 256, n: 37, m: 90, bias: true }, 5, 3);
    }
}

#[test]
fn grouped_with_any_number_of_experts() {
    for (experts, x_div) in [(1, 1), (3, 2), (5, 4)] {
        for m in [1, 32, 33, 130] {
            grouped(shape("q6_k", 256, 33, m), experts, x_div);
        }
    }
}

/// Rows that are not bytes times a scale lose half a scale at most, whatever their size.
#[test]
fn rounding_costs_half_a_step() {
    let gpu = gpu();
    for q in types() {
        for size in [1e-6, 1.0, 1e5] {
            let shape = Shape { q, k: 256, n: 33, m: 20, bias: false };
            let grown = |x: &mut [f32]| x.iter_mut().for_each(|x| *x *= size);
            let operands = Operands::dense_of(&gpu, shape, &grown);
            let halves = Operands::dense_of(&gpu, shape, &|x| half_steps(x, size));
            let found = run(&gpu, shape, TILES, 1, &operands, &[], 1);
            for ((f, e), half) in found.iter().zip(&operands.expected).zip(&halves.expected) {
                let error = (f64::from(*f) - e.value).abs();
                let bound = 1.0001 * half.magnitude + 1e-5 * e.magnitude;
                assert!(error <= bound, "{} {size}: {f} is not {}", q.name, e.value);
            }
        }
    }
}

/// A row with an infinity is no number at the end.
#[test]
fn infinities_are_not_lost() {
    let gpu = gpu();
    let mut operands = Operands::dense(&gpu, shape("q8_0", 64, 32, 3));
    operands.x[64 + 40] = f32::INFINITY;
    let found = run(&gpu, shape("q8_0", 64, 32, 3), TILES, 1, &operands, &[], 1);
    assert!(found[..32].iter().chain(&found[64..]).all(|y| y.is_finite()));
    assert!(found[32..64].iter().all(|y| y.is_nan()));
}

/// Multiples of 1/64, of 32 the first the largest that a byte holds: nothing is rounded.
fn multiples(x: &mut [f32]) {
    for block in x.chunks_mut(32) {
        block.iter_mut().for_each(|x| *x = (*x * 127.0).round() / 64.0);
        block[0] = 127.0 / 64.0;
    }
}

/// Half a step of each value's 32.
fn half_steps(x: &mut [f32], size: f32) {
    for block in x.chunks_mut(32) {
        let most = block.iter().fold(0f32, |most, x| most.max(x.abs()));
        block.fill(most * size / 254.0);
    }
}

fn dense(shape: Shape, tiles: Tiles, change: &dyn Fn(&mut [f32])) {
    let gpu = gpu();
    let operands = Operands::dense_of(&gpu, shape, change);
    let n_tiles = (shape.m as u32).div_ceil(tiles[1]);
    let found = run(&gpu, shape, tiles, 1, &operands, &[], n_tiles);
    assert_near(shape.q.name, &found, &operands.expected);
}

fn grouped(shape: Shape, n_expert: usize, x_div: usize) {
    let gpu = gpu();
    let operands = Operands::grouped_of(&gpu, shape, n_expert, x_div, &multiples);
    let (pairs, list) = sort(&operands.ids, n_expert, TILES[1]);
    let lists = [&pairs[..], list.as_flattened()];
    let found = run(&gpu, shape, TILES, x_div, &operands, &lists, list.len() as u32);
    assert_near(shape.q.name, &found, &operands.expected);
}

fn assert_near(what: &str, found: &[f32], expected: &[Sum]) {
    assert_close(what, found, expected, 1e-5);
}

fn run(
    gpu: &Gpu,
    shape: Shape,
    [bm, bn, bk, tm, tn]: Tiles,
    x_div: usize,
    operands: &Operands,
    lists: &[&[u32]],
    tiles: u32,
) -> Vec<f32> {
    let Shape { q, k, n, m, .. } = shape;
    let spec = [bm / tm * (bn / tn), u32::from(operands.table != 0), bm, bn, bk, tm, tn];
    let push = MulMatInt8 {
        weights: operands.weights,
        table: operands.table,
        bias: operands.bias,
        k: k as u32,
        n: n as u32,
        m: m as u32,
        x_div: x_div as u32,
    };
    let name = format!("mul_mat_int8.{}", q.name);
    let (x, scales) = convert(gpu, &operands.x);
    let lists: Vec<_> = lists.iter().map(|list| gpu.upload(list)).collect();
    twice(&name, || {
        let y = gpu.nans(n * m);
        let [pairs, tile_list] = [0, 1].map(|i| lists.get(i).unwrap_or(&x));
        let buffers = [&x, &y, pairs, tile_list, &scales];
        gpu.run(&name, &spec, &push, &buffers, [(n as u32).div_ceil(bm), tiles, 1]);
        gpu.read(&y)
    })
}
