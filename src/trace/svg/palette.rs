//! Colours. The hue is the layer's, the same for its copies and the kernels that use them; the shade says
//! what of a layer. Mid-tones on a light card of its own read in dark and light themes.

use super::super::marks::Mark;

pub(super) const CARD: &str = "#fbfbfd";
pub(super) const CARD_EDGE: &str = "#dfe3ea";
/// The background of a lane: what stays visible is idle time.
pub(super) const LANE: &str = "#e9ecf2";
pub(super) const GRID: &str = "#c9cfda";
pub(super) const INK: &str = "#1c2430";
pub(super) const QUIET: &str = "#667085";

/// From light to dark. Neighbouring hues are far apart on the wheel and in brightness.
const HUES: [[&str; 4]; 4] = [
    ["#b3c8ef", "#7fa2e2", "#5681d2", "#3c66b4"],
    ["#f6d9a0", "#efbc62", "#e3a03a", "#c48427"],
    ["#a9ded6", "#68c1b4", "#3ca698", "#27877b"],
    ["#e0bfe6", "#c592d0", "#a86cb6", "#885095"],
];
const NO_LAYER: [&str; 4] = ["#d3d8e1", "#b2bac8", "#939dae", "#737e91"];
/// The shade that stands for a layer as a whole, and for several at once.
const MIDDLE: usize = 2;
/// Colours up to this brightness, of 255, carry white words.
const DARK: u32 = 150;

/// A colour, and that of words on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Paint {
    pub(super) fill: &'static str,
    pub(super) ink: &'static str,
}

pub(super) fn paint(mark: &Mark<'_>) -> Paint {
    let shade = if mark.is_mixed { MIDDLE } else { shade(mark.span.kind()) };
    let fill = hue(mark.span.il.filter(|_| !mark.is_mixed))[shade];
    Paint { fill, ink: if brightness(fill) <= DARK { "#ffffff" } else { INK } }
}

/// The colour that stands for a layer as a whole.
pub(super) fn of_layer(il: u32) -> &'static str {
    hue(Some(il))[MIDDLE]
}

/// The same, dark enough for words on the card.
pub(super) fn ink_of_layer(il: u32) -> &'static str {
    hue(Some(il))[3]
}

/// How bright a colour `#rrggbb` looks, from 0 to 255 (ITU-R BT.601).
fn brightness(color: &str) -> u32 {
    let rgb = u32::from_str_radix(color.trim_start_matches('#'), 16).unwrap_or(0);
    let [_, r, g, b] = rgb.to_be_bytes().map(u32::from);
    (299 * r + 587 * g + 114 * b) / 1000
}

fn hue(il: Option<u32>) -> &'static [&'static str; 4] {
    il.map_or(&NO_LAYER, |il| &HUES[il as usize % HUES.len()])
}

/// Experts are dark, the three matrices apart; attention is light; the rest is between.
fn shade(kind: &str) -> usize {
    let has = |word| kind.contains(word);
    match () {
        () if has("attn") || has("attention") => 0,
        () if has("gate_exps") || has("gate_up_exps") => 1,
        () if has("down_exps") => 3,
        () if has("exp") || has("ffn") => 2,
        () => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::{Span, Track};

    fn paint_of(name: &str, il: u32, is_mixed: bool) -> Paint {
        let (track, start_ns, end_ns, bytes) = (Track::Copy, 0, 1, 0);
        let span = Span { track, name: name.into(), il: Some(il), start_ns, end_ns, bytes };
        let (n_spans, busy_ns) = (1, 1);
        paint(&Mark { span: &span, start_ns, end_ns, busy_ns, bytes, n_spans, is_mixed })
    }

    #[test]
    fn neighbours_differ_and_a_layer_keeps_its_hue() {
        let fill = |name, il| paint_of(name, il, false).fill;
        for il in 0..20 {
            let up = fill("blk.1.ffn_up_exps", il);
            assert_ne!(up, fill("blk.1.ffn_up_exps", il + 1));
            assert_eq!(up, fill("blk.1 experts", il));
            assert_ne!(up, fill("blk.1.ffn_gate_exps", il));
            assert!(hue(Some(il)).contains(&fill("blk.1 attention", il)));
            assert!(NO_LAYER.contains(&paint_of("blk.1.ffn_up_exps", il, true).fill));
        }
    }

    #[test]
    fn words_stand_out() {
        assert_eq!(paint_of("blk.0.ffn_down_exps", 0, false).ink, "#ffffff");
        assert_eq!(paint_of("blk.0 attention", 0, false).ink, INK);
        assert_eq!((brightness("#ffffff"), brightness("#000000")), (255, 0));
        // The same shade, but yellow is brighter than blue.
        let ink = |il| paint_of("blk.0.ffn_up_exps", il, false).ink;
        assert_eq!((ink(0), ink(1)), ("#ffffff", INK));
    }
}
