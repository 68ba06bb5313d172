//! The rank that a process reads from its environment, under `launch` and under MPI.

use std::process::Command;

use crate::launcher::{command, launch, start};

const LAUNCH: &str = env!("CARGO_BIN_EXE_launch");

#[test]
fn a_worker_of_launch_reads_its_rank() {
    let output = launch(&["--standalone", "--nproc-per-node", "2", LAUNCH, "--world"]);
    let places: Vec<_> =
        output.exits_with(0).sorted_stdout().iter().map(|line| line.split(" at ").next().unwrap().to_owned()).collect();
    let place =
        |rank: usize| format!("[{rank}]: rank {rank} of 2, local rank {rank} of 2, node 0, the launcher's store");
    assert_eq!(places, [place(0), place(1)]);
}

#[test]
fn a_process_without_a_launcher_is_a_world_of_one() {
    let output = launch(&["--world"]);
    assert!(output.exits_with(0).stdout.ends_with("started without a launcher\n"), "{}", output.stdout);
}

#[test]
fn an_incomplete_set_of_variables_is_an_error() {
    let output = start(command(&["--world"]).env("RANK", "3").env("WORLD_SIZE", "2")).wait();
    output.exits_with(1).stderr_contains(&["failed to read the rank: RANK is set but LOCAL_RANK is not"]);
}

/// Runs only where Open MPI's `mpirun` is installed, as in CI. The tests of `candlewick_comm::rank_env` use recorded
/// variables.
#[test]
fn a_process_of_mpirun_reads_its_rank() {
    let mut mpirun = Command::new("mpirun");
    mpirun.args(["--allow-run-as-root", "--oversubscribe", "-n", "3", LAUNCH, "--world"]);
    let Ok(output) = mpirun.output() else {
        eprintln!("mpirun is not installed");
        return;
    };
    let text = String::from_utf8(output.stdout).unwrap();
    let mut places: Vec<_> = text.lines().collect();
    places.sort_unstable();
    assert_eq!(places.len(), 3, "{}", String::from_utf8_lossy(&output.stderr));
    let port = places[0].rsplit_once(":").unwrap().1;
    for (rank, place) in places.iter().enumerate() {
        let want = format!("rank {rank} of 3, local rank {rank} of 3, node 0, rank 0 at 127.0.0.1:{port}");
        assert_eq!(*place, want);
    }
}
