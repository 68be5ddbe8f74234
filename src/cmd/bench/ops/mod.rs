//! `vkmoe bench --ops`: the kernels of a pass, one by one.
//!
//! Reading order: `model` (a small model that stands for a large one), `row` (the figures of a kernel),
//! `print` (formats).

mod model;
mod print;
mod row;

use super::cases::{Test, all};
use super::{emit, note, one_line};
use crate::cli::bench::BenchArgs;
use crate::cmd::catch_ctrl_c;
use crate::cmd::options::kv_type;
use crate::engine::{Engine, EngineOptions, OpsRequest};
use crate::error::{Error, Result};
use crate::exec::op_times::OpTime;
use crate::progress;
use model::{Source, Stand};
use print::OpsPrinter;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use row::{Pass, kernels_ns, rows};
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

/// Of the weights and the tokens.
const SEED: u64 = 1;

/// Measures every model; one that fails is told.
pub(super) fn run(args: &BenchArgs) -> Result<ExitCode> {
    let tests = tests(args)?;
    if args.device.len() > 1 {
        return Err(Error::usage("--device", "--ops takes one device a time"));
    }
    let stop = catch_ctrl_c();
    let mut printer = OpsPrinter::new(args.output, args.tiles);
    let mut code = ExitCode::SUCCESS;
    for source in sources(args) {
        if let Err(e) = measure(args, &source, &tests, &stop, &mut printer) {
            note(&format!("error: {}", one_line(&e.to_string())));
            code = ExitCode::FAILURE;
        }
    }
    emit(&printer.footer())?;
    Ok(code)
}

fn sources(args: &BenchArgs) -> Vec<Source<'_>> {
    match args.model.as_slice() {
        [] => vec![Source::Preset(args.preset.as_deref().unwrap_or("qwen3-30b-a3b"))],
        files => files.iter().map(|path| Source::File(path)).collect(),
    }
}

/// Passes: prompts at each depth, then one token.
fn tests(args: &BenchArgs) -> Result<Vec<Test>> {
    let mut tests = Vec::new();
    for n_depth in all(&args.n_depth) {
        let prompts = all(&args.n_prompt).into_iter().filter(|&n| n > 0);
        tests.extend(prompts.map(|n_prompt| Test { n_depth, n_prompt, n_gen: 0 }));
        if all(&args.n_gen).iter().any(|&n| n > 0) {
            tests.push(Test { n_depth, n_prompt: 0, n_gen: 1 });
        }
    }
    match tests.is_empty() {
        true => Err(Error::usage("-p, -n", "no tokens to process or to generate")),
        false => Ok(tests),
    }
}

/// One model: its peaks, then its passes.
fn measure(
    args: &BenchArgs,
    source: &Source<'_>,
    tests: &[Test],
    stop: &AtomicBool,
    printer: &mut OpsPrinter,
) -> Result<()> {
    let stand = Stand::write(source, SEED, stop)?;
    let mut engine = open(args, stand.path(), tests)?;
    stand.remove();
    let bar = progress::hidden_bar("peaks", tests.len() as u64);
    progress::show(&bar);
    let peaks = engine.peaks()?;
    emit(&printer.heading(&engine.device().info().name, &peaks))?;
    for test in tests {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        bar.set_message(test.name());
        let request = OpsRequest {
            n_tokens: test.n_timed(),
            n_depth: test.n_depth,
            samples: args.repetitions,
            tiles: args.tiles,
        };
        let wanted = |op: &OpTime| args.filter.as_deref().is_none_or(|part| has(op, part));
        let tokens = random_tokens(&engine, request.n_tokens);
        let times = engine.time_ops(&request, &tokens, &wanted)?;
        let pass = Pass {
            model: stand.title().to_owned(),
            gpu: engine.device().info().name.clone(),
            test: *test,
            layers: stand.layers().to_vec(),
            pass_ns: times.pass_ns,
            kernels_ns: kernels_ns(&times),
            is_whole: args.filter.is_none(),
        };
        emit(&printer.pass(&pass, &rows(&pass, &peaks, &times)))?;
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(())
}

/// Whether an op or its kernel has a text in its name.
fn has(op: &OpTime, part: &str) -> bool {
    let kernel = op.kernel.as_ref().map_or("copy", |kernel| &kernel.module);
    op.op.contains(part) || kernel.contains(part)
}

/// The model on the device, with room for the largest pass.
fn open(args: &BenchArgs, path: &Path, tests: &[Test]) -> Result<Engine> {
    let n_tokens = tests.iter().map(Test::n_timed).max().unwrap_or(1);
    let n_depth = tests.iter().map(|test| test.n_depth).max().unwrap_or(0);
    let options = EngineOptions {
        device: args.device.first().cloned(),
        n_ctx: n_depth.saturating_add(n_tokens),
        n_ubatch: n_tokens,
        type_k: args.cache_type_k.first().map_or_else(Default::default, |&ty| kv_type(ty)),
        type_v: args.cache_type_v.first().map_or_else(Default::default, |&ty| kv_type(ty)),
        ..EngineOptions::default()
    };
    Engine::open(path, &options)
}

fn random_tokens(engine: &Engine, n: u32) -> Vec<u32> {
    let mut rng = ChaCha8Rng::seed_from_u64(SEED);
    (0..n).map(|_| rng.random_range(0..engine.hparams().n_vocab)).collect()
}
