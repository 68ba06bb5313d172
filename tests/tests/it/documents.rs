//! Checks of the documents: the README's two commands, their use in CI, links, and no private paths.

use std::iter;

use candlewick_model::{Family, GgufExport};
use suite::{read, root, tracked_files};
use trainer::estimate::Category;
use trainer::recipe::{MISSING_FEATURES, MissingFeature};

/// Returns the fenced code blocks of one language in a Markdown text.
fn blocks<'a>(markdown: &'a str, language: &str) -> Vec<&'a str> {
    let opening = format!("```{language}\n");
    markdown.split(&opening).skip(1).map(|rest| rest.split("\n```").next().unwrap()).collect()
}

#[test]
fn the_readme_starts_with_one_line_to_run_and_one_to_test() {
    let readme = read("README.md");
    let blocks = blocks(&readme, "sh");
    assert_eq!(blocks[0], "cargo run --release --bin trainer -- train recipes/quickstart.yaml");
    assert_eq!(blocks[1], "cargo test --workspace --locked");
}

/// Checks that the README has this table below this heading.
#[track_caller]
fn the_readme_has_a_table(heading: &str, rows: &[String]) {
    let readme = read("README.md");
    let section = readme.split(&format!("\n## {heading}\n")).nth(1).unwrap().split("\n## ").next().unwrap();
    let table = rows.join("\n");
    assert!(section.contains(&table), "README.md, section {heading}, needs this table:\n{table}");
}

#[test]
fn the_readme_lists_the_model_families() {
    let row = |family: &Family| {
        let is = |yes: bool| if yes { "yes" } else { "no" };
        let experts = if family.has_experts() { "mixture" } else { "dense" };
        format!("| {} | {} | {experts} | {} |", family.title(), family.examples(), is(GgufExport::has_family(*family)))
    };
    let head = ["| family | for example | layers | GGUF export |", "|---|---|---|---|"].map(str::to_owned);
    let missing: Vec<_> = Family::missing().collect();
    let labels = ["missing so far |"].into_iter().chain(iter::repeat("|"));
    let missing = missing.chunks(7).zip(labels).map(|(names, label)| format!("| {label} {} | | |", names.join(", ")));
    let missing: Vec<String> = missing.collect();
    the_readme_has_a_table("Models", &[head.to_vec(), Family::ALL.iter().map(row).collect(), missing].concat());
}

#[test]
fn the_readme_lists_the_missing_features() {
    let row = |feature: &MissingFeature| format!("| {} | {} |", feature.name, feature.instead);
    let head = ["| missing | use |", "|---|---|"].map(str::to_owned);
    the_readme_has_a_table("Missing so far", &[head.to_vec(), MISSING_FEATURES.iter().map(row).collect()].concat());
}

#[test]
fn ci_runs_the_readmes_test_command() {
    assert!(read(".ci/run").contains("exec scripts/check"));
    let check = read("scripts/check");
    assert!(check.contains("test_command=$(sh_block 2)") && check.contains("run \"$test_command$mpi\""));
    // Where an MPI is installed, CI adds one feature.
    assert!(check.contains("mpi=\" --features suite/mpi\""));
    assert!(!check.contains("cargo test") && !check.contains("nextest"), "scripts/check has a test command of its own");
}

#[test]
fn links_between_documents_lead_somewhere() {
    for path in tracked_files().iter().filter(|path| path.extension().is_some_and(|e| e == "md")) {
        let folder = path.parent().unwrap();
        for link in read(path).split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let (target, anchor) = link.split_once('#').unwrap_or((link, ""));
            let file = suite::root().join(if target.is_empty() { path.clone() } else { folder.join(target) });
            let is_local = !target.contains("://");
            assert!(!is_local || file.exists(), "{} links to {link}, which does not exist", path.display());
            let is_heading = || headings(&std::fs::read_to_string(&file).unwrap()).any(|heading| heading == anchor);
            let names_heading = is_local && !anchor.is_empty() && file.extension().is_some_and(|e| e == "md");
            assert!(!names_heading || is_heading(), "{} links to {link}, which has no such heading", path.display());
        }
    }
}

/// Returns the names of a page's headings in links, as GitHub makes them from different headings.
fn headings(page: &str) -> impl Iterator<Item = String> {
    let outside_of_code = page.split("```").step_by(2).flat_map(str::lines);
    let headings = outside_of_code.filter(|line| line.starts_with('#'));
    let is_kept = |c: &char| c.is_alphanumeric() || ['-', '_', ' '].contains(c);
    headings.map(move |line| {
        line.trim_start_matches('#').trim().to_lowercase().chars().filter(is_kept).collect::<String>().replace(' ', "-")
    })
}

#[test]
fn the_memory_page_explains_every_class_of_the_estimate() {
    let page = read("docs/memory.md");
    for category in Category::ALL {
        let row = format!("\n| {} | ", category.name());
        assert!(page.contains(&row), "docs/memory.md does not explain {}", category.name());
    }
}

/// Committed files must not name paths of a private machine.
#[test]
fn no_file_names_a_private_path() {
    // Each word is in two halves, so that this file passes its own test.
    let private = ["/ro,ot/", "/ho,me/", "/Us,ers/", "/wo,rk/", "/tmp/pl,an", "candlewick-as,sets", "ref,env"];
    let private: Vec<_> = private.iter().map(|halves| halves.replace(',', "")).collect();
    for path in tracked_files() {
        let Ok(text) = String::from_utf8(std::fs::read(suite::root().join(&path)).unwrap()) else { continue };
        for (i, line) in text.lines().enumerate() {
            for word in &private {
                assert!(!line.contains(word.as_str()), "{}:{} names {word}", path.display(), i + 1);
            }
        }
    }
}

/// No crate runs doc tests, so an example in a doc comment would never be compiled.
#[test]
fn doc_comments_have_no_rust_examples() {
    let sources = tracked_files().into_iter().filter(|path| path.extension().is_some_and(|e| e == "rs"));
    for path in sources {
        let text = read(&path);
        let lines = text.lines().map(|line| line.trim_start_matches([' ', '/', '!']));
        let fences: Vec<_> = lines.filter(|line| line.starts_with("```")).step_by(2).collect();
        assert!(fences.iter().all(|fence| ["```text", "```sh"].contains(fence)), "{}: {fences:?}", path.display());
    }
}

/// Without this check, a renamed test would silently join the quick profile.
#[test]
fn every_test_that_the_quick_profile_skips_exists() {
    let config = read(".config/nextest.toml");
    let names: Vec<_> = config.split("test(/\\b").skip(1).map(|rest| rest.split(['$', '/']).next().unwrap()).collect();
    assert!(names.len() > 20, "{names:?}");
    let sources: Vec<_> = tracked_files().into_iter().filter(|p| p.extension().is_some_and(|e| e == "rs")).collect();
    let sources: Vec<_> = sources.iter().map(read).collect();
    for name in names {
        assert!(sources.iter().any(|text| text.contains(&format!("fn {name}"))), "no test is named {name}");
    }
}

/// A hop is a list item that begins with a file and a function of it.
#[test]
fn every_hop_of_a_training_step_names_a_function_in_its_file() {
    let page = read("docs/ARCHITECTURE.md");
    let section = page.split("\n## ").find(|section| section.starts_with("The path of a training step")).unwrap();
    let numbered =
        section.lines().filter_map(|line| line.split_once(". `")).filter(|(n, _)| n.parse::<usize>().is_ok());
    let hops: Vec<_> = numbered.map(|(_, rest)| rest.split('`').next().unwrap()).collect();
    assert!((10..=15).contains(&hops.len()), "{hops:?}");
    for hop in hops {
        let (file, function) = hop.split_once(':').unwrap_or_else(|| panic!("`{hop}` is not `file:function`"));
        assert!(suite::root().join(file).is_file(), "{file} does not exist");
        let code = suite::code_of(file.as_ref());
        let declares = |rest: &str| rest.starts_with(['(', '<']);
        let is_defined = code.split(&format!("fn {function}")).skip(1).any(declares);
        assert!(is_defined, "{file} defines no function {function}");
    }
}

/// scripts/make-pictures writes the pictures of the README.
#[test]
fn the_pictures_of_the_readme_are_there_and_a_script_makes_them() {
    let (readme, script) = (read("README.md"), read("scripts/make-pictures"));
    let pictures: Vec<&str> = readme.split("](docs/").skip(1).filter_map(|rest| rest.split(')').next()).collect();
    let pictures = pictures.iter().filter(|name| name.ends_with(".svg") || name.ends_with(".png"));
    let found: Vec<_> =
        pictures.map(|name| (name, root().join("docs").join(name).metadata().map(|file| file.len()))).collect();
    assert_eq!(found.len(), 2, "{found:?}");
    for (name, len) in found {
        assert!(len.is_ok_and(|len| (1_000..300_000).contains(&len)), "docs/{name} is missing or large");
        assert!(script.contains(*name), "scripts/make-pictures does not write docs/{name}");
    }
}
