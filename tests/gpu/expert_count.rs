//! expert_count: any number of experts and pairs.

use crate::harness::{fold, gpu};
use crate::reference::experts::count;
use crate::reference::random::Random;
use vkmoe::push::ExpertCount;

const WORKGROUP: u32 = 32;

#[test]
fn counts() {
    let gpu = gpu();
    for (n_expert, n_pairs) in [(1, 1), (3, 7), (16, 33), (128, 2000), (512, 4097)] {
        let mut random = Random(u64::from(n_pairs));
        let ids: Vec<u32> = (0..n_pairs).map(|_| random.below(n_expert)).collect();
        let out = gpu.upload(&vec![u32::MAX; n_expert as usize]);
        let [x, y] = fold(n_expert);
        let push = ExpertCount { n_pairs, n_expert };
        gpu.run("expert_count", &[WORKGROUP], &push, &[&gpu.upload(&ids), &out], [x, y, 1]);
        assert_eq!(gpu.read::<u32>(&out), count(&ids, n_expert as usize));
    }
}
