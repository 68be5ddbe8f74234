//! Sizes of the kernels that multiply with few columns (shaders/include/mat_vec.glsl): pure functions of
//! shapes and of what a device is good at.
//!
//! What limits them on a GPU is how many bytes are on their way at a time, so a subgroup loads several
//! units of several rows before it uses the first; and how often activations are staged, so a workgroup has
//! many rows. What is on its way is in registers, of which more mean fewer subgroups at a time.

use super::grid;
use crate::gguf::GgmlType;
use glam::UVec3;

/// Columns handled together, at most.
const MAX_COLS: u32 = 8;
/// Elements of a unit: `load_unit` of shaders/include/weights.glsl.
const UNIT: u32 = 32;
/// Words of a unit besides its elements: scales, and words that it shares with its neighbours.
const UNIT_HEAD_WORDS: u32 = 4;
/// Chunks are multiples of this.
const CHUNK_STEP: u32 = 128;
/// Shared memory of so much of a chunk: a ninth of the tile's vectors may be left out.
const CHUNK_STEP_BYTES: u32 = CHUNK_STEP * 4 + CHUNK_STEP / 32 * 16;

/// What a device is good at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatVecSizes {
    /// Invocations of a subgroup.
    pub subgroup: u32,
    /// Subgroups of a workgroup.
    pub subgroups: u32,
    /// Weight rows of a subgroup, for one column.
    pub rows: u32,
    /// Words of weights that an invocation has on their way.
    pub words: u32,
    /// Sums of an invocation.
    pub sums: u32,
    /// Workgroups at most; they stride over the rows.
    pub groups: u32,
    /// Shared memory for activations.
    pub tile_bytes: u32,
}

/// Shape of one product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatVec {
    /// Workgroup size.
    pub local: u32,
    /// Columns handled together.
    pub cols: u32,
    /// Weight rows of a subgroup.
    pub rows: u32,
    /// Units that a lane loads at once.
    pub units: u32,
    /// Elements of each column in shared memory at a time.
    pub chunk: u32,
    /// Weight rows of a workgroup.
    rows_per_group: u32,
    max_groups: u32,
}

impl MatVecSizes {
    /// For weights of a type in rows of `k` elements and `m` columns. Weight rows of a subgroup are a
    /// multiple of `step`.
    pub fn shape(&self, ty: GgmlType, k: u32, m: u32, step: u32) -> MatVec {
        let cols = m.next_power_of_two().min(MAX_COLS);
        let unit_words = unit_words(ty);
        let rows = self.rows.min(self.words / unit_words).min(self.sums / cols);
        let rows = (rows / step * step).max(step);
        let lane_units = k.div_ceil(UNIT).div_ceil(self.subgroup).max(1);
        let units = (self.words / (rows * unit_words)).clamp(1, lane_units);
        MatVec {
            local: self.subgroup * self.subgroups,
            cols,
            rows,
            units,
            chunk: self.chunk(k, cols),
            rows_per_group: rows * self.subgroups,
            max_groups: self.groups,
        }
    }

    /// Whole rows where they fit.
    fn chunk(&self, k: u32, cols: u32) -> u32 {
        let fit = (self.tile_bytes / (CHUNK_STEP_BYTES * cols)).max(1);
        k.div_ceil(CHUNK_STEP).min(fit) * CHUNK_STEP
    }
}

impl MatVec {
    /// Specialization constants of `mul_mat_vec`.
    pub fn spec(&self, grouped: bool, norm: u32) -> [u32; 7] {
        [self.local, u32::from(grouped), self.cols, self.rows, self.units, self.chunk, norm]
    }

    /// Grid over `n` weight rows and `z` blocks of columns. With fewer workgroups than blocks of rows,
    /// all have as many, or one less.
    pub fn grid(&self, n: u32, z: u32) -> UVec3 {
        let blocks = n.div_ceil(self.rows_per_group);
        let groups = blocks.div_ceil(blocks.div_ceil(self.max_groups));
        let folded = grid::fold(groups.into());
        UVec3::new(folded.x, folded.y, z)
    }
}

/// Words that an invocation has of a unit.
fn unit_words(ty: GgmlType) -> u32 {
    let bits = ty.block_bytes() * 8 / ty.block_len();
    UNIT * bits as u32 / 32 + UNIT_HEAD_WORDS
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: MatVecSizes = MatVecSizes {
        subgroup: 32,
        subgroups: 8,
        rows: 4,
        words: 64,
        sums: 16,
        groups: 100,
        tile_bytes: 32768,
    };

    #[test]
    fn one_column_of_short_blocks_loads_most_at_once() {
        let t = SIZES.shape(GgmlType::Q4_K, 2048, 1, 1);
        assert_eq!((t.cols, t.rows, t.units, t.chunk), (1, 4, 2, 2048));
        let t = SIZES.shape(GgmlType::F32, 2048, 1, 1);
        assert_eq!((t.rows, t.units), (1, 1));
        assert_eq!(SIZES.shape(GgmlType::F32, 2048, 1, 2).rows, 2);
    }

    #[test]
    fn many_columns_share_the_tile() {
        for m in 1..=8 {
            for k in [1, 100, 128, 768, 4096, 65536] {
                let t = SIZES.shape(GgmlType::Q4_0, k, m, 1);
                assert!(t.cols >= m && t.rows * t.cols <= 16 && t.units >= 1);
                assert!(t.chunk.is_multiple_of(CHUNK_STEP));
                assert!(t.chunk / CHUNK_STEP * CHUNK_STEP_BYTES * t.cols <= 32768);
            }
        }
    }

    #[test]
    fn grids_are_even() {
        let t = SIZES.shape(GgmlType::Q4_K, 2048, 1, 1);
        assert_eq!(t.grid(31, 3), UVec3::new(1, 1, 3));
        assert_eq!(t.grid(32 * 100, 1), UVec3::new(100, 1, 1));
        assert_eq!(t.grid(32 * 101, 1), UVec3::new(51, 1, 1));
    }
}
