//! What a run shows of its streaming: traces whose spans agree with the figures and with each other,
//! and the lines on standard error.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "common/vulkan.rs"]
mod vulkan;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;
use vkmoe::engine::{Engine, EngineOptions, Outputs};
use vkmoe::plan::{CpuMoe, PlacementOptions};
use vkmoe::stream::options::{HostSource, SlotCount, StreamOptions};
use vkmoe::trace::{Span, Trace, Track};
use vulkan::{assert_clean, validation};

const DEMO: &str = "assets/demo-q4_k_m.gguf";
const N_LAYERS: u32 = 6;
/// Clocks of two queues may be so far apart.
const TOLERANCE_NS: u64 = 20_000;

fn options(source: HostSource) -> EngineOptions {
    EngineOptions {
        n_ctx: 256,
        n_ubatch: 24,
        placement: PlacementOptions { cpu_moe: CpuMoe::All, ..PlacementOptions::default() },
        validation: validation(),
        stream: StreamOptions {
            host_source: Some(source),
            slots: SlotCount::Fixed(3),
            ..StreamOptions::default()
        },
        tracing: true,
        ..EngineOptions::default()
    }
}

/// The spans of a tensor on a track, by start.
fn spans_of<'a>(trace: &'a Trace, track: Track, name: &str) -> Vec<&'a Span> {
    let mut spans: Vec<&Span> = trace.on(track).filter(|span| span.name == name).collect();
    spans.sort_by_key(|span| span.start_ns);
    spans
}

/// The kernels of the layer of a copied tensor that are called by it, alone or with others: `gate+up`.
fn readers_of<'a>(trace: &'a Trace, copy: &Span) -> Vec<&'a Span> {
    let reads = |span: &&Span| {
        span.il == copy.il && span.kind().split('+').any(|tensor| tensor == copy.kind())
    };
    trace.on(Track::Compute).filter(reads).collect()
}

/// Every tensor that was copied has kernels that read it; each begins after a copy has ended, and none
/// runs while a copy of its tensor does.
fn assert_readers_follow_copies(trace: &Trace) {
    let tensors: BTreeSet<&str> = trace.on(Track::Copy).map(|span| span.name.as_str()).collect();
    assert_eq!(tensors.len(), 3 * N_LAYERS as usize, "{tensors:?}");
    for name in tensors {
        let copies = spans_of(trace, Track::Copy, name);
        let kernels = readers_of(trace, copies[0]);
        assert!(!kernels.is_empty(), "nothing reads {name}");
        for kernel in kernels {
            let runs_beside = |copy: &&&Span| {
                copy.start_ns + TOLERANCE_NS < kernel.end_ns
                    && copy.end_ns > kernel.start_ns + TOLERANCE_NS
            };
            let beside = copies.iter().find(runs_beside);
            assert!(beside.is_none(), "{kernel:?} runs beside {beside:?}");
            let is_before = |copy: &&Span| copy.end_ns <= kernel.start_ns + TOLERANCE_NS;
            assert!(copies.iter().any(is_before), "{name}: nothing before {kernel:?}");
        }
    }
}

#[test]
fn a_trace_agrees_with_the_figures_and_kernels_follow_their_copies() {
    let mut engine = Engine::open(Path::new(DEMO), &options(HostSource::Ring)).unwrap();
    let mut session = engine.session().unwrap();
    let tokens: Vec<u32> = (0..30).collect();
    // Two ubatches that stream, and single tokens whose experts are gathered.
    for part in [&tokens[..28], &tokens[28..29], &tokens[29..]] {
        engine.eval(&mut session, part, Outputs::Last, |_, _| Ok(())).unwrap();
    }
    let (trace, stats) = (engine.take_trace().unwrap(), engine.take_stats());
    assert_eq!(trace.model, "qwen3moe 22M Q4_K - Medium");
    assert_eq!(trace.device, engine.device().info().name);
    let layers = |track| trace.on(track).filter_map(|s| s.il).collect::<BTreeSet<u32>>();
    for track in [Track::Compute, Track::Copy] {
        assert_eq!(layers(track), (0..N_LAYERS).collect(), "{track:?}");
    }
    let summary = trace.summary();
    assert_eq!(summary.copied_bytes, stats.streamed_bytes);
    assert_eq!(summary.copy_ns, stats.copy_ns);
    // Submissions hold more than their kernels, and wall time more than submissions.
    assert!(summary.compute_ns <= stats.compute_ns && stats.compute_ns <= stats.wall_ns, "{stats}");
    assert!(trace.spans.iter().all(|span| span.start_ns <= span.end_ns));
    assert_readers_follow_copies(&trace);
    assert_eq!(engine.take_trace().unwrap().spans, [], "it was taken");
    engine.close(session);
    assert_clean(engine.device().instance());
}

/// Kernels that read host memory themselves have spans, and nothing is copied.
#[test]
fn pinned_experts_of_an_answer_are_no_copies() {
    let mut engine = Engine::open(Path::new(DEMO), &options(HostSource::Arena)).unwrap();
    engine.finish_loading();
    let mut session = engine.session().unwrap();
    engine.eval_greedy(&mut session, &[1]).unwrap();
    let (trace, stats) = (engine.take_trace().unwrap(), engine.take_stats());
    assert_eq!((trace.on(Track::Copy).count(), stats.streamed_bytes), (0, 0));
    assert!(stats.direct_bytes > 0 && !spans_of(&trace, Track::Compute, "output").is_empty());
    let report = engine.pin_report().unwrap();
    assert_eq!(report.pinned_bytes, report.wanted_bytes);
    assert!(report.to_string().ends_with("(arena)"), "{report}");
}

#[test]
fn without_experts_on_the_host_nothing_is_said_of_pinning() {
    let in_vram = EngineOptions {
        n_ctx: 256,
        validation: validation(),
        tracing: false,
        ..EngineOptions::default()
    };
    let mut engine = Engine::open(Path::new(DEMO), &in_vram).unwrap();
    assert!(engine.pin_report().is_none() && engine.take_trace().is_none());
}

// ---------------------------------------------------------------- the program

struct Ran {
    code: Option<i32>,
    out: String,
    err: String,
}

fn vkmoe(args: &[&str]) -> Ran {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vkmoe"));
    command.args(args).env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR")).env_remove("RUST_LOG");
    for name in ["GGML_VK_REGISTER_HOST", "GGML_CUDA_REGISTER_HOST", "GGML_SCHED_PREFETCH_EXPERTS"]
    {
        command.env_remove(name);
    }
    let output = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Ran { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
}

/// Without a cache, which a card would have.
const SUM: [&str; 7] =
    ["run", "What is 27 plus 48?", "--temp", "0", "-cmoe", "--expert-cache", "0"];

#[test]
fn a_run_writes_its_trace_and_closes_with_what_moved() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.json");
    let file = path.to_str().unwrap();
    let ring = ["--host-source", "ring", "--prefetch-experts-slots", "3", "--trace", file];
    let ran = vkmoe(&[&SUM[..], &ring].concat());
    assert_eq!((ran.code, ran.out.as_str()), (Some(0), "75\n"), "{}", ran.err);
    let said = |words: &str| assert!(ran.err.contains(words), "no `{words}` in {}", ran.err);
    said("experts: 10.6 MiB on the host, not pinned: all of it streams through the ring\n");
    said("\n  prompt: streamed ");
    said("\n  answer: streamed ");
    said(" % hidden behind compute | bound: ");
    said(&format!("trace: {file}: wall "));
    let trace = Trace::read(&path).unwrap();
    assert_readers_follow_copies(&trace);
    assert!(trace.summary().copied_bytes > 0);
}

#[test]
fn pictures_and_pinned_experts() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.SVG");
    let pinned =
        ["--host-source", "arena", "--pin-max-mib", "6", "--trace", path.to_str().unwrap()];
    let ran = vkmoe(&[&SUM[..], &pinned].concat());
    assert_eq!((ran.code, ran.out.as_str()), (Some(0), "75\n"), "{}", ran.err);
    assert!(ran.err.contains("of 10.6 MiB (arena); the rest streams"), "{}", ran.err);
    assert!(ran.err.contains("over the limit set by --pin-max-mib 6\n"), "{}", ran.err);
    assert!(ran.err.contains("read directly"), "{}", ran.err);
    assert!(fs::read_to_string(&path).unwrap().starts_with("<svg"));
}

#[test]
fn experts_on_the_device_are_not_spoken_of() {
    let ran = vkmoe(&SUM[..4]);
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    assert!(!ran.err.contains("experts") && !ran.err.contains("streamed"), "{}", ran.err);
}

/// One line that names the file, before the model is looked at; what was there stays.
#[test]
fn a_trace_that_cannot_be_written_is_told_first() {
    let folder = tempfile::tempdir().unwrap();
    let in_folder = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    for command in [&["run", "hi"][..], &["logits", "--tokens", "1"], &["bench"]] {
        let missing = in_folder("none/x.json");
        let ran = vkmoe(&[command, &["-m", "missing.gguf", "--trace", &missing]].concat());
        assert_eq!((ran.code, ran.err.lines().count()), (Some(1), 1), "{}", ran.err);
        assert!(ran.err.starts_with(&format!("error: {missing}: cannot create")), "{}", ran.err);

        let (new, old) = (in_folder("new.svg"), in_folder("old.svg"));
        fs::write(&old, "a picture").unwrap();
        for path in [&new, &old] {
            let ran = vkmoe(&[command, &["-m", "missing.gguf", "--trace", path]].concat());
            assert!(ran.code == Some(1) && ran.err.contains("missing.gguf"), "{}", ran.err);
        }
        assert!(!Path::new(&new).exists(), "nothing ran, and nothing is left");
        assert_eq!(fs::read_to_string(&old).unwrap(), "a picture");
    }
    let ran = vkmoe(&["run", "hi", "--trace", "x.png"]);
    assert_eq!(ran.code, Some(2));
    assert!(ran.err.contains(".json or .svg"), "{}", ran.err);
    let ran = vkmoe(&["plan", "--trace", "x.svg"]);
    assert!(ran.code == Some(1) && ran.err.starts_with("error: --trace: "), "{}", ran.err);
}

#[test]
fn a_bench_says_what_is_pinned_and_traces_its_last_run() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bench.json");
    let tests = ["bench", "-p", "24", "-n", "0,3", "-r", "2", "-ncmoe", "99", "-o", "jsonl"];
    let how = ["--host-source", "ring,arena", "--trace", path.to_str().unwrap()];
    let ran = vkmoe(&[&tests[..], &how].concat());
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    assert_eq!(ran.out.lines().count(), 4, "{}", ran.out);
    let lines: Vec<&str> = ran.err.lines().collect();
    // One for each engine, and the trace.
    assert_eq!(lines.len(), 3, "{}", ran.err);
    assert!(lines[0].ends_with("not pinned: all of it streams through the ring"), "{}", ran.err);
    assert!(lines[1].ends_with("pinned 10.6 of 10.6 MiB (arena)"), "{}", ran.err);
    // Three tokens of one repetition.
    let trace = Trace::read(&path).unwrap();
    let tops = trace.on(Track::Compute).filter(|span| span.name == "token_embd").count();
    assert_eq!(tops, 3);
}
