//! vkmoe runs Mixture-of-Experts language models (GGUF) on any Vulkan 1.3 GPU.

pub mod error;
pub mod exec;
pub mod push;
pub mod vk;

pub use error::{Error, Result};
