//! The figures of a kernel: its time, its share of a pass, how near it comes to the device's best. Pure.

use crate::cmd::bench::cases::Test;
use crate::cmd::bench::print::Field;
use crate::engine::OpTimes;
use crate::exec::op_times::OpTime;
use crate::exec::peaks::Peaks;
use serde_json::json;

/// What a pass was, and how long it took.
#[derive(Clone, Debug)]
pub(super) struct Pass {
    /// The large model.
    pub(super) model: String,
    pub(super) gpu: String,
    pub(super) test: Test,
    /// For each layer that was timed, the layers of the large model.
    pub(super) layers: Vec<u32>,
    /// Nanoseconds of a pass of the layers that were timed, as the engine runs it.
    pub(super) pass_ns: f64,
    /// Nanoseconds of the kernels in it, each timed alone.
    pub(super) kernels_ns: f64,
    /// All kernels were timed.
    pub(super) is_whole: bool,
}

impl Pass {
    /// Layers of the large model.
    pub(super) fn n_layer(&self) -> u32 {
        self.layers.iter().sum()
    }

    /// How often a step that is in these layers is in the large model.
    fn count(&self, layers: &[Option<u32>]) -> u32 {
        let of =
            |il: &Option<u32>| il.and_then(|il| self.layers.get(il as usize)).map_or(1, |&n| n);
        layers.iter().map(of).sum()
    }
}

/// A kernel.
#[derive(Clone, Debug)]
pub(super) struct Row {
    pub(super) op: String,
    /// The shader module, or `copy`.
    pub(super) kernel: String,
    /// Its specialization constants.
    pub(super) spec: Vec<u32>,
    pub(super) groups: [u32; 3],
    /// Launches of it in a pass of the large model.
    pub(super) count: u32,
    /// Nanoseconds of a launch.
    pub(super) ns: f64,
    /// Of the time of all kernels of a pass of the large model.
    pub(super) time_share: f64,
    /// Bytes per nanosecond.
    pub(super) gbps: f64,
    /// Operations per nanosecond.
    pub(super) gflops: f64,
    /// The least time that the device could take over the time taken; more than 1 with data in its
    /// caches. `None` for copies.
    pub(super) peak_share: Option<f64>,
    /// The engine chooses this one; else it is another tile.
    pub(super) is_chosen: bool,
}

/// The figures of all kernels, those that take most time first; other tiles behind the chosen one, fastest
/// first.
pub(super) fn rows(pass: &Pass, peaks: &Peaks, times: &OpTimes) -> Vec<Row> {
    let total: f64 = times.ops.iter().filter_map(|op| Some(op.ns? * counted(pass, op))).sum();
    let row = |op: &OpTime, is_chosen| {
        let ns = op.ns?;
        let flops_peak = if op.is_product { peaks.product_gflops() } else { peaks.f32_gflops };
        let least_ns = (op.cost.bytes / peaks.memory_gbps).max(op.cost.flops / flops_peak);
        Some(Row {
            op: op.op.clone(),
            kernel: op.kernel.as_ref().map_or("copy", |kernel| &kernel.module).to_owned(),
            spec: op.kernel.as_ref().map(|kernel| kernel.spec.clone()).unwrap_or_default(),
            groups: op.groups.to_array(),
            count: pass.count(&op.layers),
            ns,
            time_share: ns * counted(pass, op) / total,
            gbps: op.cost.bytes / ns,
            gflops: op.cost.flops / ns,
            peak_share: op.kernel.as_ref().map(|_| least_ns / ns),
            is_chosen,
        })
    };
    let mut chosen: Vec<Row> = times.ops.iter().filter_map(|op| row(op, true)).collect();
    chosen.sort_by(|a, b| b.time_share.total_cmp(&a.time_share));
    let mut others: Vec<Row> = times.others.iter().filter_map(|op| row(op, false)).collect();
    others.sort_by(|a, b| a.ns.total_cmp(&b.ns));
    let mut rows = Vec::new();
    for first in chosen {
        let (mut like, rest) = others
            .into_iter()
            .partition::<Vec<Row>, _>(|other| other.op == first.op && is_same_type(other, &first));
        others = rest;
        let at = like.partition_point(|other| other.ns < first.ns);
        like.insert(at, first);
        rows.append(&mut like);
    }
    // What is one op with the chosen kernels and several with others.
    rows.append(&mut others);
    rows
}

/// Kernels of one op for weights of the same type: `mul_mat.q4_k` and `mul_mat_cm.q4_k`.
fn is_same_type(a: &Row, b: &Row) -> bool {
    let ty = |row: &Row| row.kernel.split_once('.').map(|(_, ty)| ty.to_owned());
    ty(a) == ty(b)
}

fn counted(pass: &Pass, op: &OpTime) -> f64 {
    f64::from(pass.count(&op.layers))
}

/// Nanoseconds of all kernels of a pass of the large model.
pub(super) fn total_ns(rows: &[Row]) -> f64 {
    rows.iter().filter(|row| row.is_chosen).map(|row| row.ns * f64::from(row.count)).sum()
}

/// Nanoseconds of all kernels of the layers that were timed.
pub(super) fn kernels_ns(times: &OpTimes) -> f64 {
    times.ops.iter().filter_map(|op| Some(op.ns? * op.layers.len() as f64)).sum()
}

/// All fields with their values, for formats that programs read.
pub(super) fn fields(pass: &Pass, peaks: &Peaks, row: &Row) -> Vec<Field> {
    let matrix = peaks.matrix;
    vec![
        ("build_version", json!(env!("CARGO_PKG_VERSION"))),
        ("gpu_info", json!(pass.gpu)),
        ("model_type", json!(pass.model)),
        ("n_layer", json!(pass.n_layer())),
        ("n_prompt", json!(pass.test.n_prompt)),
        ("n_gen", json!(pass.test.n_gen)),
        ("n_depth", json!(pass.test.n_depth)),
        ("op", json!(row.op)),
        ("kernel", json!(row.kernel)),
        ("spec", json!(spec(row))),
        ("chosen", json!(u32::from(row.is_chosen))),
        ("groups", json!(row.groups.map(|n| n.to_string()).join("×"))),
        ("count", json!(row.count)),
        ("ns", json!(row.ns)),
        ("time_share", json!(row.time_share)),
        ("gbps", json!(row.gbps)),
        ("tflops", json!(row.gflops / 1e3)),
        ("peak_share", json!(row.peak_share)),
        ("pass_ns", json!(pass.pass_ns)),
        ("pass_kernels_ns", json!(pass.kernels_ns)),
        ("peak_memory_gbps", json!(peaks.memory_gbps)),
        ("peak_f32_tflops", json!(peaks.f32_gflops / 1e3)),
        ("peak_matrix_tflops", json!(matrix.map(|m| m.gflops / 1e3))),
        ("dispatch_ns", json!(peaks.dispatch_ns)),
    ]
}

/// Specialization constants, the workgroup size first.
pub(super) fn spec(row: &Row) -> String {
    row.spec.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
}
