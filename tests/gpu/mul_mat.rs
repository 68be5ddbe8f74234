//! mul_mat: all types, ragged tiles everywhere, dense and grouped.

use crate::harness::{Gpu, gpu};
use crate::reference::mul_mat::{Sum, assert_close, mul_mat_row};
use crate::reference::quants::{ALL, Quant};
use crate::reference::random::Random;
use vkmoe::push::MulMat;

/// Specialization constants after GROUPED: BM, BN, BK, TM, TN.
type Tiles = [u32; 5];
/// 64 invocations.
const TILES: Tiles = [32, 32, 32, 4, 4];

#[derive(Clone, Copy)]
struct Case {
    q: Quant,
    k: usize,
    n: usize,
    m: usize,
    bias: bool,
    tiles: Tiles,
}

#[test]
fn dense_of_all_types() {
    for &q in ALL {
        dense(Case { q, k: 512, n: 45, m: 35, bias: true, tiles: TILES });
    }
}

#[test]
fn dense_with_any_number_of_columns() {
    for m in 1..=130 {
        let bias = m % 2 == 0;
        dense(Case { q: Quant::named("q4_0"), k: 64, n: 33, m, bias, tiles: TILES });
    }
}

#[test]
fn dense_with_any_number_of_rows() {
    for n in [1, 2, 31, 32, 33, 64, 65, 127] {
        dense(Case { q: Quant::named("q4_k"), k: 256, n, m: 3, bias: true, tiles: TILES });
    }
}

#[test]
fn float_rows_of_any_length() {
    for name in ["f32", "f16", "bf16"] {
        for k in [1, 3, 4, 8, 31, 33, 100, 257] {
            let q = Quant::named(name);
            dense(Case { q, k, n: 34, m: 33, bias: false, tiles: TILES });
        }
    }
}

#[test]
fn other_tiles() {
    for tiles in [[64, 32, 32, 8, 4], [64, 64, 16, 4, 4], [16, 8, 8, 2, 1], [32, 128, 32, 8, 8]] {
        dense(Case { q: Quant::named("q8_0"), k: 96, n: 70, m: 67, bias: true, tiles });
    }
}

#[test]
fn grouped_of_all_types() {
    for &q in ALL {
        let case = Case { q, k: 256, n: 37, m: 90, bias: true, tiles: TILES };
        grouped(case, 5, 3);
    }
}

#[test]
fn grouped_with_any_number_of_experts() {
    for (experts, x_div, bias) in [(1, 1, true), (3, 2, false), (5, 4, true)] {
        for m in [1, 32, 33, 130] {
            let q = Quant::named("q6_k");
            grouped(Case { q, k: 256, n: 33, m, bias, tiles: TILES }, experts, x_div);
        }
    }
}

fn dense(case: Case) {
    let gpu = gpu();
    let random = &mut Random(case.k as u64);
    let w = case.q.random(random, case.k * case.n);
    let x = random.units(case.k * case.m);
    let bias = if case.bias { random.units(case.n) } else { Vec::new() };

    let weights = gpu.upload_weights(&w);
    let bias_buffer = gpu.upload(&bias);
    let push = MulMat {
        weights: weights.address(),
        bias: if case.bias { bias_buffer.address() } else { 0 },
        ..push(&case)
    };
    let tiles = (case.m as u32).div_ceil(case.tiles[1]);
    let found = run(&gpu, &case, false, &push, &x, &[], tiles);

    let w = case.q.dequantize(&w);
    let expected: Vec<Sum> =
        x.chunks_exact(case.k).flat_map(|x| mul_mat_row(&w, x, &bias)).collect();
    assert_close(case.q.name, &found, &expected, 1e-5);
}

fn grouped(case: Case, n_expert: usize, x_div: usize) {
    let gpu = gpu();
    let random = &mut Random(case.k as u64);
    let experts: Vec<Vec<u8>> =
        (0..n_expert).map(|_| case.q.random(random, case.k * case.n)).collect();
    let x = random.units(case.k * case.m.div_ceil(x_div));
    let bias = if case.bias { random.units(case.n * n_expert) } else { Vec::new() };
    let ids: Vec<u32> = (0..case.m).map(|_| random.below(n_expert as u32)).collect();
    let (pairs, tiles) = sort(&ids, n_expert, case.tiles[1]);

    // Each expert is in a buffer of its own.
    let buffers: Vec<_> = experts.iter().map(|w| gpu.upload_weights(w)).collect();
    let table: Vec<u64> = buffers.iter().map(|b| b.address()).collect();
    let (table, bias_buffer) = (gpu.upload(&table), gpu.upload(&bias));
    let push = MulMat {
        table: table.address(),
        bias: if case.bias { bias_buffer.address() } else { 0 },
        x_div: x_div as u32,
        ..push(&case)
    };
    let lists = [&pairs[..], tiles.as_flattened()];
    let found = run(&gpu, &case, true, &push, &x, &lists, tiles.len() as u32);

    let w: Vec<Vec<f32>> = experts.iter().map(|w| case.q.dequantize(w)).collect();
    let expected: Vec<Sum> = ids
        .iter()
        .enumerate()
        .flat_map(|(pair, &e)| {
            let x = &x[pair / x_div * case.k..][..case.k];
            let bias = bias.chunks_exact(case.n).nth(e as usize).unwrap_or_default();
            mul_mat_row(&w[e as usize], x, bias)
        })
        .collect();
    assert_close(case.q.name, &found, &expected, 1e-5);
}

/// Pairs by expert, and tiles {expert, first, count} of them, the last being empty.
fn sort(ids: &[u32], n_expert: usize, tile: u32) -> (Vec<u32>, Vec<[u32; 3]>) {
    let (mut pairs, mut tiles) = (Vec::new(), Vec::new());
    for e in 0..n_expert as u32 {
        let first = pairs.len() as u32;
        pairs.extend((0..ids.len() as u32).filter(|&q| ids[q as usize] == e));
        let end = pairs.len() as u32;
        let starts = (first..end).step_by(tile as usize);
        tiles.extend(starts.map(|start| [e, start, tile.min(end - start)]));
    }
    tiles.push([u32::MAX, 0, 0]);
    (pairs, tiles)
}

/// Runs twice; both must give the same bits.
fn run(
    gpu: &Gpu,
    case: &Case,
    grouped: bool,
    push: &MulMat,
    x: &[f32],
    lists: &[&[u32]],
    tiles: u32,
) -> Vec<f32> {
    let [bm, bn, bk, tm, tn] = case.tiles;
    let spec = [bm / tm * (bn / tn), u32::from(grouped), bm, bn, bk, tm, tn];
    let grid = [(case.n as u32).div_ceil(bm), tiles, 1];
    let name = format!("mul_mat.{}", case.q.name);
    let x = gpu.upload(x);
    let lists: Vec<_> = lists.iter().map(|list| gpu.upload(list)).collect();
    let [first, second] = [(); 2].map(|()| {
        let y = gpu.nans(case.n * case.m);
        let buffers: Vec<_> = [&x, &y].into_iter().chain(&lists).collect();
        gpu.run(&name, &spec, push, &buffers, grid);
        gpu.read::<f32>(&y)
    });
    let bits = |y: &[f32]| y.iter().map(|y| y.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&first), bits(&second), "{name}: another result the second time");
    first
}

fn push(case: &Case) -> MulMat {
    let (k, n, m) = (case.k as u32, case.n as u32, case.m as u32);
    MulMat { k, n, m, x_div: 1, ..Default::default() }
}
