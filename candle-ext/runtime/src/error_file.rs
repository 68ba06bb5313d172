//! torchelastic's error file, through which a worker reports its error to torchrun or `launch`.

use std::ffi::OsString;
use std::fs;
use std::panic;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::json;

const VARIABLE: &str = "TORCHELASTIC_ERROR_FILE";

/// Installs a panic hook that also writes panics to the error file.
pub fn record_panics() {
    let print = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        write(&info.to_string());
        print(info);
    }));
}

/// Writes an error message to TORCHELASTIC_ERROR_FILE, in the format of torch's `@record`.
///
/// Does nothing without the variable. Ignores write errors, because the program also prints the message.
pub fn write(message: &str) {
    let Some(path) = std::env::var_os(VARIABLE).filter(|path| *path != OsString::new()) else { return };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let error = json!({"message": {"message": message, "extraInfo": {"timestamp": now.to_string()}}});
    let _ = fs::write(path, error.to_string());
}
