//! A process's place as it reads it itself: under `launch`, and under an MPI if there is one.

use std::process::Command;

use crate::running::{command, launch, start};

const LAUNCH: &str = env!("CARGO_BIN_EXE_launch");

#[test]
fn a_worker_of_launch_knows_its_place() {
    let done = launch(&["--standalone", "--nproc-per-node", "2", LAUNCH, "--world"]);
    let places: Vec<_> =
        done.has_code(0).sorted().iter().map(|line| line.split(" at ").next().unwrap().to_owned()).collect();
    let place =
        |rank: usize| format!("[{rank}]: rank {rank} of 2, local rank {rank} of 2, node 0, the launcher's store");
    assert_eq!(places, [place(0), place(1)]);
}

#[test]
fn a_process_that_nobody_started_is_alone() {
    let done = launch(&["--world"]);
    assert!(done.has_code(0).out.ends_with("started without a launcher\n"), "{}", done.out);
}

#[test]
fn variables_that_do_not_fit_are_an_error() {
    let done = start(command(&["--world"]).env("RANK", "3").env("WORLD_SIZE", "2")).finish();
    done.has_code(1).says(&["failed to read the rank: RANK is set but LOCAL_RANK is not"]);
}

/// Runs where Open MPI's `mpirun` is installed, as on the machines of CI; elsewhere the fixture of its variables, in
/// the tests of `candlewick_comm::rank_env`, has to do.
#[test]
fn a_process_of_mpirun_knows_its_place() {
    let mut mpirun = Command::new("mpirun");
    mpirun.args(["--allow-run-as-root", "--oversubscribe", "-n", "3", LAUNCH, "--world"]);
    let Ok(output) = mpirun.output() else {
        eprintln!("there is no mpirun here");
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
