//! From operations to dispatches: grids and tile sizes, chosen by pure functions of shapes.

pub mod attention;
pub mod grid;
