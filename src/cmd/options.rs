//! From flags and environment variables to the engine's options. A flag overrules a variable.

use crate::cli::{self, CopyQueueArg, EngineArgs, HostSourceArg, KvTypeArg};
use crate::engine::EngineOptions;
use crate::error::{Error, Result};
use crate::exec::kv::KvType;
use crate::plan::{CpuMoe, Overrides, PlacementOptions};
use crate::stream::options::{HostSource, SlotCount, StreamOptions, USUAL_SLOTS};
use crate::vk::CopyQueue;

/// The variable of the fork that prefetching was first tried in.
const PREFETCH: &str = "GGML_SCHED_PREFETCH_EXPERTS";
/// 1 allows pinned host sources, 0 forces the ring; the second is llama.cpp's name for CUDA.
const REGISTER_HOST: [&str; 2] = ["GGML_VK_REGISTER_HOST", "GGML_CUDA_REGISTER_HOST"];

/// The options that flags and environment ask for.
pub(super) fn engine_options(args: &EngineArgs) -> Result<EngineOptions> {
    let env = |name: &str| std::env::var_os(name).map(|v| v.to_string_lossy().into_owned());
    Ok(EngineOptions {
        device: args.device.clone(),
        n_ctx: args.ctx_size,
        n_batch: args.batch_size,
        n_ubatch: args.ubatch_size,
        type_k: kv_type(args.cache_type_k),
        type_v: kv_type(args.cache_type_v),
        vram_limit_bytes: args.vram_limit.map(mib),
        hash_logits: args.logits_hash,
        placement: placement(args),
        stream: stream(args, &env)?,
        tracing: args.trace.is_some(),
        ..EngineOptions::default()
    })
}

fn placement(args: &EngineArgs) -> PlacementOptions {
    let rules = args.override_tensor.iter().flat_map(|o| o.0.iter().cloned());
    let first = args.n_cpu_moe.map_or(CpuMoe::Unset, CpuMoe::First);
    PlacementOptions {
        overrides: Overrides(rules.collect()),
        cpu_moe: if args.cpu_moe { CpuMoe::All } else { first },
        gpu_layers: args.n_gpu_layers,
        margin_bytes: args.fit_target.map(mib),
    }
}

fn stream(args: &EngineArgs, env: &dyn Fn(&str) -> Option<String>) -> Result<StreamOptions> {
    let source = match args.host_source {
        Some(arg) => host_source(arg),
        None => source_of_env(env)?,
    };
    let slots = match args.prefetch_experts_slots {
        Some(n) => SlotCount::Fixed(n),
        None => slots_of_env(env)?,
    };
    Ok(StreamOptions {
        host_source: source,
        slots,
        expert_cache: args.expert_cache,
        pin_max_bytes: args.pin_max_mib.map(mib),
        copy_queue: copy_queue(args.copy_queue),
        chaos: None,
    })
}

/// `GGML_VK_REGISTER_HOST` and its alias, which must not contradict each other.
fn source_of_env(env: &dyn Fn(&str) -> Option<String>) -> Result<Option<HostSource>> {
    let [first, second] = REGISTER_HOST;
    match (switch(first, env)?, switch(second, env)?) {
        (Some(a), Some(b)) if a != b => {
            let problem = format!("it contradicts {second}; set one of them, or --host-source");
            Err(Error::usage(first, problem))
        }
        (Some(false), _) | (_, Some(false)) => Ok(Some(HostSource::Ring)),
        // The probe takes a pinned source where one works: what 1 asks for.
        _ => Ok(None),
    }
}

/// A variable that is 0 or 1; empty is unset.
fn switch(name: &str, env: &dyn Fn(&str) -> Option<String>) -> Result<Option<bool>> {
    match env(name).as_deref().map(str::trim) {
        None | Some("") => Ok(None),
        Some("0") => Ok(Some(false)),
        Some("1") => Ok(Some(true)),
        Some(other) => {
            let problem = format!("`{other}` is neither 1 (pin host memory) nor 0 (do not)");
            Err(Error::usage(name, problem))
        }
    }
}

/// `GGML_SCHED_PREFETCH_EXPERTS`: a number of slots, or 1 for the usual number.
fn slots_of_env(env: &dyn Fn(&str) -> Option<String>) -> Result<SlotCount> {
    match env(PREFETCH).as_deref().map(str::trim) {
        None | Some("") => Ok(SlotCount::Auto),
        Some("1") => Ok(SlotCount::Fixed(USUAL_SLOTS)),
        Some(text) => match cli::slots(text) {
            Ok(n) => Ok(SlotCount::Fixed(n)),
            Err(e) => Err(Error::usage(PREFETCH, format!("`{text}`: {e}"))),
        },
    }
}

pub(super) fn host_source(arg: HostSourceArg) -> Option<HostSource> {
    match arg {
        HostSourceArg::Auto => None,
        HostSourceArg::Mmap => Some(HostSource::Mmap),
        HostSourceArg::Arena => Some(HostSource::Arena),
        HostSourceArg::Host => Some(HostSource::Host),
        HostSourceArg::Ring => Some(HostSource::Ring),
    }
}

pub(super) fn copy_queue(arg: CopyQueueArg) -> Option<CopyQueue> {
    match arg {
        CopyQueueArg::Auto => None,
        CopyQueueArg::Transfer => Some(CopyQueue::Transfer),
        CopyQueueArg::Compute => Some(CopyQueue::SecondCompute),
        CopyQueueArg::Same => Some(CopyQueue::Same),
    }
}

pub(super) fn kv_type(arg: KvTypeArg) -> KvType {
    match arg {
        KvTypeArg::F32 => KvType::F32,
        KvTypeArg::F16 => KvType::F16,
        KvTypeArg::Q8_0 => KvType::Q8_0,
        KvTypeArg::Q4_0 => KvType::Q4_0,
    }
}

pub(super) fn mib(n: u64) -> u64 {
    n.saturating_mul(1 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command, expand};
    use crate::plan::{GpuLayers, Place};
    use crate::stream::options::CacheSize;
    use clap::{Parser, ValueEnum};
    use std::ffi::OsString;

    fn args(flags: &[&str]) -> EngineArgs {
        let words = ["vkmoe", "plan"].iter().chain(flags).map(OsString::from);
        let Command::Plan(plan) = Cli::parse_from(expand(words)).command else {
            panic!("another command")
        };
        plan.engine
    }

    /// Slots and host source from flags and variables.
    fn stream_of(flags: &[&str], env: &[(&str, &str)]) -> Result<StreamOptions> {
        let find = |name: &str| env.iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_string());
        stream(&args(flags), &find)
    }

    #[test]
    fn flags_of_llama_cpp_place_tensors() {
        let line = ["-ngl", "99", "-ncmoe", "7", "-ot", "a=CPU,b=Vulkan0", "-ot", "c=HOST"];
        let p = placement(&args(&line));
        assert_eq!((p.gpu_layers, p.cpu_moe), (GpuLayers::Last(99), CpuMoe::First(7)));
        let rules: Vec<String> = p.overrides.0.iter().map(ToString::to_string).collect();
        assert_eq!(rules, ["a=HOST", "b=VRAM", "c=HOST"]);
        assert_eq!(p.overrides.place("b"), Some(Place::Device));
        assert_eq!(p.margin_bytes, None);
        let p = placement(&args(&["-cmoe", "-ncmoe", "3", "-fitt", "0", "--gpu-layers", "all"]));
        assert_eq!((p.gpu_layers, p.cpu_moe), (GpuLayers::All, CpuMoe::All));
        assert_eq!(p.margin_bytes, Some(0));
        for auto in [&["-ngl", "auto"][..], &["-ngl", "-1"], &[]] {
            assert_eq!(placement(&args(auto)).gpu_layers, GpuLayers::Auto);
        }
    }

    #[test]
    fn flags_choose_how_experts_stream() {
        let line = ["--host-source", "arena", "--prefetch-experts-slots", "2"];
        let more = ["--pin-max-mib", "5", "--copy-queue", "compute"];
        let line = [&line[..], &more, &["--expert-cache", "7"]].concat();
        let found = stream_of(&line, &[]).unwrap();
        let expected = StreamOptions {
            host_source: Some(HostSource::Arena),
            slots: SlotCount::Fixed(2),
            expert_cache: CacheSize::Fixed(7 << 20),
            pin_max_bytes: Some(5 << 20),
            copy_queue: Some(CopyQueue::SecondCompute),
            chaos: None,
        };
        assert_eq!(found, expected);
        assert_eq!(stream_of(&[], &[]).unwrap(), StreamOptions::default());
        let cache = |size| stream_of(&["--expert-cache", size], &[]).unwrap().expert_cache;
        assert_eq!([cache("auto"), cache("0")], [CacheSize::Auto, CacheSize::Fixed(0)]);
    }

    /// What the user types is what the engine calls it.
    #[test]
    fn names_agree() {
        let typed = |arg: &dyn Fn() -> Option<clap::builder::PossibleValue>| {
            arg().map(|v| v.get_name().to_string()).unwrap_or_default()
        };
        let sources: Vec<_> = HostSourceArg::value_variants()
            .iter()
            .filter_map(|a| Some((typed(&|| a.to_possible_value()), host_source(*a)?.name())))
            .collect();
        assert_eq!(sources.len(), HostSource::ALL.len());
        assert!(sources.iter().all(|(typed, name)| typed == name), "{sources:?}");
        let queues: Vec<_> = CopyQueueArg::value_variants()
            .iter()
            .filter_map(|a| Some((typed(&|| a.to_possible_value()), copy_queue(*a)?.name())))
            .collect();
        assert!(queues.len() == 3 && queues.iter().all(|(typed, name)| typed == name));
    }

    #[test]
    fn variables_stand_in_for_flags() {
        let source = |env: &[(&str, &str)]| stream_of(&[], env).unwrap().host_source;
        assert_eq!(source(&[("GGML_VK_REGISTER_HOST", "0")]), Some(HostSource::Ring));
        assert_eq!(source(&[("GGML_CUDA_REGISTER_HOST", "0")]), Some(HostSource::Ring));
        assert_eq!(source(&[("GGML_VK_REGISTER_HOST", "1")]), None);
        assert_eq!(source(&[("GGML_VK_REGISTER_HOST", "")]), None);
        let agreeing = [("GGML_VK_REGISTER_HOST", "0"), ("GGML_CUDA_REGISTER_HOST", "0")];
        assert_eq!(source(&agreeing), Some(HostSource::Ring));

        let slots = |value: &str| stream_of(&[], &[(PREFETCH, value)]).unwrap().slots;
        assert_eq!([0, 2, 8].map(|n| slots(&n.to_string())), [0, 2, 8].map(SlotCount::Fixed));
        assert_eq!(slots("1"), SlotCount::Fixed(3));
        assert_eq!(slots(""), SlotCount::Auto);
    }

    /// Also a variable that makes no sense.
    #[test]
    fn flags_overrule_variables() {
        let env = [("GGML_VK_REGISTER_HOST", "0"), (PREFETCH, "9")];
        let flags = ["--host-source", "auto", "--prefetch-experts-slots", "0"];
        let found = stream_of(&flags, &env).unwrap();
        assert_eq!((found.host_source, found.slots), (None, SlotCount::Fixed(0)));
    }

    #[test]
    fn variables_that_cannot_be_are_named() {
        let both = [("GGML_VK_REGISTER_HOST", "1"), ("GGML_CUDA_REGISTER_HOST", "0")];
        let cases: [(&[(&str, &str)], &str); 5] = [
            (&both, "GGML_VK_REGISTER_HOST: it contradicts GGML_CUDA_REGISTER_HOST"),
            (&[("GGML_CUDA_REGISTER_HOST", "yes")], "GGML_CUDA_REGISTER_HOST: `yes`"),
            (&[("GGML_VK_REGISTER_HOST", "2")], "GGML_VK_REGISTER_HOST: `2`"),
            (&[(PREFETCH, "9")], "GGML_SCHED_PREFETCH_EXPERTS: `9`"),
            (&[(PREFETCH, "-1")], "GGML_SCHED_PREFETCH_EXPERTS: `-1`"),
        ];
        for (env, words) in cases {
            let refused = stream_of(&[], env).unwrap_err().to_string();
            assert!(refused.starts_with(words), "{refused}");
        }
    }
}
