//! The one error type. A variant says what was being done and names the file, key, tensor, flag or
//! device that it was done to; `Display` is the single line that the user sees.

use crate::plan::Bytes;
use std::path::PathBuf;

/// `Result` with [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong for a reason outside this program.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system refused to open, read, map or write a file.
    #[error("{}: cannot {action}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What was tried, as a verb: `open`, `map`, `write`.
        action: &'static str,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A GGUF file breaks the format, or lacks what the model needs.
    #[error("{}: {place}: {problem}", path.display())]
    Gguf {
        /// The file.
        path: PathBuf,
        /// Where: `header`, ``key `general.alignment` ``, ``tensor `output.weight` ``.
        place: String,
        /// What was found and what was expected.
        problem: String,
    },
    /// A file is not a trace that we wrote.
    #[error("{}: {problem}", path.display())]
    Trace {
        /// The file.
        path: PathBuf,
        /// What was found, and in which event.
        problem: String,
    },
    /// The vocabulary of a model cannot be turned into a tokenizer, or text cannot be encoded.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// A chat template that does not parse or does not run.
    #[error("chat template, line {line}: {problem}")]
    Template {
        /// Line of the template, from 1.
        line: usize,
        /// The template engine's words.
        problem: String,
    },
    /// A flag, environment variable or argument that cannot be used as given.
    #[error("{flag}: {problem}")]
    Usage {
        /// The flag or variable as the user writes it: `--device`, `GGML_VK_VISIBLE_DEVICES`.
        flag: String,
        /// Why not, and what would do.
        problem: String,
    },
    /// No Vulkan loader, no driver, or no device that meets the requirements.
    #[error("{0}")]
    NoDevice(String),
    /// A Vulkan call failed.
    #[error("Vulkan: cannot {action}: {result}")]
    Vulkan {
        /// What was tried, as a verb with its object: `create the pipeline rms_norm`.
        action: String,
        /// The driver's answer.
        result: ash::vk::Result,
    },
    /// The driver does not import these host pages; another source of memory may do.
    #[error("cannot import {what}: {result}")]
    ImportRefused {
        /// The buffer, and what is known of the reason.
        what: String,
        /// The driver's answer, or the nearest to what the engine found.
        result: ash::vk::Result,
    },
    /// The system has no memory, or no address space, for the host's side of a transfer.
    #[error("cannot get {} of host memory for {what}: {source}", Bytes(*bytes))]
    HostMemory {
        /// What it was for.
        what: String,
        /// Bytes needed.
        bytes: u64,
        /// The system's answer.
        source: std::io::Error,
    },
    /// Device or host memory that the plan needs is not there.
    #[error(
        "out of memory: {what} needs {}, {} are free{hint}",
        Bytes(*needed_bytes), Bytes(*available_bytes)
    )]
    OutOfMemory {
        /// What it was for.
        what: String,
        /// Bytes needed.
        needed_bytes: u64,
        /// Bytes available.
        available_bytes: u64,
        /// What the user can do, starting with `; `, or empty.
        hint: String,
    },
    /// The device did not reach a timeline point in time.
    #[error("the device did not finish {what} within {limit_ms} ms")]
    Timeout {
        /// What was waited for.
        what: String,
        /// The limit.
        limit_ms: u64,
    },
    /// The device is gone; the text holds what `VK_EXT_device_fault` and the engine know.
    #[error("device lost: {0}")]
    DeviceLost(String),
    /// The router of a layer produced NaN or infinity.
    #[error(
        "layer {il}: the router's logits are NaN or infinite; the file is damaged or the model overflows"
    )]
    NanRouter {
        /// The layer.
        il: u32,
    },
    /// The logits leave no token to choose.
    #[error("cannot choose a token: {0}")]
    Sampling(String),
    /// Whoever looked on ended it.
    #[error("interrupted")]
    Interrupted,
    /// The KV cache is full.
    #[error("the context is full: {n_ctx} tokens; a larger one: -c {suggestion}")]
    ContextFull {
        /// Size of the context in tokens.
        n_ctx: u32,
        /// A larger size.
        suggestion: u32,
    },
}

impl Error {
    /// Shorthand for [`Error::Usage`].
    pub fn usage(flag: impl Into<String>, problem: impl Into<String>) -> Self {
        Error::Usage { flag: flag.into(), problem: problem.into() }
    }
}
