//! tmp
/// tmp
pub fn fold(items: u64) -> glam::UVec3 {
    let items = items as u32;
    if items <= 32768 {
        glam::UVec3::new(items.max(1), 1, 1)
    } else {
        glam::UVec3::new(32768, items.div_ceil(32768), 1)
    }
}
