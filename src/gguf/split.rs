//! Finds and opens the files of a model. Large models come as several GGUF files ("parts") named
//! `NAME-00001-of-00003.gguf`; any of them stands for the whole model. The scheme, and the keys
//! `split.no`, `split.count` and `split.tensors.count`, are llama.cpp's (`llama_split_path`).
//!
//! The keys must agree with the names and between the parts: parts of different models, renamed or
//! swapped parts would load as a model that talks nonsense. Metadata is that of part 1; the others
//! have little beside their split keys.

use std::path::{Path, PathBuf};

use super::mapping::Mapping;
use super::metadata::Metadata;
use super::names::quoted;
use super::parse::{Fault, Header, MAX_TENSORS, parse};
use crate::error::{Error, Result};

const NO: &str = "split.no";
const COUNT: &str = "split.count";
const TENSORS: &str = "split.tensors.count";
const ARCHITECTURE: &str = "general.architecture";
/// llama.cpp's type for counts of parts is u16.
const MAX_PARTS: u64 = u16::MAX as u64;

/// One file of a model.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) path: PathBuf,
    pub(super) mapping: Mapping,
    /// Without metadata if this is not the first part.
    pub(super) header: Header,
    architecture: Option<String>,
}

/// What a part says about the model it belongs to.
#[derive(Debug, Clone, Copy)]
struct Split {
    /// Of this part, from 0.
    no: u64,
    /// Number of parts, at least 2.
    count: u64,
    /// Tensors in all parts together.
    n_tensors: Option<u64>,
}

/// Opens all parts of the model that the file at `path` is, or is a part of, in order.
pub(super) fn open_parts(path: &Path) -> Result<Vec<Part>> {
    let mut given = open_part(path)?;
    let Some(split) = read_split(&given.header.metadata)? else { return Ok(vec![given]) };
    let stem = stem(path, split)?;
    given.forget_metadata_unless_first(split.no);

    let mut given = Some(given);
    let mut parts = Vec::new();
    let mut n_tensors = 0;
    for no in 0..split.count {
        let part = match given.take_if(|_| no == split.no) {
            Some(part) => part,
            None => open_sibling(&part_path(path, &stem, no, split.count), no, split)?,
        };
        n_tensors += part.header.tensors.len() as u64;
        if n_tensors > MAX_TENSORS {
            let problem = format!("with it there are {n_tensors} tensors; {MAX_TENSORS} are read");
            return Err(file_error(&part.path, problem));
        }
        parts.push(part);
    }
    check_architectures(&parts)?;
    check_tensor_count(path, split, n_tensors)?;
    Ok(parts)
}

fn open_part(path: &Path) -> Result<Part> {
    let mapping = Mapping::open(path)?;
    let parsed = parse(path, mapping.bytes());
    mapping.check()?; // a file that shrank meanwhile is the better explanation
    let header = parsed.map_err(|fault| fault.in_file(path))?;
    let architecture = header.metadata.str(ARCHITECTURE)?.map(str::to_owned);
    Ok(Part { path: path.to_owned(), mapping, header, architecture })
}

impl Part {
    /// Metadata may be large, and there may be many parts.
    fn forget_metadata_unless_first(&mut self, no: u64) {
        if no > 0 {
            self.header.metadata = Metadata::empty(&self.path);
        }
    }
}

/// `None` for a model in one file.
fn read_split(metadata: &Metadata) -> Result<Option<Split>> {
    let count = metadata.u64(COUNT)?.unwrap_or(1);
    if count <= 1 {
        return Ok(None);
    }
    if count > MAX_PARTS {
        return Err(metadata.error(COUNT, format!("{count} parts; at most {MAX_PARTS} are read")));
    }
    let no = metadata.require_u64(NO)?;
    if no >= count {
        return Err(metadata.error(NO, format!("{no}, but {COUNT} is {count}")));
    }
    Ok(Some(Split { no, count, n_tensors: metadata.u64(TENSORS)? }))
}

/// The file's name without what tells the parts apart.
fn stem(path: &Path, split: Split) -> Result<String> {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let expected = suffix(split.no, split.count);
    let stem = name.strip_suffix(&expected).ok_or_else(|| {
        let part = split.no + 1;
        let problem = format!(
            "it holds part {part} of {}, so its name must end in `{expected}`: the file was renamed, \
             or parts were swapped",
            split.count
        );
        file_error(path, problem)
    })?;
    Ok(stem.to_owned())
}

fn part_path(sibling: &Path, stem: &str, no: u64, count: u64) -> PathBuf {
    sibling.with_file_name(format!("{stem}{}", suffix(no, count)))
}

fn suffix(no: u64, count: u64) -> String {
    format!("-{:05}-of-{count:05}.gguf", no + 1)
}

/// Opens another part than the given one and checks that it belongs to it.
fn open_sibling(path: &Path, no: u64, split: Split) -> Result<Part> {
    let (part, count) = (no + 1, split.count);
    if !path.exists() {
        let problem = format!("part {part} of {count} is missing; all parts must be in one folder");
        return Err(file_error(path, problem));
    }
    let mut opened = open_part(path)?;
    let Some(found) = read_split(&opened.header.metadata)? else {
        let problem = format!("a model of its own, not part {part} of {count}");
        return Err(file_error(path, problem));
    };
    if (found.no, found.count) != (no, count) {
        let problem = format!(
            "its name says part {part} of {count}, but it holds part {} of {}",
            found.no + 1,
            found.count
        );
        return Err(file_error(path, problem));
    }
    if found.n_tensors != split.n_tensors {
        return Err(opened.header.metadata.error(TENSORS, "is not that of the other parts"));
    }
    opened.forget_metadata_unless_first(no);
    Ok(opened)
}

/// Where parts after the first name an architecture, it is the first one's.
fn check_architectures(parts: &[Part]) -> Result<()> {
    let Some((first, others)) = parts.split_first() else { return Ok(()) };
    for other in others {
        if other.architecture.is_some() && other.architecture != first.architecture {
            let problem = "is not that of part 1: a part of another model";
            return Err(Fault::new(quoted("key", ARCHITECTURE), problem).in_file(&other.path));
        }
    }
    Ok(())
}

/// `n_tensors` were found in all parts together.
fn check_tensor_count(path: &Path, split: Split, n_tensors: u64) -> Result<()> {
    match split.n_tensors {
        Some(stated) if stated != n_tensors => {
            let problem = format!("{stated}, but the parts have {n_tensors} tensors together");
            Err(Fault::new(quoted("key", TENSORS), problem).in_file(path))
        }
        _ => Ok(()),
    }
}

fn file_error(path: &Path, problem: impl Into<String>) -> Error {
    Fault::new("split model", problem).in_file(path)
}
