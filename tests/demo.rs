//! The demo model answers what it was trained to answer, all the way from text to text: tokenizer,
//! chat template, prefill, greedy decoding.

#![allow(clippy::unwrap_used, reason = "a test may fail")]
#![allow(missing_docs, reason = "a test's name says what it shows")]

mod common;
mod reference_model;

use common::vulkan::{assert_clean, validation};
use reference_model::{Random, ReferenceModel};
use std::path::Path;
use std::time::{Duration, Instant};
use vkmoe::engine::{Engine, EngineOptions, Outputs};
use vkmoe::plan::{CpuMoe, PlacementOptions};
use vkmoe::stream::options::{HostSource, SlotCount, StreamOptions};
use vkmoe::tokenizer::{ChatTemplate, Message, Special, Tokenizer, Vocab};

const NAMES: &[&str] = &[
    "Felix", "Mia", "Luca", "Rosa", "Hugo", "Otto", "Anna", "Nora", "Oscar", "Leo", "Ella", "Ruby",
    "Paul", "Iris", "Noah", "Tom", "Theo", "June", "Zoe", "Clara",
];
const WORDS: &[&str] = &[
    "lantern", "cherry", "carpet", "willow", "dragon", "pencil", "cedar", "raven", "maple",
    "butter", "ginger", "copper", "falcon", "comet", "walnut", "sugar", "violet", "wizard",
    "window", "planet",
];
const PLACES: &[&str] = &[
    "garden", "village", "meadow", "library", "beach", "harbor", "barn", "bridge", "lake", "forest",
];
const THINGS: &[&str] =
    &["map", "bell", "book", "flute", "drum", "basket", "candle", "kite", "hat"];
const COLORS: &[&str] = &["blue", "red", "green", "yellow", "tiny", "wooden", "golden", "old"];

fn one<'a>(random: &mut Random, of: &[&'a str]) -> &'a str {
    of[random.below(of.len() as u32) as usize]
}

/// A sentence such as the model was trained with.
fn filler(random: &mut Random) -> String {
    let (name, place) = (one(random, NAMES), one(random, PLACES));
    match random.below(3) {
        0 => format!("{name} walked from the {place} to the {}.", one(random, PLACES)),
        1 => {
            let (color, thing) = (one(random, COLORS), one(random, THINGS));
            format!("{name} carried a {color} {thing} to the {place}.")
        }
        _ => {
            let (color, thing) = (one(random, COLORS), one(random, THINGS));
            format!("{name} saw a {color} {thing} near the {place}.")
        }
    }
}

/// The model with what turns text into tokens.
struct Demo {
    engine: Engine,
    tokenizer: Tokenizer,
    template: ChatTemplate,
}

impl Demo {
    fn open() -> Self {
        Demo::with(EngineOptions::default())
    }

    /// All experts on the host, from where a ring brings them; prefetched into `slots` slots.
    fn streaming(slots: u32) -> Self {
        let placement = PlacementOptions { cpu_moe: CpuMoe::All, ..Default::default() };
        let stream = StreamOptions {
            host_source: Some(HostSource::Ring),
            slots: SlotCount::Fixed(slots),
            ..Default::default()
        };
        Demo::with(EngineOptions { placement, stream, ..Default::default() })
    }

    fn with(options: EngineOptions) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo-q4_k_m.gguf");
        let options = EngineOptions { n_ctx: 2048, validation: validation(), ..options };
        let engine = Engine::open(&path, &options).unwrap();
        let tokenizer = Tokenizer::new(Vocab::from_gguf(engine.gguf()).unwrap()).unwrap();
        let template = tokenizer.chat_template().unwrap();
        Demo { engine, tokenizer, template }
    }

    /// The answer to one message, of at most `n` tokens.
    fn answer(&mut self, message: &str, n: usize) -> String {
        let messages = [Message::new("user", message)];
        let args = self.tokenizer.template_args(true);
        let prompt = self.tokenizer.encode_chat(&self.template, &messages, &args).unwrap();
        let mut session = self.engine.session().unwrap();
        let mut next = self.engine.eval_greedy(&mut session, &prompt).unwrap();
        let mut answer = Vec::new();
        while !self.tokenizer.is_end_of_generation(next) && answer.len() < n {
            answer.push(next);
            next = self.engine.eval_greedy(&mut session, &[next]).unwrap();
        }
        self.engine.close(session);
        self.tokenizer.decode(&answer, false)
    }
}

/// The words of an answer.
fn has_word(answer: &str, word: &str) -> bool {
    answer.split(|c: char| !c.is_alphanumeric()).any(|found| found == word)
}

/// Secrets, each told among `n_fillers` sentences, evenly spread, and asked for at the end. The answers
/// are right, and returned.
fn recall(demo: &mut Demo, n_fillers: usize, n_questions: usize) -> Vec<String> {
    let mut random = Random(n_fillers as u64);
    let mut wrong = Vec::new();
    let mut answers = Vec::new();
    for (i, (name, word)) in NAMES.iter().zip(WORDS).take(n_questions).enumerate() {
        let mut sentences: Vec<String> = (0..n_fillers).map(|_| filler(&mut random)).collect();
        let at = n_fillers * (i + 1) / (n_questions + 1);
        sentences.insert(at, format!("The secret word of {name} is {word}."));
        let question = format!("{} What is the secret word of {name}?", sentences.join(" "));
        let answer = demo.answer(&question, 12);
        let n_tokens = demo.tokenizer.encode(&question, Special::Plain).unwrap().len();
        println!("{word} at {at} of {n_fillers}, {n_tokens} tokens: {answer}");
        if !has_word(&answer, word) {
            wrong.push(format!("{name}, {word}, at {at}: {answer}"));
        }
        answers.push(answer);
    }
    assert!(wrong.is_empty(), "{} wrong: {wrong:#?}", wrong.len());
    assert_clean(demo.engine.device().instance());
    answers
}

/// All questions, with the same words in the answers: experts in device memory, and on the host with
/// streaming on and off.
#[test]
fn recall_among_5_sentences() {
    let expected = recall(&mut Demo::open(), 5, 20);
    for slots in [3, 0] {
        let mut demo = Demo::streaming(slots);
        assert_eq!(recall(&mut demo, 5, 20), expected, "{slots} slots");
        let stats = demo.engine.take_stats();
        println!("{slots} slots: {stats}");
        assert!(stats.streamed_bytes > 0, "{slots} slots: {stats}");
    }
}

#[test]
fn recall_among_20_sentences() {
    recall(&mut Demo::open(), 20, 6);
}

#[test]
fn recall_among_60_sentences() {
    recall(&mut Demo::open(), 60, 3);
}

#[test]
fn recall_among_100_sentences() {
    recall(&mut Demo::open(), 100, 3);
}

#[test]
#[ignore = "37,000 tokens: minutes on a CPU"]
fn twenty_questions_of_each_length() {
    for mut demo in [Demo::open(), Demo::streaming(3)] {
        for n_fillers in [20, 60, 100] {
            recall(&mut demo, n_fillers, 20);
        }
    }
}

#[test]
fn sums() {
    let mut demo = Demo::open();
    let mut random = Random(1);
    let mut wrong = Vec::new();
    for _ in 0..20 {
        let (a, b) = (random.below(100), random.below(100));
        let answer = demo.answer(&format!("What is {a} plus {b}?"), 12);
        if !has_word(&answer, &(a + b).to_string()) {
            wrong.push(format!("{a} + {b}: {answer}"));
        }
    }
    assert!(wrong.is_empty(), "{} wrong: {wrong:#?}", wrong.len());
    assert_clean(demo.engine.device().instance());
}

/// What is required of a release build on two cores is 20 tokens a second; this is neither, and other
/// tests run beside it, so only a slowness of another order fails.
#[test]
fn a_story_is_told_while_one_waits() {
    let mut demo = Demo::open();
    demo.answer("Tell me a story about a fox.", 4);
    let since = Instant::now();
    let story = demo.answer("Tell me a story about a fox.", 40);
    let taken = since.elapsed();
    println!("{taken:?}: {story}");
    assert!(story.contains("fox"), "{story}");
    assert!(taken < Duration::from_secs(60), "{taken:?}");
}

/// The prompt of 916 tokens whose secret is told first: the model gets it wrong, and the reference
/// says so too.
#[test]
#[ignore = "a minute of f64 arithmetic"]
fn a_long_prompt_has_the_logits_of_the_reference() {
    let mut demo = Demo::open();
    let mut random = Random(100);
    let fillers: Vec<String> = (0..100).map(|_| filler(&mut random)).collect();
    let message = format!(
        "The secret word of Felix is lantern. {} What is the secret word of Felix?",
        fillers.join(" ")
    );
    let args = demo.tokenizer.template_args(true);
    let messages = [Message::new("user", message)];
    let prompt = demo.tokenizer.encode_chat(&demo.template, &messages, &args).unwrap();
    let mut session = demo.engine.session().unwrap();
    let mut found = Vec::new();
    let sink = |_, logits: &[f32]| {
        found = logits.to_vec();
        Ok(())
    };
    demo.engine.eval(&mut session, &prompt, Outputs::Last, sink).unwrap();
    let forward = ReferenceModel::new(demo.engine.gguf()).forward(&prompt);
    let expected = forward.logits.last().unwrap();
    let best = |logits: &[f64]| {
        let mut ids: Vec<usize> = (0..logits.len()).collect();
        ids.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
        ids.truncate(3);
        let name = |&id: &usize| (demo.tokenizer.decode(&[id as u32], true), logits[id]);
        ids.iter().map(name).collect::<Vec<_>>()
    };
    let found: Vec<f64> = found.into_iter().map(f64::from).collect();
    let off = found.iter().zip(expected).map(|(f, e)| (f - e).abs()).fold(0.0, f64::max);
    println!("off by {off}: {:?}, reference {:?}", best(&found), best(expected));
    // Keys and values are f16 here.
    assert!(off < 0.1, "off by {off}");
}
