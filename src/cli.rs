//! The command line: clap definitions only. Names are llama.cpp's; its short names of several
//! letters (`-ub`, `-ctk`), which clap does not know, are spelled out first by [`expand`].

pub mod bench;

use crate::plan::{GpuLayers, Overrides};
use crate::stream::options::{CacheSize, MAX_SLOTS, MIN_SLOTS};
use crate::synth::mix::Mix;
use crate::synth::presets::PRESETS;
use clap::builder::PossibleValuesParser;
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::ffi::OsString;
use std::path::PathBuf;

/// llama.cpp's short names of more than one letter, and the long names they stand for.
const SHORT_NAMES: &[(&str, &str)] = &[
    ("-ub", "--ubatch-size"),
    ("-ctk", "--cache-type-k"),
    ("-ctv", "--cache-type-v"),
    ("-dev", "--device"),
    ("-sys", "--system-prompt"),
    ("-no-cnv", "--raw"),
    ("-cnv", "--chat"),
    ("-ngl", "--n-gpu-layers"),
    ("-cmoe", "--cpu-moe"),
    ("-ncmoe", "--n-cpu-moe"),
    ("-ot", "--override-tensor"),
    ("-fitt", "--fit-target"),
    ("-pg", "--prompt-gen"),
];

const PLACEMENT: &str = "Placement";
const STREAMING: &str = "Streaming";

/// Replaces short names of several letters by the long ones. Stops at `--`.
pub fn expand(args: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut literal = false;
    let spell_out = |arg: OsString| {
        literal |= arg == "--";
        let long = SHORT_NAMES.iter().find(|(short, _)| arg == *short && !literal);
        long.map_or(arg, |(_, long)| OsString::from(long))
    };
    args.into_iter().map(spell_out).collect()
}

/// Runs Mixture-of-Experts language models (GGUF) on any Vulkan 1.3 GPU.
#[derive(Parser, Debug)]
#[command(version, about, max_term_width = 100, arg_required_else_help = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Answer a prompt, or chat on a terminal
    Run(RunArgs),
    /// Print the logits of given token ids, for comparing engines
    Logits(LogitsArgs),
    /// Measure how well a model predicts a text
    Perplexity(PerplexityArgs),
    /// Print the token ids of a text
    Tokenize(TokenizeArgs),
    /// Print a model's metadata and tensors
    Inspect(InspectArgs),
    /// Show what would live where, without loading
    Plan(PlanArgs),
    /// List Vulkan devices, their limits, and what the engine would use
    Devices(DevicesArgs),
    /// Draw a trace of a run, or list where its time went
    Trace(TraceArgs),
    /// Measure the speed of models, as llama-bench does
    Bench(bench::BenchArgs),
    /// Write a model with a real one's shape and random weights, to measure speed with
    Synth(SynthArgs),
}

/// Which model, on which device, with how much context.
#[derive(Args, Clone, Debug)]
pub struct EngineArgs {
    /// GGUF file; any part of a split model. Without it: the built-in demo model
    #[arg(short, long, value_name = "FILE")]
    pub model: Option<PathBuf>,
    /// Device: a number or part of a name as `vkmoe devices` shows it [short: -dev]
    #[arg(long, value_name = "N|NAME")]
    pub device: Option<String>,
    /// Context in tokens; 0: what the model was trained for
    #[arg(short, long, default_value_t = 0, value_name = "N")]
    pub ctx_size: u32,
    /// Tokens that go through the model layer by layer, so that experts in host memory are moved once for
    /// all of them; unset: as many as memory allows, unless the plan predicts that fewer are faster
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub batch_size: Option<u32>,
    /// Tokens that one kernel launch handles, at most the batch [short: -ub]
    #[arg(long, default_value_t = 512, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub ubatch_size: u32,
    /// Type of the cached keys [short: -ctk]
    #[arg(long, value_enum, default_value_t = KvTypeArg::F16)]
    pub cache_type_k: KvTypeArg,
    /// Type of the cached values [short: -ctv]
    #[arg(long, value_enum, default_value_t = KvTypeArg::F16)]
    pub cache_type_v: KvTypeArg,
    /// Layers, from the last, whose experts lie in device memory: a number, `auto` (as many as fit) or
    /// `all`; the output layer counts as one [short: -ngl]
    #[arg(long, visible_alias = "gpu-layers", default_value = "auto", value_name = "N|auto|all", value_parser = gpu_layers, allow_negative_numbers = true, help_heading = PLACEMENT)]
    pub n_gpu_layers: GpuLayers,
    /// Keep the experts of all layers in host memory [short: -cmoe]
    #[arg(long, help_heading = PLACEMENT)]
    pub cpu_moe: bool,
    /// Keep the experts of the first N layers in host memory; of more if the rest does not fit and -ngl
    /// does not hold it [short: -ncmoe]
    #[arg(long, value_name = "N", help_heading = PLACEMENT)]
    pub n_cpu_moe: Option<u32>,
    /// Where tensors go whose names match; the first rule that matches decides; may be given several
    /// times [short: -ot]
    #[arg(long, value_name = "REGEX=HOST|VRAM,…", help_heading = PLACEMENT)]
    pub override_tensor: Vec<Overrides>,
    /// Leave so much device memory free; unset: 1024, or a twentieth of it if that is less [short: -fitt]
    #[arg(long, value_name = "MiB", help_heading = PLACEMENT)]
    pub fit_target: Option<u64>,
    /// Plan as if the device had only this much memory free
    #[arg(long, value_name = "MiB", value_parser = clap::value_parser!(u64).range(1..), help_heading = PLACEMENT)]
    pub vram_limit: Option<u64>,
    /// Where experts in host memory are read from; unset or `auto`: the best that a probe finds
    #[arg(long, value_enum, value_name = "SOURCE", help_heading = STREAMING)]
    pub host_source: Option<HostSourceArg>,
    /// Staging slots for experts that are copied ahead of need: 0 (off), 2 to 8; unset: the engine
    /// chooses [env: GGML_SCHED_PREFETCH_EXPERTS, where 1 means 3]
    #[arg(long, value_name = "N", value_parser = slots, help_heading = STREAMING)]
    pub prefetch_experts_slots: Option<u32>,
    /// Device memory for experts in host memory that are used often: so many MiB at most, `auto` (what is left on
    /// a card with memory of its own) or 0 (off)
    #[arg(long, default_value = "auto", value_name = "MiB|auto", value_parser = expert_cache, help_heading = STREAMING)]
    pub expert_cache: CacheSize,
    /// Pin no more host memory than this
    #[arg(long, value_name = "MiB", help_heading = STREAMING)]
    pub pin_max_mib: Option<u64>,
    /// Queue that copies experts: one that only copies, a second that computes, or the kernels' own
    #[arg(long, value_enum, default_value_t = CopyQueueArg::Auto, value_name = "QUEUE", help_heading = STREAMING)]
    pub copy_queue: CopyQueueArg,
    /// Write what ran when: for Perfetto (.json) or as a picture (.svg). Every kernel is timed, which
    /// takes some time itself
    #[arg(long, value_name = "FILE.json|FILE.svg", value_parser = trace_path, help_heading = STREAMING)]
    pub trace: Option<PathBuf>,
    /// Print a hash of all logits computed, to compare runs bit by bit
    #[arg(long)]
    pub logits_hash: bool,
}

/// Types of the KV cache.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
#[value(rename_all = "snake_case")]
#[allow(missing_docs, reason = "named by the type")]
pub enum KvTypeArg {
    F32,
    F16,
    #[value(name = "q8_0")]
    Q8_0,
    #[value(name = "q4_0")]
    Q4_0,
}

/// Rungs of the ladder of host sources.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostSourceArg {
    /// The best that a probe finds
    Auto,
    /// The file's pages, pinned where they are
    Mmap,
    /// A pinned copy in huge pages
    Arena,
    /// A copy in memory that the driver allocates
    Host,
    /// The page cache, through a small pinned ring
    Ring,
}

/// Where copies run.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyQueueArg {
    /// The best that is known for the device
    Auto,
    /// A queue that only copies
    Transfer,
    /// A second queue that computes
    Compute,
    /// The kernels' own queue
    Same,
}

/// How the next token is chosen.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// Temperature; 0: always the likeliest token
    #[arg(long, alias = "temperature", default_value_t = 0.8, value_name = "T", value_parser = non_negative)]
    pub temp: f32,
    /// Keep the K likeliest tokens; 0: all
    #[arg(long, default_value_t = 40, value_name = "K")]
    pub top_k: u32,
    /// Keep the likeliest tokens that together have this probability; 1: all
    #[arg(long, default_value_t = 0.95, value_name = "P", value_parser = probability)]
    pub top_p: f32,
    /// Keep tokens at least this likely relative to the likeliest; 0: all
    #[arg(long, default_value_t = 0.05, value_name = "P", value_parser = probability)]
    pub min_p: f32,
    /// Make recent tokens less likely by this factor; 1: off
    #[arg(long, default_value_t = 1.0, value_name = "X", value_parser = non_negative)]
    pub repeat_penalty: f32,
    /// How many recent tokens the penalties look at; -1: the whole context
    #[arg(long, default_value_t = 64, value_name = "N", allow_negative_numbers = true)]
    pub repeat_last_n: i32,
    /// Subtracted from the logits of tokens that occurred; 0: off
    #[arg(long, default_value_t = 0.0, value_name = "X", allow_negative_numbers = true)]
    pub presence_penalty: f32,
    /// Subtracted per occurrence; 0: off
    #[arg(long, default_value_t = 0.0, value_name = "X", allow_negative_numbers = true)]
    pub frequency_penalty: f32,
    /// Seed of the random choice; -1 or nothing: every run differs
    #[arg(short, long, value_name = "N", value_parser = seed, allow_negative_numbers = true)]
    pub seed: Option<u64>,
}

/// `vkmoe run`
#[derive(Args, Debug)]
pub struct RunArgs {
    #[command(flatten)]
    #[allow(missing_docs, reason = "see the type")]
    pub engine: EngineArgs,
    /// The prompt; `-` or nothing on a pipe: read from standard input
    #[arg(value_name = "PROMPT", conflicts_with_all = ["prompt", "file"])]
    pub text: Option<String>,
    /// The prompt
    #[arg(short, long, value_name = "TEXT", conflicts_with = "file")]
    pub prompt: Option<String>,
    /// File with the prompt; `-`: standard input
    #[arg(short, long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Tokens to generate at most; -1: until the model ends or the context is full
    #[arg(short, long, alias = "predict", default_value_t = -1, value_name = "N", allow_negative_numbers = true)]
    pub n_predict: i64,
    /// Continue the text as it is, without the chat template [short: -no-cnv]
    #[arg(long, conflicts_with_all = ["system_prompt", "chat_template", "chat"])]
    pub raw: bool,
    /// Chat even though a prompt is given: it becomes the first message [short: -cnv]
    #[arg(long)]
    pub chat: bool,
    /// Instructions before the first message [short: -sys]
    #[arg(long, value_name = "TEXT")]
    pub system_prompt: Option<String>,
    /// Another chat template: the name of a built-in one, or a Jinja file
    #[arg(long, value_name = "NAME|FILE")]
    pub chat_template: Option<String>,
    /// Go on where the model would end its answer
    #[arg(long)]
    pub ignore_eos: bool,
    /// Treat special tokens in the prompt as such, instead of as text
    #[arg(long)]
    pub parse_special: bool,
    /// End the answer before this text; may be given several times
    #[arg(
        long,
        short = 'r',
        alias = "reverse-prompt",
        value_name = "TEXT",
        allow_hyphen_values = true
    )]
    pub stop: Vec<String>,
    #[command(flatten)]
    #[allow(missing_docs, reason = "see the type")]
    pub sampling: SamplingArgs,
}

/// `vkmoe logits`
#[derive(Args, Debug)]
pub struct LogitsArgs {
    #[command(flatten)]
    #[allow(missing_docs, reason = "see the type")]
    pub engine: EngineArgs,
    /// Token ids, separated by spaces or commas
    #[arg(long, value_name = "IDS")]
    pub tokens: String,
    /// Logits after every token, not only after the last
    #[arg(long)]
    pub all_positions: bool,
    /// As JSON: {"n_vocab", "positions", "logits"}
    #[arg(long)]
    pub json: bool,
}

/// `vkmoe perplexity`
#[derive(Args, Debug)]
pub struct PerplexityArgs {
    #[command(flatten)]
    #[allow(missing_docs, reason = "see the type")]
    pub engine: EngineArgs,
    /// Text to predict
    #[arg(short, long, value_name = "FILE")]
    pub file: PathBuf,
    /// Chunks of the context's size to use at most
    #[arg(long, value_name = "N")]
    pub chunks: Option<usize>,
}

/// `vkmoe tokenize`
#[derive(Args, Debug)]
pub struct TokenizeArgs {
    /// GGUF file; without it: the built-in demo model
    #[arg(short, long, value_name = "FILE")]
    pub model: Option<PathBuf>,
    /// The text; without it: standard input
    #[arg(value_name = "TEXT", conflicts_with_all = ["prompt", "file"])]
    pub text: Option<String>,
    /// The text
    #[arg(short, long, value_name = "TEXT", conflicts_with = "file")]
    pub prompt: Option<String>,
    /// File with the text; `-`: standard input
    #[arg(short, long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Print only the ids, as one line
    #[arg(long)]
    pub ids: bool,
    /// Treat special tokens in the text as such
    #[arg(long)]
    pub parse_special: bool,
    /// Leave out the token that the model wants at the beginning
    #[arg(long)]
    pub no_bos: bool,
}

/// `vkmoe inspect`
#[derive(Args, Debug)]
pub struct InspectArgs {
    /// GGUF file; without it: the built-in demo model
    #[arg(value_name = "MODEL")]
    pub model: Option<PathBuf>,
    /// Print long values whole
    #[arg(long)]
    pub full: bool,
}

/// `vkmoe plan`
#[derive(Args, Debug)]
pub struct PlanArgs {
    #[command(flatten)]
    #[allow(missing_docs, reason = "see the type")]
    pub engine: EngineArgs,
    /// As JSON, every size in bytes
    #[arg(long)]
    pub json: bool,
}

/// `vkmoe devices`
#[derive(Args, Debug)]
pub struct DevicesArgs {
    /// Device that would be used: a number or part of a name [short: -dev]
    #[arg(long, value_name = "N|NAME")]
    pub device: Option<String>,
    /// Try on the device used which host sources it reads, and how fast; else what is known of earlier
    /// runs is shown
    #[arg(long)]
    pub probe: bool,
    /// GGUF file whose pages are tried: file systems differ. Without it: the built-in demo model, which
    /// is too small to measure its pages
    #[arg(short, long, value_name = "FILE")]
    pub model: Option<PathBuf>,
}

/// `vkmoe trace`
#[derive(Args, Debug)]
pub struct TraceArgs {
    /// Trace in JSON, as a run with --trace wrote it
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Picture to write [default: FILE with the ending .svg]
    #[arg(short, long, value_name = "OUT.svg")]
    pub output: Option<PathBuf>,
    /// Print time and speed by kind of work; draws only if -o is given
    #[arg(long)]
    pub table: bool,
}

/// `-ngl`; -1 is `auto`, as in llama.cpp.
fn gpu_layers(text: &str) -> Result<GpuLayers, String> {
    match text {
        "auto" | "-1" => Ok(GpuLayers::Auto),
        "all" => Ok(GpuLayers::All),
        _ => match text.parse() {
            Ok(n) => Ok(GpuLayers::Last(n)),
            Err(_) => Err("a number of layers, `auto` or `all` is needed".into()),
        },
    }
}

/// `--expert-cache`
fn expert_cache(text: &str) -> Result<CacheSize, String> {
    match (text, text.parse::<u64>()) {
        ("auto", _) => Ok(CacheSize::Auto),
        (_, Ok(mib)) => Ok(CacheSize::Fixed(mib.saturating_mul(1 << 20))),
        _ => Err("a number of MiB, 0 (off) or `auto` is needed".into()),
    }
}

/// A number of staging slots, with the reason if it cannot be.
pub(crate) fn slots(text: &str) -> Result<u32, String> {
    match text.parse::<u32>() {
        Ok(1) => Err("with one slot no copy could run beside the kernel that reads the slot; \
                      0 is off, 2 the least"
            .into()),
        Ok(n) if n == 0 || (MIN_SLOTS..=MAX_SLOTS).contains(&n) => Ok(n),
        _ => Err(format!("0 (off) or {MIN_SLOTS} to {MAX_SLOTS} is needed")),
    }
}

/// A file whose ending says what to write.
pub(crate) fn trace_path(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    let ending = path.extension().map(|ending| ending.to_ascii_lowercase());
    match ending.as_deref().and_then(|ending| ending.to_str()) {
        Some("json" | "svg") => Ok(path),
        _ => Err("a file that ends in .json or .svg is needed".into()),
    }
}

/// `vkmoe synth`
#[derive(Args, Debug)]
pub struct SynthArgs {
    /// GGUF file to write
    #[arg(value_name = "OUT.gguf")]
    pub out: PathBuf,
    /// Model to imitate
    #[arg(long, value_name = "MODEL", value_parser = names(PRESETS.iter().map(|p| p.name)))]
    pub preset: String,
    /// Mix of tensor types; without it: the one that people usually download
    #[arg(long, value_name = "TYPE", value_parser = names(Mix::all().map(Mix::name)))]
    pub r#type: Option<String>,
    /// Layers, instead of as many as the model has
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub layers: Option<u32>,
    /// Seed of the weights: the same seed gives the same file
    #[arg(short, long, default_value_t = 1, value_name = "N")]
    pub seed: u64,
    /// Replace the file if it is there
    #[arg(long)]
    pub force: bool,
}

/// One of these words.
fn names(words: impl IntoIterator<Item = &'static str>) -> PossibleValuesParser {
    PossibleValuesParser::new(words)
}

fn non_negative(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(x) if x.is_finite() && x >= 0.0 => Ok(x),
        _ => Err("a number from 0 is needed".into()),
    }
}

fn probability(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(x) if (0.0..=1.0).contains(&x) => Ok(x),
        _ => Err("a number from 0 to 1 is needed".into()),
    }
}

/// A seed; -1 draws one, as in llama.cpp.
fn seed(text: &str) -> Result<u64, String> {
    match text.parse::<u64>() {
        Ok(seed) => Ok(seed),
        Err(_) if text == "-1" => Ok(rand::random::<u32>().into()),
        Err(_) => Err("a number from 0, or -1 for a random one, is needed".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn definitions_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn short_names_of_llama_cpp_work() {
        let args = ["vkmoe", "run", "-ub", "64", "-ctk", "q8_0", "-c", "99", "--temp", "0", "hi"];
        let cli = Cli::parse_from(expand(args.map(OsString::from)));
        let Command::Run(run) = cli.command else { panic!("another command") };
        assert_eq!((run.engine.ubatch_size, run.engine.ctx_size), (64, 99));
        assert_eq!(run.engine.cache_type_k, KvTypeArg::Q8_0);
        assert_eq!(run.text.as_deref(), Some("hi"));
    }

    #[test]
    fn short_names_after_two_dashes_are_text() {
        let args = ["vkmoe", "run", "--", "-ub"].map(OsString::from);
        assert_eq!(expand(args)[3], "-ub");
    }
}
