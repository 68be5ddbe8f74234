//! rms_norm: rows short and long, few and many; with and without residual, in place.

use crate::harness::{fold, gpu};
use crate::reference::random::Random;
use crate::reference::rows::rms_norm;
use vkmoe::push::RmsNorm;
use vkmoe::vk::Buffer;

const EPS: f32 = 1e-6;

/// Which buffers are one.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Layout {
    Apart,
    /// y is x
    InPlace,
    /// s = x + residual goes to its own buffer
    Residual,
    /// ... to x
    ResidualToX,
    /// ... to the residual
    ResidualInPlace,
}

#[test]
fn workgroup_per_row() {
    for layout in [
        Layout::Apart,
        Layout::InPlace,
        Layout::Residual,
        Layout::ResidualToX,
        Layout::ResidualInPlace,
    ] {
        for (n, n_rows) in [(8, 1), (33, 7), (2880, 3), (4096, 2), (8192, 1)] {
            check(128, 1, n, n_rows, layout);
        }
    }
}

#[test]
fn subgroup_per_row() {
    for layout in [Layout::InPlace, Layout::ResidualInPlace] {
        for (n, n_rows) in [(8, 1), (32, 1000), (64, 33), (80, 5), (128, 129), (256, 4)] {
            check(64, 8, n, n_rows, layout);
        }
    }
}

fn check(workgroup: u32, rows_per_group: u32, n: usize, n_rows: usize, layout: Layout) {
    let gpu = gpu();
    let mut random = Random((n * n_rows) as u64);
    let x = random.units(n * n_rows);
    let weight = (n_rows != 1).then(|| random.units(n));
    let has_residual = !matches!(layout, Layout::Apart | Layout::InPlace);
    let residual = if has_residual { random.units(n * n_rows) } else { vec![0.0; n * n_rows] };
    let s: Vec<f32> = x.iter().zip(&residual).map(|(a, b)| a + b).collect();

    let weight_buffer = gpu.upload(weight.as_deref().unwrap_or_default());
    let push = RmsNorm {
        weight: if weight.is_some() { weight_buffer.address() } else { 0 },
        n: n as u32,
        n_rows: n_rows as u32,
        eps: EPS,
        _pad: 0,
    };
    let run = || {
        let (x, residual) = (gpu.upload(&x), gpu.upload(&residual));
        let (y, sum) = (gpu.nans(n * n_rows), gpu.nans(n * n_rows));
        let buffers: [&Buffer; 4] = match layout {
            Layout::Apart => [&x, &y, &x, &x],
            Layout::InPlace => [&x; 4],
            Layout::Residual => [&x, &y, &residual, &sum],
            Layout::ResidualToX => [&x, &y, &residual, &x],
            Layout::ResidualInPlace => [&x, &y, &residual, &residual],
        };
        let [gx, gy] = fold(push.n_rows.div_ceil(rows_per_group));
        let spec = [workgroup, u32::from(has_residual), rows_per_group];
        gpu.run("rms_norm", &spec, &push, &buffers, [gx, gy, 1]);
        if has_residual {
            assert_eq!(gpu.read::<f32>(buffers[3]), s, "the sum of {layout:?}, n {n}");
        }
        gpu.read::<f32>(buffers[1])
    };
    let found = run();
    for (row, (s, found)) in s.chunks_exact(n).zip(found.chunks_exact(n)).enumerate() {
        for (i, (f, e)) in found.iter().zip(rms_norm(s, weight.as_deref(), EPS)).enumerate() {
            let good = (f64::from(*f) - e).abs() <= 2e-6 * e.abs();
            assert!(good, "{layout:?}, n {n}, row {row}, element {i}: {f} is not {e}");
        }
    }
    assert_eq!(run(), found, "a second run differs");
}
