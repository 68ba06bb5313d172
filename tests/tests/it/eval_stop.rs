//! A signal to a running `evaluator run`.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use suite::{program, wait_for_files};

use crate::hostile::folder::Folder;

const RUN: [&str; 8] = ["run", "--model", "model", "--tasks", "long", "--include-path", "long.yaml", "--device=cpu"];

/// Creates a task whose evaluation would take minutes.
fn folder_with_a_long_task() -> Folder {
    let folder = Folder::new();
    let rows: Vec<String> = (0..4000).map(|i| json!({"q": format!("Say {i}.")}).to_string()).collect();
    fs::write(folder.path("long.jsonl"), rows.join("\n")).unwrap();
    let task = "task: long\ndataset_path: json\ndataset_kwargs: {data_files: {test: long.jsonl}}\ntest_split: test\n\
                output_type: generate_until\ndoc_to_text: q\ndoc_to_target: q\nmetric_list: [{metric: exact_match}]\n\
                generation_kwargs: {until: [], max_gen_toks: 100}\n";
    fs::write(folder.path("long.yaml"), task).unwrap();
    folder
}

fn command(folder: &Folder, program: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(arguments).current_dir(folder.path("")).env("HF_HUB_OFFLINE", "1").env("RAYON_NUM_THREADS", "1");
    for name in ["RANK", "WORLD_SIZE", "RUST_BACKTRACE", "RUST_LOG"] {
        command.env_remove(name);
    }
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

/// Returns the cached responses of all ranks.
fn responses(folder: &Folder) -> String {
    let files = fs::read_dir(folder.path("cache")).into_iter().flatten().flatten();
    files.map(|file| fs::read_to_string(file.path()).unwrap()).collect()
}

#[track_caller]
fn check(n_ranks: usize) {
    let folder = folder_with_a_long_task();
    let (evaluator, n) = (program("evaluator"), n_ranks.to_string());
    let run = [&RUN[..], &["--use-cache", "cache", "--batch-size", "2"]].concat();
    let mut started = match n_ranks {
        1 => command(&folder, &evaluator, &run),
        _ => command(
            &folder,
            &program("launch"),
            &[&["--nproc-per-node", &n, evaluator.to_str().unwrap()], &run[..]].concat(),
        ),
    };
    let child = started.spawn().unwrap();
    wait_for_files(&folder.path("cache"), "the first response", Duration::from_secs(180), || {
        responses(&folder).contains('\n')
    });
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(75), "{stderr}");
    let reason = "stopped by SIGTERM: the same command continues from the responses in cache";
    assert_eq!(stderr.matches(reason).count(), 1, "{stderr}");
    let before = responses(&folder);
    assert!(before.ends_with('\n') && before.lines().count() < 4000, "{} responses", before.lines().count());

    let limited = [&run[..], &["--limit", "3"]].concat();
    let output = command(&folder, &evaluator, &limited).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let after = responses(&folder);
    before.lines().for_each(|line| assert!(after.contains(line), "{line} is lost"));
}

#[test]
fn a_signal_to_an_evaluation_keeps_its_responses() {
    check(1);
}

#[test]
fn a_signal_to_a_launcher_ends_an_evaluation_on_all_ranks() {
    check(2);
}

#[test]
fn a_signal_ends_an_evaluation_without_a_cache_at_once() {
    use std::os::unix::process::ExitStatusExt as _;

    let folder = folder_with_a_long_task();
    let child = command(&folder, &program("evaluator"), &RUN).spawn().unwrap();
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.signal(), Some(Signal::TERM.as_raw()), "{}", String::from_utf8_lossy(&output.stderr));
}
