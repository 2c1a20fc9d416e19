//! Exceptions of Python code that runs during an operation of the engine: signal handlers and callbacks.

use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use quantspec_core::{Error, Result};
use quantspec_model::backend::Hooks;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Interval of checks for pending Python signals: well below the 0.3 s in which Ctrl-C must act, and much longer than taking
/// the GIL.
const POLL_EVERY: Duration = Duration::from_millis(40);

/// How often progress is shown.
const SHOW_EVERY: Duration = Duration::from_millis(50);

/// Exception of a signal handler or a callback, kept until the current operation has ended.
#[derive(Clone, Debug, Default)]
pub(crate) struct Raised(Arc<Mutex<Option<PyErr>>>);

impl Raised {
    /// Keeps the first exception. Returns the error that ends the operation.
    pub(crate) fn keep(&self, error: PyErr) -> Error {
        self.lock().get_or_insert(error);
        Error::interrupted()
    }

    pub(crate) fn is_set(&self) -> bool {
        self.lock().is_some()
    }

    /// Hooks of a backend that only polls.
    pub(crate) fn hooks(&self) -> Hooks {
        Hooks { poll: Box::new(poll(self.clone())), ..Hooks::default() }
    }

    /// The exception, which its caller gets.
    pub(crate) fn take(&self) -> Option<PyErr> {
        self.lock().take()
    }

    /// Never held while waiting for the GIL.
    fn lock(&self) -> MutexGuard<'_, Option<PyErr>> {
        locked(&self.0)
    }
}

/// Runs pending Python signal handlers periodically. Their exception, or one that a progress callback left in `raised`, ends
/// the operation.
pub(crate) fn poll(raised: Raised) -> impl FnMut() -> Result<()> + Send {
    let mut last = Instant::now();
    move || {
        if raised.is_set() {
            return Err(Error::interrupted());
        }
        if last.elapsed() < POLL_EVERY {
            return Ok(());
        }
        last = Instant::now();
        Python::attach(|py| py.check_signals()).map_err(|error| raised.keep(error))
    }
}

/// Calls a Python callable with (done, total) at most every [`SHOW_EVERY`], and always at the end. KeyboardInterrupt,
/// SystemExit and exceptions of signal handlers inside the callable are left to [`poll`]. Other exceptions are reported as
/// unraisable, because a progress callback must not end an answer.
pub(crate) fn progress(callback: Option<Py<PyAny>>, raised: Raised) -> impl FnMut(usize, usize) + Send {
    let mut last = Instant::now();
    move |done, total| {
        let Some(callback) = &callback else { return };
        if raised.is_set() || (done < total && last.elapsed() < SHOW_EVERY) {
            return;
        }
        last = Instant::now();
        Python::attach(|py| {
            // Runs pending handlers here, so that their exceptions are not attributed to the callable.
            if let Err(error) = py.check_signals() {
                raised.keep(error);
                return;
            }
            match callback.call1(py, (done, total)) {
                Ok(_) => (),
                Err(error) if error.is_instance_of::<PyException>(py) && !is_of_signal_handler(py, &error) => {
                    error.write_unraisable(py, None);
                }
                Err(error) => {
                    raised.keep(error);
                }
            }
        });
    }
}

/// Returns true if a signal handler raised this: the handler's code is in the exception's traceback.
fn is_of_signal_handler(py: Python<'_>, error: &PyErr) -> bool {
    let codes = signal_handler_codes(py).unwrap_or_default();
    let mut passed = error.traceback(py).map(Bound::into_any);
    while let Some(entry) = passed.filter(|entry| !entry.is_none()) {
        let code = entry.getattr("tb_frame").and_then(|frame| frame.getattr("f_code"));
        if code.is_ok_and(|code| codes.iter().any(|handler| handler.is(&code))) {
            return true;
        }
        passed = entry.getattr("tb_next").ok();
    }
    false
}

/// Code objects of all Python signal handlers: a function or method, a partial of one, or a callable object.
fn signal_handler_codes(py: Python<'_>) -> PyResult<Vec<Bound<'_, PyAny>>> {
    let signal = py.import("signal")?;
    let mut codes = Vec::new();
    for number in signal.call_method0("valid_signals")?.try_iter()? {
        let handler = signal.call_method1("getsignal", (number?,))?;
        let called = [Ok(handler.clone()), handler.getattr("func"), handler.getattr("__call__")];
        codes.extend(called.into_iter().flatten().filter_map(|called| called.getattr("__code__").ok()));
    }
    Ok(codes)
}

/// A mutex's value, even after a panic: each of these values is valid at any time.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
