//! Kernels as Markdown, or as records. Pure: text out.

use super::row::{Pass, Row, fields, spec, total_ns};
use crate::cli::bench::Format;
use crate::cmd::bench::print::{Records, build};
use crate::exec::peaks::Peaks;
use console::measure_text_width;
use std::fmt::Write;

/// Characters of a bar.
const BAR: usize = 10;

pub(super) struct OpsPrinter {
    records: Records,
    tiles: bool,
    peaks: Peaks,
    n_passes: usize,
}

impl OpsPrinter {
    pub(super) fn new(format: Format, tiles: bool) -> OpsPrinter {
        let records = Records::new(format, "vkmoe_bench_ops");
        OpsPrinter { records, tiles, peaks: Peaks::default(), n_passes: 0 }
    }

    /// What the device does at best. Other formats have it in every row.
    pub(super) fn heading(&mut self, device: &str, peaks: &Peaks) -> String {
        self.peaks = *peaks;
        if self.records.format != Format::Md {
            return String::new();
        }
        let matrix = match peaks.matrix {
            None => "no matrix units for f16".to_owned(),
            Some(m) => {
                let [rows, cols, depth] = m.shape;
                format!("{} f16 matrix {rows}×{cols}×{depth}", tflops(m.gflops))
            }
        };
        format!(
            "{device} at best: {} GB/s, {} f32, {matrix}, {:.1} µs a dispatch\n",
            figure(peaks.memory_gbps),
            tflops(peaks.f32_gflops),
            peaks.dispatch_ns / 1e3
        )
    }

    /// The kernels of a pass.
    pub(super) fn pass(&mut self, pass: &Pass, rows: &[Row]) -> String {
        self.n_passes += 1;
        if self.records.format != Format::Md {
            let peaks = self.peaks;
            return rows
                .iter()
                .map(|row| self.records.record(&fields(pass, &peaks, row), &[]))
                .collect();
        }
        format!("\n{}\n\n{}", summary(pass, rows), table(rows, self.tiles))
    }

    pub(super) fn footer(&self) -> String {
        match self.records.format {
            Format::Md if self.n_passes > 0 => format!("\n{}\n", build()),
            _ => self.records.footer(),
        }
    }
}

/// What the whole pass takes, by its kernels and by itself.
fn summary(pass: &Pass, rows: &[Row]) -> String {
    let name = format!("**{}** {}", pass.test.name(), pass.model);
    if !pass.is_whole {
        return name;
    }
    let ns = total_ns(rows);
    let per_second = f64::from(pass.test.n_timed()) / ns * 1e9;
    format!(
        "{name}: the kernels of {} layers take {}, {per_second:.1} t/s; those of the {} timed take {}, a pass \
         of these {}",
        pass.n_layer(),
        duration(ns),
        pass.layers.len(),
        duration(pass.kernels_ns),
        duration(pass.pass_ns),
    )
}

fn table(rows: &[Row], tiles: bool) -> String {
    let mut titles =
        vec!["op", "kernel", "groups", ">×", ">µs", ">time", ">GB/s", ">TFLOP/s", "of peak"];
    if tiles {
        titles.insert(2, "constants");
    }
    let mut lines: Vec<Vec<String>> =
        vec![titles.iter().map(|t| t.trim_start_matches('>').into()).collect()];
    for row in rows {
        let mark = if tiles && row.is_chosen { "* " } else { "" };
        let mut cells = vec![
            format!("{mark}{}", row.op),
            row.kernel.clone(),
            row.groups.map(|n| n.to_string()).join("×"),
            row.count.to_string(),
            format!("{:.2}", row.ns / 1e3),
            if row.is_chosen { percent(row.time_share) } else { String::new() },
            figure(row.gbps),
            if row.gflops > 0.0 { figure(row.gflops / 1e3) } else { "-".to_owned() },
            row.peak_share.map_or_else(String::new, |s| format!("{} {}", bar(s), percent(s))),
        ];
        if tiles {
            cells.insert(2, spec(row));
        }
        lines.push(cells);
    }
    let right: Vec<bool> = titles.iter().map(|title| title.starts_with('>')).collect();
    markdown(&lines, &right)
}

/// The first line holds the titles.
fn markdown(lines: &[Vec<String>], right: &[bool]) -> String {
    let width = |column: usize| lines.iter().map(|line| measure_text_width(&line[column])).max();
    let widths: Vec<usize> = (0..right.len()).map(|c| width(c).unwrap_or(0).max(3)).collect();
    let mut text = String::new();
    for (i, line) in lines.iter().enumerate() {
        for ((cell, &width), &right) in line.iter().zip(&widths).zip(right) {
            let padding = " ".repeat(width - measure_text_width(cell));
            let (before, after) = if right { (&*padding, "") } else { ("", &*padding) };
            let _ = write!(text, "| {before}{cell}{after} ");
        }
        text += "|\n";
        if i == 0 {
            for (&width, &right) in widths.iter().zip(right) {
                let rule = if right { "-".repeat(width - 1) + ":" } else { "-".repeat(width) };
                let _ = write!(text, "| {rule} ");
            }
            text += "|\n";
        }
    }
    text
}

fn bar(share: f64) -> String {
    let full = (share.clamp(0.0, 1.0) * BAR as f64).round() as usize;
    "█".repeat(full) + &"░".repeat(BAR - full)
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

fn tflops(gflops: f64) -> String {
    format!("{} TFLOP/s", figure(gflops / 1e3))
}

/// Three digits that count: `4480`, `61.2`, `0.0123`.
fn figure(value: f64) -> String {
    let digits = value.abs().max(1e-6).log10().floor() as i32 + 1;
    format!("{value:.*}", (3 - digits).max(0) as usize)
}

/// `1.23 ms`
fn duration(ns: f64) -> String {
    if ns < 1e9 { format!("{:.2} ms", ns / 1e6) } else { format!("{:.2} s", ns / 1e9) }
}
