//! Why this process failed, for the launcher that started it: torchrun and ours name a file for it.

use std::ffi::OsString;
use std::fs;
use std::panic;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::json;

const VARIABLE: &str = "TORCHELASTIC_ERROR_FILE";

/// Writes panics too, besides printing them.
pub fn watch_panics() {
    let print = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        write(&info.to_string());
        print(info);
    }));
}

/// Writes a message in the form that torch's `@record` writes. Nothing is done without a launcher. A failure is not
/// reported: the message is printed as well.
pub fn write(message: &str) {
    let Some(path) = std::env::var_os(VARIABLE).filter(|path| *path != OsString::new()) else { return };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let error = json!({"message": {"message": message, "extraInfo": {"timestamp": now.to_string()}}});
    let _ = fs::write(path, error.to_string());
}
