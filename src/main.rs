//! The binary: parses the command line, runs one command, prints an error as one line.

use clap::Parser;
use std::process::ExitCode;
use vkmoe::{cli, cmd};

fn main() -> ExitCode {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    let cli = cli::Cli::parse_from(cli::expand(std::env::args_os()));
    match cmd::execute(cli.command) {
        Ok(code) => code,
        Err(e) => {
            cmd::note(&format!("error: {}", cmd::one_line(&e.to_string())));
            ExitCode::FAILURE
        }
    }
}
