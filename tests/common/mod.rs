//! What several test binaries share.

#![allow(unreachable_pub, reason = "public to the test binaries that include it")]

pub mod gguf_builder;
pub mod outcome;
pub mod program;
pub mod vulkan;
