//! Loading of a task's documents from the Hub or from local files. The source is `dataset_path` and `dataset_kwargs`,
//! or `--data`.

use std::fmt;
use std::path::Path;

use candlewick_text::hub::{DatasetRequest, Hub};
use candlewick_text::long_integer;
use candlewick_text::source::{DatasetSpec, FileSelector, ReadOptions, RowSource, SplitSlice, named};
use candlewick_text::suggestion::did_you_mean;
use serde::Serialize;
use serde_json::{Map, Value as Json};

use super::builtin::{Doc, ProcessDocs};
use super::config::{DatasetConfig, TaskConfig};
use super::data_override::DataOverrides;
use super::error::{ConfigError, TaskError};
use super::python::literal::literal_eval;
use super::python_random::PythonRandom;

/// Documents of one split, in order.
pub(crate) struct DatasetSplit {
    name: String,
    docs: Vec<Doc>,
    rows: Vec<usize>,
    source: Box<dyn RowSource>,
}

/// Metadata of a split in results: its files and its number of documents.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SplitInfo {
    /// Split name in the task file.
    pub split: String,
    /// File paths, local or within the Hub data set.
    pub files: Vec<String>,
    /// Number of documents after `process_docs`.
    pub documents: usize,
}

impl fmt::Display for SplitInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { split, files, documents } = self;
        let plural = if *documents == 1 { "" } else { "s" };
        write!(f, "{split} = {} ({documents} document{plural})", named(files))
    }
}

impl DatasetSplit {
    /// Returns the documents of the split.
    pub(crate) fn docs(&self) -> &[Doc] {
        &self.docs
    }

    /// Returns the split's metadata.
    pub(crate) fn data(&self) -> SplitInfo {
        let files = self.source.files().full_paths();
        SplitInfo { split: self.name.clone(), files, documents: self.docs.len() }
    }

    /// Returns the documents without row indices.
    pub(crate) fn into_docs(self) -> Vec<Doc> {
        self.docs
    }

    /// Returns each document's row index in the data set, before `process_docs`.
    pub(crate) fn row_indices(&self) -> &[usize] {
        &self.rows
    }

    /// Returns a document's row index in the data set.
    pub(crate) fn row_index(&self, doc_id: usize) -> Option<usize> {
        self.rows.get(doc_id).copied()
    }

    /// Returns file and line of a document, for error messages.
    pub(crate) fn locate(&self, doc_id: usize) -> String {
        self.rows.get(doc_id).map_or_else(|| format!("document {doc_id}"), |row| self.source.locate(*row))
    }
}

/// Loads all documents of a split.
pub(crate) fn open(
    hub: &Hub,
    config: &TaskConfig,
    split: &str,
    paths: &DataOverrides,
    process: Option<ProcessDocs>,
) -> Result<DatasetSplit, TaskError> {
    let request = match paths.path_of(&config.task) {
        Some(path) => {
            DatasetRequest { files: paths.file_selector(config), ..override_request(path, &config.dataset, split) }
        }
        None => task_file_request(&config.dataset, split)?,
    };
    let task = || config.task.clone();
    let source = hub.dataset(&request).map_err(|source| TaskError::Hub { task: task(), source })?;
    let mut docs = Vec::with_capacity(source.len());
    for row in 0..source.len() {
        docs.push(source.row(row).map_err(|source| TaskError::Source { task: task(), source })?);
    }
    let docs = process_all(with_all_columns(docs), process).map_err(|(row, problem)| TaskError::Document {
        task: task(),
        place: source.locate(row),
        problem,
    })?;
    let (rows, mut docs): (Vec<usize>, Vec<Doc>) = docs.into_iter().unzip();
    if config.uses_column_as_list(CHOICES) {
        for (row, doc) in rows.iter().zip(&mut docs) {
            let place = || source.locate(*row);
            read_list(doc, CHOICES).map_err(|problem| TaskError::Document { task: task(), place: place(), problem })?;
        }
    }
    Ok(DatasetSplit { name: split.to_owned(), docs, rows, source })
}

/// Column of the choices; CSV files hold it as a string.
const CHOICES: &str = "choices";

/// Parses a list that a column holds as a string: JSON or a Python literal.
fn read_list(doc: &mut Doc, column: &str) -> Result<(), String> {
    let Some(Json::String(text)) = doc.get(column) else { return Ok(()) };
    let list = long_integer::parse(text).or_else(|_| literal_eval(text)).ok().filter(Json::is_array);
    let expected = || format!("column `{column}`: expected a JSON or Python list, found the text {text:?}");
    let list = list.ok_or_else(expected)?;
    doc.insert(column.to_owned(), list);
    Ok(())
}

/// Returns the data request for a path of `--data`. A single file is the requested split; a folder or Hub data set
/// has splits.
fn override_request(path: &str, dataset: &DatasetConfig, split: &str) -> DatasetRequest {
    let is_file = Path::new(path).is_file();
    let part = SplitSlice { split: split.to_owned(), slice: Default::default() };
    let parts = if is_file { Vec::new() } else { vec![part] };
    let is_card = || Path::new(path).join("README.md").is_file();
    let below = |name: &String| !Path::new(path).exists() || is_card() && Path::new(path).join(name).is_dir();
    DatasetRequest {
        spec: DatasetSpec { name: path.to_owned(), parts },
        config: dataset.name.clone().filter(below),
        default_split: split.to_owned(),
        ..request(path)
    }
}

fn request(path: &str) -> DatasetRequest {
    DatasetRequest {
        spec: DatasetSpec { name: path.to_owned(), parts: Vec::new() },
        revision: None,
        config: None,
        default_split: String::new(),
        split_mapping: Vec::new(),
        data_files: Vec::new(),
        files: FileSelector::All,
        read: ReadOptions::default(),
    }
}

const KWARGS: [&str; 7] = ["data_files", "data_dir", "revision", "field", "sep", "delimiter", "trust_remote_code"];

fn task_file_request(dataset: &DatasetConfig, split: &str) -> Result<DatasetRequest, TaskError> {
    let fault = |problem: String| {
        let message = format!("dataset_kwargs: {problem}");
        TaskError::Config(ConfigError { place: dataset.kwargs_place.clone(), message })
    };
    let kwargs = &dataset.kwargs;
    if let Some(key) = kwargs.keys().find(|key| !KWARGS.contains(&key.as_str())) {
        let near = did_you_mean(key, KWARGS);
        return Err(fault(format!("unknown key `{key}`{near}; known are {}", KWARGS.join(", "))));
    }
    let text = |key: &str| match kwargs.get(key) {
        None | Some(Json::Null) => Ok(None),
        Some(Json::String(text)) => Ok(Some(text.clone())),
        Some(other) => Err(fault(format!("{key}: expected a text, found {other}"))),
    };
    let path = dataset.path.clone().unwrap_or_default();
    let mut data_files = data_files(kwargs).map_err(&fault)?;
    if let Some(folder) = text("data_dir")? {
        let folder = folder.trim_end_matches('/').to_owned();
        match data_files.is_empty() {
            true => data_files.push((None, format!("{folder}/**"))),
            false => data_files.iter_mut().for_each(|(_, pattern)| *pattern = format!("{folder}/{pattern}")),
        }
    }
    let delimiter = text("sep")?.or(text("delimiter")?);
    Ok(DatasetRequest {
        spec: DatasetSpec {
            name: path.clone(),
            parts: vec![SplitSlice { split: split.to_owned(), slice: Default::default() }],
        },
        revision: text("revision")?,
        config: dataset.name.clone(),
        default_split: split.to_owned(),
        data_files,
        read: ReadOptions {
            field: text("field")?,
            delimiter: delimiter.and_then(|text| text.bytes().next()),
            ..ReadOptions::default()
        },
        ..request(&path)
    })
}

/// Returns the file patterns of `data_files`, each with its split. Patterns without a split name are for `train`.
fn data_files(kwargs: &Map<String, Json>) -> Result<Vec<(Option<String>, String)>, String> {
    let Some(files) = kwargs.get("data_files") else { return Ok(Vec::new()) };
    let patterns = |value: &Json| match value {
        Json::String(pattern) => Ok(vec![pattern.clone()]),
        Json::Array(items) => {
            items.iter().map(|item| item.as_str().map(str::to_owned)).collect::<Option<_>>().ok_or(())
        }
        _ => Err(()),
    };
    let wrong = |()| "data_files: expected a pattern, a list of them, or a map of splits to them".to_owned();
    let of_split = |split: &str, value: &Json| -> Result<Vec<_>, String> {
        Ok(patterns(value).map_err(wrong)?.into_iter().map(|pattern| (Some(split.to_owned()), pattern)).collect())
    };
    match files {
        Json::Object(splits) => {
            let of_splits =
                splits.iter().map(|(split, value)| of_split(split, value)).collect::<Result<Vec<_>, _>>()?;
            Ok(of_splits.concat())
        }
        other => of_split("train", other),
    }
}

/// Gives every document all columns; missing columns become null.
fn with_all_columns(docs: Vec<Doc>) -> Vec<Doc> {
    let mut columns: Map<String, Json> = Map::new();
    for doc in &docs {
        for key in doc.keys().filter(|key| !columns.contains_key(*key)).collect::<Vec<_>>() {
            columns.insert(key.clone(), Json::Null);
        }
    }
    let fill = |doc: Doc| {
        if doc.len() == columns.len() {
            return doc;
        }
        let mut full = columns.clone();
        full.extend(doc);
        full
    };
    docs.into_iter().map(fill).collect()
}

/// Applies `process_docs`. Returns the remaining documents with their row indices, or the row that failed and the
/// reason.
fn process_all(docs: Vec<Doc>, process: Option<ProcessDocs>) -> Result<Vec<(usize, Doc)>, (usize, String)> {
    let docs = docs.into_iter().enumerate();
    match process {
        None => Ok(docs.collect()),
        Some(ProcessDocs::Map(change)) => docs.map(|(row, doc)| in_row(row, change(doc))).collect(),
        Some(ProcessDocs::MapWithRng(seed, change)) => {
            let mut random = PythonRandom::new(seed);
            docs.map(|(row, doc)| in_row(row, change(doc, &mut random))).collect()
        }
        Some(ProcessDocs::FilterMap(change)) => docs
            .filter_map(|(row, doc)| match change(doc) {
                Ok(doc) => Some(Ok((row, doc?))),
                Err(problem) => Some(Err((row, problem))),
            })
            .collect(),
        Some(ProcessDocs::ColumnEquals(column, value)) => {
            Ok(docs.filter(|(_, doc)| doc.get(column).and_then(Json::as_str) == Some(value)).collect())
        }
    }
}

fn in_row(row: usize, doc: Result<Doc, String>) -> Result<(usize, Doc), (usize, String)> {
    doc.map(|doc| (row, doc)).map_err(|problem| (row, problem))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_list_that_is_written_as_text_is_read() {
        let read = |value: Json| {
            let mut doc = Doc::from_iter([(CHOICES.to_owned(), value)]);
            read_list(&mut doc, CHOICES).map(|()| doc[CHOICES].clone())
        };
        for text in [r#"["a", "b"]"#, "['a', 'b']", "('a', 'b')"] {
            assert_eq!(read(json!(text)).unwrap(), json!(["a", "b"]), "{text}");
        }
        assert_eq!(read(json!(["a"])).unwrap(), json!(["a"]));
        assert!(read(json!("a;b")).unwrap_err().contains("column `choices`: expected a JSON or Python list"));
    }
}
