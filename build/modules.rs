//! Which shader modules there are, what each is made of, and the manifest of the compiled ones.

use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// One module to be: a source with its macros.
pub(crate) struct ModuleSource {
    /// `mul_mat_vec.q4_k`
    pub(crate) name: String,
    /// `mul_mat_vec`: the file without its ending.
    pub(crate) source: String,
    /// Macros, and what `#include "quant.glsl"` means (the axis `quant`).
    #[cfg_attr(not(feature = "compile-shaders"), expect(dead_code, reason = "for compiling"))]
    pub(crate) axes: Vec<(String, String)>,
    /// Hash over the macros and all files that go into the module.
    pub(crate) hash: String,
}

impl ModuleSource {
    /// The file that an `#include` of this module means, relative to `shaders/`.
    pub(crate) fn resolve(axes: &[(String, String)], include: &str) -> String {
        match axes.iter().find(|(name, _)| name == "quant") {
            Some((_, quant)) if include == "quant.glsl" => format!("quant/{quant}.glsl"),
            _ => format!("include/{include}"),
        }
    }
}

/// `shaders/spirv/manifest.json`
#[derive(Default, Serialize, Deserialize)]
pub(crate) struct Manifest {
    pub(crate) modules: BTreeMap<String, Compiled>,
}

/// What is known of a checked-in module.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Compiled {
    pub(crate) source_hash: String,
    pub(crate) spirv_hash: String,
    /// Storage buffers, bound as 0..bindings.
    pub(crate) bindings: u32,
    pub(crate) push: Vec<PushField>,
}

impl Compiled {
    /// Size of the push constants.
    pub(crate) fn push_bytes(&self) -> u32 {
        let end = |f: &PushField| f.offset + if f.ty.ends_with("64") { 8 } else { 4 };
        self.push.iter().map(end).max().unwrap_or(0)
    }
}

/// One member of a push-constant block, as the compiler laid it out.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PushField {
    pub(crate) name: String,
    pub(crate) offset: u32,
    /// `u32`, `i32`, `f32`, `u64`
    pub(crate) ty: String,
}

impl Manifest {
    pub(crate) fn read(path: &Path) -> Result<Self, String> {
        match std::fs::read_to_string(path) {
            Ok(text) => serde_json::from_str(&text).map_err(|e| format!("{}: {e}", path.display())),
            Err(_) => Ok(Self::default()),
        }
    }
}

/// All modules, in the order of `permutations`.
pub(crate) fn list(shaders: &Path) -> Result<Vec<ModuleSource>, String> {
    let text = read(&shaders.join("permutations"))?;
    let quants = quant_names(shaders)?;
    let mut out = Vec::new();
    for line in text.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with('#')) {
        let mut words = line.split_whitespace();
        let source = words.next().unwrap_or_default();
        let axes: Vec<(&str, Vec<String>)> =
            words.map(|w| axis(w, &quants)).collect::<Result<_, _>>()?;
        for chosen in product(&axes) {
            out.push(module(shaders, source, chosen)?);
        }
    }
    Ok(out)
}

fn axis<'a>(word: &'a str, quants: &[String]) -> Result<(&'a str, Vec<String>), String> {
    let (name, values) = word.split_once('=').ok_or(format!("permutations: `{word}` lacks `=`"))?;
    let all = name == "quant" && values == "*";
    let values = if all { quants.to_vec() } else { values.split(',').map(String::from).collect() };
    Ok((name, values))
}

fn product(axes: &[(&str, Vec<String>)]) -> Vec<Vec<(String, String)>> {
    axes.iter().fold(vec![Vec::new()], |rows, (name, values)| {
        let with = |row: &Vec<(String, String)>, v: &String| {
            row.iter().cloned().chain([(name.to_string(), v.clone())]).collect()
        };
        rows.iter().flat_map(|row| values.iter().map(move |v| with(row, v))).collect()
    })
}

fn module(
    shaders: &Path,
    source: &str,
    axes: Vec<(String, String)>,
) -> Result<ModuleSource, String> {
    let name = axes.iter().fold(source.to_string(), |n, (_, value)| n + "." + value);
    let mut hasher = blake3::Hasher::new();
    for (macro_name, value) in &axes {
        hasher.update(format!("{macro_name}={value}\n").as_bytes());
    }
    let mut seen = BTreeSet::new();
    hash_file(shaders, &format!("{source}.comp"), &axes, &mut seen, &mut hasher)?;
    let hash = hasher.finalize().to_hex()[..32].to_string();
    Ok(ModuleSource { name, source: source.to_string(), axes, hash })
}

/// Hashes a file and, once each, the files that it includes.
fn hash_file(
    shaders: &Path,
    file: &str,
    axes: &[(String, String)],
    seen: &mut BTreeSet<String>,
    hasher: &mut blake3::Hasher,
) -> Result<(), String> {
    if !seen.insert(file.to_string()) {
        return Ok(());
    }
    let text = read(&shaders.join(file))?;
    hasher.update(text.as_bytes());
    for line in text.lines() {
        let include = line.trim().strip_prefix("#include").and_then(|l| l.split('"').nth(1));
        if let Some(include) = include {
            hash_file(shaders, &ModuleSource::resolve(axes, include), axes, seen, hasher)?;
        }
    }
    Ok(())
}

fn quant_names(shaders: &Path) -> Result<Vec<String>, String> {
    let dir = shaders.join("quant");
    let entries = std::fs::read_dir(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    let mut names: Vec<String> = entries
        .filter_map(|e| e.ok()?.file_name().to_str()?.strip_suffix(".glsl").map(String::from))
        .collect();
    names.sort();
    Ok(names)
}

pub(crate) fn read(path: &Path) -> Result<String, String> {
    std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))
}
