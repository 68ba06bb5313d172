//! The report of a conversion: keys that were mapped, changed, or have no counterpart.

use std::fmt::Write as _;

use serde::Serialize;
use serde_json::{Map, Value as Json};

/// The result of a key's conversion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FindingKind {
    /// The recipe has the same value with the same meaning, or the program always behaves so.
    Mapped,
    /// The recipe has another value, or the value has another meaning.
    Changed,
    /// The recipe has no such key.
    NoCounterpart,
}

/// A key of the other toolkit and its place in the recipe.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ConversionFinding {
    /// The list of the report.
    #[serde(skip)]
    pub kind: FindingKind,
    /// The other toolkit's key.
    pub key: String,
    /// Line of the key; `None` if the toolkit's default applies.
    pub line: Option<usize>,
    /// The value; null if the toolkit's default applies.
    pub value: Json,
    /// Keys and values of the recipe.
    pub recipe: Map<String, Json>,
    /// The difference, the reason, or a remedy.
    pub note: String,
}

/// The report of a conversion.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ConversionReport {
    /// All findings, in the order of the file.
    pub findings: Vec<ConversionFinding>,
}

impl ConversionReport {
    /// Returns the findings of a list.
    pub fn of(&self, kind: FindingKind) -> impl Iterator<Item = &ConversionFinding> {
        self.findings.iter().filter(move |finding| finding.kind == kind)
    }

    /// Returns the three lists as text.
    pub fn text(&self) -> String {
        let lists = [
            (FindingKind::Mapped, "Mapped"),
            (FindingKind::Changed, "Changed: the value or its meaning differs"),
            (FindingKind::NoCounterpart, "No counterpart"),
        ];
        let mut text = String::new();
        for (kind, title) in lists {
            let _ = writeln!(text, "{title} ({})", self.of(kind).count());
            self.of(kind).for_each(|finding| text.push_str(&line(finding)));
            text.push('\n');
        }
        text
    }

    /// Returns the three lists as JSON.
    pub fn json(&self) -> Json {
        let list = |kind| self.of(kind).map(|finding| serde_json::to_value(finding).unwrap_or_default()).collect();
        let lists: [(&str, Json); 3] = [
            ("mapped", list(FindingKind::Mapped)),
            ("changed", list(FindingKind::Changed)),
            ("no_counterpart", list(FindingKind::NoCounterpart)),
        ];
        lists.into_iter().map(|(name, list)| (name.to_owned(), list)).collect::<Map<_, _>>().into()
    }
}

fn line(finding: &ConversionFinding) -> String {
    let ConversionFinding { key, line, value, recipe, note, .. } = finding;
    let (at, key) = match line {
        Some(line) => (format!("line {line}"), format!("{key}: {}", short(value))),
        None => ("default".to_owned(), key.clone()),
    };
    let targets = recipe.iter().map(|(key, value)| format!("{key}: {}", short(value))).collect::<Vec<_>>().join(", ");
    let arrow = if targets.is_empty() { String::new() } else { format!("  ->  {targets}") };
    let note = if note.is_empty() { String::new() } else { format!("\n            {note}") };
    format!("  {at:<9} {key}{arrow}{note}\n")
}

/// Returns a value in one short line.
fn short(value: &Json) -> String {
    let text = match value {
        Json::String(text) => text.clone(),
        other => other.to_string(),
    };
    let text = text.replace('\n', " ");
    match text.char_indices().nth(100) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
