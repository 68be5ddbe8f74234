//! mul_mat_vec: all types, all counts of columns, dense and grouped, with and without bias.

use crate::harness::{Gpu, fold, gpu};
use crate::reference::mul_mat::{Sum, assert_close, mul_mat_row};
use crate::reference::quants::{ALL, Quant};
use crate::reference::random::Random;
use vkmoe::push::MulMatVec;

const WORKGROUP: u32 = 128;

/// One product. `cols` and `rows` are specialization constants.
#[derive(Clone, Copy)]
struct Case {
    q: Quant,
    k: usize,
    n: usize,
    m: usize,
    cols: u32,
    rows: u32,
    bias: bool,
}

#[test]
fn dense_of_all_types() {
    for &q in ALL {
        let case = Case { q, k: 768, n: 37, m: 7, cols: 4, rows: 2, bias: true };
        dense(case);
        dense(Case { n: 1, m: 1, bias: false, ..case });
    }
}

#[test]
fn dense_with_any_number_of_columns() {
    for cols in 1..=8 {
        let case =
            Case { q: Quant::named("q4_k"), k: 512, n: 50, m: 8, cols, rows: 1, bias: false };
        dense(case);
        dense(Case { m: cols as usize, ..case });
    }
}

#[test]
fn dense_with_several_rows() {
    for rows in [1, 3, 4, 8] {
        dense(Case { q: Quant::named("q6_k"), k: 256, n: 133, m: 1, cols: 1, rows, bias: true });
    }
}

#[test]
fn float_rows_of_any_length() {
    for name in ["f32", "f16", "bf16"] {
        for k in [1, 5, 8, 63, 64, 65, 514, 1001] {
            let q = Quant::named(name);
            dense(Case { q, k, n: 9, m: 5, cols: 4, rows: 2, bias: true });
        }
    }
}

#[test]
fn grouped_of_all_types() {
    for &q in ALL {
        let case = Case { q, k: 512, n: 37, m: 12, cols: 1, rows: 2, bias: true };
        grouped(case, 5, 4);
    }
}

#[test]
fn grouped_with_any_number_of_experts() {
    for (experts, x_div) in [(1, 1), (3, 1), (3, 2), (5, 5)] {
        for bias in [false, true] {
            let q = Quant::named("mxfp4");
            let case = Case { q, k: 96, n: 65, m: 10, cols: 1, rows: 2, bias };
            grouped(case, experts, x_div);
        }
    }
}

/// Fewer workgroups than blocks of rows: they stride.
#[test]
fn small_grid() {
    let q = Quant::named("q8_0");
    let case = Case { q, k: 64, n: 1000, m: 1, cols: 1, rows: 2, bias: false };
    let gpu = gpu();
    let random = &mut Random(1);
    let w = q.random(random, case.k * case.n);
    let x = random.units(case.k);
    let weights = gpu.upload_weights(&w);
    let push = MulMatVec { weights: weights.address(), ..push(&case) };
    let expected = mul_mat_row(&q.dequantize(&w), &x, &[]);
    for grid in [[1, 1, 1], [3, 1, 1]] {
        let y = gpu.nans(case.n);
        let spec = spec(&case, false);
        gpu.run("mul_mat_vec.q8_0", &spec, &push, &[&gpu.upload(&x), &y], grid);
        assert_close("small grid", &gpu.read(&y), &expected, 1e-5);
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
    let push = MulMatVec {
        weights: weights.address(),
        bias: if case.bias { bias_buffer.address() } else { 0 },
        ..push(&case)
    };
    let found = run(&gpu, &case, false, &push, &x, &[]);

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

    // Each expert is in a buffer of its own.
    let buffers: Vec<_> = experts.iter().map(|w| gpu.upload_weights(w)).collect();
    let table: Vec<u64> = buffers.iter().map(|b| b.address()).collect();
    let (table, bias_buffer) = (gpu.upload(&table), gpu.upload(&bias));
    let push = MulMatVec {
        table: table.address(),
        bias: if case.bias { bias_buffer.address() } else { 0 },
        x_div: x_div as u32,
        ..push(&case)
    };
    let found = run(&gpu, &case, true, &push, &x, &ids);

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

/// Runs twice; both must give the same bits.
fn run(
    gpu: &Gpu,
    case: &Case,
    grouped: bool,
    push: &MulMatVec,
    x: &[f32],
    ids: &[u32],
) -> Vec<f32> {
    let rows_of_group = gpu.subgroups(WORKGROUP) * case.rows;
    let [grid_x, grid_y] = fold((case.n as u32).div_ceil(rows_of_group));
    let z = (case.m as u32).div_ceil(case.cols);
    let name = format!("mul_mat_vec.{}", case.q.name);
    let (x, ids) = (gpu.upload(x), gpu.upload(ids));
    let [first, second] = [(); 2].map(|()| {
        let y = gpu.nans(case.n * case.m);
        let spec = spec(case, grouped);
        gpu.run(&name, &spec, push, &[&x, &y, &ids], [grid_x, grid_y, z]);
        gpu.read::<f32>(&y)
    });
    let bits = |y: &[f32]| y.iter().map(|y| y.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&first), bits(&second), "{name}: another result the second time");
    first
}

fn push(case: &Case) -> MulMatVec {
    let (k, n, m) = (case.k as u32, case.n as u32, case.m as u32);
    MulMatVec { k, n, m, x_div: 1, ..Default::default() }
}

fn spec(case: &Case, grouped: bool) -> [u32; 4] {
    [WORKGROUP, u32::from(grouped), case.cols, case.rows]
}
