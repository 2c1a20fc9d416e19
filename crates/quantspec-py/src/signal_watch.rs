//! Signals while a Python package holds the GIL. Python cannot run its handlers then, so a thread without Python answers.

use pyo3::prelude::*;
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::path::PathBuf;
use std::thread::{self, JoinHandle};

/// `SignalWatch(answers, temporary)`: while the body of a `with` on the main thread runs, a signal among `answers` ends the
/// process.
#[pyclass(name = "SignalWatch", module = "quantspec_cli._native")]
#[derive(Debug)]
pub(crate) struct PySignalWatch {
    answers: HashMap<u8, (String, String)>,
    temporary: Vec<PathBuf>,
    /// The pipe to which Python's handler in C writes the number of a signal, and the thread that reads it.
    running: Option<(PipeWriter, JoinHandle<()>)>,
}

#[pymethods]
impl PySignalWatch {
    #[new]
    fn new(answers: HashMap<u8, (String, String)>, temporary: Vec<PathBuf>) -> PySignalWatch {
        PySignalWatch { answers, temporary, running: None }
    }

    fn __enter__(&mut self, py: Python<'_>) -> PyResult<()> {
        let (reader, writer) = io::pipe()?;
        // Duplicates, because the body may redirect the descriptors.
        let streams = Streams {
            stderr: File::from(io::stderr().as_fd().try_clone_to_owned()?),
            stdout: File::from(io::stdout().as_fd().try_clone_to_owned()?),
        };
        let (answers, temporary) = (std::mem::take(&mut self.answers), std::mem::take(&mut self.temporary));
        py.import("os")?.call_method1("set_blocking", (writer.as_raw_fd(), false))?;
        let watcher = thread::Builder::new()
            .name("quantspec-signals".into())
            .spawn(move || watch(reader, &answers, &temporary, streams))?;
        py.import("signal")?.call_method1("set_wakeup_fd", (writer.as_raw_fd(),))?;
        self.running = Some((writer, watcher));
        Ok(())
    }

    /// Returns only if no signal has come: the caller's handler must not answer as well.
    fn __exit__(
        &mut self,
        py: Python<'_>,
        _kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _trace: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        if let Some((writer, watcher)) = self.running.take() {
            py.import("signal")?.call_method1("set_wakeup_fd", (-1,))?;
            drop(writer);
            // A thread that panicked answers nothing either.
            let _ = py.detach(|| watcher.join());
        }
        Ok(())
    }
}

struct Streams {
    stderr: File,
    stdout: File,
}

/// Reads the numbers of signals until the pipe is closed; the first one with an answer ends the process.
fn watch(
    mut numbers: PipeReader,
    answers: &HashMap<u8, (String, String)>,
    temporary: &[PathBuf],
    mut streams: Streams,
) {
    let mut number = [0];
    while numbers.read_exact(&mut number).is_ok() {
        let Some((error, document)) = answers.get(&number[0]) else { continue };
        for path in temporary {
            let _ = fs::remove_file(path);
        }
        // A stream without a reader changes neither the other one nor the exit code.
        let _ = streams.stderr.write_all(error.as_bytes());
        let _ = streams.stdout.write_all(document.as_bytes());
        std::process::exit(128 + i32::from(number[0]));
    }
}
