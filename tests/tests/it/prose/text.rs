//! Extracts the prose of a file: doc comments, comments, messages, names of tests, and sentences of documents.

/// The origin of a passage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    DocComment,
    Comment,
    /// A string literal of several words outside tests.
    Message,
    /// The name of a test, its underscores replaced by spaces.
    TestName,
    /// A paragraph, list item, heading or table cell of a Markdown file.
    Paragraph,
}

/// A run of prose and its first line, counted from 1.
#[derive(Debug)]
pub(super) struct Passage {
    pub(super) kind: Kind,
    pub(super) line: usize,
    pub(super) text: String,
}

/// Returns the passages of a source file with comments of C's kind. `is_test` leaves out its messages.
pub(super) fn of_source(source: &str, is_test: bool) -> Vec<Passage> {
    let mut found = Vec::new();
    let mut lexer = Lexer { bytes: source.as_bytes(), at: 0, line: 1 };
    let unit_tests = source.find("\n#[cfg(test)]").unwrap_or(source.len());
    while let Some((kind, line, text)) = lexer.next(source) {
        let is_message = kind != Kind::Message || !is_test && lexer.at < unit_tests;
        if is_message {
            push(&mut found, kind, line, &text);
        }
    }
    for (i, line) in source.lines().enumerate() {
        let is_declared = source.lines().take(i).skip(i.saturating_sub(3)).any(|above| above.trim() == "#[test]");
        if let Some(name) = line.trim_start().strip_prefix("fn ").filter(|_| is_declared) {
            let name = name.split(['(', '<']).next().unwrap_or_default();
            found.push(Passage { kind: Kind::TestName, line: i + 1, text: name.replace('_', " ") });
        }
    }
    found
}

/// Adds a passage. Consecutive comment lines are one passage; a blank comment line separates two.
fn push(found: &mut Vec<Passage>, kind: Kind, line: usize, text: &str) {
    let text = text.trim();
    let is_comment = matches!(kind, Kind::DocComment | Kind::Comment);
    if text.is_empty() {
        return;
    }
    let n_lines = |passage: &Passage| passage.text.split('\n').count();
    let starts_item = text.starts_with(['*', '-', '|', '#']);
    match found.last_mut() {
        Some(last) if is_comment && last.kind == kind && last.line + n_lines(last) == line && !starts_item => {
            last.text.push('\n');
            last.text.push_str(text);
        }
        _ if is_comment || text.split_whitespace().count() > 2 => {
            found.push(Passage { kind, line, text: text.to_owned() });
        }
        _ => {}
    }
}

/// Reads comments and strings, and passes over code.
struct Lexer<'a> {
    bytes: &'a [u8],
    at: usize,
    line: usize,
}

impl Lexer<'_> {
    /// Returns the next comment line or string.
    fn next(&mut self, source: &str) -> Option<(Kind, usize, String)> {
        while self.at < self.bytes.len() {
            let rest = &self.bytes[self.at..];
            if rest.starts_with(b"//") {
                return Some(self.comment(source));
            } else if rest[0] == b'"' {
                return Some(self.string(source));
            } else if let Some(hashes) = raw_string(rest) {
                return Some(self.raw_string(source, hashes));
            }
            let step = match rest {
                [b'\'', b'\\', _, b'\'', ..] => 4,
                [b'\'', b'\\', ..] => rest.iter().skip(2).position(|b| *b == b'\'').map_or(1, |n| n + 3),
                [b'\'', _, b'\'', ..] => 3,
                _ => 1,
            };
            self.advance(step);
        }
        None
    }

    fn advance(&mut self, n: usize) {
        let end = (self.at + n).min(self.bytes.len());
        self.line += self.bytes[self.at..end].iter().filter(|b| **b == b'\n').count();
        self.at = end;
    }

    fn comment(&mut self, source: &str) -> (Kind, usize, String) {
        let line = self.line;
        let text = source[self.at..].lines().next().unwrap_or_default();
        self.at += text.len();
        let is_doc = (text.starts_with("///") || text.starts_with("//!")) && !text.starts_with("////");
        let kind = if is_doc { Kind::DocComment } else { Kind::Comment };
        (kind, line, text.trim_start_matches(['/', '!']).to_owned())
    }

    fn string(&mut self, source: &str) -> (Kind, usize, String) {
        let line = self.line;
        let start = self.at + 1;
        let mut end = start;
        while end < self.bytes.len() && self.bytes[end] != b'"' {
            end += if self.bytes[end] == b'\\' { 2 } else { 1 };
        }
        let end = end.min(self.bytes.len());
        self.advance(end + 1 - self.at);
        let text = source[start..end].replace("\\n", " ").replace("\\\n", " ");
        (Kind::Message, line, text)
    }

    fn raw_string(&mut self, source: &str, hashes: usize) -> (Kind, usize, String) {
        let line = self.line;
        let start = self.at + hashes + 2;
        let close = format!("\"{}", "#".repeat(hashes));
        let end = source[start..].find(&close).map_or(source.len(), |n| start + n);
        self.advance(end + close.len() - self.at);
        (Kind::Message, line, source[start..end].to_owned())
    }
}

/// Returns the number of hashes if a raw string begins here.
fn raw_string(rest: &[u8]) -> Option<usize> {
    let hashes = rest.strip_prefix(b"r")?.iter().take_while(|b| **b == b'#').count();
    (rest.get(1 + hashes) == Some(&b'"')).then_some(hashes)
}

/// Returns the comments of a script or a YAML file.
pub(super) fn of_script(text: &str) -> Vec<Passage> {
    let mut found = Vec::new();
    for (i, line) in text.lines().enumerate() {
        let trimmed = line.trim_start();
        let comment = trimmed.strip_prefix('#').or_else(|| line.split_once(" # ").map(|(_, comment)| comment));
        if let Some(comment) = comment.filter(|text| !text.starts_with('!')) {
            push(&mut found, Kind::Comment, i + 1, comment);
        }
    }
    found
}

/// Returns the paragraphs, list items, headings and table cells of a Markdown file without its code blocks.
pub(super) fn of_markdown(text: &str) -> Vec<Passage> {
    let mut found: Vec<Passage> = Vec::new();
    let mut in_code = false;
    let mut is_open = false;
    for (i, line) in text.lines().enumerate() {
        let trimmed = line.trim();
        let is_fence = trimmed.starts_with("```");
        in_code ^= is_fence;
        if is_fence || in_code || trimmed.is_empty() || trimmed.starts_with('|') {
            is_open = false;
            let cells = if in_code || is_fence { "" } else { trimmed };
            for cell in cells.split('|').filter(|cell| cell.split_whitespace().count() > 2) {
                found.push(Passage { kind: Kind::Paragraph, line: i + 1, text: cell.trim().to_owned() });
            }
            continue;
        }
        let starts_item = trimmed.starts_with(['*', '-', '#', '>']) && !trimmed.starts_with("**")
            || trimmed.split_once(". ").is_some_and(|(n, _)| n.chars().all(|c| c.is_ascii_digit()));
        match found.last_mut() {
            Some(last) if is_open && !starts_item => {
                last.text.push('\n');
                last.text.push_str(trimmed);
            }
            _ => found.push(Passage { kind: Kind::Paragraph, line: i + 1, text: trimmed.to_owned() }),
        }
        is_open = !trimmed.starts_with('#');
    }
    found
}

/// Splits a passage into sentences of plain words. A code span is one word, a link its text.
pub(super) fn sentences(text: &str) -> Vec<String> {
    let mut plain = String::with_capacity(text.len());
    for (i, part) in text.split('`').enumerate() {
        plain.push_str(if i % 2 == 1 { "CODE" } else { part });
    }
    let plain = without_targets(&plain).replace('\n', " ");
    let mut sentences = vec![String::new()];
    for word in plain.split_whitespace() {
        let last = sentences.last_mut().expect("one sentence is always open");
        if !last.is_empty() {
            last.push(' ');
        }
        last.push_str(word);
        if word.trim_end_matches([')', '"', '*']).ends_with(['.', ':', ';', '!', '?']) {
            sentences.push(String::new());
        }
    }
    sentences.retain(|sentence| !sentence.is_empty());
    sentences
}

/// Removes the targets of links: `[text](target)` becomes `[text]`.
fn without_targets(text: &str) -> String {
    let mut parts = text.split("](");
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        plain.push(']');
        plain.push_str(part.split_once(')').map_or("", |(_, rest)| rest));
    }
    plain
}
