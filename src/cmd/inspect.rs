//! `vkmoe inspect`: metadata and tensors of a GGUF file.

use super::table::Table;
use super::{emit, model_path};
use crate::cli::InspectArgs;
use crate::error::Result;
use crate::gguf::{Gguf, Value};
use crate::model::Model;
use crate::plan::Bytes;
use std::collections::BTreeMap;

/// Characters of a value that are shown without `--full`.
const SHORT: usize = 80;
/// Elements of an array that are shown without `--full`.
const FEW: usize = 6;

pub(super) fn run(args: &InspectArgs) -> Result<()> {
    let gguf = Gguf::open(&model_path(args.model.as_deref())?)?;
    emit(&format!(
        "{}: GGUF v{}, {} parts, {} tensors, {}\n\n{}\n{}\n{}\n{}",
        gguf.path().display(),
        gguf.version(),
        gguf.parts().len(),
        gguf.tensors().len(),
        Bytes(gguf.total_bytes()),
        metadata(&gguf, args.full),
        tensors(&gguf),
        types(&gguf),
        verdict(&gguf),
    ))
}

fn metadata(gguf: &Gguf, full: bool) -> String {
    let mut table = Table::new(&["key", "type", "value"]);
    for (key, value) in gguf.metadata().iter() {
        let (ty, text) = type_and_text(value, full);
        table.row([key.to_string(), ty, shortened(&text, full)]);
    }
    table.to_string()
}

fn type_and_text(value: &Value, full: bool) -> (String, String) {
    match value {
        Value::String(text) => ("string".into(), text.clone()),
        Value::Array(array) => {
            let few = if full { array.len() } else { array.len().min(FEW) };
            let more = if few < array.len() { ", …" } else { "" };
            let items = array.first_as_text(few).join(", ");
            (format!("{}[{}]", array.type_name(), array.len()), format!("[{items}{more}]"))
        }
        // Numbers and truth values display as type and value.
        scalar => match scalar.to_string().split_once(' ') {
            Some((ty, text)) => (ty.into(), text.into()),
            None => (String::new(), scalar.to_string()),
        },
    }
}

/// A text on one line, cut where it is long.
fn shortened(text: &str, full: bool) -> String {
    let line: String = text
        .chars()
        .flat_map(|c| match c {
            '\n' => "\\n".chars().collect::<Vec<_>>(),
            c if c.is_control() => c.escape_default().collect(),
            c => vec![c],
        })
        .collect();
    match line.char_indices().nth(SHORT) {
        Some((cut, _)) if !full => format!("{}…", &line[..cut]),
        _ => line,
    }
}

fn tensors(gguf: &Gguf) -> String {
    let mut table = Table::new(&["tensor", "type", ">shape", ">bytes", ">part", ">offset"]);
    for t in gguf.tensors() {
        let shape: Vec<String> = t.shape[..t.n_dims as usize].iter().map(u64::to_string).collect();
        table.row([
            t.name.clone(),
            t.ty.to_string(),
            shape.join(" × "),
            Bytes(t.bytes).to_string(),
            (t.part + 1).to_string(),
            t.offset.to_string(),
        ]);
    }
    table.to_string()
}

/// How many tensors of each type, and their share of the bytes as a bar.
fn types(gguf: &Gguf) -> String {
    let mut sums: BTreeMap<&str, (usize, u64)> = BTreeMap::new();
    for t in gguf.tensors() {
        let sum = sums.entry(t.ty.name()).or_default();
        *sum = (sum.0 + 1, sum.1 + t.bytes);
    }
    let total: u64 = gguf.tensors().iter().map(|t| t.bytes).sum();
    let mut table = Table::new(&["type", ">tensors", ">bytes", ">share", ""]);
    for (name, (n, bytes)) in sums {
        let share = bytes as f64 / total.max(1) as f64;
        let bar = "█".repeat((share * 40.0).round() as usize);
        let percent = format!("{:.1} %", 100.0 * share);
        table.row([name.into(), n.to_string(), Bytes(bytes).to_string(), percent, bar]);
    }
    table.to_string()
}

/// Whether the engine can run it.
fn verdict(gguf: &Gguf) -> String {
    match Model::load(gguf) {
        Ok(model) => {
            let (hp, e) = (&model.hparams, &model.hparams.experts);
            format!(
                "runs: {}, {} layers, {} experts, {} used, context {}\n",
                hp.arch, hp.n_layer, e.n_expert, e.n_used, hp.n_ctx_train
            )
        }
        Err(e) => format!("cannot run: {e}\n"),
    }
}
