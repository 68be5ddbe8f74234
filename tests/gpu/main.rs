//! Kernels on a device against the twins in `reference/`: one module per shader.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod down_combine_vec;
mod expert_count;
mod expert_sort;
mod flash_attn;
mod flash_attn_merge;
mod gate_up_vec;
mod get_rows;
mod glu;
mod half_rows;
mod harness;
mod kv_store;
mod moe_combine;
mod operands;
mod mul_mat;
mod mul_mat_cm;
mod mul_mat_vec;
mod reference;
mod rms_norm;
mod rope;
mod router;
mod router_vec;
mod top_logits;
#[path = "../common/vulkan.rs"]
mod vulkan;
