//! Both ends of a chat: lines that the user types, and an answer that appears as it is generated.

use super::emit;
use crate::error::{Error, Result};
use crate::tokenizer::{StopStrings, Utf8Stream};
use rustyline::config::Behavior;
use rustyline::error::ReadlineError;
use std::io::{self, IsTerminal};
use std::path::PathBuf;

/// Prints an answer piece by piece: whole characters, and nothing of a stop text.
pub(super) struct Printer {
    utf8: Utf8Stream,
    stop: StopStrings,
    /// What was printed so far.
    pub(super) text: String,
}

impl Printer {
    pub(super) fn new(stop: &[String]) -> Self {
        let stop = StopStrings::new(stop.iter().cloned());
        Printer { utf8: Utf8Stream::new(), stop, text: String::new() }
    }

    /// Prints one token's bytes; true if a stop text is complete.
    pub(super) fn print(&mut self, bytes: &[u8], hidden: bool) -> Result<bool> {
        if hidden {
            return Ok(false);
        }
        let piece = self.utf8.push(bytes);
        let (piece, stopped) = self.stop.push(&piece);
        self.emit(&piece)?;
        Ok(stopped)
    }

    /// Prints what was held back.
    pub(super) fn finish(&mut self) -> Result<()> {
        let rest = self.utf8.finish();
        let (piece, stopped) = self.stop.push(&rest);
        self.emit(&piece)?;
        if !stopped {
            let held = self.stop.finish();
            self.emit(&held)?;
        }
        Ok(())
    }

    fn emit(&mut self, piece: &str) -> Result<()> {
        self.text += piece;
        emit(piece)
    }
}

/// Lines of the user, with editing and history.
pub(super) struct Lines {
    editor: rustyline::DefaultEditor,
    history: Option<PathBuf>,
}

impl Lines {
    pub(super) fn open() -> Result<Self> {
        // With an answer that goes into a pipe, the prompt `> ` must not follow it there.
        let apart = io::stdin().is_terminal() && !io::stdout().is_terminal();
        let behavior = if apart { Behavior::PreferTerm } else { Behavior::Stdio };
        let config = rustyline::Config::builder().behavior(behavior).build();
        let editor = rustyline::DefaultEditor::with_config(config).map_err(terminal_error)?;
        let history = history_file().filter(|_| io::stdin().is_terminal());
        let mut lines = Lines { editor, history };
        if let Some(path) = &lines.history {
            // Absent at the first start.
            let _ = lines.editor.load_history(path);
        }
        Ok(lines)
    }

    /// The next line; `None` at Ctrl-D. Ctrl-C discards what was typed.
    pub(super) fn read(&mut self) -> Result<Option<String>> {
        loop {
            match self.editor.readline("> ") {
                Ok(line) => {
                    self.remember(&line);
                    return Ok(Some(line));
                }
                Err(ReadlineError::Interrupted) => {}
                Err(ReadlineError::Eof) => return Ok(None),
                Err(e) => return Err(terminal_error(e)),
            }
        }
    }

    fn remember(&mut self, line: &str) {
        let added = self.editor.add_history_entry(line).unwrap_or(false);
        if let (true, Some(path)) = (added, &self.history)
            && let Err(e) = self.editor.append_history(path)
        {
            log::warn!("{}: cannot save the history: {e}", path.display());
            self.history = None;
        }
    }
}

/// Where the history is kept; nowhere if there is no such directory and none can be made.
fn history_file() -> Option<PathBuf> {
    let dir = dirs::cache_dir()?.join("vkmoe");
    std::fs::create_dir_all(&dir).ok()?;
    Some(dir.join("history.txt"))
}

fn terminal_error(e: ReadlineError) -> Error {
    super::stream_error("terminal", "read", io::Error::other(e))
}
