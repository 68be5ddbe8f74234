//! Rows as Markdown, JSON, CSV or SQL. Pure: text out, for the caller to print as rows arrive.

use super::cases::Case;
use super::row::{Row, average, cache, deviation, params, size, slots};
use crate::cli::bench::Format;
use serde_json::Value;
use std::fmt::Write;

/// Turns rows into a format, in order.
pub(super) struct Printer {
    columns: Vec<Column>,
    rows: Records,
}

impl Printer {
    /// `cases`: all that will come; they decide which columns Markdown needs. `tiles`: rows have sizes.
    pub(super) fn new(format: Format, cases: &[Case], tiles: bool) -> Printer {
        let columns = columns().into_iter().filter(|column| column.is_wanted(cases));
        let columns = columns.chain(tiles.then(sizes)).collect();
        Printer { columns, rows: Records::new(format, "vkmoe_bench") }
    }

    /// A row, and before the first one what a result of this format begins with.
    pub(super) fn row(&mut self, row: &Row) -> String {
        if self.rows.format == Format::Md {
            let header = if self.rows.n == 0 { self.md_header() } else { String::new() };
            self.rows.n += 1;
            return header + &self.md_line(|column| column.pad(&(column.cell)(row)));
        }
        self.rows.record(&row.fields(), &row.samples())
    }

    /// What comes after the rows, if there were any.
    pub(super) fn footer(&self) -> String {
        match self.rows.format {
            Format::Md if self.rows.n > 0 => format!("\n{}\n", build()),
            _ => self.rows.footer(),
        }
    }

    fn md_header(&self) -> String {
        let titles = self.md_line(|column| column.pad(column.title));
        let rule = self.md_line(|column| match column.align {
            Align::Left => "-".repeat(column.width),
            Align::Right => "-".repeat(column.width - 1) + ":",
        });
        titles + &rule
    }

    fn md_line(&self, cell: impl Fn(&Column) -> String) -> String {
        let mut line = "|".to_owned();
        for column in &self.columns {
            let _ = write!(line, " {} |", cell(column));
        }
        line + "\n"
    }
}

/// The line that says what measured.
pub(super) fn build() -> String {
    format!("build: vkmoe {}", env!("CARGO_PKG_VERSION"))
}

/// Name and value.
pub(super) type Field = (&'static str, Value);

/// Turns named values into the formats that programs read.
pub(super) struct Records {
    pub(super) format: Format,
    /// Of the SQL format.
    table: &'static str,
    /// Rows so far.
    n: usize,
}

impl Records {
    pub(super) fn new(format: Format, table: &'static str) -> Records {
        Records { format, table, n: 0 }
    }

    /// A row, and before the first one what a result of this format begins with. `lists`: for formats
    /// that hold lists. Nothing in Markdown.
    pub(super) fn record(&mut self, fields: &[Field], lists: &[Field]) -> String {
        let is_first = self.n == 0;
        self.n += 1;
        let first = |text: String| if is_first { text } else { String::new() };
        let names =
            |between: &str| fields.iter().map(|field| field.0).collect::<Vec<_>>().join(between);
        let values = |text: fn(&Value) -> String| fields.iter().map(move |field| text(&field.1));
        match self.format {
            Format::Md => String::new(),
            Format::Json => {
                let separator = if is_first { "[\n" } else { ",\n" };
                let object = serde_json::to_string_pretty(&object(fields, lists));
                format!("{separator}{}", object.unwrap_or_default())
            }
            Format::Jsonl => format!("{}\n", object(fields, lists)),
            Format::Csv => {
                let header = first(names(",") + "\n");
                format!("{header}{}\n", values(csv).collect::<Vec<_>>().join(","))
            }
            Format::Sql => {
                let (table, header) = (self.table, first(create_table(self.table, fields)));
                let (names, values) = (names(", "), values(sql).collect::<Vec<_>>().join(", "));
                format!("{header}INSERT INTO {table} ({names}) VALUES ({values});\n")
            }
        }
    }

    /// What comes after the rows, if there were any.
    pub(super) fn footer(&self) -> String {
        match self.format {
            Format::Json if self.n > 0 => "\n]\n".to_owned(),
            _ => String::new(),
        }
    }
}

/// A row as an object, with its lists.
fn object(fields: &[Field], lists: &[Field]) -> Value {
    let fields = fields.iter().chain(lists);
    Value::Object(fields.map(|(name, value)| ((*name).to_owned(), value.clone())).collect())
}

/// Quoted whatever it is, as llama-bench does; nothing for null.
fn csv(value: &Value) -> String {
    format!("\"{}\"", plain(value).replace('"', "\"\""))
}

fn sql(value: &Value) -> String {
    match value {
        Value::Null => "NULL".to_owned(),
        Value::String(text) => format!("'{}'", text.replace('\'', "''")),
        number => number.to_string(),
    }
}

fn plain(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        number => number.to_string(),
    }
}

/// Columns take SQLite's affinity from their values: what may be null is left without a type.
fn create_table(table: &str, fields: &[Field]) -> String {
    let column = |(name, value): &Field| match value {
        Value::String(_) => format!("  {name} TEXT"),
        Value::Number(n) if n.is_f64() => format!("  {name} REAL"),
        Value::Number(_) => format!("  {name} INTEGER"),
        _ => format!("  {name}"),
    };
    let columns: Vec<String> = fields.iter().map(column).collect();
    format!("CREATE TABLE IF NOT EXISTS {table} (\n{}\n);\n\n", columns.join(",\n"))
}

#[derive(Clone, Copy, PartialEq)]
enum Align {
    Left,
    Right,
}

/// A column of the Markdown table.
struct Column {
    title: &'static str,
    align: Align,
    width: usize,
    /// What it shows of a row.
    cell: fn(&Row) -> String,
    /// Shown only if this is not the same, and the default, in all cases.
    varies: Option<Varies>,
}

/// A setting as text, and its default.
#[derive(Clone, Copy)]
struct Varies {
    of: fn(&Case) -> String,
    default: &'static str,
}

impl Column {
    fn is_wanted(&self, cases: &[Case]) -> bool {
        self.varies.is_none_or(|v| cases.iter().any(|case| (v.of)(case) != v.default))
    }

    fn pad(&self, text: &str) -> String {
        let width = self.width;
        match self.align {
            Align::Left => format!("{text:<width$}"),
            Align::Right => format!("{text:>width$}"),
        }
    }
}

/// All columns, in llama-bench's order and widths, and ours behind.
fn columns() -> Vec<Column> {
    let fixed = |title, align, width, cell| Column { title, align, width, cell, varies: None };
    macro_rules! setting {
        ($title:literal, $align:expr, $width:literal, $default:literal, $of:expr) => {{
            let of: fn(&Case) -> String = $of;
            Column {
                title: $title,
                align: $align,
                width: $width,
                cell: |row| ($of)(&row.case),
                varies: Some(Varies { of, default: $default }),
            }
        }};
    }
    use Align::{Left, Right};
    vec![
        fixed("model", Left, 30, |row| row.model.description.clone()),
        fixed("size", Right, 10, |row| size(row.model.bytes)),
        fixed("params", Right, 10, |row| params(row.model.n_params)),
        fixed("backend", Left, 10, |_| "Vulkan".to_owned()),
        fixed("ngl", Right, 3, |row| row.case.load.gpu_layers.number().to_string()),
        setting!("n_cpu_moe", Right, 10, "0", |case: &Case| case.load.n_cpu_moe.to_string()),
        setting!("n_batch", Right, 7, "auto", |case: &Case| {
            case.load.n_batch.map_or_else(|| "auto".to_owned(), |n| n.to_string())
        }),
        setting!("n_ubatch", Right, 8, "512", |case: &Case| case.n_ubatch.to_string()),
        setting!("type_k", Left, 6, "f16", |case: &Case| case.load.type_k.to_string()),
        setting!("type_v", Left, 6, "f16", |case: &Case| case.load.type_v.to_string()),
        setting!("dev", Left, 12, "", |case: &Case| case.load.device.clone().unwrap_or_default()),
        setting!("ot", Left, 21, "", |case: &Case| escaped(&case.load.overrides.to_string())),
        setting!("vram_limit", Right, 10, "", |case: &Case| {
            case.load.vram_limit_mib.map(|mib| mib.to_string()).unwrap_or_default()
        }),
        setting!("host_source", Left, 11, "auto", |case: &Case| {
            case.load.host_source.map_or("auto", |source| source.name()).to_owned()
        }),
        setting!("copy_queue", Left, 10, "auto", |case: &Case| {
            case.load.copy_queue.map_or("auto", |queue| queue.name()).to_owned()
        }),
        setting!("slots", Right, 5, "auto", |case: &Case| slots(case.load.slots)),
        setting!("cache", Right, 5, "auto", |case: &Case| cache(case.load.expert_cache)),
        fixed("test", Right, 15, |row| row.case.test.name()),
        fixed("t/s", Right, 20, |row| {
            let rates = row.rates();
            format!("{:.2} ± {:.2}", average(&rates), deviation(&rates))
        }),
        fixed("link GB/s", Right, 9, |row| figure(row.measured.stats.link_gbps(), 1.0, "", 1)),
        fixed("GiB streamed", Right, 12, |row| format!("{:.2}", row.streamed_gib())),
        fixed("hidden", Right, 6, |row| figure(row.measured.stats.hidden_share(), 100.0, " %", 0)),
        fixed("hits, out, in", Right, 21, Row::cached),
        fixed("bound", Left, 13, |row| {
            row.measured.stats.bound().map_or_else(|| "-".to_owned(), |bound| bound.to_string())
        }),
    ]
}

/// What `--tiles` adds.
fn sizes() -> Column {
    let cell = |row: &Row| row.sizes.clone().unwrap_or_default();
    Column { title: "sizes", align: Align::Left, width: 5, cell, varies: None }
}

/// A pattern's bars would end the cell.
fn escaped(text: &str) -> String {
    text.replace('|', "\\|")
}

fn figure(value: Option<f64>, factor: f64, unit: &str, decimals: usize) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{:.decimals$}{unit}", value * factor))
}
