//! The workspace's error type: one line with the wrong value, one line with the remedy.

use std::fmt;

/// Kinds of error that a caller can act on. The Python layer maps each kind to an exception and an exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// An option has a value outside its range (exit code 2).
    Usage,
    /// Memory or context is too small; nothing was truncated (exit code 3).
    DoesNotFit,
    /// A prompt or document cannot be used (exit code 1).
    Input,
    /// A checkpoint cannot be used: missing, damaged, or of an unsupported family (exit code 1).
    Model,
    /// The file system reported an error (exit code 1).
    Io,
    /// A device is absent, too old, busy, or failed (exit code 1).
    Device,
    /// Keys, values, weights or logits are NaN or infinite (exit code 1).
    NotFinite,
    /// The user interrupted (exit code 130).
    Interrupted,
    /// A broken invariant of this program (exit code 1).
    Internal,
}

impl ErrorKind {
    /// Returns true if the tokens of a row can cause it. If drafted tokens cause it, the text is not at fault: plain decoding
    /// may never feed them.
    pub const fn is_of_tokens(self) -> bool {
        matches!(self, ErrorKind::NotFinite | ErrorKind::Input)
    }

    /// The machine name of the kind, as `--json` prints it.
    pub const fn name(self) -> &'static str {
        match self {
            ErrorKind::Usage => "usage",
            ErrorKind::DoesNotFit => "does_not_fit",
            ErrorKind::Input => "input",
            ErrorKind::Model => "model",
            ErrorKind::Io => "io",
            ErrorKind::Device => "device",
            ErrorKind::NotFinite => "not_finite",
            ErrorKind::Interrupted => "interrupted",
            ErrorKind::Internal => "internal",
        }
    }
}

/// An error: one line of message, one line of remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// Kind, for the caller's handling.
    pub kind: ErrorKind,
    /// One line that names the wrong value.
    pub message: String,
    /// One line that names the remedy.
    pub hint: String,
}

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error of any kind. Newlines are folded, so message and hint are one line each even if they quote foreign text.
    pub fn new(kind: ErrorKind, message: impl Into<String>, hint: impl Into<String>) -> Error {
        let one_line = |text: String| {
            if text.contains(['\n', '\r']) { text.split_whitespace().collect::<Vec<_>>().join(" ") } else { text }
        };
        Error { kind, message: one_line(message.into()), hint: one_line(hint.into()) }
    }

    /// An [`ErrorKind::Usage`] error.
    pub fn usage(message: impl Into<String>, hint: impl Into<String>) -> Error {
        Error::new(ErrorKind::Usage, message, hint)
    }

    /// An [`ErrorKind::DoesNotFit`] error.
    pub fn does_not_fit(message: impl Into<String>, hint: impl Into<String>) -> Error {
        Error::new(ErrorKind::DoesNotFit, message, hint)
    }

    /// An [`ErrorKind::Model`] error.
    pub fn model(message: impl Into<String>, hint: impl Into<String>) -> Error {
        Error::new(ErrorKind::Model, message, hint)
    }

    /// An [`ErrorKind::Device`] error.
    pub fn device(message: impl Into<String>, hint: impl Into<String>) -> Error {
        Error::new(ErrorKind::Device, message, hint)
    }

    /// An [`ErrorKind::NotFinite`] error.
    pub fn not_finite(message: impl Into<String>) -> Error {
        Error::new(
            ErrorKind::NotFinite,
            message,
            "the checkpoint is damaged or overflows half precision; check its files against their published hashes",
        )
    }

    /// An [`ErrorKind::Input`] error: every token is forbidden at a position.
    pub fn no_token_left() -> Error {
        Error::new(
            ErrorKind::Input,
            "no token is left to choose: no-repeat-ngram, or the JSON schema, forbids all of them",
            "raise --no-repeat-ngram, turn it off with 0, or allow more in the schema",
        )
    }

    /// An [`ErrorKind::Interrupted`] error.
    pub fn interrupted() -> Error {
        Error::new(ErrorKind::Interrupted, "interrupted", "run the command again to start over")
    }

    /// An [`ErrorKind::Internal`] error: a broken invariant of this program, never the user's fault.
    pub fn internal(message: impl Into<String>) -> Error {
        Error::new(
            ErrorKind::Internal,
            message,
            "this is a defect of quantspec; please report it with the command you ran",
        )
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_text_is_folded_to_one_line() {
        let error = Error::model("bad\n  header\r\n", "look\nthere");
        assert_eq!((error.message.as_str(), error.hint.as_str()), ("bad header", "look there"));
    }
}
