//! Typed access to config.json, with errors that name the field.

use super::SUPPORTED;
use crate::file::shown;
use quantspec_core::{Error, Result};
use serde_json::{Map, Value};
use std::ops::RangeInclusive;

/// Parses a whole file as a JSON object.
pub(crate) fn object(bytes: &[u8], file: &str) -> Result<Map<String, Value>> {
    match serde_json::from_slice(bytes) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(Error::model(format!("{file} is not a JSON object"), "download the file again")),
        Err(error) => Err(Error::model(
            format!("{file} is not valid JSON: {}", shown(&error.to_string())),
            "the file is damaged or cut short; download it again",
        )),
    }
}

/// An error for a value that no model of these families has.
pub(super) fn absurd(message: String) -> Error {
    Error::model(message, "the file is damaged or not of this model; download it again")
}

/// An error for a real setting that is not implemented.
pub(super) fn unsupported(what: String) -> Error {
    Error::model(format!("{what} is not supported"), SUPPORTED)
}

/// Typed access to a JSON object; null counts as absent, except where `is_null` distinguishes them.
#[derive(Clone, Copy)]
pub(super) struct Fields<'a> {
    pub(super) map: &'a Map<String, Value>,
    pub(super) object: &'static str,
}

impl<'a> Fields<'a> {
    pub(super) fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    pub(super) fn stated(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    /// Returns true if the field is null. Some fields of Hugging Face's classes have a default for this case, and the family's
    /// default only if they are absent.
    pub(super) fn is_null(&self, name: &str) -> bool {
        self.map.get(name).is_some_and(Value::is_null)
    }

    pub(super) fn missing(&self, name: &str) -> Error {
        absurd(format!("{}: {name} is missing", self.object))
    }

    pub(super) fn wrong(&self, name: &str, value: &Value, want: &str) -> Error {
        absurd(format!("{}: {name} is {}, not {want}", self.object, shown(&value.to_string())))
    }

    pub(super) fn size(&self, name: &str, range: RangeInclusive<usize>, default: Option<usize>) -> Result<usize> {
        let Some(value) = self.get(name) else {
            return default.ok_or_else(|| self.missing(name));
        };
        // Some converters write sizes as floats ("original_max_position_embeddings": 4096.0).
        let whole = value
            .as_u64()
            .or_else(|| value.as_f64().filter(|x| x.fract() == 0.0 && (0.0..1e15).contains(x)).map(|x| x as u64));
        whole.and_then(|whole| usize::try_from(whole).ok()).filter(|whole| range.contains(whole)).ok_or_else(|| {
            self.wrong(name, value, &format!("a whole number from {} to {}", range.start(), range.end()))
        })
    }

    pub(super) fn number(&self, name: &str, default: Option<f64>) -> Result<f64> {
        match self.get(name) {
            None => default.ok_or_else(|| self.missing(name)),
            Some(value) => value.as_f64().filter(|x| x.is_finite()).ok_or_else(|| self.wrong(name, value, "a number")),
        }
    }

    pub(super) fn flag(&self, name: &str, default: bool) -> Result<bool> {
        match self.get(name) {
            None => Ok(default),
            Some(value) => value.as_bool().ok_or_else(|| self.wrong(name, value, "true or false")),
        }
    }

    pub(super) fn text(&self, name: &str) -> Result<Option<&'a str>> {
        match self.get(name) {
            None => Ok(None),
            Some(value) => value.as_str().map(Some).ok_or_else(|| self.wrong(name, value, "a text")),
        }
    }

    pub(super) fn list(&self, name: &str) -> Result<Option<&'a [Value]>> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Array(values)) => Ok(Some(values)),
            Some(value) => Err(self.wrong(name, value, "a list")),
        }
    }

    pub(super) fn inner(&self, name: &'static str) -> Result<Option<Fields<'a>>> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Fields { map, object: name })),
            Some(value) => Err(self.wrong(name, value, "an object")),
        }
    }
}
