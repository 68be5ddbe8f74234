//! A model's metadata: keys and values in file order, and lookups by type.
//!
//! A lookup answers `Ok(None)` where the key is absent and an error naming file, key, expected and
//! found type where it holds something else. Integers convert between widths where the value fits
//! (converters disagree about them), nothing else converts. What a key means is not known here.

use std::fmt;
use std::path::{Path, PathBuf};

use super::names::{NameIndex, quoted};
use super::parse::Fault;
use crate::error::{Error, Result};

/// The keys and values of a file, in file order.
#[derive(Debug, Clone)]
pub struct Metadata {
    path: PathBuf,
    entries: Vec<(String, Value)>,
    by_key: NameIndex,
}

/// The value of a key.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs, reason = "each variant is named after what it holds")]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    U64(u64),
    I64(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    String(String),
    Array(Array),
}

/// A flat array, stored by its element type.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs, reason = "each variant is named after what it holds")]
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F32(Vec<f32>),
    F64(Vec<f64>),
    Bool(Vec<bool>),
    String(Vec<String>),
}

impl Metadata {
    /// No keys.
    pub(super) fn empty(path: &Path) -> Self {
        Metadata { path: path.to_owned(), entries: Vec::new(), by_key: NameIndex::default() }
    }

    /// Refuses duplicate keys.
    pub(super) fn new(path: &Path, entries: Vec<(String, Value)>) -> Result<Self, Fault> {
        let by_key = NameIndex::new(entries.len(), |i| &entries[i].0).map_err(|twice| {
            Fault::new(quoted("key", &entries[twice.second].0), "is there twice")
        })?;
        Ok(Metadata { path: path.to_owned(), entries, by_key })
    }

    /// Keys and values in file order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// The value of a key, whatever its type.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.by_key.find(key, |i| &self.entries[i].0).map(|i| &self.entries[i].1)
    }

    /// An integer of any type that fits.
    pub fn u32(&self, key: &str) -> Result<Option<u32>> {
        self.lookup(key, "u32", |value| value.integer()?.try_into().ok())
    }

    /// An integer of any type that fits.
    pub fn u64(&self, key: &str) -> Result<Option<u64>> {
        self.lookup(key, "u64", |value| value.integer()?.try_into().ok())
    }

    /// An integer of any type that fits.
    pub fn i32(&self, key: &str) -> Result<Option<i32>> {
        self.lookup(key, "i32", |value| value.integer()?.try_into().ok())
    }

    /// An `f32`, or an `f64` rounded to one.
    pub fn f32(&self, key: &str) -> Result<Option<f32>> {
        self.lookup(key, "f32", |value| match value {
            Value::F32(number) => Some(*number),
            Value::F64(number) => Some(*number as f32),
            _ => None,
        })
    }

    /// A truth value.
    pub fn bool(&self, key: &str) -> Result<Option<bool>> {
        self.lookup(key, "bool", |value| match value {
            Value::Bool(truth) => Some(*truth),
            _ => None,
        })
    }

    /// A string.
    pub fn str(&self, key: &str) -> Result<Option<&str>> {
        self.lookup(key, "string", |value| match value {
            Value::String(text) => Some(text.as_str()),
            _ => None,
        })
    }

    /// An array of strings.
    pub fn strings(&self, key: &str) -> Result<Option<&[String]>> {
        self.lookup(key, "array of string", |value| match value {
            Value::Array(Array::String(items)) => Some(items.as_slice()),
            _ => None,
        })
    }

    /// An array of integers of any type, all of which fit.
    pub fn u32s(&self, key: &str) -> Result<Option<Vec<u32>>> {
        self.lookup(key, "array of u32", |value| value.array()?.integers())
    }

    /// An array of integers of any type, all of which fit.
    pub fn i32s(&self, key: &str) -> Result<Option<Vec<i32>>> {
        self.lookup(key, "array of i32", |value| value.array()?.integers())
    }

    /// An array of `f32`, or of `f64` rounded to them.
    pub fn f32s(&self, key: &str) -> Result<Option<Vec<f32>>> {
        self.lookup(key, "array of f32", |value| match value.array()? {
            Array::F32(items) => Some(items.clone()),
            Array::F64(items) => Some(items.iter().map(|&number| number as f32).collect()),
            _ => None,
        })
    }

    /// An array of truth values.
    pub fn bools(&self, key: &str) -> Result<Option<&[bool]>> {
        self.lookup(key, "array of bool", |value| match value.array()? {
            Array::Bool(items) => Some(items.as_slice()),
            _ => None,
        })
    }

    /// One integer for each of `n_layer` layers: an array of that many, or one number for all.
    /// Keys such as `attention.head_count_kv` come in both forms. `n_layer` comes from the file:
    /// the caller has bounded it.
    pub fn u32_per_layer(&self, key: &str, n_layer: u32) -> Result<Option<Vec<u32>>> {
        let n_layer = n_layer as usize;
        if !matches!(self.get(key), Some(Value::Array(_))) {
            return Ok(self.u32(key)?.map(|one| vec![one; n_layer]));
        }
        let each = self.u32s(key)?.unwrap_or_default();
        if each.len() != n_layer {
            let problem = format!("expected one number or {n_layer}, found {}", each.len());
            return Err(self.error(key, problem));
        }
        Ok(Some(each))
    }

    /// [`u32`](Self::u32) of a key that must be there.
    pub fn require_u32(&self, key: &str) -> Result<u32> {
        self.required(key, "u32", self.u32(key)?)
    }

    /// [`u64`](Self::u64) of a key that must be there.
    pub fn require_u64(&self, key: &str) -> Result<u64> {
        self.required(key, "u64", self.u64(key)?)
    }

    /// [`f32`](Self::f32) of a key that must be there.
    pub fn require_f32(&self, key: &str) -> Result<f32> {
        self.required(key, "f32", self.f32(key)?)
    }

    /// [`bool`](Self::bool) of a key that must be there.
    pub fn require_bool(&self, key: &str) -> Result<bool> {
        self.required(key, "bool", self.bool(key)?)
    }

    /// [`str`](Self::str) of a key that must be there.
    pub fn require_str(&self, key: &str) -> Result<&str> {
        self.required(key, "string", self.str(key)?)
    }

    /// [`strings`](Self::strings) of a key that must be there.
    pub fn require_strings(&self, key: &str) -> Result<&[String]> {
        self.required(key, "array of string", self.strings(key)?)
    }

    /// [`u32s`](Self::u32s) of a key that must be there.
    pub fn require_u32s(&self, key: &str) -> Result<Vec<u32>> {
        self.required(key, "array of u32", self.u32s(key)?)
    }

    /// [`i32s`](Self::i32s) of a key that must be there.
    pub fn require_i32s(&self, key: &str) -> Result<Vec<i32>> {
        self.required(key, "array of i32", self.i32s(key)?)
    }

    /// [`f32s`](Self::f32s) of a key that must be there.
    pub fn require_f32s(&self, key: &str) -> Result<Vec<f32>> {
        self.required(key, "array of f32", self.f32s(key)?)
    }

    /// [`u32_per_layer`](Self::u32_per_layer) of a key that must be there.
    pub fn require_u32_per_layer(&self, key: &str, n_layer: u32) -> Result<Vec<u32>> {
        self.required(key, "u32 or array of u32", self.u32_per_layer(key, n_layer)?)
    }

    /// An error that names the file and a key of it.
    pub fn error(&self, key: &str, problem: impl Into<String>) -> Error {
        Fault::new(quoted("key", key), problem).in_file(&self.path)
    }

    fn lookup<'a, T>(
        &'a self,
        key: &str,
        expected: &str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let converted = convert(value)
            .ok_or_else(|| self.error(key, format!("expected {expected}, found {value}")))?;
        Ok(Some(converted))
    }

    fn required<T>(&self, key: &str, expected: &str, found: Option<T>) -> Result<T> {
        found.ok_or_else(|| self.error(key, format!("is missing; expected {expected}")))
    }
}

impl Value {
    /// The value of any integer type.
    pub fn integer(&self) -> Option<i128> {
        Some(match *self {
            Value::U8(n) => n.into(),
            Value::I8(n) => n.into(),
            Value::U16(n) => n.into(),
            Value::I16(n) => n.into(),
            Value::U32(n) => n.into(),
            Value::I32(n) => n.into(),
            Value::U64(n) => n.into(),
            Value::I64(n) => n.into(),
            _ => return None,
        })
    }

    fn array(&self) -> Option<&Array> {
        match self {
            Value::Array(array) => Some(array),
            _ => None,
        }
    }
}

/// Type and value, for messages: `i32 -1`, `string`, `array of 3 u8`. Texts are left out: they may
/// be long.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::U8(n) => write!(f, "u8 {n}"),
            Value::I8(n) => write!(f, "i8 {n}"),
            Value::U16(n) => write!(f, "u16 {n}"),
            Value::I16(n) => write!(f, "i16 {n}"),
            Value::U32(n) => write!(f, "u32 {n}"),
            Value::I32(n) => write!(f, "i32 {n}"),
            Value::U64(n) => write!(f, "u64 {n}"),
            Value::I64(n) => write!(f, "i64 {n}"),
            Value::F32(n) => write!(f, "f32 {n}"),
            Value::F64(n) => write!(f, "f64 {n}"),
            Value::Bool(truth) => write!(f, "bool {truth}"),
            Value::String(_) => f.write_str("string"),
            Value::Array(array) => write!(f, "array of {} {}", array.len(), array.type_name()),
        }
    }
}

/// Runs `$body` with `$items` bound to the vector, whatever its element type.
macro_rules! with_items {
    ($array:expr, $items:ident => $body:expr) => {
        match $array {
            Array::U8($items) => $body,
            Array::I8($items) => $body,
            Array::U16($items) => $body,
            Array::I16($items) => $body,
            Array::U32($items) => $body,
            Array::I32($items) => $body,
            Array::U64($items) => $body,
            Array::I64($items) => $body,
            Array::F32($items) => $body,
            Array::F64($items) => $body,
            Array::Bool($items) => $body,
            Array::String($items) => $body,
        }
    };
}

impl Array {
    /// Number of elements.
    pub fn len(&self) -> usize {
        with_items!(self, items => items.len())
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The element type: `u32`, `string`.
    pub fn type_name(&self) -> &'static str {
        match self {
            Array::U8(_) => "u8",
            Array::I8(_) => "i8",
            Array::U16(_) => "u16",
            Array::I16(_) => "i16",
            Array::U32(_) => "u32",
            Array::I32(_) => "i32",
            Array::U64(_) => "u64",
            Array::I64(_) => "i64",
            Array::F32(_) => "f32",
            Array::F64(_) => "f64",
            Array::Bool(_) => "bool",
            Array::String(_) => "string",
        }
    }

    /// The first `n` elements as text.
    pub fn first_as_text(&self, n: usize) -> Vec<String> {
        with_items!(self, items => items.iter().take(n).map(ToString::to_string).collect())
    }

    /// All elements as another integer type; `None` if one does not fit or is no integer.
    fn integers<T: TryFrom<i128>>(&self) -> Option<Vec<T>> {
        match self {
            Array::U8(items) => convert(items),
            Array::I8(items) => convert(items),
            Array::U16(items) => convert(items),
            Array::I16(items) => convert(items),
            Array::U32(items) => convert(items),
            Array::I32(items) => convert(items),
            Array::U64(items) => convert(items),
            Array::I64(items) => convert(items),
            _ => None,
        }
    }
}

fn convert<S: Copy + Into<i128>, T: TryFrom<i128>>(items: &[S]) -> Option<Vec<T>> {
    items.iter().map(|&item| T::try_from(item.into()).ok()).collect()
}
