//! The program as its users meet it: exit code, standard output, standard error. Cases that fail before
//! a device is opened are cheap; the others run the demo model and are few.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "common/program.rs"]
mod program;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use program::{Ran, command};
use vkmoe::trace::{Span, Trace, Track};

const SUM: &str = "What is 27 plus 48?";

fn vkmoe(args: &[&str]) -> Ran {
    command(args).output().unwrap().into()
}

/// Runs with `input` on standard input.
fn piped(args: &[&str], input: &[u8]) -> Ran {
    let mut command = command(args);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    // A program that fails early does not read.
    let _ = stdin.write_all(input);
    drop(stdin);
    child.wait_with_output().unwrap().into()
}

/// A file of that content which lives as long as the folder.
fn file(folder: &tempfile::TempDir, name: &str, content: &[u8]) -> PathBuf {
    let path = folder.path().join(name);
    fs::write(&path, content).unwrap();
    path
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

// ---------------------------------------------------------------- without a device

#[test]
fn model_files_that_are_none_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let demo = fs::read("assets/demo-q4_k_m.gguf").unwrap();
    let cases = [
        ("missing.gguf", None, "No such file"),
        ("empty.gguf", Some(&b""[..]), ""),
        ("text.gguf", Some(&b"This is a text, not a model."[..]), "GGUF"),
        ("cut.gguf", Some(&demo[..demo.len() / 2]), ""),
        ("header.gguf", Some(&demo[..100]), ""),
    ];
    for (name, content, problem) in cases {
        let path = folder.path().join(name);
        if let Some(content) = content {
            fs::write(&path, content).unwrap();
        }
        vkmoe(&["run", "-m", text(&path), "hi"]).failed(&[name, problem]);
        vkmoe(&["inspect", text(&path)]).failed(&[name, problem]);
    }
    vkmoe(&["run", "-m", text(folder.path()), "hi"]).failed(&[text(folder.path())]);
}

#[cfg(unix)]
#[test]
fn a_fifo_is_no_model() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("fifo");
    assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
    vkmoe(&["run", "-m", text(&path), "hi"]).failed(&["fifo", "not a regular file"]);
}

#[test]
fn prompts_that_cannot_be_read_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let latin1 = file(&folder, "latin1.txt", b"caf\xe9");
    let empty = file(&folder, "empty.txt", b"");
    vkmoe(&["run", "-f", text(&latin1)]).failed(&["latin1.txt", "UTF-8"]);
    vkmoe(&["run", "-f", text(&empty)]).failed(&["empty.txt", "empty"]);
    vkmoe(&["run", "-f", "/nonexistent/prompt.txt"]).failed(&["/nonexistent/prompt.txt"]);
    vkmoe(&["run", ""]).failed(&["-p", "empty"]);
    vkmoe(&["run"]).failed(&["standard input", "empty"]);
    piped(&["run"], b"\n").failed(&["standard input", "empty"]);
    piped(&["run", "-"], b"\xff\xfe").failed(&["standard input", "UTF-8"]);
    vkmoe(&["perplexity", "-f", text(&latin1)]).failed(&["latin1.txt", "UTF-8"]);
}

#[test]
fn chat_templates_that_fail_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let broken = file(&folder, "broken.jinja", b"{{ messages[0].content }}\n{% if %}\n");
    vkmoe(&["run", "--chat-template", text(&broken), "hi"]).failed(&["broken.jinja, line 2"]);
    vkmoe(&["run", "--chat-template", "nobody", "hi"]).failed(&[
        "--chat-template",
        "nobody",
        "chatml",
    ]);
    vkmoe(&["run", "--chat-template", "./absent.jinja", "hi"]).failed(&["./absent.jinja", "open"]);
}

#[test]
fn flags_out_of_range_are_named() {
    vkmoe(&["run", "-n", "-2", "hi"]).failed(&["-n", "-2"]);
    vkmoe(&["run", "--repeat-penalty", "0", "hi"]).failed(&["--repeat-penalty"]);
    vkmoe(&["run", "--presence-penalty", "inf", "hi"]).failed(&["--presence-penalty"]);
    vkmoe(&["logits", "--tokens", "1,two"]).failed(&["--tokens", "two"]);
    vkmoe(&["logits", "--tokens", " "]).failed(&["--tokens"]);
    for args in [
        ["--temp", "nan"],
        ["--top-p", "1.5"],
        ["--batch-size", "0"],
        ["-ub", "0"],
        ["-ctk", "q9_9"],
        ["-c", "-1"],
        ["--vram-limit", "0"],
        ["-s", "-2"],
        ["-ngl", "many"],
        ["-ngl", "-2"],
        ["-ncmoe", "-1"],
        ["-fitt", "1.5"],
        ["-ot", "exps"],
        ["-ot", "exps=DISK"],
        ["-ot", "blk\\.(=HOST"],
        ["--host-source", "tape"],
        ["--prefetch-experts-slots", "9"],
        ["--pin-max-mib", "all"],
        ["--copy-queue", "fast"],
    ] {
        let ran = vkmoe(&["run", args[0], args[1], "hi"]);
        assert_eq!((ran.code, ran.out.as_str()), (Some(2), ""), "{args:?}");
        assert!(ran.err.contains(args[1]), "{}", ran.err);
    }
}

/// The reason, for a number that looks as good as any other.
#[test]
fn one_staging_slot_is_refused_with_the_reason() {
    let ran = vkmoe(&["plan", "--prefetch-experts-slots", "1"]);
    assert_eq!((ran.code, ran.out.as_str()), (Some(2), ""));
    assert!(ran.err.contains("no copy could run beside the kernel"), "{}", ran.err);
}

#[test]
fn variables_that_cannot_be_used_are_named() {
    let run = |env: &[(&str, &str)]| {
        Ran::from(command(&["plan"]).envs(env.iter().copied()).output().unwrap())
    };
    run(&[("GGML_VK_REGISTER_HOST", "on")]).failed(&["GGML_VK_REGISTER_HOST", "`on`"]);
    run(&[("GGML_VK_REGISTER_HOST", "0"), ("GGML_CUDA_REGISTER_HOST", "1")])
        .failed(&["GGML_VK_REGISTER_HOST", "contradicts GGML_CUDA_REGISTER_HOST"]);
    run(&[("GGML_SCHED_PREFETCH_EXPERTS", "9")]).failed(&["GGML_SCHED_PREFETCH_EXPERTS", "`9`"]);
}

#[test]
fn without_a_device_the_error_says_what_to_install() {
    let run = |name: &str, value: &str, args: &[&str]| {
        Ran::from(command(args).env(name, value).output().unwrap())
    };
    run("VK_DRIVER_FILES", "/nonexistent", &["run", "hi"]).failed(&["driver"]);
    run("VK_DRIVER_FILES", "/nonexistent", &["devices"]).failed(&["driver"]);
    run("GGML_VK_VISIBLE_DEVICES", "x", &["run", "hi"]).failed(&["GGML_VK_VISIBLE_DEVICES", "x"]);
    run("GGML_VK_VISIBLE_DEVICES", "99", &["devices"]).failed(&["GGML_VK_VISIBLE_DEVICES", "99"]);
    vkmoe(&["run", "--device", "99", "hi"]).failed(&["--device", "99", "there are"]);
    vkmoe(&["run", "--device", "Voodoo", "hi"]).failed(&["--device", "Voodoo", "there are"]);
}

#[test]
fn texts_become_tokens_and_files_tables() {
    let from_argument = vkmoe(&["tokenize", "--ids", "two words"]).succeeded();
    assert_eq!(piped(&["tokenize", "--ids"], b"two words").succeeded(), from_argument);
    assert_eq!(from_argument.lines().count(), 1);
    // A control token in a text is text, unless asked for.
    let plain = vkmoe(&["tokenize", "--ids", "<|im_end|>"]).succeeded();
    let parsed = vkmoe(&["tokenize", "--ids", "--parse-special", "<|im_end|>"]).succeeded();
    assert!(plain.split_whitespace().count() > parsed.split_whitespace().count());
    assert!(!piped(&["tokenize", "--ids"], b"a\0b").succeeded().is_empty());

    let inspected = vkmoe(&["inspect"]).succeeded();
    for word in ["general.architecture", "token_embd.weight", "runs: qwen3moe"] {
        assert!(inspected.contains(word), "{inspected}");
    }
    let devices = vkmoe(&["devices"]).succeeded();
    for words in ["← used", "mul_mat_vec", "flash_attn"] {
        assert!(devices.contains(words), "{words}: {devices}");
    }
}

/// Tried when asked for, and remembered.
#[test]
fn host_sources_are_tried_and_known_afterwards() {
    let cache = tempfile::tempdir().unwrap();
    let listed = |args: &[&str]| -> Vec<String> {
        let mut command = command(&[&["devices"], args].concat());
        let listed = Ran::from(command.env("XDG_CACHE_HOME", cache.path()).output().unwrap());
        let lines = listed.succeeded();
        lines.lines().map(str::to_owned).collect()
    };
    let sources = |args: &[&str]| -> Vec<String> {
        let lines = listed(args);
        lines.into_iter().filter(|l| l.trim_start().starts_with("source ")).collect()
    };
    let unknown = sources(&[]);
    assert!(
        unknown.iter().all(|line| line.ends_with("not tried yet; --probe does")),
        "{unknown:?}"
    );
    let tried = sources(&["--probe"]);
    assert!(tried.len() >= 2 && tried.iter().any(|line| line.contains("source ring")), "{tried:?}");
    assert_eq!(tried.iter().filter(|line| line.ends_with("← used")).count(), 1, "{tried:?}");
    assert!(tried.iter().any(|line| line.contains(" GB/s")), "{tried:?}");
    let all = listed(&["--probe"]);
    assert_eq!(all.iter().filter(|line| line.contains("multiply 4-bit weights")).count(), 1);
    // Other devices of the machine stay unknown.
    assert!(sources(&[]).iter().filter(|line| !line.contains("not tried")).eq(&tried));
    vkmoe(&["devices", "--probe", "-m", "missing.gguf"]).failed(&["missing.gguf", "No such file"]);
}

#[test]
fn output_that_nobody_takes_is_no_panic() {
    let mut child =
        command(&["inspect"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // Closed before the first byte.
    drop(child.stdout.take());
    Ran::from(child.wait_with_output().unwrap()).succeeded();

    if cfg!(target_os = "linux") {
        let full = || fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let ran = command(&["inspect"]).stdout(full()).output().unwrap();
        Ran::from(ran).failed(&["standard output", "No space"]);
        let ran = command(&["run", "-n", "-2", "hi"]).stderr(full()).output().unwrap();
        assert_eq!(Ran::from(ran).code, Some(1));
    }
}

/// Copies of 50 MB at 50 GB/s, of which the second half of each is behind kernels.
fn traced() -> Trace {
    let ms = 1_000_000;
    let span = |track, name: &str, il, start_ms: u64, end_ms: u64, bytes| {
        let (start_ns, end_ns) = (start_ms * ms, end_ms * ms);
        Span { track, name: name.to_owned(), il: Some(il), start_ns, end_ns, bytes }
    };
    let spans = (0..2).flat_map(|il| {
        let at = 10 + 4 * u64::from(il);
        [
            span(Track::Copy, &format!("blk.{il}.ffn_up_exps"), il, at, at + 2, 100_000_000),
            span(Track::Compute, &format!("blk.{il} experts"), il, at + 1, at + 4, 0),
        ]
    });
    Trace { model: "a\u{7}b".into(), device: "none".into(), spans: spans.collect() }
}

#[test]
fn a_trace_is_drawn_beside_its_file_or_listed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.trace.json");
    traced().write(&path).unwrap();
    let summary = "wall 8.00 ms, copies 200.0 MB at 50.0 GB/s, 50.0 % hidden behind compute, \
                   bound: compute (busy 75.0 %)\n";
    let table = vkmoe(&["trace", text(&path), "--table"]).succeeded();
    let expected = "track    kind         count  total ms   share  GB/s\n\
                    compute  experts          2     6.000  75.0 %\n\
                    copy     ffn_up_exps      2     4.000  50.0 %  50.0\n\n";
    assert_eq!(table, expected.to_owned() + summary);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "a table draws nothing");
    assert_eq!(vkmoe(&["trace", text(&path)]).succeeded(), summary);
    let svg = fs::read_to_string(folder.path().join("a.trace.svg")).unwrap();
    assert!(svg.contains("blk.1.ffn_up_exps"), "{svg}");
    let out = folder.path().join("b.SVG");
    vkmoe(&["trace", text(&path), "--table", "-o", text(&out)]).succeeded();
    assert_eq!(fs::read_to_string(out).unwrap(), svg);
}

#[test]
fn traces_that_are_none_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let good = traced().to_json();
    let cases = [
        ("empty.json", String::new(), "no trace of vkmoe"),
        ("cut.json", good[..good.len() / 2].to_owned(), "no trace of vkmoe"),
        ("other.json", r#"{"traceEvents": []}"#.into(), "otherData"),
        ("early.json", good.replace("\"ts\":", "\"ts\":-"), "event 8 (`blk.0 experts`): `ts`"),
        ("picture.svg", traced().to_svg(), "JSON"),
    ];
    for (name, content, problem) in cases {
        let path = file(&folder, name, content.as_bytes());
        vkmoe(&["trace", text(&path)]).failed(&[name, problem]);
    }
    let path = file(&folder, "bytes.json", &[0xff, 0xfe]);
    vkmoe(&["trace", text(&path)]).failed(&["bytes.json", "utf-8"]);
    vkmoe(&["trace", text(folder.path())]).failed(&[text(folder.path()), "regular file"]);
    vkmoe(&["trace", "missing.json"]).failed(&["missing.json", "No such file"]);
    let path = file(&folder, "good.json", good.as_bytes());
    vkmoe(&["trace", text(&path), "-o", "x.png"]).failed(&["-o", "x.png", ".svg"]);
    vkmoe(&["trace", text(&path), "-o", "/dev/null/x.svg"]).failed(&["/dev/null/x.svg", "write"]);
}

// ---------------------------------------------------------------- with a device

#[test]
fn the_answer_alone_goes_to_standard_output() {
    let folder = tempfile::tempdir().unwrap();
    let prompt = file(&folder, "prompt.txt", format!("{SUM}\n").as_bytes());
    let ran = vkmoe(&["run", SUM, "--temp", "0"]);
    assert!(ran.err.contains("tok/s") && !ran.err.contains("seed"), "{}", ran.err);
    let answer = ran.succeeded();
    assert!(answer.contains("75") && answer.ends_with('\n'), "{answer}");
    assert_eq!(vkmoe(&["run", "-f", text(&prompt), "--temp", "0"]).succeeded(), answer);
    // Where a cache cannot be written, the demo model is unpacked elsewhere.
    let mut elsewhere = command(&["run", "--temp", "0", "-b", "1", "-p", SUM]);
    elsewhere.env("XDG_CACHE_HOME", "/dev/null/cache").env("TMPDIR", folder.path());
    assert_eq!(Ran::from(elsewhere.output().unwrap()).succeeded(), answer);
}

#[test]
fn a_seed_repeats_an_answer_and_its_logits() {
    let run = || vkmoe(&["run", "Tell a story.", "-n", "12", "-s", "7", "--logits-hash"]);
    let (a, b) = (run(), run());
    let hash = |ran: &Ran| {
        ran.err.lines().find(|l| l.starts_with("logits hash: ")).map(str::to_owned).unwrap()
    };
    assert_eq!(hash(&a), hash(&b));
    assert!(a.err.contains("seed 7"), "{}", a.err);
    assert_eq!(a.succeeded(), b.succeeded());
}

#[test]
fn stop_texts_and_limits_end_the_answer() {
    assert_eq!(vkmoe(&["run", SUM, "-n", "0"]).succeeded(), "\n");
    let stopped = vkmoe(&["run", SUM, "--temp", "0", "--stop", "never", "-r", "75"]).succeeded();
    assert!(!stopped.contains('7'), "{stopped}");
    // All of the context: the prompt, and as many tokens as have room.
    let full = vkmoe(&["run", "--raw", "Once upon", "-c", "8", "--top-k", "0"]);
    assert!(full.err.contains("context of 8 tokens is full"), "{}", full.err);
    full.succeeded();
}

#[test]
fn what_does_not_fit_is_refused_with_a_flag_that_helps() {
    vkmoe(&["run", SUM, "-c", "2"]).failed(&["context", "-c "]);
    vkmoe(&["run", SUM, "-c", "4294967295"]).failed(&["-c"]);
    vkmoe(&["run", SUM, "--vram-limit", "1"]).failed(&["out of memory", "--vram-limit "]);
    vkmoe(&["logits", "--tokens", "1,4294967295"]).failed(&["4294967295", "vocabulary"]);
    piped(&["run"], "many words ".repeat(10_000).as_bytes()).failed(&["context", "-c "]);
}

/// What Ctrl-C sends.
#[cfg(unix)]
fn interrupt(child: &Child) {
    let kill = format!("kill -INT {}", child.id());
    assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
}

#[cfg(unix)]
#[test]
fn ctrl_c_stops_an_answer() {
    let mut child = command(&["run", "--raw", "Once upon a time", "--ignore-eos"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = [0];
    child.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
    interrupt(&child);
    let ran = Ran::from(child.wait_with_output().unwrap());
    assert_eq!(ran.code, Some(130), "{}", ran.err);
    assert!(ran.err.contains("[interrupted]") && ran.err.contains("tok/s"), "{}", ran.err);
}

#[test]
fn a_chat_reads_its_messages_from_a_pipe() {
    let messages = format!("{SUM}\n/clear\n\n{SUM}\n");
    let ran = piped(&["run", "--chat", "--temp", "0", "-sys", "Be brief."], messages.as_bytes());
    assert!(ran.err.contains("[the conversation is empty]"), "{}", ran.err);
    let out = ran.succeeded();
    let answers: Vec<&str> = out.lines().collect();
    let (first, second) = answers.split_at(answers.len() / 2);
    assert!(!first.is_empty());
    assert_eq!(first, second, "a cleared conversation starts anew");
}

/// All experts on the host, brought by a ring into three slots.
const STREAMING: [&str; 5] = ["-cmoe", "--host-source", "ring", "--prefetch-experts-slots", "3"];

#[test]
fn a_chat_goes_on_alike_with_streaming() {
    let messages =
        format!("The secret word of Mia is cherry.\n{SUM}\nWhat is the secret word of Mia?\n");
    let chat = |flags: &[&str]| {
        let args = [&["run", "--chat", "--temp", "0"], flags].concat();
        piped(&args, messages.as_bytes()).succeeded()
    };
    let expected = chat(&[]);
    assert!(expected.contains("75") && expected.contains("cherry"), "{expected}");
    assert_eq!(chat(&STREAMING), expected);
}

/// A message whose prompt is being streamed is taken back by Ctrl-C: the conversation goes on as if it
/// had not been.
#[cfg(unix)]
#[test]
fn ctrl_c_takes_back_a_prompt_that_streams() {
    let first = "The secret word of Mia is cherry.";
    let last = "What is the secret word of Mia?";
    let long = "Tom saw a red kite near the lake. ".repeat(120);
    let args =
        [&["run", "--chat", "--temp", "0", "-ub", "32", "-c", "4096"][..], &STREAMING].concat();
    let expected = piped(&args, format!("{first}\n{last}\n").as_bytes()).succeeded();

    let mut child = command(&args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut text = String::new();
    writeln!(stdin, "{first}").unwrap();
    out.read_line(&mut text).unwrap();
    writeln!(stdin, "{long}").unwrap();
    thread::sleep(Duration::from_secs(1));
    interrupt(&child);
    // The line that ends the answer which never began.
    let mut empty = String::new();
    out.read_line(&mut empty).unwrap();
    assert_eq!(empty, "\n", "the prompt was too short, or the machine too fast, to be interrupted");
    writeln!(stdin, "{last}").unwrap();
    drop(stdin);
    out.read_to_string(&mut text).unwrap();
    let ran = Ran::from(child.wait_with_output().unwrap());
    assert!(ran.err.contains("[interrupted]"), "{}", ran.err);
    ran.succeeded();
    assert_eq!(text, expected);
}

/// Whether a running program has a handler for SIGINT.
#[cfg(target_os = "linux")]
fn catches_interrupts(child: &Child) -> bool {
    let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
    u64::from_str_radix(caught.trim(), 16).unwrap() & 2 != 0
}

/// Without a chat there is nothing to go on with.
#[cfg(target_os = "linux")]
#[test]
fn ctrl_c_ends_a_prompt_that_streams() {
    let long = "Tom saw a red kite near the lake. ".repeat(120);
    let args = [&["run", &long, "-ub", "32", "-c", "4096"][..], &STREAMING].concat();
    let child = command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    while !catches_interrupts(&child) {
        thread::sleep(Duration::from_millis(20));
    }
    // The model is loaded; soon the prompt is on its way.
    thread::sleep(Duration::from_secs(1));
    interrupt(&child);
    let ran = Ran::from(child.wait_with_output().unwrap());
    assert_eq!((ran.code, ran.out.as_str()), (Some(130), "\n"), "{}", ran.err);
    for words in ["[interrupted]", "prompt: streamed", "not pinned"] {
        assert!(ran.err.contains(words), "no `{words}` in {}", ran.err);
    }
}

// ---------------------------------------------------------------- plans, with a device

/// A plan as JSON.
fn plan(flags: &[&str]) -> serde_json::Value {
    let json = vkmoe(&[&["plan", "--json"], flags].concat()).succeeded();
    serde_json::from_str(&json).unwrap()
}

/// Sum of the parts of a heap, its budget left out.
fn parts_sum(heap: &serde_json::Value) -> u64 {
    let parts = heap.as_object().unwrap().iter().filter(|(name, _)| *name != "budget");
    parts.map(|(_, bytes)| bytes.as_u64().unwrap()).sum()
}

/// The places of the tensors whose names contain `what`.
fn places<'a>(plan: &'a serde_json::Value, what: &str) -> Vec<&'a str> {
    let tensors = plan["tensors"].as_array().unwrap().iter();
    let named = tensors.filter(|t| t["name"].as_str().unwrap().contains(what));
    named.map(|t| t["place"].as_str().unwrap()).collect()
}

/// Contexts and ubatches that leave the demo model (13 MB) about 16 MiB of need.
const SMALL: [&str; 4] = ["-c", "512", "-ub", "64"];

#[test]
fn a_plan_names_every_byte() {
    let slots = ["-cmoe", "--prefetch-experts-slots", "3", "--expert-cache", "2"];
    for flags in [&[][..], &["--vram-limit", "16"], &slots] {
        let plan = plan(&[&SMALL, flags].concat());
        for heap in ["device_bytes", "host_bytes"] {
            assert_eq!(parts_sum(&plan[heap]), plan[heap]["budget"].as_u64().unwrap(), "{heap}");
        }
        let of_layers = |heap: &str, part: &str| -> u64 {
            let layers = plan["layers"].as_array().unwrap().iter();
            layers.filter_map(|l| l[heap][part].as_u64()).sum()
        };
        for (heap, part) in [
            ("device_bytes", "dense_weights"),
            ("device_bytes", "experts"),
            ("device_bytes", "kv_cache"),
            ("host_bytes", "experts"),
        ] {
            assert_eq!(of_layers(heap, part), plan[heap][part].as_u64().unwrap(), "{heap} {part}");
        }
    }
    let plan = plan(&[&SMALL[..], &["--vram-limit", "16", "-fitt", "1"]].concat());
    assert_eq!(plan["device_bytes"]["budget"], 16 << 20);
    assert_eq!(plan["device_bytes"]["margin"], 1 << 20);
}

#[test]
fn a_plan_is_drawn() {
    let flags = ["--vram-limit", "40", "-ncmoe", "2", "--prefetch-experts-slots", "2"];
    let text = vkmoe(&[&["plan"], &SMALL[..], &flags].concat()).succeeded();
    assert!(!text.contains('\x1b'), "colours go to terminals only");
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].ends_with("qwen3moe, 6 layers, 16 experts, 4 used"), "{text}");
    assert!(lines[1].ends_with("context 512, batch 64, ubatch 64"), "{text}");
    assert!(lines[2].starts_with("predicted: a prompt of 512 tokens and 256 more in "), "{text}");
    let legend = ["█ dense weights", "▓ experts", "▒ KV cache", "▚ activations", "▞ staging slots"];
    for name in legend.into_iter().chain(["▖ gaps", "░ margin", "· free", "  in all"]) {
        assert!(lines.iter().any(|l| l.starts_with(name)), "no `{name}` in\n{text}");
    }
    assert!(text.contains("2 × 576.5 KiB"), "{text}");
    // One bar for each heap, as long as a line, of nothing but parts.
    let is_bar = |l: &&&str| l.chars().all(|c| "█▓▒▚▌▞▖░▤·".contains(c)) && !l.is_empty();
    let bars: Vec<usize> = lines.iter().filter(is_bar).map(|l| l.chars().count()).collect();
    assert_eq!(bars, [100, 100], "{text}");
    // The first two layers have experts on the host only, the others on the device only.
    let layers = lines.iter().position(|l| l.starts_with("layer")).unwrap() + 1;
    for (il, line) in lines[layers..layers + 6].iter().enumerate() {
        assert!(line.trim_start().starts_with(&il.to_string()), "{line}");
        let sides = line.matches("iB").count();
        assert_eq!((sides, line.contains('▓')), (1 + usize::from(il < 2), true), "{line}");
    }
    assert!(lines[layers + 6].starts_with("other"), "{text}");
    assert!(lines.iter().all(|l| l.chars().count() <= 100), "{text}");
}

/// The cache has what was asked for, or what all experts take, or what is left; where the device's memory is the
/// host's the engine wants none.
#[test]
fn a_plan_names_its_expert_cache() {
    let with = |flags: &[&str]| {
        let plan = plan(&[&SMALL[..], &["-cmoe"], flags].concat());
        plan["device_bytes"]["expert_cache"].as_u64().unwrap()
    };
    assert_eq!([with(&[]), with(&["--expert-cache", "0"])], [0, 0]);
    assert_eq!(with(&["--expert-cache", "3"]), 3 << 20);
    let all = with(&["--expert-cache", "99999"]);
    assert!((10 << 20..13 << 20).contains(&all), "{all}");
    let resident = plan(&[&SMALL[..], &["--expert-cache", "3"]].concat());
    assert_eq!(resident["device_bytes"]["expert_cache"], 0);
    let tight = ["plan", "-cmoe", "--vram-limit", "10", "-fitt", "1", "--expert-cache", "9"];
    let ran = vkmoe(&[&tight[..], &SMALL].concat());
    assert!(ran.err.starts_with("warning: --expert-cache 9: ") && ran.err.lines().count() == 1);
    assert!(ran.err.ends_with(" are left for it\n"), "{}", ran.err);
    let text = ran.succeeded();
    let lines = text.lines().filter(|line| line.starts_with("▩ expert cache ")).count();
    assert_eq!(lines, 1, "{text}");
}

/// A batch is the context where memory allows it, or what is asked for in whole ubatches; with too few slots for
/// a layer it is a ubatch.
#[test]
fn a_plan_names_its_batch() {
    let with = |flags: &[&str]| {
        let plan = plan(&[&SMALL[..], &["-cmoe", "--prefetch-experts-slots"], flags].concat());
        let bytes = plan["device_bytes"]["residual_stream"].as_u64().unwrap();
        (plan["n_batch"].as_u64().unwrap(), bytes)
    };
    // Two rows of 256 values and an id for each token.
    let row_bytes = 2 * 256 * 4 + 4;
    assert_eq!(with(&["6"]), (512, 512 * row_bytes));
    assert_eq!(with(&["6", "-b", "200"]), (192, 192 * row_bytes));
    assert_eq!(with(&["6", "-b", "9999"]), (512, 512 * row_bytes));
    assert_eq!(with(&["6", "-b", "32"]), (32, 0));
    let few = ["plan", "-cmoe", "--prefetch-experts-slots", "2", "-b", "256"];
    let ran = vkmoe(&[&few[..], &SMALL].concat());
    assert_eq!(ran.err, "warning: -b 256: memory and slots allow batches of 64 tokens\n");
    assert!(!ran.succeeded().contains("residual stream"));
}

#[test]
fn flags_decide_what_goes_where() {
    let experts = |flags: &[&str]| -> String {
        let plan = plan(flags);
        let gates = places(&plan, "ffn_gate_exps");
        gates.iter().map(|place| if *place == "HOST" { 'h' } else { 'v' }).collect()
    };
    assert_eq!(experts(&[]), "vvvvvv");
    assert_eq!(experts(&["-ngl", "99", "-cmoe"]), "hhhhhh");
    assert_eq!(experts(&["-ncmoe", "2"]), "hhvvvv");
    assert_eq!(experts(&["-ngl", "3"]), "hhhhvv");
    assert_eq!(experts(&["-ngl", "0"]), "hhhhhh");
    assert_eq!(experts(&["-cmoe", "-ot", "blk.[35].ffn_.*_exps=Vulkan0"]), "hhhvhv");
    // The fit goes around what is fixed: the first layer stays, the next ones go. How many depends on
    // the device's activations.
    let flags = ["--vram-limit", "14", "--prefetch-experts-slots", "0", "-ot", r"blk\.0\.=VRAM"];
    let around = experts(&[&SMALL[..], &flags].concat());
    assert!(around.starts_with("vh") && around.ends_with('v'), "{around}");
    assert!(!around.trim_end_matches('v').trim_start_matches('v').contains('v'), "{around}");

    let plan = plan(&["-ot", "token_embd=CPU,attn=HOST"]);
    assert_eq!(places(&plan, "token_embd"), ["HOST"]);
    assert!(places(&plan, "attn").iter().all(|place| *place == "HOST"));
    assert!(places(&plan, "ffn").iter().all(|place| *place == "VRAM"));

    let idle = vkmoe(&["plan", "--json", "-ot", "nothing=HOST"]);
    assert_eq!(idle.err.lines().count(), 1, "{}", idle.err);
    assert!(idle.err.starts_with("warning: -ot nothing=HOST: no tensor"), "{}", idle.err);
    idle.succeeded();
}

#[test]
fn slots_come_from_flag_or_variable() {
    let slots = |flags: &[&str], env: &str| {
        let mut command = command(&[&["plan", "--json", "-cmoe"], flags].concat());
        let ran = Ran::from(command.env("GGML_SCHED_PREFETCH_EXPERTS", env).output().unwrap());
        let plan: serde_json::Value = serde_json::from_str(&ran.succeeded()).unwrap();
        plan["n_slots"].as_u64().unwrap()
    };
    assert_eq!(slots(&[], "1"), 3);
    assert_eq!(slots(&[], "5"), 5);
    assert_eq!(slots(&[], "0"), 0);
    assert_eq!(slots(&["--prefetch-experts-slots", "2"], "5"), 2);
}

/// Flags that a refusal advises, each way with its values.
fn advised(refusal: &str) -> Vec<Vec<String>> {
    let (_, hint) = refusal.trim_end().split_once("; ").unwrap();
    let ways = hint.strip_suffix(" would do").unwrap().replace(" or ", ", ");
    ways.split(", ").map(|way| way.split(' ').map(str::to_owned).collect()).collect()
}

/// Every way that a refusal names works when it is gone: flags that were there get the new value.
#[test]
fn what_a_refusal_advises_works() {
    let refused: [&[&str]; 6] = [
        &["--vram-limit", "1"],
        &["--vram-limit", "16"],
        &["--vram-limit", "12", "-ngl", "all", "-c", "256", "-ub", "16"],
        &["--vram-limit", "9", "-c", "1024", "-ub", "64", "--prefetch-experts-slots", "8"],
        &["--vram-limit", "13", "-c", "512", "-ub", "64", "-ot", "exps=VRAM"],
        &["--vram-limit", "16", "-c", "512", "-ub", "64", "--fit-target", "12"],
    ];
    for flags in refused {
        let ran = vkmoe(&[&["plan"], flags].concat());
        let ways = advised(&ran.err);
        ran.failed(&["out of memory"]);
        for way in ways {
            if way[0] == "leaving" {
                assert_eq!(way.join(" "), "leaving out -ot exps=VRAM");
                continue;
            }
            // Rules add up; any other flag is given once.
            let replaced = |flag: &str| flag != "-ot" && way.iter().any(|w| w == flag);
            let kept = flags.chunks(2).filter(|pair| !replaced(pair[0])).flatten().copied();
            let line: Vec<&str> = kept.chain(way.iter().map(String::as_str)).collect();
            plan(&line);
        }
    }
}

/// Where weights lie changes no bit of a result: also dense ones that kernels read over the bus.
#[test]
fn placement_changes_no_logit() {
    let logits = |flags: &[&str]| {
        let tokens = ["logits", "--tokens", "1 2 3 4 5 6 7 8 9", "--json", "-c", "256"];
        vkmoe(&[&tokens, flags].concat()).succeeded()
    };
    let resident = logits(&[]);
    for flags in [&["-ncmoe", "3"][..], &["-ngl", "0"], &["-ot", ".=HOST"], &["-ot", "up=CPU"]] {
        assert!(logits(flags) == resident, "{flags:?}");
    }
}
