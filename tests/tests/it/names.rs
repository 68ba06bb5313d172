//! Names of types: one name, one type.

use std::collections::BTreeMap;

use suite::{code_of, rust_files};

/// Names that several modules may define: the idiom of Rust's standard library is a type of this name a module.
const IDIOMS: &[&str] = &["Error", "Result"];

/// Returns the name of the type that a line of code declares with any visibility beyond its file.
fn declared_type(line: &str) -> Option<&str> {
    let rest = line.trim_start().strip_prefix("pub")?;
    let rest = if rest.starts_with('(') { rest.split_once(')')?.1 } else { rest };
    let rest = rest.trim_start();
    let rest = rest.strip_prefix("unsafe ").unwrap_or(rest);
    let name =
        ["struct ", "enum ", "trait ", "type ", "union "].iter().find_map(|keyword| rest.strip_prefix(keyword))?;
    Some(name.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or(name))
}

#[test]
fn no_identifier_names_two_public_types() {
    let mut files: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for folder in ["candle-ext", "trainer", "evaluator"] {
        for path in rust_files(folder).iter().filter(|path| path.components().any(|part| part.as_os_str() == "src")) {
            for name in code_of(path).lines().filter_map(declared_type).filter(|name| !IDIOMS.contains(name)) {
                files.entry(name.to_owned()).or_default().push(path.display().to_string());
            }
        }
    }
    assert!(files.len() > 500, "only {} types were found", files.len());
    let homonyms: Vec<_> = files.iter().filter(|(_, files)| files.len() > 1).collect();
    assert!(homonyms.is_empty(), "{} names of several types: {homonyms:#?}", homonyms.len());
}

#[test]
fn a_declaration_is_recognised() {
    for (line, name) in [
        ("pub struct Mesh {", Some("Mesh")),
        ("    pub(crate) enum Step<'a> {", Some("Step")),
        ("pub(in crate::plan) type Rank = usize;", Some("Rank")),
        ("pub fn struct_of() {", None),
        ("struct Private;", None),
    ] {
        assert_eq!(declared_type(line), name, "{line}");
    }
}
