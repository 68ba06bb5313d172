//! A signal while the data are read or tokenized.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use suite::{program, root};

use super::run::{TrainerProcesses, TrainerRun, until};

/// Returns the entries of a folder whose names end so.
fn entries(folder: &Path, ending: &str) -> Vec<PathBuf> {
    let paths = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    paths.filter(|path| path.to_str().is_some_and(|path| path.ends_with(ending))).collect()
}

/// Returns true once the first tokens are written.
fn has_first_tokens(cache: &Path) -> bool {
    entries(cache, ".incomplete").iter().any(|entry| fs::metadata(entry.join("ids")).is_ok_and(|ids| ids.len() > 0))
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

/// Checks that a signal to `rank` while the data are tokenized ends all ranks, and that the next run continues.
#[track_caller]
fn check(n_ranks: usize, rank: usize) {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("rows.jsonl");
    write_rows(&data, 40_000);
    let sources = format!("data.sources=[{}]", data.display());
    let arguments = [sources.as_str(), "data.max_length=256", "data.num_proc=1", "eval_interval=0"];
    let run = TrainerRun::new(&folder.path().join("run"), n_ranks, &arguments);
    let cache = run.folder.join("cache");
    fs::create_dir_all(&cache).unwrap();
    let ranks = run.start();
    until(&cache, "the first tokens", || has_first_tokens(&cache));
    let started = Instant::now();
    for rank in if rank == n_ranks { 0..n_ranks } else { rank..rank + 1 } {
        ranks.signal(rank, Signal::TERM);
    }
    for (status, stderr) in ranks.wait_within(Duration::from_secs(60)) {
        assert_eq!(status.code(), Some(75), "{stderr}");
    }
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    assert_eq!(entries(&cache, ".partial").len(), 1);
    assert_eq!(entries(&cache, ".incomplete").len(), 0);
    let report = fs::read_to_string(run.folder.join("run.json")).unwrap();
    assert!(report.contains("stopped by SIGTERM while the data were prepared"), "{report}");

    run.finish();
    assert_eq!(entries(&cache, ".partial").len(), 0);
    let report = fs::read_to_string(run.folder.join("run.json")).unwrap();
    assert!(report.contains("that a stopped run has tokenized"), "{report}");
    // The entry equals that of a run that was not stopped.
    let other = TrainerRun::new(&folder.path().join("other"), 1, &arguments);
    other.finish();
    let checksums = |cache: &Path| {
        let entries = entries(cache, "").into_iter().map(|entry| entry.join("checksum"));
        let mut checksums: Vec<String> = entries.filter_map(|path| fs::read_to_string(path).ok()).collect();
        checksums.sort();
        checksums
    };
    assert_eq!(checksums(&cache).len(), 2, "the training data and the evaluation data");
    assert_eq!(checksums(&cache), checksums(&other.folder.join("cache")));
}

#[test]
fn a_signal_while_data_are_tokenized_keeps_the_finished_rows() {
    check(1, 0);
}

#[test]
fn a_signal_to_all_ranks_while_data_are_tokenized_ends_all_with_the_code_of_preemption() {
    check(2, 2);
}

#[test]
fn a_signal_to_the_rank_that_tokenizes_ends_all_ranks() {
    check(2, 0);
}

#[test]
fn a_signal_to_preprocess_keeps_the_finished_rows() {
    let folder = tempfile::tempdir().unwrap();
    let (data, cache) = (folder.path().join("rows.jsonl"), folder.path().join("cache"));
    write_rows(&data, 40_000);
    fs::create_dir_all(&cache).unwrap();
    let mut command = Command::new(program("trainer"));
    command.args(["preprocess", "tests/golden/llama.yaml", "data.num_proc=1", "data.max_length=256"]);
    command.arg(format!("data.sources=[{}]", data.display())).arg(format!("data.cache_dir={}", cache.display()));
    command.current_dir(root()).env("RAYON_NUM_THREADS", "1").stdout(Stdio::null()).stderr(Stdio::piped());
    let process = TrainerProcesses::of([command]);
    until(&cache, "the first tokens", || has_first_tokens(&cache));
    process.signal(0, Signal::INT);
    for (status, stderr) in process.wait_within(Duration::from_secs(60)) {
        assert_eq!(status.code(), Some(75), "{stderr}");
        assert!(stderr.contains("stopped by a signal") && stderr.contains("are tokenized and cached"), "{stderr}");
    }
    assert_eq!(entries(&cache, ".partial").len(), 1);
}
