//! Kernels, tiles and splits of attention: pure functions of shapes. `flash_attn` runs everywhere;
//! `flash_attn_cm` on matrix units, for many rows and caches of less than f32.

use super::kernels::KernelKey;
use super::kv::KvType;
use crate::push::{FlashAttn, FlashAttnCm, PushConstants};
use crate::vk::{DeviceInfo, DeviceKind};
use std::fmt;

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
/// Rows from which matrix units are worth it: fewer leave most of a matrix empty.
const MATRIX_MIN_ROWS: u32 = 32;
/// Registers of an invocation, of which a GPU has at most 255 (NVIDIA, AMD).
const REGISTERS: u32 = 255;

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

/// What else a kernel is specialized for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionKind {
    /// Type of cached keys.
    pub type_k: KvType,
    /// Type of cached values.
    pub type_v: KvType,
    /// Whether heads have sinks.
    pub sinks: bool,
    /// Whether scores have a soft cap.
    pub softcap: bool,
}

/// A kernel with its sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionTile {
    /// BR: rows of a workgroup.
    pub rows: u32,
    /// BC: keys in shared memory at a time.
    pub keys: u32,
    /// Threads of a workgroup.
    pub local_size: u32,
    /// `flash_attn_cm`'s own sizes; none: `flash_attn`.
    pub matrix: Option<MatrixAttention>,
}

/// What `flash_attn_cm` is specialized for beyond rows and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MatrixAttention {
    /// m and n = k of one matrix product.
    pub shape: [u32; 2],
    /// Its own sizes.
    pub sizes: MatrixSizes,
    /// Whether a subgroup's invocations run in step: on a CPU.
    pub lockstep: bool,
}

/// Sizes of `flash_attn_cm` for any shape of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MatrixSizes {
    /// Matrices below each other that a subgroup has.
    pub row_blocks: u32,
    /// Subgroups of a workgroup.
    pub subgroups: u32,
    /// Keys in shared memory at a time.
    pub keys: u32,
    /// Where queries stay.
    pub queries: Held,
    /// Whether keys and values take turns in the same shared memory.
    pub turns: bool,
    /// Whether the next loads run while products do.
    pub ahead: bool,
    /// How weights become operands.
    pub weights: Weights,
}

/// Where something stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Held {
    /// In registers.
    Registers,
    /// In shared memory.
    Shared,
}

/// How sums of a product, the weights, become an operand of the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Weights {
    /// By an instruction of VK_NV_cooperative_matrix2; on devices without it as `Copied`.
    Converted,
    /// Within registers, if the kernel finds that layouts allow it, else as `Carried`.
    Copied,
    /// Through shared memory.
    Carried,
}

impl AttentionShape {
    /// That of `n_tokens` with so many heads of queries and of keys, of so many dimensions of keys and values.
    pub fn new(
        (n_head, n_head_kv): (u32, u32),
        (head_k, head_v): (u32, u32),
        n_tokens: u32,
    ) -> Self {
        AttentionShape { head_k, head_v, rows: n_tokens * (n_head / n_head_kv) }
    }

    /// The tile of `flash_attn` with the most scores that fits into shared memory; of equals the one with
    /// more rows, for which keys are decoded less often.
    pub fn tile(self, subgroup: u32) -> AttentionTile {
        let powers = |from: u32, to: u32| (from.ilog2()..=to.ilog2()).map(|e| 1 << e);
        let most_rows = self.rows.max(1).next_power_of_two().min(MAX_ROWS);
        let tile = |rows, keys| AttentionTile {
            rows,
            keys,
            local_size: local_size(rows, subgroup),
            matrix: None,
        };
        powers(MIN_KEYS, MAX_KEYS)
            .flat_map(|keys| powers(1, most_rows).map(move |rows| tile(rows, keys)))
            .filter(|tile| self.shared_bytes(*tile) <= SHARED_BYTES)
            .max_by_key(|tile| (tile.rows * tile.keys, tile.rows))
            .unwrap_or(tile(1, MIN_KEYS))
    }

    /// Blocks of rows: the grid's x.
    pub fn row_blocks(self, tile: AttentionTile) -> u32 {
        self.rows.div_ceil(tile.rows)
    }

    /// Shared memory of the shader, as its declarations add up.
    pub fn shared_bytes(self, tile: AttentionTile) -> u32 {
        if let Some(matrix) = tile.matrix {
            return matrix.shared_bytes(self);
        }
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

impl AttentionTile {
    /// The pipeline for heads of `shape`.
    pub fn kernel(self, shape: AttentionShape, kind: AttentionKind) -> KernelKey {
        let heads = [self.local_size, shape.head_k, shape.head_v];
        let (k, v) = (kind.type_k.spec(), kind.type_v.spec());
        let sinks = u32::from(kind.sinks);
        let Some(m) = self.matrix else {
            let spec = [heads.as_slice(), &[k, v, self.rows, self.keys, sinks]];
            return KernelKey::new::<FlashAttn>(&spec.concat());
        };
        let softcap = u32::from(kind.softcap);
        let spec = [heads.as_slice(), &[k, v, sinks, softcap], &m.spec()];
        let module = format!("{}.{}", FlashAttnCm::SHADER, m.variant());
        KernelKey { module, spec: spec.concat() }
    }
}

impl MatrixAttention {
    fn spec(self) -> [u32; 10] {
        let ([m, n], of) = (self.shape, self.sizes);
        let queries = u32::from(of.queries == Held::Registers);
        let weights = u32::from(of.weights == Weights::Copied);
        let [turns, ahead, lockstep] = [of.turns, of.ahead, self.lockstep].map(u32::from);
        [m, n, of.subgroups, of.row_blocks, of.keys, queries, turns, ahead, weights, lockstep]
    }

    /// Of the module.
    fn variant(self) -> &'static str {
        if self.sizes.weights == Weights::Converted { "nv" } else { "khr" }
    }

    /// Rows of a workgroup.
    fn rows(self) -> u32 {
        self.sizes.row_blocks * self.sizes.subgroups * self.shape[0]
    }

    /// Units of 16 bytes that a row of keys or values takes in shared memory.
    fn row_units(self, head: u32) -> u32 {
        (head.next_multiple_of(self.shape[1]) / 8) | 1
    }

    /// Units of the tile of keys and values, which results also use.
    fn tile_units(self, shape: AttentionShape) -> u32 {
        let ([m, n], of) = (self.shape, self.sizes);
        let k = of.keys * self.row_units(shape.head_k);
        let v = of.keys * self.row_units(shape.head_v);
        let both = if of.turns { k.max(v) } else { k + v };
        both.max(of.subgroups * m * ((n / 4) | 1))
    }

    fn shared_bytes(self, shape: AttentionShape) -> u32 {
        let ([m, n], of) = (self.shape, self.sizes);
        let queries = match of.queries {
            Held::Registers => 0,
            Held::Shared => self.rows() * self.row_units(shape.head_k),
        };
        let (stage, coordinates) = (of.subgroups * m * n * 2, m * n * 4);
        (self.tile_units(shape) + queries) * 16 + stage + coordinates + self.rows() * 20
    }

    /// Registers that an invocation of a subgroup needs, about: what lives through the loop over keys.
    fn registers(self, shape: AttentionShape, subgroup: u32) -> u32 {
        let ([m, n], of) = (self.shape, self.sizes);
        let sums = (m * n).div_ceil(subgroup);
        let operand = (m * n).div_ceil(2 * subgroup);
        let blocks = |length: u32| length.div_ceil(n);
        let queries = match of.queries {
            Held::Registers => blocks(shape.head_k) * operand,
            Held::Shared => 0,
        };
        let row = blocks(shape.head_v) + blocks(of.keys) + 2; // results, scores, m, l
        let head = shape.head_k.max(shape.head_v).next_multiple_of(n);
        let ahead = if of.ahead { of.keys * head / 2 / (of.subgroups * subgroup) } else { 0 };
        of.row_blocks * (row * sums + queries) + ahead + 24
    }
}

/// Sizes with the next loads ahead.
pub(super) const fn sizes(
    row_blocks: u32,
    subgroups: u32,
    keys: u32,
    queries: Held,
    turns: bool,
) -> MatrixSizes {
    let weights = Weights::Converted;
    MatrixSizes { row_blocks, subgroups, keys, queries, turns, ahead: true, weights }
}

/// Of a GPU, in order of preference.
const GPU_SIZES: &[MatrixSizes] = &[
    sizes(1, 8, 64, Held::Registers, false),
    sizes(1, 8, 32, Held::Registers, false),
    sizes(1, 8, 32, Held::Registers, true),
    sizes(1, 4, 64, Held::Registers, false),
    sizes(1, 4, 32, Held::Registers, false),
    sizes(1, 4, 32, Held::Registers, true),
    sizes(2, 4, 32, Held::Shared, true),
    sizes(1, 2, 32, Held::Registers, false),
    sizes(1, 2, 32, Held::Registers, true),
    sizes(1, 2, 16, Held::Registers, true),
    sizes(1, 1, 16, Held::Registers, true),
];
/// Of a CPU that plays GPU: for tests, since its matrix units are no faster than its others.
const CPU_SIZES: &[MatrixSizes] = &[
    sizes(1, 4, 16, Held::Registers, false),
    sizes(1, 4, 16, Held::Registers, true),
    sizes(1, 2, 16, Held::Registers, true),
];

/// What attention needs to know of a device's matrix units.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionUnits {
    /// m and n = k of one matrix product.
    shape: [u32; 2],
    subgroup: u32,
    shared_bytes: u32,
    max_invocations: u32,
    registers: u32,
    /// Whether sums convert to operands.
    converts: bool,
    cpu: bool,
    sizes: &'static [MatrixSizes],
}

impl AttentionUnits {
    /// Those of a device, if the kernel can use them: it counts on subgroups of one size.
    pub fn new(info: &DeviceInfo) -> Option<Self> {
        let matrix = info.half_matrix().filter(|s| s.n == s.k)?;
        let one_size = info.subgroup.selectable || info.subgroup.min == info.subgroup.max;
        let cpu = info.kind == DeviceKind::Cpu;
        one_size.then_some(AttentionUnits {
            shape: [matrix.m, matrix.n],
            subgroup: info.subgroup.default,
            shared_bytes: info.limits.shared_bytes,
            max_invocations: info.limits.workgroup_invocations,
            registers: if cpu { u32::MAX } else { REGISTERS },
            converts: info.optional.cooperative_matrix2.conversions,
            cpu,
            sizes: if cpu { CPU_SIZES } else { GPU_SIZES },
        })
    }

    /// With these sizes for everything they fit.
    pub fn only(self, sizes: &'static MatrixSizes) -> Self {
        AttentionUnits { sizes: std::slice::from_ref(sizes), registers: u32::MAX, ..self }
    }

    /// The tiles that the device can run, in order of preference.
    pub fn candidates(
        self,
        shape: AttentionShape,
        type_k: KvType,
        type_v: KvType,
    ) -> impl Iterator<Item = AttentionTile> {
        let usable = ![type_k, type_v].contains(&KvType::F32);
        let sizes = if usable { self.sizes } else { &[] };
        sizes.iter().map(move |s| self.tile(*s)).filter(move |t| self.fits(shape, *t))
    }

    /// The tile to use: the first whose block is not larger than the rows; none for few rows.
    pub fn choose(
        self,
        shape: AttentionShape,
        type_k: KvType,
        type_v: KvType,
    ) -> Option<AttentionTile> {
        if shape.rows < MATRIX_MIN_ROWS {
            return None;
        }
        let tiles = || self.candidates(shape, type_k, type_v);
        tiles().find(|t| t.rows <= shape.rows).or_else(|| tiles().min_by_key(|t| t.rows))
    }

    /// The tile of these sizes.
    pub fn tile(self, mut sizes: MatrixSizes) -> AttentionTile {
        if sizes.weights == Weights::Converted && !self.converts {
            sizes.weights = Weights::Copied;
        }
        let matrix = MatrixAttention { shape: self.shape, sizes, lockstep: self.cpu };
        AttentionTile {
            rows: matrix.rows(),
            keys: sizes.keys,
            local_size: sizes.subgroups * self.subgroup,
            matrix: Some(matrix),
        }
    }

    /// Whether the device can run the tile.
    pub fn fits(self, shape: AttentionShape, tile: AttentionTile) -> bool {
        let Some(matrix) = tile.matrix else { return true };
        let [m, n] = self.shape;
        // On their way to registers, queries of a subgroup pass through the tile of keys.
        let queries_pass = m * matrix.row_units(shape.head_k) <= matrix.tile_units(shape);
        tile.keys.is_multiple_of(n)
            && queries_pass
            && tile.local_size <= self.max_invocations
            && shape.shared_bytes(tile) <= self.shared_bytes
            && matrix.registers(shape, self.subgroup) <= self.registers
    }
}

impl fmt::Display for AttentionTile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} rows × {} keys", self.rows, self.keys)?;
        let Some(matrix) = self.matrix else { return write!(f, ", f32") };
        let ([m, n], of) = (matrix.shape, matrix.sizes);
        write!(f, ", {} subgroups, matrices {m}×{n}×{n}", of.subgroups)?;
        let notes = [
            (of.queries == Held::Shared, "q in shared memory"),
            (of.turns, "keys and values in turn"),
            (!of.ahead, "no loads ahead"),
            (of.weights == Weights::Copied, "weights copied"),
            (of.weights == Weights::Carried, "weights through shared memory"),
        ];
        notes.iter().filter(|(is, _)| *is).try_for_each(|(_, note)| write!(f, ", {note}"))
    }
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

    fn units(m: u32, n: u32, subgroup: u32, shared_bytes: u32) -> AttentionUnits {
        AttentionUnits {
            shape: [m, n],
            subgroup,
            shared_bytes,
            max_invocations: 1024,
            registers: REGISTERS,
            converts: true,
            cpu: false,
            sizes: GPU_SIZES,
        }
    }

    #[test]
    fn matrix_units_have_a_tile_for_every_head() {
        for (m, n, subgroup) in [(16, 16, 32), (16, 16, 64), (8, 16, 16)] {
            for shared_bytes in [32768, 49152, 65536] {
                let units = units(m, n, subgroup, shared_bytes);
                for head in [32, 64, 72, 80, 96, 128, 192] {
                    for rows in [MATRIX_MIN_ROWS, 64, 100, 16384] {
                        let shape = AttentionShape { head_k: head, head_v: head, rows };
                        let tile = units.choose(shape, KvType::F16, KvType::Q8_0);
                        assert!(tile.is_some_and(|t| units.fits(shape, t)), "{units:?} {shape:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn few_rows_and_f32_caches_have_the_plain_kernel() {
        let units = units(16, 16, 32, 49152);
        let shape = AttentionShape { head_k: 128, head_v: 128, rows: 16384 };
        assert_eq!(units.choose(shape, KvType::F16, KvType::F32), None);
        assert_eq!(
            units.choose(AttentionShape { rows: 8, ..shape }, KvType::F16, KvType::F16),
            None
        );
        let tile = units.choose(shape, KvType::F16, KvType::F16);
        assert_eq!(tile.map(|t| (t.rows, t.keys)), Some((128, 64)));
    }
}
