//! How long lanes were busy, and busy together: arithmetic over half-open intervals `(start, end)` in
//! nanoseconds of one clock. Pure. Intervals may overlap, touch, come in any order or be empty; one that
//! ends before it starts is empty.

/// Time covered by at least one interval.
pub fn busy_ns(intervals: &[(u64, u64)]) -> u64 {
    union(intervals).iter().map(|(start, end)| end - start).sum()
}

/// Time covered by at least one interval of `a` and one of `b`.
pub fn overlap_ns(a: &[(u64, u64)], b: &[(u64, u64)]) -> u64 {
    let (a, b) = (union(a), union(b));
    let (mut a, mut b) = (a.iter().peekable(), b.iter().peekable());
    let mut total = 0;
    while let (Some(&&(a_start, a_end)), Some(&&(b_start, b_end))) = (a.peek(), b.peek()) {
        total += a_end.min(b_end).saturating_sub(a_start.max(b_start));
        // What ends first meets nothing more.
        if a_end <= b_end {
            a.next();
        } else {
            b.next();
        }
    }
    total
}

/// The same set as ascending intervals that neither overlap nor touch nor are empty.
pub fn union(intervals: &[(u64, u64)]) -> Vec<(u64, u64)> {
    let mut sorted: Vec<_> = intervals.iter().copied().filter(|(start, end)| start < end).collect();
    sorted.sort_unstable();
    let mut joined: Vec<(u64, u64)> = Vec::new();
    for (start, end) in sorted {
        match joined.last_mut() {
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => joined.push((start, end)),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LIMIT_NS: u64 = 60;

    fn intervals() -> impl Strategy<Value = Vec<(u64, u64)>> {
        prop::collection::vec((0..LIMIT_NS, 0..LIMIT_NS), 0..12)
    }

    fn covers(intervals: &[(u64, u64)], ns: u64) -> bool {
        intervals.iter().any(|&(start, end)| start <= ns && ns < end)
    }

    proptest! {
        #[test]
        fn agrees_with_counting_every_nanosecond(a in intervals(), b in intervals()) {
            let count = |hit: &dyn Fn(u64) -> bool| (0..LIMIT_NS).filter(|&ns| hit(ns)).count() as u64;
            prop_assert_eq!(busy_ns(&a), count(&|ns| covers(&a, ns)));
            prop_assert_eq!(overlap_ns(&a, &b), count(&|ns| covers(&a, ns) && covers(&b, ns)));
            prop_assert_eq!(overlap_ns(&b, &a), overlap_ns(&a, &b));
            prop_assert_eq!(overlap_ns(&a, &a), busy_ns(&a));
        }

        #[test]
        fn a_union_is_sorted_and_separate(a in intervals()) {
            let union = union(&a);
            prop_assert!(union.windows(2).all(|w| w[0].1 < w[1].0));
            prop_assert!(union.iter().all(|(start, end)| start < end));
            prop_assert!((0..LIMIT_NS).all(|ns| covers(&union, ns) == covers(&a, ns)));
        }
    }

    #[test]
    fn the_whole_range_does_not_overflow() {
        let all = [(0, u64::MAX), (1, u64::MAX), (u64::MAX, 0)];
        assert_eq!(busy_ns(&all), u64::MAX);
        assert_eq!(overlap_ns(&all, &[(5, 7), (7, 9)]), 4);
    }
}
