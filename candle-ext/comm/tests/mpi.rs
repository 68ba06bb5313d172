//! The world that MPI connects, through the front door: each test has `mpirun` start this binary again as each rank.
//!
//! Without an `mpirun` nothing is tested. MPIRUN names another one.
#![allow(clippy::unwrap_used)]

mod cases;

use std::fs;
use std::panic::catch_unwind;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use candlewick_comm::place::{Place, Source};
use candlewick_comm::{Engine, Error, Host, Options, Recv, Reduce, Result, Staged, World};
use rustix::process::{Signal, getpid, kill_process};

const PATIENT: Duration = Duration::from_secs(60);

/// Tells a process what to do, with which time-out in milliseconds, and where to write what came of it.
const VARIABLE: &str = "CANDLEWICK_TEST_MPI";

/// What the rank processes do. Not a test of its own: returns at once when it is run as one.
#[test]
fn rank() {
    let Ok(told) = std::env::var(VARIABLE) else { return };
    let words: Vec<&str> = told.splitn(3, ' ').collect();
    let [scenario, timeout, folder] = words[..] else { panic!("{told}") };
    let place = Place::from_variables(&std::env::vars().collect()).unwrap();
    let options = Options { timeout: Duration::from_millis(timeout.parse().unwrap()), record: true };
    // Where MPI should count other ranks than whoever started them.
    let believed = if scenario == "miscounted" { place.world_size + 1 } else { place.world_size };
    let place = Place { world_size: believed, ..place };
    let joined = || World::join(&place, &Engine::Host(Host::Mpi), options);
    let done = catch_unwind(|| joined().and_then(|world| world.run(|world| act(scenario, world))));
    let (code, said) = match done {
        Ok(Ok(result)) => (0, Some(result)),
        Ok(Err(error)) => (1, Some(error.to_string())),
        Err(_) => (101, None),
    };
    let file = |rank: usize| Path::new(folder).join(rank.to_string());
    if let Some(said) = said {
        let unfinished = Path::new(folder).join(format!("{}.tmp", place.rank));
        fs::write(&unfinished, said).unwrap();
        fs::rename(unfinished, file(place.rank)).unwrap();
    }
    if code > 0 {
        // A second after the first has ended badly, mpirun kills the others: they shall have written by then. The last rank
        // is the one that does something else.
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
        "staged" => return Ok(format!("{:x}", cases::check(&Staged::new(group, &Device::Cpu))?)),
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
        "stay-away" if last => drop(world.await_failure(PATIENT)),
        // The second stays away, and the first waits for both.
        "stay-away-beside-work" if last => {
            world.keep_alive().during(|| world.await_failure(PATIENT));
            group.barrier()?;
        }
        "stay-away-beside-work" if world.rank() == 1 => {
            world.await_failure(PATIENT);
            group.barrier()?;
        }
        // The last rank keeps the first waiting by way of the one between.
        "work-chain" => match world.rank() {
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
        "at-work" if last => {
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

/// How the ranks ended, and what each said, if it came to that.
struct Ends {
    output: Output,
    said: Vec<Option<String>>,
    took: Duration,
}

/// Runs all ranks of a scenario; nothing where there is no MPI to do so.
fn run(scenario: &str, size: usize, timeout: Duration, variables: &[(&str, &str)]) -> Option<Ends> {
    let mpirun = std::env::var("MPIRUN").unwrap_or_else(|_| "mpirun".to_owned());
    if Command::new(&mpirun).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_err() {
        eprintln!("skipped: there is no {mpirun} here");
        return None;
    }
    let folder = tempfile::tempdir().unwrap();
    let began = Instant::now();
    let mut command = Command::new(mpirun);
    // mpirun ends the others when one has ended badly; they have something to say yet.
    command.args(["-n", &size.to_string(), "env", "--ignore-signal=TERM"]).arg(std::env::current_exe().unwrap());
    command.args(["rank", "--exact", "--nocapture", "--test-threads=1"]);
    command.env(VARIABLE, format!("{scenario} {} {}", timeout.as_millis(), folder.path().display()));
    // Open MPI refuses to run as root, and more ranks than cores, unless it is told otherwise.
    command.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
    command.envs([("OMPI_MCA_rmaps_base_oversubscribe", "1"), ("OMPI_MCA_btl_vader_single_copy_mechanism", "none")]);
    let output = command.envs(variables.iter().copied()).output().unwrap();
    let said = (0..size).map(|rank| fs::read_to_string(folder.path().join(rank.to_string())).ok()).collect();
    Some(Ends { output, said, took: began.elapsed() })
}

#[track_caller]
fn check(size: usize, variables: &[(&str, &str)]) {
    let options = Options { timeout: PATIENT, record: false };
    let threads = candlewick_comm::threads::run(size, options, |world| cases::check(&*world.group())).unwrap();
    let digest = format!("{:x}", threads[0]);
    for scenario in ["all", "staged"] {
        let Some(ends) = run(scenario, size, PATIENT, variables) else { return };
        assert!(ends.output.status.success(), "{:?}", ends.output);
        assert!(ends.said.iter().all(|said| said.as_ref() == Some(&digest)), "{:?}, not {digest}", ends.said);
    }
}

#[test]
fn two_ranks_do_all_with_the_bits_of_threads() {
    check(2, &[]);
}

#[test]
fn three_ranks_do_all_with_the_bits_of_threads() {
    check(3, &[]);
}

#[test]
fn four_ranks_do_all_over_tcp() {
    check(4, &[("OMPI_MCA_btl", "self,tcp"), ("OMPI_MCA_pml", "ob1")]);
}

#[test]
fn recorded_sequences_are_equal_across_ranks() {
    let Some(ends) = run("calls", 2, PATIENT, &[]) else { return };
    let want = "world: split 1; part: all_gather 1 (f32 [3]); world: all_reduce 2 (max, f32 [3])";
    assert!(ends.output.status.success(), "{:?}", ends.output);
    assert_eq!(ends.said, [Some(want.to_owned()), Some(want.to_owned())]);
}

#[test]
fn a_dropped_pending_still_does_its_part() {
    let Some(ends) = run("pending", 2, PATIENT, &[]) else { return };
    assert!(ends.output.status.success(), "{:?}", ends.output);
}

#[test]
fn mpi_is_joined_once() {
    let Some(ends) = run("again", 2, PATIENT, &[]) else { return };
    assert!(ends.output.status.success(), "{:?}", ends.output);
    let said = ends.said[1].as_ref().unwrap();
    assert!(said.contains("as rank 1: a process can start MPI only once"), "{said}");
}

/// Runs a scenario in which the last rank does something else; returns what all others say, which is the same.
#[track_caller]
fn root_cause(scenario: &str, size: usize, timeout: Duration) -> Option<String> {
    let mut ends = run(scenario, size, timeout, &[])?;
    assert!(!ends.output.status.success());
    ends.said.pop();
    assert!(ends.said.iter().all(|said| said.is_some() && *said == ends.said[0]), "{:?}: {:?}", ends.said, ends.output);
    assert!(ends.took < PATIENT / 2, "the time-out was waited for");
    ends.said.swap_remove(0)
}

#[test]
fn calls_that_do_not_match_are_both_named() {
    let Some(said) = root_cause("mismatch", 3, PATIENT) else { return };
    assert!(said.contains("calls all_reduce 1 (sum, f32 [3]), rank 2 (pid "), "{said}");
    assert!(said.contains(") calls all_gather 1 (f32 [3]) (seen by rank "), "{said}");
}

#[test]
fn a_rank_that_fails_ends_the_others() {
    for scenario in ["error", "error-early"] {
        let Some(said) = root_cause(scenario, 3, PATIENT) else { return };
        assert_eq!(said, "go on: rank 2 failed to read row 17");
    }
}

#[test]
fn a_rank_that_panics_ends_the_others() {
    let Some(said) = root_cause("panic", 3, PATIENT) else { return };
    assert_eq!(said, "go on: rank 2 failed to finish: it panicked");
}

#[test]
fn ranks_that_fail_at_once_with_much_to_say_agree() {
    let Some(ends) = run("long", 3, PATIENT, &[]) else { return };
    assert!(ends.said.iter().all(|said| *said == ends.said[0]), "the ranks say different things");
    let said = ends.said[0].as_ref().unwrap();
    assert!(said.starts_with("go on: rank ") && said.ends_with('ö') && said.len() < 1 << 15);
}

#[test]
fn a_rank_that_leaves_early_is_not_waited_for() {
    let Some(said) = root_cause("leave", 2, PATIENT) else { return };
    let what = "finish all_reduce 1 (sum, f32 [3]) in group world of ranks [0, 1]: rank 1 (pid ";
    assert!(said.starts_with(what) && said.ends_with(") has left (seen by rank 0)"), "{said}");
}

#[test]
fn a_rank_that_stays_away_is_named_with_what_it_misses() {
    let Some(said) = root_cause("stay-away", 3, Duration::from_secs(3)) else { return };
    let what = "finish all_reduce 1 (sum, f32 [3]) in group world of ranks [0, 1, 2]: rank 2 (pid ";
    assert!(said.starts_with(what) && said.contains(") silent for 3s (seen by rank "), "{said}");
}

#[test]
fn a_rank_at_work_is_waited_for_beyond_the_time_out() {
    for scenario in ["at-work", "work-chain"] {
        let Some(ends) = run(scenario, 3, Duration::from_secs(3), &[]) else { return };
        assert!(ends.output.status.success(), "{scenario}: {:?}: {:?}", ends.said, ends.output);
    }
}

#[test]
fn a_rank_that_stays_away_while_another_is_at_work_is_named() {
    let Some(ends) = run("stay-away-beside-work", 3, Duration::from_secs(3), &[]) else { return };
    let said = ends.said[0].as_ref().unwrap();
    assert!(said.contains(": rank 1 (pid ") && said.contains(") silent for 3s (seen by rank 0)"), "{said}");
}

/// Nobody but mpirun sees that a process has died; it ends the others and says which was the first.
#[test]
fn a_dead_rank_ends_the_others() {
    for (scenario, code) in [("kill", "signal 9"), ("exit", "code: 3")] {
        let Some(ends) = run(scenario, 3, PATIENT, &[]) else { return };
        assert!(!ends.output.status.success() && ends.took < PATIENT / 2, "{scenario}: {:?}", ends.took);
        let output = String::from_utf8_lossy(&ends.output.stderr).to_lowercase();
        let output = output.split_whitespace().collect::<Vec<_>>().join(" ");
        // Open MPI's words.
        if output.contains("mpirun") {
            assert!(output.contains(code), "{scenario}: {output}");
        }
    }
}

#[test]
fn mpi_must_count_as_whoever_started_the_ranks() {
    let Some(ends) = run("miscounted", 2, PATIENT, &[]) else { return };
    let said = ends.said[1].as_ref().unwrap();
    assert!(
        said.starts_with("join the group of 3 ranks as rank 1: MPI calls it rank 1 of 2; start the ranks"),
        "{said}"
    );
}

/// Started by nobody, MPI finds a world of one.
#[test]
fn ranks_that_mpi_did_not_start_are_told_what_to_do() {
    let place = Place { world_size: 2, local_world_size: 2, source: Source::Torchrun, ..Place::alone() };
    let alone = World::join(&place, &Engine::Host(Host::Mpi), Options { timeout: PATIENT, record: false });
    let said = alone.err().unwrap().to_string();
    assert!(said.contains("MPI calls it rank 0 of 1; start the ranks with the mpirun of the MPI"), "{said}");
}
