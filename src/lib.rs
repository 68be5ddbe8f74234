//! vkmoe runs Mixture-of-Experts language models (GGUF) on any Vulkan 1.3 GPU.
//!
//! The modules in reading order: a file is parsed ([`gguf`]), a [`model`] is its structure, a forward
//! pass of it is a [`graph`], a [`plan`] says what lives where, [`exec`] runs graphs on a device that
//! [`vk`] wraps, with the push constants of [`push`], and [`stream`] brings experts that stay in host
//! memory; a [`trace`] shows what ran when. [`engine`] puts these together; [`tokenizer`] and
//! [`sampler`] turn text into tokens and logits into the next one. [`synth`] writes models of random
//! weights to measure with. [`cli`] and [`cmd`] are the program.

pub mod error;

pub mod gguf;
pub mod model;
pub mod graph;
pub mod plan;
pub mod push;
pub mod exec;
pub mod vk;
pub mod stream;
pub mod trace;
pub mod engine;
pub mod tokenizer;
pub mod sampler;
pub mod progress;
pub mod synth;
pub mod cli;
pub mod cmd;

pub use error::{Error, Result};
