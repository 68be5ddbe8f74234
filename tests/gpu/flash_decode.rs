//! flash_decode: norms, rotation, stores and attention in one, all head sizes, sharing factors, cache types,
//! splits and options, against their twins.

use crate::flash_attn::{self, Case, PLAIN};
use crate::harness::{Checked, gpu};
use crate::reference::kv::{ALL, KvType};
use crate::reference::random::Random;
use crate::reference::rows::{Pairing, rms_norm, rope};
use vkmoe::exec::decode_attention::{CellSizes, DecodeAttention, DecodeTile};
use vkmoe::push::FlashDecode;

const EPS: f32 = 1e-6;
const MSCALE: f32 = 1.25;

/// What comes before attention, and the kernel's sizes.
#[derive(Clone, Copy, Debug)]
struct Heads {
    /// Norms of q and k.
    norms: (bool, bool),
    /// Pairing, n_rot, rot_offset.
    rope: Option<(Pairing, usize, usize)>,
    sizes: DecodeAttention,
}

const CELLS: CellSizes = CellSizes { runs: 2, keys: 2 };

const HEADS: Heads = Heads {
    norms: (true, true),
    rope: Some((Pairing::Halves, 64, 0)),
    // The subgroup is the device's.
    sizes: DecodeAttention { subgroup: 0, rows: 4, short: CELLS, long: CELLS, enough: 0 },
};

fn sizes(rows: u32, runs: u32, keys: u32) -> DecodeAttention {
    let cells = CellSizes { runs, keys };
    DecodeAttention { rows, short: cells, long: cells, ..HEADS.sizes }
}

/// Heads that are not turned and have no norm.
const BARE: Heads = Heads { norms: (false, false), rope: None, ..HEADS };

#[test]
fn head_sizes() {
    for head in [(8, 8), (32, 32), (40, 40), (72, 72), (128, 128), (256, 256), (192, 128)] {
        let rope = Some((Pairing::Halves, head.0, 0));
        check(Case { head, n_kv: 37, ..PLAIN }, Heads { rope, ..HEADS });
        check(Case { head, n_kv: 77, n_splits: 3, ..PLAIN }, BARE);
    }
}

#[test]
fn lengths_and_splits() {
    for n_kv in [1, 2, 8, 31, 33, 255, 700] {
        for n_splits in [1, 2, 8, 64] {
            check(Case { n_kv, n_splits, ..PLAIN }, HEADS);
        }
    }
}

#[test]
fn tokens_and_shared_heads() {
    for heads in [(2, 2), (8, 2), (7, 1), (16, 1), (3, 3)] {
        for n_tokens in [1, 2, 5, 8] {
            check(Case { heads, n_tokens, n_kv: n_tokens + 20, n_splits: 2, ..PLAIN }, HEADS);
            check(Case { heads, n_tokens, n_kv: n_tokens, ..PLAIN }, HEADS);
        }
    }
}

#[test]
fn cache_types() {
    for kv in ALL {
        let case = Case { types: (kv, kv), n_tokens: 3, n_kv: 70, ..PLAIN };
        check(case, HEADS);
        check(Case { head: (72, 40), n_splits: 2, ..case }, Heads { rope: None, ..HEADS });
        check(Case { heads: (16, 2), ..case }, HEADS);
    }
    check(Case { types: (KvType::Q8_0, KvType::Q4_0), n_tokens: 2, ..PLAIN }, HEADS);
    check(Case { types: (KvType::F16, KvType::F32), ..PLAIN }, HEADS);
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
            check(Case { n_tokens: 2, n_kv: 12, ..PLAIN }, Heads { rope, norms, ..HEADS });
        }
    }
}

#[test]
fn window_softcap_sinks() {
    for n_tokens in [1, 4] {
        for n_splits in [1, 4] {
            let case = Case { n_tokens, n_splits, n_kv: 200, ..PLAIN };
            for window in [1, 31, 128, 1000] {
                check(Case { window, ..case }, HEADS);
            }
            check(Case { softcap: 0.5, ..case }, HEADS);
            check(Case { sinks: true, ..case }, HEADS);
            check(Case { sinks: true, softcap: 2.0, window: 50, ..case }, HEADS);
        }
    }
}

#[test]
fn other_sizes() {
    for (rows, runs, keys) in [(8, 1, 1), (1, 4, 2), (16, 8, 1), (3, 3, 3)] {
        let sizes = sizes(rows, runs, keys);
        for heads in [(16, 1), (6, 2)] {
            let case = Case { heads, n_splits: 2, n_tokens: 2, n_kv: 90, ..PLAIN };
            check(case, Heads { sizes, ..HEADS });
        }
    }
}

/// Rows, runs and keys of GPUs.
#[test]
fn large_workgroups() {
    let sizes = sizes(8, 4, 1);
    let of = Heads { rope: Some((Pairing::Halves, 128, 0)), sizes, ..HEADS };
    let case = Case { head: (128, 128), heads: (16, 2), types: (F16, F16), ..PLAIN };
    for n_kv in [1, 40, 1100] {
        check(Case { n_kv, n_splits: 2, ..case }, of);
        check(Case { n_kv, ..case }, of);
    }
}

/// Heads so short that a subgroup has several groups of lanes.
const SHORT: Case = Case { head: (16, 16), types: (F16, F16), ..PLAIN };
const F16: KvType = KvType::F16;

/// Those heads, prepared.
fn short(sizes: DecodeAttention) -> Heads {
    Heads { rope: Some((Pairing::Halves, 16, 0)), sizes, ..HEADS }
}

#[test]
fn rounds_and_their_borders() {
    for (keys, case) in [(1, SHORT), (2, SHORT), (3, SHORT), (2, PLAIN)] {
        let of = short(sizes(8, 2, keys));
        for n_kv in [1, 15, 16, 17, 24, 25, 26, 32, 33, 49, 130] {
            check(Case { n_kv, ..case }, of);
            check(Case { n_kv: n_kv + 7, n_tokens: 8, n_splits: 3, ..case }, of);
        }
        check(Case { n_kv: 333, n_splits: 5, softcap: 2.0, ..case }, of);
    }
}

#[test]
fn rounds_that_some_rows_do_not_see() {
    let of = short(sizes(8, 2, 1));
    for n_splits in [1, 3] {
        for window in [1, 2, 7, 8, 9, 20, 64] {
            // Eight tokens, one row each; or four heads each.
            let case = Case { n_tokens: 8, window, n_splits, ..SHORT };
            check(Case { heads: (2, 2), n_kv: 90, ..case }, of);
            check(Case { n_kv: 41, sinks: true, ..case }, of);
        }
    }
}

#[test]
fn all_numbers_of_rows() {
    for rows in 1..=8 {
        let of = short(sizes(rows as u32, 2, 2));
        // As the rows of one head, and as blocks, the last of which may be short.
        let case = Case { n_kv: 50, ..SHORT };
        check(Case { heads: (rows, 1), n_splits: 2, ..case }, of);
        check(Case { heads: (11, 1), n_tokens: 2, ..case }, of);
        check(Case { heads: (rows, 1), ..PLAIN }, of);
    }
}

/// Of a case, and what it is computed from.
struct Data {
    cached: flash_attn::Data,
    k: Vec<f32>,
    v: Vec<f32>,
    norms: [Vec<f32>; 2],
    freqs: Vec<f32>,
}

struct Found {
    out: Vec<f32>,
    keys: Vec<u8>,
    values: Vec<u8>,
}

#[derive(Clone, Copy, Debug)]
struct Fused {
    case: Case,
    heads: Heads,
}

impl Fused {
    fn data(&self) -> Data {
        let Case { head, heads, n_tokens, n_kv, .. } = self.case;
        let mut random = Random((2 * head.0 + n_kv) as u64);
        let mut units = |n: usize| random.units(n);
        let n_rot = self.heads.rope.map_or(0, |(_, n_rot, _)| n_rot);
        Data {
            cached: self.case.data(),
            k: units(n_tokens * heads.1 * head.0).iter().map(|v| v * 2.0).collect(),
            v: units(n_tokens * heads.1 * head.1),
            norms: [units(head.0), units(head.0)],
            freqs: (0..n_rot / 2).map(|i| 1.0 / (1.0 + i as f32)).collect(),
        }
    }

    fn first_position(&self) -> usize {
        self.case.n_kv - self.case.n_tokens
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
        let Some((pairing, _, offset)) = self.heads.rope else { return normed };
        let position = (self.first_position() + token) as u32;
        to_f32(rope(&normed, freqs, offset, pairing, position, MSCALE))
    }

    fn tile(&self, gpu: &Checked) -> DecodeTile {
        let sizes = DecodeAttention { subgroup: 32 / gpu.subgroups(32), ..self.heads.sizes };
        sizes.tile(self.case.shape(), self.case.n_tokens as u32, true).unwrap()
    }

    fn spec(&self, tile: DecodeTile) -> Vec<u32> {
        let rope = match self.heads.rope {
            None => 0,
            Some((Pairing::Adjacent, ..)) => 1,
            Some((Pairing::Halves, ..)) => 2,
        };
        vec![
            tile.local,
            self.case.head.0 as u32,
            self.case.head.1 as u32,
            self.case.types.0 as u32,
            self.case.types.1 as u32,
            tile.rows,
            tile.lanes,
            tile.keys,
            tile.n_tokens,
            u32::from(self.case.sinks),
            u32::from(self.heads.norms.0),
            u32::from(self.heads.norms.1),
            rope,
        ]
    }

    fn run(&self, data: &Data) -> Found {
        let gpu = gpu();
        let tile = self.tile(&gpu);
        let (_, n_rot, rot_offset) = self.heads.rope.unwrap_or((Pairing::Halves, 0, 0));
        let [q_norm, k_norm, freqs, sinks] =
            [&data.norms[0], &data.norms[1], &data.freqs, &data.cached.sinks]
                .map(|v| gpu.upload(v));
        let address =
            |has: bool, buffer: &vkmoe::vk::Buffer| if has { buffer.address() } else { 0 };
        let push = FlashDecode {
            sinks: address(self.case.sinks, &sinks),
            q_norm: address(self.heads.norms.0, &q_norm),
            k_norm: address(self.heads.norms.1, &k_norm),
            freqs: address(n_rot > 0, &freqs),
            n_tokens: self.case.n_tokens as u32,
            n_head: self.case.heads.0 as u32,
            n_kv_head: self.case.heads.1 as u32,
            n_splits: self.case.n_splits,
            window: self.case.window as u32,
            scale: self.case.attention().scale,
            softcap: self.case.softcap,
            eps: EPS,
            n_rot: n_rot as u32,
            rot_offset: rot_offset as u32,
            mscale: MSCALE,
            _pad: 0,
        };
        let n_rows = self.case.n_tokens * self.case.heads.0;
        let out = gpu.nans(n_rows * self.case.head.1);
        let partial = gpu.nans(self.case.n_splits as usize * n_rows * (self.case.head.1 + 2));
        let (keys, values) = (gpu.upload(&data.cached.keys), gpu.upload(&data.cached.values));
        let counters = gpu.zeros::<u32>(1 + (tile.row_blocks as usize) * self.case.heads.1);
        let buffers = [
            &gpu.upload(&data.cached.q),
            &gpu.upload(&data.k),
            &gpu.upload(&data.v),
            &keys,
            &values,
            &gpu.upload(&data.cached.positions),
            &out,
            &partial,
            &counters,
        ];
        let grid = [tile.row_blocks, self.case.heads.1 as u32, self.case.n_splits];
        gpu.run("flash_decode", &self.spec(tile), &push, &buffers, grid);
        assert!(gpu.read::<u32>(&counters).iter().all(|&counter| counter == 0));
        Found { out: gpu.read(&out), keys: gpu.read(&keys), values: gpu.read(&values) }
    }
}

fn check(case: Case, heads: Heads) {
    let fused = Fused { case, heads };
    let data = fused.data();
    let found = fused.run(&data);
    let norm = |which: usize, has: bool| has.then_some(&data.norms[which][..]);
    let prepared = |of: &[f32], n_heads: usize, norm: Option<&[f32]>| -> Vec<f32> {
        let heads = of.chunks_exact(case.head.0).enumerate();
        heads.flat_map(|(i, head)| fused.prepared(head, norm, &data.freqs, i / n_heads)).collect()
    };
    let q = prepared(&data.cached.q, case.heads.0, norm(0, heads.norms.0));
    let k = prepared(&data.k, case.heads.1, norm(1, heads.norms.1));
    check_cache(&fused, case.types.0, case.head.0, &data.cached.keys, &found.keys, &k);
    check_cache(&fused, case.types.1, case.head.1, &data.cached.values, &found.values, &data.v);

    // From what the cache then has.
    let Found { out, keys, values } = found;
    let flash_attn::Data { sinks, positions, .. } = data.cached.clone();
    let expected = case.expected(&flash_attn::Data { q, keys, values, sinks, positions });
    case.compare(&out, &expected, 2e-5, &heads);
    assert_eq!(fused.run(&data).out, out, "{fused:?}: a second run differs");
}

/// Old cells are as they were, and new ones hold the new heads.
fn check_cache(fused: &Fused, kv: KvType, head: usize, before: &[u8], after: &[u8], new: &[f32]) {
    let row_bytes = kv.row_bytes(head);
    let old = fused.first_position() * fused.case.heads.1 * row_bytes;
    assert_eq!(before[..old], after[..old], "{fused:?}: old cells");
    for (row, (head, found)) in
        new.chunks_exact(head).zip(after[old..].chunks_exact(row_bytes)).enumerate()
    {
        let expected = kv.decode(&kv.encode(head), head.len());
        let most = head.iter().fold(0f32, |m, v| m.max(v.abs()));
        // One step of the type, for what is rounded the other way.
        let step = most * [1e-6, 1e-3, 1.0 / 120.0, 1.0 / 7.0][kv as usize];
        for (f, e) in kv.decode(found, head.len()).into_iter().zip(expected) {
            assert!((f - e).abs() <= step, "{fused:?}, new row {row}: {f} is not {e}");
        }
    }
}
