//! What a terminal shows: bars while something takes long, and never in the answer's text.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::process::{Command, Stdio};

/// Takes the cursor's line off the screen.
const CLEAR_LINE: &str = "\x1b[2K";

/// What a command writes to its terminal, on one of 100 columns.
fn on_a_terminal(command: &str) -> String {
    let command = format!("stty cols 100 rows 24; {command}");
    let output = Command::new("script")
        .args(["-qec", &command, "/dev/null"])
        .env("TERM", "xterm")
        .env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR"))
        .env_remove("RUST_LOG")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}");
    text
}

/// The pinning goes on while the first tokens run; its bar and the prompt's are gone before the answer
/// begins, and nothing is drawn from there on.
#[test]
fn bars_leave_before_the_answer_begins() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("m.gguf");
    let program = env!("CARGO_BIN_EXE_vkmoe");
    let synth = ["synth", "--preset", "tiny", "--layers", "100", model.to_str().unwrap()];
    assert!(Command::new(program).args(synth).status().unwrap().success());
    let flags = "--raw -p hello -n 4 --temp 0 --ignore-eos -c 128 -ub 2 -cmoe \
                 --prefetch-experts-slots 3";
    let run = format!("{program} run -m {} {flags}", model.display());
    let plain = Command::new("sh").args(["-c", &run]).stderr(Stdio::null()).output().unwrap();
    let answer = String::from_utf8(plain.stdout).unwrap().replace('\n', "\r\n");

    for source in ["mmap", "arena", "host"] {
        let shown = on_a_terminal(&format!("{run} --host-source {source}"));
        assert!(shown.contains("pinning "), "{shown}");
        let (_, after) = shown.rsplit_once(CLEAR_LINE).unwrap();
        assert!(after.starts_with(&answer), "{answer:?} is not alone in {after:?}");
        assert!(after.contains("\r\nprompt ") && !after.contains('█'), "{after:?}");
    }
}

/// A line between bars stands alone.
#[test]
fn warnings_do_not_mix_with_bars() {
    let program = env!("CARGO_BIN_EXE_vkmoe");
    let shown = on_a_terminal(&format!(
        "RUST_LOG=info {program} run 'What is 27 plus 48?' --temp 0 -cmoe --host-source arena"
    ));
    let pinned = shown.lines().find(|line| line.contains("info: pinned ")).unwrap();
    let before = pinned.split("info: pinned ").next().unwrap();
    assert!(before.is_empty() || before.ends_with(CLEAR_LINE), "{before:?}");
}
