//! Files of a crate depend on each other in one direction only, and so do its folders.
//!
//! A file depends on another file of its crate if its code, without tests, names an item that the other defines. The name is
//! in a `use`, or in a path that begins with `crate`, `self`, `super`, a child module or an imported name. A re-export counts
//! as the file that defines the item. A parent that only declares and re-exports its children therefore depends on none of
//! them. A child that names a sibling through its parent depends on the sibling. A parent and a child that name each other's
//! items are a cycle of two: move those items to a file of their own.
//!
//! In each folder, a module is a file, with the folder of its children, or a folder. Modules of a folder form no circle either,
//! although each file of it may be in none.

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
        writeln!(report, "{}:\n{}", cycle.modules.join(" "), cycle.imports).unwrap();
    }
    report
}

#[test]
fn files_of_a_crate_do_not_import_each_other_in_a_circle() {
    let found: Vec<Cycle> = roots().iter().flat_map(|root| CrateFiles::of(root).file_cycles()).collect();
    assert!(found.is_empty(), "circles:\n{}", report(&found));
}

/// Folders whose modules, one of each pair, still import each other in a circle.
const FOLDER_CIRCLES: &[(&str, &str)] = &[
    ("candle-ext/comm/src/error", "errors of the store and of transports, which liveness watches"),
    ("candle-ext/comm/src/threads", "a world opens threads, and threads are a world"),
    ("candle-ext/launch/src/report", "the exits of workers, and the tails of their logs"),
    ("candle-ext/model/src/", "layers, their specs, adapters and parameter names"),
    ("candle-ext/ops/src/", "linear layers, FP8, experts and the kernels of both"),
    ("candle-ext/runtime/src/progress", "progress bars and the lines that they must not cover"),
    ("candle-ext/text/src/template", "a chat template tokenizes, and a tokenizer has a template"),
    ("evaluator/src/task/builtin", "tasks in code use filters and metrics, which run tasks' code"),
    ("trainer/src/data", "a missing file's error names the recipe that ships it"),
];

#[test]
fn folders_of_a_crate_do_not_import_each_other_in_a_circle() {
    let mut found: Vec<Cycle> = roots().iter().flat_map(|root| CrateFiles::of(root).folder_cycles()).collect();
    let is_known = |cycle: &Cycle, known: &str| {
        cycle.modules.iter().any(|module| match known.ends_with('/') {
            true => module.starts_with(known),
            false => module == known,
        })
    };
    for (known, _) in FOLDER_CIRCLES {
        assert!(found.iter().any(|cycle| is_known(cycle, known)), "no circle of {known}: remove it from the list");
    }
    found.retain(|cycle| !FOLDER_CIRCLES.iter().any(|(known, _)| is_known(cycle, known)));
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
    let found: Vec<_> = sources(files).file_cycles().into_iter().map(|cycle| cycle.modules).collect();
    assert_eq!(found, want);
}

#[test]
fn folders_in_a_circle_are_found() {
    let root = ("src/lib.rs", "mod a; mod b; mod c;");
    let a = [("src/a/mod.rs", "mod one; mod two;"), ("src/a/one.rs", "use crate::b::B;"), ("src/a/two.rs", "")];
    let folders = |files: &[(&str, &str)]| -> Vec<_> {
        let all: Vec<_> = [root].iter().chain(&a).chain(files).copied().collect();
        sources(&all).folder_cycles().into_iter().map(|cycle| cycle.modules).collect()
    };
    let uses_two = "use crate::a::two::T;";
    assert_eq!(folders(&[("src/b.rs", uses_two), ("src/c.rs", "")]), [["src/a", "src/b"]]);
    assert_eq!(folders(&[("src/b.rs", "use crate::c::C;"), ("src/c.rs", uses_two)]), [["src/a", "src/b", "src/c"]]);
    let child = [("src/b.rs", "mod child;"), ("src/b/child.rs", uses_two), ("src/c.rs", "")];
    assert_eq!(folders(&child), [["src/a", "src/b"]], "a file and the folder of its children are one module");
    assert_eq!(folders(&[("src/b.rs", ""), ("src/c.rs", uses_two)]), [[""; 2]; 0]);
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
