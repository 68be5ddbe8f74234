//! Streaming changes nothing: the same logits, bit for bit, whatever moves when. On the demo model and
//! on the golden models, whose tensors lie at odd offsets and are of all types.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "common/vulkan.rs"]
mod vulkan;

use std::path::{Path, PathBuf};
use vkmoe::engine::{Engine, EngineOptions, Outputs};
use vkmoe::plan::{CpuMoe, PlacementOptions};
use vkmoe::stream::options::{HostSource, SlotCount, StreamOptions};
use vkmoe::stream::stats::StreamStats;
use vulkan::{assert_clean, validation};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn demo() -> PathBuf {
    root().join("assets/demo-q4_k_m.gguf")
}

fn golden(name: &str) -> PathBuf {
    root().join("tests/golden").join(name).join("model.gguf")
}

/// How experts get to the device in one run.
fn options(source: HostSource, slots: u32, cpu_moe: CpuMoe) -> EngineOptions {
    EngineOptions {
        n_ctx: 256,
        n_ubatch: 24,
        placement: PlacementOptions { cpu_moe, ..PlacementOptions::default() },
        hash_logits: true,
        validation: validation(),
        stream: StreamOptions {
            host_source: Some(source),
            slots: SlotCount::Fixed(slots),
            ..StreamOptions::default()
        },
        ..EngineOptions::default()
    }
}

fn in_vram() -> EngineOptions {
    options(HostSource::Ring, 0, CpuMoe::Unset)
}

/// A prompt of two ubatches, single tokens and a short batch: the hash of all logits.
fn run(model: &Path, options: &EngineOptions) -> (String, StreamStats) {
    let mut engine = Engine::open(model, options).unwrap();
    let n_vocab = engine.hparams().n_vocab;
    let tokens: Vec<u32> = (0..36).map(|i| i * 37 % n_vocab).collect();
    let mut session = engine.session().unwrap();
    for part in [&tokens[..28], &tokens[28..29], &tokens[29..30], &tokens[30..]] {
        engine.eval(&mut session, part, Outputs::All, |_, _| Ok(())).unwrap();
    }
    let hash = session.logits_hash().unwrap();
    let stats = engine.take_stats();
    engine.close(session);
    let instance = engine.device().instance().clone();
    drop(engine);
    assert_clean(&instance);
    (hash, stats)
}

/// Every source with several numbers of slots, and all numbers of slots with one source.
fn ways() -> Vec<(HostSource, u32)> {
    let sources = HostSource::ALL.into_iter().flat_map(|source| [0, 3].map(|n| (source, n)));
    sources.chain([2, 4, 5, 6, 7, 8].map(|n| (HostSource::Ring, n))).collect()
}

#[test]
fn every_way_to_the_device_gives_the_same_bits() {
    let (expected, _) = run(&demo(), &in_vram());
    for (source, slots) in ways() {
        let (hash, stats) = run(&demo(), &options(source, slots, CpuMoe::All));
        assert_eq!(hash, expected, "{source}, {slots} slots");
        match (source, slots) {
            // Everything is pinned before the first pass, and kernels read it there.
            (HostSource::Mmap | HostSource::Arena | HostSource::Host, 0) => {
                assert_eq!(stats.streamed_bytes, 0, "{source}, {slots} slots");
                assert!(stats.direct_bytes > 0, "{source}, {slots} slots");
            }
            _ => assert!(stats.streamed_bytes > 0, "{source}, {slots} slots"),
        }
    }
}

#[test]
fn any_number_of_layers_may_stay_on_the_host() {
    let (expected, _) = run(&demo(), &in_vram());
    for n in [1, 3, 5, 99] {
        for source in [HostSource::Ring, HostSource::Arena] {
            let (hash, _) = run(&demo(), &options(source, 3, CpuMoe::First(n)));
            assert_eq!(hash, expected, "{source}, {n} layers on the host");
        }
    }
}

#[test]
fn golden_models_give_the_same_bits() {
    for name in std::fs::read_dir(root().join("tests/golden")).unwrap() {
        let name = name.unwrap();
        if !name.file_type().unwrap().is_dir() {
            continue;
        }
        let model = golden(name.file_name().to_str().unwrap());
        let (expected, _) = run(&model, &in_vram());
        for source in HostSource::ALL {
            let (hash, _) = run(&model, &options(source, 2, CpuMoe::All));
            assert_eq!(hash, expected, "{}, {source}", model.display());
        }
    }
}

#[test]
fn a_part_may_be_pinned_and_the_rest_go_through_the_ring() {
    let (expected, _) = run(&demo(), &in_vram());
    for source in [HostSource::Mmap, HostSource::Arena, HostSource::Host] {
        for slots in [0, 3] {
            let mut options = options(source, slots, CpuMoe::All);
            options.stream.pin_max_bytes = Some(6 << 20);
            let (hash, stats) = run(&demo(), &options);
            assert_eq!(hash, expected, "{source}, {slots} slots");
            assert!(stats.streamed_bytes > 0 && stats.direct_bytes > 0, "{source}: {stats:?}");
        }
    }
}

/// Copies come late, slots are poisoned with NaN before they are filled, and the host dawdles: a
/// thousand random schedules, each with the right logits.
#[test]
fn races_have_no_chance() {
    const SCHEDULES: u64 = 1000;
    const PASSES: u64 = 25;
    let model = golden("qwen3moe-q4_k");
    let mut plain = Engine::open(&model, &in_vram()).unwrap();
    let tokens: Vec<u32> = (0..u64::from(plain.hparams().n_vocab.min(12)) as u32).collect();
    let logits = |engine: &mut Engine| {
        let mut session = engine.session().unwrap();
        let mut all = Vec::new();
        for part in [&tokens[..11], &tokens[11..]] {
            let sink = |_, logits: &[f32]| {
                all.extend(logits.iter().map(|x| x.to_bits()));
                Ok(())
            };
            engine.eval(&mut session, part, Outputs::All, sink).unwrap();
        }
        engine.close(session);
        all
    };
    let expected = logits(&mut plain);
    for seed in 0..SCHEDULES / PASSES / 2 {
        for source in [HostSource::Ring, HostSource::Arena] {
            let mut options = options(source, 2 + seed as u32 % 7, CpuMoe::All);
            options.stream.chaos = Some(seed);
            let mut engine = Engine::open(&model, &options).unwrap();
            for pass in 0..PASSES {
                assert!(logits(&mut engine) == expected, "{source}, seed {seed}, pass {pass}");
            }
            assert_clean(engine.device().instance());
        }
    }
}
