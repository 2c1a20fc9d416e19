//! A strict reader of safetensors headers.
//!
//! Layout of a file: header length n as little-endian u64, n bytes of JSON `{name: {dtype, shape, data_offsets: [begin,
//! end]}}`, then the tensors' bytes. Offsets count from the end of the header. Every number is checked against the file's
//! length before anything is allocated. Tensors must tile the data without holes or overlaps, and names must be unique. Files
//! are read at offsets, not mapped: mapped pages would count as resident memory in addition to the repacked weights.

use crate::file::{self, LFS_POINTER, damaged, no_content, read_at, shown, unreadable};
use quantspec_core::Result;
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;
use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::path::Path;

/// Largest header accepted: the format's own limit.
const HEADER_BYTES_MAX: u64 = 100_000_000;

/// Most tensors of a file; a network of 1,024 layers, the configured maximum, has 18,435.
const TENSORS_MAX: usize = 65_536;

/// Longest entry of a tensor; a type, [`DIMENSIONS_MAX`] extents and two offsets take 300 bytes. Longer entries are not
/// parsed: parsed JSON takes 16 times the memory of its text.
const ENTRY_BYTES_MAX: usize = 4096;

/// Most dimensions of a tensor; weights of these networks have 2.
const DIMENSIONS_MAX: usize = 8;

/// Element types of the format, with their bits.
const DTYPES: [(&str, u64); 20] = [
    ("BF16", 16),
    ("F16", 16),
    ("F32", 32),
    ("F64", 64),
    ("BOOL", 8),
    ("U8", 8),
    ("I8", 8),
    ("U16", 16),
    ("I16", 16),
    ("U32", 32),
    ("I32", 32),
    ("U64", 64),
    ("I64", 64),
    ("C64", 64),
    ("F8_E5M2", 8),
    ("F8_E4M3", 8),
    ("F8_E8M0", 8),
    ("F6_E2M3", 6),
    ("F6_E3M2", 6),
    ("F4", 4),
];

/// Where bytes come from.
enum Source {
    File(File),
    Static(&'static [u8]),
}

impl Source {
    fn read(&self, out: &mut [u8], offset: u64) -> std::io::Result<()> {
        match self {
            Source::File(file) => read_at(file, out, offset),
            Source::Static(bytes) => {
                let end = std::io::Error::from(std::io::ErrorKind::UnexpectedEof);
                let start = usize::try_from(offset).map_err(|_| std::io::ErrorKind::UnexpectedEof)?;
                let from = bytes.get(start..).and_then(|rest| rest.get(..out.len())).ok_or(end)?;
                out.copy_from_slice(from);
                Ok(())
            }
        }
    }
}

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// The format's name of the element type, such as "BF16".
    pub dtype: &'static str,
    /// Extent of each dimension, outermost first.
    pub shape: Vec<usize>,
    /// First byte, counted from the start of the file.
    pub offset: u64,
    /// Bytes.
    pub bytes: u64,
}

/// An open file whose header has been checked.
pub struct SafeTensors {
    source: Source,
    name: String,
    tensors: BTreeMap<String, Tensor>,
}

impl fmt::Debug for SafeTensors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SafeTensors").field("name", &self.name).field("tensors", &self.tensors.len()).finish()
    }
}

impl SafeTensors {
    /// Opens a file and checks its header.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Model`] if the path is not a file or its header is damaged,
    /// [`quantspec_core::ErrorKind::Io`] if it cannot be read.
    pub fn open(path: &Path) -> Result<SafeTensors> {
        let name = path.to_string_lossy().into_owned();
        let file = file::open(path, &name)?;
        let length = file.metadata().map_err(|error| unreadable(&name, &error))?.len();
        SafeTensors::new(Source::File(file), name, length)
    }

    /// Reads a file from memory; `name` is for messages.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Model`] if the header is damaged.
    pub fn from_static(name: &str, bytes: &'static [u8]) -> Result<SafeTensors> {
        SafeTensors::new(Source::Static(bytes), name.to_string(), bytes.len() as u64)
    }

    fn new(source: Source, name: String, length: u64) -> Result<SafeTensors> {
        if length < 8 {
            return Err(damaged(&name, &format!("is {length} bytes long, shorter than the length of a header")));
        }
        let failed = |error: std::io::Error| unreadable(&name, &error);
        let mut prefix = [0; 8];
        source.read(&mut prefix, 0).map_err(failed)?;
        if &prefix == LFS_POINTER {
            return Err(no_content(&name));
        }
        let header_bytes = u64::from_le_bytes(prefix);
        if header_bytes > length - 8 {
            return Err(damaged(&name, &format!("claims a header of {header_bytes} bytes but is {length} bytes long")));
        }
        if header_bytes > HEADER_BYTES_MAX {
            return Err(damaged(
                &name,
                &format!("claims a header of {header_bytes} bytes; the format's limit is {HEADER_BYTES_MAX}"),
            ));
        }
        let mut header = vec![0; header_bytes as usize];
        source.read(&mut header, 8).map_err(failed)?;
        let tensors = parse_header(&name, &header, 8 + header_bytes, length)?;
        Ok(SafeTensors { source, name, tensors })
    }

    /// The file's path, for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The tensors by name.
    pub fn tensors(&self) -> &BTreeMap<String, Tensor> {
        &self.tensors
    }

    /// Replaces every tensor by the tensors that `parts` makes from it, with their names.
    ///
    /// # Errors
    /// Those of `parts`.
    pub(crate) fn rename(
        &mut self,
        mut parts: impl FnMut(&str, Tensor) -> Result<Vec<(String, Tensor)>>,
    ) -> Result<()> {
        for (name, tensor) in std::mem::take(&mut self.tensors) {
            self.tensors.extend(parts(&name, tensor)?);
        }
        Ok(())
    }

    /// Fills `out` with the bytes at `offset` of the file.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Io`] if the file cannot be read or ends before the bytes do.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.source.read(out, offset).map_err(|error| unreadable(&self.name, &error))
    }
}

/// The format's element type of this name, with its bits.
fn dtype(name: &str) -> Option<(&'static str, u64)> {
    DTYPES.iter().copied().find(|(known, _)| *known == name)
}

/// JSON members by name, as unparsed text. Duplicate names are refused; a plain map would keep the last one.
struct Members<'a>(BTreeMap<String, &'a RawValue>);

impl<'de> Deserialize<'de> for Members<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Members<'de>, D::Error> {
        struct Unique;
        impl<'de> Visitor<'de> for Unique {
            type Value = Members<'de>;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> std::result::Result<Members<'de>, A::Error> {
                let mut members = BTreeMap::new();
                while let Some((name, text)) = access.next_entry::<String, &RawValue>()? {
                    if members.contains_key(&name) {
                        return Err(A::Error::custom(format!("\"{}\" comes twice", shown(&name))));
                    }
                    members.insert(name, text);
                    if members.len() > TENSORS_MAX {
                        return Err(A::Error::custom(format!("more than {TENSORS_MAX} tensors")));
                    }
                }
                Ok(Members(members))
            }
        }
        deserializer.deserialize_map(Unique)
    }
}

/// Checks the header of a file of `length` bytes whose data starts at `start`.
fn parse_header(file: &str, header: &[u8], start: u64, length: u64) -> Result<BTreeMap<String, Tensor>> {
    let Members(members) = serde_json::from_slice(header)
        .map_err(|error| damaged(file, &format!("has a header that is not valid: {}", shown(&error.to_string()))))?;
    let data = length - start;
    let mut tensors = BTreeMap::new();
    for (name, text) in members {
        if name == "__metadata__" {
            continue;
        }
        let tensor = parse_tensor(text.get(), start, data)
            .map_err(|what| damaged(file, &format!("has tensor \"{}\" {what}", shown(&name))))?;
        tensors.insert(name, tensor);
    }
    let mut order: Vec<(&String, &Tensor)> = tensors.iter().collect();
    order.sort_by_key(|(_, tensor)| (tensor.offset, tensor.bytes));
    let mut end = start;
    for (name, tensor) in order {
        if tensor.offset < end {
            return Err(damaged(
                file,
                &format!(
                    "has tensor \"{}\" overlapping the one before it by {} bytes",
                    shown(name),
                    end - tensor.offset
                ),
            ));
        }
        if tensor.offset > end {
            return Err(damaged(
                file,
                &format!("has {} bytes of no tensor before \"{}\"", tensor.offset - end, shown(name)),
            ));
        }
        end = tensor.offset + tensor.bytes;
    }
    if end != length {
        return Err(damaged(file, &format!("has {} bytes after its last tensor", length - end)));
    }
    Ok(tensors)
}

/// One entry of a header; `data` bytes follow the header, which ends at `start`. The error completes "tensor x ...".
fn parse_tensor(text: &str, start: u64, data: u64) -> std::result::Result<Tensor, String> {
    if text.len() > ENTRY_BYTES_MAX {
        return Err(format!("described in {} bytes; up to {ENTRY_BYTES_MAX} are read", text.len()));
    }
    let value: Value =
        serde_json::from_str(text).map_err(|error| format!("that is not valid: {}", shown(&error.to_string())))?;
    let name = value.get("dtype").and_then(Value::as_str).ok_or("without a dtype")?;
    let (dtype, bits) = dtype(name).ok_or_else(|| format!("of unknown dtype \"{}\"", shown(name)))?;
    let numbers =
        |field: &str| -> Option<Vec<u64>> { value.get(field)?.as_array()?.iter().map(Value::as_u64).collect() };
    let shape = numbers("shape").ok_or("without a valid shape")?;
    if shape.len() > DIMENSIONS_MAX {
        return Err(format!("of {} dimensions", shape.len()));
    }
    let offsets = numbers("data_offsets").ok_or("without valid data_offsets")?;
    let &[begin, end] = offsets.as_slice() else {
        return Err(format!("with {} data_offsets instead of 2", offsets.len()));
    };
    if begin > end {
        return Err(format!("that ends (byte {end}) before it begins (byte {begin})"));
    }
    if end > data {
        return Err(format!("that ends at byte {end} of the data, of which the file has {data}"));
    }
    let expected = shape
        .iter()
        .try_fold(bits, |product, &extent| product.checked_mul(extent))
        .filter(|bits| bits % 8 == 0)
        .map(|bits| bits / 8)
        .ok_or_else(|| format!("of impossible shape {shape:?}"))?;
    if end - begin != expected {
        return Err(format!("of {} bytes, but {dtype} {shape:?} needs {expected}", end - begin));
    }
    let shape = shape.iter().map(|&extent| usize::try_from(extent)).collect::<std::result::Result<_, _>>();
    let shape = shape.map_err(|_| "too large for this machine's addresses".to_string())?;
    Ok(Tensor { dtype, shape, offset: start + begin, bytes: end - begin })
}
