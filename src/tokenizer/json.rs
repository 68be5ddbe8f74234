//! Between JSON and template values; JSON is written the way Python's `json.dumps` writes it.

use std::fmt::Write;

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};

/// The arguments of `json.dumps`.
#[derive(Debug)]
pub(super) struct Style {
    /// Write everything beyond ASCII as `\uXXXX`.
    pub(super) ensure_ascii: bool,
    /// Spaces per level; one line if absent.
    pub(super) indent: Option<usize>,
    /// Between items.
    pub(super) item_separator: String,
    /// Between key and value.
    pub(super) key_separator: String,
    /// Sort objects by key.
    pub(super) sort_keys: bool,
}

/// A JSON value as a template sees it.
pub(super) fn to_template(json: &serde_json::Value) -> Value {
    match json {
        serde_json::Value::Null => Value::from(()),
        serde_json::Value::Bool(b) => Value::from(*b),
        serde_json::Value::String(s) => Value::from(s.as_str()),
        serde_json::Value::Array(items) => items.iter().map(to_template).collect(),
        serde_json::Value::Object(map) => {
            Value::from_pairs(map.iter().map(|(k, v)| (k.as_str(), to_template(v))))
        }
        serde_json::Value::Number(n) => match (n.as_i64(), n.as_u64(), n.as_f64()) {
            (Some(n), ..) => Value::from(n),
            (None, Some(n), _) => Value::from(n),
            (None, None, n) => Value::from(n),
        },
    }
}

/// A template value as JSON text.
pub(super) fn dumps(value: &Value, style: &Style) -> Result<String, Error> {
    let mut out = String::new();
    write_value(&mut out, value, style, 0)?;
    Ok(out)
}

/// Depth is bounded by the template engine, which built the value.
fn write_value(out: &mut String, value: &Value, style: &Style, depth: usize) -> Result<(), Error> {
    match value.kind() {
        ValueKind::Undefined | ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => out.push_str(&value.to_string()),
        ValueKind::String => write_string(out, &value.to_string(), style),
        ValueKind::Seq | ValueKind::Iterable => write_seq(out, value, style, depth)?,
        ValueKind::Map => write_map(out, value, style, depth)?,
        kind => {
            let problem = format!("cannot write {kind} as JSON");
            return Err(Error::new(ErrorKind::BadSerialization, problem));
        }
    }
    Ok(())
}

fn write_seq(out: &mut String, value: &Value, style: &Style, depth: usize) -> Result<(), Error> {
    out.push('[');
    let mut is_empty = true;
    for item in value.try_iter()? {
        start_item(out, style, depth + 1, is_empty);
        write_value(out, &item, style, depth + 1)?;
        is_empty = false;
    }
    end_container(out, style, depth, is_empty);
    out.push(']');
    Ok(())
}

fn write_map(out: &mut String, value: &Value, style: &Style, depth: usize) -> Result<(), Error> {
    let mut keys: Vec<Value> = value.try_iter()?.collect();
    if style.sort_keys {
        keys.sort();
    }
    out.push('{');
    for (i, key) in keys.iter().enumerate() {
        start_item(out, style, depth + 1, i == 0);
        write_string(out, &key.to_string(), style);
        out.push_str(&style.key_separator);
        write_value(out, &value.get_item(key)?, style, depth + 1)?;
    }
    end_container(out, style, depth, keys.is_empty());
    out.push('}');
    Ok(())
}

fn start_item(out: &mut String, style: &Style, depth: usize, is_first: bool) {
    if !is_first {
        out.push_str(&style.item_separator);
    }
    new_line(out, style, depth);
}

fn end_container(out: &mut String, style: &Style, depth: usize, is_empty: bool) {
    if !is_empty {
        new_line(out, style, depth);
    }
}

fn new_line(out: &mut String, style: &Style, depth: usize) {
    if let Some(spaces) = style.indent {
        out.push('\n');
        out.extend(std::iter::repeat_n(' ', spaces.saturating_mul(depth)));
    }
}

fn write_string(out: &mut String, text: &str, style: &Style) {
    let quoted = serde_json::Value::from(text).to_string();
    for c in quoted.chars() {
        if c.is_ascii() || !style.ensure_ascii {
            out.push(c);
            continue;
        }
        for unit in c.encode_utf16(&mut [0; 2]) {
            // Writing to a String cannot fail.
            let _ = write!(out, "\\u{unit:04x}");
        }
    }
}
