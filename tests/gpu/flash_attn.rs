//! flash_attn with flash_attn_merge: prompts and single tokens, all head sizes, sharing factors, cache
//! types and options, against the textbook softmax in f64.

use crate::harness::{Gpu, fold, gpu};
use crate::reference::attention::Attention;
use crate::reference::kv::{ALL, KvType};
use crate::reference::random::Random;
use std::fmt::Debug;
use vkmoe::exec::attention::{AttentionKind, AttentionShape, AttentionTile, n_splits};
use vkmoe::exec::kv;
use vkmoe::push::{FlashAttn, FlashAttnCm, FlashAttnMerge};

pub(crate) const PLAIN: Case = Case {
    head: (64, 64),
    heads: (8, 2),
    types: (KvType::F32, KvType::F32),
    n_tokens: 1,
    n_kv: 100,
    n_splits: 1,
    window: 0,
    softcap: 0.0,
    sinks: false,
};

#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    /// HEAD_K, HEAD_V
    pub(crate) head: (usize, usize),
    /// n_head, n_kv_head
    pub(crate) heads: (usize, usize),
    pub(crate) types: (KvType, KvType),
    pub(crate) n_tokens: usize,
    /// Cells in use after these tokens.
    pub(crate) n_kv: usize,
    pub(crate) n_splits: u32,
    pub(crate) window: usize,
    pub(crate) softcap: f32,
    pub(crate) sinks: bool,
}

#[test]
fn head_sizes() {
    for head in
        [(32, 32), (40, 40), (64, 64), (72, 72), (80, 80), (128, 128), (256, 256), (192, 128)]
    {
        check(Case { head, n_kv: 77, ..PLAIN });
        check(Case { head, n_kv: 77, n_splits: 2, ..PLAIN });
    }
    check(Case { head: (256, 256), n_tokens: 33, n_kv: 40, ..PLAIN });
    check(Case { head: (72, 40), heads: (3, 1), n_tokens: 7, n_kv: 70, ..PLAIN });
}

#[test]
fn lengths_and_splits() {
    for n_kv in [1, 2, 8, 31, 32, 33, 64, 255, 1000] {
        for n_splits in [1, 2, 3, 8] {
            check(Case { n_kv, n_splits, ..PLAIN });
        }
    }
}

#[test]
fn tokens_and_shared_heads() {
    for heads in [(2, 2), (8, 2), (7, 1), (16, 1)] {
        for n_tokens in [1, 2, 7, 33, 130] {
            check(Case { heads, n_tokens, n_kv: n_tokens + 20, ..PLAIN });
        }
        check(Case { heads, n_tokens: 33, n_kv: 33, n_splits: 3, ..PLAIN });
    }
}

#[test]
fn cache_types() {
    for kv in ALL {
        check(Case { types: (kv, kv), head: (128, 128), n_kv: 150, ..PLAIN });
        check(Case { types: (kv, kv), head: (72, 72), n_kv: 50, ..PLAIN });
    }
    check(Case { types: (KvType::Q8_0, KvType::Q4_0), n_tokens: 7, ..PLAIN });
    check(Case { types: (KvType::F16, KvType::F32), n_tokens: 7, ..PLAIN });
}

#[test]
fn window_softcap_sinks() {
    for n_tokens in [1, 33] {
        for n_splits in [1, 4] {
            let case = Case { n_tokens, n_splits, n_kv: 300, ..PLAIN };
            for window in [1, 31, 128, 1000] {
                check(Case { window, ..case });
            }
            check(Case { softcap: 30.0, ..case });
            check(Case { softcap: 0.5, ..case });
            check(Case { sinks: true, ..case });
            check(Case { sinks: true, softcap: 2.0, window: 50, ..case });
        }
    }
}

#[test]
fn one_token_over_500_keys() {
    for heads in [(8, 8), (8, 2)] {
        let case = Case { heads, n_kv: 500, types: (KvType::F16, KvType::F16), ..PLAIN };
        check(Case { n_splits: n_splits(1, heads.1 as u32, 500), ..case });
    }
}

#[derive(Clone)]
pub(crate) struct Data {
    pub(crate) q: Vec<f32>,
    pub(crate) keys: Vec<u8>,
    pub(crate) values: Vec<u8>,
    pub(crate) sinks: Vec<f32>,
    pub(crate) positions: Vec<u32>,
}

impl Case {
    pub(crate) fn data(&self) -> Data {
        let mut random = Random((self.head.0 + self.n_kv) as u64);
        let mut cache = |kv: KvType, head_dim: usize, size: f32| -> Vec<u8> {
            let mut head =
                || -> Vec<f32> { random.units(head_dim).iter().map(|v| v * size).collect() };
            (0..self.n_kv * self.heads.1).flat_map(|_| kv.encode(&head())).collect()
        };
        let keys = cache(self.types.0, self.head.0, 2.0);
        let values = cache(self.types.1, self.head.1, 1.0);
        Data {
            keys,
            values,
            q: random
                .units(self.n_tokens * self.heads.0 * self.head.0)
                .iter()
                .map(|v| v * 2.0)
                .collect(),
            sinks: random.units(self.heads.0),
            positions: (self.n_kv - self.n_tokens..self.n_kv).map(|p| p as u32).collect(),
        }
    }

    pub(crate) fn attention(&self) -> Attention {
        Attention {
            n_head: self.heads.0,
            n_kv_head: self.heads.1,
            head_k: self.head.0,
            head_v: self.head.1,
            window: self.window,
            scale: 1.0 / (self.head.0 as f32).sqrt(),
            softcap: self.softcap,
        }
    }

    pub(crate) fn shape(&self) -> AttentionShape {
        let rows = (self.n_tokens * (self.heads.0 / self.heads.1)) as u32;
        AttentionShape { head_k: self.head.0 as u32, head_v: self.head.1 as u32, rows }
    }

    /// Keys' and values' types.
    pub(crate) fn types(&self) -> (kv::KvType, kv::KvType) {
        let engine = |ty| match ty {
            KvType::F32 => kv::KvType::F32,
            KvType::F16 => kv::KvType::F16,
            KvType::Q8_0 => kv::KvType::Q8_0,
            KvType::Q4_0 => kv::KvType::Q4_0,
        };
        (engine(self.types.0), engine(self.types.1))
    }

    /// The kernel with this tile, and the merge of splits.
    pub(crate) fn run(&self, gpu: &Gpu, data: &Data, tile: AttentionTile) -> Vec<f32> {
        let n_rows = self.n_tokens * self.heads.0;
        let sinks_buffer = gpu.upload(&data.sinks);
        let sinks = if self.sinks { sinks_buffer.address() } else { 0 };
        let push = FlashAttn {
            sinks,
            n_tokens: self.n_tokens as u32,
            n_head: self.heads.0 as u32,
            n_kv_head: self.heads.1 as u32,
            n_splits: self.n_splits,
            window: self.window as u32,
            scale: self.attention().scale,
            softcap: self.softcap,
            _pad: 0,
        };
        let (type_k, type_v) = self.types();
        let kind =
            AttentionKind { type_k, type_v, sinks: self.sinks, softcap: self.softcap != 0.0 };
        let kernel = tile.kernel(self.shape(), kind);
        let out = gpu.nans(n_rows * self.head.1);
        let partial = gpu.nans(self.n_splits as usize * n_rows * (self.head.1 + 2));
        let buffers = [
            &gpu.upload(&data.q),
            &gpu.upload(&data.keys),
            &gpu.upload(&data.values),
            &gpu.upload(&data.positions),
            &out,
            &partial,
        ];
        let grid = [self.shape().row_blocks(tile), self.heads.1 as u32, self.n_splits];
        match tile.matrix {
            None => gpu.run(&kernel.module, &kernel.spec, &push, &buffers, grid),
            Some(_) => {
                let push: FlashAttnCm = bytemuck::cast(push);
                gpu.run(&kernel.module, &kernel.spec, &push, &buffers, grid);
            }
        }
        if self.n_splits > 1 {
            let push = FlashAttnMerge {
                sinks,
                n_rows: n_rows as u32,
                n_head: self.heads.0 as u32,
                head_v: self.head.1 as u32,
                n_splits: self.n_splits,
            };
            let [x, y] = fold(push.n_rows);
            gpu.run(
                "flash_attn_merge",
                &[64, u32::from(self.sinks)],
                &push,
                &[&partial, &out],
                [x, y, 1],
            );
        }
        gpu.read(&out)
    }

    /// The twin's results, row by row.
    pub(crate) fn expected(&self, data: &Data) -> Vec<Vec<f64>> {
        let keys = self.types.0.decode_rows(&data.keys, self.head.0);
        let values = self.types.1.decode_rows(&data.values, self.head.1);
        let row = |(row, q): (usize, &[f32])| {
            let (token, head) = (row / self.heads.0, row % self.heads.0);
            let position = data.positions[token] as usize;
            let sink = self.sinks.then(|| data.sinks[head]);
            self.attention().row(q, head, position, &keys, &values, sink)
        };
        data.q.chunks_exact(self.head.0).enumerate().map(row).collect()
    }

    /// Each result is within `tolerance` of its row's largest. `on`: what found it.
    pub(crate) fn compare(
        &self,
        found: &[f32],
        expected: &[Vec<f64>],
        tolerance: f64,
        on: &dyn Debug,
    ) {
        for (row, (found, expected)) in found.chunks_exact(self.head.1).zip(expected).enumerate() {
            let (token, head) = (row / self.heads.0, row % self.heads.0);
            let largest = expected.iter().fold(0f64, |m, e| m.max(e.abs()));
            for (d, (f, e)) in found.iter().zip(expected).enumerate() {
                let good = (f64::from(*f) - e).abs() <= tolerance * largest;
                assert!(
                    good,
                    "{self:?}, {on:?}, token {token}, head {head}, dimension {d}: {f} is not {e}"
                );
            }
        }
    }

    /// Runs twice: each result within `tolerance` of its row's largest, and the same bits both times.
    pub(crate) fn check(&self, gpu: &Gpu, data: &Data, tile: AttentionTile, tolerance: f64) {
        let found = self.run(gpu, data, tile);
        self.compare(&found, &self.expected(data), tolerance, &tile);
        assert_eq!(self.run(gpu, data, tile), found, "{self:?}, {tile}: a second run differs");
    }
}

fn check(case: Case) {
    let gpu = gpu();
    let tile = case.shape().tile(32 / gpu.subgroups(32));
    case.check(&gpu, &case.data(), tile, 1e-5);
}
