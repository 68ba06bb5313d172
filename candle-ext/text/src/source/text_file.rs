//! Text files as rows with one column, `text`: a line, a paragraph or the whole file each.
//!
//! The units have the names of the Hugging Face `text` loader. Blank lines and empty paragraphs are skipped, since
//! an empty row would train on EOS alone.

use serde_json::Value;

use super::mapped_file::{MappedFile, find_newline, is_blank};
use super::{Row, RowSource, SourceError};

/// Unit of a text file that becomes a row.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SampleBy {
    /// Each line that is not blank.
    #[default]
    Line,
    /// Each paragraph: lines between blank lines.
    Paragraph,
    /// The whole file.
    Document,
}

impl std::str::FromStr for SampleBy {
    type Err = SourceError;
    fn from_str(name: &str) -> Result<Self, SourceError> {
        match name {
            "line" => Ok(Self::Line),
            "paragraph" => Ok(Self::Paragraph),
            "document" => Ok(Self::Document),
            other => Err(SourceError::not_available(
                "a text file",
                format!("sample_by is {other:?}; it is one of line, paragraph, document"),
            )),
        }
    }
}

#[derive(Debug)]
pub(crate) struct TextFile {
    file: MappedFile,
    spans: Vec<(u64, u64)>,
}

impl TextFile {
    pub(crate) fn index(file: MappedFile, by: SampleBy) -> Self {
        let spans = match by {
            SampleBy::Line => lines(file.bytes()),
            SampleBy::Paragraph => paragraphs(file.bytes()),
            SampleBy::Document if is_blank(file.bytes()) => Vec::new(),
            SampleBy::Document => vec![(0, file.bytes().len() as u64)],
        };
        Self { file, spans }
    }
}

impl RowSource for TextFile {
    fn len(&self) -> usize {
        self.spans.len()
    }

    fn row(&self, row_idx: usize) -> Result<Row, SourceError> {
        let (start, end) = self.spans[row_idx];
        let bytes = &self.file.bytes()[start as usize..end as usize];
        let text = std::str::from_utf8(bytes).map_err(|e| {
            let place = self.file.place(start as usize + e.valid_up_to());
            let problem = format!("byte 0x{:02X} is not UTF-8", bytes[e.valid_up_to()]);
            SourceError::invalid_data(place, problem, "save the file as UTF-8")
        })?;
        let text = if text.contains('\r') { text.replace("\r\n", "\n") } else { text.to_owned() };
        Ok(Row::from_iter([("text".to_owned(), Value::String(text))]))
    }

    fn locate(&self, row_idx: usize) -> String {
        self.file.place(self.spans[row_idx].0 as usize)
    }
}

/// Returns the byte range of each line that is not blank, without its line break.
fn lines(bytes: &[u8]) -> Vec<(u64, u64)> {
    let mut spans = Vec::new();
    let mut start = 0;
    while start < bytes.len() {
        let rest = &bytes[start..];
        let n_bytes = find_newline(rest).unwrap_or(rest.len());
        let line = &rest[..n_bytes];
        if !is_blank(line) {
            let kept = line.strip_suffix(b"\r").unwrap_or(line).len();
            spans.push((start as u64, (start + kept) as u64));
        }
        start += n_bytes + 1;
    }
    spans
}

fn paragraphs(bytes: &[u8]) -> Vec<(u64, u64)> {
    let mut spans: Vec<(u64, u64)> = Vec::new();
    for (start, end) in lines(bytes) {
        match spans.last_mut() {
            Some(last) if is_one_break(&bytes[last.1 as usize..start as usize]) => last.1 = end,
            _ => spans.push((start, end)),
        }
    }
    spans
}

fn is_one_break(between: &[u8]) -> bool {
    between.iter().filter(|&&b| b == b'\n').count() == 1
}
