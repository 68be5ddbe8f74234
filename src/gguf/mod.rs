//! GGUF files: one model, in one file or several, mapped into memory and read with bounds.
//!
//! [`Gguf::open`] checks all that can be checked without knowing the model: afterwards every tensor
//! lies in its file, does not overlap another, and has whole blocks. What keys and tensors mean is
//! the business of `model/`, which reports what it dislikes through [`Gguf::error`].
//!
//! Reading order: this file, `parse` (bytes to header), `metadata` (lookups), `ggml_type` (the table
//! of types), `split` (models in several files), `mapping` (files that shrink while in use), `read`
//! (bytes for memory of one's own), [`mod@write`] (heads of new files), `describe` (a model's name).

mod describe;
mod ggml_type;
mod mapping;
mod metadata;
mod names;
mod parse;
mod read;
mod split;
pub mod write;

use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use ggml_type::GgmlType;
use mapping::Mapping;
pub use mapping::PrivateMapping;
pub use metadata::{Array, Metadata, Value};
use names::{NameIndex, Twice, quoted};
use parse::Fault;
pub use parse::Header;
pub use read::Part;

use crate::error::{Error, Result};

/// One model: the metadata of its first file, the tensors of all.
#[derive(Debug)]
pub struct Gguf {
    path: PathBuf,
    version: u32,
    metadata: Metadata,
    tensors: Vec<TensorInfo>,
    by_name: NameIndex,
    paths: Vec<PathBuf>,
    mappings: Vec<Mapping>,
}

/// Where a tensor lies and what it is.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorInfo {
    /// Unique in the model.
    pub name: String,
    /// Type of the elements.
    pub ty: GgmlType,
    /// Elements per dimension in ggml's order, the contiguous one first; 1 beyond `n_dims`.
    pub shape: [u64; 4],
    /// Number of dimensions stated in the file, 1 to 4.
    pub n_dims: u32,
    /// The file that holds it: an index into [`Gguf::parts`].
    pub part: usize,
    /// First byte, counted from the start of that file.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

impl Gguf {
    /// Opens a model. If it is split into several files, `path` may be any of them.
    pub fn open(path: &Path) -> Result<Gguf> {
        let mut gguf = Gguf {
            path: path.to_owned(),
            version: 0,
            metadata: Metadata::empty(path),
            tensors: Vec::new(),
            by_name: NameIndex::default(),
            paths: Vec::new(),
            mappings: Vec::new(),
        };
        for (i, part) in split::open_parts(path)?.into_iter().enumerate() {
            if i == 0 {
                gguf.version = part.header.version;
                gguf.metadata = part.header.metadata;
            }
            let tensors = part.header.tensors.into_iter();
            gguf.tensors.extend(tensors.map(|tensor| TensorInfo { part: i, ..tensor }));
            gguf.paths.push(part.path);
            gguf.mappings.push(part.mapping);
        }
        gguf.by_name = gguf.index_tensors()?;
        Ok(gguf)
    }

    /// Parses the header of a file that consists of `data`: what [`open`](Self::open) does to each
    /// file of a model, without a file. Tensor names may still repeat. For fuzzing and for tools that
    /// have only the head of a file to look at, padded to its length.
    pub fn parse_bytes(data: &[u8]) -> Result<Header> {
        let path = Path::new("<memory>");
        parse::parse(path, data).map_err(|fault| fault.in_file(path))
    }

    /// The path that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The model's files in order.
    pub fn parts(&self) -> &[PathBuf] {
        &self.paths
    }

    /// Version of the format: 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Keys and values of the first file.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// All tensors, in file order over the parts.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// A tensor by name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.by_name.find(name, |i| &self.tensors[i].name).map(|i| &self.tensors[i])
    }

    /// A tensor that must be there.
    pub fn require(&self, name: &str) -> Result<&TensorInfo> {
        self.tensor(name).ok_or_else(|| self.error(quoted("tensor", name), "is missing"))
    }

    /// A tensor's bytes, mapped from the file; zeros where the file has shrunk, which
    /// [`check`](Self::check) tells.
    ///
    /// # Panics
    /// If `tensor` is of another model.
    pub fn bytes(&self, tensor: &TensorInfo) -> &[u8] {
        let file = self.mappings[tensor.part].bytes();
        &file[tensor.offset as usize..tensor.end() as usize] // in the mapping, so in usize
    }

    /// Maps a file of the model, an index into [`parts`](Self::parts), for import by a device. Every
    /// call maps it anew: whoever imports keeps the result.
    ///
    /// # Panics
    /// If there is no such part.
    pub fn map_private(&self, part: usize) -> Result<Arc<PrivateMapping>> {
        self.mappings[part].map_private().map(Arc::new)
    }

    /// An error if a file was written to, or could not be read, since it was opened. To be
    /// asked after bytes were read and before what was made of them counts.
    pub fn check(&self) -> Result<()> {
        self.mappings.iter().try_for_each(Mapping::check)
    }

    /// Bytes of all tensors.
    pub fn total_bytes(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.bytes).sum()
    }

    /// An error about this model: ``error("tensor `output.weight`", "expected …, found …")``.
    pub fn error(&self, place: impl Into<String>, problem: impl Into<String>) -> Error {
        Fault::new(place, problem).in_file(&self.path)
    }

    fn index_tensors(&self) -> Result<NameIndex> {
        NameIndex::new(self.tensors.len(), |i| &self.tensors[i].name)
            .map_err(|twice| self.twice(twice))
    }

    fn twice(&self, Twice { first, second }: Twice) -> Error {
        let (first, second) = (&self.tensors[first], &self.tensors[second]);
        let problem = if first.part == second.part {
            "is there twice".to_owned()
        } else {
            format!("is also in {}", self.paths[first.part].display())
        };
        Fault::new(quoted("tensor", &second.name), problem).in_file(&self.paths[second.part])
    }
}

impl TensorInfo {
    /// The byte after the last, counted from the start of the file.
    pub fn end(&self) -> u64 {
        self.offset.saturating_add(self.bytes)
    }
}
