//! expert_sort: pairs in order, tiles that cover them; experts without pairs, one with all.

use crate::harness::{fold, gpu};
use crate::reference::experts::{count, sort, tiles};
use crate::reference::random::Random;
use vkmoe::push::ExpertSort;

const WORKGROUP: u32 = 32;

#[test]
fn random_experts() {
    for (n_expert, n_pairs, tile) in
        [(1u32, 1u32, 8), (3, 7, 1), (5, 130, 16), (128, 2000, 32), (512, 4097, 64)]
    {
        let mut random = Random(u64::from(n_pairs));
        let ids: Vec<u32> = (0..n_pairs).map(|_| random.below(n_expert)).collect();
        check(n_expert, tile, &ids);
    }
}

#[test]
fn one_expert_has_all_and_others_none() {
    check(40, 32, &[39; 1000]);
    check(40, 32, &[0; 96]);
    check(257, 16, &[100; 33]);
    let few: Vec<u32> = (0..999).map(|i| [3, 17, 250][i % 3]).collect();
    check(256, 64, &few);
}

fn check(n_expert: u32, tile: u32, ids: &[u32]) {
    let gpu = gpu();
    let n_pairs = ids.len() as u32;
    let n_tiles_max = n_pairs.div_ceil(tile) + n_expert.min(n_pairs);
    let counts = count(ids, n_expert as usize);
    let pairs = gpu.upload(&vec![u32::MAX; ids.len()]);
    let found_tiles = gpu.upload(&vec![0x5555_5555u32; 3 * n_tiles_max as usize]);
    let push = ExpertSort { n_pairs, n_expert, tile, n_tiles_max };
    let [x, y] = fold(n_expert);
    let buffers = [&gpu.upload(ids), &gpu.upload(&counts), &pairs, &found_tiles];
    gpu.run("expert_sort", &[WORKGROUP], &push, &buffers, [x, y, 1]);
    assert_eq!(gpu.read::<u32>(&pairs), sort(ids), "{n_expert} experts, {n_pairs} pairs");
    let expected = tiles(&counts, tile, n_tiles_max as usize);
    assert_eq!(gpu.read::<[u32; 3]>(&found_tiles), expected, "{n_expert} experts, {n_pairs} pairs");
}
