//! Twins of expert_count, expert_sort and moe_combine.

use super::mul_mat::Sum;

/// What an unused tile has as its expert.
const UNUSED: u32 = u32::MAX;

pub(crate) fn count(ids: &[u32], n_expert: usize) -> Vec<u32> {
    let mut counts = vec![0; n_expert];
    for &id in ids {
        counts[id as usize] += 1;
    }
    counts
}

/// Pairs by expert, then by index.
pub(crate) fn sort(ids: &[u32]) -> Vec<u32> {
    let mut pairs: Vec<u32> = (0..ids.len() as u32).collect();
    pairs.sort_by_key(|&q| ids[q as usize]);
    pairs
}

/// Tiles (expert, first, count), then unused ones.
pub(crate) fn tiles(counts: &[u32], tile: u32, n_tiles_max: usize) -> Vec<[u32; 3]> {
    let mut tiles = Vec::new();
    let mut first = 0;
    for (expert, &count) in counts.iter().enumerate() {
        for at in (0..count).step_by(tile as usize) {
            tiles.push([expert as u32, first + at, tile.min(count - at)]);
        }
        first += count;
    }
    assert!(tiles.len() <= n_tiles_max, "n_tiles_max is a bound");
    tiles.resize(n_tiles_max, [UNUSED, 0, 0]);
    tiles
}

/// One token: `before` + the sum over its slots of weight * row.
pub(crate) fn combine(before: &[f32], rows: &[f32], weights: &[f32]) -> Vec<f64> {
    let n = before.len();
    let slot = |s: usize, i: usize| f64::from(weights[s]) * f64::from(rows[s * n + i]);
    (0..n)
        .map(|i| f64::from(before[i]) + (0..weights.len()).map(|s| slot(s, i)).sum::<f64>())
        .collect()
}

/// All tokens: the sums over their slots of weight * row, where a row's values are sums themselves.
pub(crate) fn combine_sums(rows: &[Sum], weights: &[f32], n_used: usize, n: usize) -> Vec<Sum> {
    let token = |(rows, weights): (&[Sum], &[f32])| -> Vec<Sum> {
        let slots = || rows.chunks_exact(n).zip(weights);
        let sum = |i: usize| {
            slots().map(|(row, &w)| row[i].scaled(w.into())).fold(Sum::default(), |a, b| Sum {
                value: a.value + b.value,
                magnitude: a.magnitude + b.magnitude.abs(),
            })
        };
        (0..n).map(sum).collect()
    };
    rows.chunks_exact(n * n_used).zip(weights.chunks_exact(n_used)).flat_map(token).collect()
}
