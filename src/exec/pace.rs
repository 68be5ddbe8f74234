//! How much work goes into one submission. Pure.
//!
//! Watchdogs end work that runs for seconds (2 s on Windows and new amdgpu, 640 ms until preemption on
//! Intel), so a submission should take about [`TARGET_NS`]. Costs are estimated from operations and
//! bytes, and scaled by what earlier submissions took.

use crate::graph::{Graph, Op, Product};

/// Time that one submission should take.
pub const TARGET_NS: f64 = 50e6;
/// Speed assumed before anything was measured: that of a slow integrated GPU.
const FLOPS_PER_NS: f64 = 200.0;
const BYTES_PER_NS: f64 = 20.0;

/// Converts estimates into time.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Measured over estimated time.
    scale: f64,
}

impl Default for Pace {
    fn default() -> Self {
        Pace { scale: 1.0 }
    }
}

impl Pace {
    /// Expected time of an estimate.
    pub fn expected_ns(&self, estimate_ns: f64) -> f64 {
        estimate_ns * self.scale
    }

    /// Learns from a submission. Slower than expected counts at once, faster ones by and by, so that
    /// the next submission is not too long.
    pub fn learn(&mut self, estimate_ns: f64, measured_ns: f64) {
        // Short submissions measure the fixed costs only.
        if estimate_ns < 1e5 || !measured_ns.is_finite() {
            return;
        }
        let seen = (measured_ns / estimate_ns).clamp(1e-4, 1e4);
        self.scale = if seen > self.scale { seen } else { 0.7 * self.scale + 0.3 * seen };
    }

    /// Into how many submissions an op must be cut.
    pub fn parts(&self, estimate_ns: f64) -> u32 {
        (self.expected_ns(estimate_ns) / TARGET_NS).ceil().clamp(1.0, 1024.0) as u32
    }
}

/// What an op has to do, if nothing is done twice.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Multiplications and additions.
    pub flops: f64,
    /// Bytes read and written.
    pub bytes: f64,
}

/// Estimated time of an op at the assumed speed. `n_kv`: keys in the cache after this pass.
pub fn estimate_ns(graph: &Graph, op: &Op, n_kv: u32) -> f64 {
    let Cost { flops, bytes } = cost(graph, op, n_kv);
    flops / FLOPS_PER_NS + bytes / BYTES_PER_NS
}

/// What an op has to do. `n_kv` as above.
pub fn cost(graph: &Graph, op: &Op, n_kv: u32) -> Cost {
    let (reads, writes) = op.access();
    let moved: u64 = reads.iter().chain(&writes).map(|&t| graph.shape(t).bytes()).sum();
    let (flops, weight_bytes) = match *op {
        Op::MulMat { out: rows, .. }
        | Op::MulMats { products: [Some(Product { out: rows, .. }), ..], .. }
        | Op::MulMatId { out: rows, .. }
        | Op::GateUp { out: rows, .. }
        | Op::DownCombine { x: rows, .. }
        | Op::NormRouter { logits: rows, .. } => {
            let rows = f64::from(graph.shape(rows).rows);
            op.weights().fold((0.0, 0.0), |(flops, bytes), w| {
                let touched = rows.min(f64::from(w.n_expert));
                let elements = f64::from(w.n) * f64::from(w.k);
                (flops + 2.0 * rows * elements, bytes + touched * matrix_bytes(w))
            })
        }
        Op::Attention { attention: a, q, .. } | Op::DecodeAttention { attention: a, q, .. } => {
            let n_tokens = graph.shape(q).rows;
            let scores = f64::from(n_tokens) * f64::from(a.n_head) * seen(a.window, n_tokens, n_kv);
            let kv_bytes =
                f64::from(n_kv) * f64::from(a.n_head_kv) * f64::from(a.head_k + a.head_v);
            (2.0 * scores * f64::from(a.head_k + a.head_v), 2.0 * kv_bytes)
        }
        // Rows of the matrix, not all of it: as many bytes as elements, to within a factor of two.
        Op::GetRows { out, .. } => (0.0, graph.shape(out).bytes() as f64 / 4.0),
        _ => (0.0, 0.0),
    };
    Cost { flops, bytes: moved as f64 + weight_bytes }
}

/// Keys that a token sees on average.
fn seen(window: u32, n_tokens: u32, n_kv: u32) -> f64 {
    let causal = f64::from(n_kv) - f64::from(n_tokens.saturating_sub(1)) / 2.0;
    if window > 0 { causal.min(f64::from(window)) } else { causal }
}

fn matrix_bytes(w: crate::graph::Weight) -> f64 {
    let bytes_each = w.ty.block_bytes() as f64 / w.ty.block_len() as f64;
    f64::from(w.n) * f64::from(w.k) * bytes_each
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_devices_get_shorter_submissions_at_once() {
        let mut pace = Pace::default();
        assert_eq!(pace.parts(TARGET_NS), 1);
        pace.learn(TARGET_NS, 8.0 * TARGET_NS);
        assert_eq!(pace.parts(TARGET_NS), 8);
    }

    #[test]
    fn a_causal_pass_sees_half_of_its_own_keys() {
        assert_eq!(seen(0, 1, 100), 100.0);
        assert_eq!(seen(0, 101, 101), 51.0);
        assert_eq!(seen(16, 101, 101), 16.0);
    }

    #[test]
    fn fast_devices_get_longer_ones_by_and_by() {
        let mut pace = Pace::default();
        for _ in 0..20 {
            pace.learn(TARGET_NS, TARGET_NS / 100.0);
        }
        assert_eq!(pace.parts(50.0 * TARGET_NS), 1);
        pace.learn(1.0, 1e9);
        assert_eq!(pace.parts(50.0 * TARGET_NS), 1, "tiny submissions teach nothing");
    }
}
