//! The demo model: built into the binary, unpacked once into the user's cache directory.

use crate::error::{Error, Result};
use std::path::{Path, PathBuf};

/// A small Qwen3-MoE trained for vkmoe; see README.
static DEMO: &[u8] = include_bytes!("../../assets/demo-q4_k_m.gguf");

/// Path of the unpacked file. Its name holds a hash of the content, and it appears whole or not at
/// all: several processes may unpack at once.
pub(super) fn path() -> Result<PathBuf> {
    let hash = blake3::hash(DEMO).to_hex();
    let dir = dirs::cache_dir().unwrap_or_else(std::env::temp_dir).join("vkmoe");
    let path = dir.join(format!("demo-{}.gguf", &hash[..16]));
    if std::fs::metadata(&path).is_ok_and(|m| m.len() == DEMO.len() as u64) {
        return Ok(path);
    }
    let failed = |path: &Path, action| {
        let path = path.to_path_buf();
        move |source| Error::File { path, action, source }
    };
    std::fs::create_dir_all(&dir).map_err(failed(&dir, "create"))?;
    let part = dir.join(format!("demo-{}.{}.part", &hash[..16], std::process::id()));
    std::fs::write(&part, DEMO).map_err(failed(&part, "write"))?;
    std::fs::rename(&part, &path).map_err(failed(&path, "write"))?;
    Ok(path)
}
