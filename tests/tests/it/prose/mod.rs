//! The prose test: reads every document, doc comment, comment, message and test name, and holds them to the rules of
//! CONTRIBUTING.md. `rules` has the lists, `text` finds the passages.

mod rules;
mod text;

use std::path::Path;

use rules::{ALLOWED, BANNED, EXCEPTIONS, FORBIDDEN_OPENINGS, MAX_WORDS};
use suite::{read, tracked_files};
use text::{Kind, Passage, of_markdown, of_script, of_source, sentences};

/// Returns the passages of a file, or none for a file of another kind.
fn passages(path: &Path) -> Vec<Passage> {
    let extension = path.extension().unwrap_or_default().to_str().unwrap_or_default();
    let is_test = path
        .components()
        .any(|part| ["tests", "benches", "fixtures"].contains(&part.as_os_str().to_str().unwrap_or_default()));
    match extension {
        // The lists of this test name what they ban.
        _ if path.ends_with("prose/rules.rs") => Vec::new(),
        "rs" | "cu" | "cuh" | "h" | "cpp" => of_source(&read(path), is_test),
        "md" => of_markdown(&read(path)),
        "py" | "yaml" | "slurm" | "toml" => of_script(&read(path)),
        "" if path.starts_with("scripts") || path.starts_with(".ci") => of_script(&read(path)),
        _ => Vec::new(),
    }
}

/// Lower-case words without the punctuation around them. A code span is one word.
fn words(text: &str) -> Vec<String> {
    let plain = sentences(text).join(" ").to_lowercase();
    plain
        .split(|c: char| !c.is_alphanumeric() && c != '_' && c != '\'')
        .filter(|w| !w.is_empty())
        .map(str::to_owned)
        .collect()
}

/// Finds a phrase of whole words in a passage's words.
fn contains(words: &[String], phrase: &str) -> bool {
    let phrase: Vec<_> = phrase.split(' ').collect();
    words.windows(phrase.len()).any(|window| window.iter().zip(&phrase).all(|(a, b)| a == b))
}

/// Returns what a passage violates.
fn findings(passage: &Passage) -> Vec<String> {
    let mut found = Vec::new();
    let mut spaced = format!(" {} ", words(&passage.text).join(" "));
    if passage.kind == Kind::DocComment {
        for opening in FORBIDDEN_OPENINGS.iter().filter(|opening| spaced.starts_with(&format!(" {opening} "))) {
            found.push(format!("begins with \"{opening}\""));
        }
    }
    for allowed in ALLOWED {
        spaced = spaced.replace(&format!(" {allowed} "), " TERM ");
    }
    let words: Vec<_> = spaced.split_whitespace().map(str::to_owned).collect();
    for (phrases, instead) in BANNED {
        for phrase in phrases.split('|').filter(|phrase| contains(&words, phrase)) {
            found.push(format!("has \"{phrase}\" (better: {instead})"));
        }
    }
    if matches!(passage.kind, Kind::DocComment | Kind::Paragraph) {
        for sentence in sentences(&passage.text) {
            let n = sentence.split_whitespace().filter(|word| word.contains(char::is_alphanumeric)).count();
            if n > MAX_WORDS {
                found.push(format!("has a sentence of {n} words (at most {MAX_WORDS}): {sentence}"));
            }
        }
    }
    found
}

fn is_excepted(path: &Path, passage: &Passage) -> bool {
    EXCEPTIONS.iter().any(|(file, excerpt)| path == Path::new(file) && passage.text.contains(excerpt))
}

#[test]
fn prose_follows_the_rules() {
    let mut report = Vec::new();
    let (mut n_passages, mut n_excepted) = (0, 0);
    for path in tracked_files() {
        for passage in passages(&path) {
            n_passages += 1;
            let found = findings(&passage);
            if !found.is_empty() && is_excepted(&path, &passage) {
                n_excepted += 1;
                continue;
            }
            report.extend(found.iter().map(|f| format!("{}:{}: {:?} {f}", path.display(), passage.line, passage.kind)));
        }
    }
    assert!(report.is_empty(), "{} findings in {n_passages} passages:\n{}", report.len(), report.join("\n"));
    assert!(n_passages > 10_000, "only {n_passages} passages were found");
    assert!(50 * n_excepted <= n_passages, "{n_excepted} of {n_passages} passages are exceptions");
}

#[test]
fn every_exception_is_still_needed() {
    for (file, excerpt) in EXCEPTIONS {
        let is_needed = passages(Path::new(file)).iter().any(|p| p.text.contains(excerpt) && !findings(p).is_empty());
        assert!(is_needed, "{file} no longer needs an exception for {excerpt:?}");
    }
}

/// Checks the findings of one passage of a kind.
fn check(kind: Kind, text: &str, expected: &[&str]) {
    let found = findings(&Passage { kind, line: 1, text: text.to_owned() });
    assert_eq!(found.len(), expected.len(), "{text}: {found:?}");
    for (found, expected) in found.iter().zip(expected) {
        assert!(found.contains(expected), "{found} does not contain {expected}");
    }
}

#[test]
fn a_passage_is_held_to_the_rules_of_its_kind() {
    check(Kind::DocComment, "Returns the shard.", &[]);
    check(Kind::DocComment, "What the shard holds.", &["what"]);
    check(Kind::Comment, "What the shard holds.", &[]);
    check(Kind::Message, "the rank behind has no room", &["room", "behind"]);
    check(Kind::Message, "the dot product", &[]);
    check(Kind::TestName, "a rank is told", &["told"]);
    let long = "word ".repeat(MAX_WORDS + 1);
    check(Kind::Paragraph, &long, &["words"]);
    check(Kind::Comment, &long, &[]);
    check(Kind::Paragraph, &format!("{}; {long}", &long[..50]), &["words"]);
    check(Kind::Paragraph, "`told` is code", &[]);
}

#[test]
fn passages_of_a_source_file_are_found() {
    let source = "//! A module.\n//! Two lines.\n\n/// First.\n///\n/// Second.\nfn f() { g('\"', \"a message here\"); } // note\n#[test]\nfn a_b() {}\n";
    let found: Vec<_> = of_source(source, false).into_iter().map(|p| (p.kind, p.line, p.text)).collect();
    let expected = [
        (Kind::DocComment, 1, "A module.\nTwo lines."),
        (Kind::DocComment, 4, "First."),
        (Kind::DocComment, 6, "Second."),
        (Kind::Message, 7, "a message here"),
        (Kind::Comment, 7, "note"),
        (Kind::TestName, 9, "a b"),
    ];
    assert_eq!(found.len(), expected.len(), "{found:?}");
    for ((kind, line, text), expected) in found.iter().zip(expected) {
        assert_eq!((*kind, *line, text.as_str()), expected);
    }
}
