//! What kernels should compute, written from the definitions, in f64 where it is about sums.

pub(crate) mod mul_mat;
pub(crate) mod quants;
pub(crate) mod random;
