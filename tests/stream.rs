//! Streaming changes nothing: the same logits, bit for bit, whatever moves when. On the demo model and
//! on the golden models, whose tensors lie at odd offsets and are of all types.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::gguf_builder::GgufBuilder;
use common::vulkan::{assert_clean, validation};
use std::ops::{ControlFlow, Range};

use std::path::{Path, PathBuf};
use vkmoe::Error;
use vkmoe::engine::{Engine, EngineOptions, Outputs, Session};
use vkmoe::gguf::{Gguf, TensorInfo};
use vkmoe::plan::{CpuMoe, PlacementOptions};
use vkmoe::stream::options::{CacheSize, HostSource, SlotCount, StreamOptions};
use vkmoe::stream::stats::StreamStats;

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
        // Asked for: with few slots and fast kernels the plan may think that ubatch by ubatch is faster.
        n_batch: Some(256),
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

/// A prompt of several ubatches, single tokens, a short batch, and a longer one whose last token counts: the
/// hash of all these logits, and what moved.
fn by_layer(model: &Path, options: &EngineOptions) -> (String, StreamStats) {
    let parts = [
        (0..55, Outputs::All),
        (55..56, Outputs::Last),
        (56..62, Outputs::All),
        (62..100, Outputs::Last),
    ];
    evaluate(model, options, &parts)
}

/// A prompt of two ubatches, single tokens and a short batch: the hash of all logits.
fn run(model: &Path, options: &EngineOptions) -> (String, StreamStats) {
    let parts = [0..28, 28..29, 29..30, 30..36].map(|part| (part, Outputs::All));
    evaluate(model, options, &parts)
}

/// Evaluates parts of a text one after the other: the hash of all logits.
fn evaluate(
    model: &Path,
    options: &EngineOptions,
    parts: &[(Range<u32>, Outputs)],
) -> (String, StreamStats) {
    let mut engine = Engine::open(model, options).unwrap();
    let n_vocab = engine.hparams().n_vocab;
    let mut session = engine.session().unwrap();
    for (part, outputs) in parts {
        let tokens: Vec<u32> = part.clone().map(|i| i * 37 % n_vocab).collect();
        engine.eval(&mut session, &tokens, *outputs, |_, _| Ok(())).unwrap();
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

/// Layer by layer or ubatch by ubatch, with batches of several sizes: the same bits from every source and with
/// every number of slots.
#[test]
fn batches_give_the_same_bits_layer_by_layer() {
    let sized = |n_ubatch, n_batch, options| EngineOptions { n_ubatch, n_batch, ..options };
    let (expected, _) = by_layer(&demo(), &sized(24, None, in_vram()));
    for (i, (source, slots)) in ways().into_iter().enumerate() {
        let n_batch = [Some(256), Some(49), None, Some(24)][i % 4];
        let options = sized(24, n_batch, options(source, slots, CpuMoe::All));
        let (hash, _) = by_layer(&demo(), &options);
        assert_eq!(hash, expected, "{source}, {slots} slots, batch {n_batch:?}");
    }
    for (n_ubatch, source) in [(1, HostSource::Ring), (7, HostSource::Arena)] {
        let (expected, _) = by_layer(&demo(), &sized(n_ubatch, None, in_vram()));
        for (n, n_batch) in [(1, Some(256)), (5, Some(30))] {
            let options = options(source, 3 + n, CpuMoe::First(n));
            let (hash, _) = by_layer(&demo(), &sized(n_ubatch, n_batch, options));
            assert_eq!(hash, expected, "{n} layers on the host, ubatch {n_ubatch}");
        }
    }
}

/// Bytes of all experts.
fn expert_bytes(model: &Path) -> u64 {
    let gguf = Gguf::open(model).unwrap();
    let experts = gguf.tensors().iter().filter(|t| t.name.ends_with("_exps.weight"));
    experts.map(|t| t.bytes).sum()
}

/// Bytes that a prompt of `n_tokens` moves.
fn streamed(source: HostSource, slots: u32, n_batch: Option<u32>, n_tokens: u32) -> u64 {
    let options = EngineOptions { n_batch, ..options(source, slots, CpuMoe::All) };
    let mut engine = Engine::open(&demo(), &options).unwrap();
    engine.finish_loading();
    let tokens: Vec<u32> = (0..n_tokens).map(|i| i * 37 % engine.hparams().n_vocab).collect();
    let mut session = engine.session().unwrap();
    engine.eval(&mut session, &tokens, Outputs::Last, |_, _| Ok(())).unwrap();
    engine.close(session);
    let stats = engine.take_stats();
    assert_eq!(stats.direct_bytes, 0, "{stats:?}");
    stats.streamed_bytes
}

#[test]
fn each_batch_moves_every_expert_once() {
    let all = expert_bytes(&demo());
    // Three ubatches of 24 and one of six.
    for (i, slots) in [3, 4, 6, 8].into_iter().enumerate() {
        let source = HostSource::ALL[i];
        assert_eq!(streamed(source, slots, Some(96), 78), all, "{source}, {slots} slots");
    }
    assert_eq!(streamed(HostSource::Ring, 6, Some(48), 96), 2 * all, "batches of two ubatches");
    assert_eq!(streamed(HostSource::Ring, 2, None, 48), 2 * all, "a layer has three tensors");
}

/// Whoever looks on is told how far it is, and may end it; the session goes on from where it was.
#[test]
fn a_batch_can_be_broken_off() {
    let (n_first, n_all) = (9, 80);
    let sink = |_, _: &[f32]| Ok(());
    let eval = |engine: &mut Engine, session: &mut Session, part: &[u32]| {
        engine.eval(session, part, Outputs::All, sink)
    };
    let mut plain = Engine::open(&demo(), &in_vram()).unwrap();
    let tokens: Vec<u32> = (0..n_all).map(|i| i * 37 % plain.hparams().n_vocab).collect();
    let (first, rest) = tokens.split_at(n_first);
    let mut session = plain.session().unwrap();
    eval(&mut plain, &mut session, first).unwrap();
    eval(&mut plain, &mut session, rest).unwrap();
    let expected = session.logits_hash();

    for (slots, stops) in [(6, [1, 2, 5]), (3, [2, 4, 5]), (0, [1, 1, 2])] {
        let mut options = options(HostSource::Ring, slots, CpuMoe::All);
        // Chaos ends stages that would be longer.
        options.stream.chaos = Some(slots.into());
        let mut engine = Engine::open(&demo(), &options).unwrap();
        let mut session = engine.session().unwrap();
        eval(&mut engine, &mut session, first).unwrap();
        for stop_at in stops {
            let mut calls = 0;
            engine.set_watch(Box::new(move |progress| {
                calls += 1;
                assert!(progress.done < progress.total && progress.total == 71 * 6, "{progress:?}");
                if calls < stop_at { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
            }));
            let broken = engine.eval(&mut session, rest, Outputs::None, sink);
            assert!(matches!(broken, Err(Error::Interrupted)), "{slots} slots: {broken:?}");
            session.truncate(n_first as u32);
        }
        engine.set_watch(Box::new(|_| ControlFlow::Continue(())));
        eval(&mut engine, &mut session, rest).unwrap();
        assert_eq!(session.logits_hash(), expected, "{slots} slots");
        engine.close(session);
        assert_clean(engine.device().instance());
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
    let entries = std::fs::read_dir(root().join("tests/golden")).unwrap().map(Result::unwrap);
    let mut names: Vec<_> = entries.filter(|e| e.path().is_dir()).map(|e| e.file_name()).collect();
    names.sort();
    assert!(names.len() >= 12, "{names:?}");
    for (i, name) in names.iter().enumerate() {
        let model = golden(name.to_str().unwrap());
        let (expected, _) = run(&model, &in_vram());
        // The pinned sources take turns: they differ in what is pinned, not in what is copied.
        for source in [HostSource::Ring, HostSource::ALL[i % 3]] {
            let (hash, _) = run(&model, &options(source, 2, CpuMoe::All));
            assert_eq!(hash, expected, "{}, {source}", model.display());
        }
        let small = |options| EngineOptions { n_ubatch: 16, ..options };
        let (expected, _) = by_layer(&model, &small(in_vram()));
        let options = small(options(HostSource::ALL[i % 4], 3 + i as u32 % 4, CpuMoe::All));
        assert_eq!(by_layer(&model, &options).0, expected, "{}", model.display());
        // A prompt and some tokens, with room for a few experts: what was used last is cached.
        let single = (12..18).map(|i| (i..i + 1, Outputs::All));
        let parts: Vec<_> = [(0..12, Outputs::Last)].into_iter().chain(single).collect();
        let (expected, _) = evaluate(&model, &in_vram(), &parts);
        let options = self::options(HostSource::ALL[i / 2 % 4], 3 * (i as u32 % 2), CpuMoe::All);
        let mut options = cached(expert_bytes(&model) / 3, options);
        options.stream.chaos = Some(i as u64);
        let (hash, stats) = evaluate(&model, &options, &parts);
        assert_eq!(hash, expected, "{}: {stats}", model.display());
        assert!(stats.promoted_bytes > 0, "{}: {stats}", model.display());
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
/// thousand random schedules of a pass, each with the right logits.
#[test]
fn races_have_no_chance() {
    const SCHEDULES: u64 = 1000;
    const ROUNDS: u64 = 25;
    let model = golden("qwen3moe-q4_k");
    // One ubatch, then another; or four that go layer by layer, then one.
    let sized = |seed, options| EngineOptions { n_ubatch: [24, 3][seed as usize % 2], ..options };
    let mut plain = [0, 1].map(|seed| Engine::open(&model, &sized(seed, in_vram())).unwrap());
    let tokens: Vec<u32> = (0..u64::from(plain[0].hparams().n_vocab.min(12)) as u32).collect();
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
    let expected = plain.each_mut().map(logits);
    // Two passes a round, two sources a seed.
    for seed in 0..SCHEDULES / ROUNDS / 4 {
        for source in [HostSource::Ring, HostSource::Arena] {
            let mut options = sized(seed, options(source, 2 + seed as u32 % 7, CpuMoe::All));
            options.stream.chaos = Some(seed);
            let mut engine = Engine::open(&model, &options).unwrap();
            for round in 0..ROUNDS {
                let same = logits(&mut engine) == expected[seed as usize % 2];
                assert!(same, "{source}, seed {seed}, round {round}");
            }
            assert_clean(engine.device().instance());
        }
    }
}

/// More than all experts take.
const ALL_CACHED: u64 = 1 << 30;

fn cached(bytes: u64, options: EngineOptions) -> EngineOptions {
    let expert_cache = CacheSize::Fixed(bytes);
    EngineOptions { stream: StreamOptions { expert_cache, ..options.stream }, ..options }
}

/// Whatever was used last is cached, in disorder.
fn restless(bytes: u64, options: EngineOptions) -> EngineOptions {
    let mut options = cached(bytes, options);
    options.stream.chaos = Some(1);
    options
}

/// A prompt, sixteen single tokens, a few together, another prompt, single tokens.
fn talk(model: &Path, options: &EngineOptions) -> (String, StreamStats) {
    let single = |range: Range<u32>| range.map(|i| (i..i + 1, Outputs::All));
    let parts = [(0..50, Outputs::Last)].into_iter().chain(single(50..66));
    let parts = parts.chain([(66..70, Outputs::All), (70..120, Outputs::All)]);
    evaluate(model, options, &parts.chain(single(120..126)).collect::<Vec<_>>())
}

/// With room for one expert or two, for half of them and for all, from every source, with slots and without, with
/// some layers on the device, and in disorder: the same bits.
#[test]
fn cached_experts_give_the_same_bits() {
    let (expected, _) = talk(&demo(), &in_vram());
    let half = expert_bytes(&demo()) / 2;
    for (i, source) in HostSource::ALL.into_iter().enumerate() {
        for (j, slots) in [0, 3].into_iter().enumerate() {
            for (k, bytes) in [300_000, half, ALL_CACHED].into_iter().enumerate() {
                let cpu_moe = if (i + j + k) % 3 == 2 { CpuMoe::First(3) } else { CpuMoe::All };
                let mut options = cached(bytes, options(source, slots, cpu_moe));
                // In disorder what was used last is cached, whatever it displaces.
                options.stream.chaos = (i % 2 == j).then_some(k as u64);
                let (hash, stats) = talk(&demo(), &options);
                let what = format!("{source}, {slots} slots, {bytes} bytes cached, {cpu_moe:?}");
                assert_eq!(hash, expected, "{what}: {stats}");
                assert!(stats.promoted_bytes > 0, "{what}: {stats}");
                let evicts = bytes < half || (bytes == half && cpu_moe == CpuMoe::All);
                assert!(evicts || stats.cache_evictions == 0, "{what}: {stats}");
                let is_restless = options.stream.chaos.is_some() && bytes < half;
                assert!(!is_restless || stats.cache_evictions > 5, "{what}: {stats}");
                assert!(bytes < half || stats.cache_hits > 0, "{what}: {stats}");
            }
        }
    }
}

/// Once everything has had its turn nothing is read from the host any more.
#[test]
fn a_cache_for_everything_ends_up_with_everything() {
    for source in [HostSource::Ring, HostSource::Arena] {
        let options = cached(ALL_CACHED, options(source, 3, CpuMoe::All));
        let mut engine = Engine::open(&demo(), &options).unwrap();
        engine.finish_loading();
        let mut session = engine.session().unwrap();
        let mut last = StreamStats::default();
        for i in 0..250 {
            let tokens = [i * 37 % engine.hparams().n_vocab];
            engine.eval(&mut session, &tokens, Outputs::Last, |_, _| Ok(())).unwrap();
            last = engine.take_stats();
        }
        engine.close(session);
        assert_eq!(last.hit_share(), Some(1.0), "{source}: {last}");
        assert_eq!((last.streamed_bytes, last.direct_bytes), (0, 0), "{source}: {last}");
        assert_clean(engine.device().instance());
    }
}

/// What a prompt used is there for the answer, and what was cached for one session is for the next.
#[test]
fn a_cache_outlives_prompts_and_sessions() {
    let options = cached(ALL_CACHED, options(HostSource::Arena, 6, CpuMoe::All));
    let mut engine = Engine::open(&demo(), &options).unwrap();
    engine.finish_loading();
    let n_vocab = engine.hparams().n_vocab;
    let text: Vec<u32> = (0..200).map(|i| i * 37 % n_vocab).collect();
    let eval = |engine: &mut Engine, session: &mut Session, tokens: &[u32]| {
        engine.eval(session, tokens, Outputs::Last, |_, _| Ok(())).unwrap();
        engine.take_stats()
    };
    let mut session = engine.session().unwrap();
    let prompt = eval(&mut engine, &mut session, &text);
    assert_eq!(prompt.hit_share(), None, "{prompt}");
    // Four tokens' worth of experts, chosen by the prompt.
    let first: Vec<_> = (0..12).map(|i| eval(&mut engine, &mut session, &text[i..=i])).collect();
    engine.close(session);
    assert_eq!(first[0].cache_hits, 0, "{}", first[0]);
    assert!(first[0].promoted_bytes > 0 && first[11].cache_hits > 0, "{} {}", first[0], first[11]);
    let mut session = engine.session().unwrap();
    let next = eval(&mut engine, &mut session, &text[..1]);
    assert!(next.cache_hits > 0, "{next}");
    // What is cached is not streamed.
    let again = eval(&mut engine, &mut session, &text);
    assert!(again.streamed_bytes < prompt.streamed_bytes, "{again} after {prompt}");
    engine.close(session);
}

/// The keys of a model, without tensors.
fn keys_of(gguf: &Gguf) -> GgufBuilder {
    let keys = gguf.metadata().iter();
    keys.fold(GgufBuilder::new(), |builder, (name, value)| builder.key(name, value.clone()))
}

fn add(builder: GgufBuilder, gguf: &Gguf, t: &TensorInfo) -> GgufBuilder {
    builder.tensor(&t.name, t.ty, &t.shape[..t.n_dims as usize], gguf.bytes(t).to_vec())
}

/// Gate and up of each expert in one tensor, as newer converters write them.
#[test]
fn fused_gate_and_up_give_the_same_bits() {
    let model = golden("qwen3moe-q6_k");
    let (expected, _) = run(&model, &in_vram());
    let gguf = Gguf::open(&model).unwrap();
    let mut builder = keys_of(&gguf);
    for t in gguf.tensors() {
        let Some(layer) = t.name.strip_suffix(".ffn_gate_exps.weight") else {
            if !t.name.ends_with(".ffn_up_exps.weight") {
                builder = add(builder, &gguf, t);
            }
            continue;
        };
        let up = gguf.tensor(&format!("{layer}.ffn_up_exps.weight")).unwrap();
        let matrix = (t.bytes / t.shape[2]) as usize;
        let experts = gguf.bytes(t).chunks(matrix).zip(gguf.bytes(up).chunks(matrix));
        let data = experts.flat_map(|(gate, up)| [gate, up].concat()).collect();
        let shape = [t.shape[0], 2 * t.shape[1], t.shape[2]];
        builder = builder.tensor(&format!("{layer}.ffn_gate_up_exps.weight"), t.ty, &shape, data);
    }
    let dir = tempfile::tempdir().unwrap();
    let fused = builder.write(&dir.path().join("fused.gguf"));
    assert_eq!(run(&fused, &in_vram()).0, expected);
    let (talked, _) = talk(&fused, &in_vram());
    for source in [HostSource::Ring, HostSource::Mmap] {
        let options = options(source, 3, CpuMoe::All);
        let (hash, stats) = run(&fused, &options);
        assert_eq!(hash, expected, "{source}");
        assert!(stats.streamed_bytes > 0, "{source}");
        let (hash, stats) = talk(&fused, &restless(expert_bytes(&fused) / 2, options));
        assert_eq!(hash, talked, "{source}: {stats}");
        assert!(stats.cache_hits > 0, "{source}: {stats}");
    }
}

/// Tensors spread over three files.
#[test]
fn split_models_give_the_same_bits() {
    const PARTS: usize = 3;
    let model = golden("qwen3moe-q5_k");
    let (expected, _) = run(&model, &in_vram());
    let gguf = Gguf::open(&model).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let n = gguf.tensors().len();
    let mut first = None;
    for part in 0..PARTS {
        let builder = if part == 0 { keys_of(&gguf) } else { GgufBuilder::new() };
        let builder = builder.split(part as u16, PARTS as u16, n as i32);
        let tensors = gguf.tensors().iter().skip(part).step_by(PARTS);
        let builder = tensors.fold(builder, |builder, t| add(builder, &gguf, t));
        let name = format!("m-{:05}-of-{PARTS:05}.gguf", part + 1);
        first.get_or_insert(builder.write(&dir.path().join(name)));
    }
    let first = first.unwrap();
    for source in HostSource::ALL {
        let (hash, _) = run(&first, &options(source, 3, CpuMoe::All));
        assert_eq!(hash, expected, "{source}");
    }
    let (expected, _) = talk(&model, &in_vram());
    for source in [HostSource::Ring, HostSource::Mmap] {
        let options = restless(expert_bytes(&model) / 2, options(source, 3, CpuMoe::All));
        let (hash, stats) = talk(&first, &options);
        assert_eq!(hash, expected, "{source}: {stats}");
        assert!(stats.cache_hits > 0, "{source}: {stats}");
    }
}
