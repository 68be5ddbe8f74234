//! vkmoe.
fn main() {}
