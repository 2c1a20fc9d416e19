//! A grammar implemented in Python: `quantspec_cli.schema.Answer`.

use crate::raised::Raised;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use quantspec_core::grammar::{Grammar, Mask};
use quantspec_core::{Error, ErrorKind, Result};

/// An object with `mask` and `advance`. Exceptions of these end the current operation and reach its caller.
#[derive(Debug)]
pub(crate) struct PyGrammar {
    answer: Py<PyAny>,
    raised: Raised,
}

impl PyGrammar {
    pub(crate) fn boxed(answer: Py<PyAny>, raised: Raised) -> Box<dyn Grammar> {
        Box::new(PyGrammar { answer, raised })
    }

    /// An input error becomes an engine error, which does not end a text because of drafted tokens; other exceptions reach
    /// Python.
    fn error(&self, py: Python<'_>, error: PyErr) -> Error {
        let text = |name: &str| error.value(py).getattr(name).and_then(|value| value.extract::<String>());
        match (text("kind"), text("message"), text("hint")) {
            (Ok(kind), Ok(message), Ok(hint)) if kind == ErrorKind::Input.name() => {
                Error::new(ErrorKind::Input, message, hint)
            }
            _ => self.raised.keep(error),
        }
    }
}

impl Grammar for PyGrammar {
    fn mask(&self, drafted: &[u32]) -> Result<Option<Mask>> {
        Python::attach(|py| {
            let mask = self.answer.bind(py).call_method1("mask", (drafted.to_vec(),));
            let bytes = mask.and_then(|mask| Ok(mask.extract::<Option<Bound<'_, PyBytes>>>()?));
            let bytes = bytes.map_err(|error| self.error(py, error))?;
            Ok(bytes.map(|bytes| {
                let word = |bytes: &[u8]| bytes.iter().rev().fold(0, |word, &byte| word << 8 | u32::from(byte));
                bytes.as_bytes().chunks(4).map(word).collect()
            }))
        })
    }

    fn advance(&self, tokens: &[u32]) {
        Python::attach(|py| {
            if let Err(error) = self.answer.bind(py).call_method1("advance", (tokens.to_vec(),)) {
                self.raised.keep(error);
            }
        });
    }
}
