//! Elements of an SVG file as text: numbers, escaping, rectangles, words. Units are pixels.

use std::fmt::{self, Write};

/// Average width of a character, as a part of the font's size; on the safe side for sans-serif fonts.
const CHAR_WIDTH: f64 = 0.58;
const FONTS: &str = "ui-sans-serif, Inter, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif";

/// A picture under construction.
pub(super) struct Canvas {
    body: String,
    width: f64,
}

/// Where and how large.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rect {
    pub(super) x: f64,
    pub(super) y: f64,
    pub(super) w: f64,
    pub(super) h: f64,
}

/// How words look.
#[derive(Clone, Copy, Debug)]
pub(super) struct Font {
    pub(super) size: f64,
    pub(super) weight: u32,
    pub(super) fill: &'static str,
    /// `start`, `middle` or `end`: which part of the words is at x.
    pub(super) anchor: &'static str,
}

impl Canvas {
    pub(super) fn new(width: f64) -> Self {
        Canvas { body: String::new(), width }
    }

    /// The file. `title`: what a screen reader says.
    pub(super) fn finish(self, height: f64, title: &str) -> String {
        let (width, height, title) = (Px(self.width), Px(height), Escaped(title));
        let body = self.body;
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
             width=\"{width}\" height=\"{height}\" role=\"img\" font-family=\"{FONTS}\">\n\
             <title>{title}</title>\n{body}</svg>\n"
        )
    }

    /// A rectangle. `look`: further attributes.
    pub(super) fn rect(&mut self, rect: Rect, look: fmt::Arguments<'_>, tooltip: Option<&str>) {
        let Rect { x, y, w, h } = rect;
        let (x, y, w, h) = (Px(x), Px(y), Px(w), Px(h));
        self.push(format_args!("<rect x=\"{x}\" y=\"{y}\" width=\"{w}\" height=\"{h}\" {look}"));
        match tooltip {
            Some(words) => {
                self.push(format_args!("><title>{}</title></rect>\n", Escaped(words)));
            }
            None => self.push(format_args!("/>\n")),
        }
    }

    /// Whole pixels for what `body` draws: narrow neighbours show no seam.
    pub(super) fn crisp(&mut self, body: impl FnOnce(&mut Self)) {
        self.push(format_args!("<g shape-rendering=\"crispEdges\">\n"));
        body(self);
        self.push(format_args!("</g>\n"));
    }

    pub(super) fn path(&mut self, path: &str, look: fmt::Arguments<'_>) {
        self.push(format_args!("<path d=\"{path}\" {look}/>\n"));
    }

    pub(super) fn text(&mut self, x: f64, y: f64, font: Font, words: &str) {
        let Font { size, weight, fill, anchor } = font;
        self.push(format_args!("<text x=\"{}\" y=\"{}\" font-size=\"{size}\"", Px(x), Px(y)));
        if weight != 400 {
            self.push(format_args!(" font-weight=\"{weight}\""));
        }
        if anchor != "start" {
            self.push(format_args!(" text-anchor=\"{anchor}\""));
        }
        // Spans are pointed at, not the words on them.
        let words = Escaped(words);
        self.push(format_args!(" fill=\"{fill}\" pointer-events=\"none\">{words}</text>\n"));
    }

    /// Puts another picture on top.
    pub(super) fn append(&mut self, other: Canvas) {
        self.body += &other.body;
    }

    fn push(&mut self, text: fmt::Arguments<'_>) {
        // Writing to a String does not fail.
        let _ = self.body.write_fmt(text);
    }
}

impl Font {
    pub(super) const fn new(size: f64, fill: &'static str) -> Self {
        Font { size, weight: 400, fill, anchor: "start" }
    }

    pub(super) const fn weight(self, weight: u32) -> Self {
        Font { weight, ..self }
    }

    pub(super) const fn anchor(self, anchor: &'static str) -> Self {
        Font { anchor, ..self }
    }

    /// Room that words take, about.
    pub(super) fn width(&self, words: &str) -> f64 {
        words.chars().count() as f64 * self.size * CHAR_WIDTH
    }

    /// The words, cut to fit into `width`.
    pub(super) fn cut(&self, words: &str, width: f64) -> String {
        if self.width(words) <= width {
            return words.to_owned();
        }
        let n = (width / (self.size * CHAR_WIDTH)) as usize;
        words.chars().take(n.saturating_sub(1)).chain(['…']).collect()
    }
}

/// A length with at most two decimals.
pub(super) struct Px(pub(super) f64);

impl fmt::Display for Px {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", (self.0 * 100.0).round() / 100.0)
    }
}

/// Text in XML; characters that XML 1.0 does not allow become �.
pub(super) struct Escaped<'a>(pub(super) &'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.chars().try_for_each(|c| match c {
            '&' => f.write_str("&amp;"),
            '<' => f.write_str("&lt;"),
            '>' => f.write_str("&gt;"),
            '"' => f.write_str("&quot;"),
            '\t' | '\n' => f.write_char(c),
            '\u{0}'..='\u{1f}' | '\u{fffe}' | '\u{ffff}' => f.write_char('\u{fffd}'),
            c => f.write_char(c),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_escaped_and_cut() {
        let escaped = Escaped("a<b> & \"c\"\u{0}\n\u{ffff}é").to_string();
        assert_eq!(escaped, "a&lt;b&gt; &amp; &quot;c&quot;\u{fffd}\n\u{fffd}é");
        let font = Font::new(10.0, "#000");
        assert_eq!(font.cut("abcdef", 100.0), "abcdef");
        assert_eq!(font.cut("äbcdefgh", 30.0), "äbcd…");
        assert_eq!(font.cut("abc", 0.0), "…");
    }

    #[test]
    fn numbers_are_short() {
        assert_eq!(Px(1.0).to_string(), "1");
        assert_eq!(Px(1.23456).to_string(), "1.23");
        assert_eq!(Px(0.1 + 0.2).to_string(), "0.3");
    }
}
