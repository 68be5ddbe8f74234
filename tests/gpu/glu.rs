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
            let push = Glu { count: count as u32, alpha: 1.702, limit: 7.0 };
            let [x, y] = fold(push.count.div_ceil(WORKGROUP));
            let buffers = [&gpu.upload(&gate), &gpu.upload(&up), &out];
            gpu.run("glu", &[WORKGROUP, op], &push, &buffers, [x, y, 1]);
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
