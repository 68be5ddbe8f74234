//! Progress bars on standard error, one below the other. They draw nothing when standard error is not a
//! terminal. The blanks at their end leave room for `^C`, which would otherwise begin a new line.
//!
//! Bars may move while other threads print: whoever prints a line does it in [`between_bars`].

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::sync::LazyLock;

/// All bars that are shown.
static BARS: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);

/// A bar that is not drawn until [`show`].
pub fn hidden_bar(what: &'static str, len: u64) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(len), ProgressDrawTarget::hidden());
    bar.set_message(what);
    bar.set_style(style("{msg} {wide_bar} {pos}/{len}   "));
    bar
}

/// A bar over bytes, with throughput.
pub fn bytes_bar(what: &'static str, len: u64) -> ProgressBar {
    let bar = hidden_bar(what, len);
    bar.set_style(style("{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec}   "));
    show(&bar);
    bar
}

/// A bar over a count, with what is left.
pub fn count_bar(what: &'static str, len: u64) -> ProgressBar {
    let bar = hidden_bar(what, len);
    bar.set_style(style("{msg} {wide_bar} {pos}/{len} {per_sec} {eta}   "));
    show(&bar);
    bar
}

/// Starts to draw a bar, below those that are drawn.
pub fn show(bar: &ProgressBar) {
    if bar.is_hidden() && !BARS.is_hidden() {
        BARS.add(bar.clone());
    }
}

/// Takes the bars off the screen while `print` writes to it. Moving a bar in there would hang.
pub fn between_bars<R>(print: impl FnOnce() -> R) -> R {
    match BARS.clear() {
        Ok(()) => BARS.suspend(print),
        // The terminal is gone, and with it the bars.
        Err(_) => print(),
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}
