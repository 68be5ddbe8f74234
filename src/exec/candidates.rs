//! Sizes that a device might do better with than with those of its table: what `vkmoe bench --ops
//! --tiles` tries, and where entries of [`Tuning`]'s tables come from.

use super::tuning::{MulMatTile, Tuning};
use crate::vk::{DeviceInfo, DeviceKind};

/// The tuning with other sizes, one a time.
pub fn candidates(tuning: &Tuning, info: &DeviceInfo) -> Vec<Tuning> {
    let with = |mul_mat: MulMatTile| {
        let mut other = *tuning;
        other.mul_mat = mul_mat;
        other
    };
    let fits = |tile: &MulMatTile| fits(tile, info) && *tile != tuning.mul_mat;
    mul_mat_tiles(info.kind).into_iter().filter(fits).map(with).collect()
}

/// Tiles of the matrix product without matrix units. A CPU gets few: it takes a second to compile each.
fn mul_mat_tiles(kind: DeviceKind) -> Vec<MulMatTile> {
    let sizes: &[(u32, u32)] = match kind {
        DeviceKind::Cpu => &[(32, 32), (32, 64), (64, 64)],
        _ => &[(32, 32), (64, 32), (32, 64), (64, 64), (128, 64), (64, 128), (128, 128)],
    };
    let parts: &[(u32, u32)] = match kind {
        DeviceKind::Cpu => &[(8, 4), (8, 8)],
        _ => &[(4, 4), (8, 4), (4, 8), (8, 8)],
    };
    let depths: &[u32] = if kind == DeviceKind::Cpu { &[32] } else { &[16, 32] };
    let mut tiles = Vec::new();
    for &(bm, bn) in sizes {
        for &(tm, tn) in parts {
            tiles.extend(depths.iter().map(|&bk| MulMatTile { bm, bn, bk, tm, tn }));
        }
    }
    tiles
}

/// Whole subgroups, no more shared memory or invocations than the device has.
fn fits(tile: &MulMatTile, info: &DeviceInfo) -> bool {
    let invocations = tile.invocations();
    let subgroup = info.subgroup.default.max(1);
    invocations.is_multiple_of(subgroup)
        && invocations <= info.limits.workgroup_invocations.min(512)
        && tile.shared_bytes() <= info.limits.shared_bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_candidate_fits_and_differs() {
        let mut info = DeviceInfo::default();
        info.subgroup.default = 32;
        info.limits.workgroup_invocations = 1024;
        info.limits.shared_bytes = 32 << 10;
        let tuning = Tuning::new(&info);
        let found = candidates(&tuning, &info);
        assert!(found.len() > 10);
        for (i, other) in found.iter().enumerate() {
            assert!(fits(&other.mul_mat, &info) && *other != tuning);
            assert!(found[..i].iter().all(|earlier| earlier != other));
        }
    }
}
