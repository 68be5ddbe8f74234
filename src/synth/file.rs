//! A planned model to disk. The tensors' bytes come from pools of random blocks, one for each type and
//! deviation, so that memory and disk are what limits; several threads write at once. Which part of a
//! pool goes where depends on the seed and the place in the file only, not on who writes it.
//!
//! The file appears under its name when it is whole; what was written of one that cannot be finished is
//! removed.

use super::{Fill, Plan, blocks};
use crate::error::{Error, Result};
use crate::gguf::GgmlType;
use crate::gguf::write::{Head, TensorSpec};
use crate::plan::Bytes;
use indicatif::ProgressBar;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

/// Written at once.
const PIECE_BYTES: u64 = 8 << 20;

/// Whether a file that is there may be replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    /// It stays.
    Keep,
    /// The new one takes its place.
    Replace,
}

/// Writes the model; returns the file's length. `bar` counts bytes. When `stop` becomes true, nothing is
/// left of the file.
pub fn write(
    plan: &Plan,
    path: &Path,
    existing: Existing,
    bar: &ProgressBar,
    stop: &AtomicBool,
) -> Result<u64> {
    check_target(path, existing)?;
    let head = Head::new(&plan.keys, &plan.tensors);
    check_space(path, head.file_bytes)?;
    let part = Part::create(path, head.file_bytes)?;
    bar.set_length(head.file_bytes);
    let pools = Pools::new(plan);
    let pieces = pieces(plan, &head);
    part.write(&head.bytes, 0)?;
    bar.inc(head.bytes.len() as u64);
    pieces.par_iter().try_for_each(|piece| {
        if stop.load(Ordering::Relaxed) {
            return Err(part.error("write", io::Error::other("stopped; nothing of it is kept")));
        }
        part.write(pools.bytes(plan, piece), piece.offset)?;
        bar.inc(piece.bytes());
        Ok(())
    })?;
    part.finish(path)?;
    Ok(head.file_bytes)
}

/// Refuses to replace what is there, unless asked to, and anything that is not a file.
fn check_target(path: &Path, existing: Existing) -> Result<()> {
    let problem = match fs::symlink_metadata(path) {
        Err(_) => return Ok(()), // nothing there, or creating it says what is wrong
        Ok(found) if !found.is_file() => "it is there and not a file",
        Ok(_) if existing == Existing::Keep => "it is there already; --force replaces it",
        Ok(_) => return Ok(()),
    };
    Err(file_error(path, "write", io::Error::new(io::ErrorKind::AlreadyExists, problem)))
}

/// Refuses a file that is larger than what is free. Where that cannot be told, writing will tell.
fn check_space(path: &Path, needed_bytes: u64) -> Result<()> {
    match fs4::available_space(folder(path)) {
        Ok(free_bytes) if free_bytes < needed_bytes => {
            let (needed, free) = (Bytes(needed_bytes), Bytes(free_bytes));
            let problem = format!("{needed} are needed, {free} are free on the disk");
            let source = io::Error::new(io::ErrorKind::StorageFull, problem);
            Err(file_error(path, "write", source))
        }
        _ => Ok(()),
    }
}

fn folder(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// The file under its temporary name; removed unless [finished](Self::finish).
struct Part {
    path: PathBuf,
    file: File,
    is_finished: bool,
}

impl Part {
    fn create(path: &Path, bytes: u64) -> Result<Part> {
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(format!(".{}.part", std::process::id()));
        let part = path.with_file_name(name);
        let file = File::create_new(&part).map_err(|e| file_error(&part, "create", e))?;
        let part = Part { path: part, file, is_finished: false };
        part.file.set_len(bytes).map_err(|e| part.error("write", e))?;
        Ok(part)
    }

    fn write(&self, bytes: &[u8], offset: u64) -> Result<()> {
        write_all_at(&self.file, bytes, offset).map_err(|e| self.error("write", e))
    }

    /// Has the bytes reach the disk, where a full one or a quota may still object, and gives the file
    /// its name.
    fn finish(mut self, path: &Path) -> Result<()> {
        self.file.sync_data().map_err(|e| self.error("write", e))?;
        fs::rename(&self.path, path).map_err(|e| file_error(path, "write", e))?;
        self.is_finished = true;
        Ok(())
    }

    fn error(&self, action: &'static str, source: io::Error) -> Error {
        file_error(&self.path, action, source)
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        if !self.is_finished {
            // The error that led here is the one to be told.
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn file_error(path: &Path, action: &'static str, source: io::Error) -> Error {
    Error::File { path: path.to_owned(), action, source }
}

#[cfg(unix)]
fn write_all_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(file, bytes, offset)
}

#[cfg(windows)]
fn write_all_at(file: &File, mut bytes: &[u8], mut offset: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        let n = std::os::windows::fs::FileExt::seek_write(file, bytes, offset)?;
        if n == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        bytes = &bytes[n..];
        offset += n as u64;
    }
    Ok(())
}

/// A part of a tensor.
struct Piece {
    /// Index into the plan's tensors.
    tensor: usize,
    /// First byte in the file.
    offset: u64,
    /// Blocks of the tensor's type.
    blocks: u64,
    block_bytes: u64,
}

impl Piece {
    fn bytes(&self) -> u64 {
        self.blocks * self.block_bytes
    }
}

/// Cuts the tensors into pieces of whole blocks.
fn pieces(plan: &Plan, head: &Head) -> Vec<Piece> {
    let mut pieces = Vec::new();
    for (tensor, (spec, &start)) in plan.tensors.iter().zip(&head.offsets).enumerate() {
        let block_bytes = spec.ty.block_bytes();
        let (n_blocks, step) = (n_blocks(spec), PIECE_BYTES / block_bytes);
        for first in (0..n_blocks).step_by(step as usize) {
            let blocks = step.min(n_blocks - first);
            pieces.push(Piece { tensor, offset: start + first * block_bytes, blocks, block_bytes });
        }
    }
    pieces
}

fn n_blocks(spec: &TensorSpec) -> u64 {
    spec.elements() / spec.ty.block_len()
}

/// Type and values of a pool's blocks; the values as bits, which have an order.
type PoolKey = (u32, bool, u32);

/// Blocks to take pieces from.
struct Pools {
    pools: BTreeMap<PoolKey, Vec<u8>>,
}

impl Pools {
    /// Twice as large as their largest piece: enough places to start at that tensors differ.
    fn new(plan: &Plan) -> Pools {
        let mut wanted: BTreeMap<PoolKey, (GgmlType, Fill, u64)> = BTreeMap::new();
        for (spec, &fill) in plan.tensors.iter().zip(&plan.fills) {
            let largest = n_blocks(spec).min(PIECE_BYTES / spec.ty.block_bytes());
            let (.., n) = wanted.entry(key(spec.ty, fill)).or_insert((spec.ty, fill, 0));
            *n = (*n).max(2 * largest);
        }
        let pool = |(key, (ty, fill, n)): (PoolKey, (GgmlType, Fill, u64))| {
            let n = n as usize;
            let bytes = match fill {
                Fill::Constant(x) => x.to_le_bytes().repeat(n),
                Fill::Random { std } => {
                    let mut rng = ChaCha8Rng::from_seed(hash(&[
                        plan.seed,
                        ty.id().into(),
                        std.to_bits().into(),
                    ]));
                    blocks::random(ty, std, n, &mut rng)
                }
            };
            (key, bytes)
        };
        Pools { pools: wanted.into_par_iter().map(pool).collect() }
    }

    /// A piece's bytes.
    fn bytes(&self, plan: &Plan, piece: &Piece) -> &[u8] {
        let key = key(plan.tensors[piece.tensor].ty, plan.fills[piece.tensor]);
        let pool = self.pools.get(&key).map(Vec::as_slice).unwrap_or_default();
        let n_starts = pool.len() as u64 / piece.block_bytes - piece.blocks + 1;
        let [a, b, c, d, e, f, g, h, ..] = hash(&[plan.seed, piece.offset]);
        let start = u64::from_le_bytes([a, b, c, d, e, f, g, h]) % n_starts * piece.block_bytes;
        &pool[start as usize..(start + piece.bytes()) as usize]
    }
}

fn key(ty: GgmlType, fill: Fill) -> PoolKey {
    match fill {
        Fill::Constant(x) => (ty.id(), false, x.to_bits()),
        Fill::Random { std } => (ty.id(), true, std.to_bits()),
    }
}

fn hash(numbers: &[u64]) -> [u8; 32] {
    *blake3::hash(bytemuck::cast_slice(numbers)).as_bytes()
}
