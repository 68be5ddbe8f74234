//! mul_mat: all types, ragged tiles everywhere, dense and grouped.

use crate::harness::{Gpu, gpu};
use crate::operands::{Operands, Shape, twice};
use crate::reference::mul_mat::assert_close;
use crate::reference::quants::{ALL, Quant};
use vkmoe::push::MulMat;

/// Specialization constants after GROUPED: BM, BN, BK, TM, TN.
type Tiles = [u32; 5];
/// 64 invocations.
const TILES: Tiles = [32, 32, 32, 4, 4];

#[derive(Clone, Copy)]
struct Case {
    shape: Shape,
    tiles: Tiles,
}

#[test]
fn dense_of_all_types() {
    for &q in ALL {
        dense(Case { shape: Shape { q, k: 512, n: 45, m: 35, bias: true }, tiles: TILES });
    }
}

#[test]
fn dense_with_any_number_of_columns() {
    for m in 1..=130 {
        let bias = m % 2 == 0;
        dense(Case {
            shape: Shape { q: Quant::named("q4_0"), k: 64, n: 33, m, bias },
            tiles: TILES,
        });
    }
}

#[test]
fn dense_with_any_number_of_rows() {
    for n in [1, 2, 31, 32, 33, 64, 65, 127] {
        dense(Case {
            shape: Shape { q: Quant::named("q4_k"), k: 256, n, m: 3, bias: true },
            tiles: TILES,
        });
    }
}

#[test]
fn float_rows_of_any_length() {
    for name in ["f32", "f16", "bf16"] {
        for k in [1, 3, 4, 8, 31, 33, 100, 257] {
            let q = Quant::named(name);
            dense(Case { shape: Shape { q, k, n: 34, m: 33, bias: false }, tiles: TILES });
        }
    }
}

#[test]
fn other_tiles() {
    for tiles in [[64, 32, 32, 8, 4], [64, 64, 16, 4, 4], [16, 8, 8, 2, 1], [32, 128, 32, 8, 8]] {
        let shape = Shape { q: Quant::named("q8_0"), k: 96, n: 70, m: 67, bias: true };
        dense(Case { shape, tiles });
    }
}

#[test]
fn grouped_of_all_types() {
    for &q in ALL {
        let case = Case { shape: Shape { q, k: 256, n: 37, m: 90, bias: true }, tiles: TILES };
        grouped(case, 5, 3);
    }
}

#[test]
fn grouped_with_any_number_of_experts() {
    for (experts, x_div, bias) in [(1, 1, true), (3, 2, false), (5, 4, true)] {
        for m in [1, 32, 33, 130] {
            let q = Quant::named("q6_k");
            grouped(
                Case { shape: Shape { q, k: 256, n: 33, m, bias }, tiles: TILES },
                experts,
                x_div,
            );
        }
    }
}

fn dense(case: Case) {
    let gpu = gpu();
    let operands = Operands::dense(&gpu, case.shape);
    let tiles = (case.shape.m as u32).div_ceil(case.tiles[1]);
    run(&gpu, &case, 1, &operands, &[], tiles);
}

fn grouped(case: Case, n_expert: usize, x_div: usize) {
    let gpu = gpu();
    let operands = Operands::grouped(&gpu, case.shape, n_expert, x_div);
    let (pairs, tiles) = sort(&operands.ids, n_expert, case.tiles[1]);
    let lists = [&pairs[..], tiles.as_flattened()];
    run(&gpu, &case, x_div, &operands, &lists, tiles.len() as u32);
}

/// Pairs by expert, and tiles {expert, first, count} of them, the last being empty.
pub(crate) fn sort(ids: &[u32], n_expert: usize, tile: u32) -> (Vec<u32>, Vec<[u32; 3]>) {
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

fn run(gpu: &Gpu, case: &Case, x_div: usize, operands: &Operands, lists: &[&[u32]], tiles: u32) {
    let [bm, bn, bk, tm, tn] = case.tiles;
    let Shape { q, k, n, m, .. } = case.shape;
    let grouped = u32::from(operands.table != 0);
    let spec = [bm / tm * (bn / tn), grouped, bm, bn, bk, tm, tn];
    let push = MulMat {
        weights: operands.weights,
        table: operands.table,
        bias: operands.bias,
        k: k as u32,
        n: n as u32,
        m: m as u32,
        x_div: x_div as u32,
    };
    let name = format!("mul_mat.{}", q.name);
    let x = gpu.upload(&operands.x);
    let lists: Vec<_> = lists.iter().map(|list| gpu.upload(list)).collect();
    let found = twice(&name, || {
        let y = gpu.nans(n * m);
        let buffers: Vec<_> = [&x, &y].into_iter().chain(&lists).collect();
        gpu.run(&name, &spec, &push, &buffers, [(n as u32).div_ceil(bm), tiles, 1]);
        gpu.read(&y)
    });
    assert_close(q.name, &found, &operands.expected, 1e-5);
}
