//! peak_read: every word is read once.

use crate::harness::{fold, gpu};
use crate::reference::peaks::part_sums;
use crate::reference::random::Random;
use vkmoe::push::PeakRead;

#[test]
fn every_word_counts() {
    let gpu = gpu();
    for (local, loads, n_parts) in [(32u32, 8u32, 5usize), (64, 1, 40), (128, 4, 40)] {
        let part = (local * loads * 4) as usize;
        let n_words = part * n_parts;
        let random = &mut Random(1);
        let words: Vec<u32> = (0..n_words).map(|_| random.bits() as u32).collect();
        let data = gpu.upload(&words);
        let sums = gpu.zeros::<u32>(n_parts);
        let push = PeakRead { data: data.address(), n_parts: n_parts as u32, _pad: 0 };
        let [x, y] = fold(n_parts as u32);
        gpu.run("peak_read", &[local, loads], &push, &[&sums], [x, y, 1]);
        assert_eq!(gpu.read::<u32>(&sums), part_sums(&words, part), "{local} {loads}");
    }
}
