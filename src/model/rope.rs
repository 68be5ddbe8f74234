//! Rotary position embedding: the frequencies of each pair of dimensions, with linear and YaRN
//! scaling. The kernel only multiplies by the position and rotates.
//!
//! YaRN: Peng et al. 2023, "YaRN: Efficient Context Window Extension of Large Language Models", with
//! the ramp's bounds rounded outward as in the authors' code.

use crate::graph::{RopeOp, RopePairing};

/// How a model was stretched beyond the context it was first trained for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// Positions divided by `factor`.
    Linear {
        /// Longer by this factor.
        factor: f32,
    },
    /// Slow dimensions interpolated, fast ones kept, a ramp between.
    Yarn {
        /// Longer by this factor.
        factor: f32,
        /// Context before stretching, in tokens.
        n_ctx_orig: u32,
        /// Factor on q and k beside YaRN's own.
        attn_factor: f32,
        /// Rotations over the original context from which on a dimension is kept.
        beta_fast: f32,
        /// Rotations below which a dimension is interpolated.
        beta_slow: f32,
        /// Weight of the ramp, 1 for YaRN proper, 0 for none.
        ext_factor: f32,
    },
}

/// The rotary embedding of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeParams {
    /// Which dimensions belong together.
    pub pairing: RopePairing,
    /// Dimensions rotated, from the head's start; even.
    pub n_rot: u32,
    /// Base of the frequencies.
    pub freq_base: f32,
    /// Stretching.
    pub scaling: RopeScaling,
}

impl RopeParams {
    /// Radians per position of each of the `n_rot / 2` pairs.
    pub fn frequencies(&self) -> Vec<f32> {
        let n_rot = f64::from(self.n_rot);
        let ramp = self.yarn_ramp();
        (0..self.n_rot / 2)
            .map(|i| {
                let base = f64::from(self.freq_base).powf(-2.0 * f64::from(i) / n_rot);
                let freq = match self.scaling {
                    RopeScaling::None => base,
                    RopeScaling::Linear { factor } => base / f64::from(factor),
                    RopeScaling::Yarn { factor, ext_factor, .. } => {
                        let keep = ramp(f64::from(i)) * f64::from(ext_factor);
                        base / f64::from(factor) * (1.0 - keep) + base * keep
                    }
                };
                freq as f32
            })
            .collect()
    }

    /// Share of pair i that keeps its frequency: 1 for fast pairs, 0 for slow ones.
    fn yarn_ramp(&self) -> impl Fn(f64) -> f64 + use<> {
        let (n_rot, base) = (f64::from(self.n_rot), f64::from(self.freq_base));
        let (low, high) = match self.scaling {
            RopeScaling::Yarn { n_ctx_orig, beta_fast, beta_slow, .. } => {
                // The pair that turns `beta` times over the original context.
                let pair = |beta: f32| {
                    let turns = f64::from(n_ctx_orig) / (f64::from(beta) * std::f64::consts::TAU);
                    n_rot * turns.ln() / (2.0 * base.ln())
                };
                (pair(beta_fast).floor().max(0.0), pair(beta_slow).ceil().min(n_rot - 1.0))
            }
            _ => (0.0, 0.0),
        };
        move |i| 1.0 - ((i - low) / (high - low).max(0.001)).clamp(0.0, 1.0)
    }

    /// The op over a head, rotating from its first dimension.
    pub fn op(&self) -> RopeOp {
        let mscale = match self.scaling {
            RopeScaling::Yarn { factor, attn_factor, ext_factor, .. } if ext_factor != 0.0 => {
                attn_factor * (1.0 + 0.1 * factor.max(1.0).ln())
            }
            RopeScaling::Yarn { attn_factor, .. } => attn_factor,
            _ => 1.0,
        };
        RopeOp { pairing: self.pairing, n_rot: self.n_rot, rot_offset: 0, mscale }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params(scaling: RopeScaling) -> RopeParams {
        RopeParams { pairing: RopePairing::Neox, n_rot: 64, freq_base: 10000.0, scaling }
    }

    fn yarn(factor: f32, ext_factor: f32) -> RopeScaling {
        RopeScaling::Yarn {
            factor,
            n_ctx_orig: 4096,
            attn_factor: 1.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            ext_factor,
        }
    }

    #[test]
    fn plain_frequencies_fall_from_one_to_the_inverse_base() {
        let f = params(RopeScaling::None).frequencies();
        assert_eq!(f.len(), 32);
        assert_eq!(f[0], 1.0);
        assert!((f[16] - 0.01).abs() < 1e-7, "half way is base^-1/2");
    }

    #[test]
    fn yarn_keeps_fast_pairs_and_interpolates_slow_ones() {
        let plain = params(RopeScaling::None).frequencies();
        let f = params(yarn(8.0, 1.0)).frequencies();
        assert_eq!(f[0], plain[0]);
        assert!((f[31] * 8.0 / plain[31] - 1.0).abs() < 1e-6);
        assert!(f.iter().zip(&plain).all(|(f, p)| (*p / 8.0 - 1e-9..=*p).contains(f)));
        assert!((params(yarn(8.0, 1.0)).op().mscale - 1.207_944_2).abs() < 1e-6);
    }

    #[test]
    fn yarn_without_ramp_is_linear() {
        let linear = params(RopeScaling::Linear { factor: 4.0 }).frequencies();
        assert_eq!(params(yarn(4.0, 0.0)).frequencies(), linear);
    }
}
