//! top_logits: argmax and longer lists, ties, infinities, NaN, rows with too few numbers.

use crate::harness::gpu;
use crate::reference::random::Random;
use crate::reference::rows::top_logits;
use vkmoe::graph::TOP_RUNS;
use vkmoe::push::TopLogits;

const WORKGROUP: u32 = 128;
const RUNS: usize = TOP_RUNS as usize;

#[test]
fn random_rows() {
    for (n, n_rows, k) in [(1, 1, 1), (7, 3, 4), (1000, 2, 64), (32_003, 1, 1), (151_936, 1, 64)] {
        let mut random = Random(n as u64);
        check(&random.units(n * n_rows), n, k);
    }
}

#[test]
fn ties_go_to_the_lower_index() {
    let mut random = Random(3);
    let row: Vec<f32> = (0..3000).map(|_| random.below(5) as f32 - 2.0).collect();
    check(&row, 3000, 64);
    check(&[-0.0, 0.0, -0.0, 1.0], 4, 4);
    check(&[2.5; 600], 600, 64);
}

#[test]
fn nan_is_never_chosen() {
    let inf = f32::INFINITY;
    check(&[f32::NAN, 1.0, -f32::NAN, -inf, inf, 3.0, f32::NAN], 7, 5);
    check(&[f32::NAN; 70], 70, 2);
    check(&[1.0, f32::NAN, -inf], 3, 5);
    let mut random = Random(5);
    let row: Vec<f32> =
        (0..5000).map(|i| if i % 3 == 0 { f32::NAN } else { random.unit() }).collect();
    check(&row, 2500, 40);
}

fn check(logits: &[f32], n: usize, k: usize) {
    for parts in [1, 3, 40] {
        check_parts(logits, n, k, parts);
    }
}

fn check_parts(logits: &[f32], n: usize, k: usize, parts: usize) {
    let gpu = gpu();
    let n_rows = logits.len() / n;
    let (top, runs) = (gpu.zeros::<u32>(2 * n_rows * k), gpu.zeros::<u32>(n_rows * 2 * RUNS));
    let counters = gpu.zeros::<u32>(1 + n_rows);
    let push = TopLogits { n: n as u32, n_rows: n_rows as u32, n_parts: parts as u32, k: k as u32 };
    let grid = [push.n_parts, push.n_rows, 1];
    let buffers = [&gpu.upload(logits), &top, &runs, &counters];
    gpu.run("top_logits", &[WORKGROUP], &push, &buffers, grid);
    assert!(gpu.read::<u32>(&counters).iter().all(|&counter| counter == 0));
    let top = gpu.read::<u32>(&top);
    let (ids, values) = top.split_at(n_rows * k);
    let found = ids.iter().copied().zip(values.iter().map(|&bits| f32::from_bits(bits)));
    let expected = logits.chunks_exact(n).flat_map(|row| top_logits(row, k));
    for (place, (found, expected)) in found.zip(expected).enumerate() {
        let expected = expected.unwrap_or((u32::MAX, f32::NEG_INFINITY));
        assert_eq!(found, expected, "n {n}, place {place}");
    }
}
