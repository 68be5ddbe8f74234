//! Sizes of shaders/flash_decode.comp, attention for few tokens: pure functions of shapes.
//!
//! Each subgroup has a row and goes over all cells of its workgroup's split; those of a workgroup share what
//! they read through the cache next to them, so a workgroup has all rows of a kv head where they fit.

use super::attention::AttentionShape;
use super::kernels::KernelKey;
use super::kv::KvType;
use crate::graph::{AttentionOp, HeadPrep, RopePairing};
use crate::push::FlashDecode;
use crate::vk::{DeviceInfo, DeviceKind};

/// Splits at most: the shader's `MAX_SPLITS`.
pub const MAX_SPLITS: u32 = 64;
/// Dimensions that a lane loads at once.
const RUN: u32 = 8;
/// A split shorter than this costs more to join than it brings.
const MIN_SPLIT_CELLS: u32 = 64;
/// Shared memory that every device has, in bytes.
const SHARED_BYTES: u32 = 32768;
/// What the shader has in it for counters.
const COUNTER_BYTES: u32 = 16;

/// How a subgroup goes over cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CellSizes {
    /// Runs of 8 dimensions that a lane has of a cell: the more, the fewer lanes find a score together.
    pub runs: u32,
    /// Cells that a group of lanes has on their way.
    pub keys: u32,
}

/// What a device is good at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeAttention {
    /// Invocations of a subgroup.
    pub subgroup: u32,
    /// Rows of a workgroup at most, which is its subgroups.
    pub rows: u32,
    /// Where the cells are not split.
    pub short: CellSizes,
    /// Where they are.
    pub long: CellSizes,
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
    /// NEW: tokens.
    pub n_tokens: u32,
    /// The grid's x.
    pub row_blocks: u32,
}

impl DecodeAttention {
    /// Those of a device.
    pub fn new(info: &DeviceInfo) -> Self {
        let subgroup = info.subgroup.default;
        let most = |rows: u32| (info.limits.workgroup_invocations / subgroup).clamp(1, rows);
        match info.kind {
            // Code that is compiled is what costs.
            DeviceKind::Cpu => {
                let cells = CellSizes { runs: 2, keys: 1 };
                DecodeAttention { subgroup, rows: most(4), short: cells, long: cells, enough: 4 }
            }
            // Short code where there is little to do; where there is much, few instructions a cell.
            _ => DecodeAttention {
                subgroup,
                rows: most(8),
                short: CellSizes { runs: 1, keys: 4 },
                long: CellSizes { runs: 2, keys: 4 },
                enough: 264,
            },
        }
    }

    /// The tile for `n_tokens` with as many rows as shared memory has room for, if for any. `split`: whether the
    /// cells are.
    pub fn tile(&self, shape: AttentionShape, n_tokens: u32, split: bool) -> Option<DecodeTile> {
        let cells = if split { self.long } else { self.short };
        let new_bytes = n_tokens * (shape.head_k + shape.head_v) * 4;
        let left = SHARED_BYTES.checked_sub(new_bytes + COUNTER_BYTES)?;
        let most = (left / (shape.head_k * 4 + MAX_SPLITS * 4)).min(self.rows);
        if most == 0 {
            return None;
        }
        let row_blocks = shape.rows.div_ceil(most);
        let rows = shape.rows.div_ceil(row_blocks);
        let head_runs = shape.head_k.max(shape.head_v) / RUN;
        Some(DecodeTile {
            local: self.subgroup * rows,
            rows,
            lanes: head_runs.div_ceil(cells.runs).next_power_of_two().min(self.subgroup),
            keys: cells.keys,
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
            self.n_tokens,
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
        rows: 8,
        short: CellSizes { runs: 1, keys: 2 },
        long: CellSizes { runs: 4, keys: 1 },
        enough: 264,
    };

    #[test]
    fn tiles_fit_the_rows() {
        for subgroup in [4, 8, 16, 32, 64] {
            for head in [8, 32, 40, 72, 128, 200, 256, 576] {
                for rows in 1..=64 {
                    let gpu = DecodeAttention { subgroup, ..GPU };
                    let shape = AttentionShape { head_k: head, head_v: head, rows };
                    let Some(tile) = gpu.tile(shape, 4, true) else { continue };
                    assert!(tile.rows * tile.row_blocks >= rows && (1..=8).contains(&tile.rows));
                    assert!(tile.lanes <= subgroup && tile.lanes.is_power_of_two());
                    assert_eq!(tile.local, tile.rows * subgroup);
                    let vectors = (tile.rows + 4) * head + 4 * head;
                    assert!(vectors * 4 + tile.rows * MAX_SPLITS * 4 < SHARED_BYTES, "{tile:?}");
                }
            }
        }
    }

    #[test]
    fn rows_give_way_to_new_cells() {
        let sizes = |head, n_tokens| {
            let shape = AttentionShape { head_k: head, head_v: head, rows: 8 * n_tokens };
            GPU.tile(shape, n_tokens, true).map(|t| (t.rows, t.lanes, t.row_blocks))
        };
        assert_eq!(sizes(128, 1), Some((8, 4, 1)));
        assert_eq!(sizes(128, 8), Some((8, 4, 8)));
        assert_eq!(sizes(256, 1), Some((8, 8, 1)));
        assert_eq!(sizes(512, 7), Some((1, 16, 56)));
        assert_eq!(sizes(128, 100), None);
    }

    #[test]
    fn splits_fill_the_device() {
        let shape = AttentionShape { head_k: 128, head_v: 128, rows: 8 };
        let Some(tile) = GPU.tile(shape, 1, true) else { panic!("a tile for one token") };
        assert_eq!(GPU.n_splits(tile, 4, 60), 1);
        assert_eq!(GPU.n_splits(tile, 4, 700), 8);
        assert_eq!(GPU.n_splits(tile, 8, 8192), 33);
        assert_eq!(GPU.n_splits(tile, 1, 1 << 20), MAX_SPLITS);
    }
}
