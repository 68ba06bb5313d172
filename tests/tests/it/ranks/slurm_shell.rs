//! Programs in an interactive shell of Slurm, which has the variables of one task of several.

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};

use suite::program;

use crate::hostile::folder::Folder;

#[test]
fn a_program_in_a_shell_of_slurm_names_the_variables_to_unset() {
    let folder = Folder::new();
    let mut command = Command::new(program("trainer"));
    command.args(["generate", "model", "--prompt", "Say yes.", "--device", "cpu"]);
    command
        .current_dir(folder.path(""))
        .env("HF_HUB_OFFLINE", "1")
        .env("RAYON_NUM_THREADS", "1")
        .env_remove("RUST_LOG");
    command.envs([("SLURM_PROCID", "0"), ("SLURM_STEP_ID", "0"), ("SLURM_NTASKS", "2"), ("SLURM_LOCALID", "0")]);
    command.envs([("SLURM_NODEID", "0"), ("SLURM_NNODES", "1"), ("SLURM_JOB_ID", &std::process::id().to_string())]);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    let hint = lines.inspect(|line| println!("{line}")).find(|line| line.contains("waiting for rank 1 of 2"));
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(hint.is_some_and(|line| line.ends_with("env -u SLURM_PROCID -u PMI_RANK COMMAND")));
}
