//! flash_attn_cm with flash_attn_merge: all that flash_attn does, with tiles of all kinds, against the
//! textbook softmax in f64. Where there are no matrix units, nothing is tested, and said so.
//!
//! A CPU compiles seconds for each pipeline, the longer the larger the heads: there they are small, but
//! for a few.

use crate::flash_attn::{Case, Data, PLAIN};
use crate::harness::{Checked, gpu};
use crate::reference::kv::KvType;
use half::f16;
use vkmoe::exec::attention::{AttentionUnits, Held, MatrixSizes, Weights};
use vkmoe::vk::DeviceKind;

/// Of a row's largest result: queries and weights are rounded to 11 bits each.
const TOLERANCE: f64 = 2e-3;
const CACHE_TYPES: [KvType; 3] = [KvType::F16, KvType::Q8_0, KvType::Q4_0];
const CASE: Case =
    Case { head: (16, 24), types: (KvType::F16, KvType::F16), n_tokens: 33, ..PLAIN };

/// The device and its matrix units, if it has any.
fn matrix_gpu() -> Option<(Checked, AttentionUnits)> {
    let gpu = gpu();
    let units = AttentionUnits::new(gpu.info());
    if units.is_none() {
        eprintln!("no matrix units: not tested");
    }
    Some((gpu, units?))
}

/// A case with the tile that the engine would take for many rows.
fn check(case: Case) {
    check_data(case, &case.data());
}

fn check_data(case: Case, data: &Data) {
    let Some((gpu, units)) = matrix_gpu() else { return };
    let (k, v) = case.types();
    match units.candidates(case.shape(), k, v).next() {
        Some(tile) => case.check(&gpu, data, tile, TOLERANCE),
        // Heads of 256 need more shared memory than most devices have.
        None => assert!(case.head.0 + case.head.1 > 256, "no tile for {case:?}"),
    }
}

/// What only a GPU tests in reasonable time.
fn on_gpu<T: Clone>(cases: &[T]) -> Vec<T> {
    if gpu().info().kind == DeviceKind::Cpu { Vec::new() } else { cases.to_vec() }
}

#[test]
fn head_sizes() {
    let large =
        on_gpu(&[(80, 80), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128), (64, 128)]);
    for head in [(8, 8), (72, 40)].into_iter().chain(large) {
        check(Case { head, n_kv: 77, ..CASE });
        check(Case { head, n_kv: 77, n_splits: 2, ..CASE });
    }
}

#[test]
fn any_number_of_tokens() {
    for n_tokens in (1..40).chain([63, 64, 65, 100, 127, 129, 200]) {
        check(Case { n_tokens, n_kv: n_tokens, heads: (2, 1), ..CASE });
    }
}

#[test]
fn shared_heads() {
    for heads in [(2, 2), (8, 2), (7, 1), (16, 1), (6, 2)] {
        for n_tokens in [1, 5, 33, 70] {
            check(Case { heads, n_tokens, n_kv: n_tokens + 20, ..CASE });
        }
    }
}

#[test]
fn lengths_and_splits() {
    for n_kv in [3, 8, 31, 32, 33, 64, 255, 1000] {
        for n_splits in [1, 2, 3, 8] {
            check(Case { n_kv, n_splits, n_tokens: 3, heads: (8, 1), ..CASE });
        }
    }
    check(Case { n_kv: 9000, n_tokens: 9, n_splits: 7, heads: (2, 1), ..CASE });
}

#[test]
fn cache_types() {
    for types in [(KvType::Q8_0, KvType::Q4_0), (KvType::Q4_0, KvType::F16)] {
        check(Case { types, head: (40, 16), n_kv: 90, ..CASE });
    }
    for (k, v) in CACHE_TYPES.into_iter().flat_map(|k| CACHE_TYPES.map(|v| (k, v))) {
        for head in on_gpu(&[(128, 128), (72, 40)]) {
            check(Case { types: (k, v), head, n_kv: 90, n_splits: 2, ..CASE });
        }
    }
}

#[test]
fn window_softcap_sinks() {
    for n_splits in [1, 4] {
        let case = Case { n_splits, n_kv: 300, ..CASE };
        for window in [1, 7, 31, 128, 1000] {
            check(Case { window, ..case });
        }
        check(Case { softcap: 30.0, ..case });
        check(Case { softcap: 0.5, ..case });
        check(Case { sinks: true, ..case });
        check(Case { sinks: true, softcap: 2.0, window: 50, ..case });
    }
}

/// Each place that things may have, and each way to operands.
#[test]
fn tiles_of_all_kinds() {
    let Some((gpu, units)) = matrix_gpu() else { return };
    let case = Case { n_kv: 200, head: (16, 8), heads: (4, 2), window: 150, ..CASE };
    let (registers, shared) = (Held::Registers, Held::Shared);
    for (row_blocks, subgroups, keys, queries, turns, ahead, weights) in [
        (1, 1, 16, registers, false, false, Weights::Carried),
        (1, 4, 32, registers, true, true, Weights::Converted),
        (2, 2, 16, shared, true, false, Weights::Copied),
        (2, 4, 16, shared, false, true, Weights::Converted),
        (3, 3, 16, registers, false, true, Weights::Carried),
    ] {
        let sizes = MatrixSizes { row_blocks, subgroups, keys, queries, turns, ahead, weights };
        let tile = units.tile(sizes);
        assert!(units.fits(case.shape(), tile), "{tile}");
        case.check(&gpu, &case.data(), tile, TOLERANCE);
    }
}

/// Every tile of the device's table.
#[test]
fn candidates() {
    let Some((gpu, units)) = matrix_gpu() else { return };
    for head in [24].into_iter().chain(on_gpu(&[64, 128, 256])) {
        let case = Case { head: (head, head), n_tokens: 40, n_kv: 150, ..CASE };
        let (data, (k, v)) = (case.data(), case.types());
        for tile in units.candidates(case.shape(), k, v) {
            case.check(&gpu, &data, tile, TOLERANCE);
        }
    }
}

/// Queries of any size, and rows of all sizes side by side. They have 11 bits here: scores are so large
/// that rounding would choose another key.
#[test]
fn queries_of_any_size() {
    let case = Case { n_kv: 150, ..CASE };
    for sizes in [[1e5; 3], [1e-6; 3], [1e30; 3], [1e-38; 3], [1e5, 1e-6, 1.0], [0.0, 1e5, 1e-3]] {
        let mut data = case.data();
        for (row, q) in data.q.chunks_exact_mut(case.head.0).enumerate() {
            let size: f32 = sizes[row % sizes.len()];
            let power = if size == 0.0 { 0.0 } else { f32::exp2(size.log2().round()) };
            q.iter_mut().for_each(|q| *q = f16::from_f32(*q).to_f32() * power);
        }
        check_data(case, &data);
        check_data(Case { softcap: 5.0, ..case }, &data);
    }
}

/// The largest values that a cache of f16 holds.
#[test]
fn values_of_any_size() {
    for size in [6e4, 1e-4] {
        let case = Case { n_kv: 150, sinks: true, ..CASE };
        let mut data = case.data();
        for bytes in data.values.chunks_exact_mut(2) {
            let value = f16::from_le_bytes([bytes[0], bytes[1]]).to_f32() * size;
            bytes.copy_from_slice(&f16::from_f32(value).to_le_bytes());
        }
        check_data(case, &data);
    }
}

/// Scores that rise from tile to tile, so that m moves often, and far; and those that fall.
#[test]
fn rising_and_falling_scores() {
    let case = Case { n_kv: 400, heads: (2, 2), ..CASE };
    for slope in [0.02, -0.02, 0.5, -0.5] {
        let mut data = case.data();
        for q in data.q.chunks_exact_mut(case.head.0) {
            q[0] = 8.0;
        }
        let row_bytes = case.head.0 * 2;
        for (cell, keys) in data.keys.chunks_exact_mut(row_bytes * case.heads.1).enumerate() {
            for key in keys.chunks_exact_mut(row_bytes) {
                let first = f16::from_f32(cell as f32 * slope);
                key[..2].copy_from_slice(&first.to_le_bytes());
            }
        }
        check_data(case, &data);
        check_data(Case { n_splits: 3, sinks: true, ..case }, &data);
    }
}

/// One large weight and very many small ones, which f16 holds with few bits.
#[test]
fn many_small_weights() {
    let case = Case { n_kv: 6000, n_tokens: 8, head: (16, 24), heads: (4, 1), ..CASE };
    for drop in [8.0, 11.0, 14.0] {
        let mut data = case.data();
        for q in data.q.chunks_exact_mut(case.head.0) {
            q.fill(0.0);
            q[0] = 4.0; // a score of cell 0 is 4 * key * 1/4
        }
        for (cell, key) in data.keys.chunks_exact_mut(case.head.0 * 2).enumerate() {
            let first = if cell == 3 { 0.0 } else { -drop };
            key[..2].copy_from_slice(&f16::from_f32(first).to_le_bytes());
        }
        check_data(case, &data);
    }
}

/// Cells past the last position hold nothing that counts.
#[test]
fn cells_not_yet_written() {
    let case = Case { n_kv: 70, ..CASE };
    let mut data = case.data();
    let nans = f16::NAN.to_le_bytes().repeat(case.head.0 * case.heads.1 * 60);
    data.keys.extend(&nans);
    data.values.extend(&nans);
    check_data(case, &data);
}
