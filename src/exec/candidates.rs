//! Sizes that a device might do better with than with those of its table: what `vkmoe bench --ops
//! --tiles` tries, and where entries of [`Tuning`]'s tables come from.

use super::tuning::{MulMatTile, Tuning};
use crate::vk::DeviceInfo;

/// The tuning with other sizes, one a time.
pub fn candidates(tuning: &Tuning, info: &DeviceInfo) -> Vec<Tuning> {
    let with = |mul_mat: MulMatTile| {
        let mut other = *tuning;
        other.mul_mat = mul_mat;
        other
    };
    let tiles = mul_mat_tiles().filter(|tile| fits(tile, info) && *tile != tuning.mul_mat);
    tiles.map(with).collect()
}

/// Tiles of the matrix product without matrix units.
fn mul_mat_tiles() -> impl Iterator<Item = MulMatTile> {
    let sizes = [(32, 32), (64, 32), (32, 64), (64, 64), (128, 64), (64, 128), (128, 128)];
    let parts = [(4, 4), (8, 4), (4, 8), (8, 8)];
    sizes.into_iter().flat_map(move |(bm, bn)| {
        parts
            .into_iter()
            .flat_map(move |(tm, tn)| [16, 32].map(|bk| MulMatTile { bm, bn, bk, tm, tn }))
    })
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
