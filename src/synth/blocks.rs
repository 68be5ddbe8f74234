//! Random blocks of a tensor type: any bits, but for the scales, which make the elements' standard
//! deviation what is asked for. `shaders/quant` says what a block's bytes mean.

use crate::gguf::GgmlType;
use half::{bf16, f16};
use rand::Rng;
use rand_chacha::ChaCha8Rng;

/// What of a block is not left to chance.
enum Form {
    /// The block is one number, drawn from a normal distribution.
    Number(fn(f32) -> NumberBytes),
    /// f16 scales: (offset in the block, value for a standard deviation of 1).
    Scales(&'static [(usize, f32)]),
    /// The first byte is an exponent; for exponent 0, the standard deviation is this.
    Exponent(f64),
}

/// A number's bytes; the first few, as many as its type has.
type NumberBytes = [u8; 4];

/// Random blocks, `n` of them. `std`: standard deviation of their elements.
pub(super) fn random(ty: GgmlType, std: f32, n: usize, rng: &mut ChaCha8Rng) -> Vec<u8> {
    let block_bytes = ty.block_bytes() as usize;
    let mut bytes = vec![0; n * block_bytes];
    let blocks = |bytes| <[u8]>::chunks_exact_mut(bytes, block_bytes);
    match form(ty) {
        Form::Number(encode) => blocks(&mut bytes).for_each(|block| {
            block.copy_from_slice(&encode(std * normal(rng))[..block_bytes]);
        }),
        Form::Scales(scales) => {
            rng.fill_bytes(&mut bytes);
            let halves: Vec<_> = scales
                .iter()
                .map(|&(at, unit)| (at, f16::from_f32(unit * std).to_le_bytes()))
                .collect();
            for block in blocks(&mut bytes) {
                halves.iter().for_each(|(at, half)| block[*at..at + 2].copy_from_slice(half));
            }
        }
        Form::Exponent(unit) => {
            rng.fill_bytes(&mut bytes);
            let (low, share) = exponents(f64::from(std) / unit);
            blocks(&mut bytes).for_each(|block| block[0] = low + u8::from(unit_f32(rng) < share));
        }
    }
    bytes
}

/// The factors follow from uniformly random bits. For a product of independent factors the mean squares
/// multiply: 4 bits around 8 have 21.5, 6 bits around 32 have 341.5, a signed byte 5461.5. Scales with a
/// minimum also take the mean of the product away, since `min` is chosen to cancel it.
fn form(ty: GgmlType) -> Form {
    use Form::{Exponent, Number, Scales};
    match ty {
        GgmlType::F32 => Number(f32::to_le_bytes),
        GgmlType::F16 => Number(|x| padded(f16::from_f32(x).to_le_bytes())),
        GgmlType::BF16 => Number(|x| padded(bf16::from_f32(x).to_le_bytes())),
        // d·(q − 8)
        GgmlType::Q4_0 => Scales(&[(0, 1.0 / 4.637)]),
        // d·q + m
        GgmlType::Q4_1 => Scales(&[(0, 1.0 / 4.610), (2, -7.5 / 4.610)]),
        // d·(q − 16)
        GgmlType::Q5_0 => Scales(&[(0, 1.0 / 9.247)]),
        // d·q + m
        GgmlType::Q5_1 => Scales(&[(0, 1.0 / 9.233), (2, -15.5 / 9.233)]),
        // d·q
        GgmlType::Q8_0 => Scales(&[(0, 1.0 / 73.90)]),
        // d·scale·q − dmin·min, of 4, 2 and 4 bits
        GgmlType::Q2_K => Scales(&[(80, 1.0 / 13.87), (82, 1.5 / 13.87)]),
        // d·(scale − 32)·(q − 4), of 6 and 3 bits
        GgmlType::Q3_K => Scales(&[(108, 1.0 / 43.34)]),
        // d·scale·q − dmin·min, of 6, 4 and 6 bits
        GgmlType::Q4_K => Scales(&[(0, 1.0 / 258.3), (2, 7.5 / 258.3)]),
        // ... of 6, 5 and 6 bits
        GgmlType::Q5_K => Scales(&[(0, 1.0 / 526.9), (2, 15.5 / 526.9)]),
        // d·scale·(q − 32), of 8 and 6 bits
        GgmlType::Q6_K => Scales(&[(208, 1.0 / 1365.7)]),
        // d·table[q]
        GgmlType::IQ4_NL => Scales(&[(0, 1.0 / 67.44)]),
        // d·(scale − 32)·table[q]
        GgmlType::IQ4_XS => Scales(&[(0, 1.0 / 1246.3)]),
        // 2^(e − 128)·table[q]
        GgmlType::MXFP4 => Exponent(5.852 * 2f64.powi(-128)),
        other => unreachable!("no mix has {other}"),
    }
}

/// The exponent below the wanted factor, and the share of blocks that take the next one, so that the
/// mean square is the wanted one.
fn exponents(factor: f64) -> (u8, f32) {
    let low = factor.log2().floor();
    let excess = (factor / low.exp2()).powi(2); // 1 to 4
    (low.clamp(0.0, 254.0) as u8, ((excess - 1.0) / 3.0) as f32)
}

fn padded([a, b]: [u8; 2]) -> NumberBytes {
    [a, b, 0, 0]
}

/// 0 to 1, never 0.
fn unit_f32(rng: &mut ChaCha8Rng) -> f32 {
    ((rng.next_u32() >> 8) as f32 + 0.5) / (1u32 << 24) as f32
}

/// A draw from the normal distribution of deviation 1 (Box and Muller's method).
fn normal(rng: &mut ChaCha8Rng) -> f32 {
    let radius = (-2.0 * unit_f32(rng).ln()).sqrt();
    radius * (std::f32::consts::TAU * unit_f32(rng)).cos()
}
