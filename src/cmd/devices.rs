//! `vkmoe devices`: what Vulkan lists, and what the engine will use and why.

use super::table::Table;
use super::{emit, model_path};
use crate::cli::DevicesArgs;
use crate::error::Result;
use crate::exec::choices::choices;
use crate::exec::tuning::Tuning;
use crate::gguf::Gguf;
use crate::plan::Bytes;
use crate::stream::cpu_speed::CpuSpeed;
use crate::stream::options::HostSource;
use crate::stream::probe::{Measure, Probe, cached_probe, known_probe, ladder, overrule};
use crate::vk::{
    self, CacheFile, DeviceInfo, Heap, Instance, InstanceOptions, Lane, LanePlan, QueueFamily,
    QueueId,
};
use std::fmt::Write;
use std::sync::Arc;

pub(super) fn run(args: &DevicesArgs) -> Result<()> {
    let gguf = match model_path(args.model.as_deref()).and_then(|path| Gguf::open(&path)) {
        Ok(gguf) => Some(gguf),
        Err(e) if args.probe || args.model.is_some() => return Err(e),
        // Then nothing is known of host sources; the rest is.
        Err(_) => None,
    };
    let instance = Arc::new(Instance::new(InstanceOptions::default())?);
    let devices = instance.devices()?;
    let visible = std::env::var("GGML_VK_VISIBLE_DEVICES").ok();
    let order = vk::visible_devices(&devices, visible.as_deref())?;
    let chosen = vk::choose(&devices, args.device.as_deref(), visible.as_deref());
    let mut text = String::new();
    for (number, &index) in order.iter().enumerate() {
        let is_chosen = chosen.as_ref().is_ok_and(|&c| c == index);
        let info = &devices[index];
        let probed = if args.probe && is_chosen { Some(&instance) } else { None };
        let sources = gguf.as_ref().map(|gguf| Sources::of(info, gguf, probed));
        text += &describe(number, info, is_chosen, &sources.unwrap_or_default())?;
    }
    emit(&text)?;
    // Without a usable device the command fails, after it has shown why.
    chosen.map(|_| ())
}

/// What is known of a device's host sources.
#[derive(Default)]
struct Sources {
    /// In the order of the ladder.
    probes: Vec<(HostSource, Option<Probe>)>,
    /// Measured, not remembered.
    cpu: Option<CpuSpeed>,
}

impl Sources {
    /// By trial if there is an instance for it, else from earlier runs.
    fn of(info: &DeviceInfo, gguf: &Gguf, instance: Option<&Arc<Instance>>) -> Sources {
        if !info.missing.is_empty() {
            return Sources::default();
        }
        let probe = |source| match instance {
            Some(instance) => {
                let (measure, cache) = (Measure::CopyQueues, CacheFile::User);
                Some(cached_probe(instance, info, source, gguf, measure, &cache))
            }
            None => known_probe(info, source, gguf.path(), &CacheFile::User),
        };
        let probes = ladder(info).iter().map(|&source| (source, probe(source))).collect();
        Sources { probes, cpu: instance.map(|_| CpuSpeed::measure()) }
    }

    /// The source that the engine takes: the first that works, if those before it are known not to.
    fn used(&self) -> Option<(HostSource, &Probe)> {
        let first = self.probes.iter().find(|(_, p)| p.as_ref().is_none_or(|p| p.usable))?;
        Some((first.0, first.1.as_ref()?))
    }

    /// `16 threads read memory at 94.1 GB/s, …`: where the CPU would multiply missed experts faster than they come.
    fn cpu_line(&self) -> Option<String> {
        let CpuSpeed { n_threads, read_gbps, product_gbps } = self.cpu?;
        let speeds = format!(
            "{n_threads} threads read memory at {read_gbps:.1} GB/s, multiply 4-bit weights at {product_gbps:.1} GB/s"
        );
        let link = self.used().and_then(|(_, probe)| {
            probe.copy_gbps.iter().map(|(_, gbps)| *gbps).max_by(f64::total_cmp)
        });
        let verdict = match link {
            Some(link) if product_gbps > link => {
                format!("; the bus brings {link:.1}: missed experts would be faster there")
            }
            Some(link) => format!("; the bus brings {link:.1}: missed experts are faster over it"),
            None => String::new(),
        };
        Some(speeds + &verdict)
    }

    /// `works: copy queue transfer 49.4 GB/s, compute 51.0 GB/s`
    fn line(&self, source: HostSource, probe: Option<&Probe>) -> String {
        let Some(probe) = probe else { return "not tried yet; --probe does".into() };
        if !probe.usable {
            return format!("does not work: {}", super::one_line(&probe.why));
        }
        let speeds = probe.copy_gbps.iter().map(|(queue, gbps)| format!("{queue} {gbps:.1} GB/s"));
        let speeds: Vec<String> = speeds.collect();
        let speeds = match speeds.is_empty() {
            true => String::new(),
            false => format!(": copy queue {}", speeds.join(", ")),
        };
        let is_used = self.used().is_some_and(|(used, _)| used == source);
        format!("works{speeds}{}", if is_used { "  ← used" } else { "" })
    }
}

fn describe(number: usize, d: &DeviceInfo, chosen: bool, sources: &Sources) -> Result<String> {
    let mark = if chosen { "  ← used" } else { "" };
    let mut text = format!("{number}  {} ({}){mark}\n", d.name, d.kind);
    let mut line = |what: &str, value: String| {
        let _ = writeln!(text, "   {what:<15} {value}");
    };
    line("driver", format!("{} {}, Vulkan {}.{}", d.driver, d.driver_version, d.api.0, d.api.1));
    if !d.missing.is_empty() {
        line("cannot be used", format!("it lacks {}", d.missing.join(", ")));
        return Ok(text + "\n");
    }
    for (i, heap) in d.heaps.iter().enumerate() {
        line(&format!("heap {i}"), heap_line(heap));
    }
    let faster = sources.used().and_then(|(_, probe)| overrule(d, &probe.copy_gbps));
    let lanes = vk::plan_lanes(d, faster)?;
    for (i, family) in d.queue_families.iter().enumerate() {
        line(&format!("queue family {i}"), family_line(i as u32, family, lanes));
    }
    line("compute lane", lane_line(lanes, Lane::Compute));
    let reason = if faster.is_some() { "measured to be clearly faster" } else { why(lanes, d) };
    line("copy lane", format!("{}: {reason}", lane_line(lanes, Lane::Copy)));
    for (source, probe) in &sources.probes {
        line(&format!("source {source}"), sources.line(*source, probe.as_ref()));
    }
    if let Some(cpu) = sources.cpu_line() {
        line("CPU", cpu);
    }
    line("subgroup", subgroup_line(d));
    line("limits", limits_line(d));
    line("matrix units", matrix_line(d));
    line("optional", optional_line(d));
    Ok(text + "\n" + &matrix_table(d) + &kernel_table(d))
}

fn heap_line(heap: &Heap) -> String {
    let kind = if heap.device_local { "device memory" } else { "host memory" };
    let free = heap.budget_bytes.saturating_sub(heap.usage_bytes);
    let share = free as f64 / heap.bytes.max(1) as f64;
    let full = (share.clamp(0.0, 1.0) * 20.0).round() as usize;
    let bar = "█".repeat(full) + &"░".repeat(20 - full);
    format!("{kind}, {} of {} free  {bar}", Bytes(free), Bytes(heap.bytes))
}

fn family_line(index: u32, family: &QueueFamily, lanes: LanePlan) -> String {
    let flags = [
        (ash::vk::QueueFlags::GRAPHICS, "graphics"),
        (ash::vk::QueueFlags::COMPUTE, "compute"),
        (ash::vk::QueueFlags::TRANSFER, "transfer"),
        (ash::vk::QueueFlags::SPARSE_BINDING, "sparse"),
    ];
    let names: Vec<&str> =
        flags.iter().filter(|(flag, _)| family.flags.contains(*flag)).map(|(_, n)| *n).collect();
    let used = [Lane::Compute, Lane::Copy]
        .into_iter()
        .filter(|&lane| lanes.queue(lane).family == index)
        .map(Lane::name)
        .collect::<Vec<_>>();
    let used = if used.is_empty() { String::new() } else { format!("  ← {}", used.join(", ")) };
    format!("{} × {}{used}", family.count, names.join("+"))
}

fn lane_line(lanes: LanePlan, lane: Lane) -> String {
    let QueueId { family, index } = lanes.queue(lane);
    format!("family {family}, queue {index}")
}

fn why(lanes: LanePlan, d: &DeviceInfo) -> &'static str {
    if lanes.copy == lanes.compute {
        return match d.shares_host_memory() {
            true => "shared with compute, since its memory is the host's",
            false => "shared with compute, since no other queue is known to be faster",
        };
    }
    match (lanes.copy.family == lanes.compute.family, lanes.copy_beside) {
        (true, _) => "a second queue, so that copies do not block kernels",
        (false, Some(_)) => {
            "and the next: a family of its own, whose engines copy beside the kernels"
        }
        (false, None) => "a family of its own, whose engine copies beside the kernels",
    }
}

fn subgroup_line(d: &DeviceInfo) -> String {
    let s = d.subgroup;
    let choice = if s.selectable { ", selectable" } else { "" };
    format!("{} (from {} to {}{choice})", s.default, s.min, s.max)
}

fn limits_line(d: &DeviceInfo) -> String {
    let l = d.limits;
    let import = match l.import_alignment {
        0 => "no import of host memory".to_string(),
        align => format!("imports host memory at {align} bytes"),
    };
    format!(
        "buffer {}, allocation {}, binding {}, shared memory {}, {} invocations, {import}",
        Bytes(l.buffer_bytes),
        Bytes(l.allocation_bytes),
        Bytes(l.storage_range_bytes),
        Bytes(l.shared_bytes.into()),
        l.workgroup_invocations,
    )
}

fn matrix_line(d: &DeviceInfo) -> String {
    match (d.optional.cooperative_matrix, d.optional.cooperative_matrix2.workgroup_scope) {
        (true, true) => "VK_KHR_cooperative_matrix, VK_NV_cooperative_matrix2".into(),
        (true, false) => "VK_KHR_cooperative_matrix".into(),
        (false, _) => "none".into(),
    }
}

fn optional_line(d: &DeviceInfo) -> String {
    let o = d.optional;
    let features = [
        (o.float16, "float16"),
        (o.bfloat16, "bfloat16"),
        (o.integer_dot_accelerated, "integer dot product"),
        (o.memory_budget, "memory budget"),
        (o.external_memory_host, "external memory host"),
        (o.device_fault, "device fault"),
        (o.calibrated_timestamps, "calibrated timestamps"),
    ];
    let names: Vec<&str> = features.iter().filter(|(has, _)| *has).map(|(_, n)| *n).collect();
    if names.is_empty() { "none".into() } else { names.join(", ") }
}

/// The matrix shapes of a device that has any.
fn matrix_table(d: &DeviceInfo) -> String {
    if d.matrix_shapes.is_empty() {
        return String::new();
    }
    let mut table = Table::new(&["   matrix m×n×k", "a", "b", "c", "result"]);
    for s in &d.matrix_shapes {
        let shape = format!("   {}×{}×{}", s.m, s.n, s.k);
        let types = [s.a, s.b, s.c, s.result].map(|t| format!("{t:?}").to_lowercase());
        table.row(std::iter::once(shape).chain(types));
    }
    format!("{table}\n")
}

/// Which kernels a model would run on.
fn kernel_table(d: &DeviceInfo) -> String {
    let mut table = Table::new(&["   op", "rows of x", "kernel", "tile", ">workgroup", "why"]);
    for c in choices(&Tuning::new(d)) {
        let workgroup = c.workgroup.to_string();
        table.row([format!("   {}", c.op), c.rows, c.kernel, c.tile, workgroup, c.why]);
    }
    format!("{table}\n")
}
