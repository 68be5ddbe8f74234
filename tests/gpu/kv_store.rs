//! kv_store: the bytes of every type, head sizes that are no whole blocks, cells in any order.

use crate::harness::{fold, gpu};
use crate::reference::kv::{ALL, KvType};
use crate::reference::random::Random;
use vkmoe::push::KvStore;

const WORKGROUP: u32 = 64;
const UNTOUCHED: u8 = 0xa5;

#[test]
fn bytes_of_every_type() {
    for kv in ALL {
        for (n_head, head_dim) in [(1, 32), (3, 40), (8, 64), (2, 72), (5, 80), (4, 128), (1, 256)]
        {
            check(kv, n_head, head_dim, &[5, 0, 9, 4]);
        }
        let cells: Vec<u32> = (0..130).map(|i| i * 7 % 131).collect();
        check(kv, 2, 64, &cells);
    }
}

fn check(kv: KvType, n_head: usize, head_dim: usize, cells: &[u32]) {
    let gpu = gpu();
    let mut random = Random(head_dim as u64 + cells.len() as u64);
    let n_cells = *cells.iter().max().unwrap() as usize + 2;
    let row_bytes = kv.row_bytes(head_dim);
    let src: Vec<f32> =
        (0..cells.len() * n_head).flat_map(|row| head(&mut random, row, head_dim)).collect();
    let cache = gpu.upload(&vec![UNTOUCHED; n_cells * n_head * row_bytes]);
    let push =
        KvStore { n_head: n_head as u32, head_dim: head_dim as u32, n_tokens: cells.len() as u32 };
    let row_units =
        if matches!(kv, KvType::F32 | KvType::F16) { head_dim } else { head_dim.div_ceil(32) };
    let [x, y] = fold((cells.len() * n_head * row_units).div_ceil(WORKGROUP as usize) as u32);
    let buffers = [&gpu.upload(&src), &cache, &gpu.upload(cells)];
    gpu.run("kv_store", &[WORKGROUP, kv as u32], &push, &buffers, [x, y, 1]);

    let mut expected = vec![UNTOUCHED; n_cells * n_head * row_bytes];
    for (row, head) in src.chunks_exact(head_dim).enumerate() {
        let cell_row = cells[row / n_head] as usize * n_head + row % n_head;
        expected[cell_row * row_bytes..][..row_bytes].copy_from_slice(&kv.encode(head));
    }
    let found = gpu.read::<u8>(&cache);
    for (row, (f, e)) in
        found.chunks_exact(row_bytes).zip(expected.chunks_exact(row_bytes)).enumerate()
    {
        assert_eq!(f, e, "{kv:?}, {n_head} heads of {head_dim}, row {row}");
    }
}

/// Heads of all sizes of numbers, some with ties and exact halves, some all zero.
fn head(random: &mut Random, row: usize, head_dim: usize) -> Vec<f32> {
    let value = |r: &mut Random| match row % 6 {
        0 => 0.0,
        1 => r.unit() * 1e-3,
        2 => (r.below(255) as f32 - 127.0) * 0.5, // halves when scaled by 127 / 63.5
        3 => r.unit() * 3000.0,
        4 => r.unit() * 2f32.powi(-(r.below(24) as i32)), // f16 subnormals and zeros
        _ => r.unit(),
    };
    (0..head_dim).map(|_| value(random)).collect()
}
