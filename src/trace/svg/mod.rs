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
            let label = format!("{:.decimals$} ms", ns as f64 / 1e6);
            self.canvas.text(x.0, label_y, TICK, &label);
        }
    }

    fn lane(&mut self, track: Track, lane: Rect, axis: Axis, style: &Style) {
        let corner = style.corner;
        self.canvas.rect(lane, format_args!("fill=\"{LANE}\" rx=\"{corner}\""), None);
        let middle = lane.y + lane.h / 2.0 + 4.0;
        self.canvas.text(LEFT - 12.0, middle, LANE_NAME, track.name());
        let marks = marks::marks(self.trace, track, axis.window, axis.pixel_ns());
        for mark in &marks {
            self.mark(mark, lane, axis, style);
        }
        match track {
            Track::Compute if style.has_labels() => self.layers(track, lane.y - 8.0, axis),
            Track::Copy if style.has_labels() => self.layers(track, lane.y + lane.h + 16.0, axis),
            _ => {}
        }
    }

    fn mark(&mut self, mark: &Mark<'_>, lane: Rect, axis: Axis, style: &Style) {
        let paint = palette::paint(mark.span);
        let x = axis.x(mark.start_ns);
        let w = axis.x(mark.end_ns) - x;
        // A hairline between spans that touch, where there is room.
        let gap = if w > 4.0 { 0.75 } else { 0.0 };
        let rect = Rect { x, w: w - gap, ..lane };
        let full = mark.busy_ns as f64 / (mark.end_ns - mark.start_ns).max(1) as f64;
        let tip = tooltip(mark, axis.origin_ns);
        let (fill, corner) = (paint.fill, if w > 6.0 { style.corner } else { 0.0 });
        let look = match (full > 0.95, corner > 0.0) {
            (true, true) => format!("fill=\"{fill}\" rx=\"{corner}\""),
            (true, false) => format!("fill=\"{fill}\""),
            (false, _) => format!("fill=\"{fill}\" opacity=\"{:.1}\"", full.max(0.1)),
        };
        self.canvas.rect(rect, format_args!("{look}"), Some(&tip));
        if style.has_labels() && mark.n_spans == 1 {
            let fits = |words: &&str| KIND.width(words) + 6.0 < rect.w;
            if let Some(words) = short_names(mark.span.kind()).iter().find(|w| fits(w)) {
                let font = Font { fill: paint.ink, ..KIND };
                self.canvas.text(x + rect.w / 2.0, lane.y + lane.h / 2.0 + 4.0, font, words);
            }
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
            self.y += 4.0;
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

/// What the overview shows: `the whole run: 48 layers`.
fn whole_run(trace: &Trace) -> String {
    let visits = marks::visits(trace, Track::Compute);
    let layers: BTreeSet<u32> = visits.iter().map(|visit| visit.il).collect();
    match visits.len() == layers.len() {
        true => format!("the whole run: {} layers", layers.len()),
        false => format!("the whole run: {} layers, {} visits", layers.len(), visits.len()),
    }
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
