//! Kernels on a device against the twins in `reference/`: one module per shader.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod get_rows;
mod harness;
mod mul_mat;
mod mul_mat_vec;
mod reference;
