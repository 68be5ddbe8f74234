//! Bad drivers: under every fault that `VKMOE_FAULTS` can inject the program gives the text and the
//! logits that it gives without, or one line on standard error and exit code 1. Never a panic, another
//! text, or no end.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::outcome::{End, Expected, Way, expected_of_demo, run_demo};
use rayon::prelude::*;
use std::collections::BTreeSet;
use std::sync::OnceLock;
use vkmoe::stream::options::HostSource::{self, Arena, Host, Mmap, Ring};
use vkmoe::vk::Faults;

const ALL: &[HostSource] = &HostSource::ALL;
const UNPINNABLE: &[HostSource] = &[Host, Ring];

/// Faults, and the host sources that work under them. Where one works, so does the choice by trial.
/// `None`: the fault meets everything.
const CASES: &[(&str, Option<&[HostSource]>)] = &[
    ("amdgpu", Some(&[Arena, Host, Ring])),
    ("i915", Some(UNPINNABLE)),
    ("nvidia", Some(ALL)),
    ("bare", Some(UNPINNABLE)),
    ("refuse-import", Some(UNPINNABLE)),
    ("refuse-file-import,import-poisons", Some(&[Arena, Host, Ring])),
    ("refuse-read-only-import", Some(ALL)),
    ("import-fails-at-copy", Some(UNPINNABLE)),
    ("import-reads-zeros", Some(UNPINNABLE)),
    ("no-import-extension", Some(UNPINNABLE)),
    ("one-queue", Some(ALL)),
    ("non-coherent", Some(UNPINNABLE)),
    // Two lanes that drift apart as far as their waits allow.
    ("late-copies", Some(ALL)),
    ("late-kernels", Some(ALL)),
    ("max-buffer=256", Some(ALL)),
    // Smaller than what is read and copied at a time.
    ("max-buffer=1", Some(ALL)),
    // Smaller than an expert tensor: weights, imports and slots are in several buffers.
    ("max-buffer=320KiB", Some(ALL)),
    ("max-buffer=384KiB,import-alignment=64", Some(ALL)),
    // A driver that takes some chunks and then no more: the rest goes through the ring.
    ("max-buffer=384KiB,max-imports=5", Some(ALL)),
    ("max-imports", Some(UNPINNABLE)),
    // Smaller than a matrix, or than a page.
    ("max-buffer=200KiB", None),
    ("max-buffer=1KiB", None),
    ("storage-range=128", Some(ALL)),
    ("storage-range=1", Some(ALL)),
    ("storage-range=16KiB", None),
    ("import-alignment=64", Some(ALL)),
    ("budget-drops=1", Some(ALL)),
    ("budget-drops=1048576", None),
    ("slot-allocation-fails=0", Some(ALL)),
    ("slot-allocation-fails=1", Some(ALL)),
    ("slot-allocation-fails=2", Some(ALL)),
    ("max-cache", Some(ALL)),
    ("device-lost-after=1", None),
];

/// Sources and slots to try under every fault.
const WAYS: &[Way] = &[
    Way { source: None, slots: None },
    Way { source: Some(Mmap), slots: Some(3) },
    Way { source: Some(Arena), slots: None },
    Way { source: Some(Host), slots: Some(3) },
    Way { source: Some(Ring), slots: Some(3) },
];

#[test]
fn every_fault_is_tried() {
    let items = CASES.iter().flat_map(|(faults, _)| faults.split(','));
    let tried: BTreeSet<&str> = items.map(|item| item.split('=').next().unwrap()).collect();
    assert_eq!(tried, Faults::names().collect());
}

#[test]
fn faults_change_nothing_or_end_in_one_line() {
    let runs: Vec<_> =
        CASES.iter().flat_map(|case| WAYS.iter().map(move |way| (case, way))).collect();
    runs.into_par_iter().for_each(|((faults, works), way)| {
        let ran = run_demo(&way.args(), faults, "error");
        let end = ran.end(expected_of_demo(), &format!("{faults}, {way}"));
        let should_work = works.is_some_and(|works| way.source.is_none_or(|s| works.contains(&s)));
        assert_eq!(matches!(end, End::Same), should_work, "{faults}, {way}: {end:?}");
        // What does not work by the user's choice is called by its flag.
        if let (End::Failed(line), Some(source), Some(_)) = (end, way.source, works) {
            assert!(line.starts_with(&format!("error: --host-source {source}: ")), "{line}");
        }
    });
}

/// Fewer slots, then none; where one is a must, in host memory. Said once.
#[test]
fn slots_that_cannot_be_had_are_done_without() {
    let fewer = "memory for 3 staging slots: 2 are used";
    let none = "memory for 3 staging slots: experts are not prefetched";
    let host = "device memory for staging slots: they are in host memory";
    let cases: [(&str, Way, &[&str]); 9] = [
        ("2", Way { source: Some(Ring), slots: Some(3) }, &[fewer]),
        ("2", Way { source: Some(Arena), slots: Some(3) }, &[fewer]),
        // One is as good as none: a kernel may read two.
        ("1", Way { source: Some(Ring), slots: Some(3) }, &[host]),
        ("1", Way { source: Some(Ring), slots: Some(0) }, &[host]),
        ("0", Way { source: Some(Ring), slots: Some(3) }, &[host]),
        ("0", Way { source: Some(Ring), slots: Some(0) }, &[host]),
        // By what is pinned when the first tokens run.
        ("1", Way { source: Some(Arena), slots: Some(3) }, &[host, none]),
        ("0", Way { source: Some(Mmap), slots: Some(3) }, &[host, none]),
        ("0", Way { source: Some(Arena), slots: Some(0) }, &[]),
    ];
    cases.into_par_iter().for_each(|(n, way, lines)| {
        let ran = run_demo(&way.args(), &format!("slot-allocation-fails={n}"), "warn");
        assert_eq!(ran.end(expected_of_demo(), &way.to_string()), End::Same);
        let told: Vec<&str> =
            ran.err.lines().filter_map(|line| line.strip_prefix("warning: no ")).collect();
        let known = told.iter().all(|line| lines.contains(line));
        assert!(known && told.len() == lines.len().min(1), "{n}, {way}: {told:?}");
    });
}

/// What a run with an expert cache of 5 MiB does under faults: the closing lines.
fn cached(faults: &str, way: Way) -> String {
    static EXPECTED: OnceLock<Expected> = OnceLock::new();
    let args = [way.args(), ["--expert-cache", "5", "-n", "24"].map(str::to_owned).to_vec()];
    let plain = || run_demo(&["-n", "24"].map(str::to_owned), "", "error").into();
    let ran = run_demo(&args.concat(), faults, "warn");
    assert_eq!(ran.end(EXPECTED.get_or_init(plain), &format!("{faults}, {way}")), End::Same);
    ran.err
}

#[test]
fn experts_are_cached_under_faults() {
    let faults = [
        "",
        "one-queue",
        "amdgpu",
        "non-coherent",
        "late-kernels",
        "max-buffer=384KiB",
        "max-buffer=384KiB,max-imports=5",
    ];
    let runs: Vec<_> = faults.iter().flat_map(|f| WAYS.iter().map(move |way| (*f, *way))).collect();
    runs.into_par_iter().for_each(|(faults, way)| {
        let works = CASES.iter().find(|(of, _)| *of == faults).and_then(|(_, works)| *works);
        if works.is_none_or(|works| way.source.is_none_or(|source| works.contains(&source))) {
            let err = cached(faults, way);
            let answer = err.lines().find(|line| line.starts_with("  answer: ")).unwrap();
            assert!(answer.contains("| expert cache: "), "{faults}, {way}: {err}");
            assert!(!answer.contains("| expert cache: 0 % hits"), "{faults}, {way}: {err}");
        }
    });
}

/// Copies that never start unless something waits for them: nothing does, and no expert is taken for cached.
#[test]
fn nothing_waits_for_promotions() {
    for source in [Mmap, Arena, Host] {
        let err = cached("late-copies", Way { source: Some(source), slots: Some(0) });
        assert!(err.contains("| expert cache: 0 % hits, 0 evictions, "), "{source}: {err}");
    }
    // Copies to slots wait for those before.
    cached("late-copies", Way { source: Some(Ring), slots: Some(3) });
}

/// A smaller cache, then none. Said once.
#[test]
fn a_cache_that_cannot_be_had_is_done_without() {
    for (faults, line) in [
        ("max-cache=1", "no memory for an expert cache of 4.9 MiB: it has 1.2 MiB"),
        ("max-cache=0", "no memory for an expert cache of 4.9 MiB: there is none"),
        ("max-buffer=320KiB", ""),
    ] {
        let err = cached(faults, Way { source: Some(Ring), slots: Some(3) });
        let told: Vec<&str> = err.lines().filter(|line| line.contains("no memory")).collect();
        assert_eq!(told.len(), usize::from(!line.is_empty()), "{faults}: {err}");
        assert!(told.iter().all(|told| told.contains(line)), "{faults}: {err}");
        assert_eq!(err.contains("| expert cache: "), faults != "max-cache=0", "{faults}: {err}");
    }
}

/// The device is lost at the first submission, the second, … and so on through start-up, pinning, prompt
/// and answer, to the very last.
#[test]
fn a_device_lost_at_any_time_ends_in_one_line() {
    let ways = [(Some(Ring), Some(3)), (Some(Arena), Some(3)), (None, None)];
    ways.into_par_iter().for_each(|(source, slots)| {
        let way = Way { source, slots };
        let mut texts = Vec::new();
        let mut lost = |after| {
            let text = lost_after(after, way);
            texts.extend(text.clone());
            text.is_some()
        };
        assert!(lost(1), "{way}");
        let (mut dies, mut lives) = (1, 2);
        while lost(lives) {
            dies = lives;
            lives += 1 + lives / 3;
        }
        while dies + 1 < lives {
            let middle = dies + (lives - dies) / 2;
            match lost(middle) {
                true => dies = middle,
                false => lives = middle,
            }
        }
        // Before the first word, and amid the answer.
        assert!(texts.len() > 8 && texts[0].is_empty(), "{way}: {texts:?}");
        assert!(texts.iter().any(|text| !text.is_empty()), "{way}: {texts:?}");
    });
}

/// What was printed of the text before the device was lost; `None`: it lived long enough.
fn lost_after(after: u32, way: Way) -> Option<String> {
    let mut args = way.args();
    if way.source == Some(Arena) {
        args.extend(["--expert-cache", "5"].map(str::to_owned));
    }
    let ran = run_demo(&args, &format!("device-lost-after={after}"), "error");
    let what = format!("lost after {after}, {way}");
    match ran.end(expected_of_demo(), &what) {
        End::Same => None,
        End::Failed(line) => {
            assert!(line.contains("device lost: "), "{what}: {line}");
            Some(ran.out)
        }
    }
}
