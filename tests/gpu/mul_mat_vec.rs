//! mul_mat_vec: all types, all counts of columns, dense and grouped, with and without bias and norm.

use crate::harness::{Gpu, fold, gpu};
use crate::operands::{NormRows, Operands, Shape, few_rows_modules, twice};
use crate::reference::mul_mat::{assert_close, mul_mat_row};
use crate::reference::quants::{ALL, Quant};
use crate::reference::random::Random;
use vkmoe::push::MulMatVec;

const WORKGROUP: u32 = 128;

/// One product. All but the shape are specialization constants.
#[derive(Clone, Copy)]
struct Case {
    shape: Shape,
    cols: u32,
    rows: u32,
    units: u32,
    chunk: u32,
}

impl Case {
    /// In one chunk, if rows are no longer than that.
    fn new(shape: Shape, cols: u32, rows: u32) -> Self {
        Case { shape, cols, rows, units: 1, chunk: 768 }
    }
}

#[test]
fn dense_of_all_types() {
    for &q in ALL {
        let case = Case::new(Shape { q, k: 768, n: 37, m: 3, bias: true }, 2, 2);
        dense(case);
        dense(Case { shape: Shape { n: 1, m: 1, bias: false, ..case.shape }, ..case });
        dense(Case { chunk: 512, units: 2, cols: 1, ..case });
        dense(Case { shape: Shape { k: 256, n: 9, ..case.shape }, units: 3, rows: 1, ..case });
    }
}

#[test]
fn dense_with_any_number_of_columns() {
    for cols in 1..=8 {
        let shape = Shape { q: Quant::named("q4_k"), k: 512, n: 50, m: 8, bias: false };
        let case = Case::new(shape, cols, 1);
        dense(case);
        dense(Case { shape: Shape { m: cols as usize, ..case.shape }, ..case });
    }
}

#[test]
fn dense_with_several_rows() {
    for rows in [1, 3, 4, 8] {
        let shape = Shape { q: Quant::named("q6_k"), k: 256, n: 133, m: 1, bias: true };
        dense(Case::new(shape, 1, rows));
    }
}

/// Rows of odd and even numbers of blocks, which may begin between two words.
#[test]
fn rows_of_any_number_of_blocks() {
    for &q in ALL {
        for blocks in [1, 2, 5, 9, 33] {
            let k = q.block.max(32) * blocks;
            let case = Case::new(Shape { q, k, n: 5, m: 1, bias: false }, 1, 2);
            dense(Case { chunk: 1024, ..case });
        }
    }
}

#[test]
fn float_rows_of_any_length() {
    for name in ["f32", "f16", "bf16"] {
        for k in [1, 5, 8, 63, 64, 65, 514, 1001] {
            let q = Quant::named(name);
            let case = Case::new(Shape { q, k, n: 9, m: 5, bias: true }, 4, 2);
            dense(case);
            dense(Case { chunk: 128, units: 2, ..case });
        }
    }
}

#[test]
fn grouped_of_all_types() {
    for &q in ALL {
        grouped(Case::new(Shape { q, k: 512, n: 37, m: 12, bias: true }, 1, 2), 5, 4);
    }
}

#[test]
fn grouped_with_any_number_of_experts() {
    for (experts, x_div) in [(1, 1), (3, 1), (3, 2), (5, 5)] {
        for bias in [false, true] {
            let q = Quant::named("mxfp4");
            grouped(Case::new(Shape { q, k: 96, n: 65, m: 10, bias }, 1, 2), experts, x_div);
        }
    }
}

/// Fewer workgroups than blocks of rows: they stride.
#[test]
fn small_grid() {
    let q = Quant::named("q8_0");
    for k in [64, 2048] {
        let case = Case::new(Shape { q, k, n: 1000, m: 1, bias: false }, 1, 2);
        let gpu = gpu();
        let operands = Operands::dense(&gpu, case.shape);
        let (spec, push) = (spec(&case, &operands), push(&case, &operands));
        for (name, tolerance) in few_rows_modules(&gpu, "mul_mat_vec", q) {
            for grid in [[1, 1, 1], [3, 1, 1]] {
                let y = gpu.nans(case.shape.n);
                gpu.run(&name, &spec, &push, &[&gpu.upload(&operands.x), &y], grid);
                assert_close(&name, &gpu.read(&y), &operands.expected, tolerance);
            }
        }
    }
}

/// Rows far beyond what 16 bits hold as f16, and within a row values that differ as much.
#[test]
fn rows_of_any_scale() {
    for factor in [1e5, 1e30, 1e-30] {
        let change = |x: &mut [f32]| {
            for (i, x) in x.iter_mut().enumerate() {
                *x *= factor * [1.0, 1e-3, 1e4][i / 32 % 3];
            }
        };
        for name in ["q4_0", "q5_k", "q6_k"] {
            let shape = Shape { q: Quant::named(name), k: 512, n: 9, m: 3, bias: false };
            let gpu = gpu();
            run(&gpu, &Case::new(shape, 2, 1), 1, &Operands::dense_of(&gpu, shape, &change));
        }
    }
}

/// What is no number stays none, and spoils nothing but its own row of x.
#[test]
fn infinities_and_nans_stay() {
    for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
        let shape = Shape { q: Quant::named("q4_k"), k: 256, n: 9, m: 2, bias: false };
        let gpu = gpu();
        let operands = Operands::dense_of(&gpu, shape, &|x| x[77] = bad);
        let case = Case::new(shape, 2, 1);
        for (name, tolerance) in few_rows_modules(&gpu, "mul_mat_vec", shape.q) {
            let y = gpu.nans(shape.n * shape.m);
            let (spec, push) = (spec(&case, &operands), push(&case, &operands));
            gpu.run(&name, &spec, &push, &[&gpu.upload(&operands.x), &y], [9, 1, 1]);
            let y = gpu.read::<f32>(&y);
            let (spoilt, whole) = y.split_at(shape.n);
            assert!(spoilt.iter().all(|y| !y.is_finite()), "{name}: {spoilt:?}");
            assert_close(&name, whole, &operands.expected[shape.n..], tolerance);
        }
    }
}

/// Two and three matrices with the same x, each with an output of its own.
#[test]
fn several_matrices() {
    for (name, m) in [("q4_k", 1), ("q6_k", 3), ("f16", 1)] {
        for n in [[40, 7, 33], [3, 90, 0], [17, 1, 1]] {
            several(Quant::named(name), n, m);
        }
    }
}

fn several(q: Quant, n: [usize; 3], m: usize) {
    let gpu = gpu();
    let (k, rows) = (512, 2);
    let random = &mut Random(n[0] as u64);
    let x = random.units(k * m);
    let matrices = n.map(|n| (q.random(random, k * n), random.units(n)));
    let buffers = matrices.each_ref().map(|(w, bias)| (gpu.upload_weights(w), gpu.upload(bias)));
    let [weights, bias] = [
        buffers.each_ref().map(|(w, _)| w.address()),
        buffers.each_ref().map(|(_, bias)| bias.address()),
    ];
    let push = MulMatVec {
        weights: weights[0],
        weights2: weights[1],
        weights3: weights[2],
        bias: bias[0],
        bias2: 0,
        bias3: bias[2],
        k: k as u32,
        n: n[0] as u32,
        n2: n[1] as u32,
        n3: n[2] as u32,
        m: m as u32,
        x_div: 1,
        ..Default::default()
    };
    let blocks = n.map(|n| (n as u32).div_ceil(gpu.subgroups(WORKGROUP) * rows)).iter().sum();
    let x_buffer = gpu.upload(&x);
    let modules = few_rows_modules(&gpu, "mul_mat_vec", q);
    for ((name, tolerance), groups) in modules.iter().flat_map(|m| [(m, blocks), (m, 2)]) {
        let y = n.map(|n| gpu.nans(n * m));
        let all = [&x_buffer, &y[0], &x_buffer, &x_buffer, &y[0], &y[1], &y[2]];
        let spec = [WORKGROUP, 0, 2, rows, 1, 512, 0];
        gpu.run(name, &spec, &push, &all, [groups, 1, (m as u32).div_ceil(2)]);
        for (i, (w, bias)) in matrices.iter().enumerate().filter(|(i, _)| n[*i] > 0) {
            let (w, bias) = (q.dequantize(w), if i == 1 { &[][..] } else { bias });
            let expected: Vec<_> =
                x.chunks_exact(k).flat_map(|x| mul_mat_row(&w, x, bias)).collect();
            assert_close(name, &gpu.read::<f32>(&y[i]), &expected, *tolerance);
        }
    }
}

/// The norm before the product, of x alone and of x + delta, which is stored.
#[test]
fn folded_norms() {
    for (name, k) in [("q4_k", 512), ("q6_k", 2048), ("q8_0", 96), ("f32", 132), ("bf16", 2048)] {
        for m in [1, 3] {
            for (norm, chunk) in [(1, 2048), (2, 2048), (2, 128)] {
                let shape = Shape { q: Quant::named(name), k, n: 77, m, bias: true };
                normed(Case { chunk, ..Case::new(shape, 2, 2) }, norm);
            }
        }
    }
}

fn normed(case: Case, norm: u32) {
    let gpu = gpu();
    let Shape { q, k, n, m, .. } = case.shape;
    let rows = NormRows::new(norm, k, m);
    let random = &mut Random(n as u64);
    let (w, bias) = (q.random(random, k * n), random.units(n));
    let [weights, norm_weights] =
        [&w[..], bytemuck::cast_slice(&rows.weight)].map(|w| gpu.upload_weights(w));
    let (bias_buffer, w) = (gpu.upload(&bias), q.dequantize(&w));
    let expected: Vec<_> =
        rows.normed.chunks_exact(k).flat_map(|row| mul_mat_row(&w, row, &bias)).collect();
    let push = MulMatVec {
        weights: weights.address(),
        bias: bias_buffer.address(),
        norm: norm_weights.address(),
        k: k as u32,
        n: n as u32,
        m: m as u32,
        x_div: 1,
        eps: NormRows::EPS,
        store_sum: 1,
        ..Default::default()
    };
    let spec = [WORKGROUP, 0, case.cols, case.rows, case.units, case.chunk, norm];
    let rows_of_group = gpu.subgroups(WORKGROUP) * case.rows;
    let z = (m as u32).div_ceil(case.cols);
    let (x, delta) = (gpu.upload(&rows.x), gpu.upload(&rows.delta));
    for (name, tolerance) in few_rows_modules(&gpu, "mul_mat_vec", q) {
        for groups in [(n as u32).div_ceil(rows_of_group), 2] {
            let found = twice(&name, || {
                let (y, sum) = (gpu.nans(n * m), gpu.nans(k * m));
                gpu.run(&name, &spec, &push, &[&x, &y, &x, &delta, &sum], [groups, 1, z]);
                if norm == 2 {
                    assert_eq!(gpu.read::<f32>(&sum), rows.sum, "the sum");
                }
                gpu.read(&y)
            });
            assert_close(&name, &found, &expected, tolerance);
        }
        let (y, sum) = (gpu.nans(n * m), gpu.nans(k * m));
        let push = MulMatVec { store_sum: 0, ..push };
        gpu.run(&name, &spec, &push, &[&x, &y, &x, &delta, &sum], [1, 1, z]);
        assert_close(&name, &gpu.read::<f32>(&y), &expected, tolerance);
        assert!(gpu.read::<f32>(&sum).iter().all(|s| s.is_nan()), "not to be stored");
    }
}

fn dense(case: Case) {
    let gpu = gpu();
    let operands = Operands::dense(&gpu, case.shape);
    run(&gpu, &case, 1, &operands);
}

fn grouped(case: Case, n_expert: usize, x_div: usize) {
    let gpu = gpu();
    let operands = Operands::grouped(&gpu, case.shape, n_expert, x_div);
    run(&gpu, &case, x_div, &operands);
}

fn run(gpu: &Gpu, case: &Case, x_div: usize, operands: &Operands) {
    let Shape { q, n, m, .. } = case.shape;
    let rows_of_group = gpu.subgroups(WORKGROUP) * case.rows;
    let [grid_x, grid_y] = fold((n as u32).div_ceil(rows_of_group));
    let z = (m as u32).div_ceil(case.cols);
    let (x, ids) = (gpu.upload(&operands.x), gpu.upload(&operands.ids));
    let push = MulMatVec { x_div: x_div as u32, ..push(case, operands) };
    for (name, tolerance) in few_rows_modules(gpu, "mul_mat_vec", q) {
        let found = twice(&name, || {
            let y = gpu.nans(n * m);
            let spec = spec(case, operands);
            gpu.run(&name, &spec, &push, &[&x, &y, &ids], [grid_x, grid_y, z]);
            gpu.read(&y)
        });
        assert_close(&name, &found, &operands.expected, tolerance);
    }
}

fn push(case: &Case, operands: &Operands) -> MulMatVec {
    let Shape { k, n, m, .. } = case.shape;
    MulMatVec {
        weights: operands.weights,
        table: operands.table,
        bias: operands.bias,
        k: k as u32,
        n: n as u32,
        m: m as u32,
        x_div: 1,
        ..Default::default()
    }
}

fn spec(case: &Case, operands: &Operands) -> [u32; 7] {
    let grouped = u32::from(operands.table != 0);
    [WORKGROUP, grouped, case.cols, case.rows, case.units, case.chunk, 0]
}
