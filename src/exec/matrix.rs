//! Tiles of the matrix products on matrix units: candidates as data, and which one a product gets. Pure.

use crate::vk::{DeviceInfo, DeviceKind};

/// Workgroups that keep a large GPU busy: about one for each of its units (H200: 132).
const ENOUGH_WORKGROUPS: u64 = 120;
/// What a row takes of shared memory for a step, in units of 16 bytes: its elements, and one of padding.
const fn row_quads(bk: u32) -> u32 {
    bk / 8 + 1
}

/// A tile of `mul_mat_cm`, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MatrixTile {
    /// Weight rows.
    pub bm: u32,
    /// Rows of x.
    pub bn: u32,
    /// Depth of a step.
    pub bk: u32,
    /// Subgroups along the weight rows.
    pub warps_m: u32,
    /// Subgroups along the rows of x.
    pub warps_n: u32,
    /// Buffers in shared memory.
    pub stages: u32,
}

pub(super) const fn tile(
    bm: u32,
    bn: u32,
    bk: u32,
    warps_m: u32,
    warps_n: u32,
    stages: u32,
) -> MatrixTile {
    MatrixTile { bm, bn, bk, warps_m, warps_n, stages }
}

/// Of a GPU, larger first.
const GPU_TILES: &[MatrixTile] = &[
    tile(128, 128, 64, 2, 2, 1),
    tile(128, 128, 32, 2, 2, 1),
    tile(64, 64, 64, 2, 2, 1),
    tile(64, 32, 64, 2, 1, 1),
];
/// Of a CPU that plays GPU.
const CPU_TILES: &[MatrixTile] = &[tile(32, 16, 32, 2, 1, 1)];

/// The matrix units of a device as kernels use them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MatrixUnits {
    /// m, n, k of one matrix.
    pub shape: [u32; 3],
    subgroup: u32,
    shared_bytes: u32,
    max_invocations: u32,
    tiles: &'static [MatrixTile],
}

impl MatrixUnits {
    /// Those of a device, if kernels can use them.
    pub fn new(info: &DeviceInfo) -> Option<Self> {
        let matrix = info.half_matrix()?;
        let units = MatrixUnits {
            shape: [matrix.m, matrix.n, matrix.k],
            subgroup: info.subgroup.default,
            shared_bytes: info.limits.shared_bytes,
            max_invocations: info.limits.workgroup_invocations,
            tiles: if info.kind == DeviceKind::Cpu { CPU_TILES } else { GPU_TILES },
        };
        units.candidates(false).next().is_some().then_some(units)
    }

    /// Tiles that the device can run, larger first; `glu`: with a gated activation.
    pub fn candidates(&self, glu: bool) -> impl Iterator<Item = MatrixTile> {
        self.tiles.iter().copied().filter(move |t| self.fits(*t, glu))
    }

    /// With this tile for everything, if the device can run it.
    pub fn only(&self, tile: &'static MatrixTile) -> Option<Self> {
        let fits = self.fits(*tile, false) && self.fits(*tile, true);
        fits.then_some(MatrixUnits { tiles: std::slice::from_ref(tile), ..*self })
    }

    fn fits(&self, t: MatrixTile, glu: bool) -> bool {
        let [mm, mn, mk] = self.shape;
        let rows = t.warps_m * mm * if glu { 2 } else { 1 };
        t.bm.is_multiple_of(rows)
            && t.bn.is_multiple_of(t.warps_n * mn)
            && t.bk.is_multiple_of(mk)
            && t.warps_m * t.warps_n * self.subgroup <= self.max_invocations
            && self.shared_bytes(t) <= self.shared_bytes
    }

    /// Shared memory of the shader, as its declarations add up.
    fn shared_bytes(&self, t: MatrixTile) -> u32 {
        let [mm, mn, _] = self.shape;
        let stages = t.stages * (t.bm + t.bn) * row_quads(t.bk);
        let results = t.bm / mm * t.warps_n * mn * (mm / 4 + 1);
        stages.max(results) * 16 + t.bn * 12
    }

    /// The tile for a dense product of `n` weight rows with `m` rows of x: the largest that gives the
    /// device enough to do.
    pub fn dense(&self, n: u32, m: u32, glu: bool) -> Option<MatrixTile> {
        let groups = |t: &MatrixTile| {
            let rows = if glu { t.bm / 2 } else { t.bm };
            u64::from(n.div_ceil(rows)) * u64::from(m.div_ceil(t.bn))
        };
        let enough = self.candidates(glu).find(|t| groups(t) >= ENOUGH_WORKGROUPS);
        enough.or_else(|| self.candidates(glu).max_by_key(groups))
    }

    /// Rows of x of the tiles of a grouped product, where an expert has `per_expert` of them on average.
    pub fn group_tile(&self, per_expert: u32) -> u32 {
        let widths = || self.candidates(true).map(|t| t.bn);
        // Some experts have more than the average, and a second tile is decoded for the rest.
        let wanted = per_expert.saturating_add(per_expert / 4);
        let enough = widths().filter(|&bn| bn >= wanted).min();
        enough.or_else(|| widths().max()).unwrap_or(self.shape[1])
    }

    /// The tile for a grouped product whose list has tiles of `bn` rows of x.
    pub fn grouped(&self, bn: u32, glu: bool) -> Option<MatrixTile> {
        self.candidates(glu).find(|t| t.bn == bn)
    }

    /// Workgroup size of a tile.
    pub fn local_size(&self, t: MatrixTile) -> u32 {
        t.warps_m * t.warps_n * self.subgroup
    }
}

#[cfg(test)]
impl MatrixUnits {
    /// Of a GPU that nobody has.
    pub(super) fn made_up(shape: [u32; 3], subgroup: u32, shared_bytes: u32) -> Self {
        MatrixUnits { shape, subgroup, shared_bytes, max_invocations: 1024, tiles: GPU_TILES }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn units(shape: [u32; 3], subgroup: u32, shared_bytes: u32) -> MatrixUnits {
        MatrixUnits::made_up(shape, subgroup, shared_bytes)
    }

    #[test]
    fn every_device_has_a_tile_for_everything() {
        for shape in [[16, 16, 16], [8, 8, 8], [8, 16, 16], [16, 8, 16]] {
            for subgroup in [8, 16, 32, 64] {
                let units = units(shape, subgroup, 32768);
                for glu in [false, true] {
                    for (n, m) in [(1, 9), (512, 512), (4096, 65536)] {
                        assert!(units.dense(n, m, glu).is_some(), "{units:?}");
                    }
                    for per_expert in [1, 30, 100, 10_000] {
                        let bn = units.group_tile(per_expert);
                        assert!(units.grouped(bn, glu).is_some(), "{units:?} {bn}");
                    }
                }
            }
        }
    }

    #[test]
    fn large_products_get_large_tiles_and_small_ones_many() {
        let units = units([16, 16, 16], 32, 49152);
        let area = |n, m| units.dense(n, m, false).map_or(0, |t| t.bm * t.bn);
        assert!(area(4096, 4096) > area(512, 512));
    }
}
