//! Flags of `vkmoe bench`: llama-bench's, most of which take lists. `-p 512,2048` and `-p 512 -p 2048`
//! are the same; ranges are `1-8`, `128-512+128` and `128-2048*2`.

use super::{CopyQueueArg, HostSourceArg, KvTypeArg, expert_cache, gpu_layers, names, trace_path};
use crate::plan::{GpuLayers, Overrides};
use crate::stream::options::{CacheSize, SlotCount};
use crate::synth::presets::PRESETS;
use clap::{Args, ValueEnum};
use std::path::PathBuf;
use std::str::FromStr;

/// `vkmoe bench`
#[derive(Args, Clone, Debug)]
pub struct BenchArgs {
    /// GGUF files; without any: the built-in demo model
    #[arg(short, long, value_name = "FILE", value_delimiter = ',')]
    pub model: Vec<PathBuf>,
    /// Prompts to process, in tokens; 0: none
    #[arg(short = 'p', long, default_value = "512", value_name = "N")]
    pub n_prompt: Vec<Numbers>,
    /// Tokens to generate; 0: none
    #[arg(short = 'n', long, default_value = "128", value_name = "N")]
    pub n_gen: Vec<Numbers>,
    /// Prompts to process and tokens to generate after them, together; may be given several times
    /// [short: -pg]
    #[arg(long, value_name = "PP,TG", value_parser = pair)]
    pub prompt_gen: Vec<(u32, u32)>,
    /// Tokens in the cache before a test begins
    #[arg(short = 'd', long, default_value = "0", value_name = "N")]
    pub n_depth: Vec<Numbers>,
    /// Times that a test is repeated
    #[arg(short, long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub repetitions: u32,
    /// Tokens that go through the model layer by layer; unset: the plan chooses, up to the context
    #[arg(short, long, value_name = "N")]
    pub batch_size: Vec<Numbers>,
    /// Tokens that one kernel launch handles, at most the batch [short: -ub]
    #[arg(long, default_value = "512", value_name = "N")]
    pub ubatch_size: Vec<Numbers>,
    /// Type of the cached keys [short: -ctk]
    #[arg(long, value_enum, value_delimiter = ',', default_value = "f16")]
    pub cache_type_k: Vec<KvTypeArg>,
    /// Type of the cached values [short: -ctv]
    #[arg(long, value_enum, value_delimiter = ',', default_value = "f16")]
    pub cache_type_v: Vec<KvTypeArg>,
    /// Layers on the device; -1: what fits [short: -ngl]
    #[arg(
        long,
        default_value = "-1",
        value_name = "N",
        value_delimiter = ',',
        value_parser = gpu_layers,
        allow_hyphen_values = true
    )]
    pub n_gpu_layers: Vec<GpuLayers>,
    /// Layers, from the first, whose experts stay in host memory [short: -ncmoe]
    #[arg(long, default_value = "0", value_name = "N")]
    pub n_cpu_moe: Vec<Numbers>,
    /// Where tensors go, REGEX=HOST|VRAM, several joined by `;`; each use of the flag is a case
    /// [short: -ot]
    #[arg(long, value_name = "REGEX=PLACE;…", value_parser = overrides)]
    pub override_tensor: Vec<Overrides>,
    /// Staging slots for experts that stay in host memory: auto, 0, or 2 to 8
    #[arg(long, default_value = "auto", value_name = "N", value_delimiter = ',', value_parser = slots)]
    pub prefetch_experts_slots: Vec<SlotCount>,
    /// Device memory for experts in host memory that are used often: MiB, auto, or 0
    #[arg(long, default_value = "auto", value_name = "MiB", value_delimiter = ',', value_parser = expert_cache)]
    pub expert_cache: Vec<CacheSize>,
    /// Where experts in host memory are copied from
    #[arg(long, value_enum, default_value = "auto", value_delimiter = ',')]
    pub host_source: Vec<HostSourceArg>,
    /// Queue that copies run on
    #[arg(long, value_enum, default_value = "auto", value_delimiter = ',')]
    pub copy_queue: Vec<CopyQueueArg>,
    /// Plan as if the device had only this much memory free
    #[arg(long, value_name = "MiB")]
    pub vram_limit: Vec<Numbers>,
    /// Devices: numbers or parts of names as `vkmoe devices` shows them [short: -dev]
    #[arg(long, value_name = "N|NAME", value_delimiter = ',')]
    pub device: Vec<String>,
    /// Write what ran when in the last run of the last test: for Perfetto (.json) or as a picture
    /// (.svg). Every kernel is timed, which takes some time itself
    #[arg(long, value_name = "FILE.json|FILE.svg", value_parser = trace_path)]
    pub trace: Option<PathBuf>,
    /// Format of the result
    #[arg(short, long, value_enum, default_value_t = Format::Md)]
    pub output: Format,
    /// Do not run each test once before it is timed
    #[arg(long)]
    pub no_warmup: bool,
    /// Seconds to wait before each test
    #[arg(long, default_value_t = 0, value_name = "SECONDS")]
    pub delay: u32,
    /// A line on standard error for each run, instead of a bar
    #[arg(long)]
    pub progress: bool,
    /// Time single kernels instead of the whole: each one's time, its share of a pass, and how near it
    /// comes to what the device does at best, which is measured first. -p are tokens of one pass, -n
    /// any number for a pass of one token. Weights are random; one layer of each kind stands for all
    #[arg(long, help_heading = KERNELS)]
    pub ops: bool,
    /// Model whose shapes and types are taken, if -m names none [default: qwen3-30b-a3b]
    #[arg(long, value_name = "MODEL", value_parser = names(PRESETS.iter().map(|p| p.name)), requires = "ops", conflicts_with = "model", help_heading = KERNELS)]
    pub preset: Option<String>,
    /// Only kernels and ops with this in their names
    #[arg(long, value_name = "SUBSTRING", requires = "ops", help_heading = KERNELS)]
    pub filter: Option<String>,
    /// Also sizes of kernels that the device might do better with; `*` marks the chosen ones. Without --ops: those
    /// of kernels for few tokens, in whole passes
    #[arg(long, help_heading = KERNELS)]
    pub tiles: bool,
}

const KERNELS: &str = "Single kernels";

/// Formats of the result.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "named by the format")]
pub enum Format {
    Md,
    Json,
    Jsonl,
    Csv,
    Sql,
}

/// The values of one use of a flag: numbers and ranges, separated by commas.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Numbers(pub Vec<u32>);

/// No list of cases is longer; a range that is was mistyped.
const MAX_NUMBERS: usize = 10_000;

impl FromStr for Numbers {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut numbers = Vec::new();
        for item in text.split(',') {
            range(item, &mut numbers)?;
        }
        Ok(Numbers(numbers))
    }
}

/// From one number of a range to the next.
#[derive(Clone, Copy)]
enum Step {
    Add(u32),
    Multiply(u32),
}

impl Step {
    /// `None` where there is no such number.
    fn after(self, n: u32) -> Option<u32> {
        match self {
            Step::Add(by) => n.checked_add(by),
            Step::Multiply(by) => n.checked_mul(by),
        }
    }
}

/// `first`, `first-last`, `first-last+step` or `first-last*factor`.
fn range(item: &str, numbers: &mut Vec<u32>) -> Result<(), String> {
    let number = |text: &str| {
        text.parse::<u32>()
            .map_err(|_| format!("`{item}` is neither a number nor a range like 1-8, 1-8+2, 1-8*2"))
    };
    let Some((first, rest)) = item.split_once('-') else {
        numbers.push(number(item)?);
        return Ok(());
    };
    let (last, step) = match (rest.split_once('+'), rest.split_once('*')) {
        (Some((last, by)), _) => (last, Step::Add(number(by)?)),
        (_, Some((last, by))) => (last, Step::Multiply(number(by)?)),
        _ => (rest, Step::Add(1)),
    };
    let (first, last) = (number(first)?, number(last)?);
    let mut next = Some(first);
    while let Some(n) = next.filter(|&n| n <= last) {
        numbers.push(n);
        next = step.after(n);
        if next.is_some_and(|next| next <= n) || numbers.len() > MAX_NUMBERS {
            return Err(format!("`{item}` never ends, or after too many numbers"));
        }
    }
    if first > last { Err(format!("`{item}` ends before it begins")) } else { Ok(()) }
}

/// `PP,TG`
fn pair(text: &str) -> Result<(u32, u32), String> {
    let (prompt, generated) = text.split_once(',').unwrap_or((text, ""));
    match (prompt.parse(), generated.parse()) {
        (Ok(prompt), Ok(generated)) => Ok((prompt, generated)),
        _ => Err("two numbers are needed, like 512,128".into()),
    }
}

fn slots(text: &str) -> Result<SlotCount, String> {
    match text {
        "auto" => Ok(SlotCount::Auto),
        _ => super::slots(text).map(SlotCount::Fixed),
    }
}

/// llama-bench joins rules by `;`: commas are inside rules.
fn overrides(text: &str) -> Result<Overrides, String> {
    let rules = text.split(';').map(|rule| rule.parse::<Overrides>().map_err(|e| e.to_string()));
    let rules: Vec<Overrides> = rules.collect::<Result<_, _>>()?;
    Ok(Overrides(rules.into_iter().flat_map(|rules| rules.0).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command, expand};
    use clap::Parser;
    use std::ffi::OsString;

    fn parse(args: &[&str]) -> Result<BenchArgs, clap::Error> {
        let args = ["vkmoe", "bench"].iter().chain(args).map(OsString::from);
        match Cli::try_parse_from(expand(args))?.command {
            Command::Bench(args) => Ok(args),
            _ => panic!("another command"),
        }
    }

    #[test]
    fn numbers_and_ranges() {
        let numbers = |text: &str| Numbers::from_str(text).map(|n| n.0);
        assert_eq!(numbers("0"), Ok(vec![0]));
        assert_eq!(numbers("512,2048"), Ok(vec![512, 2048]));
        assert_eq!(numbers("1-4"), Ok(vec![1, 2, 3, 4]));
        assert_eq!(numbers("128-512+128"), Ok(vec![128, 256, 384, 512]));
        assert_eq!(numbers("16-100*2,7"), Ok(vec![16, 32, 64, 7]));
        for bad in ["", "x", "1,", "4-1", "1-4+0", "1-4*1", "0-4*2", "1-", "-1", "0-4000000000"] {
            assert!(numbers(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn llama_bench_s_flags() -> Result<(), clap::Error> {
        let args = "-m a.gguf,b.gguf -p 512,2048 -p 16 -n 0 -pg 512,128 -pg 64,8 -d 0,4096 -r 3 \
                    -b 512 -ub 128,256 -ctk q8_0,f16 -ctv f32 -ngl -1,99 -ncmoe 0,48 \
                    --prefetch-experts-slots 0,3,6 --expert-cache 0,5,auto --host-source mmap,ring -ot exps=HOST;norm=VRAM \
                    -o csv --no-warmup";
        let args = parse(&args.split_whitespace().collect::<Vec<_>>())?;
        assert_eq!(args.model, [PathBuf::from("a.gguf"), PathBuf::from("b.gguf")]);
        assert_eq!(args.n_prompt, [Numbers(vec![512, 2048]), Numbers(vec![16])]);
        assert_eq!(args.prompt_gen, [(512, 128), (64, 8)]);
        assert_eq!(args.n_gpu_layers, [GpuLayers::Auto, GpuLayers::Last(99)]);
        assert_eq!(args.cache_type_k, [KvTypeArg::Q8_0, KvTypeArg::F16]);
        assert_eq!(args.prefetch_experts_slots, [0, 3, 6].map(SlotCount::Fixed));
        let fixed = |mib: u64| CacheSize::Fixed(mib << 20);
        assert_eq!(args.expert_cache, [fixed(0), fixed(5), CacheSize::Auto]);
        assert_eq!(args.host_source, [HostSourceArg::Mmap, HostSourceArg::Ring]);
        assert_eq!(args.override_tensor[0].to_string(), "exps=HOST;norm=VRAM");
        assert_eq!((args.repetitions, args.output, args.no_warmup), (3, Format::Csv, true));
        Ok(())
    }

    #[test]
    fn what_cannot_be_is_refused_with_the_flag() {
        for (args, words) in [
            (["--prefetch-experts-slots", "1"], ["--prefetch-experts-slots", "one slot"]),
            (["--prefetch-experts-slots", "9"], ["--prefetch-experts-slots", "2 to 8"]),
            (["-pg", "512"], ["--prompt-gen", "512,128"]),
            (["-p", "5x"], ["--n-prompt", "5x"]),
            (["-r", "0"], ["--repetitions", "0"]),
            (["--host-source", "disk"], ["--host-source", "mmap"]),
            (["--expert-cache", "all"], ["--expert-cache", "MiB"]),
        ] {
            let message = parse(&args).map_or_else(|e| e.to_string(), |_| String::new());
            assert!(words.iter().all(|word| message.contains(word)), "{args:?}: {message}");
        }
    }
}
