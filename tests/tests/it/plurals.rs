//! Counts of one in expected outputs: `1 row`, never `1 rows`. `candlewick_text::quantity::counted` writes them.

use suite::{read, tracked_files};

/// Nouns that messages count, in the plural.
const NOUNS: &[&str] = &[
    "answers",
    "batches",
    "blocks",
    "bytes",
    "chats",
    "checkpoints",
    "columns",
    "documents",
    "entries",
    "epochs",
    "errors",
    "evaluations",
    "examples",
    "experts",
    "files",
    "folders",
    "layers",
    "lines",
    "messages",
    "micro-batches",
    "models",
    "nodes",
    "parameters",
    "processes",
    "prompts",
    "questions",
    "ranks",
    "requests",
    "rows",
    "samples",
    "sequences",
    "steps",
    "targets",
    "tasks",
    "tensors",
    "texts",
    "threads",
    "tokens",
    "warnings",
    "workers",
];

/// Tests of messages for developers and of lists, and a test that forbids such a count.
const ALLOWED: &[&str] = &[
    "candle-ext/comm/tests/it/threads.rs",
    "candle-ext/ops/tests/it/set_rows.rs",
    "trainer/tests/it/plan_rules/moe.rs",
    "trainer/tests/it/results.rs",
];

/// Returns the counts of one with a noun in the plural.
fn wrong_counts(line: &str) -> Vec<String> {
    let ones = line.match_indices("1 ").filter(|(at, _)| {
        let before = line[..*at].chars().next_back();
        before.is_none_or(|c| !c.is_alphanumeric() && !['.', ',', '-', '_', '/', '\'', '='].contains(&c))
    });
    let noun = |(at, _): (usize, &str)| {
        let rest = &line[at + 2..];
        let end = rest.find(|c: char| !c.is_alphabetic() && c != '-').unwrap_or(rest.len());
        NOUNS.contains(&&rest[..end]).then(|| format!("1 {}", &rest[..end]))
    };
    ones.filter_map(noun).collect()
}

#[test]
fn no_expected_output_counts_one_in_the_plural() {
    let is_expectation = |path: &std::path::PathBuf| {
        let extension = path.extension().and_then(|e| e.to_str()).unwrap_or_default();
        let is_test = path.components().any(|part| part.as_os_str() == "tests");
        (extension == "rs" && is_test) || ["snap", "md"].contains(&extension)
    };
    let mut found = Vec::new();
    let files = tracked_files().into_iter().filter(is_expectation);
    for path in
        files.filter(|path| !ALLOWED.iter().any(|allowed| path.ends_with(allowed)) && !path.ends_with("it/plurals.rs"))
    {
        for (idx, line) in read(&path).lines().enumerate() {
            found.extend(wrong_counts(line).iter().map(|count| format!("{}:{}: {count}", path.display(), idx + 1)));
        }
    }
    assert!(found.is_empty(), "write counts with `counted`:\n{}", found.join("\n"));
}

#[test]
fn a_count_of_one_is_recognised() {
    for (line, want) in [
        ("it has 1 rows", vec!["1 rows"]),
        ("\"1 micro-batches;", vec!["1 micro-batches"]),
        ("1 row, 11 rows, 2.1 rows, top-1 experts, at least 1 of the rows", vec![]),
    ] {
        assert_eq!(wrong_counts(line), want, "{line}");
    }
}
