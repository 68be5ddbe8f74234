//! What ran when on the lanes of a device and on the host: as data, as a file for Perfetto
//! (`json`), as a picture (`svg`), and in figures ([`Summary`], [`Profile`]).
//!
//! All times are nanoseconds of one clock, whose origin means nothing; bytes per nanosecond are GB/s.
//! Nothing here knows Vulkan: whoever measures converts ticks first, see [`Clock`](crate::vk::Clock).

mod json;
mod marks;
mod profile;
mod summary;
mod svg;

pub use profile::{Profile, ProfileRow};
pub use summary::{Bound, Summary};

use crate::error::{Error, Result};
use std::fs;
use std::path::Path;

/// A larger file is no trace that a run wrote: that of 20,000 spans has 3 MB.
const MAX_FILE_BYTES: u64 = 1 << 30;

/// Where a span ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Track {
    /// The compute lane: kernels.
    Compute,
    /// The copy lane.
    Copy,
    /// A thread of the host: filling a ring, waiting, sampling.
    Host,
}

impl Track {
    /// All, from top to bottom.
    pub const ALL: [Track; 3] = [Track::Compute, Track::Copy, Track::Host];

    /// `compute`, `copy` or `host`.
    pub fn name(self) -> &'static str {
        match self {
            Track::Compute => "compute",
            Track::Copy => "copy",
            Track::Host => "host",
        }
    }
}

/// Something that took time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// Where it ran.
    pub track: Track,
    /// What it was: `blk.3.ffn_gate_exps` for the copy of a tensor, `blk.3 attention` for kernels.
    pub name: String,
    /// The layer it belongs to.
    pub il: Option<u32>,
    /// When it began.
    pub start_ns: u64,
    /// When it ended.
    pub end_ns: u64,
    /// Bytes moved; 0 if it moves none.
    pub bytes: u64,
}

impl Span {
    /// How long it took.
    pub fn duration_ns(&self) -> u64 {
        self.end_ns.saturating_sub(self.start_ns)
    }

    /// Its speed, if it moved anything.
    pub fn gbps(&self) -> Option<f64> {
        gbps(self.bytes, self.duration_ns())
    }

    /// The name without the layer: `ffn_gate_exps`, `attention`.
    pub fn kind(&self) -> &str {
        let Some(rest) = self.name.strip_prefix("blk.") else { return &self.name };
        let kind = rest.trim_start_matches(|c: char| c.is_ascii_digit());
        match kind.strip_prefix(['.', ' ']) {
            Some(kind) if kind.len() + 1 < rest.len() && !kind.is_empty() => kind,
            _ => &self.name,
        }
    }
}

/// Speed in GB/s; `None` if nothing moved or no time passed.
fn gbps(bytes: u64, ns: u64) -> Option<f64> {
    (bytes > 0 && ns > 0).then(|| bytes as f64 / ns as f64)
}

/// What happened during a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    /// The model: `qwen3-30b-a3b Q4_K_M`.
    pub model: String,
    /// The device: `NVIDIA H200`.
    pub device: String,
    /// In any order.
    pub spans: Vec<Span>,
}

impl Trace {
    /// Writes a picture if the path ends in `.svg`, else JSON.
    pub fn write(&self, path: &Path) -> Result<()> {
        let text = if is_svg(path) { self.to_svg() } else { self.to_json() };
        fs::write(path, text).map_err(failed(path, "write"))
    }

    /// Reads what [`Self::write`] wrote as JSON.
    pub fn read(path: &Path) -> Result<Self> {
        let refuse = |problem: String| Error::Trace { path: path.to_path_buf(), problem };
        let metadata = fs::metadata(path).map_err(failed(path, "read"))?;
        if !metadata.is_file() {
            return Err(refuse("it is not a regular file".into()));
        }
        if metadata.len() > MAX_FILE_BYTES {
            return Err(refuse(format!("{} bytes are too many", metadata.len())));
        }
        let bytes = fs::read(path).map_err(failed(path, "read"))?;
        let text = String::from_utf8(bytes).map_err(|e| refuse(e.to_string()))?;
        Self::from_json(&text).map_err(refuse)
    }

    /// Chrome's trace event format, which <https://ui.perfetto.dev> and `chrome://tracing` open.
    pub fn to_json(&self) -> String {
        json::write(self)
    }

    /// Reads [`Self::to_json`] back. An error is one line that says what is wrong and where.
    pub fn from_json(text: &str) -> Result<Self, String> {
        json::read(text)
    }

    /// A drawing of the tracks over time. It may stay the same for the same trace: no date, no
    /// random ids.
    pub fn to_svg(&self) -> String {
        svg::draw(self)
    }

    /// The figures in a line.
    pub fn summary(&self) -> Summary {
        Summary::of(self)
    }

    /// Time spent by kind of span.
    pub fn profile(&self) -> Profile {
        Profile::of(self)
    }

    /// The spans of a track.
    pub fn on(&self, track: Track) -> impl Iterator<Item = &Span> {
        self.spans.iter().filter(move |span| span.track == track)
    }

    /// When the spans of a track ran.
    pub fn intervals(&self, track: Track) -> Vec<(u64, u64)> {
        self.on(track).map(|span| (span.start_ns, span.end_ns)).collect()
    }

    /// First start and last end; `None` without spans.
    pub fn bounds(&self) -> Option<(u64, u64)> {
        let start = self.spans.iter().map(|span| span.start_ns).min()?;
        let end = self.spans.iter().map(|span| span.end_ns).max()?;
        Some((start, end.max(start)))
    }
}

/// Whether a path names a picture.
pub fn is_svg(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("svg"))
}

fn failed(path: &Path, action: &'static str) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.to_path_buf();
    move |source| Error::File { path, action, source }
}

/// What the tests of this folder draw, write and add up.
#[cfg(test)]
mod samples {
    use super::*;
    use proptest::prelude::*;

    /// A prefill of `n_layers`: three copies a layer, which run ahead of attention and experts.
    pub(super) fn prefill(n_layers: u32) -> Trace {
        let mut spans = Vec::new();
        let mut copied_ns = 1_000_000;
        let mut computed_ns = 1_000_000;
        for il in 0..n_layers {
            let mut add = |track, what: &str, start_ns, duration_ns, bytes| {
                let name = format!("blk.{il}{what}");
                let end_ns = start_ns + duration_ns;
                spans.push(Span { track, name, il: Some(il), start_ns, end_ns, bytes });
                end_ns
            };
            computed_ns = add(Track::Compute, " attention", computed_ns, 1_400_000, 0);
            for what in [".ffn_gate_exps", ".ffn_up_exps", ".ffn_down_exps"] {
                copied_ns = add(Track::Copy, what, copied_ns, 2_300_123, 115_000_000);
            }
            computed_ns = computed_ns.max(copied_ns);
            computed_ns = add(Track::Compute, " experts", computed_ns, 3_900_000, 0);
        }
        Trace { model: "qwen3 <30b> & \"more\"".into(), device: "a device".into(), spans }
    }

    prop_compose! {
        fn span()(
            track in prop::sample::select(&Track::ALL[..]),
            name in prop_oneof![
                "\\PC{0,12}",
                any::<String>(),
                "blk\\.[0-9]{1,2}( attention|\\.ffn_(gate|up|down)_exps)",
            ],
            il in prop::option::of(0u32..6),
            start_ns in 0u64..5_000_000,
            duration_ns in prop_oneof![0u64..3_000, 0u64..1_000_000],
            bytes in prop_oneof![Just(0), any::<u32>().prop_map(u64::from)],
        ) -> Span {
            Span { track, name, il, start_ns, end_ns: start_ns + duration_ns, bytes }
        }
    }

    prop_compose! {
        /// Anything, with overlaps, gaps, and any characters in names.
        pub(super) fn any_trace()(
            model in any::<String>(),
            device in any::<String>(),
            origin_ns in prop_oneof![Just(0), Just(u64::MAX / 2)],
            mut spans in prop::collection::vec(span(), 0..60),
        ) -> Trace {
            for span in &mut spans {
                span.start_ns += origin_ns;
                span.end_ns += origin_ns;
            }
            Trace { model, device, spans }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kind_is_a_name_without_its_layer() {
        let kind = |name: &str| {
            let (track, il, start_ns, end_ns, bytes) = (Track::Host, None, 0, 0, 0);
            Span { track, name: name.into(), il, start_ns, end_ns, bytes }.kind().to_owned()
        };
        assert_eq!(kind("blk.3.ffn_gate_exps"), "ffn_gate_exps");
        assert_eq!(kind("blk.12 attention"), "attention");
        for whole in ["output", "blk.", "blk.3", "blk.3.", "blk.x", "blk..x", "blk"] {
            assert_eq!(kind(whole), whole);
        }
    }
}
