//! The program as a child process: how it is started, and what it left behind.

#![allow(dead_code, reason = "each test binary uses a part of it")]
#![allow(unreachable_pub, reason = "public to the test binaries that include it")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// What a run left behind.
pub struct Ran {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl From<Output> for Ran {
    fn from(output: Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Ran { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
    }
}

impl Ran {
    /// Success. Returns what went to standard output.
    pub fn succeeded(self) -> String {
        assert_eq!(self.code, Some(0), "{}", self.err);
        assert!(!self.err.contains("panicked"), "{}", self.err);
        self.out
    }

    /// One line on standard error, with all of `words`; nothing on standard output.
    pub fn failed(self, words: &[&str]) {
        let Ran { code, out, err } = self;
        assert_eq!(code, Some(1), "{err}");
        assert_eq!(out, "");
        assert_eq!(err.lines().count(), 1, "{err}");
        assert!(err.starts_with("error: "), "{err}");
        for word in words {
            assert!(err.contains(word), "`{word}` is not in {err}");
        }
    }
}

/// A command with a cache directory of its own and without the caller's switches.
pub fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vkmoe"));
    command.args(args).env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR"));
    for name in [
        "RUST_LOG",
        "GGML_VK_VISIBLE_DEVICES",
        "GGML_VK_REGISTER_HOST",
        "GGML_CUDA_REGISTER_HOST",
        "GGML_SCHED_PREFETCH_EXPERTS",
        "VKMOE_VALIDATION",
        "VKMOE_FAULTS",
    ] {
        command.env_remove(name);
    }
    command.stdin(Stdio::null());
    command
}

/// Runs to the end, which must come in time.
#[track_caller]
pub fn finish(mut command: Command) -> Ran {
    const LIMIT: Duration = Duration::from_secs(120);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let since = Instant::now();
    // What is printed fits into the pipes.
    while child.try_wait().unwrap().is_none() {
        if since.elapsed() > LIMIT {
            child.kill().unwrap();
            panic!(
                "{command:?} does not end: {}",
                Ran::from(child.wait_with_output().unwrap()).err
            );
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap().into()
}
