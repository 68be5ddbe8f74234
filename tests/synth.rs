//! Models of random weights: that they are as large as the ones they imitate, that their values are what
//! was asked for, that they run, and that their routers spread tokens over the experts.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;
mod reference_model;

use common::vulkan::{assert_clean, validation};
use reference_model::{ReferenceModel, quant};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicBool;
use tempfile::TempDir;
use vkmoe::engine::{Engine, EngineOptions, Outputs};
use vkmoe::gguf::write::Head;
use vkmoe::gguf::{GgmlType, Gguf};
use vkmoe::model::Model;
use vkmoe::model::weights::SUPPORTED_TYPES;
use vkmoe::progress::hidden_bar;
use vkmoe::synth::file::{Existing, write};
use vkmoe::synth::mix::Mix;
use vkmoe::synth::presets::{PRESETS, Shape, find};
use vkmoe::synth::{Fill, Plan, Synth};
use vkmoe::tokenizer::{Special, Tokenizer, Vocab};

/// A file in a folder of its own.
struct Written {
    _dir: TempDir,
    path: PathBuf,
}

fn written(plan: &Plan) -> Written {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let bar = hidden_bar("writing", 0);
    let bytes = write(plan, &path, Existing::Keep, &bar, &AtomicBool::new(false)).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().len(), bytes);
    assert_eq!(
        bar.position(),
        Head::new(&plan.keys, &plan.tensors).bytes.len() as u64 + tensor_bytes(plan)
    );
    Written { _dir: dir, path }
}

fn tiny(mix: Mix) -> Synth {
    Synth::new(find("tiny").unwrap(), Some(mix), None, 7)
}

/// Experts of a width that types with long blocks cannot have.
fn narrow(mix: Mix) -> Synth {
    let tiny = tiny(mix);
    Synth { shape: Shape { n_layer: 2, n_ff_exp: 96, ..tiny.shape }, ..tiny }
}

fn tensor_bytes(plan: &Plan) -> u64 {
    plan.tensors.iter().map(|t| t.bytes().unwrap()).sum()
}

/// Preset, mix, GiB and billions of weights as `llama-bench` prints them for published files. They are
/// in many public reports. Files of a publisher's own mix ("UD") are left out; those made with an importance
/// matrix may have another type in the first layers.
const PUBLISHED: &[(&str, Mix, f64, f64)] = &[
    ("qwen3-30b-a3b", Mix::Q2K, 10.48, 30.53),
    ("qwen3-30b-a3b", Mix::Q3KM, 13.70, 30.53),
    ("qwen3-30b-a3b", Mix::Q4_0, 16.18, 30.53),
    ("qwen3-30b-a3b", Mix::Q4KM, 17.28, 30.53),
    ("qwen3-30b-a3b", Mix::Q5KM, 20.23, 30.53),
    ("qwen3-30b-a3b", Mix::Q6K, 23.36, 30.53),
    ("qwen3-30b-a3b", Mix::Q8_0, 30.25, 30.53),
    ("qwen3-30b-a3b", Mix::Bf16, 56.89, 30.53),
    ("qwen3-coder-30b-a3b", Mix::Q4KM, 17.28, 30.53),
    ("qwen3-235b-a22b", Mix::Q4KM, 132.39, 235.09),
    ("gpt-oss-20b", Mix::Mxfp4, 11.27, 20.91),
    ("gpt-oss-20b", Mix::F16, 12.83, 20.91),
    ("gpt-oss-120b", Mix::Mxfp4, 59.02, 116.83),
    ("qwen3.6-35b-a3b", Mix::Q4KM, 19.70, 34.66),
    ("qwen3-next-80b-a3b", Mix::Q4KM, 45.08, 79.67),
    ("glm-4.5-air", Mix::Q4KS, 62.27, 110.47),
    ("glm-4.5-air", Mix::Q4KM, 67.96, 110.47),
    ("mixtral-8x7b", Mix::Q4KM, 26.49, 46.70),
];

#[test]
fn sizes_are_those_of_published_files() {
    for &(name, mix, gib, billions) in PUBLISHED {
        let plan = Synth::new(find(name).unwrap(), Some(mix), None, 1).plan();
        let found = tensor_bytes(&plan) as f64 / (1u64 << 30) as f64;
        let mix = mix.name();
        assert!((found / gib - 1.0).abs() < 0.005, "{name} {mix}: {found:.2} GiB, not {gib}");
        let found = plan.elements() as f64 / 1e9;
        assert!((found - billions).abs() < 0.006, "{name} {mix}: {found:.2} B, not {billions}");
    }
}

#[test]
fn every_preset_is_compared_with_a_published_file() {
    let compared: BTreeSet<_> = PUBLISHED.iter().map(|row| row.0).collect();
    let presets = PRESETS.iter().map(|preset| preset.name).filter(|&name| name != "tiny");
    assert_eq!(compared, presets.collect());
    let mixes: BTreeSet<_> = PUBLISHED.iter().map(|row| row.1.name()).collect();
    let without: Vec<_> = Mix::all().map(Mix::name).filter(|name| !mixes.contains(name)).collect();
    // Published only with an importance matrix.
    assert_eq!(without, ["iq4_xs"]);
}

/// The parser finds what was planned, for every preset and mix; files are not written.
#[test]
fn heads_parse() {
    for preset in PRESETS {
        for mix in Mix::all() {
            let plan = Synth::new(preset, Some(mix), Some(2), 1).plan();
            let head = Head::new(&plan.keys, &plan.tensors);
            // Large files, of which no byte is touched.
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("model.gguf");
            fs::write(&path, &head.bytes).unwrap();
            let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
            file.set_len(head.file_bytes).unwrap();
            let gguf = Gguf::open(&path).unwrap();
            assert_eq!(gguf.tensors().len(), plan.tensors.len());
            assert_eq!(gguf.total_bytes(), tensor_bytes(&plan));
            if gguf.metadata().require_str("general.architecture").unwrap() == "qwen3moe" {
                let model = Model::load(&gguf).unwrap();
                assert_eq!(model.hparams.n_layer, 2);
                assert_eq!(model.hparams.n_vocab, preset.shape.n_vocab);
            }
        }
    }
}

/// The types of an expert's matrices, layer by layer, as in the published Q4_K_M file.
#[test]
fn the_mix_follows_the_layers() {
    let plan = Synth::new(find("qwen3-30b-a3b").unwrap(), None, None, 1).plan();
    let ty = |name: &str| plan.tensors.iter().find(|t| t.name == name).unwrap().ty;
    for (il, down) in
        [(0, GgmlType::Q6_K), (6, GgmlType::Q4_K), (8, GgmlType::Q6_K), (47, GgmlType::Q6_K)]
    {
        assert_eq!(ty(&format!("blk.{il}.ffn_down_exps.weight")), down, "layer {il}");
        assert_eq!(ty(&format!("blk.{il}.attn_v.weight")), down, "layer {il}");
        assert_eq!(ty(&format!("blk.{il}.ffn_up_exps.weight")), GgmlType::Q4_K);
        assert_eq!(ty(&format!("blk.{il}.ffn_gate_inp.weight")), GgmlType::F32);
    }
    assert_eq!((ty("output.weight"), ty("token_embd.weight")), (GgmlType::Q6_K, GgmlType::Q4_K));
}

/// Every tensor of every mix: finite, of the planned deviation, around zero.
#[test]
fn values_are_as_planned() {
    let mut seen = BTreeSet::new();
    for synth in Mix::all().flat_map(|mix| [tiny(mix), narrow(mix)]) {
        let plan = synth.plan();
        let file = written(&plan);
        let gguf = Gguf::open(&file.path).unwrap();
        for (tensor, &fill) in gguf.tensors().iter().zip(&plan.fills) {
            seen.insert(tensor.ty.name());
            let values = quant(tensor.ty).dequantize(gguf.bytes(tensor));
            check_values(&format!("{} {}", tensor.name, tensor.ty), &values, fill);
        }
    }
    // All that the kernels read, but for a type that no mix has.
    let supported = SUPPORTED_TYPES.iter().map(|ty| ty.name()).filter(|&name| name != "Q4_1");
    assert_eq!(seen, supported.collect());
}

fn check_values(what: &str, values: &[f32], fill: Fill) {
    let n = values.len() as f64;
    let mean = values.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
    let square = values.iter().map(|&v| f64::from(v) * f64::from(v)).sum::<f64>() / n;
    match fill {
        Fill::Constant(x) => assert!(values.iter().all(|&v| v == x), "{what}"),
        Fill::Random { std } => {
            let (found, std) = (square.sqrt(), f64::from(std));
            assert!((found / std - 1.0).abs() < 0.08, "{what}: deviation {found}, not {std}");
            assert!(mean.abs() < 0.12 * std, "{what}: mean {mean} at a deviation of {std}");
        }
    }
}

/// Types, engine and kernels together: every mix answers with finite logits that depend on the token.
#[test]
fn every_mix_runs() {
    for synth in Mix::all().flat_map(|mix| [tiny(mix), narrow(mix)]) {
        let file = written(&synth.plan());
        let options =
            EngineOptions { n_ctx: 64, validation: validation(), ..EngineOptions::default() };
        let mut engine = Engine::open(&file.path, &options).unwrap();
        let mut session = engine.session().unwrap();
        let mut rows: Vec<Vec<f32>> = Vec::new();
        let sink = |_, logits: &[f32]| {
            rows.push(logits.to_vec());
            Ok(())
        };
        engine.eval(&mut session, &[1, 200, 511, 77, 78], Outputs::All, sink).unwrap();
        engine.close(session);
        let mix = synth.mix.name();
        assert!(rows.iter().flatten().all(|logit| logit.is_finite()), "{mix}");
        assert_eq!(rows.len(), 5);
        assert!(rows.windows(2).all(|pair| pair[0] != pair[1]), "{mix}");
        assert_clean(engine.device().instance());
    }
}

/// Gains of the embedding and of what writes into the residual stream keep tokens apart.
#[test]
fn routers_use_all_experts() {
    let file = written(&tiny(Mix::Q4KM).plan());
    let gguf = Gguf::open(&file.path).unwrap();
    let tokens: Vec<u32> = (0..96).map(|i| i * 5).collect();
    let forward = ReferenceModel::new(&gguf).forward(&tokens);
    let (n_expert, n_used) = (16, 4);
    let fair = tokens.len() * n_used / n_expert;
    for (il, uses) in forward.uses.iter().enumerate() {
        assert_eq!(uses.iter().sum::<usize>(), tokens.len() * n_used);
        let used = uses.iter().filter(|&&n| n > 0).count();
        assert!(used >= n_expert - 1, "layer {il}: {used} experts are used: {uses:?}");
        assert!(uses.iter().all(|&n| n <= 3 * fair), "layer {il}: {uses:?}");
    }
}

#[test]
fn the_seed_decides_and_the_number_of_threads_does_not() {
    let bytes = |threads: usize, seed: u64| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let plan = Synth { seed, ..tiny(Mix::Q4KM) }.plan();
        pool.install(|| fs::read(written(&plan).path).unwrap())
    };
    let one = bytes(1, 7);
    assert!(one == bytes(3, 7));
    assert!(one == bytes(8, 7));
    assert!(one != bytes(1, 8));
}

/// Layers, and the experts of one, are not copies of each other.
#[test]
fn tensors_differ() {
    let file = written(&tiny(Mix::Q4_0).plan());
    let gguf = Gguf::open(&file.path).unwrap();
    let mut seen = BTreeSet::new();
    for tensor in gguf.tensors().iter().filter(|t| t.name.contains("_exps.")) {
        for expert in gguf.bytes(tensor).chunks(tensor.bytes as usize / 16) {
            assert!(seen.insert(blake3::hash(expert).to_hex().to_string()), "{}", tensor.name);
        }
    }
    assert_eq!(seen.len(), 4 * 3 * 16);
}

#[test]
fn texts_and_chats_can_be_encoded() {
    let file = written(&tiny(Mix::Q8_0).plan());
    let gguf = Gguf::open(&file.path).unwrap();
    let tokenizer = Tokenizer::new(Vocab::from_gguf(&gguf).unwrap()).unwrap();
    let text = "the first, ünd …\n";
    let ids = tokenizer.encode(text, Special::Plain).unwrap();
    assert_eq!(tokenizer.decode(&ids, false), text);
    assert!(ids.len() < text.len(), "the merge is used");
    let ids = tokenizer.encode("<|im_start|>x<|im_end|>", Special::Parse).unwrap();
    assert_eq!(ids.len(), 3);
    assert_eq!(tokenizer.eos(), ids.last().copied());
}

/// Names in a folder.
fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn what_cannot_be_finished_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let bar = hidden_bar("writing", 0);
    let try_write = |plan: &Plan, stop: bool| {
        write(plan, &path, Existing::Keep, &bar, &AtomicBool::new(stop)).unwrap_err().to_string()
    };
    let stopped = try_write(&tiny(Mix::Q4KM).plan(), true);
    assert!(stopped.contains("stopped"), "{stopped}");
    // An exabyte.
    let tiny = tiny(Mix::Q4KM);
    let shape =
        Shape { n_embd: 1 << 20, n_ff_exp: 1 << 20, n_expert: 512, n_layer: 1000, ..tiny.shape };
    let full = try_write(&Synth { shape, ..tiny }.plan(), false);
    assert!(full.contains("model.gguf: cannot write") && full.contains("are free"), "{full}");
    assert_eq!(names(dir.path()), [] as [&str; 0]);
}

/// `vkmoe synth`: exit status, standard output, standard error.
fn vkmoe(args: &[&str]) -> (bool, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_vkmoe")).args(args).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.success(), text(output.stdout), text(output.stderr))
}

#[test]
fn the_command_writes_and_replaces_only_when_asked() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.gguf");
    let out = path.to_str().unwrap();
    let synth = ["synth", out, "--preset", "tiny", "--type", "q8_0", "--layers", "1"];
    let (ok, said, err) = vkmoe(&synth);
    assert!(ok, "{err}");
    assert!(said.starts_with(out) && said.contains("tiny q8_0") && said.contains("GB/s"), "{said}");
    assert_eq!(names(dir.path()), ["tiny.gguf"]);
    let before = fs::read(&path).unwrap();

    let (ok, said, err) = vkmoe(&synth);
    assert!(!ok && said.is_empty());
    assert_eq!(err.lines().count(), 1, "{err}");
    assert!(err.contains("tiny.gguf") && err.contains("--force"), "{err}");
    assert_eq!(fs::read(&path).unwrap(), before);

    let (ok, ..) = vkmoe(&[&synth[..], &["--force", "--seed", "2"]].concat());
    assert!(ok && fs::read(&path).unwrap() != before);
    let (ok, _, err) = vkmoe(&["inspect", out]);
    assert!(ok, "{err}");
}

/// A limit that the system sets, as a full disk or a quota would: found out while writing.
#[cfg(unix)]
#[test]
fn a_file_that_the_system_refuses_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let script = r#"trap "" XFSZ; ulimit -f 1000; exec "$0" synth "$1" --preset tiny"#;
    let out = dir.path().join("x.gguf");
    let mut sh = Command::new("sh");
    let output = sh.args(["-c", script, env!("CARGO_BIN_EXE_vkmoe")]).arg(&out).output().unwrap();
    let err = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success());
    assert!(err.contains("x.gguf") && err.contains("cannot write"), "{err}");
    assert_eq!(err.lines().count(), 1, "{err}");
    assert_eq!(names(dir.path()), [] as [&str; 0]);
}

#[test]
fn the_command_names_what_is_wrong() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    fs::create_dir(path("folder")).unwrap();
    let no_folder = path("none/x.gguf");
    let cases: [(&[&str], &str); 5] = [
        (&[&path("x"), "--preset", "nobody"], "nobody"),
        (&[&path("x"), "--preset", "tiny", "--type", "q9"], "q9"),
        (&[&path("x"), "--preset", "tiny", "--layers", "0"], "--layers"),
        (&[&path("folder"), "--preset", "tiny", "--force"], "not a file"),
        (&[&no_folder, "--preset", "tiny"], "none/x.gguf"),
    ];
    for (args, word) in cases {
        let (ok, said, err) = vkmoe(&[&["synth"], args].concat());
        assert!(!ok && said.is_empty(), "{args:?}");
        assert!(err.contains(word) && !err.contains("panicked"), "{err}");
    }
    assert_eq!(names(dir.path()), ["folder"]);
}
