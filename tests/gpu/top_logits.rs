//! top_logits: argmax and longer lists, ties, infinities, NaN, rows with too few numbers.

use crate::harness::{fold, gpu};
use crate::reference::random::Random;
use crate::reference::rows::top_logits;
use vkmoe::push::TopLogits;
use vkmoe::vk::Buffer;

const WORKGROUP: u32 = 128;

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

/// In one round, and in two, by parts.
fn check(logits: &[f32], n: usize, k: usize) {
    let gpu = gpu();
    let n_rows = logits.len() / n;
    let logits_buffer = gpu.upload(logits);
    let run = |values: &Buffer, map: Option<&Buffer>, n: usize, part: usize| {
        let n_parts = n.div_ceil(part);
        let ids = gpu.upload(&vec![0u32; n_rows * n_parts * k]);
        let out = gpu.nans(n_rows * n_parts * k);
        let [n, n_rows, k, part] = [n, n_rows, k, part].map(|v| v as u32);
        let push = TopLogits { n, n_rows, k, part };
        let [x, y] = fold(push.n_rows * n_parts as u32);
        let spec = [WORKGROUP, u32::from(map.is_some())];
        let buffers = [values, &ids, &out, map.unwrap_or(values)];
        gpu.run("top_logits", &spec, &push, &buffers, [x, y, 1]);
        (ids, out)
    };
    let part = n.div_ceil(7).min(2048);
    let (part_ids, part_values) = run(&logits_buffer, None, n, part);
    let n_found = n.div_ceil(part) * k;
    let rounds =
        [run(&logits_buffer, None, n, n), run(&part_values, Some(&part_ids), n_found, n_found)];
    for (round, (ids, values)) in rounds.iter().enumerate() {
        let found = gpu.read::<u32>(ids).into_iter().zip(gpu.read::<f32>(values));
        let expected = logits.chunks_exact(n).flat_map(|row| top_logits(row, k));
        for (place, (found, expected)) in found.zip(expected).enumerate() {
            let expected = expected.unwrap_or((u32::MAX, f32::NEG_INFINITY));
            assert_eq!(found, expected, "n {n}, place {place}, {} rounds", round + 1);
        }
    }
}
