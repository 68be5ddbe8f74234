//! Sizes of workgroups and tiles: one table, chosen by the device's kind and its subgroups.
//!
//! On a CPU that plays GPU (lavapipe) barriers and many workgroups are what costs; on a GPU it is
//! loads that do not coalesce and idle lanes.

use super::attention::{self, AttentionShape, AttentionTile};
use super::mat_vec::MatVecSizes;
use super::matrix::MatrixUnits;
use crate::graph::fuse::Fusions;
use crate::model::hparams::AttentionParams;
use crate::vk::{DeviceInfo, DeviceKind};
use std::fmt;

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
    /// Tile of the matrix product.
    pub mul_mat: MulMatTile,
    /// The same for products too small to give all of a device something to do.
    mul_mat_small: MulMatTile,
    /// Kernels for few rows of x.
    pub mat_vec: MatVecSizes,
    /// Rows of x up to which the matrix-vector kernel is used.
    mat_vec_max: u32,
    /// From so many tokens on, pairs are grouped by expert.
    pub group_from: u32,
    /// Share of the bus that the grouped product gets when it reads experts in host memory.
    grouped_host_read_share: f64,
    /// What products of many rows run on, if not on the plain units.
    pub matrix: Option<MatrixUnits>,
}

/// Tile of the matrix product: weight rows, rows of x, depth, and what one invocation has of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MulMatTile {
    /// Weight rows.
    pub bm: u32,
    /// Rows of x.
    pub bn: u32,
    bk: u32,
    tm: u32,
    tn: u32,
}

impl MulMatTile {
    /// Specialization constants of `mul_mat`.
    pub fn spec(&self, grouped: bool) -> [u32; 7] {
        let local = (self.bm / self.tm) * (self.bn / self.tn);
        [local, u32::from(grouped), self.bm, self.bn, self.bk, self.tm, self.tn]
    }
}

impl Tuning {
    /// The sizes for a device.
    pub fn new(info: &DeviceInfo) -> Self {
        Tuning { matrix: matrix_units(info), ..Self::plain(info) }
    }

    /// Without matrix units.
    fn plain(info: &DeviceInfo) -> Self {
        let subgroup = info.subgroup.default;
        match info.kind {
            DeviceKind::Cpu => Tuning {
                subgroup,
                elementwise: 64,
                scan: subgroup,
                mul_mat: MulMatTile { bm: 32, bn: 32, bk: 32, tm: 8, tn: 8 },
                mul_mat_small: MulMatTile { bm: 32, bn: 32, bk: 32, tm: 8, tn: 8 },
                mat_vec: MatVecSizes::new(info),
                mat_vec_max: 32,
                group_from: 33,
                grouped_host_read_share: 1.0,
                matrix: None,
            },
            _ => Tuning {
                subgroup,
                elementwise: 256,
                scan: 256,
                mul_mat: MulMatTile { bm: 64, bn: 64, bk: 32, tm: 8, tn: 4 },
                mul_mat_small: MulMatTile { bm: 32, bn: 32, bk: 32, tm: 4, tn: 2 },
                mat_vec: MatVecSizes::new(info),
                mat_vec_max: 8,
                group_from: 9,
                // H200: 20 of 49 GB/s, too few loads in flight.
                grouped_host_read_share: 0.4,
                matrix: None,
            },
        }
    }

    /// Tile of a dense product of `n` weight rows with `m` rows of x.
    pub fn mul_mat_dense(&self, n: u32, m: u32) -> MulMatTile {
        let t = self.mul_mat;
        let groups = u64::from(n.div_ceil(t.bm)) * u64::from(m.div_ceil(t.bn));
        if groups < ENOUGH_WORKGROUPS { self.mul_mat_small } else { t }
    }

    /// What passes of `n_tokens` do in one op.
    pub fn fusions(&self) -> Fusions {
        Fusions {
            half_from: self.matrix.map(|_| self.mat_vec_max + 1),
            gate_up_to: self.mat_vec_max,
            few_to: self.mat_vec_max,
        }
    }

    /// Pairs per tile of the grouped product, of experts with so many pairs on average.
    pub fn group_tile(&self, per_expert: u32) -> u32 {
        self.matrix.map_or(self.mul_mat.bn, |units| units.group_tile(per_expert))
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

    /// Share of the bus that a pass gets when its kernels read experts in host memory.
    pub fn host_read_share(&self, n_tokens: u32) -> f64 {
        if n_tokens >= self.group_from { self.grouped_host_read_share } else { 1.0 }
    }

    /// Ranges of keys that attention computes apart, so that small passes keep the device busy.
    pub fn attention_splits(&self, a: &AttentionParams, n_tokens: u32, n_kv: u32) -> u32 {
        let rows = n_tokens * (a.n_head / a.n_head_kv);
        let shape = AttentionShape { head_k: a.head_k, head_v: a.head_v, rows };
        attention::n_splits(shape.row_blocks(self.attention(shape)), a.n_head_kv, n_kv)
    }

    /// Tile of attention.
    pub fn attention(&self, shape: AttentionShape) -> AttentionTile {
        shape.tile(self.subgroup)
    }
}

/// Names what products of many rows run on, for experiments and tests: `auto`, `coopmat` or `f32`.
const MATRIX_VARIABLE: &str = "VKMOE_MATRIX";

/// The device's matrix units, if products are to use them. A CPU's are as slow as its other units.
fn matrix_units(info: &DeviceInfo) -> Option<MatrixUnits> {
    let wanted = std::env::var(MATRIX_VARIABLE).unwrap_or_default();
    match wanted.as_str() {
        "coopmat" => MatrixUnits::new(info),
        "f32" => None,
        _ if info.kind == DeviceKind::Cpu => None,
        _ => MatrixUnits::new(info),
    }
}

impl fmt::Display for Tuning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (t, v) = (self.mul_mat, self.mat_vec);
        write!(
            f,
            "mul_mat f32, tile {}×{}×{}, {}×{} an invocation; mul_mat_vec {} subgroups of {}, {} rows each",
            t.bm, t.bn, t.bk, t.tm, t.tn, v.subgroups, v.subgroup, v.rows
        )
    }
}
