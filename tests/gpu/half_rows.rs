//! half_rows: the same numbers as f16, whatever their size.

use crate::harness::{Gpu, fold, gpu};
use crate::reference::random::Random;
use crate::reference::rows::half_rows;
use half::f16;
use vkmoe::push::HalfRows;
use vkmoe::vk::Buffer;

const WORKGROUP: u32 = 64;

/// Rows of `n` as f16 and their scales, on the device.
pub(crate) fn convert(gpu: &Gpu, x: &[f32], n: usize) -> (Buffer, Buffer) {
    let n_rows = x.len() / n;
    let (half, scales) = (gpu.nans(x.len() / 2), gpu.nans(n_rows));
    let push = HalfRows { n: n as u32, n_rows: n_rows as u32 };
    let [grid_x, grid_y] = fold(push.n_rows);
    let buffers = [&gpu.upload(x), &half, &scales];
    gpu.run("half_rows", &[WORKGROUP], &push, &buffers, [grid_x, grid_y, 1]);
    (half, scales)
}

#[test]
fn rows_of_any_size() {
    let gpu = gpu();
    let mut random = Random(1);
    for (n, n_rows) in [(8, 1), (32, 5), (1000, 3), (2048, 2)] {
        for size in [1e-30, 1e-6, 1.0, 1e5, 1e30] {
            let x: Vec<f32> = (0..n * n_rows).map(|_| random.unit() * size).collect();
            check(&gpu, &x, n);
        }
    }
}

#[test]
fn rows_with_zeros_infinities_and_nans() {
    let gpu = gpu();
    let mut x = vec![0.0f32; 8 * 4];
    x[9] = 3e38;
    x[17] = f32::INFINITY;
    x[25] = f32::NAN;
    let (half, scales) = convert(&gpu, &x, 8);
    let half = halves(&gpu, &half);
    assert!(half[..8].iter().all(|h| h.to_f32() == 0.0));
    assert!((half[9].to_f32() * gpu.read::<f32>(&scales)[1] / 3e38 - 1.0).abs() < 1e-3);
    assert!(half[17].is_infinite() && half[16].to_f32() == 0.0);
    assert!(half[25].is_nan());
}

fn check(gpu: &Gpu, x: &[f32], n: usize) {
    let (half, scales) = convert(gpu, x, n);
    let (half, scales) = (halves(gpu, &half), gpu.read::<f32>(&scales));
    for ((row, found), &scale) in x.chunks(n).zip(half.chunks(n)).zip(&scales) {
        let (expected, expected_scale) = half_rows(row);
        assert_eq!(scale, expected_scale);
        for (f, e) in found.iter().zip(expected) {
            // The rounding of a tie is the driver's choice.
            let error = (f64::from(f.to_f32()) - e).abs();
            assert!(error <= e.abs() / 2048.0 + 6e-8, "{f} is not {e}");
        }
    }
}

fn halves(gpu: &Gpu, buffer: &Buffer) -> Vec<f16> {
    gpu.read::<u16>(buffer).into_iter().map(f16::from_bits).collect()
}
