//! Runs graphs on a device. Reading order: [`residency`] (where weights are), [`kv`] (the cache),
//! [`lower`] (ops to dispatches) with the sizes of [`tuning`], [`mat_vec`], [`attention`],
//! [`decode_attention`] and [`grid`], shown by [`choices`], [`kernels`]
//! (pipelines), [`pace`] (how much goes into one submission), `record` with `hazards` (recording),
//! `profile` (timestamps), [`routes`] (what passes tell the expert cache), [`run`] (submitting, reading
//! back), [`layers`] (batches of several ubatches).
//! For benchmarks: [`op_times`] (kernels timed alone), [`candidates`] (sizes to compare), [`peaks`] (what
//! the device does at best), `cold` (weights that no cache holds), `stopwatch`.

pub mod residency;
pub mod kv;
pub mod matrix;
pub mod lower;
pub mod tuning;
pub mod int8;
pub mod attention;
pub mod decode_attention;
pub mod choices;
pub mod mat_vec;
pub mod grid;
pub mod kernels;
pub mod pace;
mod hazards;
mod profile;
mod record;
pub mod routes;
pub mod run;
pub mod layers;
pub mod candidates;
pub mod op_times;
pub mod peaks;
mod cold;
mod stopwatch;
