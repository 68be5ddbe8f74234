//! Shader modules. Lists them (`shaders/permutations`), proves that the checked-in SPIR-V belongs to
//! today's sources (`shaders/spirv/manifest.json` holds a hash of each), and writes `shaders.rs`:
//! the modules and the layouts of their push constants, which `src/push.rs` compares at compile time.
//!
//! With the feature `compile-shaders` everything is compiled anew; `VKMOE_SHADERS=write` then updates
//! `shaders/spirv`, otherwise a difference from what is checked in stops the build.

#[cfg(feature = "compile-shaders")]
#[path = "build/compile.rs"]
mod compile;
#[path = "build/modules.rs"]
mod modules;

use modules::{Manifest, ModuleSource};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::exit;

fn main() {
    for watched in ["build.rs", "build", "shaders"] {
        println!("cargo::rerun-if-changed={watched}");
    }
    println!("cargo::rerun-if-env-changed=VKMOE_SHADERS");
    if let Err(problem) = run() {
        eprintln!("\nerror: {problem}\n");
        exit(1);
    }
}

fn run() -> Result<(), String> {
    let shaders = Path::new("shaders");
    let sources = modules::list(shaders)?;
    let checked_in = Manifest::read(&shaders.join("spirv/manifest.json"))?;
    #[cfg(feature = "compile-shaders")]
    let manifest = compile::bring_up_to_date(shaders, &sources, checked_in)?;
    #[cfg(not(feature = "compile-shaders"))]
    let manifest = checked_in;
    require_fresh(&sources, &manifest)?;
    let out = std::env::var_os("OUT_DIR").map(PathBuf::from).ok_or("OUT_DIR is not set")?;
    write_if_changed(&out.join("shaders.rs"), &rust_table(&sources, &manifest)?)
}

/// Stops when a source has changed without its module.
fn require_fresh(sources: &[ModuleSource], manifest: &Manifest) -> Result<(), String> {
    let stale: Vec<&str> = sources
        .iter()
        .filter(|s| manifest.modules.get(&s.name).is_none_or(|m| m.source_hash != s.hash))
        .map(|s| s.name.as_str())
        .collect();
    if stale.is_empty() {
        return Ok(());
    }
    Err(format!(
        "{} shader module(s) do not match their sources: {}.\n\
         Run `./x shaders` (needs shaderc) and commit shaders/spirv.",
        stale.len(),
        stale.join(", ")
    ))
}

/// The Rust source with all modules and one push-constant layout per shader source.
fn rust_table(sources: &[ModuleSource], manifest: &Manifest) -> Result<String, String> {
    let root = std::env::var("CARGO_MANIFEST_DIR").map_err(|e| e.to_string())?;
    let mut table = String::from("pub(crate) static MODULES: &[Module] = &[\n");
    let mut layouts = String::from("pub(crate) mod layout {\nuse super::PushField;\n");
    let mut last_source = None;
    for s in sources {
        let module = manifest.modules.get(&s.name).ok_or("a module is missing")?;
        let _ = writeln!(
            table,
            "Module {{ name: {:?}, bindings: {}, push_bytes: {}, spirv: include_bytes!({:?}) }},",
            s.name,
            module.bindings,
            module.push_bytes(),
            format!("{root}/shaders/spirv/{}.spv", s.name),
        );
        if last_source == Some(&s.source) {
            continue;
        }
        last_source = Some(&s.source);
        let _ =
            writeln!(layouts, "pub(crate) const {}: &[PushField] = &[", s.source.to_uppercase());
        for f in &module.push {
            let _ = writeln!(
                layouts,
                "PushField {{ name: {:?}, offset: {}, ty: {:?} }},",
                f.name, f.offset, f.ty
            );
        }
        layouts.push_str("];\n");
    }
    Ok(table + "];\n" + &layouts + "}\n")
}

fn write_if_changed(path: &Path, text: &str) -> Result<(), String> {
    if std::fs::read_to_string(path).is_ok_and(|old| old == text) {
        return Ok(());
    }
    std::fs::write(path, text).map_err(|e| format!("{}: {e}", path.display()))
}
