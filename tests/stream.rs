//! Streaming changes nothing: the same logits, bit for bit, whatever moves when.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "common/vulkan.rs"]
mod vulkan;

use std::path::Path;
use vkmoe::engine::{Engine, EngineOptions, Outputs};
use vkmoe::stream::options::{HostSource, SlotCount, StreamOptions};
use vulkan::{assert_clean, validation};

const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/demo-q4_k_m.gguf");

fn options(source: HostSource, slots: u32) -> EngineOptions {
    EngineOptions {
        n_ctx: 256,
        n_ubatch: 40,
        vram_limit_bytes: Some(13 << 20),
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

/// A prompt in ubatches, some single tokens, a short batch.
fn hash(options: &EngineOptions) -> String {
    let mut engine = Engine::open(Path::new(DEMO), options).unwrap();
    let tokens: Vec<u32> = (0..64).map(|i| i * 37 % 1441).collect();
    let mut session = engine.session().unwrap();
    for part in [&tokens[..52], &tokens[52..53], &tokens[53..54], &tokens[54..]] {
        engine.eval(&mut session, part, Outputs::All, |_, _| Ok(())).unwrap();
    }
    let hash = session.logits_hash().unwrap();
    let stats = engine.take_stats();
    println!("{:?} {} host layers {stats:?}", options.stream, engine.plan().n_host_layers);
    engine.close(session);
    let instance = engine.device().instance().clone();
    drop(engine);
    assert_clean(&instance);
    hash
}

#[test]
fn no_bit_changes() {
    let all = EngineOptions { vram_limit_bytes: None, ..options(HostSource::Ring, 0) };
    let expected = hash(&all);
    for source in [HostSource::Ring, HostSource::Host, HostSource::Arena, HostSource::Mmap] {
        for slots in [0, 2, 3, 8] {
            assert_eq!(hash(&options(source, slots)), expected, "{source}, {slots} slots");
        }
    }
}
