//! Draws a trace: headline and figures, the whole run as thin lanes, and below it some layers enlarged,
//! with ribbons from the copies of a layer to the kernels that read them. Time runs to the right; what a
//! lane leaves empty is idle. Nothing scripted: the file shows the same on a web page, in an image viewer
//! and in print; pointing at a span names it.

mod canvas;
mod palette;

use super::marks::{self, Mark, Visit};
use super::summary::{Decimal, Millis};
use super::{Span, Summary, Trace, Track};
use canvas::{Canvas, Font, Px, Rect};
use std::collections::BTreeSet;

use palette::{CARD, CARD_EDGE, GRID, INK, LANE, QUIET};

const WIDTH: f64 = 1200.0;
const MARGIN: f64 = 32.0;
/// Left end of the time axis; names of lanes are before it.
const LEFT: f64 = 108.0;
const RIGHT: f64 = WIDTH - MARGIN;

const TITLE: Font = Font::new(20.0, INK).weight(600);
const DEVICE: Font = Font::new(14.0, QUIET).anchor("end");
const FIGURE: Font = Font::new(24.0, INK).weight(600);
const CAPTION: Font = Font::new(12.0, QUIET);
const LANE_NAME: Font = Font::new(12.0, INK).weight(500).anchor("end");
const TICK: Font = Font::new(11.0, QUIET).anchor("middle");
const LAYER: Font = Font::new(13.0, INK).weight(600).anchor("middle");
const KIND: Font = Font::new(11.0, INK).anchor("middle");

pub(super) fn draw(trace: &Trace) -> String {
    let mut picture = Picture { canvas: Canvas::new(WIDTH), trace, y: MARGIN };
    let summary = trace.summary();
    picture.header(&summary);
    match (trace.bounds(), marks::enlarged(trace)) {
        (None, _) => picture.caption("nothing was traced"),
        (Some(whole), None) => {
            picture.panel(whole, whole, &LARGE);
        }
        (Some(whole), Some(part)) => {
            picture.caption(&whole_run(trace));
            let above = picture.panel(whole, whole, &SMALL);
            picture.magnifier(above, whole, part);
            picture.panel(whole, part, &LARGE);
        }
    }
    picture.finish(&summary)
}

/// Sizes of a panel.
struct Style {
    lane_h: f64,
    gap: f64,
    /// Between compute and copy; ribbons cross it.
    ribbon_h: f64,
    /// Room for the numbers of layers beside the lanes; 0: neither they nor kinds are written.
    label_h: f64,
    corner: f64,
}

impl Style {
    fn has_labels(&self) -> bool {
        self.label_h > 0.0
    }
}

const SMALL: Style = Style { lane_h: 20.0, gap: 5.0, ribbon_h: 5.0, label_h: 0.0, corner: 0.0 };
const LARGE: Style = Style { lane_h: 52.0, gap: 26.0, ribbon_h: 54.0, label_h: 24.0, corner: 2.5 };

/// Times to pixels.
#[derive(Clone, Copy)]
struct Axis {
    /// Shown.
    window: (u64, u64),
    /// Where the run begins, which is 0 ms.
    origin_ns: u64,
}

impl Axis {
    fn pixel_ns(&self) -> f64 {
        ((self.window.1 - self.window.0) as f64 / (RIGHT - LEFT)).max(f64::MIN_POSITIVE)
    }

    fn shows(&self, start_ns: u64, end_ns: u64) -> bool {
        start_ns < self.window.1 && end_ns > self.window.0
    }

    fn x(&self, ns: u64) -> f64 {
        let ns = ns.clamp(self.window.0, self.window.1);
        LEFT + (ns - self.window.0) as f64 / self.pixel_ns()
    }
}

struct Picture<'a> {
    canvas: Canvas,
    trace: &'a Trace,
    /// Everything above is drawn.
    y: f64,
}

impl Picture<'_> {
    fn header(&mut self, summary: &Summary) {
        let half = (RIGHT - MARGIN) / 2.0;
        self.y += TITLE.size;
        self.canvas.text(MARGIN, self.y, TITLE, &TITLE.cut(&self.trace.model, 1.2 * half));
        self.canvas.text(RIGHT, self.y, DEVICE, &DEVICE.cut(&self.trace.device, 0.7 * half));
        self.y += 46.0;
        let figures = figures(summary);
        let step = (RIGHT - MARGIN) / figures.len() as f64;
        for (i, (figure, caption)) in figures.iter().enumerate() {
            let x = MARGIN + step * i as f64;
            self.canvas.text(x, self.y, FIGURE, figure);
            self.canvas.text(x, self.y + 18.0, CAPTION, caption);
        }
        self.y += 46.0;
    }

    fn caption(&mut self, words: &str) {
        self.y += CAPTION.size;
        self.canvas.text(MARGIN, self.y, CAPTION, words);
        self.y += 10.0;
    }

    /// Lanes over an axis. Returns top and bottom of the lanes.
    fn panel(&mut self, whole: (u64, u64), window: (u64, u64), style: &Style) -> (f64, f64) {
        let axis = Axis { window, origin_ns: whole.0 };
        let tracks: Vec<Track> =
            Track::ALL.into_iter().filter(|&track| self.trace.on(track).next().is_some()).collect();
        let top = self.y + style.label_h;
        let both = tracks.starts_with(&[Track::Compute, Track::Copy]);
        let gap = |i| if both && i == 1 { style.ribbon_h } else { style.gap };
        let y_of = |i: usize| top + i as f64 * style.lane_h + (1..=i).map(gap).sum::<f64>();
        let bottom = y_of(tracks.len() - 1) + style.lane_h;
        // The copies' layers are written below them.
        let foot_h = if tracks.ends_with(&[Track::Copy]) { style.label_h } else { 0.0 };
        self.grid(axis, (top, bottom), bottom + foot_h + 17.0);
        if both && style.has_labels() {
            self.ribbons(axis, top + style.lane_h, y_of(1));
        }
        for (i, &track) in tracks.iter().enumerate() {
            let lane = Rect { x: LEFT, y: y_of(i), w: RIGHT - LEFT, h: style.lane_h };
            self.lane(track, lane, axis, style);
        }
        self.y = bottom + foot_h + 22.0;
        (top, bottom)
    }

    /// Lines at round times, labelled below the lanes.
    fn grid(&mut self, axis: Axis, (top, bottom): (f64, f64), label_y: f64) {
        let (step_ns, decimals) = tick_step(axis.window.1 - axis.window.0);
        let first = (axis.window.0 - axis.origin_ns).div_ceil(step_ns);
        let ticks = (first..).map_while(|i| i.checked_mul(step_ns));
        for ns in ticks.take_while(|&ns| ns <= axis.window.1 - axis.origin_ns) {
            let x = Px(axis.x(axis.origin_ns + ns));
            let line = format!("M{x} {}V{}", Px(top - 4.0), Px(bottom + 5.0));
            self.canvas.path(&line, format_args!("stroke=\"{GRID}\" stroke-dasharray=\"2 3\""));
            let label = match step_ns {
                ..1_000_000_000 => format!("{:.decimals$} ms", ns as f64 / 1e6),
                _ => format!("{} s", ns / 1_000_000_000),
            };
            self.canvas.text(x.0, label_y, TICK, &label);
        }
    }

    fn lane(&mut self, track: Track, lane: Rect, axis: Axis, style: &Style) {
        let corner = style.corner;
        self.canvas.rect(lane, format_args!("fill=\"{LANE}\" rx=\"{corner}\""), None);
        let middle = lane.y + lane.h / 2.0 + 4.0;
        self.canvas.text(LEFT - 12.0, middle, LANE_NAME, track.name());
        let marks = marks::marks(self.trace, track, axis.window, axis.pixel_ns());
        if !style.has_labels() {
            return self.canvas.crisp(|canvas| {
                for mark in &marks {
                    draw_mark(canvas, mark, lane, axis, corner);
                }
            });
        }
        for mark in &marks {
            let rect = draw_mark(&mut self.canvas, mark, lane, axis, corner);
            self.kind(mark, rect);
        }
        match track {
            Track::Compute => self.layers(track, lane.y - 8.0, axis),
            Track::Copy => self.layers(track, lane.y + lane.h + 16.0, axis),
            Track::Host => {}
        }
    }

    /// What a span is, if there is room on it.
    fn kind(&mut self, mark: &Mark<'_>, rect: Rect) {
        let fits = |words: &&str| mark.n_spans == 1 && KIND.width(words) + 6.0 < rect.w;
        if let Some(words) = short_names(mark.span.kind()).iter().find(|words| fits(words)) {
            let font = Font { fill: palette::paint(mark).ink, ..KIND };
            self.canvas.text(rect.x + rect.w / 2.0, rect.y + rect.h / 2.0 + 4.0, font, words);
        }
    }

    /// Numbers of layers, each over or under the middle of what it has of a lane. `y`: of the words.
    fn layers(&mut self, track: Track, y: f64, axis: Axis) {
        for visit in marks::visits(self.trace, track) {
            let (x0, x1) = (axis.x(visit.start_ns), axis.x(visit.end_ns));
            let (long, short) = (format!("layer {}", visit.il), visit.il.to_string());
            let fits = |words: &&String| LAYER.width(words) + 8.0 < x1 - x0;
            if let Some(words) = [&long, &short].into_iter().find(fits) {
                let font = Font { fill: palette::ink_of_layer(visit.il), ..LAYER };
                self.canvas.text((x0 + x1) / 2.0, y, font, words);
            }
        }
    }

    /// From the copies of a layer up to the kernels that read them.
    fn ribbons(&mut self, axis: Axis, top: f64, bottom: f64) {
        let kernels = marks::visits(self.trace, Track::Compute);
        for copy in marks::visits(self.trace, Track::Copy) {
            if !axis.shows(copy.start_ns, copy.end_ns) {
                continue;
            }
            let reads = |k: &&Visit| k.il == copy.il && k.end_ns >= copy.end_ns;
            let Some(kernel) = kernels.iter().find(reads) else { continue };
            let from_ns = kernel.start_ns.max(copy.first_end_ns);
            if !axis.shows(from_ns, kernel.end_ns) {
                continue;
            }
            let (c0, c1) = (Px(axis.x(copy.start_ns)), Px(axis.x(copy.end_ns)));
            let (k0, k1) = (Px(axis.x(from_ns)), Px(axis.x(kernel.end_ns)));
            let (top, bottom, half) = (Px(top), Px(bottom), Px((top + bottom) / 2.0));
            let path = format!(
                "M{c0} {bottom}C{c0} {half} {k0} {half} {k0} {top}H{k1}C{k1} {half} {c1} {half} {c1} {bottom}z"
            );
            let fill = palette::of_layer(copy.il);
            self.canvas.path(&path, format_args!("fill=\"{fill}\" opacity=\"0.2\""));
        }
    }

    /// From the part of the overview that is enlarged down to the large lanes.
    fn magnifier(&mut self, (top, bottom): (f64, f64), whole: (u64, u64), part: (u64, u64)) {
        let axis = Axis { window: whole, origin_ns: whole.0 };
        let (x0, x1) = (axis.x(part.0), axis.x(part.1));
        let frame = Rect { x: x0, y: top - 4.0, w: (x1 - x0).max(1.0), h: bottom - top + 8.0 };
        let look = format_args!("fill=\"none\" stroke=\"{INK}\" stroke-width=\"1.5\" rx=\"3\"");
        self.canvas.rect(frame, look, None);
        let (from, to) = (bottom + 4.0, self.y + 30.0);
        let path = format!("M{} {from}L{} {to}H{}L{} {from}z", Px(x0), Px(LEFT), Px(RIGHT), Px(x1));
        self.canvas.path(&path, format_args!("fill=\"{INK}\" opacity=\"0.06\""));
        self.y = to + 10.0;
    }

    fn finish(mut self, summary: &Summary) -> String {
        if self.trace.on(Track::Copy).next().is_some() {
            self.y += 8.0;
            self.caption(
                "A colour is a layer: its experts arrive on the copy lane and are used above, where the ribbon leads. \
                 What a lane leaves empty is idle.",
            );
        }
        let height = self.y + MARGIN / 2.0;
        let card = Rect { x: 0.5, y: 0.5, w: WIDTH - 1.0, h: height - 1.0 };
        let mut below = Canvas::new(WIDTH);
        let look = format_args!("fill=\"{CARD}\" stroke=\"{CARD_EDGE}\" rx=\"12\"");
        below.rect(card, look, None);
        below.append(self.canvas);
        below.finish(height, &format!("{}: {summary}", self.trace.model))
    }
}

/// Draws a mark on its lane, and returns where.
fn draw_mark(canvas: &mut Canvas, mark: &Mark<'_>, lane: Rect, axis: Axis, corner: f64) -> Rect {
    let x = axis.x(mark.start_ns);
    let wide = axis.x(mark.end_ns) - x;
    // A hairline between spans that touch, where there is room; at least a pixel.
    let w = if wide > 4.0 { wide - 0.75 } else { wide.max(1.0) };
    let rect = Rect { x: x.min(RIGHT - w), w, ..lane };
    let fill = palette::paint(mark).fill;
    let full = mark.busy_ns as f64 / (mark.end_ns - mark.start_ns).max(1) as f64;
    let look = match full {
        _ if wide > 6.0 && corner > 0.0 => format!("fill=\"{fill}\" rx=\"{corner}\""),
        0.0..0.95 => format!("fill=\"{fill}\" opacity=\"{:.1}\"", full.max(0.2)),
        _ => format!("fill=\"{fill}\""),
    };
    canvas.rect(rect, format_args!("{look}"), Some(&tooltip(mark, axis.origin_ns)));
    rect
}

/// What the overview shows: `the whole run: 48 layers, 4 times each`.
fn whole_run(trace: &Trace) -> String {
    let visits = marks::visits(trace, Track::Compute);
    let layers: BTreeSet<u32> = visits.iter().map(|visit| visit.il).collect();
    let (n_visits, n_layers) = (visits.len(), layers.len().max(1));
    let often = match (n_visits / n_layers, n_visits % n_layers) {
        (1, 0) => String::new(),
        (times, 0) => format!(", {times} times each"),
        _ => format!(", {n_visits} visits"),
    };
    format!("the whole run: {n_layers} layers{often}")
}

/// The four numbers of the headline, each with what it is.
fn figures(summary: &Summary) -> Vec<(String, String)> {
    let mut figures = vec![(Millis(summary.wall_ns).to_string(), "wall time".to_owned())];
    if let (Some(gbps), Some(hidden)) = (summary.link_gbps(), summary.hidden()) {
        let bytes = Decimal(summary.copied_bytes);
        figures.push((format!("{gbps:.1} GB/s"), format!("over the link, {bytes} in all")));
        let hidden = format!("{:.1} %", 100.0 * hidden);
        figures.push((hidden, "of copy time hidden behind compute".to_owned()));
    }
    let busy = format!("is the bound, busy {:.1} % of the time", 100.0 * summary.bound_share());
    figures.push((summary.bound().name().to_owned(), busy));
    figures
}

/// Name, time and speed of what is pointed at.
fn tooltip(mark: &Mark<'_>, origin_ns: u64) -> String {
    let Span { name, start_ns, .. } = mark.span;
    let gbps = super::gbps(mark.bytes, mark.busy_ns);
    let moved = gbps.map(|gbps| format!("\n{} at {gbps:.1} GB/s", Decimal(mark.bytes)));
    let moved = moved.unwrap_or_default();
    match mark.n_spans {
        1 => {
            let (took, at) = (Millis(mark.span.duration_ns()), Millis(start_ns - origin_ns));
            let moved = mark.span.gbps().map_or(String::new(), |_| moved);
            format!("{name}\n{took} from {at} on{moved}")
        }
        n => format!("{name} and {} more\n{} busy{moved}", n - 1, Millis(mark.busy_ns)),
    }
}

/// What may be written on a span, best first: `ffn_gate_exps` is `gate`, too.
fn short_names(kind: &str) -> [&str; 3] {
    let tensor = kind.strip_prefix("ffn_").and_then(|kind| kind.strip_suffix("_exps"));
    let matrix = kind.strip_suffix(" experts");
    let well_known = match kind {
        "attention" => "attn",
        "experts" => "exps",
        _ => kind,
    };
    [tensor.unwrap_or(kind), matrix.unwrap_or(kind), well_known]
}

/// A round step (1, 2 or 5 times a power of ten) for at most eight ticks in a duration, and the decimals
/// that its milliseconds need.
fn tick_step(duration_ns: u64) -> (u64, usize) {
    let steps = (0..19u32).flat_map(|k| [1, 2, 5].map(|m| (m * 10u64.pow(k), k as usize)));
    let enough = |&(step_ns, _): &(u64, usize)| duration_ns / step_ns <= 8;
    let (step_ns, k) = steps.into_iter().find(enough).unwrap_or((u64::MAX, 19));
    (step_ns, 6usize.saturating_sub(k))
}

#[cfg(test)]
mod tests {
    use super::super::samples;
    use super::*;
    use proptest::prelude::*;
    use roxmltree::Document;

    /// The file that was drawn, which is XML or the test fails.
    fn parsed(svg: &str) -> Document<'_> {
        Document::parse(svg).unwrap_or_else(|e| panic!("{e}: {svg:.2000}"))
    }

    fn tooltips(document: &Document<'_>) -> Vec<String> {
        let titles = document.descendants().filter(|node| node.has_tag_name("title"));
        titles.filter_map(|node| Some(node.text()?.to_owned())).collect()
    }

    fn words(document: &Document<'_>) -> Vec<String> {
        let texts = document.descendants().filter(|node| node.has_tag_name("text"));
        texts.filter_map(|node| Some(node.text()?.to_owned())).collect()
    }

    #[test]
    fn a_short_run_is_drawn_once_with_every_span_named() {
        let trace = samples::prefill(5);
        let svg = trace.to_svg();
        let document = parsed(&svg);
        let tips = tooltips(&document);
        // The file's own title, and one a span.
        assert_eq!(tips.len(), 1 + trace.spans.len());
        assert_eq!(tips[0], format!("qwen3 <30b> & \"more\": {}", trace.summary()));
        let up = "blk.0.ffn_up_exps\n2.30 ms from 2.30 ms on\n115.0 MB at 50.0 GB/s";
        assert!(tips.iter().any(|tip| tip == up), "{tips:#?}");
        let words = words(&document);
        for expected in ["qwen3 <30b> & \"more\"", "a device", "bus", "compute", "copy", "0 ms"] {
            assert!(words.iter().any(|word| word == expected), "{expected}: {words:?}");
        }
        // Over the kernels and under the copies.
        for il in 0..5 {
            let layer = format!("layer {il}");
            assert_eq!(words.iter().filter(|word| **word == layer).count(), 2, "{layer}");
        }
        assert_eq!(trace.to_svg(), svg, "the same trace gives the same file");
    }

    #[test]
    fn a_long_run_gets_an_overview_and_whole_layers_enlarged() {
        let svg = samples::prefill(48).to_svg();
        let words = words(&parsed(&svg));
        let said = |expected: &str| words.iter().any(|word| word == expected);
        assert!(said("the whole run: 48 layers"), "{words:?}");
        assert!(said("layer 23") && said("layer 25") && !said("layer 3"), "{words:?}");
    }

    /// A prefill of many ubatches, a decode of many tokens, and spans of all widths.
    #[test]
    fn pictures_of_many_spans_stay_small() {
        let repeated = |mut trace: Trace, times: u64| {
            let (start_ns, end_ns) = trace.bounds().unwrap();
            let once = trace.spans.clone();
            for i in 1..times {
                let shift_ns = i * (end_ns - start_ns);
                trace.spans.extend(once.iter().cloned().map(|mut span| {
                    span.start_ns += shift_ns;
                    span.end_ns += shift_ns;
                    span
                }));
            }
            trace
        };
        let widths = |i: u64| [20_000, 900_000, 4_000_000][i as usize % 3];
        let mut mixed = Trace::default();
        let mut start_ns = 0;
        for i in 0..20_000 {
            let track = [Track::Compute, Track::Copy][i as usize % 2];
            let end_ns = start_ns + widths(i / 2);
            let (name, il) = (format!("blk.{}.ffn_gate_exps", i / 6), Some(i as u32 / 6));
            mixed.spans.push(Span { track, name, il, start_ns, end_ns, bytes: 1 << 20 });
            start_ns = end_ns + i % 7 * 1000;
        }
        for trace in [repeated(samples::prefill(48), 84), mixed] {
            assert!(trace.spans.len() >= 20_000);
            let svg = trace.to_svg();
            assert!(svg.len() < 500_000, "{} bytes", svg.len());
            parsed(&svg);
        }
    }

    #[test]
    fn a_trace_of_nothing_or_of_one_moment_is_a_picture() {
        assert!(words(&parsed(&Trace::default().to_svg())).contains(&"nothing was traced".into()));
        let (track, name, ns) = (Track::Host, "x".to_owned(), u64::MAX);
        let span = Span { track, name, il: None, start_ns: ns, end_ns: ns, bytes: 1 };
        parsed(&Trace { spans: vec![span], ..Trace::default() }.to_svg());
    }

    proptest! {
        /// Whatever names hold, the file is XML, has no number that is none, and stays on its card.
        #[test]
        fn any_trace_is_a_picture(trace in samples::any_trace()) {
            let svg = trace.to_svg();
            let document = parsed(&svg);
            for node in document.descendants().filter(|node| node.has_tag_name("rect")) {
                let number = |name| node.attribute(name).unwrap().parse::<f64>().unwrap();
                prop_assert!(number("x") >= 0.0 && number("width") > 0.0 && number("height") > 0.0);
                prop_assert!(number("x") + number("width") <= WIDTH + 0.01);
            }
        }

        #[test]
        fn ticks_are_few_and_round(duration_ns in 1u64..) {
            let (step_ns, decimals) = tick_step(duration_ns);
            prop_assert!(duration_ns / step_ns <= 8 && (step_ns == 1 || duration_ns / step_ns >= 3));
            let label = format!("{:.decimals$}", step_ns as f64 / 1e6);
            prop_assert_eq!((label.parse::<f64>().unwrap() * 1e6).round() as u64, step_ns);
        }
    }
}
