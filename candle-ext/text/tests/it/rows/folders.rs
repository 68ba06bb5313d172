//! Folders, patterns, splits and slices.

use std::fmt::Debug;
use std::sync::{Arc, Mutex};

use candlewick_text::source::{DatasetSpec, LocalRequest, open_local};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use super::{Folder, show};

fn open(folder: &Folder, spec: &str, default_split: &str) -> Result<Vec<String>, String> {
    let text = folder.path(spec).display().to_string();
    let spec = DatasetSpec::parse(&text, |path| std::path::Path::new(path).exists()).unwrap();
    let request = LocalRequest {
        path: spec.name,
        parts: spec.parts,
        default_split: default_split.into(),
        ..LocalRequest::default()
    };
    show(&*open_local(&request).map_err(|e| folder.short(e))?)
}

fn row(n: i32) -> String {
    format!("{{\"a\":{n}}}")
}

fn splits() -> Folder {
    Folder::new(&[
        ("train-1.jsonl", b"{\"a\":1}\n{\"a\":2}\n"),
        ("train-2.json", b"[{\"a\":3}]"),
        ("test.jsonl", b"{\"a\":4}\n"),
        (".hidden.jsonl", b"{\"a\":5}\n"),
        ("dataset_info.json", b"{}"),
    ])
}

#[test]
fn a_folder_is_its_files_of_a_split_in_order() {
    let folder = splits();
    assert_eq!(open(&folder, "", "train").unwrap(), [row(1), row(2), row(3)]);
    assert_eq!(open(&folder, "", "eval").unwrap(), [row(4)]);
    assert_eq!(open(&folder, ":train[1:]", "train").unwrap_or_default(), [row(2), row(3)]);
}

#[test]
fn a_source_names_the_files_that_it_reads() {
    let folder = splits();
    let choice = |spec: &str| {
        let text = folder.path(spec).display().to_string();
        let spec = DatasetSpec::parse(&text, |path| std::path::Path::new(path).exists()).unwrap();
        let (path, parts, default_split) = (spec.name, spec.parts, "train".to_owned());
        let source = open_local(&LocalRequest { path, parts, default_split, ..LocalRequest::default() }).unwrap();
        folder.short(source.files().describe_selection().unwrap_or_default())
    };
    assert_eq!(choice(""), "2 of 3 files: train-1.jsonl, train-2.json (split train)");
    assert_eq!(choice(":test+train[:1]"), "3 of 3 files: test.jsonl, train-1.jsonl, train-2.json (split test+train)");
    assert_eq!(choice("train*"), "2 of 2 files: train-1.jsonl, train-2.json");
    assert_eq!(choice("test.jsonl"), "");
}

#[test]
fn a_pattern_is_the_files_that_match() {
    let folder = splits();
    assert_eq!(open(&folder, "train*", "train").unwrap(), [row(1), row(2), row(3)]);
    assert_eq!(open(&folder, "*.jsonl:train[-1:]", "train").unwrap(), [row(2)]);
    let error = open(&folder, "dev*.jsonl", "train").unwrap_err();
    assert!(error.contains("matches the pattern"), "{error}");
}

#[test]
fn a_file_is_one_split() {
    let folder = splits();
    assert_eq!(open(&folder, "train-1.jsonl:train[:50%]", "train").unwrap(), [row(1)]);
    assert_eq!(open(&folder, "test.jsonl", "eval").unwrap(), [row(4)]);
    assert_eq!(open(&folder, "test.jsonl:test", "eval").unwrap(), [row(4)]);
    let error = open(&folder, "train-1.jsonl:test", "train").unwrap_err();
    assert!(error.contains("a single file is all one split"), "{error}");
    let error = open(&folder, "train-1.jsonl:train[:9]", "train").unwrap_err();
    assert!(error.contains("only 2"), "{error}");
}

#[test]
fn a_missing_path_is_an_error_with_a_suggestion() {
    let folder = splits();
    let error = open(&folder, "tain-1.jsonl", "train").unwrap_err();
    assert!(error.contains("did you mean train-1.jsonl?"), "{error}");
}

#[test]
fn mixed_kinds_and_empty_folders_are_explained() {
    let mixed = Folder::new(&[("a.jsonl", b"{\"a\":1}\n"), ("b.csv", b"a\n1\n")]);
    assert!(open(&mixed, "", "train").unwrap_err().contains("mixes 1 json and 1 csv"));
    assert!(open(&mixed, "*", "train").unwrap_err().contains("mixes 1 json and 1 csv"));
    let bare = Folder::new(&[("notes.md", b"x")]);
    assert!(open(&bare, "", "train").unwrap_err().contains("only: notes.md"));
}

/// Collects the warnings.
#[derive(Clone, Default)]
struct Warnings(Arc<Mutex<String>>);

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() == Level::WARN
    }
    fn event(&self, event: &Event<'_>) {
        event.record(&mut self.clone());
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

impl Visit for Warnings {
    fn record_debug(&mut self, _: &Field, value: &dyn Debug) {
        self.0.lock().unwrap().push_str(&format!("{value:?}\n"));
    }
}

#[test]
fn a_split_used_in_place_of_an_evaluation_split_is_reported() {
    let told = |folder: &Folder, default_split: &str| {
        let warnings = Warnings::default();
        tracing::subscriber::with_default(warnings.clone(), || open(folder, "", default_split).unwrap());
        folder.short(warnings.0.lock().unwrap())
    };
    let bare = Folder::new(&[("rows.jsonl", b"{\"a\":1}\n")]);
    let warning = told(&bare, "eval");
    assert!(warning.contains("has no evaluation split (\"eval\"): all its rows are used"), "{warning}");
    assert_eq!(told(&bare, "train"), "");
    assert_eq!(told(&splits(), "eval"), "");
}

#[test]
fn a_link_to_a_file_of_the_same_folder_adds_no_rows() {
    let folder = Folder::new(&[("data/train-1.jsonl", b"{\"a\":1}\n"), ("more.jsonl", b"{\"a\":2}\n")]);
    let link = |to: &str, name: &str| std::os::unix::fs::symlink(to, folder.path(name)).unwrap();
    link("train-1.jsonl", "data/train-2.jsonl");
    assert_eq!(open(&folder, "data", "train").unwrap(), [row(1)]);
    assert_eq!(open(&folder, "data/*.jsonl", "train").unwrap(), [row(1)]);
    // A link to a file elsewhere adds its rows.
    link("../more.jsonl", "data/train-3.jsonl");
    assert_eq!(open(&folder, "data", "train").unwrap().len(), 2);
}

#[test]
fn a_folder_is_read_once_by_whatever_links() {
    let folder = Folder::new(&[("data/a/train.jsonl", b"{\"a\":1}\n"), ("train.jsonl", b"{\"a\":2}\n")]);
    let link = |to: &str, name: &str| std::os::unix::fs::symlink(to, folder.path(name)).unwrap();
    link(".", "data/loop");
    link("a", "data/b");
    link("../..", "data/a/above");
    assert_eq!(open(&folder, "data", "train").unwrap(), [row(1)]);
    // Links to folders elsewhere are followed, like links to files.
    link("../data/a", "data/c");
    std::fs::create_dir(folder.path("other")).unwrap();
    link("../data/a", "other/there");
    assert_eq!(open(&folder, "other", "train").unwrap(), [row(1)]);
}
