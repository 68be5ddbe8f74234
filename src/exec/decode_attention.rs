//! Sizes of shaders/flash_decode.comp, attention for few tokens: pure functions of shapes.
//!
//! A workgroup's rows are in registers while it finds scores, its sums while it adds values: eight rows of
//! heads of 128 take 64 of them in turn. All rows that share a kv head in one workgroup read the cache once.
//! A chunk's scores are in shared memory, and so are the subgroups' sums, when they are added: chunks are as
//! long as fits, since each of them costs that adding.

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
    /// Cells that a group of lanes has on their way.
    pub keys: u32,
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
    /// LANES: lanes of a cell.
    pub lanes: u32,
    /// KEYS: cells of a group of lanes at a time.
    pub keys: u32,
    /// CELLS of a chunk.
    pub cells: u32,
    /// SUBGROUPS of the workgroup.
    pub subgroups: u32,
    /// JOIN_ROWS: rows whose sums are added at a time.
    pub join_rows: u32,
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
            DeviceKind::Cpu => {
                DecodeAttention { subgroup, subgroups: 2, rows: 4, keys: 1, cells: 64, enough: 4 }
            }
            _ => {
                let threads = info.limits.workgroup_invocations.min(256);
                let subgroups = (threads / subgroup).max(1);
                DecodeAttention { subgroup, subgroups, rows: 8, keys: 2, cells: 512, enough: 264 }
            }
        }
    }

    /// The tile for `n_tokens` with as many rows as shared memory has room for, if for any.
    pub fn tile(&self, shape: AttentionShape, n_tokens: u32) -> Option<DecodeTile> {
        let most = self.rows.min(MAX_ROWS);
        (1..=most).rev().find_map(|rows| self.tile_of(shape, n_tokens, rows))
    }

    /// The tile with so many rows at most.
    fn tile_of(&self, shape: AttentionShape, n_tokens: u32, most: u32) -> Option<DecodeTile> {
        let row_blocks = shape.rows.div_ceil(most);
        let rows = shape.rows.div_ceil(row_blocks);
        let lanes = (shape.head_k.max(shape.head_v) / RUN).next_power_of_two().min(self.subgroup);
        let round = self.keys * (self.subgroup / lanes);
        let work_bytes = SHARED_BYTES.checked_sub(self.fixed_bytes(shape, n_tokens, rows))?;
        let cells_that_fit = work_bytes / (rows.div_ceil(4) * VEC4_BYTES);
        let rows_that_fit = (work_bytes / (self.subgroups * shape.head_v * 4)).min(rows);
        let cells = self.cells.max(round).min(cells_that_fit);
        // Whole rounds of all subgroups, or at least of one.
        let unit = if cells < round * self.subgroups { round } else { round * self.subgroups };
        let cells = cells / unit * unit;
        (cells > 0 && rows_that_fit > 0).then(|| DecodeTile {
            local: self.subgroup * self.subgroups,
            rows,
            lanes,
            keys: self.keys,
            cells,
            subgroups: self.subgroups,
            // Equal shares.
            join_rows: rows.div_ceil(rows.div_ceil(rows_that_fit)),
            n_tokens,
            row_blocks,
        })
    }

    /// Shared memory beside a chunk's scores or sums, as the shader adds it up.
    fn fixed_bytes(&self, shape: AttentionShape, n_tokens: u32, rows: u32) -> u32 {
        let prepared_and_totals = (rows + n_tokens) * (shape.head_k + shape.head_v) * 4;
        let by_subgroup_and_row = (self.subgroups + 2) * rows.div_ceil(4) * VEC4_BYTES;
        let shares = rows * MAX_SPLITS * 4;
        // What is left over is for came_last.
        prepared_and_totals + by_subgroup_and_row + shares + VEC4_BYTES
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
            self.keys,
            self.cells,
            self.n_tokens,
            self.subgroups,
            self.join_rows,
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

    const GPU: DecodeAttention =
        DecodeAttention { subgroup: 32, subgroups: 8, rows: 8, keys: 2, cells: 512, enough: 264 };

    #[test]
    fn tiles_fit_the_rows() {
        for subgroup in [4, 8, 16, 32, 64] {
            for head in [8, 32, 40, 72, 128, 200, 256] {
                for rows in 1..=64 {
                    let gpu = DecodeAttention { subgroup, subgroups: 256 / subgroup, ..GPU };
                    let shape = AttentionShape { head_k: head, head_v: head, rows };
                    let Some(tile) = gpu.tile(shape, 4) else { continue };
                    assert!(tile.rows * tile.row_blocks >= rows && tile.rows <= 8);
                    assert!(tile.lanes <= subgroup && tile.lanes.is_power_of_two());
                    assert!((1..=tile.rows).contains(&tile.join_rows));
                    let round = tile.keys * (subgroup / tile.lanes);
                    assert!(tile.cells > 0 && tile.cells.is_multiple_of(round));
                    let scores = tile.cells * tile.rows.div_ceil(4) * VEC4_BYTES;
                    let sums = tile.subgroups * tile.join_rows * head * 4;
                    let fixed = gpu.fixed_bytes(shape, 4, tile.rows);
                    assert!(fixed + scores.max(sums) <= SHARED_BYTES, "{gpu:?} {shape:?} {tile:?}");
                }
            }
        }
    }

    #[test]
    fn rows_give_way_to_new_cells() {
        let sizes = |head, n_tokens| {
            let shape = AttentionShape { head_k: head, head_v: head, rows: 8 * n_tokens };
            GPU.tile(shape, n_tokens).map(|t| (t.rows, t.lanes, t.cells, t.join_rows))
        };
        assert_eq!(sizes(128, 1), Some((8, 16, 512, 4)));
        assert_eq!(sizes(128, 8), Some((8, 16, 416, 3)));
        assert_eq!(sizes(256, 1), Some((8, 32, 368, 1)));
        assert_eq!(sizes(256, 8), Some((3, 32, 512, 1)));
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
