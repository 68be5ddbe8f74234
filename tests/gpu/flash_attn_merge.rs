//! flash_attn_merge: splits made up by hand, some without keys. flash_attn.rs has it after flash_attn.

use crate::harness::{fold, gpu};
use crate::reference::random::Random;
use vkmoe::push::FlashAttnMerge;

const WORKGROUP: u32 = 64;
/// m of a split without keys, as flash_attn has it.
const NO_KEYS: f32 = -3.0e38;

#[test]
fn joins_splits() {
    for (n_rows, n_head, head_v, n_splits) in
        [(1, 1, 32, 1), (6, 3, 40, 2), (8, 8, 64, 5), (33, 11, 256, 8)]
    {
        for sinks in [false, true] {
            check(n_rows, n_head, head_v, n_splits, sinks);
        }
    }
}

fn check(n_rows: usize, n_head: usize, head_v: usize, n_splits: usize, has_sinks: bool) {
    let gpu = gpu();
    let mut random = Random(head_v as u64);
    let stride = head_v + 2;
    let mut partial = random.units(n_splits * n_rows * stride);
    for (at, row) in partial.chunks_exact_mut(stride).enumerate() {
        row[head_v] = random.unit() * 20.0;
        row[head_v + 1] = 1.0 + random.below(100) as f32;
        if n_splits > 1 && at % (n_rows + 1) == n_rows {
            row[..head_v].fill(0.0);
            row[head_v..].copy_from_slice(&[NO_KEYS, 0.0]);
        }
    }
    let sinks = random.units(n_head);
    let sinks_buffer = gpu.upload(&sinks);
    let out = gpu.nans(n_rows * head_v);
    let push = FlashAttnMerge {
        sinks: if has_sinks { sinks_buffer.address() } else { 0 },
        n_rows: n_rows as u32,
        n_head: n_head as u32,
        head_v: head_v as u32,
        n_splits: n_splits as u32,
    };
    let [x, y] = fold(push.n_rows);
    gpu.run("flash_attn_merge", &[WORKGROUP], &push, &[&gpu.upload(&partial), &out], [x, y, 1]);

    for (row, found) in gpu.read::<f32>(&out).chunks_exact(head_v).enumerate() {
        let sink = has_sinks.then(|| f64::from(sinks[row % n_head]));
        let split = |s: usize| &partial[(s * n_rows + row) * stride..][..stride];
        let weight = |s: usize| (f64::from(split(s)[head_v]) - 20.0).exp();
        let sum = (0..n_splits).map(|s| weight(s) * f64::from(split(s)[head_v + 1])).sum::<f64>()
            + sink.map_or(0.0, |s| (s - 20.0).exp());
        for (d, f) in found.iter().enumerate() {
            let e = (0..n_splits).map(|s| weight(s) * f64::from(split(s)[d])).sum::<f64>() / sum;
            let good = (f64::from(*f) - e).abs() <= 1e-5 * (e.abs() + 0.1);
            assert!(good, "{n_splits} splits, row {row}, dimension {d}: {f} is not {e}");
        }
    }
}
