//! Grids of dispatches. A side of a grid has at most 65535 workgroups; longer lists are folded.

use glam::UVec3;

/// Items of a row of a folded grid: `GRID_FOLD` of shaders/include/common.glsl.
pub const GRID_FOLD: u32 = 32768;

/// The grid of a list of workgroups, as `grid_item()` of common.glsl reads it. Its last row is ragged:
/// kernels compare with their count.
pub fn fold(items: u64) -> UVec3 {
    let rows = items.div_ceil(u64::from(GRID_FOLD));
    assert!(rows <= 65535, "{items} workgroups do not fit into a grid");
    UVec3::new(items.min(u64::from(GRID_FOLD)) as u32, rows as u32, 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folds_cover_all_items() {
        for items in [1, 2, 32767, 32768, 32769, 65536, 100_000, 1 << 30] {
            let grid = fold(items).as_u64vec3();
            assert!(grid.x * grid.y >= items && grid.x * (grid.y - 1) < items);
            assert!(grid.y == 1 || grid.x == u64::from(GRID_FOLD));
        }
        assert_eq!(fold(0), UVec3::new(0, 0, 1));
    }
}
