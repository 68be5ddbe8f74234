//! Parses the header of one GGUF file (one part of a split model) from bytes: metadata and the table
//! of tensors. Knows nothing of files, mappings or models.
//!
//! The bytes are hostile. Three rules keep any input harmless: every count and length is compared
//! with the bytes that are left before anything is allocated for it; what the header's values cost in
//! memory is charged to a budget; and all arithmetic on numbers from the file is checked.
//!
//! Format: `docs/gguf.md` of ggml, versions 2 and 3 (the same but for version 3's big-endian form,
//! which is refused). Stricter than llama.cpp where a file would only fail later: bools are 0 or 1;
//! keys, names and strings are UTF-8. The last also holds for vocabularies. Converters have always
//! written byte tokens as text (`<0x0A>`, or GPT-2's printable stand-ins); raw bytes in a token mean a
//! broken converter, and replacing them would change the text that the model reads and writes.

use std::path::Path;

use super::TensorInfo;
use super::ggml_type::GgmlType;
use super::metadata::{Array, Metadata, Value};
use super::names::quoted;
use crate::error::Error;

/// What the header of one file says.
#[derive(Debug, Clone)]
pub struct Header {
    /// Version of the format: 2 or 3.
    pub version: u32,
    /// Keys and values.
    pub metadata: Metadata,
    /// The tensors in file order, all inside the file, none overlapping another.
    pub tensors: Vec<TensorInfo>,
}

/// What is wrong, and where in the file. The caller, who knows the file, makes it an [`Error`].
#[derive(Debug)]
pub(super) struct Fault {
    place: String,
    problem: String,
}

/// What is wrong with the bytes at hand; the caller knows the place.
type Problem = String;

/// Most memory that the keys and values of a file may take. The largest vocabularies in use (262k
/// tokens, 515k merges) take about 45 MiB by [`STRING_COST`].
const BUDGET_BYTES: u64 = 60 << 20;
/// Charged for a key and for a string beside their bytes: the structs, and malloc's overhead.
const KEY_COST: u64 = 128;
const STRING_COST: u64 = 24 + 32;
/// Bytes of a string that [`STRING_COST`] covers: malloc's smallest block.
const STRING_FREE_BYTES: u64 = 24;

/// Most keys of a file; models have some dozens.
const MAX_KEYS: u64 = 1 << 16;
/// Most tensors of a model, in all its files. DeepSeek-V3 with every expert a tensor of its own would have 46k.
pub(super) const MAX_TENSORS: u64 = 1 << 16;
/// Longest key, from the format's description.
const MAX_KEY_BYTES: u64 = 65535;
/// Longest tensor name. llama.cpp stops at 63 bytes, and other writers do not know that.
const MAX_NAME_BYTES: u64 = 255;

/// Fewest bytes of a key (length, type, a one-byte value) and of a tensor (length, dimensions, type,
/// offset) in a file: they bound the header's counts.
const MIN_KEY_BYTES: u64 = 8 + 4 + 1;
const MIN_TENSOR_BYTES: u64 = 8 + 4 + 8 + 4 + 8;

pub(super) const MAGIC: &[u8; 4] = b"GGUF";
pub(super) const DEFAULT_ALIGNMENT: u64 = 32;

/// Parses the header of a file that consists of `data`. `path` is for messages.
pub(super) fn parse(path: &Path, data: &[u8]) -> Result<Header, Fault> {
    let mut cursor = Cursor { data, at: 0, budget_bytes: BUDGET_BYTES };
    let version = version(&mut cursor).map_err(at("header"))?;
    let (n_tensors, n_keys) = counts(&mut cursor).map_err(at("header"))?;

    let mut entries = Vec::new();
    for i in 0..n_keys {
        entries.push(key_and_value(&mut cursor, i, n_keys)?);
    }
    let metadata = Metadata::new(path, entries)?;

    let mut tensors = Vec::new();
    for i in 0..n_tensors {
        tensors.push(tensor(&mut cursor, i, n_tensors)?);
    }
    let alignment = alignment(&metadata)?;
    let data_end = place_tensors(&mut tensors, cursor.position(), alignment, data.len() as u64)?;
    refuse_second_file(data, data_end, alignment)?;
    Ok(Header { version, metadata, tensors })
}

/// Magic and version.
fn version(cursor: &mut Cursor) -> Result<u32, Problem> {
    let magic: [u8; 4] = cursor.array()?;
    if magic != *MAGIC {
        return Err(foreign_magic(&magic));
    }
    match cursor.u32()? {
        version @ (2 | 3) => Ok(version),
        1 => Err("GGUF version 1 (of 2023) is not read; convert the model again".into()),
        other if (1..=0xffff).contains(&other.swap_bytes()) => Err(format!(
            "a big-endian file (version {}); only little-endian ones are read",
            other.swap_bytes()
        )),
        other => Err(format!("GGUF version {other}; versions 2 and 3 are read")),
    }
}

fn foreign_magic(magic: &[u8; 4]) -> Problem {
    let hint = match magic {
        b"tjgg" | b"lmgg" | b"fmgg" | b"algg" => "; it is a GGML file from before GGUF",
        b"vers" => "; it looks like a Git LFS pointer: download the file itself",
        b"PK\x03\x04" => "; it looks like a PyTorch or zip file: convert it to GGUF",
        _ => "",
    };
    format!("not a GGUF file: it starts with `{}`{hint}", magic.escape_ascii())
}

/// Numbers of tensors and of keys.
fn counts(cursor: &mut Cursor) -> Result<(u64, u64), Problem> {
    let n_tensors = cursor.u64()?;
    let n_keys = cursor.u64()?;
    cursor.bound(n_keys, MIN_KEY_BYTES, "keys")?;
    cursor.bound(n_tensors, MIN_TENSOR_BYTES, "tensors")?;
    if n_keys > MAX_KEYS {
        return Err(format!("{n_keys} keys; at most {MAX_KEYS} are read"));
    }
    if n_tensors > MAX_TENSORS {
        return Err(format!("{n_tensors} tensors; at most {MAX_TENSORS} are read"));
    }
    Ok((n_tensors, n_keys))
}

fn key_and_value(cursor: &mut Cursor, i: u64, n: u64) -> Result<(String, Value), Fault> {
    let key = cursor.name(MAX_KEY_BYTES).map_err(at(format!("key {} of {n}", i + 1)))?;
    let value = (|| {
        cursor.charge(KEY_COST + key.len() as u64)?;
        value(cursor)
    })();
    Ok((key.to_owned(), value.map_err(|problem| Fault::new(quoted("key", key), problem))?))
}

/// A value after its type, by the numbers of `enum gguf_type`.
fn value(cursor: &mut Cursor) -> Result<Value, Problem> {
    Ok(match cursor.u32()? {
        0 => Value::U8(u8::from_le_bytes(cursor.array()?)),
        1 => Value::I8(i8::from_le_bytes(cursor.array()?)),
        2 => Value::U16(u16::from_le_bytes(cursor.array()?)),
        3 => Value::I16(i16::from_le_bytes(cursor.array()?)),
        4 => Value::U32(u32::from_le_bytes(cursor.array()?)),
        5 => Value::I32(i32::from_le_bytes(cursor.array()?)),
        6 => Value::F32(f32::from_le_bytes(cursor.array()?)),
        7 => Value::Bool(truth(cursor.array()?)?),
        8 => Value::String(cursor.string()?),
        9 => Value::Array(array(cursor)?),
        10 => Value::U64(u64::from_le_bytes(cursor.array()?)),
        11 => Value::I64(i64::from_le_bytes(cursor.array()?)),
        12 => Value::F64(f64::from_le_bytes(cursor.array()?)),
        other => return Err(unknown_value_type(other)),
    })
}

/// An array after its type: element type, count, elements.
fn array(cursor: &mut Cursor) -> Result<Array, Problem> {
    let element_type = cursor.u32()?;
    let count = cursor.u64()?;
    Ok(match element_type {
        0 => Array::U8(cursor.numbers(count, u8::from_le_bytes)?),
        1 => Array::I8(cursor.numbers(count, i8::from_le_bytes)?),
        2 => Array::U16(cursor.numbers(count, u16::from_le_bytes)?),
        3 => Array::I16(cursor.numbers(count, i16::from_le_bytes)?),
        4 => Array::U32(cursor.numbers(count, u32::from_le_bytes)?),
        5 => Array::I32(cursor.numbers(count, i32::from_le_bytes)?),
        6 => Array::F32(cursor.numbers(count, f32::from_le_bytes)?),
        7 => Array::Bool(truths(cursor, count)?),
        8 => Array::String(strings(cursor, count)?),
        9 => return Err("an array of arrays; only flat arrays are read".into()),
        10 => Array::U64(cursor.numbers(count, u64::from_le_bytes)?),
        11 => Array::I64(cursor.numbers(count, i64::from_le_bytes)?),
        12 => Array::F64(cursor.numbers(count, f64::from_le_bytes)?),
        other => return Err(unknown_value_type(other)),
    })
}

fn unknown_value_type(id: u32) -> Problem {
    format!("value type {id} is unknown; types 0 to 12 are")
}

fn truth([byte]: [u8; 1]) -> Result<bool, Problem> {
    match byte {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(format!("a bool of {other}; 0 and 1 are allowed")),
    }
}

fn truths(cursor: &mut Cursor, count: u64) -> Result<Vec<bool>, Problem> {
    let bytes = cursor.numbers(count, |byte: [u8; 1]| byte)?;
    bytes.into_iter().map(truth).collect()
}

fn strings(cursor: &mut Cursor, count: u64) -> Result<Vec<String>, Problem> {
    cursor.bound(count, 8, "strings")?;
    cursor.charge(count.saturating_mul(STRING_COST))?;
    let mut items = Vec::with_capacity(count as usize); // within the budget
    for i in 0..count {
        let item = cursor.string_in_array().map_err(|problem| format!("string {i}: {problem}"))?;
        items.push(item);
    }
    Ok(items)
}

/// An entry of the tensor table. Its offset still counts from the start of the data, and which part
/// of a model this is, the caller knows.
fn tensor(cursor: &mut Cursor, i: u64, n: u64) -> Result<TensorInfo, Fault> {
    let name = cursor.name(MAX_NAME_BYTES).map_err(at(format!("tensor {} of {n}", i + 1)))?;
    let fault = |problem| Fault::new(quoted("tensor", name), problem);
    let (n_dims, shape) = shape(cursor).map_err(fault)?;
    let ty = ggml_type(cursor).map_err(fault)?;
    let bytes = tensor_bytes(ty, shape).map_err(fault)?;
    let offset = cursor.u64().map_err(fault)?;
    Ok(TensorInfo { name: name.to_owned(), ty, shape, n_dims, part: 0, offset, bytes })
}

fn shape(cursor: &mut Cursor) -> Result<(u32, [u64; 4]), Problem> {
    let n_dims = cursor.u32()?;
    if !(1..=4).contains(&n_dims) {
        return Err(format!("{n_dims} dimensions; 1 to 4 are allowed"));
    }
    let mut shape = [1; 4];
    for (i, dim) in shape.iter_mut().take(n_dims as usize).enumerate() {
        *dim = cursor.u64()?;
        if *dim == 0 || *dim > i64::MAX as u64 {
            return Err(format!("dimension {i} is {}; 1 to 2^63-1 are allowed", *dim as i64));
        }
    }
    Ok((n_dims, shape))
}

fn ggml_type(cursor: &mut Cursor) -> Result<GgmlType, Problem> {
    let id = cursor.u32()?;
    GgmlType::from_id(id).ok_or_else(|| {
        let known: Vec<_> = GgmlType::ALL.iter().map(|ty| format!("{ty}={}", ty.id())).collect();
        format!("type {id} is unknown; known are {}", known.join(" "))
    })
}

fn tensor_bytes(ty: GgmlType, shape: [u64; 4]) -> Result<u64, Problem> {
    let [ne0, ne1, ne2, ne3] = shape;
    if !ne0.is_multiple_of(ty.block_len()) {
        let block_len = ty.block_len();
        return Err(format!("rows of {ne0} are not whole {ty} blocks of {block_len}"));
    }
    ty.row_bytes(ne0)
        .and_then(|bytes| bytes.checked_mul(ne1))
        .and_then(|bytes| bytes.checked_mul(ne2))
        .and_then(|bytes| bytes.checked_mul(ne3))
        .ok_or_else(|| format!("the shape {shape:?} has more than 2^64 bytes as {ty}"))
}

/// Alignment of the data and of every tensor in it.
fn alignment(metadata: &Metadata) -> Result<u64, Fault> {
    let key = "general.alignment";
    let alignment = match metadata.get(key) {
        None => DEFAULT_ALIGNMENT,
        Some(Value::U32(alignment)) => u64::from(*alignment),
        Some(other) => {
            return Err(Fault::new(quoted("key", key), format!("expected u32, found {other}")));
        }
    };
    if !alignment.is_power_of_two() {
        return Err(Fault::new(quoted("key", key), format!("{alignment} is not a power of two")));
    }
    Ok(alignment)
}

/// Makes offsets absolute and checks that the tensors lie in the file, side by side. The answer is
/// where the last one ends. Gaps are allowed: tools that drop tensors leave them.
fn place_tensors(
    tensors: &mut [TensorInfo],
    header_end: u64,
    alignment: u64,
    file_bytes: u64,
) -> Result<u64, Fault> {
    for tensor in tensors.iter_mut() {
        place_tensor(tensor, header_end, alignment, file_bytes)
            .map_err(|problem| Fault::new(quoted("tensor", &tensor.name), problem))?;
    }
    let mut by_offset: Vec<&TensorInfo> = tensors.iter().collect();
    by_offset.sort_by_key(|tensor| tensor.offset);
    for pair in by_offset.windows(2) {
        if pair[0].end() > pair[1].offset {
            let other = quoted("tensor", &pair[0].name);
            let problem = format!("its bytes, from {} on, overlap {other}", pair[1].offset);
            return Err(Fault::new(quoted("tensor", &pair[1].name), problem));
        }
    }
    Ok(by_offset.last().map_or(header_end, |last| last.end()))
}

fn place_tensor(
    tensor: &mut TensorInfo,
    header_end: u64,
    alignment: u64,
    file_bytes: u64,
) -> Result<(), Problem> {
    let offset = tensor.offset;
    if !offset.is_multiple_of(alignment) {
        return Err(format!("its offset {offset} is not a multiple of the alignment {alignment}"));
    }
    let start = header_end.checked_next_multiple_of(alignment).and_then(|s| s.checked_add(offset));
    let end = start.and_then(|start| start.checked_add(tensor.bytes));
    let (Some(start), Some(end)) = (start, end) else {
        return Err(format!("its offset {offset} is past any file"));
    };
    if end > file_bytes {
        return Err(format!(
            "its bytes {start} to {end} end after the file's {file_bytes}: the file is cut off, or its header is damaged"
        ));
    }
    tensor.offset = start;
    Ok(())
}

/// Parts of a split model that were simply concatenated look like their first part with more bytes
/// after it.
fn refuse_second_file(data: &[u8], end: u64, alignment: u64) -> Result<(), Fault> {
    for start in [Some(end), end.checked_next_multiple_of(alignment)].into_iter().flatten() {
        let rest = usize::try_from(start).ok().and_then(|start| data.get(start..));
        if rest.is_some_and(|rest| rest.starts_with(MAGIC)) {
            let problem = "another GGUF file starts here: parts of a split model must stay separate \
                           files, or be merged with `llama-gguf-split --merge`";
            return Err(Fault::new(format!("byte {start}"), problem));
        }
    }
    Ok(())
}

impl Fault {
    pub(super) fn new(place: impl Into<String>, problem: impl Into<String>) -> Self {
        Fault { place: place.into(), problem: problem.into() }
    }

    pub(super) fn in_file(self, path: &Path) -> Error {
        Error::Gguf { path: path.to_owned(), place: self.place, problem: self.problem }
    }
}

/// Adds the place to a problem.
fn at(place: impl Into<String>) -> impl FnOnce(Problem) -> Fault {
    move |problem| Fault::new(place, problem)
}

/// Reads forward through bytes, never past their end, never over budget.
struct Cursor<'a> {
    data: &'a [u8],
    at: usize,
    budget_bytes: u64,
}

impl<'a> Cursor<'a> {
    fn position(&self) -> u64 {
        self.at as u64
    }

    fn remaining(&self) -> u64 {
        (self.data.len() - self.at) as u64
    }

    /// Refuses a count of things that the rest of the file has no room for.
    fn bound(&self, count: u64, least_bytes: u64, what: &str) -> Result<(), Problem> {
        let room = self.remaining() / least_bytes;
        if count > room {
            let left = self.remaining();
            return Err(format!("{count} {what}; the {left} bytes left hold {room} at most"));
        }
        Ok(())
    }

    /// Takes memory from the budget.
    fn charge(&mut self, bytes: u64) -> Result<(), Problem> {
        self.budget_bytes = self.budget_bytes.checked_sub(bytes).ok_or_else(|| {
            format!("with it the metadata takes more than {} MiB of memory", BUDGET_BYTES >> 20)
        })?;
        Ok(())
    }

    fn take(&mut self, len: u64) -> Result<&'a [u8], Problem> {
        self.bound(len, 1, "bytes")?;
        let start = self.at;
        self.at += len as usize; // at most the length of a slice
        Ok(&self.data[start..self.at])
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Problem> {
        let rest = &self.data[self.at..];
        let bytes = rest.first_chunk().ok_or_else(|| {
            format!("the file ends at byte {}, in the middle of its header", self.data.len())
        })?;
        self.at += N;
        Ok(*bytes)
    }

    fn u32(&mut self) -> Result<u32, Problem> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, Problem> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// Text of a length that comes first.
    fn text(&mut self) -> Result<&'a str, Problem> {
        let len = self.u64()?;
        let bytes = self.take(len)?;
        std::str::from_utf8(bytes)
            .map_err(|error| format!("not UTF-8 at byte {} of the text", error.valid_up_to()))
    }

    /// A key or a tensor's name.
    fn name(&mut self, max_bytes: u64) -> Result<&'a str, Problem> {
        let name = self.text().map_err(|problem| format!("its name: {problem}"))?;
        match name.len() as u64 {
            0 => Err("its name is empty".into()),
            len if len > max_bytes => {
                Err(format!("its name is {len} bytes long; at most {max_bytes} are read"))
            }
            _ => Ok(name),
        }
    }

    fn string(&mut self) -> Result<String, Problem> {
        self.charge(STRING_COST)?;
        self.string_in_array()
    }

    /// A string whose [`STRING_COST`] is paid.
    fn string_in_array(&mut self) -> Result<String, Problem> {
        let text = self.text()?;
        self.charge((text.len() as u64).saturating_sub(STRING_FREE_BYTES))?;
        Ok(text.to_owned())
    }

    /// `count` numbers of `N` bytes each.
    fn numbers<T, const N: usize>(
        &mut self,
        count: u64,
        number: impl Fn([u8; N]) -> T,
    ) -> Result<Vec<T>, Problem> {
        self.bound(count, N as u64, "elements")?;
        let len = count.saturating_mul(N as u64);
        self.charge(len)?;
        let (chunks, _) = self.take(len)?.as_chunks();
        Ok(chunks.iter().map(|&bytes| number(bytes)).collect())
    }
}
