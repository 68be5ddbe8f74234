//! Whether a whole expert tensor is prefetched, or only what the router chooses is moved. Pure.
//!
//! Prefetching moves bytes that nobody uses; waiting for the router leaves the bus idle meanwhile.
//! The cheaper of the two wins, by estimate: so prefetching is never slower than going without.

/// How a pass gets at the experts of one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Kernels read the chosen experts from host memory, over the bus.
    Direct,
    /// The chosen experts are copied to a slot after the router.
    Gather,
    /// The whole tensor is copied to a slot ahead of need.
    Prefetch,
}

/// What the decision depends on.
#[derive(Clone, Copy, Debug)]
pub struct Gate {
    /// Whether kernels can read the tensor where it is.
    pub readable: bool,
    /// Whether there are slots to prefetch into.
    pub prefetch: bool,
    /// Bytes of the tensor.
    pub bytes: u64,
    /// Experts of the tensor.
    pub n_expert: u32,
    /// Experts that a token uses.
    pub n_used: u32,
    /// Tokens of the pass.
    pub n_tokens: u32,
    /// Speed of the bus in bytes per nanosecond, which is GB/s.
    pub link_gbps: f64,
    /// Time per expert tensor for which the bus would be idle without prefetching.
    pub idle_ns: f64,
}

impl Gate {
    /// The decision.
    pub fn access(&self) -> Access {
        let wasted_ns = (1.0 - self.touched_share()) * self.bytes as f64 / self.link_gbps;
        if self.prefetch && wasted_ns <= self.idle_ns {
            Access::Prefetch
        } else if self.readable {
            Access::Direct
        } else {
            Access::Gather
        }
    }

    /// Expected share of the experts that at least one token uses, were they chosen evenly.
    pub fn touched_share(&self) -> f64 {
        touched_share(self.n_expert, self.n_used, self.n_tokens)
    }
}

/// 1 − (1 − k/E)^T
pub fn touched_share(n_expert: u32, n_used: u32, n_tokens: u32) -> f64 {
    let missed_by_one = 1.0 - f64::from(n_used) / f64::from(n_expert.max(1));
    1.0 - missed_by_one.max(0.0).powf(f64::from(n_tokens))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A layer of Qwen3-30B-A3B on a bus of 50 GB/s, with compute of a third of the copy's time.
    fn gate(n_tokens: u32) -> Gate {
        Gate {
            readable: true,
            prefetch: true,
            bytes: 113 << 20,
            n_expert: 128,
            n_used: 8,
            n_tokens,
            link_gbps: 50.0,
            idle_ns: 100e3,
        }
    }

    #[test]
    fn long_prompts_prefetch_and_single_tokens_never_do() {
        assert_eq!(gate(2048).access(), Access::Prefetch);
        assert_eq!(gate(64).access(), Access::Prefetch);
        assert_eq!(gate(16).access(), Access::Direct);
        assert_eq!(gate(1).access(), Access::Direct);
    }

    #[test]
    fn without_slots_or_readable_memory_the_rest_remains() {
        let off = Gate { prefetch: false, ..gate(2048) };
        assert_eq!(off.access(), Access::Direct);
        assert_eq!(Gate { readable: false, ..off }.access(), Access::Gather);
        assert_eq!(Gate { readable: false, ..gate(1) }.access(), Access::Gather);
    }

    proptest! {
        /// More tokens never turn prefetching off, and it never costs more than was idle.
        #[test]
        fn prefetching_is_monotonic_and_never_slower(
            n_expert in 1u32..512,
            n_used in 1u32..16,
            n_tokens in 1u32..4096,
            bytes in 1u64..1 << 32,
            idle_ns in 0f64..1e7,
        ) {
            let n_used = n_used.min(n_expert);
            let gate = Gate { bytes, n_expert, n_used, n_tokens, idle_ns, ..gate(1) };
            if gate.access() == Access::Prefetch {
                let more = Gate { n_tokens: n_tokens + 1, ..gate };
                prop_assert_eq!(more.access(), Access::Prefetch);
                let copy_ns = bytes as f64 / gate.link_gbps;
                let used_ns = gate.touched_share() * copy_ns;
                prop_assert!(copy_ns <= (used_ns + idle_ns) * (1.0 + 1e-9));
            }
        }
    }
}
