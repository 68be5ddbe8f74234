//! `vkmoe run`: one answer, or a chat on a terminal.

use super::{emit, open_engine, read_text, text_input, tokenizer};
use crate::cli::{RunArgs, SamplingArgs};
use crate::engine::{Engine, Outputs, Session};
use crate::error::{Error, Result};
use crate::plan::Bytes;
use crate::progress;
use crate::sampler::{Sampler, SamplerParams};
use crate::tokenizer::{ChatTemplate, Message, Special, StopStrings, Tokenizer, Utf8Stream};
use rustyline::error::ReadlineError;
use std::io::{self, IsTerminal};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

pub(super) fn run(args: RunArgs) -> Result<()> {
    let has_prompt = args.text.is_some() || args.prompt.is_some() || args.file.is_some();
    let terminal = io::stdin().is_terminal();
    let chat = args.chat || (!has_prompt && terminal && !args.raw);
    if chat && !terminal {
        return Err(Error::usage("--chat", "needs a terminal on standard input"));
    }
    // A prompt is read before a large model is loaded.
    let prompt = match has_prompt || !chat {
        true => Some(prompt_text(&args)?),
        false => None,
    };
    let mut talk = Talk::open(&args)?;
    let result = match chat {
        true => talk.chat(prompt),
        false => talk.answer_once(&prompt.unwrap_or_default()),
    };
    talk.close(args.engine.logits_hash);
    result
}

/// The prompt; one line break at the end of a file or pipe does not count.
fn prompt_text(args: &RunArgs) -> Result<String> {
    let given = args.text.as_deref().or(args.prompt.as_deref());
    let text = text_input(given, args.file.as_deref())?;
    if text.is_empty() {
        return Err(Error::usage("-p", "the prompt is empty"));
    }
    let from_stream = given.is_none_or(|t| t == "-");
    let text = if from_stream { text.strip_suffix('\n').unwrap_or(&text) } else { &text };
    Ok(text.to_string())
}

/// How an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// The model said so, a stop text came, or enough tokens were generated.
    Done,
    /// Ctrl-C.
    Interrupted,
    /// No cells left.
    ContextFull,
}

/// Tokens and time of one phase.
#[derive(Clone, Copy, Debug, Default)]
struct Phase {
    tokens: usize,
    time: Duration,
}

impl Phase {
    fn add(&mut self, tokens: usize, since: Instant) {
        self.tokens += tokens;
        self.time += since.elapsed();
    }

    fn rate(&self) -> f64 {
        self.tokens as f64 / self.time.as_secs_f64().max(1e-9)
    }
}

/// A model, a session, and how to sample from it.
struct Talk {
    engine: Engine,
    tokenizer: Tokenizer,
    /// `None`: text is continued as it is.
    template: Option<ChatTemplate>,
    session: Session,
    /// Tokens in the session's cache.
    cached: Vec<u32>,
    sampler: Sampler,
    /// The likeliest token can be chosen on the device.
    greedy: bool,
    messages: Vec<Message>,
    stop: Vec<String>,
    special: Special,
    n_predict: Option<usize>,
    n_batch: usize,
    interrupted: Arc<AtomicBool>,
    prompt: Phase,
    decode: Phase,
}

impl Talk {
    fn open(args: &RunArgs) -> Result<Self> {
        let (sampler, greedy) = sampler(&args.sampling)?;
        let n_predict = match args.n_predict {
            -1 => None,
            n => Some(usize::try_from(n).map_err(|_| Error::usage("-n", format!("is {n}")))?),
        };
        let engine = open_engine(&args.engine)?;
        let tokenizer = tokenizer(engine.gguf())?;
        let template = match (&args.chat_template, args.raw) {
            (_, true) => None,
            (Some(name), _) => Some(named_template(name)?),
            (None, _) => Some(tokenizer.chat_template()?),
        };
        let session = engine.session()?;
        let interrupted = Arc::new(AtomicBool::new(false));
        let flag = interrupted.clone();
        if let Err(e) = ctrlc::set_handler(move || flag.store(true, Ordering::Relaxed)) {
            log::warn!("Ctrl-C ends the program: {e}");
        }
        Ok(Talk {
            engine,
            tokenizer,
            template,
            session,
            cached: Vec::new(),
            sampler,
            greedy: greedy && !args.engine.logits_hash,
            messages: args
                .system_prompt
                .iter()
                .map(|s| Message::new("system", s.as_str()))
                .collect(),
            stop: args.stop.clone(),
            special: if args.parse_special { Special::Parse } else { Special::Plain },
            n_predict,
            n_batch: args.engine.batch_size as usize,
            interrupted,
            prompt: Phase::default(),
            decode: Phase::default(),
        })
    }

    /// One prompt, one answer.
    fn answer_once(&mut self, prompt: &str) -> Result<()> {
        let tokens = self.encode(prompt)?;
        let (_, end) = self.generate(&tokens)?;
        emit("\n")?;
        self.report_end(end);
        Ok(())
    }

    /// Messages and answers in turn until Ctrl-D.
    fn chat(&mut self, first: Option<String>) -> Result<()> {
        eprintln!("{}: Ctrl-C stops an answer, Ctrl-D leaves", self.engine.hparams().name);
        let mut lines = Lines::open()?;
        let mut next = first;
        loop {
            let line = match next.take() {
                Some(line) => line,
                None => match lines.read()? {
                    Some(line) => line,
                    None => return Ok(()),
                },
            };
            if line.trim().is_empty() {
                continue;
            }
            let tokens = self.encode(&line)?;
            let (answer, end) = match self.generate(&tokens) {
                Err(e @ Error::ContextFull { .. }) => {
                    eprintln!("{e}");
                    return Ok(());
                }
                result => result?,
            };
            emit("\n")?;
            self.messages.push(Message::new("assistant", answer));
            self.report_end(end);
            if end == End::ContextFull {
                return Ok(());
            }
        }
    }

    /// Adds a message of the user; the ids of the whole conversation.
    fn encode(&mut self, text: &str) -> Result<Vec<u32>> {
        let Some(template) = &self.template else {
            let bos = self.tokenizer.bos().filter(|_| self.tokenizer.add_bos());
            let ids = self.tokenizer.encode(text, self.special)?;
            return Ok(bos.into_iter().chain(ids).collect());
        };
        if self.special == Special::Parse {
            self.messages.push(Message::new("user", text));
            let rendered = template.render(&self.messages, &self.tokenizer.template_args(true))?;
            return self.tokenizer.encode(&rendered, Special::Parse);
        }
        self.messages.push(Message::new("user", text));
        self.tokenizer.encode_chat(template, &self.messages, &self.tokenizer.template_args(true))
    }

    /// Evaluates what is new in `tokens` and generates an answer, which is printed as it comes.
    fn generate(&mut self, tokens: &[u32]) -> Result<(String, End)> {
        self.interrupted.store(false, Ordering::Relaxed);
        let Some(mut token) = self.prefill(tokens)? else {
            return Ok((String::new(), End::Interrupted));
        };
        let mut printer = Printer::new(&self.stop);
        let mut n_generated = 0;
        let end = loop {
            if self.n_predict.is_some_and(|n| n_generated >= n)
                || self.tokenizer.is_end_of_generation(token)
            {
                break End::Done;
            }
            if printer.print(&self.tokenizer.token_bytes(token), self.tokenizer.is_hidden(token))? {
                break End::Done;
            }
            n_generated += 1;
            if self.interrupted.load(Ordering::Relaxed) {
                break End::Interrupted;
            }
            if self.session.n_past() >= self.engine.n_ctx() {
                break End::ContextFull;
            }
            let since = Instant::now();
            self.sampler.accept(token);
            token = self.eval(&[token])?;
            self.decode.add(1, since);
        };
        printer.finish()?;
        Ok((printer.text, end))
    }

    /// Evaluates the tokens that are not in the cache yet; the next token, unless interrupted.
    fn prefill(&mut self, tokens: &[u32]) -> Result<Option<u32>> {
        let same = self.cached.iter().zip(tokens).take_while(|(a, b)| a == b).count();
        // The last token is evaluated always: its logits are needed.
        let keep = same.min(tokens.len().saturating_sub(1));
        self.session.truncate(keep as u32);
        self.cached.truncate(keep);
        let new = &tokens[keep..];
        if new.is_empty() {
            return Err(Error::usage("-p", "the prompt has no tokens"));
        }
        self.engine.check_room(&self.session, new.len())?;
        for &id in new {
            self.sampler.accept(id);
        }
        let since = Instant::now();
        let bar = progress::hidden_bar("prompt", new.len() as u64);
        let mut next = None;
        for batch in new.chunks(self.n_batch) {
            if self.interrupted.load(Ordering::Relaxed) {
                bar.finish_and_clear();
                return Ok(None);
            }
            if since.elapsed() > Duration::from_secs(1) {
                progress::show(&bar);
            }
            next = Some(self.eval(batch)?);
            bar.inc(batch.len() as u64);
        }
        bar.finish_and_clear();
        self.prompt.add(new.len(), since);
        Ok(next)
    }

    /// Appends tokens and chooses the next.
    fn eval(&mut self, tokens: &[u32]) -> Result<u32> {
        let next = if self.greedy {
            self.engine.eval_greedy(&mut self.session, tokens)?
        } else {
            let mut next = 0;
            let sampler = &mut self.sampler;
            self.engine.eval(&mut self.session, tokens, Outputs::Last, |_, logits| {
                next = sampler.sample(logits)?;
                Ok(())
            })?;
            next
        };
        self.cached.extend_from_slice(tokens);
        Ok(next)
    }

    fn report_end(&self, end: End) {
        match end {
            End::Done => {}
            End::Interrupted => eprintln!("[interrupted]"),
            End::ContextFull => {
                let n_ctx = self.engine.n_ctx();
                eprintln!(
                    "[the context of {n_ctx} tokens is full; a larger one: -c {}]",
                    2 * n_ctx
                );
            }
        }
    }

    /// Prints the closing figures and frees the session.
    fn close(mut self, logits_hash: bool) {
        let plan = self.engine.plan();
        eprintln!(
            "\nprompt {} tokens, {:.1} tok/s | answer {} tokens, {:.1} tok/s | VRAM {}, host {}",
            self.prompt.tokens,
            self.prompt.rate(),
            self.decode.tokens,
            self.decode.rate(),
            Bytes(plan.device_bytes()),
            Bytes(plan.host_weight_bytes),
        );
        if logits_hash {
            eprintln!("logits hash: {}", self.session.logits_hash());
        }
        self.engine.close(self.session);
    }
}

/// The sampler, and whether it always takes the likeliest token.
fn sampler(args: &SamplingArgs) -> Result<(Sampler, bool)> {
    let params = SamplerParams {
        temperature: args.temp,
        top_k: i32::try_from(args.top_k).unwrap_or(0),
        top_p: args.top_p,
        min_p: args.min_p,
        repeat_penalty: args.repeat_penalty,
        repeat_last_n: args.repeat_last_n,
        presence_penalty: args.presence_penalty,
        frequency_penalty: args.frequency_penalty,
        seed: args.seed,
    };
    let penalties =
        args.repeat_penalty != 1.0 || args.presence_penalty != 0.0 || args.frequency_penalty != 0.0;
    Ok((Sampler::new(params)?, args.temp <= 0.0 && !penalties))
}

/// A built-in template, or a file with one.
fn named_template(name: &str) -> Result<ChatTemplate> {
    if Path::new(name).is_file() {
        return ChatTemplate::parse(&read_text(Path::new(name))?);
    }
    ChatTemplate::from_flag(name)
}

/// Prints an answer piece by piece: whole characters, and nothing of a stop text.
struct Printer {
    utf8: Utf8Stream,
    stop: StopStrings,
    text: String,
}

impl Printer {
    fn new(stop: &[String]) -> Self {
        let stop = StopStrings::new(stop.iter().cloned());
        Printer { utf8: Utf8Stream::new(), stop, text: String::new() }
    }

    /// Prints one token's bytes; true if a stop text is complete.
    fn print(&mut self, bytes: &[u8], hidden: bool) -> Result<bool> {
        if hidden {
            return Ok(false);
        }
        let piece = self.utf8.push(bytes);
        let (piece, stopped) = self.stop.push(&piece);
        self.emit(&piece)?;
        Ok(stopped)
    }

    /// Prints what was held back.
    fn finish(&mut self) -> Result<()> {
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
struct Lines {
    editor: rustyline::DefaultEditor,
    history: Option<std::path::PathBuf>,
}

impl Lines {
    fn open() -> Result<Self> {
        let editor = rustyline::DefaultEditor::new().map_err(terminal_error)?;
        let history = dirs::cache_dir().map(|d| d.join("vkmoe/history.txt"));
        let mut lines = Lines { editor, history };
        if let Some(path) = &lines.history {
            // Absent at the first start.
            let _ = lines.editor.load_history(path);
        }
        Ok(lines)
    }

    /// The next line; `None` at Ctrl-D. Ctrl-C discards what was typed.
    fn read(&mut self) -> Result<Option<String>> {
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
        let added = self.editor.add_history_entry(line).is_ok();
        if let (true, Some(path)) = (added, &self.history) {
            if let Err(e) = self.editor.save_history(path) {
                log::warn!("{}: cannot save the history: {e}", path.display());
            }
        }
    }
}

fn terminal_error(e: ReadlineError) -> Error {
    super::stream_error("terminal", "read", io::Error::other(e))
}
