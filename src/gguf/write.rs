//! Writes the head of a GGUF file (version 3, little-endian): keys, values and the table of tensors.
//! The tensors' bytes are the caller's: [`Head`] says where they go.
//!
//! Format: `docs/gguf.md` of ggml; `parse` reads it.

use super::ggml_type::GgmlType;
use super::metadata::{Array, Value};
use super::parse::{DEFAULT_ALIGNMENT, MAGIC};

const VERSION: u32 = 3;

/// A tensor to be written.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorSpec {
    /// Unique in the file.
    pub name: String,
    /// Type of the elements.
    pub ty: GgmlType,
    /// Elements per dimension in ggml's order, the contiguous one first.
    pub shape: Vec<u64>,
}

/// The head of a file, and where its tensors' bytes go.
#[derive(Debug, Clone)]
pub struct Head {
    /// All bytes before the first tensor.
    pub bytes: Vec<u8>,
    /// First byte of each tensor, counted from the start of the file.
    pub offsets: Vec<u64>,
    /// Length of the whole file.
    pub file_bytes: u64,
}

impl TensorSpec {
    /// Number of elements.
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Length in bytes; `None` if a row is not whole blocks, or the bytes overflow.
    pub fn bytes(&self) -> Option<u64> {
        let (row, rows) = self.shape.split_first()?;
        let rows = rows.iter().try_fold(1u64, |n, &dim| n.checked_mul(dim))?;
        self.ty.row_bytes(*row)?.checked_mul(rows)
    }
}

impl Head {
    /// Lays the tensors out in order, each at a multiple of the format's default alignment.
    ///
    /// # Panics
    /// If a tensor's [`bytes`](TensorSpec::bytes) cannot be told.
    pub fn new(keys: &[(String, Value)], tensors: &[TensorSpec]) -> Head {
        let mut bytes = Vec::new();
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend((tensors.len() as u64).to_le_bytes());
        bytes.extend((keys.len() as u64).to_le_bytes());
        for (key, value) in keys {
            put_string(&mut bytes, key.as_bytes());
            bytes.extend(type_id(value).to_le_bytes());
            put_value(&mut bytes, value);
        }
        let mut offset = 0u64; // from the start of the data
        let mut offsets = Vec::with_capacity(tensors.len());
        for tensor in tensors {
            offset = offset.next_multiple_of(DEFAULT_ALIGNMENT);
            put_tensor(&mut bytes, tensor, offset);
            offsets.push(offset);
            let len = tensor.bytes();
            assert!(len.is_some(), "{}: rows of {:?} {}", tensor.name, tensor.shape, tensor.ty);
            offset += len.unwrap_or(0);
        }
        bytes.resize((bytes.len() as u64).next_multiple_of(DEFAULT_ALIGNMENT) as usize, 0);
        let data = bytes.len() as u64;
        offsets.iter_mut().for_each(|offset| *offset += data);
        Head { bytes, offsets, file_bytes: data + offset }
    }
}

fn put_tensor(out: &mut Vec<u8>, tensor: &TensorSpec, offset: u64) {
    put_string(out, tensor.name.as_bytes());
    out.extend((tensor.shape.len() as u32).to_le_bytes());
    out.extend(tensor.shape.iter().flat_map(|dim| dim.to_le_bytes()));
    out.extend(tensor.ty.id().to_le_bytes());
    out.extend(offset.to_le_bytes());
}

/// The number that stands for a value's type.
pub fn type_id(value: &Value) -> u32 {
    match value {
        Value::U8(_) => 0,
        Value::I8(_) => 1,
        Value::U16(_) => 2,
        Value::I16(_) => 3,
        Value::U32(_) => 4,
        Value::I32(_) => 5,
        Value::F32(_) => 6,
        Value::Bool(_) => 7,
        Value::String(_) => 8,
        Value::Array(_) => 9,
        Value::U64(_) => 10,
        Value::I64(_) => 11,
        Value::F64(_) => 12,
    }
}

/// Appends a value's bytes, without its type.
pub fn put_value(out: &mut Vec<u8>, value: &Value) {
    match value {
        Value::U8(n) => out.extend(n.to_le_bytes()),
        Value::I8(n) => out.extend(n.to_le_bytes()),
        Value::U16(n) => out.extend(n.to_le_bytes()),
        Value::I16(n) => out.extend(n.to_le_bytes()),
        Value::U32(n) => out.extend(n.to_le_bytes()),
        Value::I32(n) => out.extend(n.to_le_bytes()),
        Value::U64(n) => out.extend(n.to_le_bytes()),
        Value::I64(n) => out.extend(n.to_le_bytes()),
        Value::F32(n) => out.extend(n.to_le_bytes()),
        Value::F64(n) => out.extend(n.to_le_bytes()),
        Value::Bool(truth) => out.push(u8::from(*truth)),
        Value::String(text) => put_string(out, text.as_bytes()),
        Value::Array(array) => put_array(out, array),
    }
}

fn put_array(out: &mut Vec<u8>, array: &Array) {
    macro_rules! numbers {
        ($id:literal, $items:expr) => {{
            put_array_head(out, $id, $items.len() as u64);
            out.extend($items.iter().flat_map(|item| item.to_le_bytes()));
        }};
    }
    match array {
        Array::U8(items) => numbers!(0, items),
        Array::I8(items) => numbers!(1, items),
        Array::U16(items) => numbers!(2, items),
        Array::I16(items) => numbers!(3, items),
        Array::U32(items) => numbers!(4, items),
        Array::I32(items) => numbers!(5, items),
        Array::F32(items) => numbers!(6, items),
        Array::U64(items) => numbers!(10, items),
        Array::I64(items) => numbers!(11, items),
        Array::F64(items) => numbers!(12, items),
        Array::Bool(items) => {
            put_array_head(out, 7, items.len() as u64);
            out.extend(items.iter().map(|&truth| u8::from(truth)));
        }
        Array::String(items) => {
            put_array_head(out, 8, items.len() as u64);
            items.iter().for_each(|text| put_string(out, text.as_bytes()));
        }
    }
}

/// An array's element type and count, which its elements follow.
pub fn put_array_head(out: &mut Vec<u8>, type_id: u32, count: u64) {
    out.extend(type_id.to_le_bytes());
    out.extend(count.to_le_bytes());
}

/// Length and bytes.
pub fn put_string(out: &mut Vec<u8>, text: &[u8]) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text);
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may fail")]
mod tests {
    use super::*;
    use crate::gguf::Gguf;

    fn values() -> Vec<Value> {
        let arrays = [
            Array::U8(vec![1]),
            Array::I8(vec![-1, 2]),
            Array::U16(vec![1 << 15]),
            Array::I16(vec![-5]),
            Array::U32(vec![7, 8, 9]),
            Array::I32(vec![-7]),
            Array::U64(vec![1 << 40]),
            Array::I64(vec![-(1 << 40)]),
            Array::F32(vec![0.5, -2.0]),
            Array::F64(vec![0.1]),
            Array::Bool(vec![true, false]),
            Array::String(vec![String::new(), "ä".into()]),
        ];
        let scalars = [
            Value::U8(1),
            Value::I8(-1),
            Value::U16(300),
            Value::I16(-300),
            Value::U32(1 << 20),
            Value::I32(-(1 << 20)),
            Value::U64(1 << 40),
            Value::I64(-(1 << 40)),
            Value::F32(0.5),
            Value::F64(0.1),
            Value::Bool(true),
            Value::String("text".into()),
        ];
        scalars.into_iter().chain(arrays.map(Value::Array)).collect()
    }

    #[test]
    fn the_parser_reads_back_what_was_written() {
        let keys: Vec<_> =
            values().into_iter().enumerate().map(|(i, v)| (format!("key.{i}"), v)).collect();
        let tensor = |name: &str, ty, shape: &[u64]| TensorSpec {
            name: name.into(),
            ty,
            shape: shape.to_vec(),
        };
        let tensors = [
            tensor("a", GgmlType::F32, &[3]),
            tensor("b.weight", GgmlType::Q4_K, &[512, 3, 2]),
            tensor("c", GgmlType::F16, &[1, 1, 1, 5]),
        ];
        let head = Head::new(&keys, &tensors);
        let mut file = head.bytes.clone();
        file.resize(head.file_bytes as usize, 0);
        let read = Gguf::parse_bytes(&file).unwrap();
        assert_eq!(read.version, VERSION);
        let found: Vec<_> = read.metadata.iter().map(|(k, v)| (k.to_owned(), v.clone())).collect();
        assert_eq!(found, keys);
        for ((read, spec), &offset) in read.tensors.iter().zip(&tensors).zip(&head.offsets) {
            assert_eq!((&read.name, read.ty, read.offset), (&spec.name, spec.ty, offset));
            assert_eq!(read.shape[..read.n_dims as usize], spec.shape);
            assert_eq!(Some(read.bytes), spec.bytes());
        }
        assert_eq!(read.tensors.last().unwrap().end(), head.file_bytes);
    }

    #[test]
    fn rows_that_are_not_whole_blocks_have_no_length() {
        let spec = |shape: &[u64]| TensorSpec {
            name: "t".into(),
            ty: GgmlType::Q8_0,
            shape: shape.to_vec(),
        };
        assert_eq!(spec(&[64, 3]).bytes(), Some(204));
        assert_eq!(spec(&[33, 3]).bytes(), None);
        assert_eq!(spec(&[64, u64::MAX, 2]).bytes(), None);
        assert_eq!(spec(&[]).bytes(), None);
    }
}
