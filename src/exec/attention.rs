//! tmp
/// tmp
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub struct Tile {
    pub br: u32,
    pub bc: u32,
    pub local: u32,
}
/// tmp
pub fn tile(_: u32, _: u32, rows: u32, subgroup: u32) -> Tile {
    Tile { br: if rows > 4 { 8 } else { 4 }, bc: 16, local: subgroup.max(32) }
}
/// tmp
pub fn n_splits(blocks: u32, heads: u32, n_kv: u32) -> u32 {
    (4 / (blocks * heads)).clamp(1, n_kv.div_ceil(64))
}
