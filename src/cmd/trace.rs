//! `vkmoe trace`: a picture of a traced run, or a table of where its time went.

use super::emit;
use super::table::Table;
use crate::cli::TraceArgs;
use crate::error::{Error, Result};
use crate::trace::{Profile, Trace, is_svg};
use std::path::PathBuf;

pub(super) fn run(args: &TraceArgs) -> Result<()> {
    let picture = picture_path(args)?;
    let trace = Trace::read(&args.file)?;
    if let Some(path) = &picture {
        trace.write(path)?;
    }
    let summary = format!("{}\n", trace.summary());
    match args.table {
        true => emit(&format!("{}\n{summary}", table(&trace.profile()))),
        false => emit(&summary),
    }
}

/// Where to draw to; `None`: nowhere.
fn picture_path(args: &TraceArgs) -> Result<Option<PathBuf>> {
    if is_svg(&args.file) {
        let problem = "is a picture; the trace that it was drawn from (JSON) is needed";
        return Err(Error::usage(args.file.display().to_string(), problem));
    }
    match &args.output {
        Some(path) if !is_svg(path) => {
            Err(Error::usage("-o", format!("`{}` does not end in .svg", path.display())))
        }
        Some(path) => Ok(Some(path.clone())),
        None if args.table => Ok(None),
        None => Ok(Some(args.file.with_extension("svg"))),
    }
}

fn table(profile: &Profile) -> Table {
    let mut table = Table::new(&["track", "kind", ">count", ">total ms", ">share", ">GB/s"]);
    for row in &profile.rows {
        table.row([
            row.track.name().to_owned(),
            super::one_line(&row.kind),
            row.count.to_string(),
            format!("{:.3}", row.busy_ns as f64 / 1e6),
            format!("{:.1} %", 100.0 * profile.share(row)),
            row.gbps().map(|gbps| format!("{gbps:.1}")).unwrap_or_default(),
        ]);
    }
    table
}
