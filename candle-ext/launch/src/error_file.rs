//! The error file of a failed worker: torchelastic's `error.json`, in both formats.

use std::fs;
use std::io;
use std::path::Path;

use serde_json::Value;

use crate::exit::ExitReason;

/// The contents of an error file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ErrorFile {
    /// The error message.
    pub message: String,
    /// The traceback, if the file has one.
    pub traceback: Option<String>,
    /// Unix time of the failure in seconds; 0 if the file has none.
    pub timestamp: u64,
}

impl ErrorFile {
    /// Reads a worker's error file. Returns `None` without a file, and a message about the file if it cannot be parsed.
    pub fn read(path: &Path) -> Option<Self> {
        let text = fs::read(path).ok()?;
        let read = serde_json::from_slice(&text).ok().and_then(|value| Self::of(&value));
        let message = format!("{} is not an error file, or is truncated", path.display());
        Some(read.unwrap_or(Self { message, traceback: None, timestamp: 0 }))
    }

    fn of(value: &Value) -> Option<Self> {
        match &value["message"] {
            Value::String(message) => {
                Some(Self { message: message.clone(), traceback: None, timestamp: seconds(&value["timestamp"]) })
            }
            inner @ Value::Object(_) => Some(Self {
                message: inner["message"].as_str()?.to_owned(),
                traceback: inner["extraInfo"]["py_callstack"].as_str().map(str::to_owned),
                timestamp: seconds(&inner["extraInfo"]["timestamp"]),
            }),
            _ => None,
        }
    }
}

/// Parses seconds from a number or a string.
fn seconds(value: &Value) -> u64 {
    let number = value.as_f64().or_else(|| value.as_str()?.parse().ok());
    number.unwrap_or(0.0) as u64
}

/// Copies a worker's error file to the launcher's own error file and adds the exit code, as torchelastic does.
///
/// The exit code of a signal is its negative number.
pub fn forward_error_file(from: &Path, to: &Path, reason: ExitReason) -> io::Result<()> {
    let mut value: Value = serde_json::from_str(&fs::read_to_string(from)?)?;
    let code = match reason {
        ExitReason::Code(code) => code,
        ExitReason::Signal(signal) => -signal,
    };
    if let Some(inner) = value.get_mut("message").and_then(Value::as_object_mut) {
        inner.insert("errorCode".into(), code.into());
    }
    fs::write(to, value.to_string())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, want: Option<(&str, Option<&str>, u64)>) {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), text).unwrap();
        let got = ErrorFile::read(file.path());
        let got = got.as_ref().map(|file| (file.message.as_str(), file.traceback.as_deref(), file.timestamp));
        assert_eq!(got, want);
    }

    #[test]
    fn both_error_file_formats_are_read() {
        let torch =
            r#"{"message": {"message": "ValueError: no", "extraInfo": {"py_callstack": "T", "timestamp": "17"}}}"#;
        check(torch, Some(("ValueError: no", Some("T"), 17)));
        check(r#"{"message": "no", "timestamp": 17}"#, Some(("no", None, 17)));
        check(r#"{"message": "no"}"#, Some(("no", None, 0)));
    }

    #[test]
    fn a_truncated_error_file_is_named() {
        for text in [r#"{"message": {"mess"#, "{}", "", "[1]"] {
            let file = tempfile::NamedTempFile::new().unwrap();
            fs::write(file.path(), text).unwrap();
            let message = ErrorFile::read(file.path()).unwrap().message;
            assert_eq!(message, format!("{} is not an error file, or is truncated", file.path().display()));
        }
        assert_eq!(ErrorFile::read(Path::new("/nowhere/error.json")), None);
    }

    #[track_caller]
    fn check_forwarded(text: &str, want: &str) {
        let folder = tempfile::tempdir().unwrap();
        let [from, to] = ["from", "to"].map(|name| folder.path().join(name));
        fs::write(&from, text).unwrap();
        forward_error_file(&from, &to, ExitReason::Signal(9)).unwrap();
        let read = |text: &str| serde_json::from_str::<Value>(text).unwrap();
        assert_eq!(read(&fs::read_to_string(to).unwrap()), read(want));
    }

    #[test]
    fn the_exit_code_is_added_as_in_torchrun() {
        check_forwarded(r#"{"message":{"message":"no"}}"#, r#"{"message":{"errorCode":-9,"message":"no"}}"#);
        check_forwarded(r#"{"message":"no"}"#, r#"{"message":"no"}"#);
    }

    #[test]
    fn other_json_values_are_forwarded_unchanged() {
        for text in ["[1]", "7", "\"no\"", "null", "{}"] {
            check_forwarded(text, text);
        }
    }
}
