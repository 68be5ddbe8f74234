//! Whole models against reference logits from another implementation; see tests/golden/README.md.
//! Every model runs with the validation layer on.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::vulkan::{assert_clean, validation};
use serde::Deserialize;
use std::path::{Path, PathBuf};
use vkmoe::engine::{Engine, EngineOptions, Outputs};
use vkmoe::exec::kv::KvType;

#[derive(Deserialize)]
struct Golden {
    prompt_tokens: Vec<Vec<u32>>,
    last_logits: Vec<Vec<f32>>,
    mid_logits_argmax: Vec<Vec<u32>>,
    mid_logits_margin: Vec<Vec<f32>>,
    greedy: Vec<u32>,
    greedy_prompt_index: usize,
}

fn dir(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn golden(name: &str) -> Golden {
    let text = std::fs::read_to_string(dir(name).join("golden.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn options() -> EngineOptions {
    EngineOptions {
        n_ctx: 512,
        type_k: KvType::F32,
        type_v: KvType::F32,
        validation: validation(),
        ..Default::default()
    }
}

fn open(name: &str, options: &EngineOptions) -> Engine {
    Engine::open(&dir(name).join("model.gguf"), options).unwrap()
}

/// Logits after every token of a prompt.
fn all_logits(engine: &mut Engine, tokens: &[u32]) -> Vec<Vec<f32>> {
    let mut session = engine.session().unwrap();
    let mut rows = Vec::new();
    let sink = |_, logits: &[f32]| {
        rows.push(logits.to_vec());
        Ok(())
    };
    engine.eval(&mut session, tokens, Outputs::All, sink).unwrap();
    engine.close(session);
    rows
}

fn argmax(logits: &[f32]) -> u32 {
    (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]).then(b.cmp(&a))).unwrap()
        as u32
}

fn max_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// Every prompt: the last logits within `tolerance`, every argmax that is not a near tie. Where activations
/// are rounded, to f16 or to bytes, some positions may differ: rounding changes the choice of an expert
/// now and then, and with it all logits of the token, as a q8_0 cache does at the same positions.
fn check_prompts(engine: &mut Engine, golden: &Golden, tolerance: f32) {
    let mut others = Vec::new();
    for (p, tokens) in golden.prompt_tokens.iter().enumerate() {
        let rows = all_logits(engine, tokens);
        let off = max_difference(rows.last().unwrap(), &golden.last_logits[p]);
        if off > tolerance {
            others.push(format!("prompt {p}: the last logits are off by {off}"));
        }
        for (i, row) in rows.iter().enumerate() {
            let close_call = golden.mid_logits_margin[p][i] <= 2.0 * tolerance;
            if !close_call && argmax(row) != golden.mid_logits_argmax[p][i] {
                others.push(format!("prompt {p}: another token at position {i}"));
            }
        }
    }
    let n_positions: usize = golden.prompt_tokens.iter().map(Vec::len).sum();
    let allowed = match engine.tuning() {
        tuning if tuning.int8.is_some() => n_positions / 50,
        tuning if tuning.matrix.is_some() => n_positions / 100,
        _ => 0,
    };
    assert!(others.len() <= allowed, "{}", others.join("\n"));
}

/// Greedy decoding, one token at a time.
fn check_greedy(engine: &mut Engine, golden: &Golden) {
    let mut session = engine.session().unwrap();
    let mut tokens = golden.prompt_tokens[golden.greedy_prompt_index].clone();
    let mut chosen = Vec::new();
    for _ in 0..golden.greedy.len() {
        let next = engine.eval_greedy(&mut session, &tokens).unwrap();
        chosen.push(next);
        tokens = vec![next];
    }
    engine.close(session);
    assert_eq!(chosen, golden.greedy);
}

/// How near logits must come, whatever the tensor type: activations stay f32, go through matrix units as
/// f16, or through integer products as bytes, which cost what a q8_0 cache costs. The logits' standard
/// deviation is 1.7 to 3.3.
fn tolerance(engine: &Engine) -> f32 {
    match engine.tuning() {
        tuning if tuning.int8.is_some() => 0.3,
        tuning if tuning.matrix.is_some() => 0.02,
        _ => 1e-3,
    }
}

/// A model of one tensor type: prompts in one ubatch, then greedy decoding.
fn check_type(name: &str) {
    let golden = golden(name);
    let mut engine = open(name, &options());
    let tolerance = tolerance(&engine);
    check_prompts(&mut engine, &golden, tolerance);
    check_greedy(&mut engine, &golden);
    assert_clean(engine.device().instance());
}

macro_rules! types {
    ($($test:ident $dir:literal)*) => {$(
        #[test]
        fn $test() {
            check_type($dir);
        }
    )*};
}

types! {
    f32 "qwen3moe-f32"
    bf16 "qwen3moe"
    q4_0 "qwen3moe-q4_0"
    q8_0 "qwen3moe-q8_0"
    q2_k "qwen3moe-q2_k"
    q3_k "qwen3moe-q3_k"
    q4_k "qwen3moe-q4_k"
    q5_k "qwen3moe-q5_k"
    q6_k "qwen3moe-q6_k"
    iq4_nl "qwen3moe-iq4_nl"
    iq4_xs "qwen3moe-iq4_xs"
    mxfp4 "qwen3moe-mxfp4"
}

/// Ubatches of 1, 3 and 50 go through other kernels: matrix-vector, few pairs, ragged tiles.
#[test]
fn every_ubatch_gives_the_same_model() {
    let golden = golden("qwen3moe-q4_k");
    for n_ubatch in [1, 3, 50] {
        let mut engine = open("qwen3moe-q4_k", &EngineOptions { n_ubatch, ..options() });
        let rows = all_logits(&mut engine, &golden.prompt_tokens[3]);
        let off = max_difference(rows.last().unwrap(), &golden.last_logits[3]);
        assert!(off <= tolerance(&engine), "ubatch {n_ubatch}: off by {off}");
        assert_clean(engine.device().instance());
    }
}

/// Smaller caches cost accuracy, within what their type promises.
#[test]
fn caches_of_every_type() {
    let golden = golden("qwen3moe-f32");
    for (ty, tolerance) in [(KvType::F16, 0.02), (KvType::Q8_0, 0.3), (KvType::Q4_0, 4.0)] {
        let mut engine =
            open("qwen3moe-f32", &EngineOptions { type_k: ty, type_v: ty, ..options() });
        let rows = all_logits(&mut engine, &golden.prompt_tokens[2]);
        let off = max_difference(rows.last().unwrap(), &golden.last_logits[2]);
        assert!(off <= tolerance, "{ty}: off by {off}");
        assert!(off > 0.0, "{ty} is not f32");
        // Over many positions some sit on a tie of the router: there another expert is chosen.
        let rows = all_logits(&mut engine, &golden.prompt_tokens[4]);
        let clear = |i: &usize| golden.mid_logits_margin[4][*i] > 2.0 * tolerance;
        let positions: Vec<usize> = (0..rows.len()).filter(clear).collect();
        let same = |i: &&usize| argmax(&rows[**i]) == golden.mid_logits_argmax[4][**i];
        let n_same = positions.iter().filter(same).count();
        assert!(50 * (positions.len() - n_same) <= positions.len(), "{ty}: {n_same} positions");
        assert_clean(engine.device().instance());
    }
}

/// Experts in host memory, read by the kernels there, give the same bits; so does a second run.
#[test]
fn placement_and_repetition_change_no_bit() {
    let golden = golden("qwen3moe-q4_k");
    let mut hashes = Vec::new();
    for vram_limit_bytes in [None, None, Some(8 << 20)] {
        let mut engine = open(
            "qwen3moe-q4_k",
            &EngineOptions { vram_limit_bytes, hash_logits: true, ..options() },
        );
        assert_eq!(engine.plan().host_weight_bytes > 0, vram_limit_bytes.is_some());
        let mut session = engine.session().unwrap();
        for chunk in golden.prompt_tokens[4].chunks(100) {
            engine.eval(&mut session, chunk, Outputs::All, |_, _| Ok(())).unwrap();
        }
        engine.eval(&mut session, &[5], Outputs::Last, |_, _| Ok(())).unwrap();
        hashes.push(session.logits_hash().unwrap());
        engine.close(session);
    }
    assert_eq!(hashes[0], hashes[1], "another run");
    assert_eq!(hashes[0], hashes[2], "experts in host memory");
}

/// Rewinding a session leaves no trace of what was there.
#[test]
fn a_rewound_session_gives_the_same_logits() {
    let golden = golden("qwen3moe-f32");
    let mut engine = open("qwen3moe-f32", &options());
    let tokens = &golden.prompt_tokens[2];
    let mut session = engine.session().unwrap();
    let mut last = |engine: &mut Engine, tokens: &[u32], keep: u32| {
        session.truncate(keep);
        let mut row = Vec::new();
        let sink = |_, logits: &[f32]| {
            row = logits.to_vec();
            Ok(())
        };
        engine.eval(&mut session, tokens, Outputs::Last, sink).unwrap();
        row
    };
    last(&mut engine, &tokens[..20], 0);
    last(&mut engine, &[9, 9, 9, 9], 20);
    let rewound = last(&mut engine, &tokens[20..], 20);
    assert!(max_difference(&rewound, &golden.last_logits[2]) <= 1e-3);
}
