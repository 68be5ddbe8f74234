//! Sizes of the kernels that multiply with few columns (shaders/include/mat_vec.glsl): pure functions of
//! shapes and of what a device is good at.
//!
//! What limits them on a GPU is how many bytes are on their way at a time, so a subgroup loads several
//! units of several rows before it uses the first; and how often activations are staged, so a workgroup has
//! many rows. What is on its way is in registers, of which more mean fewer subgroups at a time.

use super::grid;
use super::kernels::KernelKey;
use crate::gguf::GgmlType;
use crate::graph::Weight;
use crate::push::PushConstants;
use crate::vk::{DeviceInfo, DeviceKind};
use glam::UVec3;

/// Columns handled together, at most.
const MAX_COLS: u32 = 8;
/// Elements of a unit: `load_unit` of shaders/include/weights.glsl.
const UNIT: u32 = 32;
/// Words of a unit besides its elements: scales, and words that it shares with its neighbours.
const UNIT_HEAD_WORDS: u32 = 4;
/// Chunks are multiples of this.
const CHUNK_STEP: u32 = 128;
/// Shared memory of so much of a chunk, as floats: a ninth of the tile's vectors may be left out. Integers
/// take less.
const CHUNK_STEP_BYTES: u32 = CHUNK_STEP * 4 + CHUNK_STEP / 32 * 16;
/// Lanes that find the scale of integers together.
const SCALE_LANES: u32 = 2;
/// Weight rows of a workgroup from which on it pays to make integers: each workgroup does so for itself. H200:
/// with 8 rows products are about as fast, with 32 faster by a fifth.
pub const INT16_ROWS: u32 = 16;
/// Shared memory of a workgroup for activations: several workgroups are to fit side by side.
const TILE_BYTES: u32 = 28 << 10;

/// What activations are in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activations {
    /// Floats, as everywhere else.
    F32,
    /// Integers of two bytes with a scale for eight of them, where weights are bytes (shaders/include/tile_int16.glsl).
    Int16,
}

impl Activations {
    /// Those that a device can have, the best on a GPU first.
    pub fn of(info: &DeviceInfo) -> &'static [Activations] {
        match info.optional.integer_dot_product && info.subgroup.default >= SCALE_LANES {
            true => &[Activations::Int16, Activations::F32],
            false => &[Activations::F32],
        }
    }
}

/// What a device is good at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatVecSizes {
    /// Weight rows of a workgroup from which on activations are integers; `None`: never.
    pub int16_rows: Option<u32>,
    /// Invocations of a subgroup.
    pub subgroup: u32,
    /// Subgroups of a workgroup.
    pub subgroups: u32,
    /// Weight rows of a subgroup, at most.
    pub rows: u32,
    /// Words of weights that an invocation has on their way.
    pub words: u32,
    /// Sums of an invocation.
    pub sums: u32,
    /// Workgroups that fill the device: subgroups have fewer rows rather than that there are fewer.
    pub enough: u32,
    /// Workgroups at most; they stride over the rows.
    pub groups: u32,
    /// Shared memory for activations.
    pub tile_bytes: u32,
    /// Weight rows of a router's workgroup.
    pub router_rows: u32,
}

/// Shape of one launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatVec {
    /// What activations are in shared memory.
    pub activations: Activations,
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
    /// Workgroups.
    pub groups: UVec3,
}

/// What a product is like.
#[derive(Clone, Copy, Debug)]
struct Shape {
    ty: GgmlType,
    /// Elements that a lane goes over.
    k: u32,
    /// Weight rows.
    n: u32,
    /// Columns, in as many blocks as need be.
    m: u32,
    /// Blocks that are columns of their own.
    z: u32,
    /// Weight rows that belong together.
    step: u32,
}

impl MatVecSizes {
    /// Those of a device.
    pub fn new(info: &DeviceInfo, int16_rows: Option<u32>) -> Self {
        let subgroup = info.subgroup.default;
        let tile_bytes = info.limits.shared_bytes.min(TILE_BYTES);
        let subgroups =
            |threads: u32| (threads.min(info.limits.workgroup_invocations) / subgroup).max(1);
        match info.kind {
            // Barriers and code that is compiled are what costs.
            DeviceKind::Cpu => MatVecSizes {
                int16_rows,
                subgroup,
                subgroups: 4,
                rows: 1,
                words: 24,
                sums: 8,
                enough: 4,
                groups: 64,
                tile_bytes,
                router_rows: 4,
            },
            _ => MatVecSizes {
                int16_rows,
                subgroup,
                subgroups: subgroups(256),
                // Short code: a pass has to fetch each kernel's anew (benches/RESULTS.md).
                rows: 2,
                words: 16,
                sums: 16,
                enough: 256,
                groups: 528,
                tile_bytes,
                router_rows: 1,
            },
        }
    }

    /// A product with `m` columns.
    pub fn dense(&self, w: Weight, m: u32) -> MatVec {
        self.shape(Shape { ty: w.ty, k: w.k, n: w.n, m, z: 1, step: 1 })
    }

    /// Products of matrices of one type, of `n` rows each, with the same `m` columns.
    pub fn several(&self, w: Weight, n: &[u32], m: u32) -> MatVec {
        let t = self.shape(Shape { ty: w.ty, k: w.k, n: n.iter().sum(), m, z: 1, step: 1 });
        let blocks = n.iter().map(|n| n.div_ceil(t.rows * self.subgroups)).sum();
        MatVec { groups: self.grid(blocks, t.groups.z), ..t }
    }

    /// Products of `pairs` with an expert each.
    pub fn by_expert(&self, w: Weight, pairs: u32) -> MatVec {
        self.shape(Shape { ty: w.ty, k: w.k, n: w.n, m: 1, z: pairs, step: 1 })
    }

    /// Gate and up of `n` rows each, for `m` columns, or `pairs` with an expert each.
    pub fn gate_up(&self, w: Weight, n: u32, m: u32, pairs: Option<u32>) -> MatVec {
        let (m, z) = pairs.map_or((m, 1), |pairs| (1, pairs));
        self.shape(Shape { ty: w.ty, k: w.k, n: 2 * n, m, z, step: 2 })
    }

    /// Down projections of `n_used` experts that become one row, for `n_tokens`.
    pub fn down_combine(&self, w: Weight, n_used: u32, n_tokens: u32) -> MatVec {
        let k = w.k.next_multiple_of(CHUNK_STEP) * n_used;
        self.shape(Shape { ty: w.ty, k, n: w.n, m: 1, z: n_tokens, step: 1 })
    }

    /// A norm, the router and the choice (shaders/router_vec.comp), for `n_tokens`: the workgroup's threads
    /// share the elements of its rows.
    pub fn router(&self, w: Weight, n_tokens: u32) -> MatVec {
        let cols = n_tokens.next_power_of_two().min(MAX_COLS);
        let rows = self.router_rows;
        let subgroups = w.k.div_ceil(8 * self.subgroup).clamp(1, self.subgroups);
        MatVec {
            activations: Activations::F32,
            local: self.subgroup * subgroups,
            cols,
            rows,
            units: 1,
            chunk: 0,
            groups: UVec3::new(w.n.div_ceil(rows), n_tokens.div_ceil(cols), 1),
        }
    }

    fn shape(&self, p: Shape) -> MatVec {
        let cols = p.m.next_power_of_two().min(MAX_COLS);
        let z = p.z * p.m.div_ceil(cols);
        let unit_words = unit_words(p.ty);
        let most = self.rows.min(self.words / unit_words).min(self.sums / cols);
        let busy = p.n * z / (self.enough * self.subgroups);
        let rows = (most.min(busy) / p.step * p.step).max(p.step);
        let lane_units = p.k.div_ceil(UNIT).div_ceil(self.subgroup).max(1);
        let units = (self.words / (rows * unit_words)).clamp(1, lane_units);
        let groups = self.grid(p.n.div_ceil(rows * self.subgroups), z);
        MatVec {
            activations: self.activations(p, groups),
            local: self.subgroup * self.subgroups,
            cols,
            rows,
            units,
            chunk: self.chunk(p.k, cols),
            groups,
        }
    }

    /// Integers where weights are bytes and a workgroup has enough rows.
    fn activations(&self, p: Shape, groups: UVec3) -> Activations {
        let rows = p.n / (groups.x * groups.y);
        match self.int16_rows {
            Some(least) if p.ty.block_len() > 1 && rows >= least => Activations::Int16,
            _ => Activations::F32,
        }
    }

    /// Whole rows where they fit.
    fn chunk(&self, k: u32, cols: u32) -> u32 {
        let fit = (self.tile_bytes / (CHUNK_STEP_BYTES * cols)).max(1);
        k.div_ceil(CHUNK_STEP).min(fit) * CHUNK_STEP
    }

    /// Over `blocks` of rows and `z` of columns. With fewer workgroups than blocks of rows, all have as
    /// many, or one less.
    fn grid(&self, blocks: u32, z: u32) -> UVec3 {
        let groups = (self.groups / z).max(1);
        let folded = grid::fold(blocks.div_ceil(blocks.div_ceil(groups)).into());
        UVec3::new(folded.x, folded.y, z)
    }
}

impl MatVec {
    /// The kernel of a shader for weights of a type.
    pub fn kernel<P: PushConstants>(&self, ty: GgmlType, spec: &[u32]) -> KernelKey {
        match self.activations {
            Activations::Int16 => KernelKey::of_type_int16::<P>(ty, spec),
            Activations::F32 => KernelKey::of_type::<P>(ty, spec),
        }
    }

    /// Specialization constants of `mul_mat_vec`, and the first ones of `gate_up_vec`.
    pub fn spec(&self, grouped: bool, norm: u32) -> [u32; 7] {
        [self.local, u32::from(grouped), self.cols, self.rows, self.units, self.chunk, norm]
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
        int16_rows: None,
        subgroup: 32,
        subgroups: 8,
        rows: 4,
        words: 64,
        sums: 16,
        enough: 60,
        groups: 100,
        tile_bytes: 32768,
        router_rows: 1,
    };

    fn weight(ty: GgmlType, k: u32, n: u32) -> Weight {
        Weight { id: crate::graph::WeightId(0), ty, k, n, n_expert: 8 }
    }

    #[test]
    fn one_column_of_short_blocks_loads_most_at_once() {
        let t = SIZES.dense(weight(GgmlType::Q4_K, 2048, 4096), 1);
        assert_eq!((t.cols, t.rows, t.units, t.chunk), (1, 4, 2, 2048));
        let t = SIZES.dense(weight(GgmlType::F32, 2048, 4096), 1);
        assert_eq!((t.rows, t.units), (1, 1));
        assert_eq!(SIZES.gate_up(weight(GgmlType::F32, 2048, 4096), 4096, 1, None).rows, 2);
    }

    #[test]
    fn few_rows_make_more_workgroups() {
        let w = weight(GgmlType::Q4_K, 2048, 512);
        let t = SIZES.dense(w, 1);
        assert_eq!((t.rows, t.groups), (1, UVec3::new(64, 1, 1)));
        let t = SIZES.by_expert(w, 8);
        assert_eq!((t.rows, t.groups), (4, UVec3::new(8, 1, 8)));
    }

    #[test]
    fn many_columns_share_the_tile() {
        for m in 1..=8 {
            for k in [1, 100, 128, 768, 4096, 65536] {
                let t = SIZES.dense(weight(GgmlType::Q4_0, k, 100_000), m);
                assert!(t.cols >= m && t.rows * t.cols <= 16 && t.units >= 1);
                assert!(t.chunk.is_multiple_of(CHUNK_STEP));
                assert!(t.chunk / CHUNK_STEP * CHUNK_STEP_BYTES * t.cols <= 32768);
            }
        }
    }

    #[test]
    fn workgroups_stride_evenly() {
        let groups = |n| SIZES.dense(weight(GgmlType::Q4_K, 2048, n), 1).groups;
        assert_eq!(groups(32 * 100), UVec3::new(100, 1, 1));
        assert_eq!(groups(32 * 101), UVec3::new(51, 1, 1));
    }
}
