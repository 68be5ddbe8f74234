//! rope: both pairings, all or some dimensions, positions up to a million.

use crate::harness::{fold, gpu};
use crate::reference::random::Random;
use crate::reference::rows::{Pairing, rope};
use vkmoe::push::Rope;

const WORKGROUP: u32 = 64;

#[test]
fn both_pairings_at_all_positions() {
    for pairing in [Pairing::Adjacent, Pairing::Halves] {
        check(
            pairing,
            [3, 64, 64, 0],
            1.0,
            &[0, 1, 2, 3, 100, 4095, 40_000, 131_071, 999_983, 1_000_000],
        );
        check(pairing, [1, 128, 128, 0], 1.0, &[77]);
        check(pairing, [5, 80, 32, 0], 1.25, &[5, 6, 7]);
        check(pairing, [2, 192, 64, 128], 0.7, &[1000, 1001]);
        check(pairing, [2, 40, 6, 3], 1.0, &[12, 13, 65_535]);
        let many: Vec<u32> = (0..2000).map(|i| i * 501).collect();
        check(pairing, [1, 32, 32, 0], 1.0, &many);
    }
}

fn check(pairing: Pairing, shape: [usize; 4], mscale: f32, positions: &[u32]) {
    let gpu = gpu();
    let [n_head, head_dim, n_rot, offset] = shape;
    let mut random = Random(n_rot as u64);
    let x = random.units(positions.len() * n_head * head_dim);
    let freqs: Vec<f32> =
        (0..n_rot / 2).map(|i| 1e4f32.powf(-2.0 * i as f32 / n_rot as f32)).collect();
    let freqs_buffer = gpu.upload(&freqs);
    let push = Rope {
        freqs: freqs_buffer.address(),
        n_head: n_head as u32,
        head_dim: head_dim as u32,
        n_rot: n_rot as u32,
        rot_offset: offset as u32,
        n_tokens: positions.len() as u32,
        mscale,
    };
    let buffer = gpu.upload(&x);
    let [gx, gy] = fold((positions.len() * n_head * n_rot / 2).div_ceil(WORKGROUP as usize) as u32);
    let buffers = [&buffer, &gpu.upload(positions)];
    gpu.run("rope", &[WORKGROUP, pairing as u32], &push, &buffers, [gx, gy, 1]);

    let found = gpu.read::<f32>(&buffer);
    for (row, (head, found)) in
        x.chunks_exact(head_dim).zip(found.chunks_exact(head_dim)).enumerate()
    {
        let position = positions[row / n_head];
        let expected = rope(head, &freqs, offset, pairing, position, mscale);
        for (i, (f, e)) in found.iter().zip(expected).enumerate() {
            let good = (f64::from(*f) - e).abs() <= 1e-6;
            assert!(
                good,
                "{pairing:?} {shape:?}, position {position}, dimension {i}: {f} is not {e}"
            );
        }
    }
}
