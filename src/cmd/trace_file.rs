//! The file of `--trace`: a path that cannot be written is told before a model is loaded.

use super::note;
use crate::error::{Error, Result};
use crate::trace::Trace;
use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};

/// Where a trace will go.
pub(super) struct TraceFile {
    path: PathBuf,
    /// It was not there before, and nothing is in it yet.
    is_new: bool,
}

impl TraceFile {
    /// Opens the file for writing; what it holds stays until there is something better.
    pub(super) fn create(path: Option<&Path>) -> Result<Option<TraceFile>> {
        let Some(path) = path else { return Ok(None) };
        let is_new = !path.exists();
        let opened = OpenOptions::new().write(true).create(true).truncate(false).open(path);
        match opened {
            Ok(_) => Ok(Some(TraceFile { path: path.to_path_buf(), is_new })),
            Err(source) => Err(Error::File { path: path.to_path_buf(), action: "create", source }),
        }
    }

    /// Writes the trace and says what it shows.
    pub(super) fn write(mut self, trace: &Trace) -> Result<()> {
        self.is_new = false;
        trace.write(&self.path)?;
        note(&format!("trace: {}: {}", self.path.display(), trace.summary()));
        Ok(())
    }
}

impl Drop for TraceFile {
    fn drop(&mut self) {
        if self.is_new {
            // An empty file helps nobody; that it may not be there either is fine.
            let _ = fs::remove_file(&self.path);
        }
    }
}
