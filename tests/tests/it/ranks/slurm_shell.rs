//! Programs with the variables of one task of several of a Slurm step.

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};

use suite::program;

use crate::hostile::folder::Folder;

/// Returns a command with the variables of task 0 of 2.
fn task(program: &str, folder: &Folder) -> Command {
    let mut command = Command::new(program);
    command
        .current_dir(folder.path(""))
        .env("HF_HUB_OFFLINE", "1")
        .env("RAYON_NUM_THREADS", "1")
        .env_remove("RUST_LOG");
    command.envs([("SLURM_PROCID", "0"), ("SLURM_STEP_ID", "0"), ("SLURM_NTASKS", "2"), ("SLURM_LOCALID", "0")]);
    command.envs([("SLURM_NODEID", "0"), ("SLURM_NNODES", "1"), ("SLURM_JOB_ID", &std::process::id().to_string())]);
    command
}

/// A process without a terminal is a task, as in a Jupyter kernel.
#[test]
fn a_task_of_slurm_that_waits_for_another_names_the_variables_to_unset() {
    let folder = Folder::new();
    let mut command = task("setsid", &folder);
    command.arg(program("trainer")).args(["generate", "model", "--prompt", "Say yes.", "--device", "cpu"]);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    let hint = lines.inspect(|line| println!("{line}")).find(|line| line.contains("waiting for rank 1 of 2"));
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(hint.is_some_and(|line| line.ends_with("env -u SLURM_PROCID -u PMI_RANK COMMAND")));
}

/// Runs a command line in a shell with job control and a terminal, and returns what the terminal shows.
fn in_a_terminal(line: &str, folder: &Folder) -> String {
    let output = task("script", folder)
        .args(["-qec", &format!("set -m; {line}"), "/dev/null"])
        .env("SHELL", "/bin/bash")
        .output();
    let output = output.unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{line}: {text}");
    text
}

#[test]
fn a_command_in_an_interactive_shell_of_slurm_is_a_single_process() {
    if Command::new("script").arg("--version").output().is_err() {
        return println!("skipped: the program script is not installed");
    }
    let folder = Folder::new();
    let launch = program("launch").display().to_string();
    let world = |line: String| in_a_terminal(&line, &folder);
    let alone = "rank 0 of 1, local rank 0 of 1";
    assert!(world(format!("{launch} --world; true")).contains(alone));
    assert!(world(format!("{launch} --world | cat")).contains(alone), "in a pipeline");
    // A script of the task of `srun --pty` is a task, too. So is a command of a wrapper that makes a process group.
    let task = "rank 0 of 2, local rank 0 of 2";
    std::fs::copy("/bin/bash", folder.path("wrapper")).unwrap();
    for line in [
        format!("set +m; {launch} --world; true"),
        format!("set +m; timeout 600 {launch} --world; true"),
        format!("timeout 600 {launch} --world; true"),
        format!("set +m; bash -c 'set -m; {launch} --world; true'; true"),
        format!("exec ./wrapper -c 'set -m; {launch} --world; true'"),
    ] {
        assert!(world(line.clone()).contains(task), "{line}");
    }
    let trainer = program("trainer").display().to_string();
    let line =
        format!("{trainer} generate model --prompt 'Say yes.' --device cpu --max-new-tokens 2 && echo generated");
    let shown = world(line);
    assert!(shown.contains("generated") && !shown.contains("waiting for rank"), "{shown}");
    let note = "note: in an interactive shell: one process; Slurm's variables are ignored";
    assert_eq!(shown.matches(note).count(), 1, "{shown}");
}
