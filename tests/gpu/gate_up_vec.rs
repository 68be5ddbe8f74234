//! gate_up_vec: all types, gate and up in two matrices and in one, dense and by expert, every activation,
//! with and without norm.

use crate::harness::gpu;
use crate::operands::{NormRows, Operands, Shape, few_rows_modules, twice};
use crate::reference::mul_mat::{Sum, mul_mat_row};
use crate::reference::quants::{ALL, Quant};
use crate::reference::random::Random;
use crate::reference::rows::glu;
use vkmoe::push::GateUpVec;
use vkmoe::vk::Buffer;

const WORKGROUP: u32 = 64;
const ALPHA: f32 = 1.702;
const LIMIT: f32 = 7.0;

/// A matrix whose first half of rows is gate, the second up. All but the shape and the kind are
/// specialization constants.
#[derive(Clone, Copy)]
struct Case {
    shape: Shape,
    cols: u32,
    rows: u32,
    units: u32,
    chunk: u32,
    op: u32,
    /// Gate and up are handed over as two matrices.
    two: bool,
    /// Workgroups along the rows at most.
    groups: u32,
}

impl Case {
    fn new(q: Quant, k: usize, n: usize, m: usize) -> Self {
        let shape = Shape { q, k, n, m, bias: false };
        Case {
            shape,
            cols: 1,
            rows: 2,
            units: 1,
            chunk: 512,
            op: 0,
            two: n.is_multiple_of(4),
            groups: 99,
        }
    }

    fn spec(&self, grouped: bool, norm: u32) -> [u32; 8] {
        let grouped = u32::from(grouped);
        [WORKGROUP, grouped, self.cols, self.rows, self.units, self.chunk, norm, self.op]
    }

    fn grid(&self, subgroups: u32) -> [u32; 3] {
        let per_group = subgroups * self.rows / 2;
        let x = (self.shape.n as u32 / 2).div_ceil(per_group).min(self.groups);
        [x, 1, (self.shape.m as u32).div_ceil(self.cols)]
    }

    fn push(&self, gate: u64, up: u64) -> GateUpVec {
        let Shape { k, n, m, .. } = self.shape;
        GateUpVec {
            gate,
            up: if self.two { up } else { gate },
            norm: 0,
            k: k as u32,
            n: n as u32 / 2,
            m: m as u32,
            x_div: 1,
            up_first: if self.two { 0 } else { n as u32 / 2 },
            eps: NormRows::EPS,
            alpha: ALPHA,
            limit: LIMIT,
            store_sum: 1,
            _pad: 0,
        }
    }
}

#[test]
fn experts_of_all_types() {
    for (i, &q) in ALL.iter().enumerate() {
        grouped(Case { rows: [2, 4][i % 2], ..Case::new(q, 512, 36 + 2 * i, 6) }, 5, 3);
    }
}

#[test]
fn dense_of_all_types() {
    for (i, &q) in ALL.iter().enumerate() {
        let case = Case::new(q, 768, 40 + 2 * i, 1 + i % 3);
        dense(Case { cols: 2, units: 1 + i as u32 % 2, ..case });
    }
}

#[test]
fn columns_and_few_workgroups() {
    for cols in [1, 4, 8] {
        let case = Case::new(Quant::named("q4_k"), 256, 100, cols as usize);
        dense(Case { cols, groups: 2, ..case });
        dense(Case { cols, chunk: 128, ..case });
    }
}

#[test]
fn every_activation() {
    for op in 0..4 {
        grouped(Case { op, ..Case::new(Quant::named("q8_0"), 96, 26, 3) }, 2, 1);
    }
}

#[test]
fn float_rows_of_any_length() {
    for name in ["f32", "f16", "bf16"] {
        for k in [1, 7, 41, 130] {
            grouped(Case::new(Quant::named(name), k, 26, 4), 3, 2);
        }
    }
}

#[test]
fn folded_norms() {
    for (name, k) in [("q4_0", 512), ("q6_k", 1024), ("f16", 132)] {
        for norm in [1, 2] {
            let case = Case { cols: 2, chunk: 128, ..Case::new(Quant::named(name), k, 70, 3) };
            normed(case, norm);
            normed(Case { cols: 1, chunk: 1024, groups: 1, ..case }, norm);
        }
    }
}

fn dense(case: Case) {
    let gpu = gpu();
    let Shape { q, k, n, .. } = case.shape;
    let operands = Operands::dense(&gpu, case.shape);
    let up = operands.weights + (q.row_bytes(k) * n / 2) as u64;
    run(
        &case,
        0,
        &case.push(operands.weights, up),
        &[&gpu.upload(&operands.x)],
        &operands.expected,
    );
}

fn grouped(case: Case, n_expert: usize, x_div: usize) {
    let gpu = gpu();
    let Shape { q, k, n, .. } = case.shape;
    let operands = Operands::grouped(&gpu, case.shape, n_expert, x_div);
    let half_bytes = (q.row_bytes(k) * n / 2) as u64;
    let ups: Vec<u64> = operands.addresses.iter().map(|a| a + half_bytes).collect();
    let up_table = gpu.upload(&ups);
    let push = GateUpVec { x_div: x_div as u32, ..case.push(operands.table, up_table.address()) };
    let buffers = [&gpu.upload(&operands.x), &gpu.upload(&operands.ids)];
    run(&case, 0, &push, &buffers, &operands.expected);
}

fn normed(case: Case, norm: u32) {
    let gpu = gpu();
    let Shape { q, k, n, m, .. } = case.shape;
    let rows = NormRows::new(norm, k, m);
    let w = q.random(&mut Random(n as u64), k * n);
    let weights = gpu.upload_weights(&w);
    let w = q.dequantize(&w);
    let expected: Vec<_> =
        rows.normed.chunks_exact(k).flat_map(|row| mul_mat_row(&w, row, &[])).collect();
    let norm_weights = gpu.upload_weights(bytemuck::cast_slice(&rows.weight));
    let up = weights.address() + (q.row_bytes(k) * n / 2) as u64;
    let push = GateUpVec { norm: norm_weights.address(), ..case.push(weights.address(), up) };
    let (x, delta, sum) = (gpu.upload(&rows.x), gpu.upload(&rows.delta), gpu.nans(k * m));
    run(&case, norm, &push, &[&x, &x, &delta, &sum], &expected);
    if norm == 2 {
        assert_eq!(gpu.read::<f32>(&sum), rows.sum);
    }
}

/// `buffers`: all bindings but y.
fn run(case: &Case, norm: u32, push: &GateUpVec, buffers: &[&Buffer], expected: &[Sum]) {
    let gpu = gpu();
    let Shape { q, n, m, .. } = case.shape;
    let is_grouped = buffers.len() == 2;
    for (name, tolerance) in few_rows_modules(&gpu, "gate_up_vec", q) {
        let found = twice(&name, || {
            let y = gpu.nans(n / 2 * m);
            let mut all = vec![buffers[0], &y];
            all.extend(&buffers[1..]);
            let grid = case.grid(gpu.subgroups(WORKGROUP));
            gpu.run(&name, &case.spec(is_grouped, norm), push, &all, grid);
            gpu.read(&y)
        });
        assert_gated(case, &name, &found, expected, tolerance);
    }
}

/// The errors of gate and up go through the activation, whose slope is below 1.2.
fn assert_gated(case: &Case, name: &str, found: &[f32], expected: &[Sum], tolerance: f64) {
    let (width, n) = (case.shape.n, case.shape.n / 2);
    assert_eq!(found.len() * 2, expected.len());
    for (i, &f) in found.iter().enumerate() {
        let (gate, up) = (expected[i / n * width + i % n], expected[i / n * width + n + i % n]);
        let y = glu(case.op, gate.value as f32, up.value as f32, ALPHA, LIMIT);
        let (d_gate, d_up) = (tolerance * gate.magnitude, tolerance * up.magnitude);
        let bound = 1.2 * d_gate * (up.value.abs() + 1.0) + gate.value.abs() * d_up;
        let error = (f64::from(f) - y).abs();
        assert!(error <= bound + 1e-6, "{name} op {} [{i}]: {f} is not {y}", case.op);
    }
}
