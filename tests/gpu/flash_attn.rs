//! flash_attn with flash_attn_merge: prompts and single tokens, all head sizes, sharing factors, cache
//! types and options, against the textbook softmax in f64.

use crate::harness::{fold, gpu};
use crate::reference::attention::Attention;
use crate::reference::kv::{ALL, KvType};
use crate::reference::random::Random;
use vkmoe::exec::attention::{AttentionShape, n_splits};
use vkmoe::push::{FlashAttn, FlashAttnMerge};

const PLAIN: Case = Case {
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
struct Case {
    /// HEAD_K, HEAD_V
    head: (usize, usize),
    /// n_head, n_kv_head
    heads: (usize, usize),
    types: (KvType, KvType),
    n_tokens: usize,
    /// Cells in use after these tokens.
    n_kv: usize,
    n_splits: u32,
    window: usize,
    softcap: f32,
    sinks: bool,
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

struct Data {
    q: Vec<f32>,
    keys: Vec<u8>,
    values: Vec<u8>,
    sinks: Vec<f32>,
    positions: Vec<u32>,
}

impl Case {
    fn data(&self) -> Data {
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

    fn attention(&self) -> Attention {
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

    fn run(&self, data: &Data) -> Vec<f32> {
        let gpu = gpu();
        let n_rows = self.n_tokens * self.heads.0;
        let rows = (self.n_tokens * (self.heads.0 / self.heads.1)) as u32;
        let shape = AttentionShape { head_k: self.head.0 as u32, head_v: self.head.1 as u32, rows };
        let tile = shape.tile(32 / gpu.subgroups(32));
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
        let types = [self.types.0 as u32, self.types.1 as u32];
        let spec = [
            tile.local_size,
            shape.head_k,
            shape.head_v,
            types[0],
            types[1],
            tile.rows,
            tile.keys,
            u32::from(self.sinks),
        ];
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
        let grid = [shape.row_blocks(tile), self.heads.1 as u32, self.n_splits];
        gpu.run("flash_attn", &spec, &push, &buffers, grid);
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
}

fn check(case: Case) {
    let data = case.data();
    let decode = |kv: KvType, bytes: &[u8], head_dim: usize| -> Vec<f32> {
        bytes
            .chunks_exact(kv.row_bytes(head_dim))
            .flat_map(|row| kv.decode(row, head_dim))
            .collect()
    };
    let keys = decode(case.types.0, &data.keys, case.head.0);
    let values = decode(case.types.1, &data.values, case.head.1);
    let found = case.run(&data);
    let attention = case.attention();
    for (row, (q, found)) in
        data.q.chunks_exact(case.head.0).zip(found.chunks_exact(case.head.1)).enumerate()
    {
        let (token, head) = (row / case.heads.0, row % case.heads.0);
        let position = data.positions[token] as usize;
        let sink = case.sinks.then(|| data.sinks[head]);
        let expected = attention.row(q, head, position, &keys, &values, sink);
        let largest = expected.iter().fold(0f64, |m, e| m.max(e.abs()));
        for (d, (f, e)) in found.iter().zip(expected).enumerate() {
            let good = (f64::from(*f) - e).abs() <= 1e-5 * largest;
            assert!(good, "{case:?}, token {token}, head {head}, dimension {d}: {f} is not {e}");
        }
    }
    assert_eq!(case.run(&data), found, "{case:?}: a second run differs");
}
