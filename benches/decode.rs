//! What a token costs: opening the file, planning a graph, a prefill and a decode step of the demo model,
//! and encoding text. Runs on the first Vulkan device.
#![allow(missing_docs, reason = "criterion's macros")]
#![allow(clippy::unwrap_used, reason = "a benchmark fails by panicking")]

use std::path::Path;
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use vkmoe::engine::{Engine, EngineOptions, Outputs};
use vkmoe::gguf::Gguf;
use vkmoe::graph::fuse::Fusions;
use vkmoe::graph::scratch;
use vkmoe::model::{Model, PassShape};
use vkmoe::tokenizer::{Special, Tokenizer, Vocab};

const DEMO: &str = "assets/demo-q4_k_m.gguf";
const PROMPT_TOKENS: usize = 256;
/// Tokens in the cache while decode steps are measured.
const PAST: u32 = 64;

fn files_and_plans(c: &mut Criterion) {
    c.bench_function("open GGUF", |b| b.iter(|| Gguf::open(Path::new(DEMO)).unwrap()));

    let gguf = Gguf::open(Path::new(DEMO)).unwrap();
    let model = Model::load(&gguf).unwrap();
    for n_tokens in [1, 512] {
        let shape = PassShape {
            n_tokens,
            n_outputs: 1,
            output_rows: 1,
            top: Some(1),
            n_splits: 1,
            group_from: 32,
            group_tile: 64,
            fusions: Fusions::default(),
        };
        c.bench_function(&format!("graph and scratch plan, {n_tokens} tokens"), |b| {
            b.iter(|| scratch::plan(&model.graph(&shape)).bytes);
        });
    }

    let tokenizer = Tokenizer::new(Vocab::from_gguf(&gguf).unwrap()).unwrap();
    let text = include_str!("../LICENSE-APACHE");
    let mut group = c.benchmark_group("tokenizer");
    group.throughput(Throughput::Bytes(text.len() as u64));
    group.bench_function("encode", |b| {
        b.iter(|| tokenizer.encode(text, Special::Plain).unwrap());
    });
}

fn passes(c: &mut Criterion) {
    let options = EngineOptions { n_ctx: 512, ..EngineOptions::default() };
    let mut engine = Engine::open(Path::new(DEMO), &options).unwrap();
    let n_vocab = engine.hparams().n_vocab;
    let prompt: Vec<u32> = (0..PROMPT_TOKENS as u32).map(|i| i * 37 % n_vocab).collect();
    let mut session = engine.session().unwrap();

    let mut group = c.benchmark_group("demo model");
    // A software device takes seconds for a prompt.
    group.sample_size(10).warm_up_time(Duration::from_secs(1));
    group.throughput(Throughput::Elements(PROMPT_TOKENS as u64));
    group.bench_function("prefill", |b| {
        b.iter(|| {
            session.truncate(0);
            engine.eval(&mut session, &prompt, Outputs::Last, |_, _| Ok(())).unwrap();
        });
    });
    session.truncate(PAST);
    group.throughput(Throughput::Elements(1));
    group.bench_function("decode", |b| {
        b.iter(|| {
            session.truncate(PAST);
            engine.eval_greedy(&mut session, &[prompt[PAST as usize]]).unwrap()
        });
    });
    group.finish();
    engine.close(session);
}

fn short() -> Criterion {
    Criterion::default()
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(3))
}

criterion_group! {
    name = benches;
    config = short();
    targets = files_and_plans, passes
}
criterion_main!(benches);
