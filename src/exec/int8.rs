//! Products by packed integer dot products: on which devices, and their tiles. Pure.

use super::tuning::MulMatTile;
use crate::vk::{DeviceInfo, DeviceKind};

/// Tiles of `mul_mat_int8`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Int8Products {
    /// Of large products, and of grouped ones.
    pub tile: MulMatTile,
    /// Of products too small to give all of a device something to do.
    pub small: MulMatTile,
}

const fn tile(bm: u32, bn: u32, bk: u32, tm: u32, tn: u32) -> MulMatTile {
    MulMatTile { bm, bn, bk, tm, tn }
}

impl Int8Products {
    /// Those of a device that knows packed dot products, fast or not.
    pub fn new(info: &DeviceInfo) -> Option<Self> {
        info.optional.integer_dot_product.then(|| match info.kind {
            // For tests: little code to compile.
            DeviceKind::Cpu => Self::all(tile(32, 32, 32, 4, 4)),
            _ => Int8Products { tile: tile(64, 64, 64, 8, 4), small: tile(32, 32, 64, 4, 2) },
        })
    }

    /// One tile for everything.
    pub fn all(tile: MulMatTile) -> Self {
        Int8Products { tile, small: tile }
    }

    /// The tile for a dense product of `n` weight rows with `m` rows of x.
    pub fn dense(&self, n: u32, m: u32) -> MulMatTile {
        self.tile.or_if_few(self.small, n, m)
    }
}

/// Other tiles to compare with.
pub(super) fn candidates(info: &DeviceInfo) -> impl Iterator<Item = MulMatTile> {
    const GPU: [(u32, u32); 6] = [(32, 32), (64, 32), (64, 64), (128, 64), (64, 128), (128, 128)];
    const CPU: [(u32, u32); 2] = [(32, 32), (32, 64)];
    let (sizes, depths) = match info.kind {
        DeviceKind::Cpu => (&CPU[..], &[32][..]),
        _ => (&GPU[..], &[32, 64, 128][..]),
    };
    let parts = [(4, 2), (4, 4), (8, 4), (8, 8)];
    let tiles = sizes.iter().flat_map(move |&(bm, bn)| {
        let with = move |(tm, tn)| depths.iter().map(move |&bk| tile(bm, bn, bk, tm, tn));
        parts.into_iter().flat_map(with)
    });
    let limits = info.limits;
    let subgroup = info.subgroup.default.max(1);
    tiles.filter(move |t| {
        t.invocations().is_multiple_of(subgroup)
            && t.invocations() <= limits.workgroup_invocations.min(512)
            && shared_bytes(t) <= limits.shared_bytes
    })
}

/// Shared memory, as shaders/mul_mat_int8.comp adds it up.
fn shared_bytes(t: &MulMatTile) -> u32 {
    let units = t.bk / 16;
    16 * units * (t.bm + t.bn + 2) + 8 * units * (t.bm + t.bn) + 4 * t.bn
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_fit_the_smallest_shared_memory() {
        let mut info = DeviceInfo::default();
        info.optional.integer_dot_product = true;
        for kind in [DeviceKind::Cpu, DeviceKind::Discrete] {
            info.kind = kind;
            let products = Int8Products::new(&info);
            let tiles = products.map(|p| [p.tile, p.small]);
            assert!(tiles.is_some_and(|tiles| tiles.iter().all(|t| shared_bytes(t) <= 16384)));
        }
        info.optional.integer_dot_product = false;
        assert_eq!(Int8Products::new(&info), None);
    }
}
