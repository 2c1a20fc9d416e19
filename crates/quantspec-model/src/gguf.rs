//! A strict reader of GGUF files, the format of llama.cpp: versions 2 and 3, little-endian, in one part or several.
//!
//! Layout of a file: magic "GGUF", u32 version, u64 number of tensors, u64 number of metadata entries. Each entry is a key, a
//! u32 type and a value. Each tensor is a name, a u32 number of dimensions, a u64 extent of each (innermost first), a u32
//! type and a u64 offset. The tensors' bytes follow, aligned; offsets count from their start. A text is a u64 length and its
//! bytes.
//!
//! Every count and length is checked against the rest of the file before anything is allocated. Texts and arrays of the
//! metadata are read only on request, so a vocabulary of 150,000 tokens costs nothing while loading weights.

use crate::blocks::Encoding;
use crate::file::{self, LFS_POINTER, damaged, no_content, read_at, shown, unreadable};
use quantspec_core::{Error, Result};
use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};

/// Bytes per read while parsing a header.
const AHEAD_BYTES: usize = 64 << 10;
/// Most metadata entries; published files have up to 100.
const ENTRIES_MAX: u64 = 65_536;
/// Most elements of a list, as in the largest supported vocabulary.
const ELEMENTS_MAX: u64 = 16_777_216;
/// Most tensors of a model; a network of 1,024 layers has 18,435.
const TENSORS_MAX: usize = 65_536;
/// Most bytes of a text, or of all texts of a list: several times a complete tokenizer.json. A sparse file has any length, so its
/// own length does not bound what is allocated.
const TEXT_BYTES_MAX: u64 = 256 << 20;
/// Longest name of a tensor or key: the format's limit for keys.
const NAME_BYTES_MAX: u64 = 65_535;
/// Most dimensions of a tensor, as in ggml.
const DIMENSIONS_MAX: u32 = 4;
/// Alignment of tensors, unless the metadata states another.
const ALIGNMENT: u64 = 32;
/// Most parts of a model; all stay open.
const PARTS_MAX: u64 = 512;

/// A value of the metadata.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value {
    /// Any unsigned type.
    Unsigned(u64),
    /// Any signed type.
    Signed(i64),
    /// f32 or f64.
    Float(f64),
    /// true or false.
    Flag(bool),
    /// A text, by its position in the file.
    Text {
        /// First byte.
        at: u64,
        /// Bytes.
        bytes: u64,
    },
    /// A list of elements of one type, by its position in the file.
    List {
        /// The elements' type.
        kind: Kind,
        /// Elements.
        count: u64,
        /// First byte.
        at: u64,
    },
}

/// An element of a list.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Element<'a> {
    /// A number or a flag.
    Value(Value),
    /// A text.
    Text(&'a str),
}

/// Type of a value; lists are excluded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Unsigned integers of this many bytes.
    Unsigned(u64),
    /// Signed integers of this many bytes.
    Signed(u64),
    /// Floating-point numbers of this many bytes.
    Float(u64),
    /// One byte, 0 or 1.
    Flag,
    /// Length and bytes.
    Text,
}

/// Number of the list type.
const LIST: u32 = 9;

impl Kind {
    fn of(number: u32) -> Option<Kind> {
        Some(match number {
            0 => Kind::Unsigned(1),
            1 => Kind::Signed(1),
            2 => Kind::Unsigned(2),
            3 => Kind::Signed(2),
            4 => Kind::Unsigned(4),
            5 => Kind::Signed(4),
            6 => Kind::Float(4),
            7 => Kind::Flag,
            8 => Kind::Text,
            10 => Kind::Unsigned(8),
            11 => Kind::Signed(8),
            12 => Kind::Float(8),
            _ => return None,
        })
    }

    /// Fewest bytes of a value.
    fn least_bytes(self) -> u64 {
        match self {
            Kind::Unsigned(bytes) | Kind::Signed(bytes) | Kind::Float(bytes) => bytes,
            Kind::Flag => 1,
            Kind::Text => 8,
        }
    }
}

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// How its values are stored.
    pub encoding: Encoding,
    /// Extent of each dimension, outermost first.
    pub shape: Vec<usize>,
    /// First byte, counted from the start of the file.
    pub offset: u64,
    /// Bytes.
    pub bytes: u64,
}

/// An open file whose header has been checked.
#[derive(Debug)]
struct GgufFile {
    file: File,
    name: String,
    entries: BTreeMap<String, Value>,
    tensors: BTreeMap<String, Tensor>,
}

/// An open model: one file, or all parts of a split one.
#[derive(Debug)]
pub struct Gguf {
    files: Vec<GgufFile>,
    tensors: BTreeMap<String, (usize, Tensor)>,
}

impl Gguf {
    /// Opens a file and, for the first part of a split model, the other parts in the same directory.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Model`] if the path is not a GGUF file, if a header is damaged or of an unknown version,
    /// or if a part is missing or of another model. [`quantspec_core::ErrorKind::Io`] if a file cannot be read.
    pub fn open(path: &Path) -> Result<Gguf> {
        let first = GgufFile::open(path)?;
        let count = first.whole("split.count")?.unwrap_or(1);
        let mut files = vec![first];
        if count > 1 {
            for other in other_parts(&files[0], path, count)? {
                files.push(GgufFile::open(&other)?);
            }
        }
        let mut tensors = BTreeMap::new();
        for (number, file) in files.iter_mut().enumerate() {
            let stated = (file.whole("split.no")?, file.whole("split.count")?);
            if count > 1 && stated != (Some(number as u64), Some(count)) {
                return Err(damaged(&file.name, &format!("is not part {} of {count} of a model", number + 1)));
            }
            for (name, tensor) in std::mem::take(&mut file.tensors) {
                if tensors.contains_key(&name) {
                    return Err(damaged(&file.name, &format!("has tensor \"{}\" of an earlier part", shown(&name))));
                }
                tensors.insert(name, (number, tensor));
                if tensors.len() > TENSORS_MAX {
                    return Err(damaged(&file.name, &format!("makes more than {TENSORS_MAX} tensors")));
                }
            }
        }
        if let Some(stated) = files[0].whole("split.tensors.count")?
            && stated != tensors.len() as u64
        {
            return Err(damaged(
                &files[0].name,
                &format!("claims {stated} tensors in all parts, which hold {}", tensors.len()),
            ));
        }
        Ok(Gguf { files, tensors })
    }

    /// The first file's path, for messages.
    pub fn name(&self) -> &str {
        &self.files[0].name
    }

    /// File number and location of every tensor, by name.
    pub fn tensors(&self) -> &BTreeMap<String, (usize, Tensor)> {
        &self.tensors
    }

    /// The metadata of the first part, by key.
    pub fn entries(&self) -> &BTreeMap<String, Value> {
        &self.files[0].entries
    }

    /// The error for an entry whose type is not `wanted`, such as "a text".
    pub fn wrong(&self, key: &str, wanted: &str) -> Error {
        self.files[0].wrong(key, wanted)
    }

    /// The text of an entry; None if there is no such entry.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Model`] if it is not a text or not UTF-8, [`quantspec_core::ErrorKind::Io`] if it cannot
    /// be read.
    pub fn text(&self, key: &str) -> Result<Option<String>> {
        match self.entries().get(key) {
            None => Ok(None),
            Some(&Value::Text { at, bytes }) => self.files[0].text_at(key, at, bytes).map(Some),
            Some(_) => Err(self.wrong(key, "a text")),
        }
    }

    /// Calls `take` with every element of a list.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Model`] if the entry is not a list or one of its texts is not UTF-8,
    /// [`quantspec_core::ErrorKind::Io`] if the file cannot be read.
    pub fn elements(&self, key: &str, mut take: impl FnMut(Element)) -> Result<()> {
        let first = &self.files[0];
        let Some(&Value::List { kind, count, at }) = first.entries.get(key) else {
            return Err(first.wrong(key, "a list"));
        };
        let mut cursor = Cursor::new(&first.file, &first.name, at)?;
        for _ in 0..count {
            match cursor.value(kind)? {
                Value::Text { at, bytes } => {
                    let text = cursor.back(at, bytes)?;
                    take(Element::Text(std::str::from_utf8(text).map_err(|_| first.not_utf8(key))?));
                }
                value => take(Element::Value(value)),
            }
        }
        Ok(())
    }

    /// Fills `out` with the bytes at `offset` of a file, by its number in [`Gguf::tensors`].
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Io`] if the file cannot be read or ends before the bytes do.
    pub fn read(&self, file: usize, offset: u64, out: &mut [u8]) -> Result<()> {
        let file = self.files.get(file).ok_or_else(|| Error::internal(format!("file {file} is not open")))?;
        read_at(&file.file, out, offset).map_err(|error| unreadable(&file.name, &error))
    }
}

impl GgufFile {
    fn open(path: &Path) -> Result<GgufFile> {
        let name = path.to_string_lossy().into_owned();
        let file = file::open(path, &name)?;
        let mut cursor = Cursor::new(&file, &name, 0)?;
        let tensors = header(&mut cursor)?;
        let entries = entries(&mut cursor)?;
        let tensors = tensor_table(&mut cursor, tensors, &entries)?;
        Ok(GgufFile { file, name, entries, tensors })
    }

    /// An integer of the metadata; None if there is no such entry.
    fn whole(&self, key: &str) -> Result<Option<u64>> {
        match self.entries.get(key) {
            None => Ok(None),
            Some(value) => value.whole().map(Some).ok_or_else(|| self.wrong(key, "a whole number")),
        }
    }

    fn wrong(&self, key: &str, wanted: &str) -> Error {
        let found = self.entries.get(key).map_or("absent".to_string(), Value::to_string);
        damaged(&self.name, &format!("has metadata {} that is {found}, not {wanted}", shown(key)))
    }

    fn not_utf8(&self, key: &str) -> Error {
        damaged(&self.name, &format!("has metadata {} that is not valid UTF-8", shown(key)))
    }

    /// `bytes` were checked against [`TEXT_BYTES_MAX`] when the header was read.
    fn text_at(&self, key: &str, at: u64, bytes: u64) -> Result<String> {
        let mut out = vec![0; bytes as usize];
        read_at(&self.file, &mut out, at).map_err(|error| unreadable(&self.name, &error))?;
        String::from_utf8(out).map_err(|_| self.not_utf8(key))
    }
}

impl Value {
    /// The value if it is a non-negative integer.
    pub fn whole(self) -> Option<u64> {
        match self {
            Value::Unsigned(number) => Some(number),
            Value::Signed(number) => u64::try_from(number).ok(),
            _ => None,
        }
    }

    /// The value if it is a number.
    pub fn number(self) -> Option<f64> {
        match self {
            Value::Float(number) => Some(number),
            Value::Unsigned(number) => Some(number as f64),
            Value::Signed(number) => Some(number as f64),
            _ => None,
        }
    }
}

/// For messages: numbers and flags as they are, anything else by its type.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match *self {
            Value::Unsigned(number) => write!(f, "{number}"),
            Value::Signed(number) => write!(f, "{number}"),
            // An f32 has few digits, the same number as f64 has many.
            Value::Float(number) if f64::from(number as f32) == number => write!(f, "{}", number as f32),
            Value::Float(number) => write!(f, "{number}"),
            Value::Flag(flag) => write!(f, "{flag}"),
            Value::Text { .. } => f.write_str("a text"),
            Value::List { .. } => f.write_str("a list"),
        }
    }
}

/// Paths of the other parts of a split model, in llama.cpp's naming: NAME-00001-of-00003.gguf.
fn other_parts(first: &GgufFile, path: &Path, count: u64) -> Result<Vec<PathBuf>> {
    if count > PARTS_MAX {
        return Err(damaged(&first.name, &format!("claims {count} parts; up to {PARTS_MAX} are opened")));
    }
    let number = first.whole("split.no")?.unwrap_or(0).saturating_add(1);
    let part_name = |stem: &str, number: u64| format!("{stem}-{number:05}-of-{count:05}.gguf");
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let Some(stem) = name.strip_suffix(&part_name("", number)) else {
        return Err(Error::model(
            format!("{} is part {number} of {count}, and not named as one", first.name),
            format!("name the parts as they were published: {}", part_name("NAME", number)),
        ));
    };
    if number != 1 {
        return Err(Error::model(
            format!("{} is part {number} of {count} of a model", first.name),
            format!("name the first part, {}", part_name(stem, 1)),
        ));
    }
    let others: Vec<PathBuf> = (2..=count).map(|number| path.with_file_name(part_name(stem, number))).collect();
    for other in &others {
        if !other.try_exists().map_err(|error| unreadable(&other.to_string_lossy(), &error))? {
            return Err(Error::model(
                format!("part {} of {} is missing", other.display(), first.name),
                "the download is incomplete; fetch the missing file",
            ));
        }
    }
    Ok(others)
}

/// A position in a header.
struct Cursor<'a> {
    file: &'a File,
    name: &'a str,
    length: u64,
    at: u64,
    ahead: Vec<u8>,
    ahead_at: u64,
}

impl<'a> Cursor<'a> {
    fn new(file: &'a File, name: &'a str, at: u64) -> Result<Cursor<'a>> {
        let length = file.metadata().map_err(|error| unreadable(name, &error))?.len();
        Ok(Cursor { file, name, length, at, ahead: Vec::new(), ahead_at: 0 })
    }

    fn left(&self) -> u64 {
        self.length.saturating_sub(self.at)
    }

    fn damaged(&self, what: &str) -> Error {
        damaged(self.name, what)
    }

    /// Skips some bytes; an error if the file ends before.
    fn skip(&mut self, bytes: u64) -> Result<u64> {
        if bytes > self.left() {
            return Err(self.damaged(&format!(
                "claims {bytes} bytes at byte {}, after which it has {}",
                self.at,
                self.left()
            )));
        }
        let at = self.at;
        self.at += bytes;
        Ok(at)
    }

    /// The next N bytes.
    fn take<const N: usize>(&mut self) -> Result<[u8; N]> {
        let at = self.skip(N as u64)?;
        let mut out = [0; N];
        out.copy_from_slice(self.back(at, N as u64)?);
        Ok(out)
    }

    /// Bytes that were passed.
    fn back(&mut self, at: u64, bytes: u64) -> Result<&[u8]> {
        if at < self.ahead_at || at + bytes > self.ahead_at + self.ahead.len() as u64 {
            let ahead = bytes.max(AHEAD_BYTES as u64).min(self.length.saturating_sub(at));
            if ahead < bytes {
                return Err(self.damaged("ends early"));
            }
            self.ahead.resize(ahead as usize, 0);
            self.ahead_at = at;
            read_at(self.file, &mut self.ahead, at).map_err(|error| unreadable(self.name, &error))?;
        }
        let start = (at - self.ahead_at) as usize;
        Ok(&self.ahead[start..start + bytes as usize])
    }

    fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.take()?))
    }

    fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.take()?))
    }

    /// The name of an entry or a tensor.
    fn name(&mut self) -> Result<String> {
        let bytes = self.u64()?;
        if bytes > NAME_BYTES_MAX {
            return Err(self.damaged(&format!("has a name of {bytes} bytes at byte {}", self.at)));
        }
        let at = self.skip(bytes)?;
        let name = std::str::from_utf8(self.back(at, bytes)?).map(str::to_string);
        name.map_err(|_| self.damaged(&format!("has a name that is not UTF-8 at byte {at}")))
    }

    /// Refuses more bytes of text than are ever allocated; they end here.
    fn check_text(&self, bytes: u64) -> Result<()> {
        if bytes > TEXT_BYTES_MAX {
            let what = format!("has {bytes} bytes of text before byte {}; up to {TEXT_BYTES_MAX} are read", self.at);
            return Err(self.damaged(&what));
        }
        Ok(())
    }

    /// A value that is no list.
    fn value(&mut self, kind: Kind) -> Result<Value> {
        Ok(match kind {
            Kind::Unsigned(1) => Value::Unsigned(u64::from(u8::from_le_bytes(self.take()?))),
            Kind::Unsigned(2) => Value::Unsigned(u64::from(u16::from_le_bytes(self.take()?))),
            Kind::Unsigned(4) => Value::Unsigned(u64::from(self.u32()?)),
            Kind::Unsigned(_) => Value::Unsigned(self.u64()?),
            Kind::Signed(1) => Value::Signed(i64::from(i8::from_le_bytes(self.take()?))),
            Kind::Signed(2) => Value::Signed(i64::from(i16::from_le_bytes(self.take()?))),
            Kind::Signed(4) => Value::Signed(i64::from(i32::from_le_bytes(self.take()?))),
            Kind::Signed(_) => Value::Signed(i64::from_le_bytes(self.take()?)),
            Kind::Float(4) => Value::Float(f64::from(f32::from_le_bytes(self.take()?))),
            Kind::Float(_) => Value::Float(f64::from_le_bytes(self.take()?)),
            Kind::Flag => match self.take()? {
                [0] => Value::Flag(false),
                [1] => Value::Flag(true),
                [other] => {
                    return Err(self.damaged(&format!("has a flag of value {other} at byte {}", self.at - 1)));
                }
            },
            Kind::Text => {
                let bytes = self.u64()?;
                let at = self.skip(bytes)?;
                self.check_text(bytes)?;
                Value::Text { at, bytes }
            }
        })
    }

    /// A list, walked to its end.
    fn list(&mut self, key: &str) -> Result<Value> {
        let number = self.u32()?;
        let Some(kind) = Kind::of(number) else {
            let what = if number == LIST { "lists".to_string() } else { format!("unknown type {number}") };
            return Err(self.damaged(&format!("has metadata {} that is a list of {what}", shown(key))));
        };
        let count = self.u64()?;
        let least = count.checked_mul(kind.least_bytes());
        if count > ELEMENTS_MAX || least.is_none_or(|least| least > self.left()) {
            return Err(self.damaged(&format!(
                "claims {count} elements of metadata {}, of which up to {ELEMENTS_MAX} are read, with {} bytes left",
                shown(key),
                self.left()
            )));
        }
        let at = self.at;
        match kind {
            Kind::Text | Kind::Flag => {
                for _ in 0..count {
                    self.value(kind)?;
                }
                self.check_text(self.at - at)?;
            }
            _ => drop(self.skip(count * kind.least_bytes())?),
        }
        Ok(Value::List { kind, count, at })
    }
}

/// Checks magic and version; returns the number of tensors.
fn header(cursor: &mut Cursor) -> Result<u64> {
    let magic = if cursor.length < 4 { [0; 4] } else { cursor.take()? };
    if LFS_POINTER.starts_with(&magic) {
        return Err(no_content(cursor.name));
    }
    if &magic != b"GGUF" {
        return Err(Error::model(
            format!("{} is not a GGUF file", cursor.name),
            "give a GGUF file, a directory with config.json and model.safetensors, or a hub id",
        ));
    }
    match cursor.u32()? {
        2 | 3 => cursor.u64(),
        // A version number with its bytes swapped: the file is big-endian.
        version if (1..=0xffff).contains(&version.swap_bytes()) => Err(Error::model(
            format!("{} is a big-endian GGUF file", cursor.name),
            "fetch the little-endian file of the same model",
        )),
        version => Err(Error::model(
            format!("{} is a GGUF file of version {version}", cursor.name),
            "versions 2 and 3 are supported; convert the model again with a current llama.cpp",
        )),
    }
}

fn entries(cursor: &mut Cursor) -> Result<BTreeMap<String, Value>> {
    let count = cursor.u64()?;
    if count > ENTRIES_MAX {
        return Err(cursor.damaged(&format!("claims {count} metadata entries; up to {ENTRIES_MAX} are read")));
    }
    let mut entries = BTreeMap::new();
    for _ in 0..count {
        let key = cursor.name()?;
        let number = cursor.u32()?;
        let value = match Kind::of(number) {
            Some(kind) => cursor.value(kind)?,
            None if number == LIST => cursor.list(&key)?,
            None => {
                return Err(cursor.damaged(&format!("has metadata {} of unknown type {number}", shown(&key))));
            }
        };
        if entries.contains_key(&key) {
            return Err(cursor.damaged(&format!("has metadata {} twice", shown(&key))));
        }
        entries.insert(key, value);
    }
    Ok(entries)
}

fn tensor_table(
    cursor: &mut Cursor,
    count: u64,
    entries: &BTreeMap<String, Value>,
) -> Result<BTreeMap<String, Tensor>> {
    if count > TENSORS_MAX as u64 {
        return Err(cursor.damaged(&format!("claims {count} tensors; up to {TENSORS_MAX} are read")));
    }
    let alignment = match entries.get("general.alignment") {
        None => ALIGNMENT,
        Some(value) => value
            .whole()
            .filter(|alignment| alignment.is_power_of_two() && *alignment <= u64::from(u32::MAX))
            .ok_or_else(|| {
                cursor.damaged(&format!("has metadata general.alignment that is {value}, not a power of two"))
            })?,
    };
    let mut tensors = BTreeMap::new();
    for _ in 0..count {
        let name = cursor.name()?;
        let tensor = tensor(cursor, &name)?;
        if tensor.offset % alignment != 0 {
            return Err(cursor.damaged(&format!(
                "has tensor \"{}\" at offset {}, which is not aligned to {alignment}",
                shown(&name),
                tensor.offset
            )));
        }
        if tensors.contains_key(&name) {
            return Err(cursor.damaged(&format!("has tensor \"{}\" twice", shown(&name))));
        }
        tensors.insert(name, tensor);
    }
    let start = cursor.at.next_multiple_of(alignment);
    let data = cursor.length.saturating_sub(start);
    for (name, tensor) in &mut tensors {
        let end = tensor.offset.checked_add(tensor.bytes);
        if end.is_none_or(|end| end > data) {
            return Err(cursor.damaged(&format!(
                "has tensor \"{}\" of {} bytes at offset {} of the data, of which the file has {data}",
                shown(name),
                tensor.bytes,
                tensor.offset
            )));
        }
        tensor.offset += start;
    }
    let mut order: Vec<(&String, &Tensor)> = tensors.iter().collect();
    order.sort_by_key(|(_, tensor)| (tensor.offset, tensor.bytes));
    for pair in order.windows(2) {
        let ((first, one), (second, other)) = (pair[0], pair[1]);
        if one.offset + one.bytes > other.offset {
            return Err(cursor.damaged(&format!(
                "has tensors \"{}\" and \"{}\" that overlap",
                shown(first),
                shown(second)
            )));
        }
    }
    Ok(tensors)
}

/// One entry of the tensor table, after its name; the offset counts from the start of the data.
fn tensor(cursor: &mut Cursor, name: &str) -> Result<Tensor> {
    let file = cursor.name;
    let fault = |what: String| damaged(file, &format!("has tensor \"{}\" of {what}", shown(name)));
    let dimensions = cursor.u32()?;
    if dimensions > DIMENSIONS_MAX {
        return Err(fault(format!("{dimensions} dimensions")));
    }
    let mut shape = Vec::new();
    for _ in 0..dimensions {
        shape.push(cursor.u64()?);
    }
    let number = cursor.u32()?;
    let encoding = Encoding::of(number).map_err(|known| match known {
        Some(known) => Error::model(
            format!("{file} has tensor \"{}\" of type {known}, which is not supported", shown(name)),
            format!("use a file of the model whose tensors are of these types: {}", Encoding::names()),
        ),
        None => fault(format!("unknown type {number}")),
    })?;
    let (values, block_bytes) = encoding.block();
    let elements = shape.iter().try_fold(1u64, |product, &extent| product.checked_mul(extent));
    // Rows are whole blocks.
    let whole = shape.first().copied().unwrap_or(1) % values as u64 == 0;
    let bytes = elements.and_then(|elements| (elements / values as u64).checked_mul(block_bytes as u64));
    let extents = shape.iter().rev().map(|&extent| usize::try_from(extent).ok()).collect::<Option<Vec<usize>>>();
    match (bytes, extents) {
        (Some(bytes), Some(shape)) if whole => Ok(Tensor { encoding, shape, offset: cursor.u64()?, bytes }),
        _ => Err(fault(format!("impossible shape {shape:?} for {}", encoding.name()))),
    }
}
