//! Progress of the Hub's downloads and uploads.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use candlewick_text::hub::DownloadCallback;

use super::{ProgressUnit, WorkProgress};

/// Returns a callback that shows the progress of each file.
pub fn show_downloads() -> DownloadCallback {
    let by_file: Mutex<HashMap<String, WorkProgress>> = Mutex::default();
    Arc::new(move |progress| {
        let mut by_file = by_file.lock().unwrap_or_else(PoisonError::into_inner);
        if progress.done >= progress.total {
            by_file.remove(progress.file);
            return;
        }
        let total = progress.total as usize;
        let start = || WorkProgress::start(progress.file, ProgressUnit::Bytes, total);
        by_file.entry(progress.file.to_owned()).or_insert_with(start).set(progress.done as usize, total);
    })
}
