//! Sizes of shaders/flash_decode.comp, attention for few tokens: pure functions of shapes.
//!
//! A workgroup's rows and sums are in registers: eight rows of heads of 128 take about 128 of them. More
//! rows read the cache less often; fewer leave room for more subgroups, whose loads hide one another, and
//! make shorter code, which a pass of hundreds of kernels has to fetch for each anew. H200, 8192 cells:
//! 205 µs with 8 rows and 4 keys, 33 with 4 rows and a key.

use super::attention::AttentionShape;
use super::kernels::KernelKey;
use super::kv::KvType;
use crate::graph::{AttentionOp, HeadPrep, RopePairing};
use crate::push::FlashDecode;
use crate::vk::{DeviceInfo, DeviceKind};

/// Splits at most: the shader's `MAX_SPLITS`.
pub const MAX_SPLITS: u32 = 64;
/// Rows of a workgroup at most: more than the shader can.
const MAX_ROWS: u32 = 16;
/// Dimensions that a lane loads at once.
const RUN: u32 = 8;
/// A split shorter than this costs more to join than it brings.
const MIN_SPLIT_CELLS: u32 = 64;
/// Shared memory of the prepared rows and new cells, which every device has beside the rest.
const POOL_BYTES: u32 = 24 << 10;

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
    /// SUBGROUPS of the workgroup.
    pub subgroups: u32,
    /// JOIN_ROWS: rows whose results are joined at a time.
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
            // Code that is compiled is what costs.
            DeviceKind::Cpu => {
                DecodeAttention { subgroup, subgroups: 2, rows: 4, keys: 1, enough: 4 }
            }
            _ => {
                let threads = info.limits.workgroup_invocations.min(256);
                let subgroups = (threads / subgroup).max(1);
                DecodeAttention { subgroup, subgroups, rows: 2, keys: 1, enough: 528 }
            }
        }
    }

    /// The tile for `n_tokens`, if they fit into shared memory.
    pub fn tile(&self, shape: AttentionShape, n_tokens: u32) -> Option<DecodeTile> {
        let (run_k, run_v) = (shape.head_k / RUN, shape.head_v / RUN);
        let row_blocks = shape.rows.div_ceil(self.rows.min(MAX_ROWS));
        let rows = shape.rows.div_ceil(row_blocks);
        let new_bytes = n_tokens * (shape.head_k + shape.head_v) * 4;
        let prepared_bytes = rows * shape.head_k * 4 + new_bytes;
        let join_rows = POOL_BYTES / (self.subgroups * shape.head_v * 4);
        (prepared_bytes <= POOL_BYTES && join_rows > 0).then_some(DecodeTile {
            local: self.subgroup * self.subgroups,
            rows,
            lanes: run_k.max(run_v).next_power_of_two().min(self.subgroup),
            keys: self.keys,
            subgroups: self.subgroups,
            join_rows: join_rows.min(rows),
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
        DecodeAttention { subgroup: 32, subgroups: 8, rows: 8, keys: 4, enough: 132 };

    #[test]
    fn tiles_fit_the_rows() {
        for subgroup in [4, 8, 16, 32, 64] {
            for head in [8, 32, 40, 72, 128, 200, 256] {
                for rows in 1..=64 {
                    let gpu = DecodeAttention { subgroup, ..GPU };
                    let shape = AttentionShape { head_k: head, head_v: head, rows };
                    let Some(tile) = gpu.tile(shape, 8) else { continue };
                    assert!(tile.rows * tile.row_blocks >= rows && tile.rows <= 8);
                    assert!(tile.lanes <= subgroup && tile.lanes.is_power_of_two());
                    assert!((1..=tile.rows).contains(&tile.join_rows));
                }
            }
        }
        let shape = AttentionShape { head_k: 128, head_v: 128, rows: 8 };
        assert!(GPU.tile(shape, 1).is_some_and(|t| (t.rows, t.lanes, t.join_rows) == (8, 16, 6)));
        assert!(GPU.tile(shape, 100).is_none());
    }

    #[test]
    fn splits_fill_the_device() {
        let shape = AttentionShape { head_k: 128, head_v: 128, rows: 8 };
        let Some(tile) = GPU.tile(shape, 1) else { panic!("a tile for one token") };
        assert_eq!(GPU.n_splits(tile, 4, 60), 1);
        assert_eq!(GPU.n_splits(tile, 4, 700), 8);
        assert_eq!(GPU.n_splits(tile, 4, 8192), 33);
        assert_eq!(GPU.n_splits(tile, 1, 1 << 20), MAX_SPLITS);
    }
}
