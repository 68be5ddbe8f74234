//! `vkmoe synth`: a model with a real one's shape and random weights.

use super::{catch_ctrl_c, emit};
use crate::cli::SynthArgs;
use crate::error::{Error, Result};
use crate::plan::Bytes;
use crate::progress;
use crate::synth::file::{self, Existing};
use crate::synth::mix::Mix;
use crate::synth::{Synth, presets};
use std::time::Instant;

pub(super) fn run(args: &SynthArgs) -> Result<()> {
    let unknown = |flag: &str, name: &str| Error::usage(flag, format!("`{name}` is not known"));
    let preset = presets::find(&args.preset).ok_or_else(|| unknown("--preset", &args.preset))?;
    let mix = match &args.r#type {
        Some(name) => Some(Mix::find(name).ok_or_else(|| unknown("--type", name))?),
        None => None,
    };
    let synth = Synth::new(preset, mix, args.layers, args.seed);
    let plan = synth.plan();
    let existing = if args.force { Existing::Replace } else { Existing::Keep };
    let bar = progress::bytes_bar("writing", 0);
    let start = Instant::now();
    let bytes = file::write(&plan, &args.out, existing, &bar, &catch_ctrl_c());
    bar.finish_and_clear();
    let (bytes, seconds) = (bytes?, start.elapsed().as_secs_f64());
    emit(&format!(
        "{}: {} {}, {:.2} B weights, {} in {seconds:.1} s, {:.2} GB/s\n",
        args.out.display(),
        preset.name,
        synth.mix.name(),
        plan.elements() as f64 / 1e9,
        Bytes(bytes),
        bytes as f64 / 1e9 / seconds.max(1e-9),
    ))
}
