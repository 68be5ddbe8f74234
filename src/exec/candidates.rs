//! Sizes that a device might do better with than with those of its table: what `vkmoe bench --tiles`
//! tries, and where entries of [`Tuning`]'s tables come from.

use super::attention::{Held, MatrixSizes, Weights, sizes};
use super::decode_attention::{CellSizes, DecodeAttention};
use super::int8::{self, Int8Products};
use super::mat_vec::{Activations, MatVecSizes};
use super::matrix::{MatrixTile, tile};
use super::tuning::{MulMatTile, Tuning};
use crate::vk::{DeviceInfo, DeviceKind};

/// The tuning with other sizes, one a time.
pub fn candidates(tuning: &Tuning, info: &DeviceInfo) -> Vec<Tuning> {
    let with = |change: &dyn Fn(&mut Tuning)| changed(tuning, change);
    let mut others = Vec::new();
    if let Some(units) = tuning.matrix {
        let tiles = MATRIX_TILES.iter().filter_map(|tile| units.only(tile));
        others.extend(tiles.map(|only| with(&|t| t.matrix = Some(only))));
    }
    if tuning.int8.is_some() {
        let tiles = int8::candidates(info).map(Int8Products::all);
        others.extend(tiles.map(|all| with(&|t| t.int8 = Some(all))));
    }
    if let Some(units) = tuning.attention_units {
        let sizes = ATTENTION_SIZES.iter().map(|sizes| units.only(sizes));
        others.extend(sizes.map(|only| with(&|t| t.attention_units = Some(only))));
        others.push(with(&|t| t.attention_units = None));
    }
    // What is left to the plain units, then everything.
    let tiles = mul_mat_tiles(info.kind).into_iter().filter(|tile| fits(tile, info));
    others.extend(tiles.map(|tile| with(&|t| t.set_mul_mat(tile))));
    others.extend(mat_vec_sizes(tuning.mat_vec).map(|sizes| with(&|t| t.mat_vec = sizes)));
    let decode = decode_attention_sizes(tuning.decode_attention);
    others.extend(decode.map(|sizes| with(&|t| t.decode_attention = sizes)));
    others.push(with(&|t| (t.matrix, t.int8) = (None, None)));
    others.retain(|other| other != tuning);
    others
}

/// The tuning with other sizes of what passes of few tokens take, for whole passes: these have to fetch the
/// code of each kernel anew, which no kernel timed alone shows. Those of products in all combinations. A CPU
/// gets one: it takes seconds to compile each.
pub fn few_token_candidates(tuning: &Tuning, info: &DeviceInfo) -> Vec<Tuning> {
    const INT16_ROWS: [Option<u32>; 5] = [None, Some(0), Some(8), Some(16), Some(32)];
    const ROWS_AND_WORDS: [(u32, u32); 6] = [(1, 16), (1, 32), (2, 16), (2, 32), (2, 64), (4, 64)];
    let chosen = tuning.mat_vec;
    let mut products = Vec::new();
    let mut attention = Vec::new();
    if Activations::of(info).contains(&Activations::Int16) {
        products.extend(INT16_ROWS.map(|int16_rows| MatVecSizes { int16_rows, ..chosen }));
    }
    if info.kind != DeviceKind::Cpu {
        products.extend([1, 2, 4, 8].map(|router_rows| MatVecSizes { router_rows, ..chosen }));
        for ((rows, words), subgroups) in
            ROWS_AND_WORDS.into_iter().flat_map(|r| [4, 8, 16].map(|s| (r, s)))
        {
            products.extend([264, 528, 1056, 8448].map(|groups| MatVecSizes {
                subgroups,
                rows,
                words,
                groups,
                ..chosen
            }));
        }
        products.retain(|v| v.subgroups * v.subgroup <= info.limits.workgroup_invocations);
        attention.extend(decode_attention_sizes(tuning.decode_attention));
    }
    let products = products.into_iter().map(|sizes| changed(tuning, |t| t.mat_vec = sizes));
    let attention =
        attention.into_iter().map(|sizes| changed(tuning, |t| t.decode_attention = sizes));
    products.chain(attention).filter(|other| other != tuning).collect()
}

fn changed(tuning: &Tuning, change: impl FnOnce(&mut Tuning)) -> Tuning {
    let mut other = *tuning;
    change(&mut other);
    other
}

/// Weight rows, rows of x, and subgroups along each.
const MATRIX_SHAPES: [[u32; 4]; 14] = [
    [32, 32, 2, 1],
    [64, 32, 2, 1],
    [64, 64, 2, 2],
    [64, 128, 2, 2],
    [64, 128, 2, 4],
    [128, 32, 4, 1],
    [128, 64, 2, 2],
    [128, 64, 4, 2],
    [128, 128, 2, 2],
    [128, 128, 4, 2],
    [128, 128, 4, 4],
    [128, 256, 4, 4],
    [256, 64, 4, 2],
    [256, 128, 4, 4],
];

/// Tiles for matrix units: every shape at two depths, with one buffer or two.
static MATRIX_TILES: [MatrixTile; 4 * MATRIX_SHAPES.len()] = {
    let mut tiles = [tile(0, 0, 0, 0, 0, 0); 4 * MATRIX_SHAPES.len()];
    let mut i = 0;
    while i < tiles.len() {
        let [bm, bn, warps_m, warps_n] = MATRIX_SHAPES[i / 4];
        tiles[i] =
            tile(bm, bn, if i % 4 < 2 { 32 } else { 64 }, warps_m, warps_n, 1 + i as u32 % 2);
        i += 1;
    }
    tiles
};

/// Row blocks, subgroups and keys of attention.
const ATTENTION_SHAPES: [[u32; 3]; 9] = [
    [1, 4, 32],
    [1, 4, 64],
    [1, 4, 128],
    [1, 8, 32],
    [1, 8, 64],
    [2, 2, 32],
    [2, 2, 64],
    [2, 4, 32],
    [2, 4, 64],
];

/// Sizes of attention on matrix units: every shape with queries in registers or not, with shared memory for
/// keys and values each or in turn, with loads ahead or not, with weights converted or copied.
static ATTENTION_SIZES: [MatrixSizes; 16 * ATTENTION_SHAPES.len()] = {
    let mut all = [sizes(0, 0, 0, Held::Shared, false); 16 * ATTENTION_SHAPES.len()];
    let mut i = 0;
    while i < all.len() {
        let [row_blocks, subgroups, keys] = ATTENTION_SHAPES[i / 16];
        let queries = if i % 2 == 0 { Held::Registers } else { Held::Shared };
        all[i] = sizes(row_blocks, subgroups, keys, queries, i / 2 % 2 == 1);
        all[i].ahead = i / 4 % 2 == 0;
        all[i].weights = if i / 8 % 2 == 0 { Weights::Converted } else { Weights::Copied };
        i += 1;
    }
    all
};

/// Sizes of attention for few tokens that differ from the chosen ones in one thing.
fn decode_attention_sizes(chosen: DecodeAttention) -> impl Iterator<Item = DecodeAttention> {
    const RUNS_AND_KEYS: [(u32, u32); 7] = [(1, 4), (2, 2), (2, 4), (4, 1), (4, 2), (1, 2), (1, 1)];
    let DecodeAttention { rows, enough, .. } = chosen;
    let of_rows = [rows, (rows / 2).max(1)].into_iter().flat_map(move |rows| {
        RUNS_AND_KEYS.map(|(runs, keys)| {
            let cells = CellSizes { runs, keys };
            DecodeAttention { rows, short: cells, long: cells, ..chosen }
        })
    });
    let of_groups = [enough / 2, enough * 2].map(|enough| DecodeAttention { enough, ..chosen });
    let others = of_rows.chain(of_groups);
    others.filter(move |other| *other != chosen)
}

/// Sizes for few rows of x that differ from the chosen ones in one thing.
fn mat_vec_sizes(chosen: MatVecSizes) -> impl Iterator<Item = MatVecSizes> {
    let MatVecSizes { subgroups, rows, words, sums, groups, .. } = chosen;
    let others = [
        MatVecSizes { int16_rows: chosen.int16_rows.map(|_| 0), ..chosen },
        MatVecSizes { int16_rows: None, ..chosen },
        MatVecSizes { subgroups: (subgroups / 2).max(1), ..chosen },
        MatVecSizes { subgroups: subgroups * 2, ..chosen },
        MatVecSizes { rows: 1, ..chosen },
        MatVecSizes { rows: (rows / 2).max(1), ..chosen },
        MatVecSizes { rows: rows * 2, ..chosen },
        MatVecSizes { words: words / 2, ..chosen },
        MatVecSizes { words: words * 2, ..chosen },
        MatVecSizes { sums: sums * 2, ..chosen },
        MatVecSizes { groups: groups / 2, ..chosen },
        MatVecSizes { groups: groups * 2, ..chosen },
        MatVecSizes { groups: groups * 16, ..chosen },
    ];
    let is_new =
        move |(i, sizes): &(usize, MatVecSizes)| *sizes != chosen && !others[..*i].contains(sizes);
    others.into_iter().enumerate().filter(is_new).map(|(_, sizes)| sizes)
}

/// Tiles of the matrix product without matrix units. A CPU gets few: it takes a second to compile each.
fn mul_mat_tiles(kind: DeviceKind) -> Vec<MulMatTile> {
    let sizes: &[(u32, u32)] = match kind {
        DeviceKind::Cpu => &[(32, 32), (32, 64), (64, 64)],
        _ => &[(32, 32), (64, 32), (32, 64), (64, 64), (128, 64), (64, 128), (128, 128)],
    };
    let parts: &[(u32, u32)] = match kind {
        DeviceKind::Cpu => &[(8, 4), (8, 8)],
        _ => &[(4, 4), (8, 4), (4, 8), (8, 8)],
    };
    let depths: &[u32] = if kind == DeviceKind::Cpu { &[32] } else { &[16, 32] };
    let mut tiles = Vec::new();
    for &(bm, bn) in sizes {
        for &(tm, tn) in parts {
            tiles.extend(depths.iter().map(|&bk| MulMatTile { bm, bn, bk, tm, tn }));
        }
    }
    tiles
}

/// Whole subgroups, no more shared memory or invocations than the device has.
fn fits(tile: &MulMatTile, info: &DeviceInfo) -> bool {
    let invocations = tile.invocations();
    let subgroup = info.subgroup.default.max(1);
    invocations.is_multiple_of(subgroup)
        && invocations <= info.limits.workgroup_invocations.min(512)
        && tile.shared_bytes() <= info.limits.shared_bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::matrix::MatrixUnits;

    fn info() -> DeviceInfo {
        let mut info = DeviceInfo::default();
        info.subgroup.default = 32;
        info.limits.workgroup_invocations = 1024;
        info.limits.shared_bytes = 48 << 10;
        info
    }

    #[test]
    fn every_candidate_fits_and_differs() {
        let mut tuning = Tuning::new(&info());
        tuning.matrix = None;
        let found = candidates(&tuning, &info());
        assert!(found.len() > 10);
        for (i, other) in found.iter().enumerate() {
            assert!(fits(&other.mul_mat, &info()) && *other != tuning);
            let is_new = found[..i].iter().all(|earlier| earlier != other);
            assert!(is_new, "{other:?}");
        }
    }

    #[test]
    fn sizes_for_few_tokens_fit_and_differ() {
        let mut info = info();
        let tuning = Tuning::new(&info);
        let found = few_token_candidates(&tuning, &info);
        assert!(found.len() > 60);
        for (i, other) in found.iter().enumerate() {
            assert!(*other != tuning && !found[..i].contains(other), "{other:?}");
            assert!(other.mat_vec.subgroups <= 32);
        }
        info.limits.workgroup_invocations = 128;
        let found = few_token_candidates(&tuning, &info);
        assert!(found.iter().all(|t| t.mat_vec == tuning.mat_vec || t.mat_vec.subgroups <= 4));
    }

    #[test]
    fn tiles_of_matrix_units_do_everything() {
        let units = MatrixUnits::made_up([16, 16, 16], 32, 48 << 10);
        let mut tuning = Tuning::new(&info());
        tuning.matrix = Some(units);
        let found = candidates(&tuning, &info());
        assert!(found.len() > 20);
        let of_matrix = found.iter().filter(|other| other.matrix != tuning.matrix);
        for units in of_matrix.filter_map(|other| other.matrix) {
            for is_glu in [false, true] {
                assert_eq!(units.candidates(is_glu).count(), 1);
            }
        }
    }
}
