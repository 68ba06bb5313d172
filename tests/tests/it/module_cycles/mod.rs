//! Files of a crate depend on each other in one direction only.
//!
//! A file depends on another file of its crate if its code, without tests, names an item that the other defines. The name is
//! in a `use`, or in a path that begins with `crate`, `self`, `super`, a child module or an imported name. A re-export counts
//! as the file that defines the item. A parent that only declares and re-exports its children therefore depends on none of
//! them. A child that names a sibling through its parent depends on the sibling. A parent and a child that name each other's
//! items are a cycle of two: move those items to a file of their own.

mod crate_files;
mod source;

use std::fmt::Write;
use std::path::PathBuf;

use crate_files::{CrateFiles, Cycle};
use suite::rust_files;

/// Returns the root files of the library and binary crates.
fn roots() -> Vec<PathBuf> {
    let folders = ["candle-ext", "trainer/src", "evaluator/src", "tests/src"];
    let files = folders.iter().flat_map(|folder| rust_files(folder));
    files.filter(|path| path.ends_with("src/lib.rs") || path.ends_with("src/main.rs")).collect()
}

fn report(cycles: &[Cycle]) -> String {
    let mut report = String::new();
    for cycle in cycles {
        writeln!(report, "{} files from {}:\n{}", cycle.files.len(), cycle.files[0], cycle.imports).unwrap();
    }
    report
}

#[test]
fn files_of_a_crate_do_not_import_each_other_in_a_circle() {
    let found: Vec<Cycle> = roots().iter().flat_map(|root| CrateFiles::of(root).cycles()).collect();
    assert!(found.is_empty(), "circles:\n{}", report(&found));
}

fn sources(files: &[(&str, &str)]) -> CrateFiles {
    CrateFiles::read("src/lib.rs".into(), &|path| {
        let file = files.iter().find(|(name, _)| path == std::path::Path::new(name));
        file.map(|(_, text)| (*text).to_owned())
    })
}

/// Checks the files of the circles of a crate.
#[track_caller]
fn check(files: &[(&str, &str)], want: &[&[&str]]) {
    let found: Vec<_> = sources(files).cycles().into_iter().map(|cycle| cycle.files).collect();
    assert_eq!(found, want);
}

#[test]
fn imports_in_a_circle_are_found() {
    let root = ("src/lib.rs", "mod a; mod b; mod c;");
    let both: &[&[&str]] = &[&["src/a.rs", "src/b.rs"]];
    check(&[root, ("src/a.rs", "use crate::b::B;"), ("src/b.rs", "fn f() { crate::a::f() }"), ("src/c.rs", "")], both);
    check(
        &[
            root,
            ("src/a.rs", "use super::{b::{self}, c};  fn f() { b::g() }"),
            ("src/b.rs", "use crate::a::*;"),
            ("src/c.rs", ""),
        ],
        &[],
    );
    check(
        &[root, ("src/a.rs", "use crate::b::B;"), ("src/b.rs", "use crate::c::C;"), ("src/c.rs", "use crate::a::A;")],
        &[&["src/a.rs", "src/b.rs", "src/c.rs"]],
    );
}

#[test]
fn a_reexport_stands_for_the_file_that_defines_the_item() {
    let root = ("src/lib.rs", "mod a; mod b; pub use a::A; pub use b::B;");
    check(&[root, ("src/a.rs", "use crate::B;"), ("src/b.rs", "")], &[]);
    check(&[root, ("src/a.rs", "use crate::B;"), ("src/b.rs", "use crate::A;")], &[&["src/a.rs", "src/b.rs"]]);
    let root = ("src/lib.rs", "mod a; pub use a::A; struct Own(A);");
    check(&[root, ("src/a.rs", "use super::Own;")], &[&["src/a.rs", "src/lib.rs"]]);
}

#[test]
fn tests_comments_and_literals_import_nothing() {
    let root = ("src/lib.rs", "mod a; mod b;");
    let a = "use crate::b::B; fn f<'a>() { '\"'; b\"x\"; r#\" \" \"# }";
    let b =
        "// crate::a::A\n/* crate::a::A */ fn f() { \"crate::a::A\" }\n#[cfg(test)]\nmod tests { use crate::a::A; }";
    check(&[root, ("src/a.rs", a), ("src/b.rs", b)], &[]);
    let after_tests = format!("{b} fn g() {{ crate::a::g() }}");
    check(&[root, ("src/a.rs", a), ("src/b.rs", &after_tests)], &[&["src/a.rs", "src/b.rs"]]);
}
