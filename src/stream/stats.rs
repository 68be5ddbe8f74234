//! What streaming did: bytes moved, and how long each lane was busy. Sums over evaluations; the engine
//! fills them, commands print them.

use crate::plan::Bytes;
use std::fmt;

/// Sums over some evaluations. Times are busy times in ns, `wall_ns` the time that passed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamStats {
    /// Full tensors and gathered experts copied to the device.
    pub streamed_bytes: u64,
    /// Estimate of what kernels read from host memory themselves.
    pub direct_bytes: u64,
    /// The copy lane was busy.
    pub copy_ns: u64,
    /// The compute lane was busy.
    pub compute_ns: u64,
    /// Both were, at once.
    pub both_ns: u64,
    /// From the first submission to the last completion.
    pub wall_ns: u64,
    /// Experts that layers used and found in the expert cache; layers that were prefetched do not count.
    pub cache_hits: u64,
    /// The same that were on the host.
    pub cache_misses: u64,
    /// Experts that left the cache for others.
    pub cache_evictions: u64,
    /// Experts copied to the cache.
    pub promoted_bytes: u64,
}

/// What the time went into: the lane that was busy longer, with the share of wall time that it was.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bound {
    /// Copies.
    Bus(f64),
    /// Kernels.
    Compute(f64),
}

impl StreamStats {
    /// Speed of the copies in GB/s; `None` without any.
    pub fn link_gbps(&self) -> Option<f64> {
        ratio(self.streamed_bytes, self.copy_ns)
    }

    /// Share of the copies' time during which kernels ran as well; `None` without copies.
    pub fn hidden_share(&self) -> Option<f64> {
        ratio(self.both_ns, self.copy_ns)
    }

    /// What limits; `None` if nothing was measured.
    pub fn bound(&self) -> Option<Bound> {
        let busy_ns = self.copy_ns.max(self.compute_ns);
        let share = ratio(busy_ns, self.wall_ns).filter(|_| busy_ns > 0)?;
        Some(if self.copy_ns > self.compute_ns { Bound::Bus(share) } else { Bound::Compute(share) })
    }

    /// Share of the experts used that were in the cache; `None` if there is none, or nobody asked.
    pub fn hit_share(&self) -> Option<f64> {
        let used = self.cache_hits + self.cache_misses;
        let is_on = self.cache_hits + self.promoted_bytes > 0;
        ratio(self.cache_hits, used).filter(|_| is_on)
    }

    /// What the expert cache did, in words.
    fn cache(&self) -> Option<String> {
        let share = self.hit_share()?;
        let evictions = match self.cache_evictions {
            1 => "1 eviction".to_owned(),
            n => format!("{n} evictions"),
        };
        let promoted = Bytes(self.promoted_bytes);
        Some(format!("expert cache: {:.0} % hits, {evictions}, {promoted} promoted", 100.0 * share))
    }

    /// Whether anything came from host memory, or from the cache of it.
    pub fn moved(&self) -> bool {
        self.streamed_bytes > 0 || self.direct_bytes > 0 || self.cache_hits > 0
    }

    /// Adds what another evaluation did.
    pub fn add(&mut self, other: &StreamStats) {
        self.streamed_bytes += other.streamed_bytes;
        self.direct_bytes += other.direct_bytes;
        self.copy_ns += other.copy_ns;
        self.compute_ns += other.compute_ns;
        self.both_ns += other.both_ns;
        self.wall_ns += other.wall_ns;
        self.cache_hits += other.cache_hits;
        self.cache_misses += other.cache_misses;
        self.cache_evictions += other.cache_evictions;
        self.promoted_bytes += other.promoted_bytes;
    }
}

/// `streamed 33.9 GiB at 49.2 GB/s, 98 % hidden behind compute | read directly 12.3 GiB | expert cache: 61 % hits,
/// 12 evictions, 1.2 GiB promoted | bound: bus 97 %`; what did not happen or was not measured is left out.
impl fmt::Display for StreamStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        if self.streamed_bytes > 0 {
            let speed = self.link_gbps().map(|gbps| format!(" at {gbps:.1} GB/s"));
            let hidden = self.hidden_share();
            let hidden =
                hidden.map(|share| format!(", {:.0} % hidden behind compute", 100.0 * share));
            let (speed, hidden) = (speed.unwrap_or_default(), hidden.unwrap_or_default());
            parts.push(format!("streamed {}{speed}{hidden}", Bytes(self.streamed_bytes)));
        }
        if self.direct_bytes > 0 {
            parts.push(format!("read directly {}", Bytes(self.direct_bytes)));
        }
        parts.extend(self.cache());
        parts.extend(self.bound().map(|bound| format!("bound: {bound}")));
        f.write_str(&parts.join(" | "))
    }
}

impl Bound {
    /// `bus` or `compute`.
    pub fn name(self) -> &'static str {
        match self {
            Bound::Bus(_) => "bus",
            Bound::Compute(_) => "compute",
        }
    }

    /// Share of wall time that it was busy.
    pub fn share(self) -> f64 {
        match self {
            Bound::Bus(share) | Bound::Compute(share) => share,
        }
    }
}

/// `bus 97 %`
impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:.0} %", self.name(), 100.0 * self.share())
    }
}

fn ratio(a: u64, b: u64) -> Option<f64> {
    (b > 0).then(|| a as f64 / b as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATS: StreamStats = StreamStats {
        streamed_bytes: 100_000_000_000,
        direct_bytes: 7,
        copy_ns: 2_000_000_000,
        compute_ns: 1_900_000_000,
        both_ns: 1_800_000_000,
        wall_ns: 2_100_000_000,
        cache_hits: 0,
        cache_misses: 0,
        cache_evictions: 0,
        promoted_bytes: 0,
    };

    #[test]
    fn a_pass_that_streams() {
        assert_eq!(STATS.link_gbps(), Some(50.0));
        assert_eq!(STATS.hidden_share(), Some(0.9));
        assert_eq!(STATS.bound(), Some(Bound::Bus(2e9 / 2.1e9)));
        assert_eq!(STATS.bound().map(|b| b.to_string()).as_deref(), Some("bus 95 %"));
        let line = "streamed 93.1 GiB at 50.0 GB/s, 90 % hidden behind compute | read directly 7 B | \
                    bound: bus 95 %";
        assert_eq!(STATS.to_string(), line);
        assert!(STATS.moved());
    }

    #[test]
    fn a_pass_that_computes() {
        let stats = StreamStats { copy_ns: 0, streamed_bytes: 0, both_ns: 0, ..STATS };
        assert_eq!((stats.link_gbps(), stats.hidden_share()), (None, None));
        assert_eq!(stats.bound(), Some(Bound::Compute(1.9e9 / 2.1e9)));
        assert_eq!(stats.to_string(), "read directly 7 B | bound: compute 90 %");
    }

    #[test]
    fn a_pass_with_a_cache() {
        let cached = StreamStats { cache_hits: 61, cache_misses: 39, ..StreamStats::default() };
        assert_eq!(cached.hit_share(), Some(0.61));
        assert!(cached.moved());
        let cached = StreamStats { cache_evictions: 1, promoted_bytes: 1536, ..cached };
        let line = "expert cache: 61 % hits, 1 eviction, 1.5 KiB promoted";
        assert_eq!(cached.to_string(), line);
        let empty = StreamStats { cache_misses: 39, ..StreamStats::default() };
        assert_eq!((empty.hit_share(), empty.to_string().as_str()), (None, ""));
    }

    #[test]
    fn nothing_measured_is_no_figure() {
        let stats = StreamStats::default();
        assert_eq!((stats.link_gbps(), stats.hidden_share(), stats.bound()), (None, None, None));
        assert_eq!((stats.to_string().as_str(), stats.moved()), ("", false));
        // A copy queue without timestamps.
        assert_eq!(StreamStats { streamed_bytes: 5, ..stats }.to_string(), "streamed 5 B");
        // Time passed, but no lane was timed.
        let stats = StreamStats { wall_ns: 5, ..stats };
        assert_eq!(stats.bound(), None);
    }

    #[test]
    fn sums_add_up() {
        let stats = StreamStats {
            cache_hits: 5,
            cache_misses: 6,
            cache_evictions: 7,
            promoted_bytes: 8,
            ..STATS
        };
        let mut sum = stats;
        sum.add(&stats);
        let twice = |n: u64| 2 * n;
        assert_eq!(
            sum,
            StreamStats {
                streamed_bytes: twice(STATS.streamed_bytes),
                direct_bytes: twice(STATS.direct_bytes),
                copy_ns: twice(STATS.copy_ns),
                compute_ns: twice(STATS.compute_ns),
                both_ns: twice(STATS.both_ns),
                wall_ns: twice(STATS.wall_ns),
                cache_hits: 10,
                cache_misses: 12,
                cache_evictions: 14,
                promoted_bytes: 16,
            }
        );
        assert_eq!(sum.link_gbps(), STATS.link_gbps());
    }
}
