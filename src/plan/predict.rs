//! How long a plan would take, by rule of thumb: enough to tell which of several plans is faster. Pure.
//!
//! A layer whose experts are in host memory takes as long as its kernels or its copies do, whichever is
//! longer, as far as slots let copies run ahead; what does not fit into the slots comes on top.

use std::fmt;

/// Tokens of the answer that is predicted beside a prompt which fills the context.
const N_ANSWER: u32 = 256;

/// What predictions go by.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rates {
    /// Speed of the bus.
    pub link_gbps: f64,
    /// Time of a token in a layer, if there are many.
    pub token_ns: f64,
    /// Share of the experts that a token uses.
    pub used_share: f64,
    /// Tokens of the prompt.
    pub n_prompt: u32,
}

/// Experts of a layer that are in host memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct HostLayer {
    pub(super) bytes: u64,
    /// Tensors that slots have to hold together.
    pub(super) n_tensors: u32,
}

/// What is predicted of: layers, slots, sizes of batch and ubatch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Way<'a> {
    pub(super) n_layers: u32,
    pub(super) host: &'a [HostLayer],
    pub(super) n_slots: u32,
    pub(super) n_batch: u32,
    pub(super) n_ubatch: u32,
}

/// Predicted times.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Prediction {
    /// Tokens of the prompt.
    pub n_prompt: u32,
    /// Time of the prompt.
    pub prompt_ns: f64,
    /// Time of an answer.
    pub answer_ns: f64,
}

impl Prediction {
    pub(super) fn of(way: Way<'_>, rates: &Rates) -> Self {
        let Rates { link_gbps, used_share, n_prompt, .. } = *rates;
        let bytes: u64 = way.host.iter().map(|layer| layer.bytes).sum();
        Prediction {
            n_prompt,
            prompt_ns: way.prompt_ns(rates),
            answer_ns: f64::from(N_ANSWER) * bytes as f64 * used_share / link_gbps,
        }
    }

    /// `12.3 + 4.5 s`
    pub fn times(&self) -> String {
        format!("{:.1} + {:.1} s", self.prompt_ns / 1e9, self.answer_ns / 1e9)
    }

    /// Prompt and answer.
    pub fn total_ns(&self) -> f64 {
        self.prompt_ns + self.answer_ns
    }
}

/// `a prompt of 4096 tokens and 256 more in 12.3 + 4.5 s`
impl fmt::Display for Prediction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a prompt of {} tokens and {N_ANSWER} more in {}", self.n_prompt, self.times())
    }
}

impl Way<'_> {
    fn prompt_ns(&self, rates: &Rates) -> f64 {
        let n_prompt = rates.n_prompt.max(1);
        let n_batches = n_prompt.div_ceil(self.n_batch.max(1));
        let n_batch = f64::from(n_prompt) / f64::from(n_batches);
        let n_ubatches = (n_batch / f64::from(self.n_ubatch.max(1))).ceil();
        let compute_ns = n_batch * rates.token_ns;
        let of_layer = |layer: &HostLayer| {
            let copy_ns = layer.bytes as f64 / rates.link_gbps;
            match self.goes_by_layer(layer) {
                true => {
                    let ahead = self.share_ahead(layer);
                    compute_ns.max(copy_ns * ahead) + copy_ns * (1.0 - ahead)
                }
                false if self.n_slots == 0 => compute_ns + n_ubatches * copy_ns,
                false => compute_ns.max(n_ubatches * copy_ns),
            }
        };
        let resident = f64::from(self.n_layers.saturating_sub(self.host.len() as u32));
        f64::from(n_batches) * (self.host.iter().map(of_layer).sum::<f64>() + resident * compute_ns)
    }

    fn goes_by_layer(&self, layer: &HostLayer) -> bool {
        self.n_batch > self.n_ubatch && self.n_slots >= layer.n_tensors
    }

    /// Of the next layer, the share that slots have room for while the kernels of this one run.
    fn share_ahead(&self, layer: &HostLayer) -> f64 {
        let n = layer.n_tensors.max(1);
        f64::from((self.n_slots - layer.n_tensors).min(n)) / f64::from(n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GIB: u64 = 1 << 30;

    fn prompt_s(n_slots: u32, n_batch: u32, token_ns: f64) -> f64 {
        let host = [HostLayer { bytes: GIB, n_tensors: 3 }; 10];
        let way = Way { n_layers: 20, host: &host, n_slots, n_batch, n_ubatch: 512 };
        let rates =
            Rates { link_gbps: GIB as f64 / 1e9, token_ns, used_share: 0.1, n_prompt: 8192 };
        let prediction = Prediction::of(way, &rates);
        assert!((prediction.answer_ns / 1e9 - 256.0).abs() < 1e-6, "a second a token");
        prediction.prompt_ns / 1e9
    }

    /// Copies take a second a layer.
    #[test]
    fn copies_hide_behind_kernels_as_far_as_slots_go() {
        let near = |a: f64, b: f64| assert!((a - b).abs() < 0.01, "{a} for {b}");
        // Kernels take none: all that counts is how often experts come.
        near(prompt_s(6, 8192, 0.0), 10.0);
        near(prompt_s(3, 8192, 0.0), 10.0);
        near(prompt_s(6, 4096, 0.0), 20.0);
        near(prompt_s(6, 512, 0.0), 160.0);
        near(prompt_s(2, 8192, 0.0), 160.0);
        // A second a layer for the prompt.
        let ns = 1e9 / 8192.0;
        near(prompt_s(6, 8192, ns), 20.0);
        near(prompt_s(3, 8192, ns), 30.0);
        near(prompt_s(6, 4096, ns), 30.0);
        near(prompt_s(0, 8192, ns), 180.0);
    }

    proptest! {
        /// More slots, larger batches and fewer layers on the host are never slower.
        #[test]
        fn more_of_anything_helps(
            n_slots in 0u32..8,
            halvings in 1u32..6,
            n_host in 1usize..10,
            bytes in 1u64..1 << 34,
            n_tensors in 1u32..4,
            token_ns in 0f64..1e6,
            n_prompt in 1u32..100_000,
        ) {
            let layers = vec![HostLayer { bytes, n_tensors }; n_host];
            let rates = Rates { link_gbps: 25.0, token_ns, used_share: 0.1, n_prompt };
            let n_batch = 512 << halvings;
            let way = Way { n_layers: 10, host: &layers, n_slots, n_batch, n_ubatch: 512 };
            let ns = |way| Prediction::of(way, &rates).total_ns() * (1.0 + 1e-9);
            prop_assert!(Prediction::of(way, &rates).total_ns().is_finite());
            let fewer = Way { host: &layers[1..], ..way };
            prop_assert!(ns(fewer) <= ns(way) * (1.0 + 1e-9));
            if n_slots >= n_tensors {
                let more = Way { n_slots: n_slots + 1, ..way };
                prop_assert!(ns(more) <= ns(way) * (1.0 + 1e-9));
            }
        }
    }
}
