//! File formats of data sets, and the selection of data files by name.

use std::collections::BTreeMap;
use std::path::Path;

use super::csv_file::CsvFile;
use super::json_file::JsonFile;
use super::json_lines::JsonLines;
use super::mapped_file::MappedFile;
use super::parquet_file::ParquetFile;
use super::text_file::{SampleBy, TextFile};
use super::{RowSource, SourceError};

/// File format of a data set. All files of a data set have one format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum FileFormat {
    /// `.json`, `.jsonl`, `.ndjson`
    Json,
    /// `.parquet`
    Parquet,
    /// `.csv`, `.tsv`
    Csv,
    /// `.txt`
    Text,
}

/// Options for reading data files.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReadOptions {
    /// Unit of a `.txt` file that becomes a row.
    pub sample_by: SampleBy,
    /// Key of the list of rows in a `.json` file that is one object.
    pub field: Option<String>,
    /// Column delimiter of `.csv` and `.tsv` files. `None` for a comma or a tab.
    pub delimiter: Option<u8>,
}

/// File name extensions of supported compression.
const UNPACKED: [&str; 2] = ["gz", "zst"];
/// File name extensions of unsupported compression.
const PACKED: [&str; 3] = ["bz2", "xz", "zip"];
/// Names of metadata files, which hold no rows.
const METADATA: [&str; 7] = [
    "dataset_infos.json",
    "dataset_info.json",
    "state.json",
    "dataset_dict.json",
    "package.json",
    "requirements.txt",
    "croissant.json",
];

impl FileFormat {
    /// Returns the format for a file name extension, which `.gz` or `.zst` may follow.
    pub fn from_path(path: &str) -> Option<Self> {
        let is_packed = is_packed(path);
        match ending(path).as_str() {
            "parquet" | "pq" if is_packed => None,
            "json" | "jsonl" | "ndjson" => Some(Self::Json),
            "parquet" | "pq" => Some(Self::Parquet),
            "csv" | "tsv" => Some(Self::Csv),
            "txt" | "text" => Some(Self::Text),
            _ => None,
        }
    }
}

/// Returns the data files among `paths`, sorted.
///
/// Drops hidden files, metadata and unknown extensions. Drops `.txt` files if other formats exist, since those are
/// notes and licences.
pub fn data_files(paths: impl IntoIterator<Item = String>) -> Vec<String> {
    let mut files: Vec<String> =
        paths.into_iter().filter(|path| FileFormat::from_path(path).is_some() && !is_metadata(path)).collect();
    if files.iter().any(|path| FileFormat::from_path(path) != Some(FileFormat::Text)) {
        files.retain(|path| FileFormat::from_path(path) != Some(FileFormat::Text));
    }
    files.sort();
    files
}

/// Checks that `files` have one format. The error counts the formats.
pub(crate) fn check_one_kind(files: &[String]) -> Result<(), String> {
    let mut counts = BTreeMap::new();
    for file in files {
        *counts.entry(FileFormat::from_path(file)).or_insert(0) += 1;
    }
    if counts.len() < 2 {
        return Ok(());
    }
    let counts: Vec<_> = counts
        .iter()
        .filter_map(|(kind, n)| kind.map(|kind| format!("{n} {}", format!("{kind:?}").to_lowercase())))
        .collect();
    Err(format!("it mixes {}; name the files of one kind, such as *.parquet", counts.join(" and ")))
}

/// Opens one data file.
pub(crate) fn open_file(path: &Path, options: &ReadOptions) -> Result<Box<dyn RowSource>, SourceError> {
    let name = path.to_string_lossy();
    Ok(match FileFormat::from_path(&name) {
        Some(FileFormat::Json) => open_json(path, options)?,
        Some(FileFormat::Parquet) => Box::new(ParquetFile::open(path)?),
        Some(FileFormat::Csv) => {
            let usual = if ending(&name) == "tsv" { b'\t' } else { b',' };
            Box::new(CsvFile::index(MappedFile::open(path)?, options.delimiter.unwrap_or(usual))?)
        }
        Some(FileFormat::Text) => Box::new(TextFile::index(MappedFile::open(path)?, options.sample_by)),
        None => return Err(unknown(path)),
    })
}

/// Opens a JSON file by its content: a `.jsonl` file that begins with `[` is one list.
fn open_json(path: &Path, options: &ReadOptions) -> Result<Box<dyn RowSource>, SourceError> {
    let file = MappedFile::open(path)?;
    let starts_list = file.bytes().iter().find(|b| !b.is_ascii_whitespace()) == Some(&b'[');
    if ending(&path.to_string_lossy()) == "json" || starts_list {
        Ok(Box::new(JsonFile::index(file, options.field.as_deref())?))
    } else {
        Ok(Box::new(JsonLines::index(file)?))
    }
}

fn unknown(path: &Path) -> SourceError {
    let ending = ending(&path.to_string_lossy());
    let problem = if PACKED.contains(&ending.as_str()) {
        format!("it is compressed ({ending}); unpack it first")
    } else if ending == "arrow" {
        "Arrow files are not read; write the data set with to_parquet or to_json".to_owned()
    } else {
        "rows are read from .json, .jsonl, .parquet, .csv, .tsv and .txt files (.gz and .zst too)".to_owned()
    };
    SourceError::not_available(path.display(), problem)
}

/// Returns the lower-case extension, without a compression extension.
fn ending(path: &str) -> String {
    let name = path.rsplit('/').next().unwrap_or(path);
    let name = if is_packed(name) { name.rsplit_once('.').map_or(name, |(unpacked, _)| unpacked) } else { name };
    name.rsplit_once('.').map_or(String::new(), |(_, ending)| ending.to_ascii_lowercase())
}

fn is_packed(path: &str) -> bool {
    path.rsplit_once('.').is_some_and(|(_, ending)| UNPACKED.contains(&ending.to_ascii_lowercase().as_str()))
}

fn is_metadata(path: &str) -> bool {
    let mut parts = path.split('/');
    let hidden = parts.clone().any(|part| part.starts_with('.') || part.starts_with("__"));
    hidden || parts.next_back().is_some_and(|name| METADATA.contains(&name))
}
