//! `vkmoe run`: one answer, or a chat on a terminal.

use super::terminal::{Lines, Printer};
use super::trace_file::TraceFile;
use super::{
    INTERRUPTED, catch_ctrl_c, emit, experts_line, note, note_logits_hash, open_engine, read_text,
    text_input, tokenizer, write_trace,
};
use crate::cli::{RunArgs, SamplingArgs};
use crate::engine::{Engine, Outputs, Session, Watch};
use crate::error::{Error, Result};
use crate::plan::Bytes;
use crate::progress;
use crate::sampler::{Sampler, SamplerParams};
use crate::stream::stats::StreamStats;
use crate::tokenizer::{ChatTemplate, Message, Special, Tokenizer};
use indicatif::ProgressBar;
use std::io::{self, IsTerminal};
use std::ops::ControlFlow;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

pub(super) fn run(args: RunArgs) -> Result<ExitCode> {
    let has_prompt = args.text.is_some() || args.prompt.is_some() || args.file.is_some();
    let terminal = io::stdin().is_terminal();
    let chat = args.chat || (!has_prompt && terminal && !args.raw);
    // A prompt is read before a large model is loaded.
    let prompt = match has_prompt || !chat {
        true => Some(prompt_text(&args)?),
        false => None,
    };
    let trace = TraceFile::create(args.engine.trace.as_deref())?;
    let mut talk = Talk::open(&args)?;
    let result = match chat {
        true => talk.chat(prompt).map(|()| End::Done),
        false => talk.answer_once(&prompt.unwrap_or_default()),
    };
    let end = result?;
    // Not after an error: figures and hash would be of a part.
    talk.close(trace)?;
    Ok(match end {
        End::Interrupted => ExitCode::from(INTERRUPTED),
        End::Done | End::ContextFull => ExitCode::SUCCESS,
    })
}

/// The prompt; one line break at the end of a file or pipe does not count.
fn prompt_text(args: &RunArgs) -> Result<String> {
    let given = args.text.as_deref().or(args.prompt.as_deref());
    let text = text_input(given, args.file.as_deref())?;
    let from_stream = given.is_none_or(|t| t == "-");
    let line_end = if text.ends_with("\r\n") { "\r\n" } else { "\n" };
    let text = if from_stream { text.strip_suffix(line_end).unwrap_or(&text) } else { &text };
    match (text.is_empty(), &args.file) {
        (false, _) => Ok(text.to_string()),
        (true, Some(path)) => Err(Error::usage(path.display().to_string(), "the prompt is empty")),
        (true, None) if from_stream => Err(Error::usage("standard input", "the prompt is empty")),
        (true, None) => Err(Error::usage("-p", "the prompt is empty")),
    }
}

/// A prompt that takes longer shows a bar.
const PATIENCE: Duration = Duration::from_secs(1);

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

/// Tokens, time and moved experts of one phase.
#[derive(Clone, Copy, Debug, Default)]
struct Phase {
    tokens: usize,
    time: Duration,
    stats: StreamStats,
}

impl Phase {
    fn add(&mut self, tokens: usize, since: Instant, stats: &StreamStats) {
        self.tokens += tokens;
        self.time += since.elapsed();
        self.stats.add(stats);
    }

    /// `, 12.3 tok/s`; nothing without a token.
    fn rate(&self) -> String {
        match self.tokens {
            0 => String::new(),
            n => format!(", {:.1} tok/s", n as f64 / self.time.as_secs_f64().max(1e-9)),
        }
    }
}

fn tokens(n: usize) -> String {
    if n == 1 { "1 token".into() } else { format!("{n} tokens") }
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
    /// The likeliest token is always taken: no seed matters.
    is_sure: bool,
    messages: Vec<Message>,
    stop: Vec<String>,
    special: Special,
    n_predict: Option<usize>,
    ignore_eos: bool,
    interrupted: Arc<AtomicBool>,
    prompt: Phase,
    decode: Phase,
    /// Tokens of all answers. The first of each is the prompt's work.
    n_answered: usize,
}

impl Talk {
    fn open(args: &RunArgs) -> Result<Self> {
        let (sampler, greedy) = sampler(&args.sampling)?;
        let n_predict = match args.n_predict {
            -1 => None,
            n => Some(
                usize::try_from(n)
                    .map_err(|_| Error::usage("-n", format!("{n} is below -1 (no limit)")))?,
            ),
        };
        let named = args.chat_template.as_deref().map(named_template).transpose()?;
        let engine = open_engine(&args.engine)?;
        let tokenizer = tokenizer(engine.gguf())?;
        let template = match (named, args.raw) {
            (_, true) => None,
            (Some(named), _) => Some(named),
            (None, _) => Some(tokenizer.chat_template()?),
        };
        let session = engine.session()?;
        let interrupted = catch_ctrl_c();
        Ok(Talk {
            engine,
            tokenizer,
            template,
            session,
            cached: Vec::new(),
            sampler,
            greedy: greedy && !args.engine.logits_hash,
            is_sure: args.sampling.temp <= 0.0,
            messages: args
                .system_prompt
                .iter()
                .map(|s| Message::new("system", s.as_str()))
                .collect(),
            stop: args.stop.clone(),
            special: if args.parse_special { Special::Parse } else { Special::Plain },
            n_predict,
            ignore_eos: args.ignore_eos,
            interrupted,
            prompt: Phase::default(),
            decode: Phase::default(),
            n_answered: 0,
        })
    }

    /// One prompt, one answer.
    fn answer_once(&mut self, prompt: &str) -> Result<End> {
        let tokens = self.encode(prompt)?;
        let generated = self.generate(&tokens);
        // An error begins on a line of its own.
        if generated.is_ok() || self.n_answered > 0 {
            emit("\n")?;
        }
        let (_, end) = generated?;
        self.report_end(end);
        Ok(end)
    }

    /// Messages and answers in turn until Ctrl-D.
    fn chat(&mut self, first: Option<String>) -> Result<()> {
        let name = &self.engine.hparams().name;
        note(&format!("{name}: Ctrl-C stops an answer, Ctrl-D leaves, /clear starts anew"));
        // From here on the terminal is the user's.
        self.engine.hide_progress();
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
            match line.trim() {
                "" => continue,
                "/clear" => self.clear(),
                _ => self.take_turn(&line)?,
            }
        }
    }

    /// One message and its answer. A message that does not fit, or whose answer was stopped before
    /// it began, is taken back: the conversation goes on from where it was.
    fn take_turn(&mut self, line: &str) -> Result<()> {
        let n_messages = self.messages.len();
        let tokens = self.encode(line)?;
        match self.generate(&tokens) {
            Ok((answer, end)) => {
                emit("\n")?;
                match answer.is_empty() && end == End::Interrupted {
                    true => self.messages.truncate(n_messages),
                    false => self.messages.push(Message::new("assistant", answer)),
                }
                self.report_end(end);
            }
            Err(e @ Error::ContextFull { .. }) => {
                self.messages.truncate(n_messages);
                note(&format!("[{e}; a shorter message may fit, /clear starts anew]"));
            }
            Err(e) => return Err(e),
        }
        Ok(())
    }

    /// Forgets the conversation, not the system prompt.
    fn clear(&mut self) {
        self.messages.retain(|message| message.role == "system");
        note("[the conversation is empty]");
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
            let enough = self.n_predict.is_some_and(|n| n_generated >= n);
            if enough || (!self.ignore_eos && self.tokenizer.is_end_of_generation(token)) {
                break End::Done;
            }
            if printer.print(&self.tokenizer.token_bytes(token), self.tokenizer.is_hidden(token))? {
                break End::Done;
            }
            n_generated += 1;
            self.n_answered += 1;
            if self.interrupted.load(Ordering::Relaxed) {
                break End::Interrupted;
            }
            if self.n_predict == Some(n_generated) {
                break End::Done;
            }
            if self.session.n_past() >= self.engine.n_ctx() {
                break End::ContextFull;
            }
            let since = Instant::now();
            self.sampler.accept(token);
            token = self.eval(&[token])?;
            self.decode.add(1, since, &self.engine.take_stats());
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
        let bar = progress::hidden_bar("prompt", 1);
        self.engine.set_watch(watch(bar.clone(), self.interrupted.clone()));
        let next = match self.eval(new) {
            Ok(next) => Some(next),
            Err(Error::Interrupted) => {
                let n_done = self.session.n_past() as usize - keep;
                self.cached.extend_from_slice(&new[..n_done]);
                None
            }
            Err(e) => return Err(e),
        };
        bar.finish_and_clear();
        self.prompt.add(self.cached.len() - keep, since, &self.engine.take_stats());
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
            End::Interrupted => note("[interrupted]"),
            End::ContextFull => {
                let n_ctx = self.engine.n_ctx();
                let larger = n_ctx.saturating_mul(2);
                note(&format!(
                    "[the context of {n_ctx} tokens is full; a larger one: -c {larger}]"
                ));
            }
        }
    }

    /// `prompt 12 tokens, 90.1 tok/s | answer 34 tokens, 45.6 tok/s | …`
    fn figures(&self) -> String {
        let plan = self.engine.plan();
        let mut line = format!(
            "prompt {}{} | answer {}{} | VRAM {}, host {}",
            tokens(self.prompt.tokens),
            self.prompt.rate(),
            tokens(self.n_answered),
            self.decode.rate(),
            Bytes(plan.device_bytes()),
            Bytes(plan.host_weight_bytes),
        );
        if !self.is_sure {
            line += &format!(" | seed {}", self.sampler.seed());
        }
        line
    }

    /// What experts on the host came to, phase by phase: a prompt may stream while an answer does not.
    fn expert_figures(&self) -> Option<String> {
        let mut lines = experts_line(&self.engine)?;
        for (name, phase) in [("prompt", &self.prompt), ("answer", &self.decode)] {
            if phase.stats.moved() {
                lines += &format!("\n  {name}: {}", phase.stats);
            }
        }
        Some(lines)
    }

    /// Prints the closing figures, frees the session, and writes the trace.
    fn close(mut self, trace: Option<TraceFile>) -> Result<()> {
        if self.prompt.tokens > 0 || self.prompt.stats.moved() {
            note(&format!("\n{}", self.figures()));
            if let Some(lines) = self.expert_figures() {
                note(&lines);
            }
            note_logits_hash(&self.session);
        }
        self.engine.close(self.session);
        write_trace(trace, &mut self.engine)
    }
}

/// Moves the bar of a prompt, over its tokens times layers, shows it if the prompt takes long, and hears
/// Ctrl-C.
fn watch(bar: ProgressBar, interrupted: Arc<AtomicBool>) -> Box<Watch> {
    let since = Instant::now();
    Box::new(move |progress| {
        bar.set_length(progress.total);
        bar.set_position(progress.done);
        if since.elapsed() > PATIENCE {
            progress::show(&bar);
        }
        match interrupted.load(Ordering::Relaxed) {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    })
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
    let path = Path::new(name);
    if path.is_file() {
        return ChatTemplate::parse(&read_text(path)?).map_err(|e| match e {
            Error::Template { line, problem } => {
                Error::usage(format!("{name}, line {line}"), problem)
            }
            e => e,
        });
    }
    let is_path = path.components().count() > 1 || path.extension().is_some();
    match ChatTemplate::from_flag(name) {
        // Whoever writes `./chat.jinja` means a file.
        Err(Error::Usage { .. }) if is_path => Err(Error::File {
            path: path.to_path_buf(),
            action: "open",
            source: std::fs::File::open(path).err().unwrap_or(io::ErrorKind::InvalidInput.into()),
        }),
        result => result,
    }
}
