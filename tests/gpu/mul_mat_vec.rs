//! mul_mat_vec: all types, all counts of columns, dense and grouped, with and without bias.

use crate::harness::{Gpu, fold, gpu};
use crate::operands::{Operands, Shape, twice};
use crate::reference::mul_mat::assert_close;
use crate::reference::quants::{ALL, Quant};
use vkmoe::push::MulMatVec;

const WORKGROUP: u32 = 128;

/// One product. `cols` and `rows` are specialization constants.
#[derive(Clone, Copy)]
struct Case {
    shape: Shape,
    cols: u32,
    rows: u32,
}

#[test]
fn dense_of_all_types() {
    for &q in ALL {
        let case = Case { shape: Shape { q, k: 768, n: 37, m: 7, bias: true }, cols: 4, rows: 2 };
        dense(case);
        dense(Case { shape: Shape { n: 1, m: 1, bias: false, ..case.shape }, ..case });
    }
}

#[test]
fn dense_with_any_number_of_columns() {
    for cols in 1..=8 {
        let case = Case {
            shape: Shape { q: Quant::named("q4_k"), k: 512, n: 50, m: 8, bias: false },
            cols,
            rows: 1,
        };
        dense(case);
        dense(Case { shape: Shape { m: cols as usize, ..case.shape }, ..case });
    }
}

#[test]
fn dense_with_several_rows() {
    for rows in [1, 3, 4, 8] {
        dense(Case {
            shape: Shape { q: Quant::named("q6_k"), k: 256, n: 133, m: 1, bias: true },
            cols: 1,
            rows,
        });
    }
}

#[test]
fn float_rows_of_any_length() {
    for name in ["f32", "f16", "bf16"] {
        for k in [1, 5, 8, 63, 64, 65, 514, 1001] {
            let q = Quant::named(name);
            dense(Case { shape: Shape { q, k, n: 9, m: 5, bias: true }, cols: 4, rows: 2 });
        }
    }
}

#[test]
fn grouped_of_all_types() {
    for &q in ALL {
        let case = Case { shape: Shape { q, k: 512, n: 37, m: 12, bias: true }, cols: 1, rows: 2 };
        grouped(case, 5, 4);
    }
}

#[test]
fn grouped_with_any_number_of_experts() {
    for (experts, x_div) in [(1, 1), (3, 1), (3, 2), (5, 5)] {
        for bias in [false, true] {
            let q = Quant::named("mxfp4");
            let case = Case { shape: Shape { q, k: 96, n: 65, m: 10, bias }, cols: 1, rows: 2 };
            grouped(case, experts, x_div);
        }
    }
}

/// Fewer workgroups than blocks of rows: they stride.
#[test]
fn small_grid() {
    let q = Quant::named("q8_0");
    let case = Case { shape: Shape { q, k: 64, n: 1000, m: 1, bias: false }, cols: 1, rows: 2 };
    let gpu = gpu();
    let operands = Operands::dense(&gpu, case.shape);
    let (spec, push) = (spec(&case, &operands), push(&case, &operands));
    for grid in [[1, 1, 1], [3, 1, 1]] {
        let y = gpu.nans(case.shape.n);
        gpu.run("mul_mat_vec.q8_0", &spec, &push, &[&gpu.upload(&operands.x), &y], grid);
        assert_close("small grid", &gpu.read(&y), &operands.expected, 1e-5);
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
    let name = format!("mul_mat_vec.{}", q.name);
    let (x, ids) = (gpu.upload(&operands.x), gpu.upload(&operands.ids));
    let push = MulMatVec { x_div: x_div as u32, ..push(case, operands) };
    let found = twice(&name, || {
        let y = gpu.nans(n * m);
        let spec = spec(case, operands);
        gpu.run(&name, &spec, &push, &[&x, &y, &ids], [grid_x, grid_y, z]);
        gpu.read(&y)
    });
    assert_close(q.name, &found, &operands.expected, 1e-5);
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
    }
}

fn spec(case: &Case, operands: &Operands) -> [u32; 4] {
    [WORKGROUP, u32::from(operands.table != 0), case.cols, case.rows]
}
