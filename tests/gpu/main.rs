//! Kernels on a device against the twins in `reference/`: one module per shader.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod down_combine_vec;
mod expert_count;
mod expert_sort;
mod fetch_experts;
mod flash_attn;
mod flash_attn_cm;
mod flash_attn_merge;
mod flash_decode;
mod gate_up_vec;
mod get_rows;
mod glu;
mod half_rows;
mod harness;
mod int8_rows;
mod kv_store;
mod moe_combine;
mod operands;
mod mul_mat;
mod mul_mat_cm;
mod mul_mat_int8;
mod mul_mat_vec;
mod peak_fma;
mod peak_matrix;
mod peak_read;
mod reference;
mod rms_norm;
mod rope;
mod router;
mod router_vec;
mod top_logits;
#[path = "../common/vulkan.rs"]
mod vulkan;
