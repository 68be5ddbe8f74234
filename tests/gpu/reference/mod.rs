//! What kernels should compute, written from the definitions, in f64 where it is about sums.

pub(crate) mod attention;
pub(crate) mod experts;
pub(crate) mod kv;
pub(crate) mod mul_mat;
pub(crate) mod peaks;
pub(crate) mod quants;
pub(crate) mod random;
pub(crate) mod router;
pub(crate) mod rows;
