//! down_combine_vec: all types, any number of used experts, chunks that end within an expert.

use crate::harness::gpu;
use crate::operands::{Operands, Shape, few_rows_modules, twice};
use crate::reference::experts::combine_sums;
use crate::reference::mul_mat::assert_close;
use crate::reference::quants::{ALL, Quant};
use crate::reference::random::Random;
use vkmoe::push::DownCombineVec;

const WORKGROUP: u32 = 64;

/// The last three are specialization constants.
#[derive(Clone, Copy)]
struct Case {
    /// m: tokens.
    shape: Shape,
    n_used: usize,
    rows: u32,
    units: u32,
    chunk: u32,
    /// Workgroups along the rows at most.
    groups: u32,
}

impl Case {
    fn new(q: Quant, k: usize, n: usize, n_tokens: usize, n_used: usize) -> Self {
        let shape = Shape { q, k, n, m: n_tokens, bias: false };
        Case { shape, n_used, rows: 1, units: 1, chunk: 2048, groups: 99 }
    }
}

#[test]
fn all_types() {
    for (i, &q) in ALL.iter().enumerate() {
        let case = Case::new(q, 256, 30 + i, 2, 3);
        check(Case { rows: 1 + i as u32 % 2, ..case });
        check(Case { units: 3, chunk: 384, ..case });
    }
}

#[test]
fn any_number_of_used_experts() {
    for n_used in [1, 2, 8, 11, 70] {
        check(Case::new(Quant::named("q8_0"), 96, 9, 3, n_used));
        check(Case {
            groups: 1,
            chunk: 128,
            ..Case::new(Quant::named("q6_k"), 256, 50, 1, n_used)
        });
    }
}

#[test]
fn float_rows_of_any_length() {
    for name in ["f32", "f16", "bf16"] {
        for k in [1, 3, 25, 64, 130, 257] {
            let case = Case::new(Quant::named(name), k, 21, 2, 3);
            check(case);
            check(Case { chunk: 256, rows: 2, ..case });
        }
    }
}

fn check(case: Case) {
    let gpu = gpu();
    let Shape { q, k, n, m, .. } = case.shape;
    let pairs = Shape { m: m * case.n_used, ..case.shape };
    let operands = Operands::grouped(&gpu, pairs, 5, 1);
    let weights = Random(3).units(m * case.n_used);
    let expected = combine_sums(&operands.expected, &weights, case.n_used, n);
    let push = DownCombineVec {
        table: operands.table,
        k: k as u32,
        n: n as u32,
        n_used: case.n_used as u32,
        _pad: 0,
    };
    let (x, ids) = (gpu.upload(&operands.x), gpu.upload(&operands.ids));
    let weights = gpu.upload(&weights);
    let groups = (n as u32).div_ceil(gpu.subgroups(WORKGROUP) * case.rows).min(case.groups);
    let spec = [WORKGROUP, case.rows, case.units, case.chunk];
    for (name, tolerance) in few_rows_modules(&gpu, "down_combine_vec", q) {
        let found = twice(&name, || {
            let y = gpu.nans(n * m);
            gpu.run(&name, &spec, &push, &[&x, &y, &ids, &weights], [groups, 1, m as u32]);
            gpu.read(&y)
        });
        assert_close(&name, &found, &expected, tolerance);
    }
}
