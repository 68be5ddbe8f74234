//! Figures and formats, from rows made up.

use super::cases::{self, Case};
use super::measure::Measured;
use super::print::Printer;
use super::row::{ModelInfo, Row, average, deviation, params, size};
use crate::cli::bench::Format;
use crate::cli::{Cli, Command, expand};
use crate::error::Result;
use crate::stream::stats::StreamStats;
use clap::Parser;
use std::ffi::OsString;
use std::time::Duration;

fn cases_of(args: &str) -> Result<Vec<Case>> {
    let args = ["vkmoe", "bench"].into_iter().chain(args.split_whitespace());
    match Cli::parse_from(expand(args.map(OsString::from))).command {
        Command::Bench(args) => cases::cases(&args),
        _ => panic!("another command"),
    }
}

/// Two repetitions of one and two seconds, and what streaming did in both together.
fn rows(args: &str, stats: StreamStats) -> Result<Vec<Row>> {
    let row = |case: Case| Row {
        case,
        model: ModelInfo {
            file: "dir/a \"b\" 'c'.gguf".into(),
            description: "qwen3moe 30B.A3B Q4_K - Medium".into(),
            bytes: 18_550_000_000,
            n_params: 30_532_122_624,
        },
        gpu: "GPU, large".into(),
        n_batch: 2048,
        measured: Measured { samples: vec![Duration::from_secs(1), Duration::from_secs(2)], stats },
        sizes: None,
        time: "2026-01-02T03:04:05Z".into(),
    };
    Ok(cases_of(args)?.into_iter().map(row).collect())
}

const STREAMED: StreamStats = StreamStats {
    streamed_bytes: 4 << 30,
    direct_bytes: 10,
    copy_ns: 100_000_000,
    compute_ns: 90_000_000,
    both_ns: 85_000_000,
    wall_ns: 110_000_000,
    cache_hits: 3,
    cache_misses: 1,
    cache_evictions: 4,
    promoted_bytes: 2 << 20,
};

fn printed(format: Format, args: &str, stats: StreamStats) -> Result<String> {
    let rows = rows(args, stats)?;
    let cases: Vec<Case> = rows.iter().map(|row| row.case.clone()).collect();
    let mut printer = Printer::new(format, &cases, false);
    let text: String = rows.iter().map(|row| printer.row(row)).collect();
    Ok(text + &printer.footer())
}

#[test]
fn figures() {
    assert_eq!(average(&[1.0, 2.0, 6.0]), 3.0);
    assert!((deviation(&[1.0, 2.0, 6.0]) - 7f64.sqrt()).abs() < 1e-12);
    assert_eq!((average(&[]), deviation(&[]), deviation(&[5.0])), (0.0, 0.0, 0.0));
    assert_eq!((size(3 << 20), size(3 << 29)), ("3.00 MiB".into(), "1.50 GiB".into()));
    assert_eq!((params(1_500_000), params(30_532_122_624)), ("1.50 M".into(), "30.53 B".into()));
}

#[test]
fn markdown_has_llama_bench_s_columns_and_ours() -> Result<()> {
    let text = printed(Format::Md, "-p 512 -n 128 -d 0,4096", STREAMED)?;
    let lines: Vec<&str> = text.lines().collect();
    let cells = |line: &str| -> Vec<String> {
        line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect()
    };
    assert_eq!(
        cells(lines[0]),
        [
            "model",
            "size",
            "params",
            "backend",
            "ngl",
            "test",
            "t/s",
            "link GB/s",
            "GiB streamed",
            "hidden",
            "hits, out, in",
            "bound"
        ]
    );
    assert!(lines[1].starts_with("| ------------------------------ | ---------: | ---------: |"));
    assert_eq!(
        cells(lines[2]),
        [
            "qwen3moe 30B.A3B Q4_K - Medium",
            "17.28 GiB",
            "30.53 B",
            "Vulkan",
            "-1",
            "pp512",
            "384.00 ± 181.02",
            "42.9",
            "2.00",
            "85 %",
            "75 %, 2, 1.0 MiB",
            "bus 91 %"
        ]
    );
    assert_eq!(cells(lines[5])[5], "tg128 @ d4096");
    let width = |line: &str| line.chars().count();
    assert!(lines[..6].iter().all(|line| width(line) == width(lines[0])), "{text}");
    assert!(lines[7].starts_with("build: vkmoe "));
    Ok(())
}

#[test]
fn markdown_shows_settings_that_are_not_the_default() -> Result<()> {
    let args = "-p 1 -n 0 -ncmoe 0,48 -ub 512,2048 -b 4096 -ctk q8_0 -ot a|b=HOST \
                --prefetch-experts-slots 3 --expert-cache 500 --host-source ring --vram-limit 12000 --device 1";
    let text = printed(Format::Md, args, StreamStats::default())?;
    let header = text.lines().next().unwrap_or_default();
    for column in [
        "n_cpu_moe",
        "n_batch",
        "n_ubatch",
        "type_k",
        "dev",
        " ot ",
        "vram_limit",
        "host_source",
        "slots",
        "cache",
    ] {
        assert!(header.contains(column), "{column} is not in {header}");
    }
    assert!(!header.contains("type_v"), "{header}");
    assert!(text.contains("a\\|b=HOST"));
    // Nothing streamed: no figures.
    assert!(
        text.lines()
            .nth(2)
            .unwrap_or_default()
            .ends_with("|         0.00 |      - |                     - | -             |"),
        "{text}"
    );
    Ok(())
}

#[test]
fn json_is_an_array_of_objects() -> Result<()> {
    let text = printed(Format::Json, "-p 512 -n 128", STREAMED)?;
    let parsed: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
    let row = &parsed[1];
    assert_eq!(parsed.as_array().map(Vec::len), Some(2));
    assert_eq!((&row["n_gen"], &row["n_prompt"]), (&128.into(), &0.into()));
    assert_eq!(row["model_filename"], "dir/a \"b\" 'c'.gguf");
    assert_eq!(row["avg_ns"], 1_500_000_000u64);
    assert_eq!(row["samples_ns"], serde_json::json!([1_000_000_000u64, 2_000_000_000u64]));
    assert_eq!(row["samples_ts"], serde_json::json!([128.0, 64.0]));
    assert_eq!((&row["avg_ts"], &row["streamed_bytes"]), (&96.0.into(), &(2u64 << 30).into()));
    assert_eq!((&row["bound"], &row["hidden_share"]), (&"bus".into(), &0.85.into()));
    assert_eq!((&row["expert_cache_mib"], &row["cache_hit_share"]), (&"auto".into(), &0.75.into()));
    assert_eq!((&row["cache_evictions"], &row["promoted_bytes"]), (&2.0.into(), &(1 << 20).into()));
    assert!(row["vram_limit_mib"].is_null());
    Ok(())
}

#[test]
fn lines_of_json_hold_a_row_each() -> Result<()> {
    let text = printed(Format::Jsonl, "-p 512 -n 128", STREAMED)?;
    let names: Vec<_> = text
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap_or_default())
        .map(|row| (row["n_prompt"].clone(), row["n_gen"].clone()))
        .collect();
    assert_eq!(names, [(512.into(), 0.into()), (0.into(), 128.into())]);
    Ok(())
}

#[test]
fn csv_quotes_every_value() -> Result<()> {
    let text = printed(Format::Csv, "-p 512 -n 128", STREAMED)?;
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 3);
    assert!(lines[0].starts_with("build_version,gpu_info,backends,model_filename,model_type"));
    let n_columns = lines[0].split(',').count();
    // The name of the device has a comma.
    assert!(lines.iter().skip(1).all(|line| line.split("\",\"").count() == n_columns));
    assert!(
        lines[1].contains("\"GPU, large\"") && lines[1].contains("\"dir/a \"\"b\"\" 'c'.gguf\"")
    );
    Ok(())
}

#[test]
fn sql_makes_a_table_and_fills_it() -> Result<()> {
    let text = printed(Format::Sql, "-p 512 -n 128", StreamStats::default())?;
    assert!(text.starts_with("CREATE TABLE IF NOT EXISTS vkmoe_bench (\n  build_version TEXT,\n"));
    assert!(text.contains("  avg_ts REAL,\n") && text.contains("  n_prompt INTEGER,\n"));
    assert_eq!(text.matches("CREATE").count(), 1);
    assert_eq!(text.matches("INSERT INTO vkmoe_bench (build_version, ").count(), 2);
    assert!(text.contains("'dir/a \"b\" ''c''.gguf'") && text.contains("NULL"));
    Ok(())
}

#[test]
fn without_rows_there_is_nothing() -> Result<()> {
    let cases = cases_of("")?;
    for format in [Format::Md, Format::Json, Format::Jsonl, Format::Csv, Format::Sql] {
        assert_eq!(Printer::new(format, &cases, false).footer(), "");
    }
    Ok(())
}
