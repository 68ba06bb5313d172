//! The backend `mpi` through its public API. In each test `mpirun` starts this binary once per rank.
//!
//! The tests are skipped without `mpirun`. The variable MPIRUN selects another one.
#![allow(clippy::unwrap_used)]

mod cases;

use std::fs;
use std::io::{self, Write};
use std::panic::catch_unwind;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use candlewick_comm::rank_env::{Launcher, RankEnv};
use candlewick_comm::{CommBackend, Error, HostBackend, Options, Recv, Reduce, Result, StagedGroup, World};
use rustix::process::{Signal, getpid, kill_process};

const PATIENT: Duration = Duration::from_secs(60);

/// Variable with a rank's scenario, its timeout in milliseconds and the folder of its result file.
const VARIABLE: &str = "CANDLEWICK_TEST_MPI";

/// Runs one rank. Returns immediately without the variable, when it runs as a test.
#[test]
fn rank() {
    let Ok(arguments) = std::env::var(VARIABLE) else { return };
    let words: Vec<&str> = arguments.splitn(3, ' ').collect();
    let [scenario, timeout, folder] = words[..] else { panic!("{arguments}") };
    let env = RankEnv::from_variables(&std::env::vars().collect()).unwrap();
    let options = Options { timeout: Duration::from_millis(timeout.parse().unwrap()), record: true };
    // In "miscounted" MPI reports another world size than the launch variables.
    let believed = if scenario == "miscounted" { env.world_size + 1 } else { env.world_size };
    let env = RankEnv { world_size: believed, ..env };
    let joined = || World::join(&env, &CommBackend::Host(HostBackend::Mpi), options);
    let done = catch_unwind(|| joined().and_then(|world| world.run(|world| act(scenario, world))));
    let (code, message) = match done {
        Ok(Ok(result)) => (0, Some(result)),
        Ok(Err(error)) => (1, Some(error.to_string())),
        Err(_) => (101, None),
    };
    let file = |rank: usize| Path::new(folder).join(rank.to_string());
    if let Some(message) = message {
        let unfinished = Path::new(folder).join(format!("{}.tmp", env.rank));
        fs::write(&unfinished, message).unwrap();
        fs::rename(unfinished, file(env.rank)).unwrap();
    }
    if code > 0 {
        // mpirun kills the other ranks a second after the first failure. Wait until they have written their results. The last
        // rank is the one that fails first.
        let began = Instant::now();
        while (0..believed - 1).any(|rank| !file(rank).exists()) && began.elapsed() < PATIENT / 4 {
            thread::yield_now();
        }
        std::process::exit(code);
    }
}

fn act(scenario: &str, world: &World) -> Result<String> {
    let group = world.group();
    let x = Tensor::ones(3, DType::F32, &Device::Cpu)?;
    let many = || Tensor::ones(1 << 22, DType::F32, &Device::Cpu);
    let everyone = [(0..group.size()).collect::<Vec<_>>()];
    let last = world.rank() + 1 == world.size();
    match scenario {
        "all" => return Ok(format!("{:x}", cases::check(&*group)?)),
        "staged" => return Ok(format!("{:x}", cases::check(&StagedGroup::new(group, &Device::Cpu))?)),
        "calls" => {
            group.split("part", &everyone)?.start_all_gather(&x)?.wait()?;
            group.all_reduce(&x, Reduce::Max)?;
            let shown: Vec<String> = world.calls().iter().map(|call| format!("{}: {call}", call.group)).collect();
            return Ok(shown.join("; "));
        }
        "again" => {
            let options = Options { timeout: PATIENT, record: false };
            let again = candlewick_comm::mpi::join(world.rank(), world.size(), options);
            return Ok(again.err().unwrap().to_string());
        }
        "mismatch" if last => drop(group.all_gather(&x)?),
        "error" if last => return Err(Error::Tensor(candle_core::Error::Msg("read row 17".to_owned()))),
        "error-early" if last => {
            let _started = group.split("part", &everyone)?.start_all_reduce(&many()?, Reduce::Sum)?;
            return Err(Error::Tensor(candle_core::Error::Msg("read row 17".to_owned())));
        }
        "error-early" => {
            let _part = group.split("part", &everyone)?;
            group.barrier()?;
        }
        "long" => return Err(Error::Tensor(candle_core::Error::Msg("ö".repeat(2 << 20)))),
        "panic" if last => panic!("index out of bounds"),
        "leave" if last => {}
        "absent" if last => drop(world.await_failure(PATIENT)),
        // Rank 1 is absent, and rank 0 waits for both.
        "absent-with-busy-peer" if last => {
            world.keep_alive().during(|| world.await_failure(PATIENT));
            group.barrier()?;
        }
        "absent-with-busy-peer" if world.rank() == 1 => {
            world.await_failure(PATIENT);
            group.barrier()?;
        }
        // Rank 0 waits for the last rank through rank 1.
        "busy-chain" => match world.rank() {
            0 => drop(group.send_recv(None, None, Some(Recv::like(&x, 1)))?),
            1 => {
                let x = group.send_recv(None, None, Some(Recv::like(&x, 2)))?;
                group.send_recv(x.as_ref(), Some(0), None)?;
            }
            _ => {
                assert_eq!(world.keep_alive().during(|| world.await_failure(Duration::from_secs(7))), None);
                group.send_recv(Some(&x), Some(1), None)?;
            }
        },
        "busy" if last => {
            assert_eq!(world.keep_alive().during(|| world.await_failure(Duration::from_secs(7))), None);
            group.all_reduce(&x, Reduce::Sum)?;
        }
        "kill" if last => kill_process(getpid(), Signal::KILL).unwrap(),
        "exit" if last => std::process::exit(3),
        "stop" if last => kill_process(getpid(), Signal::STOP).unwrap(),
        "pending" if last => drop(group.start_all_reduce(&many()?, Reduce::Sum)?),
        "pending" => {
            assert_eq!(group.all_reduce(&many()?, Reduce::Sum)?.max_all()?.to_scalar::<f32>()?, group.size() as f32);
        }
        _ => drop(group.all_reduce(&x, Reduce::Sum)?),
    }
    Ok("done".to_owned())
}

/// Output of mpirun and the result of each rank that has written one.
struct Ends {
    output: Output,
    message: Vec<Option<String>>,
    took: Duration,
}

/// Runs all ranks of a scenario. Returns `None` without MPI.
fn run(scenario: &str, size: usize, timeout: Duration, variables: &[(&str, &str)]) -> Option<Ends> {
    let mpirun = std::env::var("MPIRUN").unwrap_or_else(|_| "mpirun".to_owned());
    if Command::new(&mpirun).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_err() {
        let _ = writeln!(io::stderr(), "skipped: there is no {mpirun} here");
        return None;
    }
    let folder = tempfile::tempdir().unwrap();
    let began = Instant::now();
    let mut command = Command::new(mpirun);
    // mpirun sends SIGTERM to the other ranks after a failure. Ignore it until they have written their results.
    command.args(["-n", &size.to_string(), "env", "--ignore-signal=TERM"]).arg(std::env::current_exe().unwrap());
    command.args(["rank", "--exact", "--nocapture", "--test-threads=1"]);
    command.env(VARIABLE, format!("{scenario} {} {}", timeout.as_millis(), folder.path().display()));
    // Open MPI keeps the files of its sessions here. Programs that end at the same time remove a shared folder.
    command.env("TMPDIR", folder.path());
    // By default Open MPI does not run as root, nor more ranks than cores.
    command.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
    command.envs([("OMPI_MCA_rmaps_base_oversubscribe", "1"), ("OMPI_MCA_btl_vader_single_copy_mechanism", "none")]);
    let output = command.envs(variables.iter().copied()).output().unwrap();
    let message = (0..size).map(|rank| fs::read_to_string(folder.path().join(rank.to_string())).ok()).collect();
    Some(Ends { output, message, took: began.elapsed() })
}

#[track_caller]
fn check(size: usize, variables: &[(&str, &str)]) {
    let options = Options { timeout: PATIENT, record: false };
    let threads = candlewick_comm::threads::run(size, options, |world| cases::check(&*world.group())).unwrap();
    let digest = format!("{:x}", threads[0]);
    for scenario in ["all", "staged"] {
        let Some(ends) = run(scenario, size, PATIENT, variables) else { return };
        assert!(ends.output.status.success(), "{:?}", ends.output);
        assert!(
            ends.message.iter().all(|message| message.as_ref() == Some(&digest)),
            "{:?}, not {digest}",
            ends.message
        );
    }
}

#[test]
fn two_ranks_equal_threads_bitwise() {
    check(2, &[]);
}

#[test]
fn three_ranks_equal_threads_bitwise() {
    check(3, &[]);
}

#[test]
fn four_ranks_pass_all_cases_over_tcp() {
    check(4, &[("OMPI_MCA_btl", "self,tcp"), ("OMPI_MCA_pml", "ob1")]);
}

#[test]
fn recorded_sequences_are_equal_across_ranks() {
    let Some(ends) = run("calls", 2, PATIENT, &[]) else { return };
    let want = "world: split 1; part: all_gather 1 (f32 [3]); world: all_reduce 2 (max, f32 [3])";
    assert!(ends.output.status.success(), "{:?}: {:?}", ends.output, ends.message);
    assert_eq!(ends.message, [Some(want.to_owned()), Some(want.to_owned())]);
}

#[test]
fn a_dropped_pending_still_completes() {
    let Some(ends) = run("pending", 2, PATIENT, &[]) else { return };
    assert!(ends.output.status.success(), "{:?}", ends.output);
}

#[test]
fn mpi_can_be_joined_once() {
    let Some(ends) = run("again", 2, PATIENT, &[]) else { return };
    assert!(ends.output.status.success(), "{:?}", ends.output);
    let message = ends.message[1].as_ref().unwrap();
    assert!(message.contains("as rank 1: a process can initialize MPI only once"), "{message}");
}

/// Runs a scenario in which the last rank fails. Returns the message that all other ranks report.
#[track_caller]
fn root_cause(scenario: &str, size: usize, timeout: Duration) -> Option<String> {
    let mut ends = run(scenario, size, timeout, &[])?;
    assert!(!ends.output.status.success());
    ends.message.pop();
    assert!(
        ends.message.iter().all(|message| message.is_some() && *message == ends.message[0]),
        "{:?}: {:?}",
        ends.message,
        ends.output
    );
    assert!(ends.took < PATIENT / 2, "the ranks waited for the timeout");
    ends.message.swap_remove(0)
}

#[test]
fn mismatched_calls_are_both_named() {
    let Some(message) = root_cause("mismatch", 3, PATIENT) else { return };
    assert!(message.contains("calls all_reduce 1 (sum, f32 [3]), rank 2 (pid "), "{message}");
    assert!(message.contains(") calls all_gather 1 (f32 [3]) (seen by rank "), "{message}");
}

#[test]
fn a_failed_rank_aborts_the_others() {
    for scenario in ["error", "error-early"] {
        let Some(message) = root_cause(scenario, 3, PATIENT) else { return };
        assert_eq!(message, "continue: rank 2 failed to read row 17");
    }
}

#[test]
fn a_panicked_rank_aborts_the_others() {
    let Some(message) = root_cause("panic", 3, PATIENT) else { return };
    assert_eq!(message, "continue: rank 2 failed to finish: it panicked");
}

#[test]
fn ranks_that_fail_concurrently_report_one_failure() {
    let Some(ends) = run("long", 3, PATIENT, &[]) else { return };
    assert!(ends.message.iter().all(|message| *message == ends.message[0]), "the ranks report different failures");
    let message = ends.message[0].as_ref().unwrap();
    assert!(message.starts_with("continue: rank ") && message.ends_with('ö') && message.len() < 1 << 15);
}

#[test]
fn a_rank_that_leaves_early_does_not_cause_a_timeout() {
    let Some(message) = root_cause("leave", 2, PATIENT) else { return };
    let what = "finish all_reduce 1 (sum, f32 [3]) in group world of ranks [0, 1]: rank 1 (pid ";
    assert!(
        message.starts_with(what) && message.ends_with(") has left the process group (seen by rank 0)"),
        "{message}"
    );
}

#[test]
fn an_absent_rank_is_named_with_the_call() {
    let Some(message) = root_cause("absent", 3, Duration::from_secs(3)) else { return };
    let what = "finish all_reduce 1 (sum, f32 [3]) in group world of ranks [0, 1, 2]: rank 2 (pid ";
    assert!(
        message.starts_with(what) && message.contains(") timed out after 3s without a heartbeat (seen by rank "),
        "{message}"
    );
}

#[test]
fn a_busy_rank_does_not_time_out() {
    for scenario in ["busy", "busy-chain"] {
        let Some(ends) = run(scenario, 3, Duration::from_secs(3), &[]) else { return };
        assert!(ends.output.status.success(), "{scenario}: {:?}: {:?}", ends.message, ends.output);
    }
}

#[test]
fn an_absent_rank_is_named_while_another_is_busy() {
    let Some(ends) = run("absent-with-busy-peer", 3, Duration::from_secs(3), &[]) else { return };
    let message = ends.message[0].as_ref().unwrap();
    assert!(
        message.contains(": rank 1 (pid ")
            && message.contains(") timed out after 3s without a heartbeat (seen by rank 0)"),
        "{message}"
    );
}

/// mpirun detects the exit of a process, kills the others and reports the first.
#[test]
fn an_exited_rank_aborts_the_others() {
    for (scenario, code) in [("kill", "signal 9"), ("exit", "code: 3")] {
        let Some(ends) = run(scenario, 3, PATIENT, &[]) else { return };
        assert!(!ends.output.status.success() && ends.took < PATIENT / 2, "{scenario}: {:?}", ends.took);
        let output = String::from_utf8_lossy(&ends.output.stderr).to_lowercase();
        let output = output.split_whitespace().collect::<Vec<_>>().join(" ");
        // Output of Open MPI.
        if output.contains("mpirun") {
            assert!(output.contains(code), "{scenario}: {output}");
        }
    }
}

#[test]
fn mpi_must_report_the_world_size_of_the_launch_variables() {
    let Some(ends) = run("miscounted", 2, PATIENT, &[]) else { return };
    let message = ends.message[1].as_ref().unwrap();
    assert!(
        message.starts_with("join the group of 3 ranks as rank 1: MPI reports rank 1 of 2; start the ranks"),
        "{message}"
    );
}

/// Without mpirun, MPI reports a world of one rank.
#[test]
fn ranks_without_mpirun_get_an_error_with_the_remedy() {
    let env = RankEnv { world_size: 2, local_world_size: 2, launcher: Launcher::Torchrun, ..RankEnv::single() };
    let alone = World::join(&env, &CommBackend::Host(HostBackend::Mpi), Options { timeout: PATIENT, record: false });
    let message = alone.err().unwrap().to_string();
    assert!(message.contains("MPI reports rank 0 of 1; start the ranks with the mpirun of the MPI"), "{message}");
}
