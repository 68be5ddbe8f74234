//! The figures of a run: how long, how fast the link, how much of the copying was hidden, and what the
//! run waited for.

use super::{Trace, Track, gbps};
use crate::stream::overlap::{busy_ns, overlap_ns};
use std::fmt;

/// What kept a run from being faster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// Copies: the bus was busy longer than the kernels.
    Bus,
    /// Kernels.
    Compute,
}

impl Bound {
    /// `bus` or `compute`.
    pub fn name(self) -> &'static str {
        match self {
            Bound::Bus => "bus",
            Bound::Compute => "compute",
        }
    }
}

/// See [`Trace::summary`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// From the first start to the last end.
    pub wall_ns: u64,
    /// Time with something on the compute lane.
    pub compute_ns: u64,
    /// Time with something on the copy lane.
    pub copy_ns: u64,
    /// The part of [`Self::copy_ns`] during which the compute lane was busy too.
    pub hidden_ns: u64,
    /// Bytes that the copy lane moved.
    pub copied_bytes: u64,
}

impl Summary {
    pub(super) fn of(trace: &Trace) -> Self {
        let (compute, copy) = (trace.intervals(Track::Compute), trace.intervals(Track::Copy));
        Summary {
            wall_ns: trace.bounds().map_or(0, |(start, end)| end - start),
            compute_ns: busy_ns(&compute),
            copy_ns: busy_ns(&copy),
            hidden_ns: overlap_ns(&copy, &compute),
            copied_bytes: trace.on(Track::Copy).map(|s| s.bytes).fold(0, u64::saturating_add),
        }
    }

    /// Speed of the copies while there were any.
    pub fn link_gbps(&self) -> Option<f64> {
        gbps(self.copied_bytes, self.copy_ns)
    }

    /// Share of copy time behind compute, from 0 to 1; `None` without copies.
    pub fn hidden(&self) -> Option<f64> {
        (self.copy_ns > 0).then(|| self.hidden_ns as f64 / self.copy_ns as f64)
    }

    /// Whichever lane was busy longer.
    pub fn bound(&self) -> Bound {
        if self.copy_ns > self.compute_ns { Bound::Bus } else { Bound::Compute }
    }

    /// Share of the wall time in which the lane of [`Self::bound`] was busy, from 0 to 1.
    pub fn bound_share(&self) -> f64 {
        self.compute_ns.max(self.copy_ns) as f64 / self.wall_ns.max(1) as f64
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "wall {}, ", Millis(self.wall_ns))?;
        match (self.link_gbps(), self.hidden()) {
            (Some(gbps), Some(hidden)) => {
                let (bytes, hidden) = (Decimal(self.copied_bytes), 100.0 * hidden);
                write!(f, "copies {bytes} at {gbps:.1} GB/s, {hidden:.1} % hidden behind compute, ")
            }
            _ => f.write_str("no copies, "),
        }?;
        let share = 100.0 * self.bound_share();
        write!(f, "bound: {} (busy {share:.1} %)", self.bound().name())
    }
}

/// Nanoseconds as people read them: `0.042 ms`, `336.1 ms`, `22.52 s`.
pub(super) struct Millis(pub(super) u64);

impl fmt::Display for Millis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = self.0 as f64 / 1e6;
        match self.0 {
            0..1_000_000 => write!(f, "{ms:.3} ms"),
            1_000_000..100_000_000 => write!(f, "{ms:.2} ms"),
            100_000_000..10_000_000_000 => write!(f, "{ms:.1} ms"),
            _ => write!(f, "{:.2} s", ms / 1e3),
        }
    }
}

/// Bytes in decimal units, as link speeds are: `16.9 GB`.
pub(super) struct Decimal(pub(super) u64);

impl fmt::Display for Decimal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0 as f64;
        match self.0 {
            0..1_000 => write!(f, "{bytes} B"),
            1_000..1_000_000 => write!(f, "{:.1} kB", bytes / 1e3),
            1_000_000..1_000_000_000 => write!(f, "{:.1} MB", bytes / 1e6),
            _ => write!(f, "{:.2} GB", bytes / 1e9),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::samples;
    use super::*;
    use crate::trace::Span;
    use proptest::prelude::*;

    fn span(track: Track, start_ns: u64, end_ns: u64, bytes: u64) -> Span {
        Span { track, name: "x".into(), il: None, start_ns, end_ns, bytes }
    }

    #[test]
    fn the_line_says_what_a_small_trace_shows() {
        let ms = 1_000_000;
        let spans = vec![
            span(Track::Copy, 0, 8 * ms, 300 * ms),
            span(Track::Copy, 8 * ms, 10 * ms, 100 * ms),
            span(Track::Compute, 6 * ms, 9 * ms, 0),
            span(Track::Compute, 10 * ms, 20 * ms, 0),
        ];
        let trace = Trace { spans, ..Trace::default() };
        assert_eq!(
            trace.summary().to_string(),
            "wall 20.00 ms, copies 400.0 MB at 40.0 GB/s, 30.0 % hidden behind compute, \
             bound: compute (busy 65.0 %)"
        );
        let none = Trace::default().summary().to_string();
        assert_eq!(none, "wall 0.000 ms, no copies, bound: compute (busy 0.0 %)");
    }

    #[test]
    fn a_prefill_that_waits_for_copies_is_bound_by_the_bus() {
        let summary = samples::prefill(12).summary();
        assert_eq!(summary.bound(), Bound::Bus);
        assert!(summary.bound_share() > 0.9 && summary.hidden().unwrap() > 0.5, "{summary}");
    }

    proptest! {
        #[test]
        fn parts_are_never_more_than_the_whole(trace in samples::any_trace()) {
            let s = trace.summary();
            prop_assert!(s.hidden_ns <= s.copy_ns.min(s.compute_ns));
            prop_assert!(s.copy_ns.max(s.compute_ns) <= s.wall_ns);
            prop_assert!(!s.to_string().contains("NaN") && !s.to_string().contains("inf"));
        }
    }
}
