//! `vkmoe plan`: what would live where, without loading: a table and a bar for each heap, and bars for
//! each layer.

use super::table::Table;
use super::{emit, plan_engine};
use crate::cli::PlanArgs;
use crate::engine::Planned;
use crate::error::{Error, Result};
use crate::plan::usage::{self, LayerUse, Part};
use crate::plan::{Bytes, Sharing};
use console::{Color, Term, style};
use serde_json::{Map, Value, json};

/// Columns where there is no terminal to ask, and the bounds of what is asked.
const COLUMNS: usize = 100;
const MIN_COLUMNS: usize = 60;
const MAX_COLUMNS: usize = 160;
/// Columns of the layers' table beside its two bars.
const BESIDE_BARS: usize = 5 + 2 * 10 + 4 * 2;

pub(super) fn run(args: &PlanArgs) -> Result<()> {
    if args.engine.trace.is_some() {
        return Err(Error::usage("--trace", "a plan runs nothing that could be traced"));
    }
    let planned = plan_engine(&args.engine)?;
    if args.json {
        return emit(&format!("{:#}\n", as_json(&planned)));
    }
    let columns = Term::stdout().size_checked().map_or(COLUMNS, |(_, columns)| columns.into());
    let columns = columns.clamp(MIN_COLUMNS, MAX_COLUMNS);
    emit(&format!(
        "{}\n{}\n{}\n{}",
        head(&planned),
        heap("device memory", &planned.device_parts(), columns, &planned),
        heap(host_title(&planned), &planned.host_parts(), columns, &planned),
        layers(&planned.layers(), columns),
    ))
}

fn head(planned: &Planned) -> String {
    let (hp, info) = (planned.hparams(), planned.device().info());
    let shares = match planned.budget().sharing {
        Sharing::None => "",
        Sharing::Chips | Sharing::Heap => ", its memory is the host's",
    };
    format!(
        "{}: {}, {} layers, {} experts, {} used\n{} ({}{shares}), context {}, batch {}, ubatch {}\n{}",
        planned.gguf().path().display(),
        hp.arch,
        hp.n_layer,
        hp.experts.n_expert,
        hp.experts.n_used,
        info.name,
        info.kind,
        planned.kv_shape().n_ctx,
        planned.plan().n_batch,
        planned.n_ubatch(),
        planned.plan().choice().iter().map(|line| format!("{line}\n")).collect::<String>(),
    )
}

fn host_title(planned: &Planned) -> &'static str {
    match planned.budget().sharing {
        Sharing::Heap => "host memory, same heap",
        Sharing::None | Sharing::Chips => "host memory",
    }
}

/// One heap: a line for each part, with the sign that stands for it in the bar below.
fn heap(title: &str, parts: &[(Part, u64)], columns: usize, planned: &Planned) -> String {
    let total = usage::sum(parts);
    let mut table = Table::new(&[title, ">bytes", ">share", ""]);
    let shown = parts.iter().filter(|(part, bytes)| *bytes > 0 || *part == Part::Free);
    for &(part, bytes) in shown {
        let name = format!("{} {}", paint(part, 1), part.name());
        table.row([name, Bytes(bytes).to_string(), share(bytes, total), detail(part, planned)]);
    }
    table.row(["  in all".into(), Bytes(total).to_string(), String::new(), String::new()]);
    format!("{table}{}\n", bar(parts, total, columns))
}

fn share(bytes: u64, total: u64) -> String {
    format!("{:.1} %", 100.0 * bytes as f64 / total.max(1) as f64)
}

/// What makes up a part, or decides its size.
fn detail(part: Part, planned: &Planned) -> String {
    let (plan, kv) = (planned.plan(), planned.kv_shape());
    let n_layer = planned.hparams().n_layer;
    match part {
        Part::Experts => {
            format!("{} of {n_layer} layers have some in host memory", plan.n_host_layers)
        }
        Part::Kv => format!("{} tokens, keys {}, values {}", kv.n_ctx, kv.type_k, kv.type_v),
        Part::Activations => format!("up to {} tokens at once", planned.n_ubatch()),
        Part::Residual => format!("of batches of {} tokens, layer by layer", plan.n_batch),
        Part::Slots => format!("{} × {}", plan.n_slots, Bytes(plan.slot_bytes)),
        Part::Cache => "experts in host memory that are used often, at most".into(),
        Part::Packing => "between weights, at most".into(),
        Part::Margin => "for the driver, the desktop and other programs".into(),
        Part::DevicePart => "the table above".into(),
        Part::Dense | Part::Free => String::new(),
    }
}

/// A line for each layer: what of it is on the device, what on the host, all bars to one scale.
fn layers(layers: &[LayerUse], columns: usize) -> String {
    let sides = layers.iter().flat_map(|l| [usage::sum(&l.device), usage::sum(&l.host)]);
    let scale = sides.max().unwrap_or(0);
    let width = columns.saturating_sub(BESIDE_BARS) / 2;
    let mut table = Table::new(&["layer", ">device", "", ">host", ""]);
    for layer in layers {
        let name = layer.layer.map_or("other".into(), |il| format!("{il:>5}"));
        let side = |parts: &[(Part, u64)]| match usage::sum(parts) {
            0 => [String::new(), String::new()],
            bytes => [Bytes(bytes).to_string(), bar(parts, scale, width)],
        };
        let ([device, device_bar], [host, host_bar]) = (side(&layer.device), side(&layer.host));
        table.row([name, device, device_bar, host, host_bar]);
    }
    table.to_string()
}

fn bar(parts: &[(Part, u64)], scale_bytes: u64, width: usize) -> String {
    let cells = usage::cells(parts, scale_bytes, width);
    cells.into_iter().map(|(part, n)| paint(part, n)).collect()
}

/// Cells of a bar; coloured only on a terminal.
fn paint(part: Part, n: usize) -> String {
    let cells = style(part.glyph().to_string().repeat(n));
    let color = match part {
        Part::Dense => Color::Blue,
        Part::Experts => Color::Green,
        Part::Kv => Color::Yellow,
        Part::Activations | Part::Residual => Color::Magenta,
        Part::Slots | Part::Cache => Color::Cyan,
        Part::Packing | Part::Margin | Part::DevicePart | Part::Free => {
            return cells.dim().to_string();
        }
    };
    cells.fg(color).to_string()
}

fn as_json(planned: &Planned) -> Value {
    let (hp, info, kv) = (planned.hparams(), planned.device().info(), planned.kv_shape());
    let (plan, budget) = (planned.plan(), planned.budget());
    let sharing = match budget.sharing {
        Sharing::None => "none",
        Sharing::Chips => "chips",
        Sharing::Heap => "heap",
    };
    let tensors: Vec<Value> = planned
        .weights()
        .map(|(name, place, bytes)| json!({"name": name, "place": place.name(), "bytes": bytes}))
        .collect();
    json!({
        "model": planned.gguf().path().display().to_string(),
        "architecture": hp.arch,
        "n_layer": hp.n_layer,
        "n_host_layers": plan.n_host_layers,
        "device": info.name,
        "device_kind": info.kind.to_string(),
        "shares_host_memory": sharing,
        "n_ctx": kv.n_ctx,
        "n_batch": plan.n_batch,
        "n_ubatch": planned.n_ubatch(),
        "type_k": kv.type_k.to_string(),
        "type_v": kv.type_v.to_string(),
        "n_slots": plan.n_slots,
        "slot_bytes": plan.slot_bytes,
        "device_bytes": parts_json(&planned.device_parts(), Some(budget.device_bytes)),
        "host_bytes": parts_json(&planned.host_parts(), Some(budget.host_bytes)),
        "prediction": plan.prediction.map(|p| json!({
            "n_prompt": p.n_prompt,
            "prompt_ns": p.prompt_ns,
            "answer_ns": p.answer_ns,
        })),
        "layers": planned.layers().iter().map(layer_json).collect::<Vec<_>>(),
        "tensors": tensors,
    })
}

fn layer_json(layer: &LayerUse) -> Value {
    json!({
        "layer": layer.layer,
        "device_bytes": parts_json(&layer.device, None),
        "host_bytes": parts_json(&layer.host, None),
    })
}

/// `{"dense_weights": 123, …}`
fn parts_json(parts: &[(Part, u64)], budget_bytes: Option<u64>) -> Value {
    let key = |part: Part| part.name().replace(' ', "_").to_lowercase();
    let mut object: Map<String, Value> =
        parts.iter().map(|&(part, bytes)| (key(part), json!(bytes))).collect();
    if let Some(bytes) = budget_bytes {
        object.insert("budget".into(), json!(bytes));
    }
    Value::Object(object)
}
