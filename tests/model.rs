//! Whole models of odd shapes, with random weights, against the reference in `reference_model/`.
//! Every model runs with the validation layer on and caches of f32.

#![allow(clippy::unwrap_used, reason = "a test may fail")]
#![allow(missing_docs, reason = "a test's name says what it shows")]

mod common;
mod reference_model;

use common::gguf_builder::GgufBuilder;
use common::vulkan::{assert_clean, validation};
use reference_model::tiny::{Scaling, Tiny};
use reference_model::{Forward, Random, ReferenceModel};
use std::path::{Path, PathBuf};
use tempfile::TempDir;
use vkmoe::engine::{Engine, EngineOptions, Outputs};
use vkmoe::exec::kv::KvType;
use vkmoe::gguf::{GgmlType, Gguf};

/// Lengths around the limits between kernels: one token, few, a tile and one more, several tiles.
const LENGTHS: [usize; 6] = [1, 2, 8, 9, 40, 100];

/// How far a logit may be off, as a share of the largest. Sums of f32 in another order move a logit by
/// some 1e-6; whatever is really wrong (an element, a head, an expert, a position) by a tenth and more.
/// Activations rounded to f16 would show too.
const TOLERANCE: f64 = 1e-4;

fn options(n_ubatch: u32) -> EngineOptions {
    EngineOptions {
        n_ctx: 128,
        n_ubatch,
        type_k: KvType::F32,
        type_v: KvType::F32,
        validation: validation(),
        ..Default::default()
    }
}

fn tokens(n: usize, n_vocab: u32) -> Vec<u32> {
    let mut random = Random(7);
    (0..n).map(|_| random.below(n_vocab)).collect()
}

/// Writes a model into a directory of its own.
fn write(file: &GgufBuilder) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = file.write(&dir.path().join("model.gguf"));
    (dir, path)
}

/// The reference's pass. No choice of experts may be so close that f32 could see it otherwise.
fn reference(path: &Path, tokens: &[u32]) -> Forward {
    let gguf = Gguf::open(path).unwrap();
    let forward = ReferenceModel::new(&gguf).forward(tokens);
    let call = forward.closest_call;
    assert!(call > 1e-5, "experts {call} apart: another seed makes a clearer model");
    forward
}

/// Logits after every token of a new session, evaluated as one batch.
fn logits(engine: &mut Engine, tokens: &[u32]) -> Vec<Vec<f32>> {
    let mut session = engine.session().unwrap();
    let mut rows = Vec::new();
    let sink = |position, logits: &[f32]| {
        assert_eq!(position as usize, rows.len());
        rows.push(logits.to_vec());
        Ok(())
    };
    engine.eval(&mut session, tokens, Outputs::All, sink).unwrap();
    engine.close(session);
    rows
}

/// The largest error of any logit, as a share of the largest logit.
fn error(found: &[Vec<f32>], expected: &[Vec<f64>]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let (found, expected) = (found.iter().flatten(), expected.iter().flatten());
    let largest = expected.clone().fold(0f64, |a, b| a.max(b.abs()));
    let off = found.zip(expected).map(|(f, e)| (f64::from(*f) - e).abs());
    // Unlike f64::max, keeps a NaN.
    off.fold(0f64, |a, b| if a >= b { a } else { b }) / largest
}

/// All prompts through one engine.
fn check_file(path: &Path, n_vocab: u32, n_ubatch: u32, lengths: &[usize]) {
    let tokens = tokens(*lengths.iter().max().unwrap(), n_vocab);
    let expected = reference(path, &tokens);
    let mut engine = Engine::open(path, &options(n_ubatch)).unwrap();
    for &n in lengths {
        let off = error(&logits(&mut engine, &tokens[..n]), &expected.logits[..n]);
        println!("{n} tokens, ubatch {n_ubatch}: off by {off:.1e}");
        assert!(off <= TOLERANCE, "{n} tokens, ubatch {n_ubatch}: off by {off}");
    }
    assert_clean(engine.device().instance());
}

fn check(tiny: &Tiny) {
    let (_dir, path) = write(&tiny.build());
    check_file(&path, tiny.n_vocab, 512, &LENGTHS);
}

#[test]
fn one_expert_and_a_vocabulary_of_three() {
    check(&Tiny {
        n_expert: 1,
        n_used: 1,
        n_vocab: 3,
        n_embd: 40,
        n_ff: 24,
        n_head_kv: 2,
        tied: true,
        ..Tiny::default()
    });
}

/// Dense layers among layers of experts; the first is dense.
#[test]
fn a_dense_layer_before_two_of_experts() {
    check(&Tiny { n_layer: 3, n_dense: 1, n_ff_dense: 100, ..Tiny::default() });
}

#[test]
fn all_of_three_experts_and_heads_of_40() {
    check(&Tiny {
        n_expert: 3,
        n_used: 3,
        n_vocab: 33,
        n_embd: 72,
        n_ff: 40,
        head_k: 40,
        head_v: 40,
        scaling: Scaling::Linear { factor: 4.0 },
        types: |_| GgmlType::F16,
        ..Tiny::default()
    });
}

#[test]
fn three_of_five_experts_and_heads_of_72() {
    check(&Tiny {
        n_expert: 5,
        n_used: 3,
        n_vocab: 65,
        n_embd: 96,
        n_head: 3,
        head_k: 72,
        head_v: 72,
        n_rot: Some(24),
        tied: true,
        types: |_| GgmlType::BF16,
        ..Tiny::default()
    });
}

#[test]
fn all_of_sixteen_experts_and_seven_heads_of_80() {
    check(&Tiny {
        n_expert: 16,
        n_used: 16,
        n_head: 7,
        head_k: 80,
        head_v: 80,
        // Turns between 1 and 32 times: some pairs are kept, some slowed, some between.
        scaling: Scaling::Yarn { factor: 8.0, n_ctx: 400 },
        ..Tiny::default()
    });
}

#[test]
fn seven_of_129_experts_and_eight_heads_of_96() {
    check(&Tiny {
        n_expert: 129,
        n_used: 7,
        n_head: 8,
        head_k: 96,
        head_v: 96,
        n_vocab: 100,
        n_rot: Some(50),
        scaling: Scaling::Yarn { factor: 4.0, n_ctx: 64 },
        types: |name| if name.contains("exps") { GgmlType::Q8_0 } else { GgmlType::F16 },
        ..Tiny::default()
    });
}

#[test]
fn one_of_512_experts_and_heads_of_128() {
    check(&Tiny {
        n_expert: 512,
        n_used: 1,
        n_head: 4,
        n_head_kv: 2,
        head_k: 128,
        head_v: 128,
        types: |name| if name.contains("exps") { GgmlType::Q5_1 } else { GgmlType::F32 },
        ..Tiny::default()
    });
}

#[test]
fn ten_of_512_experts_and_heads_of_200_and_72() {
    check(&Tiny {
        n_expert: 512,
        n_used: 10,
        n_head: 3,
        head_k: 200,
        head_v: 72,
        types: |name| match name {
            name if name.contains("gate_exps") => GgmlType::Q4_0,
            name if name.contains("up_exps") => GgmlType::Q4_1,
            name if name.contains("down_exps") => GgmlType::MXFP4,
            _ => GgmlType::F32,
        },
        ..Tiny::default()
    });
}

#[test]
fn heads_of_256_and_32_and_a_type_for_every_matrix() {
    check(&Tiny {
        n_layer: 3,
        n_expert: 6,
        n_embd: 256,
        n_ff: 256,
        n_head: 4,
        head_k: 256,
        head_v: 64,
        n_vocab: 50,
        types: |name| match name {
            "token_embd.weight" => GgmlType::Q5_K,
            "output.weight" => GgmlType::IQ4_NL,
            "blk.0.attn_q.weight" => GgmlType::Q4_K,
            "blk.0.attn_k.weight" => GgmlType::Q5_0,
            "blk.0.attn_v.weight" => GgmlType::Q6_K,
            "blk.0.attn_output.weight" => GgmlType::IQ4_XS,
            "blk.1.attn_output.weight" => GgmlType::Q2_K,
            "blk.0.ffn_gate_exps.weight" => GgmlType::Q2_K,
            "blk.0.ffn_up_exps.weight" => GgmlType::Q3_K,
            "blk.0.ffn_down_exps.weight" => GgmlType::Q4_K,
            "blk.1.ffn_gate_exps.weight" => GgmlType::IQ4_XS,
            "blk.1.ffn_up_exps.weight" => GgmlType::Q5_K,
            "blk.1.ffn_down_exps.weight" => GgmlType::BF16,
            "blk.1.ffn_gate_inp.weight" => GgmlType::Q8_0,
            _ => GgmlType::F32,
        },
        ..Tiny::default()
    });
}

/// A matrix of 25 rows in 5250 bytes: every second expert begins between two words.
#[test]
fn experts_of_q6_k_at_two_byte_alignment() {
    check(&Tiny {
        n_expert: 7,
        n_used: 3,
        n_embd: 256,
        n_ff: 25,
        types: |name| match name {
            name if name.contains("gate_exps") => GgmlType::Q6_K,
            name if name.contains("up_exps") => GgmlType::Q3_K,
            name if name.contains("down_exps") => GgmlType::F16,
            _ => GgmlType::F32,
        },
        ..Tiny::default()
    });
}

/// Rows that are not whole groups of eight or four elements, beside rows that are.
#[test]
fn rows_of_41_and_25_elements() {
    for types in [|_: &str| GgmlType::F32, |_: &str| GgmlType::F16, |_: &str| GgmlType::BF16] {
        check(&Tiny { n_embd: 41, n_ff: 25, n_expert: 5, types, ..Tiny::default() });
    }
}

/// Ubatches whose ends meet no tile's.
#[test]
fn every_ubatch() {
    let tiny =
        Tiny { n_expert: 5, n_used: 3, n_head: 4, head_k: 40, head_v: 32, ..Tiny::default() };
    let (_dir, path) = write(&tiny.build());
    for n_ubatch in [1, 2, 3, 9, 33, 64] {
        check_file(&path, tiny.n_vocab, n_ubatch, &[9, 100]);
    }
}

/// A model in three files, opened by any of them.
#[test]
fn a_split_model_opens_by_any_part() {
    let tiny = Tiny::default();
    let whole = tiny.build();
    let dir = tempfile::tempdir().unwrap();
    let n_tensors = whole.tensors.len();
    let paths: Vec<PathBuf> = (0..3u16)
        .map(|no| {
            let keys = if no == 0 { tiny.keys() } else { GgufBuilder::new() };
            let mut part = keys.split(no, 3, n_tensors as i32);
            let cut = |no: u16| n_tensors * no as usize / 3;
            part.tensors = whole.tensors[cut(no)..cut(no + 1)].to_vec();
            part.write(&dir.path().join(format!("model-{:05}-of-00003.gguf", no + 1)))
        })
        .collect();
    for path in &paths {
        check_file(path, tiny.n_vocab, 512, &[9]);
    }
}
