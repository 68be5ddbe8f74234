//! Tile sizes and splits of shaders/flash_attn.comp: pure functions of shapes.

/// Shared memory that every device has, in bytes.
const SHARED_BYTES: u32 = 32768;
/// Rows of a block at most: more would leave no room for keys at common head sizes.
const MAX_ROWS: u32 = 32;
/// Keys of a tile, at most and at least.
const MAX_KEYS: u32 = 64;
const MIN_KEYS: u32 = 16;
/// Workgroups that fill a large GPU.
const ENOUGH_WORKGROUPS: u32 = 256;
/// A split shorter than this costs more to join than it brings.
const MIN_SPLIT_KEYS: u32 = 128;
/// Splits at most; the scratch for partial results is in proportion.
pub const MAX_SPLITS: u32 = 32;

/// What a tile size is chosen for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionShape {
    /// Dimensions of a key, a multiple of 8.
    pub head_k: u32,
    /// Dimensions of a value, a multiple of 8.
    pub head_v: u32,
    /// Rows of a kv head: tokens times the heads that share it.
    pub rows: u32,
}

/// Specialization constants of `flash_attn`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionTile {
    /// BR: rows of a workgroup.
    pub rows: u32,
    /// BC: keys in shared memory at a time.
    pub keys: u32,
    /// Threads of a workgroup.
    pub local_size: u32,
}

impl AttentionShape {
    /// The tile with the most scores that fits into shared memory; of equals the one with more rows,
    /// for which keys are decoded less often.
    pub fn tile(self, subgroup: u32) -> AttentionTile {
        let powers = |from: u32, to: u32| (from.ilog2()..=to.ilog2()).map(|e| 1 << e);
        let most_rows = self.rows.max(1).next_power_of_two().min(MAX_ROWS);
        powers(MIN_KEYS, MAX_KEYS)
            .flat_map(|keys| powers(1, most_rows).map(move |rows| (rows, keys)))
            .map(|(rows, keys)| AttentionTile {
                rows,
                keys,
                local_size: local_size(rows, subgroup),
            })
            .filter(|tile| self.shared_bytes(*tile) <= SHARED_BYTES)
            .max_by_key(|tile| (tile.rows * tile.keys, tile.rows))
            .unwrap_or(AttentionTile {
                rows: 1,
                keys: MIN_KEYS,
                local_size: local_size(1, subgroup),
            })
    }

    /// Blocks of rows: the grid's x.
    pub fn row_blocks(self, tile: AttentionTile) -> u32 {
        self.rows.div_ceil(tile.rows)
    }

    /// Shared memory of the shader, as its declarations add up.
    pub fn shared_bytes(self, tile: AttentionTile) -> u32 {
        let (k4, v4) = (self.head_k / 4, self.head_v / 4);
        let patch_rows = tile.rows.min(4);
        let patches = tile.rows / patch_rows * v4;
        let slices = (tile.local_size / patches).clamp(1, tile.keys / 4);
        let slice_sums = if slices > 1 { slices * patches * patch_rows } else { 1 };
        let kv_tile = (tile.keys * (k4 + 1)).max(tile.keys * v4).max(slice_sums);
        (kv_tile + tile.rows * (k4 + 1) + tile.rows * tile.keys / 4) * 16 + tile.rows * 16
    }
}

/// Four subgroups, but at least 32 threads; one subgroup for few rows on a CPU, where barriers cost more
/// than threads bring.
fn local_size(rows: u32, subgroup: u32) -> u32 {
    if subgroup <= 8 && rows <= 4 { 8 } else { (4 * subgroup).clamp(32, 128) }
}

/// Into how many splits the keys go: enough workgroups for a large GPU, none too short.
pub fn n_splits(row_blocks: u32, n_kv_head: u32, n_kv: u32) -> u32 {
    let wanted = ENOUGH_WORKGROUPS.div_ceil((row_blocks * n_kv_head).max(1));
    wanted.min(n_kv / MIN_SPLIT_KEYS).clamp(1, MAX_SPLITS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_fit_and_use_the_rows() {
        for head_k in (32..=256).step_by(8) {
            for head_v in (32..=256).step_by(8) {
                for rows in [1, 2, 5, 16, 17, 1000] {
                    for subgroup in [4, 8, 16, 32, 64, 128] {
                        let shape = AttentionShape { head_k, head_v, rows };
                        let tile = shape.tile(subgroup);
                        assert!(shape.shared_bytes(tile) <= SHARED_BYTES, "{shape:?} {tile:?}");
                        assert!(tile.rows < 2 * rows && tile.keys >= MIN_KEYS);
                    }
                }
            }
        }
    }

    #[test]
    fn splits_fill_the_device_for_single_tokens_only() {
        assert_eq!(n_splits(1, 8, 100), 1);
        assert_eq!(n_splits(1, 8, 2048), 16);
        assert_eq!(n_splits(1, 1, 1 << 20), MAX_SPLITS);
        assert_eq!(n_splits(512, 8, 1 << 20), 1);
    }
}
