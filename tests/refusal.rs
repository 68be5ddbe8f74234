//! What the engine refuses, and in which words: one line that names the file, the key or tensor, what
//! was found and what would do. Nothing here may panic, whatever a file says.

#![allow(clippy::unwrap_used, reason = "a test may fail")]
#![allow(missing_docs, reason = "a test's name says what it shows")]

mod common;
mod reference_model;

use common::gguf_builder::GgufBuilder;
use common::vulkan::{assert_clean, validation};
use reference_model::tiny::{Tiny, key};
use std::fs::OpenOptions;
use std::path::{Path, PathBuf};
use tempfile::TempDir;
use vkmoe::Result;
use vkmoe::engine::{Engine, EngineOptions, Outputs, Session};
use vkmoe::exec::residency::Residency;
use vkmoe::gguf::{GgmlType, Gguf, Value};
use vkmoe::model::Model;
use vkmoe::plan::{CpuMoe, Place, PlacementOptions};
use vkmoe::progress;

const REQUIRED_COUNTS: [&str; 7] = [
    "block_count",
    "context_length",
    "embedding_length",
    "attention.head_count",
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
];

const REQUIRED_TENSORS: [&str; 14] = [
    "token_embd.weight",
    "output_norm.weight",
    "blk.1.attn_norm.weight",
    "blk.1.attn_q.weight",
    "blk.1.attn_k.weight",
    "blk.1.attn_v.weight",
    "blk.1.attn_output.weight",
    "blk.1.attn_q_norm.weight",
    "blk.1.attn_k_norm.weight",
    "blk.1.ffn_norm.weight",
    "blk.1.ffn_gate_inp.weight",
    "blk.1.ffn_gate_exps.weight",
    "blk.1.ffn_up_exps.weight",
    "blk.1.ffn_down_exps.weight",
];

fn tiny() -> GgufBuilder {
    Tiny::default().build()
}

fn write(file: &GgufBuilder) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = file.write(&dir.path().join("model.gguf"));
    (dir, path)
}

fn without_key(mut file: GgufBuilder, key: &str) -> GgufBuilder {
    let n = file.keys.len();
    file.keys.retain(|k| k.name != key.as_bytes());
    assert!(file.keys.len() < n, "no {key}");
    file
}

/// The tiny model with another value of `qwen3moe.{name}`.
fn with(name: &str, value: Value) -> GgufBuilder {
    let mut file = tiny();
    file.keys.retain(|k| k.name != key(name).as_bytes());
    file.key(&key(name), value)
}

fn without_tensor(name: &str) -> GgufBuilder {
    let mut file = tiny();
    let n = file.tensors.len();
    file.tensors.retain(|t| t.name != name.as_bytes());
    assert!(file.tensors.len() < n, "no {name}");
    file
}

/// The tiny model with zeros of another type or shape for a tensor.
fn with_tensor(name: &str, ty: GgmlType, shape: &[u64]) -> GgufBuilder {
    without_tensor(name).zeros(name, ty, shape)
}

fn shape_of(name: &str) -> Vec<u64> {
    let file = tiny();
    file.tensors.iter().find(|t| t.name == name.as_bytes()).unwrap().dims.clone()
}

/// Asserts that a model is refused, with these words after its path.
#[track_caller]
fn assert_refused(file: &GgufBuilder, words: &str) {
    let (_dir, path) = write(file);
    let load = || -> Result<Model> { Model::load(&Gguf::open(&path)?) };
    let message = load().unwrap_err().to_string();
    assert_eq!(message, format!("{}: {words}", path.display()));
    assert!(!message.contains('\n'), "{message}");
}

#[test]
fn the_model_without_a_fault_loads() {
    let (_dir, path) = write(&tiny());
    Model::load(&Gguf::open(&path).unwrap()).unwrap();
}

#[test]
fn missing_keys() {
    let architecture = without_key(tiny(), "general.architecture");
    assert_refused(&architecture, "key `general.architecture`: is missing; expected string");
    for name in REQUIRED_COUNTS {
        let words = format!("key `qwen3moe.{name}`: is missing; expected u32");
        assert_refused(&without_key(tiny(), &key(name)), &words);
    }
}

#[test]
fn keys_of_other_types() {
    for name in REQUIRED_COUNTS.into_iter().chain(["attention.head_count_kv"]) {
        let place = format!("key `qwen3moe.{name}`");
        let text = with(name, Value::String("four".into()));
        assert_refused(&text, &format!("{place}: expected u32, found string"));
        let negative = with(name, Value::I32(-4));
        assert_refused(&negative, &format!("{place}: expected u32, found i32 -4"));
        let fraction = with(name, Value::F32(4.5));
        assert_refused(&fraction, &format!("{place}: expected u32, found f32 4.5"));
    }
    for name in ["rope.freq_base", "attention.layer_norm_rms_epsilon"] {
        let words = format!("key `qwen3moe.{name}`: expected f32, found u32 1");
        assert_refused(&with(name, Value::U32(1)), &words);
    }
    let kind = with("rope.scaling.type", Value::U8(2));
    assert_refused(&kind, "key `qwen3moe.rope.scaling.type`: expected string, found u8 2");
}

#[test]
fn counts_out_of_range() {
    let cases = [
        ("block_count", 0, 1024),
        ("block_count", 1 << 31, 1024),
        ("context_length", 0, u32::MAX),
        ("embedding_length", 0, 1 << 20),
        ("embedding_length", u32::MAX, 1 << 20),
        ("attention.head_count", 0, 1024),
        ("attention.head_count", 1025, 1024),
        ("attention.head_count_kv", 0, 1024),
        ("expert_count", 0, 512),
        ("expert_count", 513, 512),
        ("expert_used_count", 0, 4),
        ("expert_used_count", 5, 4),
        ("expert_feed_forward_length", 0, 1 << 20),
        ("expert_feed_forward_length", u32::MAX, 1 << 20),
        ("rope.dimension_count", 34, 32),
        ("rope.dimension_count", 0, 32),
    ];
    for (name, n, max) in cases {
        let words = format!("key `qwen3moe.{name}`: is {n}, 1 to {max} is possible");
        assert_refused(&with(name, Value::U32(n)), &words);
    }
}

#[test]
fn heads_of_unsupported_sizes() {
    for name in ["attention.key_length", "attention.value_length"] {
        for size in [0, 24, 33, 264, u32::MAX] {
            let (_dir, path) = write(&with(name, Value::U32(size)));
            let message = Model::load(&Gguf::open(&path).unwrap()).unwrap_err().to_string();
            assert!(message.contains(&format!("key `qwen3moe.{name}`: is {size}")), "{message}");
        }
        let words = format!(
            "key `qwen3moe.{name}`: is 24; heads of 32 to 256, in steps of 8, are supported"
        );
        assert_refused(&with(name, Value::U32(24)), &words);
    }
    // Without the key, the width is shared out.
    let shared =
        without_key(with("attention.head_count", Value::U32(4)), &key("attention.key_length"));
    let words = "key `qwen3moe.attention.key_length`: \
                 is 16; heads of 32 to 256, in steps of 8, are supported";
    assert_refused(&shared, words);
}

#[test]
fn kv_heads_that_do_not_divide_the_heads() {
    let words = "key `qwen3moe.attention.head_count_kv`: is 3, which does not divide 2 heads";
    assert_refused(&with("attention.head_count_kv", Value::U32(3)), words);
}

#[test]
fn rotary_embeddings() {
    let words = "key `qwen3moe.rope.scaling.type`: \
                 `longrope` is not supported; supported: none, linear, yarn";
    assert_refused(&with("rope.scaling.type", Value::String("longrope".into())), words);
    let words = "key `qwen3moe.rope.dimension_count`: is 31, an even count is needed";
    assert_refused(&with("rope.dimension_count", Value::U32(31)), words);
    for name in ["rope.freq_base", "rope.scaling.factor"] {
        for (value, text, needed) in [
            (0.0, "0", "positive"),
            (-1.0, "-1", "positive"),
            (f32::NAN, "NaN", "finite"),
            (f32::INFINITY, "inf", "finite"),
        ] {
            let words = format!("key `qwen3moe.{name}`: is {text}, a {needed} number is needed");
            assert_refused(&with(name, Value::F32(value)), &words);
        }
    }
}

#[test]
fn epsilons() {
    let name = "attention.layer_norm_rms_epsilon";
    let words = format!("key `qwen3moe.{name}`: is NaN, a finite number is needed");
    assert_refused(&with(name, Value::F32(f32::NAN)), &words);
    let words = format!("key `qwen3moe.{name}`: is 0, a positive number is needed");
    assert_refused(&with(name, Value::F32(0.0)), &words);
}

#[test]
fn other_architectures() {
    for (arch, words) in [
        ("llama", "`llama` is not supported; supported: qwen3moe"),
        ("", "`` is not supported; supported: qwen3moe"),
    ] {
        let file = without_key(tiny(), "general.architecture")
            .key("general.architecture", Value::String(arch.into()));
        assert_refused(&file, &format!("key `general.architecture`: {words}"));
    }
}

#[test]
fn missing_tensors() {
    for name in REQUIRED_TENSORS {
        assert_refused(&without_tensor(name), &format!("tensor `{name}`: is missing"));
    }
    let words = "tensor `blk.2.attn_q_norm.weight`: is missing";
    assert_refused(&with("block_count", Value::U32(3)), words);
}

#[test]
fn tensors_of_other_shapes() {
    for name in REQUIRED_TENSORS.into_iter().chain(["output.weight"]) {
        let shape = shape_of(name);
        let as_four = |shape: &[u64]| {
            let mut four = [1; 4];
            four[..shape.len()].copy_from_slice(shape);
            four
        };
        // The rows of the embedding are the vocabulary: of any number.
        let changeable = if name == "token_embd.weight" { 1 } else { shape.len() };
        for i in 0..changeable {
            let mut other = shape.clone();
            other[i] += 1;
            let words = format!(
                "tensor `{name}`: has shape {:?}, {:?} is needed",
                as_four(&other),
                as_four(&shape)
            );
            assert_refused(&with_tensor(name, GgmlType::F32, &other), &words);
        }
        let more = [&shape[..], &[2]].concat();
        let words = format!(
            "tensor `{name}`: has shape {:?}, {:?} is needed",
            as_four(&more),
            as_four(&shape)
        );
        assert_refused(&with_tensor(name, GgmlType::F32, &more), &words);
    }
}

#[test]
fn tensors_of_unsupported_types() {
    let supported = "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, \
                     IQ4_NL, IQ4_XS, MXFP4";
    let file = Tiny { n_embd: 256, n_layer: 1, ..Tiny::default() };
    for ty in [GgmlType::IQ2_XXS, GgmlType::TQ1_0, GgmlType::Q8_K, GgmlType::I8, GgmlType::F64] {
        for name in ["blk.0.attn_q.weight", "blk.0.ffn_up_exps.weight", "token_embd.weight"] {
            let mut file = file.build();
            let at = file.tensors.iter().position(|t| t.name == name.as_bytes()).unwrap();
            let shape = file.tensors.remove(at).dims;
            let words =
                format!("tensor `{name}`: type {ty} is not supported; supported: {supported}");
            assert_refused(&file.zeros(name, ty, &shape), &words);
        }
    }
}

#[test]
fn vectors_are_f32() {
    for name in ["output_norm.weight", "blk.0.attn_norm.weight", "blk.0.attn_q_norm.weight"] {
        let words = format!("tensor `{name}`: has type F16, F32 is needed");
        assert_refused(&with_tensor(name, GgmlType::F16, &shape_of(name)), &words);
    }
}

fn options() -> EngineOptions {
    EngineOptions { n_ctx: 16, validation: validation(), ..Default::default() }
}

fn open(file: &GgufBuilder) -> (TempDir, Engine) {
    let (dir, path) = write(file);
    let engine = Engine::open(&path, &options()).unwrap();
    (dir, engine)
}

/// Appends tokens; the logits after the last.
fn eval(engine: &mut Engine, session: &mut Session, tokens: &[u32]) -> Result<Vec<f32>> {
    let mut last = Vec::new();
    let sink = |_, logits: &[f32]| {
        last = logits.to_vec();
        Ok(())
    };
    engine.eval(session, tokens, Outputs::Last, sink)?;
    Ok(last)
}

/// On the device every weight is placed anew; in host memory experts are where the file has them.
#[test]
fn experts_in_host_memory_that_are_not_aligned() {
    // One of these files begins its tensors at a multiple of 16, the other 8 behind.
    let files = ["", "8 bytes."].map(|text| {
        let mut file = tiny().key("general.alignment", Value::U32(8));
        file.alignment = 8;
        write(&file.key("general.description", Value::String(text.into())))
    });
    let mut on_device = files.iter().map(|(_, path)| {
        let mut engine = Engine::open(path, &options()).unwrap();
        let mut session = engine.session().unwrap();
        eval(&mut engine, &mut session, &[1, 2, 3]).unwrap()
    });
    assert_eq!(on_device.next(), on_device.next());
    let placement = PlacementOptions { cpu_moe: CpuMoe::All, ..Default::default() };
    let on_host = EngineOptions { placement, ..options() };
    let opened = files.iter().map(|(_, path)| Engine::open(path, &on_host));
    let refused: Vec<String> = opened.filter_map(|e| e.err().map(|e| e.to_string())).collect();
    assert_eq!(refused.len(), 1, "{refused:?}");
    assert!(
        refused[0].contains("tensor `blk.0.ffn_gate_exps.weight`: it begins at byte "),
        "{}",
        refused[0]
    );
    assert!(refused[0].ends_with("need a multiple of 16 (`general.alignment`)"), "{}", refused[0]);
}

/// The tiny model with one weight of the layer's router replaced.
fn with_router_weight(il: u32, value: f32) -> GgufBuilder {
    let mut file = tiny();
    let name = format!("blk.{il}.ffn_gate_inp.weight");
    let router = file.tensors.iter_mut().find(|t| t.name == name.as_bytes()).unwrap();
    router.data[40..44].copy_from_slice(&value.to_le_bytes());
    file
}

#[test]
fn routers_that_are_no_numbers() {
    for (il, value) in [(0, f32::NAN), (1, f32::NAN), (0, f32::INFINITY), (1, f32::INFINITY)] {
        let (_dir, mut engine) = open(&with_router_weight(il, value));
        let words = format!(
            "layer {il}: the router's logits are NaN or infinite; the file is damaged or the model overflows"
        );
        // Few tokens and many go through other kernels.
        for tokens in [&[1][..], &[1, 2, 3, 4, 5, 6, 7, 8, 9]] {
            let mut session = engine.session().unwrap();
            let refused = eval(&mut engine, &mut session, tokens).unwrap_err();
            assert_eq!(refused.to_string(), words);
            let refused = engine.eval_greedy(&mut session, tokens).unwrap_err();
            assert_eq!(refused.to_string(), words);
            engine.close(session);
        }
        assert_clean(engine.device().instance());
    }
}

#[test]
fn a_full_context_leaves_the_session_usable() {
    let (_dir, mut engine) = open(&tiny());
    let tokens: Vec<u32> = (1..=16).collect();
    let mut whole = engine.session().unwrap();
    let expected = eval(&mut engine, &mut whole, &tokens).unwrap();

    let mut session = engine.session().unwrap();
    eval(&mut engine, &mut session, &tokens[..10]).unwrap();
    let words = "the context is full: 16 tokens; a larger one: -c 256";
    for n in [7, 16] {
        let refused = eval(&mut engine, &mut session, &tokens[..n]).unwrap_err();
        assert_eq!(refused.to_string(), words);
    }
    assert_eq!(engine.eval_greedy(&mut session, &[1; 7]).unwrap_err().to_string(), words);
    assert_eq!(session.n_past(), 10);
    let found = eval(&mut engine, &mut session, &tokens[10..]).unwrap();
    let off = found.iter().zip(&expected).map(|(f, e)| (f - e).abs()).fold(0.0, f32::max);
    let largest = expected.iter().fold(0f32, |a, b| a.max(b.abs()));
    assert!(off <= 1e-2 * largest, "off by {off} of {largest}");
    assert_eq!(eval(&mut engine, &mut session, &[1]).unwrap_err().to_string(), words);
    session.truncate(15);
    eval(&mut engine, &mut session, &[1]).unwrap();
    assert_clean(engine.device().instance());
}

#[test]
fn tokens_outside_the_vocabulary() {
    let (_dir, mut engine) = open(&tiny());
    let mut session = engine.session().unwrap();
    for id in [48, u32::MAX] {
        let refused = eval(&mut engine, &mut session, &[1, id]).unwrap_err().to_string();
        assert_eq!(refused, format!("tokenizer: token {id} is not in the vocabulary of 48"));
    }
    assert_eq!(session.n_past(), 0);
    eval(&mut engine, &mut session, &[0, 47]).unwrap();
}

#[test]
fn an_ubatch_of_no_tokens_is_one_of_one() {
    let (_dir, path) = write(&tiny());
    let mut engine = Engine::open(&path, &EngineOptions { n_ubatch: 0, ..options() }).unwrap();
    let mut session = engine.session().unwrap();
    eval(&mut engine, &mut session, &[1, 2, 3]).unwrap();
    assert_eq!(session.n_past(), 3);
}

#[test]
fn the_engine_refuses_in_the_same_words() {
    let (_dir, path) = write(&with("expert_count", Value::U32(513)));
    let refused = Engine::open(&path, &options()).err().unwrap();
    let words = "key `qwen3moe.expert_count`: is 513, 1 to 512 is possible";
    assert_eq!(refused.to_string(), format!("{}: {words}", path.display()));
}

/// A file that is cut short between its opening and the end of loading.
#[test]
fn a_file_that_shrinks_while_it_is_loaded() {
    let (_dir, engine) = open(&tiny());
    let (_dir, path) = write(&tiny());
    let gguf = Gguf::open(&path).unwrap();
    let model = Model::load(&gguf).unwrap();
    let bytes = cut_in_half(&path);
    let places = vec![Place::Device; model.weights.len()];
    let bar = progress::bytes_bar("loading", bytes);
    let loaded = Residency::load(engine.device(), &gguf, &model.weights, &places, &bar);
    let words = format!("file: it changed from {bytes} to {} bytes while in use", bytes / 2);
    assert_eq!(loaded.err().unwrap().to_string(), format!("{}: {words}", path.display()));
    assert_clean(engine.device().instance());
}

/// The length before.
fn cut_in_half(path: &Path) -> u64 {
    let file = OpenOptions::new().write(true).open(path).unwrap();
    let bytes = file.metadata().unwrap().len();
    file.set_len(bytes / 2).unwrap();
    bytes
}
