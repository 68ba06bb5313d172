//! The output of workers on the console and in log files.

use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use crate::launcher::{command, launch_script, script_arguments, start, temp_folder};

/// Returns the only run directory in a log directory.
fn run_folder(logs: &Path) -> PathBuf {
    let mut runs: Vec<_> = fs::read_dir(logs).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(runs.len(), 1, "{runs:?}");
    runs.remove(0)
}

fn text(path: impl AsRef<Path>) -> String {
    fs::read_to_string(path.as_ref()).unwrap_or_else(|_| "no file".into())
}

#[test]
fn lines_of_different_workers_do_not_interleave() {
    let script =
        r#"x=$(printf "%01000d" $RANK); for i in $(seq 200); do echo "$i $x"; printf "part "; echo "$i"; done"#;
    let output = launch_script(4, &[], script);
    output.exits_with(0);
    let mut n_lines = [0; 4];
    for line in output.stdout.lines() {
        let (rank, rest) = line.strip_prefix('[').and_then(|line| line.split_once("]: ")).unwrap();
        let is_whole = rest.starts_with("part ") || rest.split_once(' ').is_some_and(|(_, x)| x.len() == 1000);
        assert!(is_whole, "{line}");
        n_lines[rank.parse::<usize>().unwrap()] += 1;
    }
    assert_eq!(n_lines, [400; 4]);
}

#[test]
fn the_last_output_of_a_killed_worker_is_kept() {
    let output = launch_script(1, &[], "yes 123456789 | head -20000; printf 'last words'; kill -9 $$");
    assert_eq!(output.stdout.lines().count(), 20001);
    assert!(output.stdout.ends_with("[0]: last words\n"));
    output.exits_with(137);
}

#[test]
fn redirected_streams_go_to_files_and_teed_streams_to_both() {
    let (_folder, logs) = temp_folder();
    let flags = ["--log-dir", logs.to_str().unwrap(), "--redirects", "0:1", "-t", "1:3"];
    let output = launch_script(2, &flags, "echo out $RANK; echo err $RANK >&2");
    assert_eq!(output.sorted_stdout(), ["[1]: out 1"]);
    output.exits_with(0).stderr_contains(&["[0]: err 0\n", "[1]: err 1\n", "launch: logs are in "]);
    let attempt = run_folder(&logs).join("attempt_0");
    assert_eq!(text(attempt.join("0/stdout.log")), "out 0\n");
    assert_eq!(text(attempt.join("0/stderr.log")), "no file");
    assert_eq!(text(attempt.join("1/stdout.log")), "out 1\n");
    assert_eq!(text(attempt.join("1/stderr.log")), "err 1\n");
}

#[test]
fn the_log_directory_is_named_after_the_job() {
    let (_folder, logs) = temp_folder();
    let mut command = command(&["--rdzv-id", "job/7", "--log-dir", logs.to_str().unwrap(), "true"]);
    start(command.arg("--ignored").env("PET_MASTER_PORT", "0")).wait().exits_with(0);
    assert!(run_folder(&logs).file_name().unwrap().to_str().unwrap().starts_with("job_7_"));
}

#[test]
fn filtered_ranks_are_hidden_on_the_console_but_logged_to_files() {
    let (_folder, logs) = temp_folder();
    let flags = ["--log-dir", logs.to_str().unwrap(), "--tee", "3", "--local-ranks-filter", "1"];
    let output = launch_script(3, &flags, "echo out $RANK");
    assert_eq!(output.sorted_stdout(), ["[1]: out 1"]);
    assert_eq!(text(run_folder(&logs).join("attempt_0/2/stdout.log")), "out 2\n");
}

#[test]
fn lines_with_a_filter_word_are_copied() {
    let (_folder, logs) = temp_folder();
    let flags = ["--log-dir", logs.to_str().unwrap(), "--tee", "1", "--duplicate-stdout-filters", "loss"];
    launch_script(1, &flags, "echo step 1; echo loss 2").exits_with(0);
    assert_eq!(text(run_folder(&logs).join("attempt_0/filtered_stdout.log")), "[0]: loss 2\n");
}

#[test]
fn the_line_prefix_template_is_torchelastics_variable() {
    let arguments = script_arguments(1, &["--role", "actor"], "echo x");
    let template = "${role_name}-${local_rank}-${rank}> ";
    let output = start(command(&arguments).env("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", template)).wait();
    assert_eq!(output.stdout, "actor-0-0> x\n");
}

#[test]
fn an_empty_temporary_log_directory_is_removed() {
    let (_folder, tmp) = temp_folder();
    let run = |script: &str| {
        let output = start(command(&script_arguments(1, &[], script)).env("TMPDIR", &tmp)).wait();
        (output.exit_code, fs::read_dir(&tmp).unwrap().count())
    };
    assert_eq!(run("true"), (Some(0), 0));
    assert_eq!(run("exit 3"), (Some(3), 0));
    assert_eq!(run("echo '{}' > $TORCHELASTIC_ERROR_FILE; exit 3"), (Some(3), 1));
}

#[test]
fn a_closed_stdout_does_not_stop_the_workers() {
    let (_folder, path) = temp_folder();
    let script = format!("yes | head -100000; echo done > {}/done", path.display());
    let mut launcher = command(&script_arguments(1, &[], &script)).stdout(Stdio::piped()).spawn().unwrap();
    drop(launcher.stdout.take());
    assert_eq!(launcher.wait().unwrap().code(), Some(0));
    assert_eq!(text(path.join("done")), "done\n");
}

#[test]
fn local_rank_0_inherits_stdin() {
    let (_folder, path) = temp_folder();
    fs::write(path.join("input"), "hello\n").unwrap();
    let mut command = command(&script_arguments(2, &[], "cat"));
    let output = start(command.stdin(fs::File::open(path.join("input")).unwrap())).wait();
    assert_eq!(output.stdout, "[0]: hello\n");
}

#[test]
fn lines_of_stdout_and_stderr_do_not_interleave() {
    let script = r#"x=$(printf "%05000d" 7); for i in $(seq 100); do echo "$x"; echo "$x" >&2; done"#;
    let (mut from, to) = std::io::pipe().unwrap();
    let mut command = command(&script_arguments(2, &[], script));
    let mut launcher = command.stdout(to.try_clone().unwrap()).stderr(to).spawn().unwrap();
    drop(command);
    let mut text = String::new();
    std::io::Read::read_to_string(&mut from, &mut text).unwrap();
    assert_eq!(launcher.wait().unwrap().code(), Some(0));
    let lines: Vec<_> = text.lines().filter(|line| !line.starts_with("launch: ")).collect();
    assert_eq!(lines.len(), 400);
    lines.iter().for_each(|line| assert_eq!(line.len(), "[0]: ".len() + 5000, "{line}"));
}

/// Local rank 0 writes a question without a newline, and continues only after the answer.
#[test]
fn an_interactive_rank_has_the_console() {
    let script = r#"if [ $RANK = 0 ]; then printf "name? "; read -r name; printf "\rhi $name\n"; else echo other; fi"#;
    let mut command = command(&script_arguments(2, &["--interactive"], script));
    let mut launcher = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let (mut stdin, mut stdout) = (launcher.stdin.take().unwrap(), launcher.stdout.take().unwrap());
    let mut shown = Vec::new();
    while !String::from_utf8_lossy(&shown).contains("name? ") {
        let mut byte = [0];
        assert_eq!(stdout.read(&mut byte).unwrap(), 1, "the output ended before the question");
        shown.extend(byte);
    }
    stdin.write_all(b"Lumo\n").unwrap();
    let mut rest = String::new();
    stdout.read_to_string(&mut rest).unwrap();
    assert!(launcher.wait().unwrap().success());
    let all = String::from_utf8(shown).unwrap() + &rest;
    assert!(all.contains("name? ") && all.contains("\rhi Lumo\n") && !all.contains("[0]: "), "{all:?}");
    assert!(all.contains("[1]: other\n"), "{all:?}");
    let both = launch_script(1, &["--interactive", "--tee", "3"], "true");
    both.exits_with(2).stderr_contains(&["--interactive"]);
}
