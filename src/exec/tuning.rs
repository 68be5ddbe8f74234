//! Sizes of workgroups and tiles: one table, chosen by the device's kind and its subgroups.
//!
//! On a CPU that plays GPU (lavapipe) barriers and many workgroups are what costs; on a GPU it is
//! loads that do not coalesce and idle lanes.

use super::attention::{self, AttentionShape, AttentionTile, AttentionUnits};
use super::decode_attention::{DecodeAttention, DecodeTile};
use super::int8::Int8Products;
use super::kv::KvType;
use super::mat_vec::{Activations, INT16_ROWS, MatVecSizes};
use super::matrix::MatrixUnits;
use crate::graph::fuse::Fusions;
use crate::model::hparams::AttentionParams;
use crate::vk::{DeviceInfo, DeviceKind};

/// Counters that workgroups of a dispatch can have: words behind the status word.
pub(super) const MAX_COUNTERS: u32 = 1023;
/// Workgroups that fill a large GPU.
const ENOUGH_WORKGROUPS: u64 = 256;

/// The sizes for one device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tuning {
    /// Invocations of a subgroup, as the driver prefers.
    pub subgroup: u32,
    /// Workgroup of elementwise kernels.
    pub elementwise: u32,
    /// Workgroup of kernels that go over a list together.
    pub scan: u32,
    /// Workgroups that look for the largest of a row of logits.
    pub top_parts: u32,
    /// Tile of the matrix product.
    pub mul_mat: MulMatTile,
    /// The same for products too small to give all of a device something to do.
    mul_mat_small: MulMatTile,
    /// Kernels for few rows of x.
    pub mat_vec: MatVecSizes,
    /// Attention for few tokens.
    pub decode_attention: DecodeAttention,
    /// Rows of x up to which the matrix-vector kernel is used.
    mat_vec_max: u32,
    /// From so many tokens on, pairs are grouped by expert.
    pub group_from: u32,
    /// Share of the bus that the grouped product gets when it reads experts in host memory.
    grouped_host_read_share: f64,
    /// Speed of the plain units, to within some factor: for plans.
    plain_flops_per_ns: f64,
    /// What products of many rows run on, if not on the plain units.
    pub matrix: Option<MatrixUnits>,
    /// Or these integer products.
    pub int8: Option<Int8Products>,
    /// Why these or those.
    pub units_why: &'static str,
    /// What attention of many rows runs on, if not on the plain units.
    pub attention_units: Option<AttentionUnits>,
}

/// Tile of the matrix product: weight rows, rows of x, depth, and what one invocation has of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MulMatTile {
    /// Weight rows.
    pub bm: u32,
    /// Rows of x.
    pub bn: u32,
    /// Depth.
    pub(super) bk: u32,
    /// Weight rows of an invocation.
    pub(super) tm: u32,
    /// Rows of x of an invocation.
    pub(super) tn: u32,
}

impl MulMatTile {
    /// Size of the workgroup.
    pub(super) fn invocations(&self) -> u32 {
        (self.bm / self.tm) * (self.bn / self.tn)
    }

    /// Shared memory, as shaders/mul_mat.comp adds it up.
    pub(super) fn shared_bytes(&self) -> u32 {
        4 * (self.bk * (self.bm + self.bn + 2) + self.bn)
    }

    /// This tile, or `small` if a product of `n` weight rows with `m` rows of x has too few for a large GPU.
    pub(super) fn or_if_few(self, small: MulMatTile, n: u32, m: u32) -> Self {
        let groups = u64::from(n.div_ceil(self.bm)) * u64::from(m.div_ceil(self.bn));
        if groups < ENOUGH_WORKGROUPS { small } else { self }
    }

    /// The same for lists whose tiles have so many rows of x, which is a multiple of what an invocation has.
    pub fn with_columns(self, bn: u32) -> Self {
        MulMatTile { bn, ..self }
    }

    /// Specialization constants of `mul_mat`.
    pub fn spec(&self, grouped: bool) -> [u32; 7] {
        [self.invocations(), u32::from(grouped), self.bm, self.bn, self.bk, self.tm, self.tn]
    }
}

impl Tuning {
    /// The sizes for a device.
    pub fn new(info: &DeviceInfo) -> Self {
        let plain = Self::plain(info);
        let (units, units_why) = Units::of(info);
        let plain = Tuning { units_why, ..plain };
        match units {
            Units::Matrix(units) => {
                Tuning { matrix: Some(units), attention_units: AttentionUnits::new(info), ..plain }
            }
            Units::Int8(products) => Tuning { int8: Some(products), ..plain },
            Units::Plain => plain,
        }
    }

    /// Without matrix units.
    fn plain(info: &DeviceInfo) -> Self {
        let subgroup = info.subgroup.default;
        let int16_rows = int16_rows(info);
        match info.kind {
            DeviceKind::Cpu => Tuning {
                subgroup,
                elementwise: 64,
                scan: subgroup,
                top_parts: 4,
                mul_mat: MulMatTile { bm: 32, bn: 32, bk: 32, tm: 8, tn: 8 },
                mul_mat_small: MulMatTile { bm: 32, bn: 32, bk: 32, tm: 8, tn: 8 },
                mat_vec: MatVecSizes::new(info, int16_rows),
                decode_attention: DecodeAttention::new(info),
                mat_vec_max: 32,
                group_from: 33,
                grouped_host_read_share: 1.0,
                plain_flops_per_ns: 20.0,
                matrix: None,
                int8: None,
                units_why: "",
                attention_units: None,
            },
            _ => Tuning {
                subgroup,
                elementwise: 256,
                scan: 256,
                top_parts: 64,
                mul_mat: MulMatTile { bm: 64, bn: 64, bk: 32, tm: 8, tn: 4 },
                mul_mat_small: MulMatTile { bm: 32, bn: 32, bk: 32, tm: 4, tn: 2 },
                mat_vec: MatVecSizes::new(info, int16_rows),
                decode_attention: DecodeAttention::new(info),
                mat_vec_max: 8,
                group_from: 9,
                // H200: 20 of 49 GB/s, too few loads in flight.
                grouped_host_read_share: 0.4,
                plain_flops_per_ns: 2e3,
                matrix: None,
                int8: None,
                units_why: "",
                attention_units: None,
            },
        }
    }

    /// One tile for all products without matrix units.
    pub(super) fn set_mul_mat(&mut self, tile: MulMatTile) {
        (self.mul_mat, self.mul_mat_small) = (tile, tile);
    }

    /// Tile of a dense product of `n` weight rows with `m` rows of x.
    pub fn mul_mat_dense(&self, n: u32, m: u32) -> MulMatTile {
        self.mul_mat.or_if_few(self.mul_mat_small, n, m)
    }

    /// What passes of `n_tokens` do in one op.
    pub fn fusions(&self, a: &AttentionParams) -> Fusions {
        let many = self.mat_vec_max + 1;
        Fusions {
            half_from: self.matrix.map(|_| many),
            int8_from: self.int8.map(|_| many),
            gate_up_to: self.mat_vec_max,
            few_to: self.mat_vec_max,
            attention_to: (1..=self.mat_vec_max)
                .rev()
                .find(|&n_tokens| self.decode_tile(a, n_tokens).is_some())
                .unwrap_or(0),
        }
    }

    /// The tile of fused attention for few tokens.
    fn decode_tile(&self, a: &AttentionParams, n_tokens: u32) -> Option<DecodeTile> {
        let tile = self.decode_attention.tile(attention_shape(a, n_tokens), n_tokens, true)?;
        let counters = tile.row_blocks * a.n_head_kv;
        (self.is_few(n_tokens) && counters <= MAX_COUNTERS).then_some(tile)
    }

    /// Pairs per tile of the grouped product, of experts with so many pairs on average.
    pub fn group_tile(&self, per_expert: u32) -> u32 {
        match (self.matrix, self.int8) {
            (Some(units), _) => units.group_tile(per_expert),
            (None, Some(products)) => products.tile.bn,
            (None, None) => self.mul_mat.bn,
        }
    }

    /// Workgroup size and rows per workgroup of a norm over rows of `n`.
    pub fn rms_norm(&self, n: u32, n_rows: u32) -> (u32, u32) {
        let many_short = n <= 8 * self.subgroup.max(32) && n_rows > 1;
        match many_short {
            true => (self.subgroup * 4, 4),
            false => (self.scan, 1),
        }
    }

    /// Whether a product of `m` rows of x is for the kernels that read each weight once.
    pub fn is_few(&self, m: u32) -> bool {
        m <= self.mat_vec_max
    }

    /// The sizes of what passes of few tokens take, for tables.
    pub fn few_tokens(&self) -> String {
        let (v, a) = (self.mat_vec, self.decode_attention);
        format!(
            "integers from {} rows, {} subgroups, {} rows, {} words, {} groups, router {} rows; attention {} rows, {} × {} or {} × {} runs, {} groups",
            v.int16_rows.map_or("no".into(), |rows| rows.to_string()),
            v.subgroups,
            v.rows,
            v.words,
            v.groups,
            v.router_rows,
            a.rows,
            a.short.keys,
            a.short.runs,
            a.long.keys,
            a.long.runs,
            a.enough
        )
    }

    /// Rows of x up to which the matrix-vector kernel is used.
    pub fn mat_vec_max(&self) -> u32 {
        self.mat_vec_max
    }

    /// Share of the bus that a pass gets when its kernels read experts in host memory.
    pub fn host_read_share(&self, n_tokens: u32) -> f64 {
        if n_tokens >= self.group_from { self.grouped_host_read_share } else { 1.0 }
    }

    /// Multiplications and additions of many rows in a nanosecond, by rule of thumb: plans are made before
    /// anything is measured.
    pub fn flops_per_ns(&self) -> f64 {
        match (self.matrix, self.int8) {
            (Some(_), _) => 10.0 * self.plain_flops_per_ns,
            (None, Some(_)) => 2.0 * self.plain_flops_per_ns,
            (None, None) => self.plain_flops_per_ns,
        }
    }

    /// Ranges of keys that attention computes apart, so that small passes keep the device busy: counted
    /// for a cache of f16, whatever the cache's types are.
    pub fn attention_splits(&self, a: &AttentionParams, n_tokens: u32, n_kv: u32) -> u32 {
        if let Some(tile) = self.decode_tile(a, n_tokens) {
            return self.decode_attention.n_splits(tile, a.n_head_kv, n_kv);
        }
        let shape = attention_shape(a, n_tokens);
        let tile = self.attention(shape, KvType::F16, KvType::F16);
        attention::n_splits(shape.row_blocks(tile), a.n_head_kv, n_kv)
    }

    /// Kernel and tile of attention.
    pub fn attention(
        &self,
        shape: AttentionShape,
        type_k: KvType,
        type_v: KvType,
    ) -> AttentionTile {
        let matrix = self.attention_units.and_then(|units| units.choose(shape, type_k, type_v));
        matrix.unwrap_or_else(|| shape.tile(self.subgroup))
    }
}

fn attention_shape(a: &AttentionParams, n_tokens: u32) -> AttentionShape {
    AttentionShape::new((a.n_head, a.n_head_kv), (a.head_k, a.head_v), n_tokens)
}

/// Names what products of many rows run on, for experiments and tests.
const MATRIX_VARIABLE: (&str, &[&str]) = ("VKMOE_MATRIX", &["auto", "coopmat", "int8", "f32"]);
/// Names what activations are in products of few rows, likewise.
const VECTOR_VARIABLE: (&str, &[&str]) = ("VKMOE_VECTOR", &["auto", "int16", "f32"]);

/// The value of such a variable; `auto` if it has none that is known.
fn wanted((variable, values): (&str, &[&'static str])) -> &'static str {
    let value = std::env::var(variable).unwrap_or_default();
    let known = values.iter().find(|&&known| known == value).copied();
    if known.is_none() && !value.is_empty() {
        log::warn!("{variable}={value}: not one of {}; auto is taken", values.join(", "));
    }
    known.unwrap_or("auto")
}

/// From how many weight rows of a workgroup on activations are integers in products of few rows, where packed
/// dot products are fast, which a CPU's are not.
fn int16_rows(info: &DeviceInfo) -> Option<u32> {
    let fast = info.kind != DeviceKind::Cpu && info.optional.integer_dot_accelerated;
    let asked = match wanted(VECTOR_VARIABLE) {
        "int16" => Some(0),
        "f32" => None,
        _ => fast.then_some(INT16_ROWS),
    };
    asked.filter(|_| Activations::of(info).contains(&Activations::Int16))
}

/// What products of many rows run on.
enum Units {
    Matrix(MatrixUnits),
    Int8(Int8Products),
    Plain,
}

impl Units {
    /// Those that are asked for, if the device has them. Else matrix units, before fast integer products,
    /// but not on a CPU, where neither is faster. And why.
    fn of(info: &DeviceInfo) -> (Units, &'static str) {
        let matrix = MatrixUnits::new(info).map(Units::Matrix);
        let int8 = Int8Products::new(info).map(Units::Int8);
        let asked = |units: Option<Units>| match units {
            Some(units) => (units, "asked for by VKMOE_MATRIX"),
            None => (Units::Plain, "the device has not what VKMOE_MATRIX asks for"),
        };
        match (wanted(MATRIX_VARIABLE), matrix, int8) {
            ("coopmat", matrix, _) => asked(matrix),
            ("int8", _, int8) => asked(int8),
            ("f32", ..) => asked(Some(Units::Plain)),
            _ if info.kind == DeviceKind::Cpu => (Units::Plain, "a CPU is not faster with others"),
            (_, Some(matrix), _) => (matrix, "matrix units for f16"),
            (_, None, Some(int8)) if info.optional.integer_dot_accelerated => {
                (int8, "no matrix units for f16, but fast integer dot products")
            }
            _ => (Units::Plain, "neither matrix units for f16 nor fast integer dot products"),
        }
    }
}
