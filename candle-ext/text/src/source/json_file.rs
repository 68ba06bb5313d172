//! A `.json` file: one object that contains a list of objects, or any sequence of objects and of lists of them.
//!
//! The byte range of each row is indexed once. A row is parsed on access.

use std::ops::Range;

use serde::de::IgnoredAny;
use serde_json::Value;

use super::mapped_file::MappedFile;
use super::strict_json::{JsonProblem, MAX_ROW_BYTES, parse_row};
use super::{Row, RowSource, SourceError};

/// Keys that hold the list of rows, when the object has other keys too.
const ROW_KEYS: [&str; 6] = ["data", "rows", "examples", "instances", "records", "train"];
/// Keys whose lists are one conversation, not a list of rows.
const CHAT_KEYS: [&str; 5] = ["messages", "conversations", "conversation", "prompt", "completion"];

#[derive(Debug)]
pub(crate) struct JsonFile {
    file: MappedFile,
    spans: Vec<Range<usize>>,
}

impl JsonFile {
    /// Indexes the rows. `field` is the key of the list if the file is one object.
    pub(crate) fn index(file: MappedFile, field: Option<&str>) -> Result<Self, SourceError> {
        let mut spans = rows_of_values(&file)?;
        if file.bytes().get(first_byte(&file)) == Some(&b'{')
            && let Some(start) = list_inside(&file, &spans, field, MAX_ROW_BYTES)?
        {
            spans.clear();
            in_list(&file, start, &mut spans)?;
        }
        Ok(Self { file, spans })
    }
}

impl RowSource for JsonFile {
    fn len(&self) -> usize {
        self.spans.len()
    }

    fn row(&self, row_idx: usize) -> Result<Row, SourceError> {
        let span = self.spans[row_idx].clone();
        parse_row(&self.file.bytes()[span.clone()]).map_err(|f| at(&self.file, span.start, f))
    }

    fn locate(&self, row_idx: usize) -> String {
        self.file.place(self.spans[row_idx].start)
    }
}

fn first_byte(file: &MappedFile) -> usize {
    skip_space(file.bytes(), 0)
}

fn at(file: &MappedFile, start: usize, fault: JsonProblem) -> SourceError {
    let line = file.line(start) + fault.line - 1;
    SourceError::invalid_data(format!("{}:{line}", file.path().display()), fault.problem, fault.fix)
}

/// Adds the byte ranges of the items of the list that begins at `start`. Returns the offset after the list.
fn in_list(file: &MappedFile, start: usize, spans: &mut Vec<Range<usize>>) -> Result<usize, SourceError> {
    let bytes = file.bytes();
    let mut next = skip_space(bytes, start + 1);
    if bytes.get(next) == Some(&b']') {
        return Ok(next + 1);
    }
    loop {
        let span = value_at(file, next)?;
        next = skip_space(bytes, span.end);
        spans.push(span);
        match bytes.get(next) {
            Some(b',') => next = skip_space(bytes, next + 1),
            Some(b']') => return Ok(next + 1),
            Some(_) => return Err(unexpected(file, next, "a comma or the end of the list")),
            None => return Err(cut_short(file)),
        }
    }
}

/// Returns the byte ranges of the rows of all values in the file. An object is a row, the items of a list are rows.
fn rows_of_values(file: &MappedFile) -> Result<Vec<Range<usize>>, SourceError> {
    let bytes = file.bytes();
    let mut spans = Vec::new();
    let mut next = first_byte(file);
    while next < bytes.len() {
        let end = match bytes[next] {
            b'[' => in_list(file, next, &mut spans)?,
            b'{' => {
                spans.push(value_at(file, next)?);
                spans[spans.len() - 1].end
            }
            _ => return Err(unexpected(file, next, "a list or an object")),
        };
        next = skip_space(bytes, end);
    }
    Ok(spans)
}

/// Returns the offset of the list of rows, if the file is one object that contains it.
fn list_inside(
    file: &MappedFile,
    objects: &[Range<usize>],
    field: Option<&str>,
    max_bytes: usize,
) -> Result<Option<usize>, SourceError> {
    let [span] = objects else {
        return match field {
            None => Ok(None),
            Some(field) => Err(SourceError::not_available(
                file.path().display(),
                format!("field {field:?} needs a file of one object, this one holds {}", objects.len()),
            )),
        };
    };
    if span.len() > max_bytes {
        let problem = format!("the file is one object of {} bytes, over the limit of {max_bytes}", span.len());
        let fix = "write the rows that it holds one a line, and name the file .jsonl";
        return Err(SourceError::invalid_data(file.place(span.start), problem, fix));
    }
    let row = parse_row(&file.bytes()[span.clone()]).map_err(|f| at(file, span.start, f))?;
    let Some(key) = key_of_rows(&row, field) else {
        return match field {
            None => Ok(None),
            Some(field) => Err(SourceError::not_available(
                file.path().display(),
                format!("no list under the field {field:?}; keys: {}", keys(&row)),
            )),
        };
    };
    value_of_key(file, span.start, key).map(Some)
}

fn key_of_rows<'a>(row: &'a Row, field: Option<&str>) -> Option<&'a str> {
    let holds_rows =
        |value: &Value| value.as_array().is_some_and(|items| !items.is_empty() && items.iter().all(Value::is_object));
    let (key, _) = row.iter().find(|(key, value)| match field {
        Some(field) => *key == field && value.is_array(),
        None if CHAT_KEYS.contains(&key.as_str()) => false,
        None => holds_rows(value) && (row.len() == 1 || ROW_KEYS.contains(&key.as_str())),
    })?;
    Some(key)
}

/// Returns the offset of the value of `key` in the object at `start`.
fn value_of_key(file: &MappedFile, start: usize, key: &str) -> Result<usize, SourceError> {
    let bytes = file.bytes();
    let mut next = skip_space(bytes, start + 1);
    loop {
        let name = value_at(file, next)?;
        let found: Option<String> = serde_json::from_slice(&bytes[name.clone()]).ok();
        let value = skip_space(bytes, skip_space(bytes, name.end) + 1);
        if found.as_deref() == Some(key) {
            return Ok(value);
        }
        let end = skip_space(bytes, value_at(file, value)?.end);
        if bytes.get(end) != Some(&b',') {
            return Err(cut_short(file));
        }
        next = skip_space(bytes, end + 1);
    }
}

fn value_at(file: &MappedFile, start: usize) -> Result<Range<usize>, SourceError> {
    let rest = file.bytes().get(start..).unwrap_or(&[]);
    let mut values = serde_json::Deserializer::from_slice(rest).into_iter::<IgnoredAny>();
    match values.next() {
        Some(Ok(_)) => Ok(start..start + values.byte_offset()),
        Some(Err(e)) if !e.is_eof() => Err(at(file, start, broken(&e))),
        _ => Err(cut_short(file)),
    }
}

fn broken(error: &serde_json::Error) -> JsonProblem {
    JsonProblem {
        line: error.line().max(1),
        problem: format!("not valid JSON: {error} of this row"),
        fix: "correct the file, or write one row a line and name it .jsonl",
    }
}

fn unexpected(file: &MappedFile, offset: usize, wanted: &str) -> SourceError {
    let found = char::from(file.bytes()[offset]);
    SourceError::invalid_data(
        file.place(offset),
        format!("expected {wanted}, found {found:?}"),
        "a data file holds objects and lists of objects, one after another",
    )
}

fn cut_short(file: &MappedFile) -> SourceError {
    SourceError::invalid_data(
        file.place(file.bytes().len()),
        "the file ends in the middle of a value",
        "it may be cut short: fetch or write it again",
    )
}

fn skip_space(bytes: &[u8], start: usize) -> usize {
    let rest = bytes.get(start..).unwrap_or(&[]);
    start + rest.iter().take_while(|b| b.is_ascii_whitespace()).count()
}

fn keys(row: &Row) -> String {
    row.keys().map(String::as_str).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_object_too_long_to_look_into_is_better_written_as_lines() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        std::fs::write(&path, r#"{"data": [{"a": 1}]}"#).unwrap();
        let file = MappedFile::open(&path).unwrap();
        let objects = rows_of_values(&file).unwrap();
        assert_eq!(list_inside(&file, &objects, None, 20).unwrap(), Some(9));
        let error = list_inside(&file, &objects, None, 19).unwrap_err().to_string();
        assert!(error.contains("a.json:1: the file is one object of 20 bytes, over the limit of 19; write"), "{error}");
        assert!(error.ends_with("name the file .jsonl"), "{error}");
    }
}
