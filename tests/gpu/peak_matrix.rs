//! peak_matrix: fragments of all shapes that the device has for f16.

use crate::harness::gpu;
use crate::reference::peaks::products;
use crate::reference::random::Random;
use half::f16;
use vkmoe::exec::peaks::f16_shapes;
use vkmoe::push::PeakMatrix;

/// `A_TILES` and `B_TILES` of the shader.
const TILES: (usize, usize) = (2, 4);

#[test]
fn every_product_counts() {
    let gpu = gpu();
    let shapes = f16_shapes(gpu.info());
    if shapes.is_empty() {
        return eprintln!("skipped: no matrix units for f16");
    }
    let local = gpu.info().subgroup.default * 2;
    for shape in shapes {
        let [m, n, k] = shape.map(|side| side as usize);
        let random = &mut Random(7);
        let n_values = TILES.0 * m * k + TILES.1 * k * n;
        // Multiples of 1/4: sums are exact.
        let values: Vec<f32> = (0..n_values).map(|_| random.below(9) as f32 / 4.0 - 1.0).collect();
        let halves: Vec<u16> = values.iter().map(|&v| f16::from_f32(v).to_bits()).collect();
        let (x, steps) = (gpu.upload(&halves), 3);
        let y = gpu.nans(2 * 2 * m * n);
        let spec = [local, shape[0], shape[1], shape[2]];
        gpu.run("peak_matrix", &spec, &PeakMatrix { steps }, &[&x, &y], [2, 1, 1]);
        let (a, b) = values.split_at(TILES.0 * m * k);
        let expected: Vec<f32> =
            products(a, b, [m, n, k], steps).into_iter().map(|v| v as f32).collect();
        let found = gpu.read::<f32>(&y);
        for found in found.chunks_exact(m * n) {
            assert_eq!(found, expected, "{shape:?}");
        }
    }
}
