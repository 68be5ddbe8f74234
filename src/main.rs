//! The binary: parses the command line, runs one command, prints an error as one line.

use clap::Parser;
use std::io::{self, Write};
use std::process::ExitCode;
use vkmoe::{cli, cmd, progress};

fn main() -> ExitCode {
    start_log();
    let cli = cli::Cli::parse_from(cli::expand(std::env::args_os()));
    match cmd::execute(cli.command) {
        Ok(code) => code,
        Err(e) => {
            cmd::note(&format!("error: {}", cmd::one_line(&e.to_string())));
            ExitCode::FAILURE
        }
    }
}

/// Warnings look like errors: `warning: …`, one line. `RUST_LOG` shows more.
fn start_log() {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn"))
        .format(|out, record| {
            let level = match record.level() {
                log::Level::Warn => "warning".into(),
                other => other.as_str().to_lowercase(),
            };
            writeln!(out, "{level}: {}", cmd::one_line(&record.args().to_string()))
        })
        .target(env_logger::Target::Pipe(Box::new(Stderr)))
        .init();
}

/// Standard error, which progress bars are drawn on as well.
struct Stderr;

impl Write for Stderr {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        progress::between_bars(|| io::stderr().write(text))
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}
