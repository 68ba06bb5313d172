//! The Markdown reference of recipe keys.

use std::fmt::Write as _;

use super::key_docs::{KeyDoc, key_docs};

/// Returns the Markdown reference of all recipe keys: a table of the top level, and one for each section.
pub fn key_reference() -> String {
    let docs = key_docs();
    let sections: Vec<&KeyDoc> = docs.iter().filter(|doc| doc.is_section()).collect();
    let mut page = String::new();
    table(&mut page, &docs, "");
    for section in sections {
        let _ = write!(page, "\n## {}\n\n{}\n", section.path, section.meaning);
        let prefix =
            if section.value_type.contains("list of") { format!("{}.N", section.path) } else { section.path.clone() };
        table(&mut page, &docs, &prefix);
    }
    page
}

/// Appends the table of the keys directly in a section; "" is the top level.
fn table(page: &mut String, docs: &[KeyDoc], section: &str) {
    let of = |doc: &&KeyDoc| doc.path.rsplit_once('.').map_or("", |(of, _)| of) == section;
    page.push_str("\n| key | type | default | meaning |\n|---|---|---|---|\n");
    for doc in docs.iter().filter(of) {
        let default = doc.default.as_deref().unwrap_or_default();
        let cells = [format!("`{}`", doc.path), doc.value_type.clone(), default.to_owned(), meaning(doc)];
        let _ = writeln!(page, "| {} |", cells.map(|cell| cell.replace('|', "\\|")).join(" | "));
    }
}

/// Returns the meaning, values and other names of a key.
fn meaning(doc: &KeyDoc) -> String {
    let mut text = doc.meaning.clone();
    let quoted = |names: Vec<&str>| names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    let values: Vec<&str> = doc.values.iter().map(|value| value.name.as_str()).collect();
    let others: Vec<&str> = doc.other_names.iter().map(|(name, _)| *name).collect();
    let aliases: Vec<&str> = doc.aliases.iter().map(String::as_str).collect();
    for (title, names) in [("Values", values), ("Alias", aliases), ("In other toolkits", others)] {
        if !names.is_empty() {
            let _ = write!(text, " {title}: {}.", quoted(names));
        }
    }
    text.trim().to_owned()
}
