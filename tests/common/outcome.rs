//! Runs of the program that must give the same text and logits as without whatever goes wrong, or end in
//! one line.

#![allow(dead_code, reason = "each test binary uses a part of it")]
#![allow(unreachable_pub, reason = "public to the test binaries that include it")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use super::program::{Ran, command, finish};
use std::fmt;
use std::process::Command;
use std::sync::OnceLock;
use vkmoe::stream::options::HostSource;

/// A prompt that the demo model answers, and goes on: small buffers suffice for it.
const DEMO: &[&str] = &[
    "run",
    "What is 27 plus 48?",
    "--ignore-eos",
    "--temp",
    "0",
    "--logits-hash",
    "-c",
    "256",
    "-ub",
    "16",
];

/// A run of the demo model with further flags, faults, and what is logged: `error`, `warn` or `info`.
pub fn demo(args: &[String], faults: &str, log: &str) -> Command {
    let n = if args.iter().any(|arg| arg == "-n") { &[][..] } else { &["-n", "8"] };
    let args = args.iter().map(String::as_str);
    let mut command =
        command(&DEMO.iter().copied().chain(n.iter().copied()).chain(args).collect::<Vec<_>>());
    command.env("VKMOE_FAULTS", faults).env("RUST_LOG", log);
    command
}

/// [`demo`], run to its end.
pub fn run_demo(args: &[String], faults: &str, log: &str) -> Ran {
    finish(demo(args, faults, log))
}

/// What the demo model gives with all experts on the device.
pub fn expected_of_demo() -> &'static Expected {
    static EXPECTED: OnceLock<Expected> = OnceLock::new();
    EXPECTED.get_or_init(|| run_demo(&[], "", "error").into())
}

impl Ran {
    /// The hash that `--logits-hash` printed.
    pub fn logits_hash(&self) -> &str {
        let hash = self.err.lines().find_map(|line| line.strip_prefix("logits hash: "));
        hash.unwrap_or_else(|| panic!("no hash: {}", self.err))
    }

    /// The same text and logits as without whatever went wrong, or one line: anything else fails. Of a
    /// run that was broken off, a part of the text may be there.
    #[track_caller]
    pub fn end(&self, expected: &Expected, what: &str) -> End {
        let Ran { code, out, err } = self;
        match code {
            Some(0) => {
                assert_eq!(*out, expected.text, "{what}: {err}");
                assert_eq!(self.logits_hash(), expected.hash, "{what}: {err}");
                End::Same
            }
            Some(1) => {
                let said =
                    |line: &&str| !line.starts_with("warning: ") && !line.starts_with("info: ");
                let lines: Vec<&str> = err.lines().filter(said).collect();
                assert!(lines.len() == 1 && lines[0].starts_with("error: "), "{what}: {err}");
                assert!(expected.text.starts_with(out.trim_end_matches('\n')), "{what}: {out}");
                End::Failed(lines[0].to_owned())
            }
            code => panic!("{what}: exit code {code:?}: {err}"),
        }
    }
}

/// What a run gives when nothing goes wrong.
pub struct Expected {
    pub text: String,
    pub hash: String,
}

impl From<Ran> for Expected {
    fn from(ran: Ran) -> Self {
        assert_eq!(ran.code, Some(0), "{}", ran.err);
        Expected { hash: ran.logits_hash().to_owned(), text: ran.out }
    }
}

/// How a run ended.
#[derive(Debug, PartialEq, Eq)]
pub enum End {
    /// As expected.
    Same,
    /// With this line and exit code 1.
    Failed(String),
}

/// How experts get to the device, by flags.
#[derive(Clone, Copy, Debug)]
pub struct Way {
    /// `None`: by trial.
    pub source: Option<HostSource>,
    /// `None`: the engine chooses.
    pub slots: Option<u32>,
}

impl Way {
    pub fn args(&self) -> Vec<String> {
        let source = self.source.map_or("auto", HostSource::name);
        let mut args = vec!["-cmoe".to_owned(), "--host-source".to_owned(), source.to_owned()];
        if let Some(n) = self.slots {
            args.extend(["--prefetch-experts-slots".to_owned(), n.to_string()]);
        }
        args
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.args()[1..].join(" "))
    }
}
