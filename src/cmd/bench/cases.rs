//! What is to be measured: every combination of the flags' values, in an order that loads each model as
//! rarely as possible. Pure.

use crate::cli::bench::{BenchArgs, Numbers};
use crate::cmd::options::{copy_queue, host_source, kv_type};
use crate::error::{Error, Result};
use crate::exec::kv::KvType;
use crate::plan::{GpuLayers, Overrides};
use crate::stream::options::{CacheSize, HostSource, SlotCount};
use crate::vk::CopyQueue;
use std::path::PathBuf;

/// One row of the result.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Case {
    /// The engine that it needs.
    pub(super) load: Load,
    /// `-ub`, as given.
    pub(super) n_ubatch: u32,
    /// What is done.
    pub(super) test: Test,
}

/// What an engine is opened with: it stays open as long as this stays the same.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Load {
    /// `None`: the demo model.
    pub(super) model: Option<PathBuf>,
    pub(super) device: Option<String>,
    pub(super) gpu_layers: GpuLayers,
    pub(super) n_cpu_moe: u32,
    pub(super) overrides: Overrides,
    pub(super) host_source: Option<HostSource>,
    pub(super) slots: SlotCount,
    pub(super) expert_cache: CacheSize,
    pub(super) copy_queue: Option<CopyQueue>,
    pub(super) vram_limit_mib: Option<u32>,
    /// `-b`; `None`: as many tokens as memory allows.
    pub(super) n_batch: Option<u32>,
    /// Tokens of a launch: the ubatch, but no more than a batch.
    pub(super) n_launch: u32,
    pub(super) type_k: KvType,
    pub(super) type_v: KvType,
    /// Room for the largest of the cases.
    pub(super) n_ctx: u32,
}

/// Tokens in the cache before, tokens of the prompt, tokens generated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Test {
    pub(super) n_depth: u32,
    pub(super) n_prompt: u32,
    pub(super) n_gen: u32,
}

impl Test {
    /// Tokens that are timed.
    pub(super) fn n_timed(&self) -> u32 {
        self.n_prompt.saturating_add(self.n_gen)
    }

    /// Tokens in the cache at the end.
    fn n_ctx(&self) -> u32 {
        self.n_timed().saturating_add(self.n_depth)
    }

    /// As llama-bench calls it: `pp512`, `tg128 @ d4096`, `pp512+tg128`.
    pub(super) fn name(&self) -> String {
        let name = match (self.n_prompt, self.n_gen) {
            (prompt, 0) => format!("pp{prompt}"),
            (0, generated) => format!("tg{generated}"),
            (prompt, generated) => format!("pp{prompt}+tg{generated}"),
        };
        match self.n_depth {
            0 => name,
            depth => format!("{name} @ d{depth}"),
        }
    }
}

/// All combinations, in the order of llama-bench's loops: what needs another engine changes last.
pub(super) fn cases(args: &BenchArgs) -> Result<Vec<Case>> {
    let (batches, ubatches) = (all(&args.batch_size), all(&args.ubatch_size));
    for (flag, sizes) in [("-b", &batches), ("-ub", &ubatches)] {
        if sizes.contains(&0) {
            return Err(Error::usage(flag, "0 tokens at once are too few"));
        }
    }
    let mut cases = Cases(vec![Case::default()]);
    cases.multiply(&or_none(&args.model), |case, model| case.load.model = model);
    cases.multiply(&args.n_gpu_layers, |case, n| case.load.gpu_layers = n);
    cases.multiply(&all(&args.n_cpu_moe), |case, n| case.load.n_cpu_moe = n);
    cases.multiply(&or_none(&args.device), |case, device| case.load.device = device);
    let overrides = match args.override_tensor.as_slice() {
        [] => vec![Overrides::default()],
        rules => rules.to_vec(),
    };
    cases.multiply(&overrides, |case, rules| case.load.overrides = rules);
    let limits = or_none(&all(&args.vram_limit));
    cases.multiply(&limits, |case, mib| case.load.vram_limit_mib = mib);
    cases.multiply(&args.host_source, |case, source| case.load.host_source = host_source(source));
    cases.multiply(&args.prefetch_experts_slots, |case, slots| case.load.slots = slots);
    cases.multiply(&args.expert_cache, |case, size| case.load.expert_cache = size);
    cases.multiply(&args.copy_queue, |case, arg| case.load.copy_queue = copy_queue(arg));
    cases.multiply(&or_none(&batches), |case, n| case.load.n_batch = n);
    cases.multiply(&ubatches, |case, n| case.n_ubatch = n);
    cases.multiply(&args.cache_type_k, |case, ty| case.load.type_k = kv_type(ty));
    cases.multiply(&args.cache_type_v, |case, ty| case.load.type_v = kv_type(ty));
    cases.multiply(&tests(args), |case, test| case.test = test);
    let mut cases = cases.0;
    if cases.is_empty() {
        return Err(Error::usage("-p, -n, -pg", "no tokens to process or to generate"));
    }
    for case in &mut cases {
        case.load.n_launch = case.n_ubatch.min(case.load.n_batch.unwrap_or(u32::MAX));
    }
    share_contexts(&mut cases);
    Ok(cases)
}

struct Cases(Vec<Case>);

impl Cases {
    /// Each case once with each of the values.
    fn multiply<T: Clone>(&mut self, values: &[T], set: impl Fn(&mut Case, T)) {
        let with = |case: &Case, value: &T| {
            let mut case = case.clone();
            set(&mut case, value.clone());
            case
        };
        let each = |case| values.iter().map(|value| with(case, value)).collect::<Vec<_>>();
        self.0 = self.0.iter().flat_map(each).collect();
    }
}

/// The tests of one combination: at each depth prompts, then generations, then both.
fn tests(args: &BenchArgs) -> Vec<Test> {
    let mut tests = Vec::new();
    for n_depth in all(&args.n_depth) {
        let prompts = all(&args.n_prompt).into_iter().map(|n| (n, 0));
        let generations = all(&args.n_gen).into_iter().map(|n| (0, n));
        let sizes = prompts.chain(generations).chain(args.prompt_gen.iter().copied());
        let sizes = sizes.filter(|&size| size != (0, 0));
        tests.extend(sizes.map(|(n_prompt, n_gen)| Test { n_depth, n_prompt, n_gen }));
    }
    tests
}

/// Cases that differ in their length only share an engine whose context fits all of them.
fn share_contexts(cases: &mut [Case]) {
    for first in 0..cases.len() {
        let load = cases[first].load.clone();
        if load.n_ctx > 0 {
            continue;
        }
        let shares = |case: &&mut Case| case.load == load;
        let n_ctx = cases.iter_mut().filter(shares).map(|case| case.test.n_ctx()).max();
        for case in cases.iter_mut().filter(shares) {
            case.load.n_ctx = n_ctx.unwrap_or(0).max(1);
        }
    }
}

/// The values of all uses of a flag.
pub(super) fn all(lists: &[Numbers]) -> Vec<u32> {
    lists.iter().flat_map(|list| list.0.iter().copied()).collect()
}

/// The values, or one that stands for the flag's absence.
fn or_none<T: Clone>(values: &[T]) -> Vec<Option<T>> {
    match values {
        [] => vec![None],
        values => values.iter().cloned().map(Some).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command, expand};
    use clap::Parser;
    use std::collections::HashSet;
    use std::ffi::OsString;

    fn cases_of(args: &str) -> Result<Vec<Case>> {
        let args = ["vkmoe", "bench"].into_iter().chain(args.split_whitespace());
        match Cli::parse_from(expand(args.map(OsString::from))).command {
            Command::Bench(args) => cases(&args),
            _ => panic!("another command"),
        }
    }

    fn names(cases: &[Case]) -> Vec<String> {
        cases.iter().map(|case| case.test.name()).collect()
    }

    #[test]
    fn without_flags_there_are_llama_bench_s_two_tests() -> Result<()> {
        let cases = cases_of("")?;
        assert_eq!(names(&cases), ["pp512", "tg128"]);
        assert_eq!((cases[0].load.n_batch, cases[0].n_ubatch), (None, 512));
        assert_eq!(cases[0].load, cases[1].load);
        assert_eq!(cases[0].load.n_ctx, 512);
        Ok(())
    }

    #[test]
    fn tests_are_named_and_ordered_as_in_llama_bench() -> Result<()> {
        let cases = cases_of("-p 16,32 -n 8 -pg 4,2 -pg 0,0 -d 0,100")?;
        let expected = [
            "pp16",
            "pp32",
            "tg8",
            "pp4+tg2",
            "pp16 @ d100",
            "pp32 @ d100",
            "tg8 @ d100",
            "pp4+tg2 @ d100",
        ];
        assert_eq!(names(&cases), expected);
        assert!(cases.iter().all(|case| case.load.n_ctx == 132));
        Ok(())
    }

    #[test]
    fn every_list_multiplies_the_cases() -> Result<()> {
        let cases = cases_of(
            "-m a,b -p 1 -n 0 -b 64,128 -ub 32,256 -ctk f16,q8_0 -ctv f16,f32 -ngl -1,0 -ncmoe 0,1 \
             --prefetch-experts-slots 0,3,6 --host-source auto,ring -ot x=HOST -ot y=HOST \
             --vram-limit 100,200 --device 0,1",
        )?;
        assert_eq!(cases.len(), 2 * 2 * 2 * 2 * 2 * 2 * 2 * 3 * 2 * 2 * 2 * 2);
        let distinct: HashSet<String> = cases.iter().map(|case| format!("{case:?}")).collect();
        assert_eq!(distinct.len(), cases.len());
        Ok(())
    }

    #[test]
    fn engines_stay_open_where_they_can() -> Result<()> {
        // Four sizes, but launches of 32 and 64 tokens only; one of them twice in a row.
        let cases = cases_of("-p 8 -n 4 -d 0,16 -b 64 -ub 32,64,128")?;
        let mut loads: Vec<&Load> = cases.iter().map(|case| &case.load).collect();
        loads.dedup();
        assert_eq!(loads.iter().map(|load| load.n_launch).collect::<Vec<_>>(), [32, 64]);
        assert_eq!(cases.len(), 12);
        Ok(())
    }

    #[test]
    fn nothing_to_do_is_an_error() {
        for (args, flag) in [("-p 0 -n 0", "-p, -n, -pg"), ("-b 0", "-b"), ("-ub 64,0", "-ub")] {
            let message = cases_of(args).map_or_else(|e| e.to_string(), |_| String::new());
            assert!(message.starts_with(flag), "{args}: {message}");
        }
    }
}
