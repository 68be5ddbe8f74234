//! `vkmoe bench`: llama-bench's flags, tests and columns, and what streaming did.
//!
//! Reading order: `cases` (flags to what is measured), `measure` (an engine at work), `row` (the
//! figures), `print` (formats). `ops` is `--ops`: single kernels.

mod cases;
mod measure;
mod ops;
mod print;
mod row;
#[cfg(test)]
mod tests;

use super::trace_file::TraceFile;
use super::{emit, experts_line, note, one_line};
use crate::cli::bench::BenchArgs;
use crate::error::Result;
use crate::exec::candidates::few_token_candidates;
use crate::progress;
use crate::trace::Trace;
use cases::{Case, Load};
use indicatif::ProgressBar;
use measure::{Opened, Repeat};
use print::Printer;
use row::Row;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

/// Measures all cases. One that fails is reported and left out, like the next ones that need the same
/// engine; the exit code tells.
pub(super) fn run(args: &BenchArgs) -> Result<ExitCode> {
    if args.ops {
        return ops::run(args);
    }
    let cases = cases::cases(args)?;
    let mut printer = Printer::new(args.output, &cases, args.tiles);
    let progress = Progress::new(args, cases.len());
    let trace = TraceFile::create(args.trace.as_deref())?;
    let mut bench = Bench { args, progress: &progress, opened: None, failed: None, trace: None };
    let mut code = ExitCode::SUCCESS;
    for (i, case) in cases.iter().enumerate() {
        if let Err(e) = bench.measure(case, i, &mut |row| emit(&printer.row(row))) {
            note(&format!("error: {}", one_line(&e.to_string())));
            code = ExitCode::FAILURE;
        }
        progress.bar.inc(1);
    }
    progress.bar.finish_and_clear();
    emit(&printer.footer())?;
    if let (Some(file), Some(trace)) = (trace, bench.trace) {
        file.write(&trace)?;
    }
    Ok(code)
}

/// Takes a row.
type Done<'a> = dyn FnMut(&Row) -> Result<()> + 'a;

/// Measures case by case; the engine stays open between those that can share it.
struct Bench<'a> {
    args: &'a BenchArgs,
    progress: &'a Progress,
    opened: Option<Opened>,
    /// What could not be opened, or failed at work: it is not tried again.
    failed: Option<Load>,
    /// Of the last repetition, if one is wanted.
    trace: Option<Trace>,
}

impl Bench<'_> {
    /// Hands out the rows of a case; none if its engine has failed before. `i`: the case's number, from 0.
    fn measure(&mut self, case: &Case, i: usize, done: &mut Done<'_>) -> Result<()> {
        if self.failed.as_ref() == Some(&case.load) {
            return Ok(());
        }
        let result = self.try_measure(case, i, done);
        if result.is_err() {
            self.failed = Some(case.load.clone());
        }
        result
    }

    fn try_measure(&mut self, case: &Case, i: usize, done: &mut Done<'_>) -> Result<()> {
        let (args, progress) = (self.args, self.progress);
        // Another engine's memory is freed before this one's is allocated.
        let mut opened = match self.opened.take().filter(|opened| opened.load == case.load) {
            Some(opened) => opened,
            None => {
                progress.step(i, case, "loading");
                let opened = Opened::open(case, args.trace.is_some())?;
                if let Some(line) = experts_line(&opened.engine) {
                    note(&line);
                }
                opened
            }
        };
        thread::sleep(Duration::from_secs(args.delay.into()));
        let repeat = Repeat { n: args.repetitions, warm_up: !args.no_warmup };
        let chosen = *opened.engine.tuning();
        let mut sizes = vec![chosen];
        if args.tiles {
            sizes.extend(few_token_candidates(&chosen, opened.engine.device().info()));
        }
        for tuning in sizes {
            opened.engine.set_tuning(tuning);
            let measured = opened.measure(case, repeat, |what| progress.step(i, case, what))?;
            let mark = if tuning == chosen { "* " } else { "" };
            let sizes = args.tiles.then(|| format!("{mark}{}", tuning.few_tokens()));
            done(&Row { sizes, ..Row::new(case, &opened.engine, measured) })?;
        }
        opened.engine.set_tuning(chosen);
        self.trace = opened.engine.take_trace();
        self.opened = Some(opened);
        Ok(())
    }
}

/// What the user sees on standard error: a bar on a terminal, or lines.
struct Progress {
    bar: ProgressBar,
    lines: bool,
    n_cases: usize,
}

impl Progress {
    fn new(args: &BenchArgs, n_cases: usize) -> Progress {
        let bar = progress::hidden_bar("", n_cases as u64);
        if !args.progress {
            progress::show(&bar);
        }
        Progress { bar, lines: args.progress, n_cases }
    }

    fn step(&self, i: usize, case: &Case, what: &str) {
        let message = format!("{} {what}", case.test.name());
        if self.lines {
            note(&format!("vkmoe bench: {}/{}: {message}", i + 1, self.n_cases));
        }
        self.bar.set_message(message);
    }
}
