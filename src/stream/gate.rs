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
    /// Tokens of a ubatch.
    pub n_tokens: u32,
    /// Tokens of all ubatches that read the tensor while it is in its slot.
    pub n_batch: u32,
    /// What is known of a pass without prefetching.
    pub outlook: Outlook,
}

/// What a pass can expect without prefetching, before any was measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outlook {
    /// Time per expert tensor for which the bus would be idle.
    pub idle_ns: f64,
    /// Share of the bus that its kernels get when they read host memory.
    pub direct_share: f64,
}

impl Gate {
    /// The decision.
    pub fn access(&self, speeds: &Speeds) -> Access {
        let without = if self.readable { Access::Direct } else { Access::Gather };
        let copy_ns = self.bytes as f64 / speeds.link_gbps;
        let used_bytes = self.touched_share() * self.bytes as f64;
        let used_ns = match speeds.measured(without, self.n_tokens) {
            Some(gbps) => used_bytes / gbps,
            None => used_bytes / self.expected_gbps(speeds, without) + self.outlook.idle_ns,
        };
        // Without prefetching each ubatch moves what it uses.
        let used_ns = used_ns * f64::from(self.n_batch) / f64::from(self.n_tokens.max(1));
        if self.prefetch && copy_ns <= used_ns { Access::Prefetch } else { without }
    }

    /// Before anything was measured.
    fn expected_gbps(&self, speeds: &Speeds, access: Access) -> f64 {
        let share = match access {
            Access::Direct => self.outlook.direct_share,
            Access::Gather => GATHER_SHARE,
            Access::Prefetch => 1.0,
        };
        speeds.link_gbps * share
    }

    /// Expected share of the experts that at least one token uses, were they chosen evenly.
    pub fn touched_share(&self) -> f64 {
        touched_share(self.n_expert, self.n_used, self.n_tokens)
    }
}

/// Speeds in bytes per nanosecond, which is GB/s: of the bus, and what passes got of it that waited for
/// the router. The latter also depends on kernels and file, so it is learned as passes go by.
#[derive(Clone, Debug)]
pub struct Speeds {
    /// Of copies of whole tensors.
    link_gbps: f64,
    /// By power of two of the tokens; `None` before there was such a pass.
    direct: [Option<f64>; BUCKETS],
    gather: [Option<f64>; BUCKETS],
}

const BUCKETS: usize = 33;
/// Gathering waits for the host twice a layer (H200: 12 of 49 GB/s).
const GATHER_SHARE: f64 = 0.25;
/// One measurement counts for so much, once there are several.
const WEIGHT: f64 = 0.3;
/// An unlucky measurement is forgotten by so much at each pass that goes the other way.
const FORGET: f64 = 1.02;

impl Speeds {
    /// With a bus of this speed, and nothing learned.
    pub fn new(link_gbps: f64) -> Self {
        Speeds { link_gbps, direct: [None; BUCKETS], gather: [None; BUCKETS] }
    }

    /// Learns from the copies of a pass.
    pub fn learn_link(&mut self, bytes: u64, ns: u64) {
        // Short copies measure their fixed costs.
        if bytes >= 4 << 20 && ns > 0 {
            self.link_gbps += WEIGHT * (bytes as f64 / ns as f64 - self.link_gbps);
        }
    }

    /// Learns from a pass that got all its experts in one way: so many bytes of them.
    pub fn learn_pass(&mut self, access: Access, n_tokens: u32, bytes: u64, ns: u64) {
        if bytes == 0 || ns == 0 {
            return;
        }
        let seen = bytes as f64 / ns as f64;
        match access {
            Access::Direct => {
                blend(&mut self.direct[bucket(n_tokens)], seen);
            }
            Access::Gather => {
                blend(&mut self.gather[bucket(n_tokens)], seen);
            }
            Access::Prefetch => {
                let (n, most) = (bucket(n_tokens), self.link_gbps);
                for known in [&mut self.direct[n], &mut self.gather[n]].into_iter().flatten() {
                    *known = (*known * FORGET).min(most);
                }
            }
        }
    }

    fn measured(&self, access: Access, n_tokens: u32) -> Option<f64> {
        match access {
            Access::Direct => self.direct[bucket(n_tokens)],
            Access::Gather => self.gather[bucket(n_tokens)],
            Access::Prefetch => Some(self.link_gbps),
        }
    }
}

/// Up to 1, 2, 4, 8, … tokens: kernels change after a power of two, not at it.
fn bucket(n_tokens: u32) -> usize {
    (u32::BITS - n_tokens.saturating_sub(1).leading_zeros()) as usize
}

fn blend(known: &mut Option<f64>, seen: f64) {
    *known = Some(known.map_or(seen, |known| (1.0 - WEIGHT) * known + WEIGHT * seen));
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

    /// A layer of Qwen3-30B-A3B.
    fn gate(n_tokens: u32) -> Gate {
        Gate {
            readable: true,
            prefetch: true,
            bytes: 113 << 20,
            n_expert: 128,
            n_used: 8,
            n_tokens,
            n_batch: n_tokens,
            outlook: Outlook { idle_ns: 100e3, direct_share: 1.0 },
        }
    }

    fn speeds() -> Speeds {
        Speeds::new(50.0)
    }

    #[test]
    fn long_prompts_prefetch_and_few_tokens_do_not() {
        let access = |n_tokens| gate(n_tokens).access(&speeds());
        assert_eq!(access(2048), Access::Prefetch);
        assert_eq!(access(64), Access::Prefetch);
        assert_eq!(access(16), Access::Direct);
        assert_eq!(access(1), Access::Direct);
        let outlook = Outlook { idle_ns: 100e3, direct_share: 0.4 };
        let slow_readers = Gate { outlook, ..gate(16) };
        assert_eq!(slow_readers.access(&speeds()), Access::Prefetch);
    }

    #[test]
    fn without_slots_or_readable_memory_the_rest_remains() {
        let off = Gate { prefetch: false, ..gate(2048) };
        assert_eq!(off.access(&speeds()), Access::Direct);
        assert_eq!(Gate { readable: false, ..off }.access(&speeds()), Access::Gather);
        assert_eq!(Gate { readable: false, ..gate(1) }.access(&speeds()), Access::Gather);
        assert_eq!(Gate { readable: false, ..gate(16) }.access(&speeds()), Access::Prefetch);
    }

    /// What sixteen tokens would rather read where it is, is copied once for a batch of several times as many.
    #[test]
    fn a_batch_counts_with_all_its_ubatches() {
        let access = |n_batch| Gate { n_batch, ..gate(16) }.access(&speeds());
        assert_eq!([16, 32, 64].map(access), [Access::Direct, Access::Prefetch, Access::Prefetch]);
    }

    /// As on an H200: kernels for 16 tokens read the host's memory at 20 GB/s.
    #[test]
    fn kernels_that_are_slow_at_reading_the_host_turn_prefetching_on() {
        let mut speeds = speeds();
        speeds.learn_pass(Access::Direct, 16, 11_300_000_000, 550_000_000);
        assert_eq!(gate(16).access(&speeds), Access::Prefetch);
        assert_eq!(gate(40).access(&speeds), gate(40).access(&self::speeds()), "another size");
        assert_eq!([1, 2, 3, 8, 9, 16, u32::MAX].map(bucket), [0, 1, 2, 3, 4, 4, 32]);
        for _ in 0..100 {
            speeds.learn_pass(Access::Prefetch, 16, 1, 1);
        }
        assert_eq!(gate(16).access(&speeds), Access::Direct, "it is tried again some day");
    }

    proptest! {
        /// More tokens never turn prefetching off, and it never costs more than was to be expected
        /// without.
        #[test]
        fn prefetching_is_monotonic_and_never_slower(
            n_expert in 1u32..512,
            n_used in 1u32..16,
            n_tokens in 1u32..4096,
            bytes in 1u64..1 << 32,
            idle_ns in 0f64..1e7,
        ) {
            let n_used = n_used.min(n_expert);
            let outlook = Outlook { idle_ns, direct_share: 1.0 };
            let n_batch = n_tokens;
            let gate = Gate { bytes, n_expert, n_used, n_tokens, n_batch, outlook, ..gate(1) };
            if gate.access(&speeds()) == Access::Prefetch {
                let more = Gate { n_tokens: n_tokens + 1, n_batch: n_batch + 1, ..gate };
                prop_assert_eq!(more.access(&speeds()), Access::Prefetch);
                let copy_ns = bytes as f64 / 50.0;
                let used_ns = gate.touched_share() * copy_ns;
                prop_assert!(copy_ns <= (used_ns + idle_ns) * (1.0 + 1e-9));
            }
        }

        /// Whatever was measured, speeds stay finite and positive.
        #[test]
        fn speeds_stay_sane(
            passes in prop::collection::vec((0u8..3, any::<u32>(), any::<u64>(), any::<u64>()), 0..50),
        ) {
            let mut speeds = speeds();
            for (way, n_tokens, bytes, ns) in passes {
                let access = [Access::Direct, Access::Gather, Access::Prefetch][way as usize];
                speeds.learn_pass(access, n_tokens, bytes, ns);
                speeds.learn_link(bytes, ns);
                for access in [Access::Direct, Access::Gather, Access::Prefetch] {
                    let gbps = speeds.measured(access, n_tokens);
                    prop_assert!(gbps.is_none_or(|gbps| gbps.is_finite() && gbps > 0.0));
                }
            }
        }
    }
}
