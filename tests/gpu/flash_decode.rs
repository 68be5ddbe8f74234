//! flash_decode: norms, rotation, stores and attention in one, all head sizes, sharing factors, cache types,
//! splits and options, against their twins.

use crate::harness::{Checked, gpu};
use crate::reference::attention::Attention;
use crate::reference::kv::{ALL, KvType};
use crate::reference::random::Random;
use crate::reference::rows::{Pairing, rms_norm, rope};
use vkmoe::exec::attention::AttentionShape;
use vkmoe::exec::decode_attention::{DecodeAttention, DecodeTile};
use vkmoe::push::FlashDecode;

const EPS: f32 = 1e-6;
const MSCALE: f32 = 1.25;

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
    /// Norms of q and k.
    norms: (bool, bool),
    /// Pairing, n_rot, rot_offset.
    rope: Option<(Pairing, usize, usize)>,
    sizes: DecodeAttention,
}

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
    norms: (true, true),
    rope: Some((Pairing::Halves, 64, 0)),
    // The subgroup is the device's.
    sizes: DecodeAttention { subgroup: 0, subgroups: 2, rows: 4, keys: 1, cells: 64, enough: 0 },
};

/// Heads that are not turned and have no norm.
const BARE: Case = Case { norms: (false, false), rope: None, ..PLAIN };

#[test]
fn head_sizes() {
    for head in [(8, 8), (32, 32), (40, 40), (72, 72), (128, 128), (256, 256), (192, 128)] {
        let rope = Some((Pairing::Halves, head.0, 0));
        check(Case { head, n_kv: 37, rope, ..PLAIN });
        check(Case { head, n_kv: 77, n_splits: 3, ..BARE });
    }
}

#[test]
fn lengths_and_splits() {
    for n_kv in [1, 2, 8, 31, 33, 255, 700] {
        for n_splits in [1, 2, 8, 64] {
            check(Case { n_kv, n_splits, ..PLAIN });
        }
    }
}

#[test]
fn tokens_and_shared_heads() {
    for heads in [(2, 2), (8, 2), (7, 1), (16, 1), (3, 3)] {
        for n_tokens in [1, 2, 5, 8] {
            check(Case { heads, n_tokens, n_kv: n_tokens + 20, n_splits: 2, ..PLAIN });
            check(Case { heads, n_tokens, n_kv: n_tokens, ..PLAIN });
        }
    }
}

#[test]
fn cache_types() {
    for kv in ALL {
        let case = Case { types: (kv, kv), n_tokens: 3, n_kv: 70, ..PLAIN };
        check(case);
        check(Case { head: (72, 40), n_splits: 2, rope: None, ..case });
        check(Case { heads: (16, 2), ..case });
    }
    check(Case { types: (KvType::Q8_0, KvType::Q4_0), n_tokens: 2, ..PLAIN });
    check(Case { types: (KvType::F16, KvType::F32), ..PLAIN });
}

#[test]
fn norms_and_rotations() {
    let ropes = [
        None,
        Some((Pairing::Adjacent, 64, 0)),
        Some((Pairing::Adjacent, 24, 40)),
        Some((Pairing::Halves, 24, 0)),
        Some((Pairing::Halves, 32, 16)),
    ];
    for rope in ropes {
        for norms in [(false, false), (true, false), (false, true), (true, true)] {
            check(Case { rope, norms, n_tokens: 2, n_kv: 12, ..PLAIN });
        }
    }
}

#[test]
fn window_softcap_sinks() {
    for n_tokens in [1, 4] {
        for n_splits in [1, 4] {
            let case = Case { n_tokens, n_splits, n_kv: 200, ..PLAIN };
            for window in [1, 31, 128, 1000] {
                check(Case { window, ..case });
            }
            check(Case { softcap: 0.5, ..case });
            check(Case { sinks: true, ..case });
            check(Case { sinks: true, softcap: 2.0, window: 50, ..case });
        }
    }
}

#[test]
fn other_sizes() {
    for (subgroups, rows, keys) in [(1, 8, 1), (4, 1, 2), (3, 16, 1), (2, 3, 3)] {
        let sizes = DecodeAttention { subgroups, rows, keys, ..PLAIN.sizes };
        for heads in [(16, 1), (6, 2)] {
            check(Case { sizes, heads, n_splits: 2, n_tokens: 2, n_kv: 90, ..PLAIN });
        }
    }
}

/// Rows, subgroups, keys and cells of GPUs.
#[test]
fn large_workgroups() {
    let sizes = DecodeAttention { subgroups: 8, rows: 8, keys: 2, cells: 512, ..PLAIN.sizes };
    let rope = Some((Pairing::Halves, 128, 0));
    let case = Case { head: (128, 128), rope, types: (F16, F16), sizes, ..PLAIN };
    for n_kv in [1, 40, 1100] {
        check(Case { heads: (16, 2), n_kv, n_splits: 2, ..case });
        check(Case { heads: (16, 2), n_kv, ..case });
    }
}

/// Heads so short that a subgroup has several groups of lanes, each with fewer lanes than rows.
const SHORT: Case =
    Case { head: (16, 16), rope: Some((Pairing::Halves, 16, 0)), types: (F16, F16), ..PLAIN };
const F16: KvType = KvType::F16;

#[test]
fn chunks_and_their_borders() {
    let sizes = |cells, keys| DecodeAttention { cells, keys, rows: 8, ..PLAIN.sizes };
    for (cells, keys, case) in [(1, 1, SHORT), (24, 2, SHORT), (12, 3, SHORT), (16, 2, BARE)] {
        let case = Case { sizes: sizes(cells, keys), ..case };
        for n_kv in [1, 15, 16, 17, 24, 25, 26, 32, 33, 49, 130] {
            check(Case { n_kv, ..case });
            check(Case { n_kv: n_kv + 7, n_tokens: 8, n_splits: 3, ..case });
        }
        check(Case { n_kv: 333, n_splits: 5, softcap: 2.0, ..case });
    }
}

#[test]
fn chunks_that_some_rows_do_not_see() {
    let sizes = DecodeAttention { cells: 4, rows: 8, ..PLAIN.sizes };
    for n_splits in [1, 3] {
        for window in [1, 2, 7, 8, 9, 20, 64] {
            // Eight tokens, one row each; or four heads each.
            let case = Case { n_tokens: 8, window, n_splits, sizes, ..SHORT };
            check(Case { heads: (2, 2), n_kv: 90, ..case });
            check(Case { n_kv: 41, sinks: true, ..case });
        }
    }
}

#[test]
fn all_numbers_of_rows() {
    for rows in 1..=8 {
        let sizes = DecodeAttention { rows: rows as u32, cells: 16, ..PLAIN.sizes };
        // As the rows of one head, and as blocks, the last of which may be short.
        let case = Case { n_kv: 50, sizes, ..SHORT };
        check(Case { heads: (rows, 1), n_splits: 2, ..case });
        check(Case { heads: (11, 1), n_tokens: 2, ..case });
    }
    for rows in [5, 8] {
        let sizes = DecodeAttention { rows: rows as u32, ..PLAIN.sizes };
        check(Case { heads: (rows, 1), sizes, ..PLAIN });
    }
}

struct Data {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    norms: [Vec<f32>; 2],
    freqs: Vec<f32>,
    sinks: Vec<f32>,
    keys: Vec<u8>,
    values: Vec<u8>,
}

struct Found {
    out: Vec<f32>,
    keys: Vec<u8>,
    values: Vec<u8>,
}

impl Case {
    fn data(&self) -> Data {
        let mut random = Random((self.head.0 + self.n_kv) as u64);
        let mut units = |n: usize| random.units(n);
        let (n_head, n_kv_head) = self.heads;
        let double = |v: Vec<f32>| -> Vec<f32> { v.iter().map(|v| v * 2.0).collect() };
        let q = double(units(self.n_tokens * n_head * self.head.0));
        let k = double(units(self.n_tokens * n_kv_head * self.head.0));
        let v = units(self.n_tokens * n_kv_head * self.head.1);
        let norms = [units(self.head.0), units(self.head.0)];
        let sinks = units(n_head);
        let n_rot = self.rope.map_or(0, |(_, n_rot, _)| n_rot);
        let mut cache = |kv: KvType, head: usize| -> Vec<u8> {
            (0..self.n_kv * n_kv_head).flat_map(|_| kv.encode(&units(head))).collect()
        };
        let (keys, values) = (cache(self.types.0, self.head.0), cache(self.types.1, self.head.1));
        let freqs = (0..n_rot / 2).map(|i| 1.0 / (1.0 + i as f32)).collect();
        Data { q, k, v, norms, freqs, sinks, keys, values }
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

    fn first_position(&self) -> usize {
        self.n_kv - self.n_tokens
    }

    /// A head of q or k as attention sees it.
    fn prepared(
        &self,
        head: &[f32],
        norm: Option<&[f32]>,
        freqs: &[f32],
        token: usize,
    ) -> Vec<f32> {
        let to_f32 = |row: Vec<f64>| row.into_iter().map(|v| v as f32).collect::<Vec<f32>>();
        let normed = norm.map_or(head.to_vec(), |w| to_f32(rms_norm(head, Some(w), EPS)));
        let Some((pairing, _, offset)) = self.rope else { return normed };
        let position = (self.first_position() + token) as u32;
        to_f32(rope(&normed, freqs, offset, pairing, position, MSCALE))
    }

    fn tile(&self, gpu: &Checked) -> DecodeTile {
        let sizes = DecodeAttention { subgroup: 32 / gpu.subgroups(32), ..self.sizes };
        let rows = (self.n_tokens * (self.heads.0 / self.heads.1)) as u32;
        let shape = AttentionShape { head_k: self.head.0 as u32, head_v: self.head.1 as u32, rows };
        sizes.tile(shape, self.n_tokens as u32).unwrap()
    }

    fn spec(&self, tile: DecodeTile) -> Vec<u32> {
        let rope = match self.rope {
            None => 0,
            Some((Pairing::Adjacent, ..)) => 1,
            Some((Pairing::Halves, ..)) => 2,
        };
        vec![
            tile.local,
            self.head.0 as u32,
            self.head.1 as u32,
            self.types.0 as u32,
            self.types.1 as u32,
            tile.rows,
            tile.lanes,
            tile.keys,
            tile.cells,
            tile.n_tokens,
            tile.subgroups,
            tile.join_rows,
            u32::from(self.sinks),
            u32::from(self.norms.0),
            u32::from(self.norms.1),
            rope,
        ]
    }

    fn run(&self, data: &Data) -> Found {
        let gpu = gpu();
        let tile = self.tile(&gpu);
        let (_, n_rot, rot_offset) = self.rope.unwrap_or((Pairing::Halves, 0, 0));
        let [q_norm, k_norm, freqs, sinks] =
            [&data.norms[0], &data.norms[1], &data.freqs, &data.sinks].map(|v| gpu.upload(v));
        let address =
            |has: bool, buffer: &vkmoe::vk::Buffer| if has { buffer.address() } else { 0 };
        let push = FlashDecode {
            sinks: address(self.sinks, &sinks),
            q_norm: address(self.norms.0, &q_norm),
            k_norm: address(self.norms.1, &k_norm),
            freqs: address(n_rot > 0, &freqs),
            n_tokens: self.n_tokens as u32,
            n_head: self.heads.0 as u32,
            n_kv_head: self.heads.1 as u32,
            n_splits: self.n_splits,
            window: self.window as u32,
            scale: self.attention().scale,
            softcap: self.softcap,
            eps: EPS,
            n_rot: n_rot as u32,
            rot_offset: rot_offset as u32,
            mscale: MSCALE,
            _pad: 0,
        };
        let positions: Vec<u32> = (self.first_position()..self.n_kv).map(|p| p as u32).collect();
        let n_rows = self.n_tokens * self.heads.0;
        let out = gpu.nans(n_rows * self.head.1);
        let partial = gpu.nans(self.n_splits as usize * n_rows * (self.head.1 + 2));
        let (keys, values) = (gpu.upload(&data.keys), gpu.upload(&data.values));
        let counters = gpu.zeros::<u32>(1 + (tile.row_blocks as usize) * self.heads.1);
        let buffers = [
            &gpu.upload(&data.q),
            &gpu.upload(&data.k),
            &gpu.upload(&data.v),
            &keys,
            &values,
            &gpu.upload(&positions),
            &out,
            &partial,
            &counters,
        ];
        let grid = [tile.row_blocks, self.heads.1 as u32, self.n_splits];
        gpu.run("flash_decode", &self.spec(tile), &push, &buffers, grid);
        assert!(gpu.read::<u32>(&counters).iter().all(|&counter| counter == 0));
        Found { out: gpu.read(&out), keys: gpu.read(&keys), values: gpu.read(&values) }
    }
}

fn check(case: Case) {
    let data = case.data();
    let found = case.run(&data);
    let (head_k, head_v) = case.head;
    let (n_head, n_kv_head) = case.heads;
    let norm = |which: usize, has: bool| has.then_some(&data.norms[which][..]);

    let new_k = data.k.chunks_exact(head_k).enumerate().flat_map(|(i, head)| {
        case.prepared(head, norm(1, case.norms.1), &data.freqs, i / n_kv_head)
    });
    let new_k: Vec<f32> = new_k.collect();
    let keys = check_cache(&case, case.types.0, head_k, &data.keys, &found.keys, &new_k);
    let values = check_cache(&case, case.types.1, head_v, &data.values, &found.values, &data.v);

    let attention = case.attention();
    let rows = data.q.chunks_exact(head_k).zip(found.out.chunks_exact(head_v));
    for (row, (q, found)) in rows.enumerate() {
        let (token, head) = (row / n_head, row % n_head);
        let q = case.prepared(q, norm(0, case.norms.0), &data.freqs, token);
        let sink = case.sinks.then(|| data.sinks[head]);
        let position = case.first_position() + token;
        let expected = attention.row(&q, head, position, &keys, &values, sink);
        let largest = expected.iter().fold(0f64, |m, e| m.max(e.abs()));
        for (d, (f, e)) in found.iter().zip(expected).enumerate() {
            let good = (f64::from(*f) - e).abs() <= 2e-5 * largest;
            assert!(good, "{case:?}, token {token}, head {head}, dimension {d}: {f} is not {e}");
        }
    }
    assert_eq!(case.run(&data).out, found.out, "{case:?}: a second run differs");
}

/// Old cells are as they were, and new ones hold the new heads. Returns what the cache then means.
fn check_cache(
    case: &Case,
    kv: KvType,
    head: usize,
    before: &[u8],
    after: &[u8],
    new: &[f32],
) -> Vec<f32> {
    let row_bytes = kv.row_bytes(head);
    let old = case.first_position() * case.heads.1 * row_bytes;
    assert_eq!(before[..old], after[..old], "{case:?}: old cells");
    for (row, (head, found)) in
        new.chunks_exact(head).zip(after[old..].chunks_exact(row_bytes)).enumerate()
    {
        let expected = kv.decode(&kv.encode(head), head.len());
        let most = head.iter().fold(0f32, |m, v| m.max(v.abs()));
        // One step of the type, for what is rounded the other way.
        let step = most * [1e-6, 1e-3, 1.0 / 120.0, 1.0 / 7.0][kv as usize];
        for (f, e) in kv.decode(found, head.len()).into_iter().zip(expected) {
            assert!((f - e).abs() <= step, "{case:?}, new row {row}: {f} is not {e}");
        }
    }
    after[..before.len()].chunks_exact(row_bytes).flat_map(|row| kv.decode(row, head)).collect()
}
