//! The commands, one file each. No engine logic here: they open an [`Engine`], feed it tokens and
//! print.

mod demo;
mod devices;
mod inspect;
mod logits;
mod perplexity;
mod run;
mod table;
mod tokenize;

use crate::cli::{Command, EngineArgs, KvTypeArg};
use crate::engine::{Engine, EngineOptions};
use crate::error::{Error, Result};
use crate::exec::kv::KvType;
use crate::gguf::Gguf;
use crate::tokenizer::{Tokenizer, Vocab};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Runs a command.
pub fn execute(command: Command) -> Result<ExitCode> {
    let result = match command {
        Command::Run(args) => run::run(args),
        Command::Logits(args) => logits::run(&args),
        Command::Perplexity(args) => perplexity::run(&args),
        Command::Tokenize(args) => tokenize::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Devices(args) => devices::run(&args),
    };
    match result {
        Ok(()) => Ok(ExitCode::SUCCESS),
        // Whoever read our output has seen enough.
        Err(Error::File { source, .. }) if source.kind() == io::ErrorKind::BrokenPipe => {
            Ok(ExitCode::SUCCESS)
        }
        Err(e) => Err(e),
    }
}

/// Opens the model that the flags name, or the demo model.
fn open_engine(args: &EngineArgs) -> Result<Engine> {
    if args.ubatch_size > args.batch_size {
        let problem =
            format!("is {}, more than the batch (-b {})", args.ubatch_size, args.batch_size);
        return Err(Error::usage("-ub", problem));
    }
    let options = EngineOptions {
        device: args.device.clone(),
        n_ctx: args.ctx_size,
        n_ubatch: args.ubatch_size,
        type_k: kv_type(args.cache_type_k),
        type_v: kv_type(args.cache_type_v),
        ..EngineOptions::default()
    };
    Engine::open(&model_path(args.model.as_deref())?, &options)
}

/// The file that `-m` names, or the unpacked demo model.
fn model_path(model: Option<&Path>) -> Result<PathBuf> {
    model.map_or_else(demo::path, |path| Ok(path.to_path_buf()))
}

fn kv_type(arg: KvTypeArg) -> KvType {
    match arg {
        KvTypeArg::F32 => KvType::F32,
        KvTypeArg::F16 => KvType::F16,
        KvTypeArg::Q8_0 => KvType::Q8_0,
        KvTypeArg::Q4_0 => KvType::Q4_0,
    }
}

/// The tokenizer of a model.
fn tokenizer(gguf: &Gguf) -> Result<Tokenizer> {
    Tokenizer::new(Vocab::from_gguf(gguf)?)
}

/// Reads a file as text.
fn read_text(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(|source| Error::File {
        path: path.to_path_buf(),
        action: "read",
        source,
    })
}

/// Text from an argument, a file, or standard input.
fn text_input(text: Option<&str>, file: Option<&Path>) -> Result<String> {
    match (text, file) {
        (Some(text), _) if text != "-" => Ok(text.to_string()),
        (None, Some(path)) => read_text(path),
        _ => {
            let mut text = String::new();
            let read = io::stdin().read_to_string(&mut text);
            read.map_err(|e| stream_error("standard input", "read", e))?;
            Ok(text)
        }
    }
}

/// Writes to standard output and flushes: text appears as it comes.
fn emit(text: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())
        .and_then(|()| out.flush())
        .map_err(|e| stream_error("standard output", "write", e))
}

fn stream_error(stream: &str, action: &'static str, source: io::Error) -> Error {
    Error::File { path: PathBuf::from(stream), action, source }
}
