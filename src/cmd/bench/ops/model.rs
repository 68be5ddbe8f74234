//! The model whose kernels are timed: one layer of each kind of a large one, with random weights, in a
//! file for as long as it takes to load it.

use crate::error::{Error, Result};
use crate::gguf::Gguf;
use crate::model::{Model, check_architecture};
use crate::progress;
use crate::synth::file::{self, Existing};
use crate::synth::{Plan, Sample, Synth, presets};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

/// Where shapes and types come from.
pub(super) enum Source<'a> {
    Preset(&'a str),
    File(&'a Path),
}

/// A written model; its file goes with it.
pub(super) struct Stand {
    path: PathBuf,
    title: String,
    layers: Vec<u32>,
}

impl Stand {
    pub(super) fn write(source: &Source<'_>, seed: u64, stop: &AtomicBool) -> Result<Stand> {
        let (title, plan) = match source {
            Source::Preset(name) => preset(name, seed)?,
            Source::File(path) => of_file(path, seed)?,
        };
        let Sample { plan, layers } = plan.sample();
        let path = std::env::temp_dir().join(format!("vkmoe-ops-{}.gguf", std::process::id()));
        let bar = progress::bytes_bar("writing", 0);
        let written = file::write(&plan, &path, Existing::Replace, &bar, stop);
        bar.finish_and_clear();
        written?;
        Ok(Stand { path, title, layers })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The large model.
    pub(super) fn title(&self) -> &str {
        &self.title
    }

    /// For each layer, how many of the large model's it stands for.
    pub(super) fn layers(&self) -> &[u32] {
        &self.layers
    }

    /// The file is no longer needed under its name. Where a mapped one cannot be removed, it is tried
    /// again at the end.
    pub(super) fn remove(&self) {
        let _ = fs::remove_file(&self.path);
    }
}

impl Drop for Stand {
    fn drop(&mut self) {
        self.remove();
    }
}

fn preset(name: &str, seed: u64) -> Result<(String, Plan)> {
    let preset = presets::find(name)
        .ok_or_else(|| Error::usage("--preset", format!("`{name}` is not known")))?;
    let arch = check_architecture(preset.shape.arch.name());
    arch.map_err(|problem| Error::usage("--preset", format!("{name}: {problem}")))?;
    let title = format!("{} {}", preset.title, preset.mix.name());
    Ok((title, Synth::new(preset, None, None, seed).plan()))
}

fn of_file(path: &Path, seed: u64) -> Result<(String, Plan)> {
    let gguf = Gguf::open(path)?;
    // What the engine cannot run is refused before anything is written.
    let model = Model::load(&gguf)?;
    let names: Vec<&str> = model.weights.iter().map(|w| w.name.as_str()).collect();
    Ok((gguf.description(), Plan::like(&gguf, &names, seed)))
}
