//! moe_combine: alone and on top of what is there.

use crate::harness::{fold, gpu};
use crate::reference::experts::combine;
use crate::reference::random::Random;
use vkmoe::push::MoeCombine;

const WORKGROUP: u32 = 64;

#[test]
fn sums_of_slots() {
    for add in [false, true] {
        for (n, n_tokens, n_used) in [(8, 1, 1), (33, 7, 3), (2048, 2, 8), (100, 130, 16)] {
            check(add, n, n_tokens, n_used);
        }
    }
}

fn check(add: bool, n: usize, n_tokens: usize, n_used: usize) {
    let gpu = gpu();
    let mut random = Random(n as u64);
    let y = random.units(n_tokens * n_used * n);
    let weights = random.units(n_tokens * n_used);
    let before = if add { random.units(n_tokens * n) } else { vec![0.0; n_tokens * n] };
    let run = || {
        let out = if add { gpu.upload(&before) } else { gpu.nans(n_tokens * n) };
        let push = MoeCombine { n: n as u32, n_tokens: n_tokens as u32, n_used: n_used as u32 };
        let [gx, gy] = fold((n_tokens * n).div_ceil(WORKGROUP as usize) as u32);
        let buffers = [&gpu.upload(&y), &gpu.upload(&weights), &out];
        gpu.run("moe_combine", &[WORKGROUP, u32::from(add)], &push, &buffers, [gx, gy, 1]);
        gpu.read::<f32>(&out)
    };
    let found = run();
    for (t, found) in found.chunks_exact(n).enumerate() {
        let slots = t * n_used..(t + 1) * n_used;
        let rows = &y[slots.start * n..slots.end * n];
        let expected = combine(&before[t * n..][..n], rows, &weights[slots]);
        for (i, (f, e)) in found.iter().zip(expected).enumerate() {
            let good = (f64::from(*f) - e).abs() <= 1e-6 * n_used as f64;
            assert!(good, "add {add}, n {n}, token {t}, element {i}: {f} is not {e}");
        }
    }
    assert_eq!(run(), found, "a second run differs");
}
