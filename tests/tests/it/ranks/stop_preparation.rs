//! A signal while the data are read or tokenized.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::{Signal, WaitId, WaitIdOptions, waitid};
use suite::{program, root};

use super::run::{TrainerProcesses, TrainerRun};

/// Returns the entries of a folder whose names end so.
fn entries(folder: &Path, ending: &str) -> Vec<PathBuf> {
    let paths = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    paths.filter(|path| path.to_str().is_some_and(|path| path.ends_with(ending))).collect()
}

/// The failpoint of the third chunk of tokenized rows, at which a process pauses. Earlier chunks are written.
#[cfg(debug_assertions)]
const PAUSE_AT: (&str, &str) = ("CANDLEWICK_TEST_PAUSE_AT", "rows_rendered:2");

/// Sends a signal to some processes once the first one has paused at [`PAUSE_AT`], and lets that one continue.
#[cfg(debug_assertions)]
#[track_caller]
fn signal_paused(processes: &TrainerProcesses, ranks: Range<usize>, signal: Signal) {
    let ends_or_pauses = WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    let status = waitid(WaitId::Pid(processes.pid(0)), ends_or_pauses).unwrap();
    assert!(status.is_some_and(|status| status.stopped()), "the process ended before its third chunk of rows");
    ranks.for_each(|rank| processes.signal(rank, signal));
    processes.signal(0, Signal::CONT);
}

fn write_rows(path: &Path, n_rows: usize) {
    let row = |i: usize| {
        let answer = format!("The number after {i} is {}. ", i + 1).repeat(8);
        let messages = serde_json::json!([
            {"role": "user", "content": format!("What comes after {i}?")},
            {"role": "assistant", "content": answer.trim()},
        ]);
        serde_json::json!({ "messages": messages }).to_string() + "\n"
    };
    fs::write(path, (0..n_rows).map(row).collect::<String>()).unwrap();
}

/// Returns the sorted checksums of the finished entries of a cache.
fn checksums(cache: &Path) -> Vec<String> {
    let entries = entries(cache, "").into_iter().map(|entry| entry.join("checksum"));
    let mut checksums: Vec<String> = entries.filter_map(|path| fs::read_to_string(path).ok()).collect();
    checksums.sort();
    checksums
}

/// Checks that a signal to the first `n_signals` ranks while the data are tokenized ends all, and that the next run continues.
#[cfg(debug_assertions)]
#[track_caller]
fn check(n_ranks: usize, n_signals: usize) {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("rows.jsonl");
    write_rows(&data, 10_000);
    let sources = format!("data.sources=[{}]", data.display());
    let arguments = [sources.as_str(), "data.max_length=256", "data.num_proc=1", "eval_interval=0"];
    let run = TrainerRun::new(&folder.path().join("run"), n_ranks, &arguments);
    let cache = run.folder.join("cache");
    let store = candlewick_comm::store::Server::bind("127.0.0.1:0").unwrap();
    let ranks = TrainerProcesses::of((0..n_ranks).map(|rank| {
        let mut command = run.rank(rank, store.port(), true);
        command.env(PAUSE_AT.0, PAUSE_AT.1);
        command
    }));
    signal_paused(&ranks, 0..n_signals, Signal::TERM);
    for (status, stderr) in ranks.wait_within(Duration::from_secs(180)) {
        assert_eq!(status.code(), Some(75), "{stderr}");
    }
    // The ranks have not waited until all rows were tokenized.
    assert_eq!(entries(&cache, ".partial").len(), 1);
    assert_eq!(entries(&cache, ".incomplete").len(), 0);
    let report = fs::read_to_string(run.folder.join("run.json")).unwrap();
    assert!(report.contains("stopped by SIGTERM while the data were prepared"), "{report}");

    run.finish();
    assert_eq!(entries(&cache, ".partial").len(), 0);
    let report = fs::read_to_string(run.folder.join("run.json")).unwrap();
    assert!(report.contains("which a stopped run has tokenized"), "{report}");
    // The entry equals that of a run that was not stopped.
    let other = TrainerRun::new(&folder.path().join("other"), 1, &arguments);
    other.finish();
    assert_eq!(checksums(&cache).len(), 2, "the training data and the evaluation data");
    assert_eq!(checksums(&cache), checksums(&other.folder.join("cache")));
}

/// Returns the rows of two sources as a recipe's `data.sources`. Only the second source has a third chunk of 1,024 rows.
#[cfg(debug_assertions)]
fn write_two_sources(folder: &Path) -> String {
    let (first, second) = (folder.join("first.jsonl"), folder.join("second.jsonl"));
    write_rows(&first, 100);
    write_rows(&second, 3_000);
    format!("data.sources=[{},{}]", first.display(), second.display())
}

/// The failpoint of the third chunk that is read for a source's hash.
#[cfg(debug_assertions)]
const TERMINATE_AT: (&str, &str) = ("CANDLEWICK_TEST_TERMINATE_AT", "rows_read:2");

/// Checks that the first source is cached, and nothing of the second.
#[cfg(debug_assertions)]
#[track_caller]
fn has_only_the_first_source(cache: &Path) {
    assert_eq!(checksums(cache).len(), 1);
    assert_eq!(entries(cache, ".partial").len() + entries(cache, ".incomplete").len(), 0);
}

/// Checks that SIGTERM while the second source is read keeps the tokens of the first one.
#[cfg(debug_assertions)]
#[track_caller]
fn check_read(n_ranks: usize) {
    let folder = tempfile::tempdir().unwrap();
    let sources = write_two_sources(folder.path());
    let arguments = [sources.as_str(), "data.max_length=256", "eval_interval=0"];
    let run = TrainerRun::new(&folder.path().join("run"), n_ranks, &arguments);
    let cache = run.folder.join("cache");
    let store = candlewick_comm::store::Server::bind("127.0.0.1:0").unwrap();
    let ranks = (0..n_ranks).map(|rank| {
        let mut command = run.rank(rank, store.port(), true);
        command.env(TERMINATE_AT.0, TERMINATE_AT.1);
        command
    });
    for (status, stderr) in TrainerProcesses::of(ranks).wait_within(Duration::from_secs(180)) {
        assert_eq!(status.code(), Some(75), "{stderr}");
    }
    has_only_the_first_source(&cache);
    let report = fs::read_to_string(run.folder.join("run.json")).unwrap();
    assert!(report.contains("stopped by SIGTERM while the data were prepared"), "{report}");

    run.finish();
    let report = fs::read_to_string(run.folder.join("run.json")).unwrap();
    assert!(report.contains("first.jsonl: tokens from the cache"), "{report}");
    assert!(!report.contains("second.jsonl: tokens from the cache"), "{report}");
    let other = TrainerRun::new(&folder.path().join("other"), 1, &arguments);
    other.finish();
    assert_eq!(checksums(&cache).len(), 3, "the training data and the evaluation data");
    assert_eq!(checksums(&cache), checksums(&other.folder.join("cache")));
}

/// Release builds have no failpoints.
#[cfg(debug_assertions)]
#[test]
fn a_signal_while_rows_are_read_keeps_the_tokens_of_finished_sources() {
    check_read(1);
}

#[cfg(debug_assertions)]
#[test]
fn a_signal_to_a_rank_that_reads_rows_ends_all_ranks_with_the_code_of_preemption() {
    check_read(2);
}

#[cfg(debug_assertions)]
#[test]
fn a_signal_to_preprocess_while_rows_are_read_keeps_the_tokens_of_finished_sources() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("cache");
    let mut command = Command::new(program("trainer"));
    command.args(["preprocess", "tests/golden/llama.yaml", "data.max_length=256"]);
    command.arg(write_two_sources(folder.path())).arg(format!("data.cache_dir={}", cache.display()));
    command.current_dir(root()).env(TERMINATE_AT.0, TERMINATE_AT.1).stdout(Stdio::null()).stderr(Stdio::piped());
    for (status, stderr) in TrainerProcesses::of([command]).wait_within(Duration::from_secs(180)) {
        assert_eq!(status.code(), Some(75), "{stderr}");
        assert!(stderr.contains("the tokens of finished sources are cached"), "{stderr}");
    }
    has_only_the_first_source(&cache);
}

#[cfg(debug_assertions)]
#[test]
fn a_signal_while_data_are_tokenized_keeps_the_finished_rows() {
    check(1, 1);
}

#[cfg(debug_assertions)]
#[test]
fn a_signal_to_all_ranks_while_data_are_tokenized_ends_all_with_the_code_of_preemption() {
    check(2, 2);
}

#[cfg(debug_assertions)]
#[test]
fn a_signal_to_the_rank_that_tokenizes_ends_all_ranks() {
    check(2, 1);
}

#[cfg(debug_assertions)]
#[test]
fn a_signal_to_preprocess_keeps_the_finished_rows() {
    let folder = tempfile::tempdir().unwrap();
    let (data, cache) = (folder.path().join("rows.jsonl"), folder.path().join("cache"));
    write_rows(&data, 10_000);
    let mut command = Command::new(program("trainer"));
    command.args(["preprocess", "tests/golden/llama.yaml", "data.num_proc=1", "data.max_length=256"]);
    command.arg(format!("data.sources=[{}]", data.display())).arg(format!("data.cache_dir={}", cache.display()));
    command.current_dir(root()).env(PAUSE_AT.0, PAUSE_AT.1).stdout(Stdio::null()).stderr(Stdio::piped());
    let process = TrainerProcesses::of([command]);
    signal_paused(&process, 0..1, Signal::INT);
    for (status, stderr) in process.wait_within(Duration::from_secs(180)) {
        assert_eq!(status.code(), Some(75), "{stderr}");
        assert!(stderr.contains("stopped by a signal") && stderr.contains("are tokenized and cached"), "{stderr}");
    }
    assert_eq!(entries(&cache, ".partial").len(), 1);
}
