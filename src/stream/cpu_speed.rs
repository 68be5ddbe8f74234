//! What the CPU could do for experts that are not in device memory, where its memory is faster than the bus: how fast all its
//! threads read memory, and how fast they multiply 4-bit weights that lie there. The engine does not use it: it is
//! measured to know where that would pay.

use std::hint::black_box;
use std::thread;
use std::time::Instant;

/// Bytes of weights: more than caches hold.
const BYTES: usize = 256 << 20;
/// Elements of a row of activations, two of which are in a byte of weights.
const ROW: usize = 2048;
/// Elements that share a scale.
const BLOCK: usize = 32;
/// The fastest of so many rounds counts.
const ROUNDS: usize = 3;

/// Bytes of weights in a nanosecond.
#[derive(Clone, Copy, Debug)]
pub struct CpuSpeed {
    /// Threads at work.
    pub n_threads: usize,
    /// Read.
    pub read_gbps: f64,
    /// Multiplied with a row of bytes, by portable code.
    pub product_gbps: f64,
}

impl CpuSpeed {
    /// Measures both, which takes less than a second.
    pub fn measure() -> CpuSpeed {
        let n_threads = thread::available_parallelism().map_or(1, usize::from);
        let mut weights = vec![0u8; BYTES];
        let part = (BYTES / n_threads).next_multiple_of(ROW / 2);
        // Each thread's pages near it.
        thread::scope(|scope| {
            for part in weights.chunks_mut(part) {
                scope.spawn(|| part.iter_mut().enumerate().for_each(|(i, w)| *w = i as u8));
            }
        });
        let x: Vec<i8> = (0..ROW).map(|i| i as i8).collect();
        let gbps = |work: &(dyn Fn(&[u8]) + Sync)| {
            let round = |_| {
                let since = Instant::now();
                thread::scope(|scope| {
                    for part in weights.chunks(part) {
                        scope.spawn(|| work(part));
                    }
                });
                BYTES as f64 / since.elapsed().as_nanos() as f64
            };
            (0..ROUNDS).map(round).fold(0.0, f64::max)
        };
        let read = |part: &[u8]| {
            black_box(words(part).fold(0u64, u64::wrapping_add));
        };
        let multiply = |part: &[u8]| {
            black_box(part.chunks_exact(ROW / 2).map(|row| dot(row, &x)).sum::<f32>());
        };
        CpuSpeed { n_threads, read_gbps: gbps(&read), product_gbps: gbps(&multiply) }
    }
}

fn words(bytes: &[u8]) -> impl Iterator<Item = u64> {
    let (words, _) = bytes.as_chunks::<8>();
    words.iter().map(|word| u64::from_le_bytes(*word))
}

/// A row of 4-bit weights times x: of each block, low halves of bytes come before high ones. In a form that compilers
/// turn into vector instructions.
fn dot(weights: &[u8], x: &[i8]) -> f32 {
    let blocks = weights.as_chunks::<{ BLOCK / 2 }>().0.iter().zip(x.as_chunks::<BLOCK>().0);
    let block = |(w, x): (&[u8; BLOCK / 2], &[i8; BLOCK])| {
        let term = |i: usize| {
            let (low, high) = (i16::from(x[i]), i16::from(x[i + BLOCK / 2]));
            i16::from(w[i] & 15) * low + i16::from(w[i] >> 4) * high
        };
        let terms: [i16; BLOCK / 2] = std::array::from_fn(term);
        terms.iter().map(|&term| i32::from(term)).sum::<i32>()
    };
    blocks.map(block).sum::<i32>() as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_are_right() {
        let weights: Vec<u8> = (0..64u8).map(|i| i.wrapping_mul(37)).collect();
        let x: Vec<i8> = (0..128).map(|i| (i * 7 % 251) as u8 as i8).collect();
        let mut expected = 0i64;
        for (b, w) in weights.iter().enumerate() {
            let at = b / 16 * 32 + b % 16;
            expected += i64::from(w & 15) * i64::from(x[at]);
            expected += i64::from(w >> 4) * i64::from(x[at + 16]);
        }
        assert_eq!(dot(&weights, &x), expected as f32);
    }
}
