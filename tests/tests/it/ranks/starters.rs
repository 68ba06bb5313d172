//! The trainer started by torchrun and by mpirun, without our launcher. `CANDLEWICK_PYTHON` names a Python with torch, and
//! `MPIRUN` an mpirun. A test without its program prints a line and passes.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use suite::report_skip;

use super::run::{TrainerProcesses, TrainerRun};
use super::same_curve;

/// Two ranks started by `starter` give the loss curve of one.
#[track_caller]
fn check(starter: Command) {
    let folder = tempfile::tempdir().unwrap();
    let two = TrainerRun::new(&folder.path().join("two"), 2, &["deepspeed.zero_optimization.stage=1"]);
    for (status, stderr) in TrainerProcesses::of([two.started_by(starter)]).wait() {
        assert!(status.success(), "{status}: {stderr}");
    }
    let one = TrainerRun::new(&folder.path().join("one"), 1, &[]);
    same_curve(&two.curve(), &one.finish().curve());
}

#[test]
fn torchrun_starts_ranks() {
    let python = std::env::var_os("CANDLEWICK_PYTHON").map_or_else(|| PathBuf::from("python3"), PathBuf::from);
    if !works(Command::new(&python).args(["-c", "import torch.distributed.run"])) {
        report_skip(&format!("{} is no Python with torch; CANDLEWICK_PYTHON names another", python.display()));
        return;
    }
    let mut torchrun = Command::new(python);
    torchrun.args(["-m", "torch.distributed.run", "--standalone", "--no-python", "--nproc-per-node", "2"]);
    check(torchrun);
}

/// On one machine, `ddp_backend: auto` uses MPI's environment variables only.
#[test]
fn mpirun_starts_ranks() {
    let mpirun = std::env::var_os("MPIRUN").map_or_else(|| PathBuf::from("mpirun"), PathBuf::from);
    if !works(Command::new(&mpirun).arg("--version")) {
        report_skip(&format!("there is no {} here; MPIRUN names another", mpirun.display()));
        return;
    }
    let mut starter = Command::new(mpirun);
    // By default, Open MPI refuses to run as root and to start more ranks than cores.
    starter.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
    starter.env("OMPI_MCA_rmaps_base_oversubscribe", "1").args(["-n", "2"]);
    check(starter);
}

fn works(command: &mut Command) -> bool {
    command.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}
