//! Where the time went, by kind of span: the table of `vkmoe trace --table`.

use super::{Trace, Track, gbps};
use crate::stream::overlap::busy_ns;
use std::collections::BTreeMap;

/// See [`Trace::profile`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Profile {
    /// By track, and within a track the longest first.
    pub rows: Vec<ProfileRow>,
    /// From the first start to the last end.
    pub wall_ns: u64,
}

/// All spans of a track that have the same name but for the layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProfileRow {
    /// Where they ran.
    pub track: Track,
    /// What they have in common: `ffn_gate_exps`.
    pub kind: String,
    /// How many.
    pub count: u64,
    /// Time with at least one of them.
    pub busy_ns: u64,
    /// Bytes that they moved.
    pub bytes: u64,
}

impl ProfileRow {
    /// Their speed, if they moved anything.
    pub fn gbps(&self) -> Option<f64> {
        gbps(self.bytes, self.busy_ns)
    }
}

impl Profile {
    pub(super) fn of(trace: &Trace) -> Self {
        let mut kinds = BTreeMap::<(Track, &str), (u64, Vec<(u64, u64)>)>::new();
        for span in &trace.spans {
            let (bytes, intervals) = kinds.entry((span.track, span.kind())).or_default();
            *bytes = bytes.saturating_add(span.bytes);
            intervals.push((span.start_ns, span.end_ns));
        }
        let row = |((track, kind), (bytes, intervals)): (_, (u64, Vec<_>))| {
            let (kind, count) = (str::to_owned(kind), intervals.len() as u64);
            ProfileRow { track, kind, count, busy_ns: busy_ns(&intervals), bytes }
        };
        let mut rows: Vec<ProfileRow> = kinds.into_iter().map(row).collect();
        // Stable: rows that take the same time stay in alphabetical order.
        rows.sort_by_key(|row| (row.track, std::cmp::Reverse(row.busy_ns)));
        Profile { rows, wall_ns: trace.summary().wall_ns }
    }

    /// Part of the wall time during which a row was busy, from 0 to 1. Those of a track add up to at
    /// most 1 if nothing on it overlaps.
    pub fn share(&self, row: &ProfileRow) -> f64 {
        row.busy_ns as f64 / self.wall_ns.max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::super::samples;
    use proptest::prelude::*;

    #[test]
    fn layers_are_added_up_by_kind() {
        let profile = samples::prefill(10).profile();
        let rows: Vec<_> =
            profile.rows.iter().map(|r| (r.track.name(), r.kind.as_str(), r.count)).collect();
        assert_eq!(
            rows,
            [
                ("compute", "experts", 10),
                ("compute", "attention", 10),
                ("copy", "ffn_down_exps", 10),
                ("copy", "ffn_gate_exps", 10),
                ("copy", "ffn_up_exps", 10),
            ]
        );
        let copies = &profile.rows[2];
        assert_eq!((copies.busy_ns, copies.bytes), (23_001_230, 1_150_000_000));
        assert!((copies.gbps().unwrap() - 49.997).abs() < 0.01);
        assert!(profile.rows[0].gbps().is_none());
    }

    proptest! {
        #[test]
        fn every_span_is_counted_once(trace in samples::any_trace()) {
            let profile = trace.profile();
            let count: u64 = profile.rows.iter().map(|row| row.count).sum();
            prop_assert_eq!(count, trace.spans.len() as u64);
            let bytes: u64 = profile.rows.iter().map(|row| row.bytes).sum();
            prop_assert_eq!(bytes, trace.spans.iter().map(|span| span.bytes).sum::<u64>());
            for row in &profile.rows {
                prop_assert!((0.0..=1.0).contains(&profile.share(row)));
            }
        }
    }
}
