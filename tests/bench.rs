//! `vkmoe bench` as its users meet it, on a small model of random weights.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use serde_json::Value;
use std::process::Command;
use tempfile::TempDir;

/// A folder with `tiny.gguf`.
fn folder() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let ran = vkmoe(&dir, "synth tiny.gguf --preset tiny --layers 2");
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    dir
}

struct Ran {
    code: Option<i32>,
    out: String,
    err: String,
}

/// Runs in `dir`, with words separated by spaces.
fn vkmoe(dir: &TempDir, args: &str) -> Ran {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vkmoe"));
    command.args(args.split_whitespace()).current_dir(dir.path()).env_remove("RUST_LOG");
    let output = command.env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR")).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Ran { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
}

#[test]
fn rows_for_every_test_with_its_samples() {
    let dir = folder();
    let args = "bench -m tiny.gguf -p 8,20 -n 3 -pg 4,2 -d 0,16 -b 16 -ub 4,16 -r 2 -o json";
    let ran = vkmoe(&dir, args);
    assert_eq!((ran.code, ran.err.as_str()), (Some(0), ""));
    let rows: Value = serde_json::from_str(&ran.out).unwrap();
    let rows = rows.as_array().unwrap();
    assert_eq!(rows.len(), 2 * 2 * 4);
    for row in rows {
        let number = |name: &str| row[name].as_f64().unwrap();
        assert_eq!(row["model_type"], "qwen3moe tiny Q4_K - Medium");
        assert_eq!(row["samples_ns"].as_array().unwrap().len(), 2);
        assert!(number("avg_ts") > 0.0 && number("avg_ns") > 0.0, "{row}");
        let ts = number("avg_ts") * number("avg_ns") / 1e9 / (number("n_prompt") + number("n_gen"));
        assert!(ts > 0.9, "tokens per second are those that were timed: {row}");
        assert_eq!(row["streamed_bytes"], 0, "all experts are on the device");
    }
    let sizes =
        |row: &Value| ["n_depth", "n_prompt", "n_gen"].map(|name| row[name].as_u64().unwrap());
    assert_eq!(
        rows[..8].iter().map(sizes).collect::<Vec<_>>(),
        [
            [0, 8, 0],
            [0, 20, 0],
            [0, 0, 3],
            [0, 4, 2],
            [16, 8, 0],
            [16, 20, 0],
            [16, 0, 3],
            [16, 4, 2]
        ]
    );
}

/// Nothing cached, and room for everything.
#[test]
fn rows_say_what_the_expert_cache_did() {
    let dir = folder();
    let args = "bench -m tiny.gguf -p 0 -n 20 -r 2 -ncmoe 2 --expert-cache 0,16 -o jsonl";
    let ran = vkmoe(&dir, args);
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    let rows: Vec<Value> =
        ran.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!([&rows[0]["expert_cache_mib"], &rows[1]["expert_cache_mib"]], ["0", "16"]);
    assert!(rows[0]["cache_hit_share"].is_null() && rows[0]["promoted_bytes"] == 0, "{}", rows[0]);
    let number = |name: &str| rows[1][name].as_f64().unwrap();
    assert!(number("cache_hit_share") > 0.3 && number("promoted_bytes") > 0.0, "{}", rows[1]);
    assert_eq!(number("cache_evictions"), 0.0, "{}", rows[1]);
}

#[test]
fn markdown_and_progress() {
    let dir = folder();
    let ran = vkmoe(&dir, "bench -m tiny.gguf -p 4 -n 2 -d 3 -r 2 --progress");
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    let lines: Vec<&str> = ran.out.lines().collect();
    assert_eq!(lines.len(), 6, "{}", ran.out);
    assert!(lines[2].contains("pp4 @ d3") && lines[3].contains("tg2 @ d3"), "{}", ran.out);
    let steps: Vec<&str> =
        ran.err.lines().filter_map(|line| line.strip_prefix("vkmoe bench: ")).collect();
    let expected = [
        "1/2: pp4 @ d3 loading",
        "1/2: pp4 @ d3 depth",
        "1/2: pp4 @ d3 warm-up",
        "1/2: pp4 @ d3 run 1/2",
        "1/2: pp4 @ d3 run 2/2",
        "2/2: tg2 @ d3 depth",
        "2/2: tg2 @ d3 warm-up",
        "2/2: tg2 @ d3 run 1/2",
        "2/2: tg2 @ d3 run 2/2",
    ];
    assert_eq!(steps, expected);
}

#[test]
fn a_case_that_fails_is_told_and_the_others_run() {
    let dir = folder();
    let ran = vkmoe(&dir, "bench -m none.gguf,tiny.gguf -p 4,5 -n 0 -r 1 --no-warmup -o csv");
    assert_eq!(ran.code, Some(1));
    // Once, though two tests need the file.
    assert_eq!(ran.err.lines().count(), 1, "{}", ran.err);
    assert!(ran.err.starts_with("error: none.gguf: cannot open"), "{}", ran.err);
    assert_eq!(ran.out.lines().count(), 3, "{}", ran.out);

    let ran = vkmoe(&dir, "bench -m none.gguf -o json");
    assert_eq!((ran.code, ran.out.as_str()), (Some(1), ""));
}

#[test]
fn flags_that_make_no_sense_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    for (args, words) in [
        ("-p 0 -n 0", "-p, -n, -pg"),
        ("-ub 0", "-ub"),
        ("-p 4-1", "4-1"),
        ("--prefetch-experts-slots 1", "one slot"),
        ("-o xml", "xml"),
    ] {
        let ran = vkmoe(&dir, &format!("bench {args}"));
        assert!(ran.code.is_some_and(|code| code != 0), "{args}");
        assert!(ran.err.contains(words) && ran.out.is_empty(), "{args}: {}", ran.err);
    }
}

/// A prompt and one token: every kernel with its figures, on any device.
#[test]
fn kernels_one_by_one() {
    let dir = tempfile::tempdir().unwrap();
    let ran = vkmoe(&dir, "bench --ops --preset tiny -p 40 -n 1 -d 70 -r 1 -o jsonl");
    assert_eq!((ran.code, ran.err.as_str()), (Some(0), ""));
    let rows: Vec<Value> =
        ran.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let of = |n_prompt: u64, op: &str| {
        let is = |row: &&Value| row["n_prompt"] == n_prompt && row["op"] == op;
        rows.iter().filter(is).collect::<Vec<_>>()
    };
    for n_prompt in [40, 0] {
        // Others are parts of fused ops on some devices.
        for op in ["attn_output", "output", "token_embd"] {
            let found = of(n_prompt, op);
            assert!(!found.is_empty(), "{op} of {n_prompt} tokens is missing");
        }
        // Half of the layers have better types: two kernels of one op.
        let down = of(n_prompt, "ffn_down_exps");
        assert_eq!(down.len(), 2);
        assert!(down.iter().all(|row| row["count"] == 2), "{down:?}");
    }
    assert_eq!(of(0, "group_pairs").len(), 0, "one token needs no groups");
    for row in &rows {
        let number = |name: &str| row[name].as_f64().unwrap();
        assert_eq!(row["n_depth"], 70);
        assert!(number("ns") > 0.0 && number("peak_memory_gbps") > 0.0, "{row}");
        assert!(row["kernel"] == "copy" || number("peak_share") < 1.3, "{row}");
    }
    let shares = rows.iter().filter(|row| row["n_prompt"] == 40);
    let sum: f64 = shares.map(|row| row["time_share"].as_f64().unwrap()).sum();
    assert!((sum - 1.0).abs() < 1e-6, "{sum}");
}

/// A file gives shapes and types; other tiles stand beside the chosen one.
#[test]
fn tiles_of_a_file_s_kernels() {
    let dir = folder();
    let args = "bench --ops -m tiny.gguf -p 33 -n 0 -r 1 --tiles --filter attn_k";
    let ran = vkmoe(&dir, args);
    assert_eq!((ran.code, ran.err.as_str()), (Some(0), ""));
    assert!(ran.out.contains("at best: "), "{}", ran.out);
    let lines: Vec<&str> = ran.out.lines().filter(|line| line.contains("mul_mat.")).collect();
    assert!(lines.len() > 3, "{}", ran.out);
    assert_eq!(lines.iter().filter(|line| line.contains("| * attn_k")).count(), 1, "{}", ran.out);
    assert!(!ran.out.contains("ffn_"), "{}", ran.out);
}

/// Whole passes: the chosen sizes first, then others; every row says which.
#[test]
fn sizes_in_whole_passes() {
    let dir = folder();
    let ran = vkmoe(&dir, "bench -m tiny.gguf -p 0 -n 2 -r 1 --no-warmup --tiles -o jsonl");
    assert_eq!((ran.code, ran.err.as_str()), (Some(0), ""));
    let rows: Vec<Value> =
        ran.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let sizes: Vec<&str> = rows.iter().map(|row| row["sizes"].as_str().unwrap()).collect();
    let (first, others) = sizes.split_first().unwrap();
    let chosen = first.strip_prefix("* ").unwrap();
    assert!(!others.is_empty() && !others.contains(&chosen), "{sizes:?}");
    assert!(others.iter().all(|other| !other.starts_with('*')), "{sizes:?}");
    assert!(rows.iter().all(|row| row["avg_ts"].as_f64().unwrap() > 0.0));
}

#[test]
fn flags_of_kernels_that_make_no_sense_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    for (args, words) in [
        ("--filter attn_q", "--ops"),
        ("--ops --preset none", "qwen3-30b-a3b"),
        ("--ops -p 0 -n 0", "-p, -n"),
        ("--ops -m a.gguf --preset tiny", "--preset"),
        ("--ops -m none.gguf", "none.gguf"),
        ("--ops --preset gpt-oss-20b", "gpt-oss"),
    ] {
        let ran = vkmoe(&dir, &format!("bench {args}"));
        assert!(ran.code.is_some_and(|code| code != 0), "{args}");
        assert!(ran.err.contains(words) && ran.out.is_empty(), "{args}: {}", ran.err);
    }
}
