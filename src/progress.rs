//! Progress bars on standard error. They draw nothing when standard error is not a terminal. The blanks
//! at their end leave room for `^C`, which would otherwise begin a new line.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

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

/// Starts to draw a bar.
pub fn show(bar: &ProgressBar) {
    if bar.is_hidden() {
        bar.set_draw_target(ProgressDrawTarget::stderr());
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}
