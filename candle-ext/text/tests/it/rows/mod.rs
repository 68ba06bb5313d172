//! Rows of local files, and documents of rows.

mod files;
mod folders;
mod formats;
mod parquet;
mod properties;

use std::path::PathBuf;

use candlewick_text::source::{ReadOptions, RowSource, open_files};
use tempfile::TempDir;

/// A folder of files for one test.
struct Folder(TempDir);

impl Folder {
    fn new(files: &[(&str, &[u8])]) -> Self {
        let folder = Self(tempfile::tempdir().unwrap());
        for (path, bytes) in files {
            let path = folder.path(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, bytes).unwrap();
        }
        folder
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Opens one file, and removes the folder's path from errors.
    fn open(&self, name: &str, options: &ReadOptions) -> Result<Box<dyn RowSource>, String> {
        open_files(&[self.path(name)], options).map_err(|e| self.short(e))
    }

    fn short(&self, error: impl ToString) -> String {
        error.to_string().replace(&format!("{}/", self.0.path().display()), "")
    }
}

/// Returns all rows as JSON, or the first error.
fn show(source: &dyn RowSource) -> Result<Vec<String>, String> {
    let rows = (0..source.len()).map(|i| source.row(i).map_err(|e| e.to_string()));
    rows.map(|row| Ok(serde_json::to_string(&row?).unwrap())).collect()
}
