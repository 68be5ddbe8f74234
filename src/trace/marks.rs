//! What a picture shows of a trace: spans narrower than a pixel merged into marks, visits of layers, and
//! the window that is worth a closer look. Pure: times in, times out.

use super::{Span, Trace, Track};
use crate::stream::overlap::busy_ns;

/// A window of more visits than this has an enlarged part.
const MAX_VISITS: usize = 9;
/// Visits of layers in the enlarged part.
const ENLARGED_VISITS: usize = 6;

/// Something to draw: one span, or several of a track that are too narrow to be seen alone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Mark<'a> {
    /// The longest of the spans.
    pub(super) span: &'a Span,
    pub(super) start_ns: u64,
    pub(super) end_ns: u64,
    /// Time with at least one span, at most `end_ns - start_ns`.
    pub(super) busy_ns: u64,
    pub(super) bytes: u64,
    pub(super) n_spans: usize,
    /// Whether no layer has half of the time.
    pub(super) is_mixed: bool,
}

/// The marks of a track within a window, by start. What is narrower than half a pixel is merged with
/// what follows, up to a pixel and a half; so every pixel has a few marks at most, and busy time is
/// kept. Spans that overlap on a track (two threads of the host) share the mark.
pub(super) fn marks<'a>(
    trace: &'a Trace,
    track: Track,
    window: (u64, u64),
    pixel_ns: f64,
) -> Vec<Mark<'a>> {
    let inside = |s: &&Span| s.start_ns < window.1 && s.end_ns > window.0 && s.duration_ns() > 0;
    let mut spans: Vec<&Span> = trace.on(track).filter(inside).collect();
    spans.sort_by_key(|span| (span.start_ns, span.end_ns));
    let mut groups: Vec<(u64, Vec<&Span>)> = Vec::new();
    for span in spans {
        match groups.last_mut() {
            Some((end_ns, group)) if joins(group, *end_ns, span, pixel_ns) => {
                *end_ns = (*end_ns).max(span.end_ns);
                group.push(span);
            }
            _ => groups.push((span.end_ns, vec![span])),
        }
    }
    groups.iter().filter_map(|(_, group)| mark(group, window)).collect()
}

/// Whether a span belongs to the mark of the spans before it.
fn joins(group: &[&Span], end_ns: u64, span: &Span, pixel_ns: f64) -> bool {
    let Some(first) = group.first() else { return false };
    let narrow = |ns: u64| (ns as f64) < pixel_ns / 2.0;
    let together_ns = span.end_ns.max(end_ns) - first.start_ns;
    let either_is_narrow = narrow(span.duration_ns()) || narrow(end_ns - first.start_ns);
    span.start_ns < end_ns || either_is_narrow && together_ns as f64 <= 1.5 * pixel_ns
}

fn mark<'a>(group: &[&'a Span], window: (u64, u64)) -> Option<Mark<'a>> {
    let clip = |s: &&Span| (s.start_ns.max(window.0), s.end_ns.min(window.1));
    let times: Vec<_> = group.iter().map(clip).collect();
    let longest = group.iter().copied().max_by_key(|span| span.duration_ns())?;
    let own: Vec<_> = group.iter().filter(|span| span.il == longest.il).map(clip).collect();
    let busy = busy_ns(&times);
    Some(Mark {
        span: longest,
        start_ns: times.iter().map(|time| time.0).min()?,
        end_ns: times.iter().map(|time| time.1).max()?,
        busy_ns: busy,
        bytes: group.iter().map(|span| span.bytes).fold(0, u64::saturating_add),
        n_spans: group.len(),
        is_mixed: busy_ns(&own) < busy / 2,
    })
}

/// A run of spans of one layer on one track, with nothing of another layer between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Visit {
    pub(super) il: u32,
    pub(super) start_ns: u64,
    pub(super) end_ns: u64,
    /// When the first of the spans ended.
    pub(super) first_end_ns: u64,
}

/// The visits of a track, by start.
pub(super) fn visits(trace: &Trace, track: Track) -> Vec<Visit> {
    let mut spans: Vec<(u32, &Span)> =
        trace.on(track).filter_map(|span| Some((span.il?, span))).collect();
    spans.sort_by_key(|(_, span)| (span.start_ns, span.end_ns));
    let mut visits: Vec<Visit> = Vec::new();
    for (il, &Span { start_ns, end_ns, .. }) in spans {
        match visits.last_mut() {
            Some(last) if last.il == il => last.end_ns = last.end_ns.max(end_ns),
            _ => visits.push(Visit { il, start_ns, end_ns, first_end_ns: end_ns }),
        }
    }
    visits
}

/// The window to enlarge: some layers around the middle of what is copied, by bytes (a prompt's copies are
/// few and large, an answer's many and small), or of everything where nothing is copied. `None` if the
/// whole is short enough to be seen.
pub(super) fn enlarged(trace: &Trace) -> Option<(u64, u64)> {
    let visits = visits(trace, Track::Compute);
    if visits.len() <= MAX_VISITS {
        return None;
    }
    let middle_ns = middle_of_copies(trace)
        .unwrap_or_else(|| visits.get(visits.len() / 2).map_or(0, |visit| visit.start_ns));
    let middle = visits.partition_point(|visit| visit.start_ns < middle_ns);
    let first = middle.saturating_sub(ENLARGED_VISITS / 2).min(visits.len() - ENLARGED_VISITS);
    let some = &visits[first..first + ENLARGED_VISITS];
    let start_ns = some.first()?.start_ns;
    let end_ns = some.iter().map(|visit| visit.end_ns).max()?;
    (start_ns < end_ns).then_some((start_ns, end_ns))
}

/// When the copy began that half of all bytes were copied with.
fn middle_of_copies(trace: &Trace) -> Option<u64> {
    let mut copies: Vec<(u64, u128)> =
        trace.on(Track::Copy).map(|span| (span.start_ns, span.bytes.into())).collect();
    copies.sort_unstable();
    let half = copies.iter().map(|copy| copy.1).sum::<u128>() / 2;
    let mut copied = 0;
    let middle = copies.into_iter().find(|(_, bytes)| {
        copied += bytes;
        copied >= half
    });
    middle.map(|(start_ns, _)| start_ns)
}

#[cfg(test)]
mod tests {
    use super::super::samples;
    use super::*;
    use proptest::prelude::*;

    const ALL: (u64, u64) = (0, u64::MAX);

    proptest! {
        #[test]
        fn merging_keeps_busy_time_bytes_and_count(
            trace in samples::any_trace(),
            pixel_ns in prop_oneof![Just(0.0), 1f64..1e6],
        ) {
            for track in Track::ALL {
                let marks = marks(&trace, track, ALL, pixel_ns);
                let seen = trace.on(track).filter(|span| span.duration_ns() > 0);
                let (n, bytes) = seen.fold((0, 0), |(n, b), s| (n + 1, b + s.bytes));
                let busy: u64 = marks.iter().map(|mark| mark.busy_ns).sum();
                prop_assert_eq!(busy, busy_ns(&trace.intervals(track)));
                prop_assert_eq!(marks.iter().map(|mark| mark.n_spans).sum::<usize>(), n);
                prop_assert_eq!(marks.iter().map(|mark| mark.bytes).sum::<u64>(), bytes);
                prop_assert!(marks.windows(2).all(|m| m[0].end_ns <= m[1].start_ns));
                prop_assert!(marks.iter().all(|m| m.busy_ns <= m.end_ns - m.start_ns));
            }
        }

        /// However many spans there are, a pixel has few marks; what is wide is not merged.
        #[test]
        fn the_picture_bounds_the_marks(trace in samples::any_trace(), pixels in 1u64..200) {
            let Some((start_ns, end_ns)) = trace.bounds() else { return Ok(()) };
            let pixel_ns = (end_ns - start_ns) as f64 / pixels as f64;
            for track in Track::ALL {
                let marks = marks(&trace, track, ALL, pixel_ns);
                prop_assert!(marks.len() as u64 <= 2 * pixels + 1, "{} marks", marks.len());
            }
        }

        #[test]
        fn a_window_clips(trace in samples::any_trace(), a in 0u64..6_000_000, b in 0u64..6_000_000) {
            let origin_ns = trace.bounds().map_or(0, |bounds| bounds.0);
            let window = (origin_ns + a.min(b), origin_ns + a.max(b));
            for track in Track::ALL {
                let busy: u64 =
                    marks(&trace, track, window, 5e3).iter().map(|mark| mark.busy_ns).sum();
                let clip = |(s, e): (u64, u64)| (s.max(window.0), e.min(window.1));
                let times: Vec<_> = trace.intervals(track).into_iter().map(clip).collect();
                prop_assert_eq!(busy, busy_ns(&times));
            }
        }

        #[test]
        fn visits_cover_the_spans_of_layers(trace in samples::any_trace()) {
            let visits = visits(&trace, Track::Compute);
            prop_assert!(visits.windows(2).all(|v| v[0].il != v[1].il));
            for span in trace.on(Track::Compute).filter(|span| span.il.is_some()) {
                let holds = |v: &Visit| v.start_ns <= span.start_ns && v.end_ns >= span.end_ns;
                prop_assert!(visits.iter().any(|v| Some(v.il) == span.il && holds(v)));
            }
            let window = enlarged(&trace);
            prop_assert!(window.is_none() || visits.len() > MAX_VISITS);
            prop_assert!(window.is_none_or(|(start_ns, end_ns)| start_ns < end_ns));
        }
    }

    #[test]
    fn the_enlarged_window_has_copies_and_whole_layers() {
        assert_eq!(enlarged(&samples::prefill(MAX_VISITS as u32)), None);
        let mut trace = samples::prefill(48);
        // Experts of the first 16 layers only are on the host.
        trace.spans.retain(|span| span.track == Track::Compute || span.il < Some(16));
        let window = enlarged(&trace).unwrap();
        let visits = visits(&trace, Track::Compute);
        let inside: Vec<u32> = visits
            .iter()
            .filter(|v| v.start_ns >= window.0 && v.end_ns <= window.1)
            .map(|v| v.il)
            .collect();
        assert_eq!(inside.len(), ENLARGED_VISITS);
        assert!(inside.contains(&8) && inside[0] > 3, "{inside:?}");
        // An answer of many tokens follows, with small copies.
        let (_, end_ns) = trace.bounds().unwrap();
        let answer = (0..500).flat_map(|i| {
            let span = |track, bytes| {
                let (name, il, start_ns) = ("x".to_owned(), Some(i % 48), end_ns + u64::from(i));
                Span { track, name, il, start_ns, end_ns: start_ns + 1, bytes }
            };
            [span(Track::Copy, 1000), span(Track::Compute, 0)]
        });
        trace.spans.extend(answer);
        assert_eq!(enlarged(&trace), Some(window));
    }
}
