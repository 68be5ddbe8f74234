//! Sizes of shaders/flash_decode.comp, attention for few tokens: pure functions of shapes.
//!
//! A lane has few loads of a cell on their way, and few sums in registers: eight rows by eight dimensions of
//! values take 64 of them, eight rows of four keys 32. All rows that share a kv head in one workgroup read the
//! cache once. A chunk's scores are in shared memory, and so are sums of its values, when subgroups' are added.

use super::attention::AttentionShape;
use super::kernels::KernelKey;
use super::kv::KvType;
use crate::graph::{AttentionOp, HeadPrep, RopePairing};
use crate::push::FlashDecode;
use crate::vk::{DeviceInfo, DeviceKind};

/// Splits at most: the shader's `MAX_SPLITS`.
pub const MAX_SPLITS: u32 = 64;
/// Rows of a workgroup that the shader can.
const MAX_ROWS: u32 = 8;
/// Dimensions that a lane loads at once.
const RUN: u32 = 8;
/// A split shorter than this costs more to join than it brings.
const MIN_SPLIT_CELLS: u32 = 64;
/// Vectors of four sums of values that a lane has at most: 64 registers.
const MAX_SUMS: u32 = 16;
/// Shared memory that every device has, in bytes.
const SHARED_BYTES: u32 = 32768;
/// Of one vector of four.
const VEC4_BYTES: u32 = 16;

/// What a device is good at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeAttention {
    /// Invocations of a subgroup.
    pub subgroup: u32,
    /// Subgroups of a workgroup.
    pub subgroups: u32,
    /// Rows of a workgroup at most.
    pub rows: u32,
    /// Runs of a key that a lane has, which says how many lanes a key has.
    pub key_runs: u32,
    /// Loads of a lane that are on their way.
    pub loads: u32,
    /// Cells of a chunk at most.
    pub cells: u32,
    /// Workgroups that fill the device.
    pub enough: u32,
}

/// Specialization constants of one launch, and the blocks of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeTile {
    /// Workgroup size.
    pub local: u32,
    /// ROWS: rows of a workgroup.
    pub rows: u32,
    /// LANES of a value.
    pub lanes: u32,
    /// KEY_LANES: lanes of a key.
    pub key_lanes: u32,
    /// KEYS of a group of such lanes at a time.
    pub keys: u32,
    /// VALUES of a group of lanes at a time.
    pub values: u32,
    /// CELLS of a chunk.
    pub cells: u32,
    /// SUBGROUPS of the workgroup.
    pub subgroups: u32,
    /// SLOTS: subgroups whose sums are in shared memory at a time.
    pub slots: u32,
    /// NEW: tokens.
    pub n_tokens: u32,
    /// The grid's x.
    pub row_blocks: u32,
}

impl DecodeAttention {
    /// Those of a device.
    pub fn new(info: &DeviceInfo) -> Self {
        let subgroup = info.subgroup.default;
        match info.kind {
            // Code that is compiled is what costs. Short chunks, so that tests of whole models meet several.
            DeviceKind::Cpu => DecodeAttention {
                subgroup,
                subgroups: 2,
                rows: 4,
                key_runs: 2,
                loads: 2,
                cells: 64,
                enough: 4,
            },
            _ => {
                let threads = info.limits.workgroup_invocations.min(256);
                let subgroups = (threads / subgroup).max(1);
                DecodeAttention {
                    subgroup,
                    subgroups,
                    rows: 8,
                    key_runs: 2,
                    loads: 8,
                    cells: 256,
                    enough: 264,
                }
            }
        }
    }

    /// The tile for `n_tokens` with as many rows as registers and shared memory have room for, if for any.
    pub fn tile(&self, shape: AttentionShape, n_tokens: u32) -> Option<DecodeTile> {
        let lanes = (shape.head_v / RUN).next_power_of_two().min(self.subgroup);
        let sums = 2 * (shape.head_v / RUN).div_ceil(lanes);
        let most = self.rows.min(MAX_ROWS).min(MAX_SUMS / sums).max(1);
        (1..=most).rev().find_map(|rows| self.tile_of(shape, n_tokens, lanes, rows))
    }

    /// The tile with so many rows at most.
    fn tile_of(
        &self,
        shape: AttentionShape,
        n_tokens: u32,
        lanes: u32,
        most: u32,
    ) -> Option<DecodeTile> {
        let row_blocks = shape.rows.div_ceil(most);
        let rows = shape.rows.div_ceil(row_blocks);
        let local = self.subgroup * self.subgroups;
        let runs = shape.head_k / RUN;
        let key_lanes = runs.div_ceil(self.key_runs).next_power_of_two().min(self.subgroup);
        let bytes = SharedBytes::new(shape, n_tokens, rows, key_lanes);
        let left = SHARED_BYTES.checked_sub(bytes.fixed + bytes.slot)?;
        // A column of scores is four bytes a row; a row's shares take as many as the splits are.
        let columns = (left / (rows * 4)).checked_sub(n_tokens.next_multiple_of(4))?;
        let most_cells = self.cells.min(columns);
        // Loads that leave a chunk whole rounds.
        let loads = |lanes: u32, runs: u32| {
            let fit = (most_cells / (local / lanes)).min(self.loads / runs.div_ceil(lanes));
            1 << fit.max(1).ilog2()
        };
        let (keys, values) = (loads(key_lanes, runs), loads(lanes, shape.head_v / RUN));
        let round = (local / key_lanes * keys).max(local / lanes * values);
        // Turns of subgroups with slots: two, or as few as short chunks leave. Less memory leaves room for
        // more workgroups.
        let turns = |rounds: u32| {
            let scores = SharedBytes::scores(n_tokens, rows, rounds * round);
            let left = SHARED_BYTES.checked_sub(bytes.fixed + scores)?;
            let slots = left / bytes.slot;
            (slots > 0 && left >= bytes.angles)
                .then(|| self.subgroups.div_ceil(slots.min(self.subgroups.div_ceil(2))))
        };
        let fewest = turns(1)?;
        let longest = (most_cells / round).max(1);
        let rounds = (1..=longest).rev().find(|&n| turns(n) == Some(fewest))?;
        Some(DecodeTile {
            local,
            rows,
            lanes,
            key_lanes,
            keys,
            values,
            cells: rounds * round,
            subgroups: self.subgroups,
            slots: self.subgroups.div_ceil(fewest),
            n_tokens,
            row_blocks,
        })
    }

    /// Into how many splits `n_kv` cells go: enough workgroups for the device, none too short. Short of
    /// that a power of two, since every number is a recording of its own.
    pub fn n_splits(&self, tile: DecodeTile, n_kv_head: u32, n_kv: u32) -> u32 {
        let wanted = (self.enough / (tile.row_blocks * n_kv_head)).clamp(1, MAX_SPLITS);
        match n_kv / MIN_SPLIT_CELLS {
            0 => 1,
            possible if possible >= wanted => wanted,
            possible => 1 << possible.ilog2(),
        }
    }
}

/// Shared memory of a workgroup, as the shader adds it up.
struct SharedBytes {
    /// Prepared heads, new values, what rows have one of, and `came_last`.
    fixed: u32,
    /// A subgroup's sums of values.
    slot: u32,
    /// Angles, in the place of those sums.
    angles: u32,
}

impl SharedBytes {
    fn new(shape: AttentionShape, n_tokens: u32, rows: u32, key_lanes: u32) -> Self {
        let head_k = shape.head_k.next_multiple_of(2 * 4 * key_lanes);
        let prepared = (rows + n_tokens) * head_k + n_tokens * shape.head_v;
        SharedBytes {
            fixed: 4 * (prepared + 3 * rows) + VEC4_BYTES,
            slot: 4 * rows * shape.head_v,
            angles: 4 * n_tokens * shape.head_k,
        }
    }

    fn scores(n_tokens: u32, rows: u32, cells: u32) -> u32 {
        let columns = (n_tokens.next_multiple_of(4) + cells).max(MAX_SPLITS);
        4 * rows * columns
    }
}

impl DecodeTile {
    /// The pipeline.
    pub fn kernel(
        self,
        a: &AttentionOp,
        heads: &HeadPrep,
        type_k: KvType,
        type_v: KvType,
    ) -> KernelKey {
        let rope = match heads.rope.map(|rope| rope.pairing) {
            None => 0,
            Some(RopePairing::Adjacent) => 1,
            Some(RopePairing::Neox) => 2,
        };
        KernelKey::new::<FlashDecode>(&[
            self.local,
            a.head_k,
            a.head_v,
            type_k.spec(),
            type_v.spec(),
            self.rows,
            self.lanes,
            self.key_lanes,
            self.keys,
            self.values,
            self.cells,
            self.n_tokens,
            self.subgroups,
            self.slots,
            u32::from(a.sinks.is_some()),
            u32::from(heads.q_norm.is_some()),
            u32::from(heads.k_norm.is_some()),
            rope,
        ])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GPU: DecodeAttention = DecodeAttention {
        subgroup: 32,
        subgroups: 8,
        rows: 8,
        key_runs: 2,
        loads: 8,
        cells: 256,
        enough: 264,
    };

    #[test]
    fn tiles_fit_the_rows() {
        for subgroup in [4, 8, 16, 32, 64] {
            for head in [8, 32, 40, 72, 128, 200, 256] {
                for rows in 1..=64 {
                    let gpu = DecodeAttention { subgroup, subgroups: 256 / subgroup, ..GPU };
                    let shape = AttentionShape { head_k: head, head_v: head, rows };
                    let Some(tile) = gpu.tile(shape, 4) else { continue };
                    assert!(tile.rows * tile.row_blocks >= rows && tile.rows <= 8);
                    for (lanes, cells) in [(tile.key_lanes, tile.keys), (tile.lanes, tile.values)] {
                        assert!(lanes <= subgroup && lanes.is_power_of_two() && cells > 0);
                        assert!(tile.cells.is_multiple_of(256 / lanes * cells) && tile.cells > 0);
                    }
                    assert!((1..=tile.subgroups).contains(&tile.slots));
                    let bytes = SharedBytes::new(shape, 4, tile.rows, tile.key_lanes);
                    let scores = SharedBytes::scores(4, tile.rows, tile.cells);
                    let all = bytes.fixed + scores + bytes.angles.max(tile.slots * bytes.slot);
                    assert!(all <= SHARED_BYTES, "{gpu:?} {shape:?} {tile:?}");
                }
            }
        }
    }

    #[test]
    fn rows_give_way_to_new_cells() {
        let sizes = |head, n_tokens| {
            let shape = AttentionShape { head_k: head, head_v: head, rows: 8 * n_tokens };
            GPU.tile(shape, n_tokens)
                .map(|t| (t.rows, t.key_lanes, t.keys, t.values, t.cells, t.slots))
        };
        assert_eq!(sizes(128, 1), Some((8, 8, 4, 8, 256, 4)));
        assert_eq!(sizes(128, 8), Some((8, 8, 4, 8, 128, 3)));
        assert_eq!(sizes(256, 1), Some((8, 16, 4, 8, 128, 2)));
        assert_eq!(sizes(256, 8), Some((6, 16, 4, 8, 64, 1)));
        assert_eq!(sizes(128, 100), None);
    }

    #[test]
    fn splits_fill_the_device() {
        let shape = AttentionShape { head_k: 128, head_v: 128, rows: 8 };
        let Some(tile) = GPU.tile(shape, 1) else { panic!("a tile for one token") };
        assert_eq!(GPU.n_splits(tile, 4, 60), 1);
        assert_eq!(GPU.n_splits(tile, 4, 700), 8);
        assert_eq!(GPU.n_splits(tile, 8, 8192), 33);
        assert_eq!(GPU.n_splits(tile, 1, 1 << 20), MAX_SPLITS);
    }
}
