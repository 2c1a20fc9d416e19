//! Conversion of Rust errors to Python exceptions.

use crate::raised::Raised;
use pyo3::create_exception;
use pyo3::exceptions::{PyException, PyKeyboardInterrupt};
use pyo3::prelude::*;
use quantspec_core::{Error, ErrorKind};
use std::panic::{AssertUnwindSafe, catch_unwind};

create_exception!(_native, NativeError, PyException, "An error of the engine; has `kind`, `message` and `hint`.");

/// An interrupt without a Python exception becomes KeyboardInterrupt; every other error a NativeError with kind, message and
/// hint as attributes.
pub(crate) fn to_python(error: Error) -> PyErr {
    if error.kind == ErrorKind::Interrupted {
        return PyKeyboardInterrupt::new_err(());
    }
    Python::attach(|py| {
        let raised = NativeError::new_err(error.message.clone());
        let value = raised.value(py);
        let set = value
            .setattr("kind", error.kind.name())
            .and_then(|()| value.setattr("message", &error.message))
            .and_then(|()| value.setattr("hint", &error.hint));
        match set {
            Ok(()) => raised,
            Err(failed) => failed,
        }
    })
}

/// Runs `work` without the GIL. A panic, which is always a defect, becomes an error instead of unwinding into Python.
pub(crate) fn detached<T: Send>(
    py: Python<'_>,
    work: impl FnOnce() -> quantspec_core::Result<T> + Send,
) -> PyResult<T> {
    interruptible(py, &Raised::default(), work)
}

/// [`detached`] for work that calls [`crate::raised::poll`]: raises again the exception that ended it, KeyboardInterrupt or
/// any other of a signal handler.
pub(crate) fn interruptible<T: Send>(
    py: Python<'_>,
    raised: &Raised,
    work: impl FnOnce() -> quantspec_core::Result<T> + Send,
) -> PyResult<T> {
    let done = py.detach(|| catch_unwind(AssertUnwindSafe(work))).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().map(|text| text.to_string());
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        Err(Error::internal(format!("the engine panicked: {text}")))
    });
    let kept = raised.take();
    done.map_err(|error| match kept {
        Some(exception) if error.kind == ErrorKind::Interrupted => exception,
        _ => to_python(error),
    })
}
