//! int8_rows: 32 values as bytes with a scale, whatever their size.

use crate::harness::{Gpu, fold, gpu};
use crate::reference::random::Random;
use crate::reference::rows::int8_rows;
use vkmoe::push::Int8Rows;
use vkmoe::vk::Buffer;

const WORKGROUP: u32 = 64;

/// Rows as bytes and their scales, on the device.
pub(crate) fn convert(gpu: &Gpu, x: &[f32]) -> (Buffer, Buffer) {
    let n_blocks = x.len() / 32;
    let (bytes, scales) = (gpu.nans(x.len() / 4), gpu.nans(n_blocks));
    let push = Int8Rows { n_blocks: n_blocks as u32 };
    let [grid_x, grid_y] = fold(push.n_blocks.div_ceil(WORKGROUP));
    let buffers = [&gpu.upload(x), &bytes, &scales];
    gpu.run("int8_rows", &[WORKGROUP], &push, &buffers, [grid_x, grid_y, 1]);
    (bytes, scales)
}

#[test]
fn values_of_any_size() {
    let gpu = gpu();
    let random = &mut Random(1);
    for n_blocks in [1, 63, 64, 65, 1000] {
        for size in [1e-25, 1e-6, 1.0, 1e5, 3e38] {
            let x: Vec<f32> = (0..32 * n_blocks).map(|_| random.unit() * size).collect();
            check(&gpu, &x);
        }
    }
}

#[test]
fn zeros_infinities_and_nans() {
    let gpu = gpu();
    let mut x = vec![0.0f32; 32 * 5];
    x[32] = 1e-35; // as good as nothing
    x[64 + 5] = f32::INFINITY;
    x[96 + 31] = f32::NAN;
    x[128] = -2.0;
    let (bytes, scales) = convert(&gpu, &x);
    let (bytes, scales) = (gpu.read::<i8>(&bytes), gpu.read::<f32>(&scales));
    assert_eq!(scales[..2], [0.0, 0.0]);
    assert!(scales[2].is_nan() && scales[3].is_nan());
    assert!(bytes[..128].iter().all(|&b| b == 0));
    assert_eq!(bytes[128], -127);
}

fn check(gpu: &Gpu, x: &[f32]) {
    let (bytes, scales) = convert(gpu, x);
    let (bytes, scales) = (gpu.read::<i8>(&bytes), gpu.read::<f32>(&scales));
    for ((x, found), &scale) in x.chunks(32).zip(bytes.chunks(32)).zip(&scales) {
        let (expected, expected_scale) = int8_rows(x);
        assert!((f64::from(scale) / expected_scale - 1.0).abs() < 1e-6, "{scale}");
        for (&f, e) in found.iter().zip(expected) {
            assert!((f64::from(f) - e).abs() <= 0.5001 && f > -128, "{f} is not {e}");
        }
    }
}
