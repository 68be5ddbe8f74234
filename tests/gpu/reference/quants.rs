//! The tensor types: what a block's bytes mean, and random blocks.
//!
//! Written from ggml's definitions of its blocks; `tests/fixtures/quants.json` holds what the Python
//! package `gguf` makes of some.

use super::random::Random;
use half::{bf16, f16};

/// A tensor type.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Quant {
    /// As in shaders/quant.
    pub(crate) name: &'static str,
    /// Elements of a block.
    pub(crate) block: usize,
    /// Bytes of a block.
    pub(crate) bytes: usize,
    /// Offsets of the f16 numbers in a block.
    halves: &'static [usize],
    /// A block's bytes to its elements.
    decode: fn(&[u8], &mut [f32]),
}

type Decode = fn(&[u8], &mut [f32]);

const fn quant(
    name: &'static str,
    block: usize,
    bytes: usize,
    halves: &'static [usize],
    decode: Decode,
) -> Quant {
    Quant { name, block, bytes, halves, decode }
}

pub(crate) const ALL: &[Quant] = &[
    quant("f32", 1, 4, &[], |b, w| w[0] = f32::from_le_bytes([b[0], b[1], b[2], b[3]])),
    quant("f16", 1, 2, &[0], |b, w| w[0] = half_at(b, 0)),
    quant("bf16", 1, 2, &[], |b, w| w[0] = bf16::from_le_bytes([b[0], b[1]]).to_f32()),
    quant("q4_0", 32, 18, &[0], |b, w| {
        let d = half_at(b, 0);
        each(w, |i| d * (nibble(&b[2..], i) - 8) as f32);
    }),
    quant("q4_1", 32, 20, &[0, 2], |b, w| {
        let (d, m) = (half_at(b, 0), half_at(b, 2));
        each(w, |i| d * nibble(&b[4..], i) as f32 + m);
    }),
    quant("q5_0", 32, 22, &[0], |b, w| {
        let d = half_at(b, 0);
        each(w, |i| d * (nibble(&b[6..], i) + 16 * bit(&b[2..], i) - 16) as f32);
    }),
    quant("q5_1", 32, 24, &[0, 2], |b, w| {
        let (d, m) = (half_at(b, 0), half_at(b, 2));
        each(w, |i| d * (nibble(&b[8..], i) + 16 * bit(&b[4..], i)) as f32 + m);
    }),
    quant("q8_0", 32, 34, &[0], |b, w| {
        let d = half_at(b, 0);
        each(w, |i| d * f32::from(b[2 + i] as i8));
    }),
    quant("q2_k", 256, 84, &[80, 82], |b, w| {
        let (d, min) = (half_at(b, 80), half_at(b, 82));
        each(w, |i| {
            let scale = b[i / 16];
            d * f32::from(scale & 15) * crumb(&b[16..], i) as f32 - min * f32::from(scale >> 4)
        });
    }),
    quant("q3_k", 256, 110, &[108], |b, w| {
        let d = half_at(b, 108);
        each(w, |i| {
            let s = i / 16;
            let low = i32::from(b[96 + s % 8] >> (4 * (s / 8))) & 15;
            let high = i32::from(b[104 + s % 4] >> (2 * (s / 4))) & 3;
            let bit2 = i32::from(b[i % 32] >> (i / 32)) & 1;
            let q = crumb(&b[32..], i) + 4 * bit2 - 4;
            d * (low + 16 * high - 32) as f32 * q as f32
        });
    }),
    quant("q4_k", 256, 144, &[0, 2], |b, w| {
        let (d, min) = (half_at(b, 0), half_at(b, 2));
        each(w, |i| {
            let (scale, m) = scale_min(&b[4..16], i / 32);
            d * scale * nibble_of_64(&b[16..], i) as f32 - min * m
        });
    }),
    quant("q5_k", 256, 176, &[0, 2], |b, w| {
        let (d, min) = (half_at(b, 0), half_at(b, 2));
        each(w, |i| {
            let (scale, m) = scale_min(&b[4..16], i / 32);
            let bit4 = i32::from(b[16 + i % 32] >> (i / 32)) & 1;
            d * scale * (nibble_of_64(&b[48..], i) + 16 * bit4) as f32 - min * m
        });
    }),
    quant("q6_k", 256, 210, &[208], |b, w| {
        let d = half_at(b, 208);
        each(w, |i| {
            let (half, l) = (i / 128, i % 128);
            let low = i32::from(b[64 * half + l % 64] >> (4 * (l / 64))) & 15;
            let high = i32::from(b[128 + 32 * half + l % 32] >> (2 * (l / 32))) & 3;
            d * f32::from(b[192 + i / 16] as i8) * (low + 16 * high - 32) as f32
        });
    }),
    quant("iq4_nl", 32, 18, &[0], |b, w| {
        let d = half_at(b, 0);
        each(w, |i| d * f32::from(IQ4[nibble(&b[2..], i) as usize]));
    }),
    quant("iq4_xs", 256, 136, &[0], |b, w| {
        let d = half_at(b, 0);
        let scales_high = u16::from_le_bytes([b[2], b[3]]);
        each(w, |i| {
            let j = i / 32;
            let low = i32::from(b[4 + j / 2] >> (4 * (j % 2))) & 15;
            let high = i32::from(scales_high >> (2 * j)) & 3;
            let value = IQ4[nibble(&b[8 + 16 * j..], i % 32) as usize];
            d * (low + 16 * high - 32) as f32 * f32::from(value)
        });
    }),
    quant("mxfp4", 32, 17, &[], |b, w| {
        let d = 2f64.powi(i32::from(b[0]) - 128) as f32;
        each(w, |i| d * E2M1_DOUBLED[nibble(&b[1..], i) as usize]);
    }),
];

const IQ4: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
const E2M1_DOUBLED: [f32; 16] =
    [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0];

impl Quant {
    pub(crate) fn named(name: &str) -> Self {
        *ALL.iter().find(|q| q.name == name).unwrap()
    }

    pub(crate) fn row_bytes(&self, k: usize) -> usize {
        assert!(k.is_multiple_of(self.block), "{} elements of {}", k, self.name);
        k / self.block * self.bytes
    }

    pub(crate) fn dequantize(&self, bytes: &[u8]) -> Vec<f32> {
        let mut w = vec![0.0; bytes.len() / self.bytes * self.block];
        for (b, w) in bytes.chunks_exact(self.bytes).zip(w.chunks_exact_mut(self.block)) {
            (self.decode)(b, w);
        }
        w
    }

    /// `n` elements in random blocks: any bits, but scales such that elements are about 1.
    pub(crate) fn random(&self, random: &mut Random, n: usize) -> Vec<u8> {
        let mut bytes: Vec<u8> = (0..self.row_bytes(n)).map(|_| random.bits() as u8).collect();
        let size = if self.block > 1 { 0.05 } else { 1.0 };
        for block in bytes.chunks_exact_mut(self.bytes) {
            for &at in self.halves {
                block[at..at + 2]
                    .copy_from_slice(&f16::from_f32(random.unit() * size).to_le_bytes());
            }
            match self.name {
                "f32" => block.copy_from_slice(&random.unit().to_le_bytes()),
                "bf16" => block.copy_from_slice(&bf16::from_f32(random.unit()).to_le_bytes()),
                "mxfp4" => block[0] = 118 + random.below(8) as u8,
                _ => {}
            }
        }
        bytes
    }
}

fn each(w: &mut [f32], f: impl Fn(usize) -> f32) {
    for (i, w) in w.iter_mut().enumerate() {
        *w = f(i);
    }
}

fn half_at(b: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([b[at], b[at + 1]]).to_f32()
}

/// Element i of 32: low nibbles of 16 bytes, then the high ones.
fn nibble(qs: &[u8], i: usize) -> i32 {
    i32::from(qs[i % 16] >> (4 * (i / 16))) & 15
}

/// Element i of 256 in groups of 64: low nibbles of 32 bytes, then the high ones.
fn nibble_of_64(qs: &[u8], i: usize) -> i32 {
    i32::from(qs[i / 64 * 32 + i % 32] >> (4 * (i / 32 % 2))) & 15
}

/// Element i of 256 in groups of 128: four times two bits of 32 bytes.
fn crumb(qs: &[u8], i: usize) -> i32 {
    i32::from(qs[i / 128 * 32 + i % 32] >> (2 * (i / 32 % 4))) & 3
}

fn bit(bytes: &[u8], i: usize) -> i32 {
    i32::from(bytes[i / 8] >> (i % 8)) & 1
}

/// Scale and minimum j of the 12 bytes of Q4_K and Q5_K.
fn scale_min(s: &[u8], j: usize) -> (f32, f32) {
    let (scale, min) = if j < 4 {
        (s[j] & 63, s[j + 4] & 63)
    } else {
        ((s[j + 4] & 15) | (s[j - 4] >> 6 << 4), (s[j + 4] >> 4) | (s[j] >> 6 << 4))
    };
    (f32::from(scale), f32::from(min))
}

#[test]
fn twins_agree_with_gguf() {
    let text = include_str!("../../fixtures/quants.json");
    let fixture: serde_json::Map<String, serde_json::Value> = serde_json::from_str(text).unwrap();
    assert_eq!(fixture.len(), ALL.len());
    for q in ALL {
        let field = |name: &str| unhex(fixture[q.name][name].as_str().unwrap());
        let expected: Vec<f32> = field("values")
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect();
        let found = q.dequantize(&field("bytes"));
        assert_eq!(found.len(), expected.len(), "{}", q.name);
        for (i, (f, e)) in found.iter().zip(&expected).enumerate() {
            assert_eq!(f.to_bits(), e.to_bits(), "{}[{i}]: {f} is not {e}", q.name);
        }
    }
}

#[test]
fn twins_are_those_of_the_shaders() {
    let mut shaders: Vec<_> =
        vkmoe::push::module_names().filter_map(|n| n.strip_prefix("get_rows.")).collect();
    let mut twins: Vec<_> = ALL.iter().map(|q| q.name).collect();
    shaders.sort_unstable();
    twins.sort_unstable();
    assert_eq!(shaders, twins);
}

fn unhex(text: &str) -> Vec<u8> {
    let digit = |d: u8| (d as char).to_digit(16).unwrap() as u8;
    text.as_bytes().chunks_exact(2).map(|d| 16 * digit(d[0]) + digit(d[1])).collect()
}
