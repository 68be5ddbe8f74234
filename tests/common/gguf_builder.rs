//! Writes GGUF files: valid ones from keys and tensors, and broken ones by stating any field
//! differently from what the content says.

#![allow(dead_code, reason = "each test binary uses a part of it")]
#![allow(unreachable_pub, reason = "public to the test binaries that include it")]
#![allow(clippy::unwrap_used, reason = "a test that cannot write its file has failed")]

use std::path::{Path, PathBuf};

pub use vkmoe::gguf::write::put_string;
use vkmoe::gguf::write::{put_array_head, put_value, type_id};
use vkmoe::gguf::{GgmlType, Value};

/// A file to be written. Fields may be changed freely before [`build`](Self::build).
#[derive(Clone)]
pub struct GgufBuilder {
    pub magic: [u8; 4],
    pub version: u32,
    pub keys: Vec<RawKey>,
    pub tensors: Vec<RawTensor>,
    /// Where the data start, and what offsets are multiples of, when not stated by the tensor.
    pub alignment: usize,
    /// Stated instead of the number of keys.
    pub n_keys: Option<u64>,
    /// Stated instead of the number of tensors.
    pub n_tensors: Option<u64>,
}

/// A key as written.
#[derive(Clone)]
pub struct RawKey {
    pub name: Vec<u8>,
    pub type_id: u32,
    pub value: Vec<u8>,
}

/// A tensor as written.
#[derive(Clone)]
pub struct RawTensor {
    pub name: Vec<u8>,
    pub dims: Vec<u64>,
    pub type_id: u32,
    pub data: Vec<u8>,
    /// Stated instead of the number of `dims`.
    pub n_dims: Option<u32>,
    /// Stated instead of where the data are.
    pub offset: Option<u64>,
}

impl GgufBuilder {
    /// An empty file of version 3.
    pub fn new() -> Self {
        GgufBuilder {
            magic: *b"GGUF",
            version: 3,
            keys: Vec::new(),
            tensors: Vec::new(),
            alignment: 32,
            n_keys: None,
            n_tensors: None,
        }
    }

    /// Adds a key.
    pub fn key(self, name: &str, value: Value) -> Self {
        let (type_id, value) = encode(&value);
        self.raw_key(name.as_bytes(), type_id, value)
    }

    /// Adds a key whose name, type and value are any bytes.
    pub fn raw_key(mut self, name: &[u8], type_id: u32, value: Vec<u8>) -> Self {
        self.keys.push(RawKey { name: name.to_vec(), type_id, value });
        self
    }

    /// Adds a tensor of `shape` (ggml's order) with these bytes.
    pub fn tensor(mut self, name: &str, ty: GgmlType, shape: &[u64], data: Vec<u8>) -> Self {
        self.tensors.push(RawTensor {
            name: name.as_bytes().to_vec(),
            dims: shape.to_vec(),
            type_id: ty.id(),
            data,
            n_dims: None,
            offset: None,
        });
        self
    }

    /// Adds an f32 tensor.
    pub fn f32s(self, name: &str, shape: &[u64], values: &[f32]) -> Self {
        let data = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.tensor(name, GgmlType::F32, shape, data)
    }

    /// Adds a tensor of zero bytes.
    pub fn zeros(self, name: &str, ty: GgmlType, shape: &[u64]) -> Self {
        let rows: u64 = shape[1..].iter().product();
        let bytes = ty.row_bytes(shape[0]).unwrap() * rows;
        self.tensor(name, ty, shape, vec![0; bytes as usize])
    }

    /// Changes the tensor added last.
    pub fn corrupt(mut self, change: impl FnOnce(&mut RawTensor)) -> Self {
        change(self.tensors.last_mut().unwrap());
        self
    }

    /// Adds the keys of part `no` (from 0) of `count`.
    pub fn split(self, no: u16, count: u16, n_tensors: i32) -> Self {
        self.key("split.no", Value::U16(no))
            .key("split.count", Value::U16(count))
            .key("split.tensors.count", Value::I32(n_tensors))
    }

    /// The file's bytes.
    pub fn build(&self) -> Vec<u8> {
        let mut file = Vec::new();
        file.extend(self.magic);
        file.extend(self.version.to_le_bytes());
        file.extend(self.n_tensors.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        file.extend(self.n_keys.unwrap_or(self.keys.len() as u64).to_le_bytes());
        for key in &self.keys {
            put_string(&mut file, &key.name);
            file.extend(key.type_id.to_le_bytes());
            file.extend(&key.value);
        }
        let mut data = Vec::new();
        for tensor in &self.tensors {
            data.resize(data.len().next_multiple_of(self.alignment), 0);
            put_tensor(&mut file, tensor, data.len() as u64);
            data.extend(&tensor.data);
        }
        file.resize(file.len().next_multiple_of(self.alignment), 0);
        file.extend(data);
        file
    }

    /// Writes the file.
    pub fn write(&self, path: &Path) -> PathBuf {
        std::fs::write(path, self.build()).unwrap();
        path.to_owned()
    }
}

fn put_tensor(file: &mut Vec<u8>, tensor: &RawTensor, offset: u64) {
    put_string(file, &tensor.name);
    file.extend(tensor.n_dims.unwrap_or(tensor.dims.len() as u32).to_le_bytes());
    file.extend(tensor.dims.iter().flat_map(|dim| dim.to_le_bytes()));
    file.extend(tensor.type_id.to_le_bytes());
    file.extend(tensor.offset.unwrap_or(offset).to_le_bytes());
}

/// Element type, stated count, elements: an array's value.
pub fn raw_array(type_id: u32, count: u64, elements: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    put_array_head(&mut bytes, type_id, count);
    bytes.extend(elements);
    bytes
}

/// A value's type and bytes.
fn encode(value: &Value) -> (u32, Vec<u8>) {
    let mut bytes = Vec::new();
    put_value(&mut bytes, value);
    (type_id(value), bytes)
}
