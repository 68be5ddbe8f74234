//! Twin of flash_attn with flash_attn_merge: the textbook softmax, in f64.

/// All that a result depends on but the data.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attention {
    pub(crate) n_head: usize,
    pub(crate) n_kv_head: usize,
    pub(crate) head_k: usize,
    pub(crate) head_v: usize,
    /// 0 = none
    pub(crate) window: usize,
    pub(crate) scale: f32,
    /// 0 = none
    pub(crate) softcap: f32,
}

impl Attention {
    /// One row. q: [head_k]; keys: [n_kv][n_kv_head][head_k]; values likewise.
    pub(crate) fn row(
        &self,
        q: &[f32],
        head: usize,
        position: usize,
        keys: &[f32],
        values: &[f32],
        sink: Option<f32>,
    ) -> Vec<f64> {
        let kv_head = head / (self.n_head / self.n_kv_head);
        let first = if self.window == 0 { 0 } else { (position + 1).saturating_sub(self.window) };
        let scores: Vec<f64> = (first..=position)
            .map(|cell| self.score(q, &keys[(cell * self.n_kv_head + kv_head) * self.head_k..]))
            .collect();
        let sink = sink.map(f64::from);
        let most = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
        let sum = scores.iter().copied().chain(sink).map(|s| (s - most).exp()).sum::<f64>();
        let mut out = vec![0.0; self.head_v];
        for (cell, score) in (first..).zip(&scores) {
            let weight = (score - most).exp() / sum;
            let value = &values[(cell * self.n_kv_head + kv_head) * self.head_v..];
            out.iter_mut().zip(value).for_each(|(o, &v)| *o += weight * f64::from(v));
        }
        out
    }

    fn score(&self, q: &[f32], key: &[f32]) -> f64 {
        let dot = q.iter().zip(key).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>();
        let (s, cap) = (dot * f64::from(self.scale), f64::from(self.softcap));
        if cap == 0.0 { s } else { cap * (s / cap).tanh() }
    }
}
