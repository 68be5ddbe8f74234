//! glu: every operation, also at large and tiny arguments.

use crate::harness::{fold, gpu};
use crate::reference::random::Random;
use crate::reference::rows::glu;
use vkmoe::push::Glu;

const WORKGROUP: u32 = 64;

#[test]
fn every_operation() {
    let gpu = gpu();
    let mut random = Random(1);
    for op in 0..4 {
        for count in [1, 63, 65, 4001] {
            let gate: Vec<f32> =
                (0..count).map(|i| random.unit() * [0.01, 1.0, 12.0, 80.0][i % 4]).collect();
            let up: Vec<f32> = (0..count).map(|_| random.unit() * 10.0).collect();
            let out = gpu.nans(count);
            let push = Glu { count: count as u32, n: count as u32, alpha: 1.702, limit: 7.0 };
            let [x, y] = fold(push.count.div_ceil(WORKGROUP));
            let buffers = [&gpu.upload(&gate), &gpu.upload(&up), &out];
            gpu.run("glu", &[WORKGROUP, op, 0], &push, &buffers, [x, y, 1]);
            for (i, f) in gpu.read::<f32>(&out).into_iter().enumerate() {
                let expected = glu(op, gate[i], up[i], push.alpha, push.limit);
                // exp of x has a relative error of x ulps
                let tolerance =
                    (1e-6 + 1e-7 * f64::from(gate[i].abs()).powi(2)) * expected.abs() + 1e-30;
                let good =
                    (f64::from(f) - expected).abs() <= tolerance.min(1e-5 * expected.abs() + 1e-20);
                assert!(good, "op {op}, gate {}, up {}: {f} is not {expected}", gate[i], up[i]);
            }
        }
    }
}

/// Rows that hold gate and up side by side give what two tensors give, bit for bit.
#[test]
fn halves_of_rows() {
    let gpu = gpu();
    let mut random = Random(2);
    for (rows, n) in [(1, 1), (3, 5), (7, 64), (2, 771)] {
        let gate: Vec<f32> = (0..rows * n).map(|_| random.unit() * 9.0).collect();
        let up: Vec<f32> = (0..rows * n).map(|_| random.unit() * 9.0).collect();
        let both: Vec<f32> =
            gate.chunks(n).zip(up.chunks(n)).flat_map(|(g, u)| [g, u].concat()).collect();
        let push = Glu { count: (rows * n) as u32, n: n as u32, alpha: 1.702, limit: 7.0 };
        let [x, y] = fold(push.count.div_ceil(WORKGROUP));
        let (apart, fused) = (gpu.nans(rows * n), gpu.nans(rows * n));
        let (gate, up, both) = (gpu.upload(&gate), gpu.upload(&up), gpu.upload(&both));
        gpu.run("glu", &[WORKGROUP, 0, 0], &push, &[&gate, &up, &apart], [x, y, 1]);
        gpu.run("glu", &[WORKGROUP, 0, 1], &push, &[&both, &both, &fused], [x, y, 1]);
        assert_eq!(gpu.read::<u32>(&apart), gpu.read::<u32>(&fused), "{rows} rows of {n}");
    }
}
