//! `vkmoe logits`: logits of given token ids.

use super::trace_file::TraceFile;
use super::{emit, note_logits_hash, open_engine, write_trace};
use crate::cli::LogitsArgs;
use crate::engine::Outputs;
use crate::error::{Error, Result};
use serde_json::json;
use std::fmt::Write;

/// Likeliest tokens printed per position.
const SHOWN: usize = 10;

pub(super) fn run(args: &LogitsArgs) -> Result<()> {
    let tokens = parse_ids(&args.tokens)?;
    let trace = TraceFile::create(args.engine.trace.as_deref())?;
    let mut engine = open_engine(&args.engine)?;
    let mut session = engine.session()?;
    let outputs = if args.all_positions { Outputs::All } else { Outputs::Last };
    let mut rows: Vec<(u32, Vec<f32>)> = Vec::new();
    engine.eval(&mut session, &tokens, outputs, |position, logits| {
        rows.push((position, logits.to_vec()));
        Ok(())
    })?;
    if args.json {
        let positions: Vec<u32> = rows.iter().map(|(p, _)| *p).collect();
        let logits: Vec<&[f32]> = rows.iter().map(|(_, l)| l.as_slice()).collect();
        let n_vocab = engine.hparams().n_vocab;
        emit(&format!(
            "{}\n",
            json!({"n_vocab": n_vocab, "positions": positions, "logits": logits})
        ))?;
    } else {
        let lines: String = rows.iter().map(|(p, logits)| top_line(*p, logits)).collect();
        emit(&lines)?;
    }
    note_logits_hash(&session);
    engine.close(session);
    write_trace(trace, &mut engine)
}

/// `position 3: 17=12.345 4=11.9 …`, the likeliest tokens first.
fn top_line(position: u32, logits: &[f32]) -> String {
    let mut ids: Vec<usize> = (0..logits.len()).collect();
    ids.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    let mut line = format!("position {position}:");
    for id in ids.into_iter().take(SHOWN) {
        let _ = write!(line, " {id}={:.4}", logits[id]);
    }
    line + "\n"
}

fn parse_ids(text: &str) -> Result<Vec<u32>> {
    let words = text.split(|c: char| c == ',' || c.is_whitespace()).filter(|w| !w.is_empty());
    let ids: Vec<u32> = words
        .map(|w| {
            w.parse().map_err(|_| Error::usage("--tokens", format!("`{w}` is not a token id")))
        })
        .collect::<Result<_>>()?;
    if ids.is_empty() {
        return Err(Error::usage("--tokens", "no token ids"));
    }
    Ok(ids)
}
