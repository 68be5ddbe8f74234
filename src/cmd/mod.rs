//! The commands, one file each. No engine logic here: they open an [`Engine`], feed it tokens and
//! print.

mod bench;
mod demo;
mod devices;
mod inspect;
mod logits;
mod options;
mod perplexity;
mod plan;
mod run;
mod synth;
mod table;
mod terminal;
mod tokenize;
mod trace;
mod trace_file;

use crate::cli::{Command, EngineArgs};
use crate::engine::{Engine, Planned, Session};
use crate::error::{Error, Result};
use crate::gguf::Gguf;
use crate::plan::Bytes;
use crate::progress;
use crate::tokenizer::{Tokenizer, Vocab};
use std::io::{self, IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use trace_file::TraceFile;

/// What shells expect of a program that Ctrl-C ended.
const INTERRUPTED: u8 = 130;

/// Runs a command.
pub fn execute(command: Command) -> Result<ExitCode> {
    let done = |()| ExitCode::SUCCESS;
    let result = match command {
        Command::Run(args) => run::run(args),
        Command::Logits(args) => logits::run(&args).map(done),
        Command::Perplexity(args) => perplexity::run(&args).map(done),
        Command::Tokenize(args) => tokenize::run(&args).map(done),
        Command::Inspect(args) => inspect::run(&args).map(done),
        Command::Plan(args) => plan::run(&args).map(done),
        Command::Devices(args) => devices::run(&args).map(done),
        Command::Trace(args) => trace::run(&args).map(done),
        Command::Bench(args) => bench::run(&args),
        Command::Synth(args) => synth::run(&args).map(done),
    };
    match result {
        // Whoever read our output has seen enough.
        Err(Error::File { source, .. }) if source.kind() == io::ErrorKind::BrokenPipe => {
            Ok(ExitCode::SUCCESS)
        }
        result => result,
    }
}

/// Opens the model that the flags name, or the demo model.
fn open_engine(args: &EngineArgs) -> Result<Engine> {
    Engine::load(plan_engine(args)?)
}

/// What the flags amount to for the model that they name, or the demo model: nothing is loaded yet.
fn plan_engine(args: &EngineArgs) -> Result<Planned> {
    let options = options::engine_options(args)?;
    let planned = Planned::new(&model_path(args.model.as_deref())?, &options)?;
    let trained = planned.hparams().n_ctx_train;
    if args.ctx_size > trained {
        log::warn!("-c {}: the model was trained for {trained} tokens", args.ctx_size);
    }
    Ok(planned)
}

/// A flag that Ctrl-C raises. A second Ctrl-C before anyone looked ends the program.
fn catch_ctrl_c() -> Arc<AtomicBool> {
    let raised = Arc::new(AtomicBool::new(false));
    let flag = raised.clone();
    let caught = ctrlc::set_handler(move || {
        if flag.swap(true, Ordering::Relaxed) {
            std::process::exit(INTERRUPTED.into());
        }
    });
    if let Err(e) = caught {
        log::warn!("Ctrl-C ends the program: {e}");
    }
    raised
}

/// Prints what `--logits-hash` asks for.
fn note_logits_hash(session: &Session) {
    if let Some(hash) = session.logits_hash() {
        note(&format!("logits hash: {hash}"));
    }
}

/// Where the experts are that are not on the device, and how much of them is pinned; `None` if all are
/// on the device.
fn experts_line(engine: &Engine) -> Option<String> {
    let report = engine.pin_report()?;
    Some(format!("experts: {} on the host, {report}", Bytes(report.wanted_bytes)))
}

/// Writes what ran since the last call to the file of `--trace`, if there is one.
fn write_trace(file: Option<TraceFile>, engine: &mut Engine) -> Result<()> {
    match (file, engine.take_trace()) {
        (Some(file), Some(trace)) => file.write(&trace),
        _ => Ok(()),
    }
}

/// The file that `-m` names, or the unpacked demo model.
fn model_path(model: Option<&Path>) -> Result<PathBuf> {
    model.map_or_else(demo::path, |path| Ok(path.to_path_buf()))
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
        (None, Some(path)) if path != Path::new("-") => read_text(path),
        _ => {
            if io::stdin().is_terminal() {
                note("reading from the terminal; Ctrl-D ends the text");
            }
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
    let written =
        progress::between_bars(|| out.write_all(text.as_bytes()).and_then(|()| out.flush()));
    written.map_err(|e| stream_error("standard output", "write", e))
}

/// A line on standard error. Nobody may be reading there: that is no reason to fail.
pub fn note(line: &str) {
    let _ = progress::between_bars(|| writeln!(io::stderr(), "{line}"));
}

/// A message as one line without control characters: file names and templates may contain any.
pub fn one_line(message: &str) -> String {
    let printable = |c: char| match c {
        '\n' | '\r' => ' '.to_string(),
        c if c.is_control() => c.escape_default().to_string(),
        c => c.to_string(),
    };
    message.trim_end().chars().map(printable).collect()
}

fn stream_error(stream: &str, action: &'static str, source: io::Error) -> Error {
    Error::File { path: PathBuf::from(stream), action, source }
}
