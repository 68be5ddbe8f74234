//! peak_fma: chains of multiplications and additions.

use crate::harness::gpu;
use crate::reference::peaks::chains;
use vkmoe::push::PeakFma;

/// `CHAINS` of the shader, of four components.
const CHAINS: u32 = 8 * 4;

#[test]
fn every_step_counts() {
    let gpu = gpu();
    for (steps, a, b) in [(0, 2.0, 1.0), (1, 2.0, 1.0), (7, 2.0, -1.0), (1000, 1.0, 2.0)] {
        let y = gpu.nans(64 * 3);
        gpu.run("peak_fma", &[64], &PeakFma { steps, a, b }, &[&y], [3, 1, 1]);
        let expected = chains(CHAINS, steps, a.into(), b.into());
        assert!(gpu.read::<f32>(&y).iter().all(|&y| f64::from(y) == expected), "{steps} steps");
    }
}
