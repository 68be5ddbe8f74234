//! The demo model: built into the binary, unpacked once into the user's cache directory.

use crate::error::{Error, Result};
use std::io;
use std::path::{Path, PathBuf};

/// A small Qwen3-MoE trained for vkmoe; see README.
static DEMO: &[u8] = include_bytes!("../../assets/demo-q4_k_m.gguf");

/// Path of the unpacked file: in the user's cache directory, or in the temporary one where the former
/// cannot be written.
pub(super) fn path() -> Result<PathBuf> {
    let temporary = std::env::temp_dir().join("vkmoe");
    let Some(cache) = dirs::cache_dir().map(|dir| dir.join("vkmoe")) else {
        return unpack(&temporary);
    };
    unpack(&cache).or_else(|e| {
        log::info!("{e}; trying {}", temporary.display());
        unpack(&temporary)
    })
}

/// The name holds a hash of the content, and the file appears whole or not at all: several processes
/// may unpack at once. One that is there is compared, since others can write the temporary directory.
fn unpack(dir: &Path) -> Result<PathBuf> {
    let hash = blake3::hash(DEMO).to_hex();
    let path = dir.join(format!("demo-{}.gguf", &hash[..16]));
    let there = std::fs::metadata(&path).is_ok_and(|m| m.len() == DEMO.len() as u64);
    if there && std::fs::read(&path).is_ok_and(|found| found == DEMO) {
        return Ok(path);
    }
    std::fs::create_dir_all(dir).map_err(failed(dir, "create"))?;
    let part = dir.join(format!("demo-{}.{}.part", &hash[..16], std::process::id()));
    let written = std::fs::write(&part, DEMO).map_err(failed(&part, "write"));
    let renamed =
        written.and_then(|()| std::fs::rename(&part, &path).map_err(failed(&path, "write")));
    if renamed.is_err() {
        // Half a file helps nobody; that it may not be there either is fine.
        let _ = std::fs::remove_file(&part);
    }
    renamed.map(|()| path)
}

fn failed(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_path_buf();
    move |source| Error::File { path, action, source }
}
