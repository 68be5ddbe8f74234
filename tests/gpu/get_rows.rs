//! get_rows: all types; rows that repeat, rows that do not exist, rows of any length.

use crate::harness::{fold, gpu};
use crate::reference::quants::{ALL, Quant};
use crate::reference::random::Random;
use vkmoe::push::GetRows;

const WORKGROUP: u32 = 64;

#[test]
fn all_types() {
    for q in ALL {
        check(q, 768, 5, &[4, 0, 3, 3, 1, 5, u32::MAX, 2], 1.0);
    }
}

#[test]
fn float_rows_of_any_length() {
    for name in ["f32", "f16", "bf16"] {
        for n in [1, 7, 9, 255, 257] {
            check(&Quant::named(name), n, 4, &[3, 1, 0, 2, 3], -0.5);
        }
    }
}

fn check(q: &Quant, n: usize, n_weight_rows: u32, ids: &[u32], scale: f32) {
    let gpu = gpu();
    let bytes = q.random(&mut Random(n as u64), n * n_weight_rows as usize);
    let weights = gpu.upload_weights(&bytes);
    let out = gpu.nans(ids.len() * n);
    let push = GetRows {
        weights: weights.address(),
        n: n as u32,
        n_rows: ids.len() as u32,
        scale,
        n_weight_rows,
    };
    let [x, y] = fold(ids.len() as u32);
    let name = format!("get_rows.{}", q.name);
    gpu.run(&name, &[WORKGROUP], &push, &[&gpu.upload(ids), &out], [x, y, 1]);

    let found = gpu.read::<f32>(&out);
    let rows: Vec<f32> = q.dequantize(&bytes);
    let largest = rows.iter().fold(0f32, |m, w| m.max(w.abs()));
    for (&id, found) in ids.iter().zip(found.chunks_exact(n)) {
        let row = rows.chunks_exact(n).nth(id as usize);
        for (i, &f) in found.iter().enumerate() {
            let expected = row.map_or(0.0, |row| row[i] * scale);
            let good = (f - expected).abs() <= 2e-7 * largest;
            assert!(good, "{name}: row {id}, element {i}: {f} is not {expected}");
        }
    }
}
