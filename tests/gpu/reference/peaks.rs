//! What the kernels that measure a device compute, so that they are not optimized away.

/// Sums of consecutive parts of `part` words.
pub(crate) fn part_sums(words: &[u32], part: usize) -> Vec<u32> {
    words.chunks_exact(part).map(|p| p.iter().fold(0u32, |sum, w| sum.wrapping_add(*w))).collect()
}

/// The sum of `chains` values, of which c starts as c and becomes c * a + b, `steps` times.
pub(crate) fn chains(chains: u32, steps: u32, a: f64, b: f64) -> f64 {
    let chain = |c: u32| (0..steps).fold(f64::from(c), |v, _| v * a + b);
    (0..chains).map(chain).sum()
}

/// steps * sum over i, j of A_i * B_j. a: matrices [m][k], b: matrices [k][n].
pub(crate) fn products(a: &[f32], b: &[f32], [m, n, k]: [usize; 3], steps: u32) -> Vec<f64> {
    let mut sum = vec![0.0; m * n];
    for a in a.chunks_exact(m * k) {
        for b in b.chunks_exact(k * n) {
            for (i, sum) in sum.iter_mut().enumerate() {
                let terms =
                    (0..k).map(|l| f64::from(a[i / n * k + l]) * f64::from(b[l * n + i % n]));
                *sum += f64::from(steps) * terms.sum::<f64>();
            }
        }
    }
    sum
}
