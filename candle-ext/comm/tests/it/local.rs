//! The world of processes, through the front door: each test starts real processes, this binary again as one rank.

use std::io::{Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use candlewick_comm::store::{Client, Server};
use candlewick_comm::{Error, Options, Recv, Reduce, Result, World, local};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, setrlimit};

const PATIENT: Duration = Duration::from_secs(60);
const HASTY: Duration = Duration::from_millis(300);

/// Tells a process which rank of which test it is.
const VARIABLE: &str = "CANDLEWICK_TEST_RANK";

/// What the rank processes do. Not a test of its own: returns at once when it is run as one.
#[test]
fn rank() {
    let Ok(told) = std::env::var(VARIABLE) else { return };
    let words: Vec<&str> = told.split(' ').collect();
    let [scenario, rank, size, port, timeout] = words[..] else { panic!("{told}") };
    let number = |word: &str| word.parse::<usize>().unwrap();
    let timeout = Duration::from_millis(number(timeout) as u64);
    let store = Client::connect("127.0.0.1", number(port) as u16, PATIENT).unwrap();
    let options = Options { timeout, record: true };
    let done = local::join(&store, number(rank), number(size), options)
        .and_then(|world| world.run(|world| act(scenario, world)));
    match done {
        Ok(result) => println!("RESULT {result}"),
        Err(error) => {
            println!("RESULT {error}");
            std::process::exit(1);
        }
    }
}

fn act(scenario: &str, world: &World) -> Result<String> {
    let group = world.group();
    let x = Tensor::ones(3, DType::F32, &Device::Cpu)?;
    let many = || Tensor::ones(1 << 23, DType::F32, &Device::Cpu);
    let last = world.rank() + 1 == world.size();
    match scenario {
        "all" => return Ok(format!("{:x}", crate::cases::check(&*group)?)),
        "calls" => {
            group.split("part", &[(0..group.size()).collect()])?.start_all_gather(&x)?.wait()?;
            group.all_reduce(&x, Reduce::Max)?;
            let shown: Vec<String> = world.calls().iter().map(|call| format!("{}: {call}", call.group)).collect();
            return Ok(shown.join("; "));
        }
        "mismatch" if last => drop(group.all_gather(&x)?),
        "error" if last => return Err(Error::Tensor(candle_core::Error::Msg("read row 17".to_owned()))),
        // Where the others do not see it as a silence of this rank.
        "error-early" if last => {
            let _started =
                group.split("part", &[(0..group.size()).collect()])?.start_all_reduce(&many()?, Reduce::Sum)?;
            return Err(Error::Tensor(candle_core::Error::Msg("read row 17".to_owned())));
        }
        "error-early" => {
            let _part = group.split("part", &[(0..group.size()).collect()])?;
            group.barrier()?;
        }
        // What does not fit into any socket's buffer, told by all at once.
        "long" => return Err(Error::Tensor(candle_core::Error::Msg("ö".repeat(2 << 20)))),
        "descriptors" => {
            if world.rank() == 0 {
                let few = Rlimit { current: Some(64), maximum: getrlimit(Resource::Nofile).maximum };
                setrlimit(Resource::Nofile, few).unwrap();
                (0..64).map_while(|_| std::fs::File::open("/dev/null").ok()).for_each(std::mem::forget);
            }
            group.split("part", &[(0..group.size()).collect()])?.barrier()?;
        }
        "panic" if last => panic!("index out of bounds"),
        "leave" if last => {}
        "exit" if last => std::process::exit(3),
        "kill" if last => kill_process(rustix::process::getpid(), Signal::KILL).unwrap(),
        // In the middle of a message: the others wait for the rest of it.
        "kill-within" if last => {
            let _sent = group.start_all_reduce(&many()?, Reduce::Sum)?;
            kill_process(rustix::process::getpid(), Signal::KILL).unwrap();
        }
        "kill-within" => drop(group.all_reduce(&many()?, Reduce::Sum)?),
        "stop" if last => stop(world)?,
        "stop-at-work" if last => world.keep_alive().during(|| stop(world))?,
        "stop-beside-work" if last => {
            world.keep_alive().during(|| world.await_failure(PATIENT));
            group.barrier()?;
        }
        "stop-beside-work" if world.rank() == 1 => stop(world)?,
        "at-work" if last => {
            assert_eq!(world.keep_alive().during(|| world.await_failure(Duration::from_secs(7))), None);
            group.all_reduce(&x, Reduce::Sum)?;
        }
        // Nobody waits for the dead one itself, only for those who do.
        "chain" => {
            let pairs = [vec![0, 1], vec![2, 3]];
            let part = group.split("pair", &pairs)?;
            match world.rank() {
                3 => kill_process(rustix::process::getpid(), Signal::KILL).unwrap(),
                2 => part.barrier()?,
                1 => group.send_recv(None, None, Some(Recv::like(&x, 2))).map(drop)?,
                _ => part.barrier()?,
            }
        }
        // The last rank keeps the first waiting by way of the two between.
        "stop-chain" | "work-chain" => {
            let part = group.split("pair", &[vec![0, 1], vec![2, 3]])?;
            if last && scenario == "stop-chain" {
                stop(world)?;
            } else if last {
                assert_eq!(world.keep_alive().during(|| world.await_failure(Duration::from_secs(7))), None);
            }
            if world.rank() == 1 {
                group.send_recv(None, None, Some(Recv::like(&x, 2)))?;
            }
            part.barrier()?;
            if world.rank() == 2 {
                group.send_recv(Some(&x), Some(1), None)?;
            }
        }
        // So much that this process would have ended before it is done.
        "pending" if last => drop(group.start_all_reduce(&many()?, Reduce::Sum)?),
        "pending" => {
            assert_eq!(group.all_reduce(&many()?, Reduce::Sum)?.max_all()?.to_scalar::<f32>()?, group.size() as f32);
        }
        _ => drop(group.all_reduce(&x, Reduce::Sum)?),
    }
    Ok("done".to_owned())
}

/// Stops this process until another continues it.
fn stop(world: &World) -> Result<()> {
    kill_process(rustix::process::getpid(), Signal::STOP).unwrap();
    // The signal may come a moment later.
    world.await_failure(PATIENT);
    world.group().barrier()
}

/// A rank's process.
struct Rank(Child);

/// How a rank ended, and what it said.
#[derive(Debug, PartialEq)]
struct End {
    code: Option<i32>,
    said: String,
}

impl Rank {
    fn start(scenario: &str, rank: usize, size: usize, port: u16, timeout: Duration) -> Self {
        let told = format!("{scenario} {rank} {size} {port} {}", timeout.as_millis());
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["local::rank", "--exact", "--nocapture", "--test-threads=1"]).env(VARIABLE, told);
        Self(command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap())
    }

    fn end(mut self) -> End {
        let mut output = String::new();
        self.0.stdout.take().unwrap().read_to_string(&mut output).unwrap();
        let code = self.0.wait().unwrap().code();
        // The test harness writes its own words before ours on the same line.
        let said = output.lines().find_map(|line| Some(line.split_once("RESULT ")?.1.to_owned()));
        End { code, said: said.unwrap_or_default() }
    }

    fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs all ranks of a scenario.
fn run(scenario: &str, size: usize, timeout: Duration) -> Vec<End> {
    let server = Server::bind("127.0.0.1:0").unwrap();
    let ranks: Vec<_> = (0..size).map(|rank| Rank::start(scenario, rank, size, server.port(), timeout)).collect();
    ranks.into_iter().map(Rank::end).collect()
}

#[track_caller]
fn check(size: usize) {
    let [first, second] = [(); 2].map(|()| run("all", size, PATIENT));
    assert!(first.iter().all(|end| *end == first[0] && end.code == Some(0) && !end.said.is_empty()), "{first:?}");
    assert_eq!(first, second);
}

#[test]
fn one_process_does_all() {
    check(1);
}

#[test]
fn two_processes_do_all() {
    check(2);
}

#[test]
fn three_processes_do_all() {
    check(3);
}

#[test]
fn four_processes_do_all() {
    check(4);
}

#[test]
fn processes_and_threads_have_the_same_bits() {
    let options = Options { timeout: PATIENT, record: false };
    let threads = candlewick_comm::threads::run(3, options, |world| crate::cases::check(&*world.group())).unwrap();
    assert_eq!(run("all", 3, PATIENT)[0].said, format!("{:x}", threads[0]));
}

#[test]
fn recorded_sequences_are_equal_across_processes() {
    let ends = run("calls", 2, PATIENT);
    assert!(ends[0] == ends[1] && ends[0].code == Some(0), "{ends:?}");
    assert_eq!(ends[0].said, "world: split 1; part: all_gather 1 (f32 [3]); world: all_reduce 2 (max, f32 [3])");
}

#[test]
fn a_dropped_pending_still_does_its_part() {
    let ends = run("pending", 2, PATIENT);
    assert!(ends.iter().all(|end| end.code == Some(0) && end.said == "done"), "{ends:?}");
}

/// Runs a scenario in which the last rank does something else; returns what all others say, which is the same.
#[track_caller]
fn root_cause(scenario: &str, size: usize) -> String {
    let mut ends = run(scenario, size, PATIENT);
    ends.pop();
    assert!(ends.iter().all(|end| end.code == Some(1) && end.said == ends[0].said), "{ends:?}");
    ends[0].said.clone()
}

#[test]
fn calls_that_do_not_match_are_both_named() {
    let said = root_cause("mismatch", 3);
    assert!(said.contains("calls all_reduce 1 (sum, f32 [3]), rank 2 (pid "), "{said}");
    assert!(said.contains(") calls all_gather 1 (f32 [3]) (seen by rank "), "{said}");
}

#[test]
fn a_rank_that_fails_ends_the_others() {
    for scenario in ["error", "error-early"] {
        let began = Instant::now();
        assert_eq!(root_cause(scenario, 3), "go on: rank 2 failed to read row 17");
        assert!(began.elapsed() < PATIENT / 2, "the time-out was waited for");
    }
}

#[test]
fn a_rank_that_panics_ends_the_others() {
    assert_eq!(root_cause("panic", 3), "go on: rank 2 failed to finish: it panicked");
}

#[test]
fn ranks_that_fail_at_once_with_much_to_say_agree() {
    let ends = run("long", 3, PATIENT);
    assert!(ends.iter().all(|end| end.code == Some(1) && end.said == ends[0].said), "the ranks say different things");
    assert!(ends[0].said.starts_with("go on: rank ") && ends[0].said.ends_with('ö') && ends[0].said.len() < 1 << 15);
}

#[test]
fn a_rank_that_can_open_no_more_sockets_says_so() {
    let said = root_cause("descriptors", 2);
    assert!(said.starts_with("go on: rank 0 (pid ") && said.contains(") failed to accept a connection: "), "{said}");
}

#[test]
fn a_killed_rank_is_named_at_once() {
    for scenario in ["kill", "kill-within", "exit"] {
        let began = Instant::now();
        let said = root_cause(scenario, 3);
        assert!(said.starts_with("go on: rank 2 (pid ") && said.contains(") ended without leaving (seen by"), "{said}");
        assert!(began.elapsed() < PATIENT / 2, "the time-out was waited for");
    }
}

#[test]
fn a_killed_rank_is_named_by_those_who_do_not_wait_for_it() {
    let mut ends = run("chain", 4, PATIENT);
    ends.pop();
    // Rank 0 needs only rank 1, which waits for rank 2, which waits for the dead.
    assert!(ends.iter().all(|end| end.code == Some(1) && end.said == ends[0].said), "{ends:?}");
    assert!(ends[0].said.starts_with("go on: rank 3 (pid "), "{ends:?}");
}

#[test]
fn a_rank_that_leaves_early_is_not_waited_for() {
    let said = root_cause("leave", 2);
    assert!(
        said.starts_with("finish all_reduce 1 (sum, f32 [3]) in group world of ranks [0, 1]: rank 1 (pid "),
        "{said}"
    );
    assert!(said.ends_with(") has left (seen by rank 0)"), "{said}");
}

#[test]
fn a_rank_at_work_is_waited_for_beyond_the_time_out() {
    for (scenario, size) in [("at-work", 3), ("work-chain", 4)] {
        let ends = run(scenario, size, Duration::from_secs(3));
        assert!(ends.iter().all(|end| end.code == Some(0) && end.said == "done"), "{scenario}: {ends:?}");
    }
}

#[test]
fn a_stopped_rank_is_named_after_the_time_out() {
    let said = check_stop("stop", 3, 2);
    assert!(said.starts_with("finish all_reduce 1 (sum, f32 [3]) in group world of ranks [0, 1, 2]: "), "{said}");
}

#[test]
fn a_rank_that_stops_while_it_is_at_work_is_named_after_the_time_out() {
    check_stop("stop-at-work", 3, 2);
}

/// The others do not wait for the one at work, as long as it may take, while they also wait for the one that has stopped.
#[test]
fn a_rank_that_stops_while_another_is_at_work_is_named_after_the_time_out() {
    check_stop("stop-beside-work", 3, 1);
}

/// Rank 0 needs only rank 1, which waits for rank 2, which waits for the stopped one.
#[test]
fn a_stopped_rank_is_named_by_those_who_do_not_wait_for_it() {
    check_stop("stop-chain", 4, 3);
}

/// Returns what all ranks say, when `stopped` has stopped.
#[track_caller]
fn check_stop(scenario: &str, size: usize, stopped: usize) -> String {
    let server = Server::bind("127.0.0.1:0").unwrap();
    // Joining takes longer than a moment on a busy machine, so the moment is not too short.
    let timeout = Duration::from_secs(3);
    let mut ranks: Vec<_> = (0..size).map(|rank| Rank::start(scenario, rank, size, server.port(), timeout)).collect();
    let late = ranks.remove(stopped);
    let pid = late.pid();
    let began = Instant::now();
    let ends: Vec<_> = ranks.into_iter().map(Rank::end).collect();
    assert!(began.elapsed() < PATIENT / 2, "{scenario}: they waited for {:?}", began.elapsed());
    assert!(ends.iter().all(|end| end.code == Some(1) && end.said == ends[0].said), "{scenario}: {ends:?}");
    let (named, said) = (format!(": rank {stopped} (pid "), &ends[0].said);
    assert!(said.contains(&named) && said.contains(") silent for 3s (seen by rank "), "{scenario}: {said}");
    // It is told when it goes on, also where nobody keeps the store any more.
    drop(server);
    kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::CONT).unwrap();
    let late = late.end();
    assert_eq!((late.code, &late.said), (Some(1), said), "{scenario}");
    late.said
}

/// Joins in this process; for what is refused before any rank is connected.
fn join(store: &Client, rank: usize, size: usize, timeout: Duration) -> Result<World> {
    local::join(store, rank, size, Options { timeout, record: false })
}

fn store() -> (Server, Client) {
    let server = Server::bind("127.0.0.1:0").unwrap();
    let client = Client::connect("127.0.0.1", server.port(), PATIENT).unwrap();
    (server, client)
}

#[track_caller]
fn refused(joined: Result<World>, want: &str) {
    let said = joined.err().unwrap().to_string();
    assert!(said.contains(want), "{said}");
}

#[test]
fn a_rank_that_comes_late_is_waited_for() {
    let server = Server::bind("127.0.0.1:0").unwrap();
    let first = Rank::start("pending", 0, 2, server.port(), PATIENT);
    let store = Client::connect("127.0.0.1", server.port(), PATIENT).unwrap();
    store.wait(&["local/0/peer"]).unwrap();
    let second = Rank::start("pending", 1, 2, server.port(), PATIENT);
    assert_eq!((first.end().code, second.end().code), (Some(0), Some(0)));
}

#[test]
fn ranks_that_never_come_are_named() {
    let (_server, store) = store();
    refused(join(&store, 1, 4, HASTY), "join the group of 4 ranks as rank 1: rank 0, 2, 3 did not join within 300ms");
}

#[test]
fn ranks_that_do_not_fit_are_refused() {
    let (_server, store) = store();
    refused(join(&store, 2, 2, HASTY), "join the group of 2 ranks as rank 2: there is no such rank");
    refused(join(&store, 0, 2, HASTY), "rank 1 did not join");
    refused(join(&store, 0, 2, HASTY), "as rank 0: another process has joined as this rank");
    refused(join(&store, 1, 3, HASTY), "as rank 1: rank 0 was started for 2 ranks");
    store.set("local/0/peer", b"something else").unwrap();
    refused(join(&store.with_prefix("again"), 1, 2, HASTY), "rank 0 did not join");
    store.set("fresh/local/0/peer", b"something else").unwrap();
    refused(join(&store.with_prefix("fresh"), 1, 2, HASTY), "rank 0 runs another version of this program");
}

/// Joins as rank 0 of three in a thread of this process; rank 2 has not been heard of but in the store. `as_rank_1` is
/// given a connection to rank 0. Returns why rank 0 fails.
#[track_caller]
fn joined_by_a_stranger(timeout: Duration, as_rank_1: impl FnOnce(UnixStream)) -> String {
    let (_server, store) = store();
    let ours = store.reconnect().unwrap();
    let first = std::thread::spawn(move || join(&ours, 0, 3, timeout).err().unwrap().to_string());
    let about = store.get("local/0/peer").unwrap();
    for rank in [1, 2] {
        store.set(&format!("local/{rank}/peer"), &about).unwrap();
    }
    let socket = String::from_utf8(about).unwrap().split('\n').nth(6).unwrap().to_owned();
    as_rank_1(UnixStream::connect_addr(&SocketAddr::from_abstract_name(socket).unwrap()).unwrap());
    first.join().unwrap()
}

/// What a rank says first when it calls.
fn hello(rank: u32) -> Vec<u8> {
    [&rank.to_le_bytes()[..], &7u32.to_le_bytes(), b"control"].concat()
}

#[test]
fn a_rank_that_dies_while_others_join_is_named_at_once() {
    let began = Instant::now();
    let said = joined_by_a_stranger(PATIENT, |mut stream| stream.write_all(&hello(1)).unwrap());
    assert!(said.starts_with("go on: rank 1 (pid ") && said.contains(") ended without leaving"), "{said}");
    assert!(began.elapsed() < PATIENT / 2, "the time-out was waited for");
}

#[test]
fn a_caller_that_is_no_rank_is_ignored() {
    for stranger in [0, 3, u32::MAX] {
        let said = joined_by_a_stranger(HASTY, |mut stream| stream.write_all(&hello(stranger)).unwrap());
        assert!(said.starts_with("connect rank 0 to the others: rank 1 (pid "), "{said}");
    }
}

#[test]
fn ranks_of_another_user_or_container_are_refused() {
    let (_server, store) = store();
    let name = |store: &Client| {
        refused(join(store, 0, 2, HASTY), "rank 1 did not join");
        String::from_utf8(store.get("local/0/peer").unwrap()).unwrap()
    };
    let about = name(&store);
    let changed = |line: usize| {
        let mut lines: Vec<&str> = about.split('\n').collect();
        lines[line] = "4242";
        lines.join("\n")
    };
    for (line, why) in [(4, "rank 0 runs in another container (4242, not net:["), (5, "rank 0 runs as user 4242, this")]
    {
        let store = store.with_prefix(&line.to_string());
        store.set("local/0/peer", changed(line).as_bytes()).unwrap();
        refused(join(&store, 1, 2, HASTY), why);
    }
}

#[test]
fn no_time_is_too_long() {
    let server = Server::bind("127.0.0.1:0").unwrap();
    let ranks = [0, 1].map(|rank| {
        let store = Client::connect("127.0.0.1", server.port(), Duration::MAX).unwrap();
        std::thread::spawn(move || join(&store, rank, 2, Duration::MAX)?.group().barrier())
    });
    ranks.into_iter().for_each(|rank| rank.join().unwrap().unwrap());
}

#[test]
fn ranks_on_two_hosts_are_told_what_to_use() {
    let (_server, store) = store();
    store.set("local/0/peer", b"candlewick-peer-1\n2\nnode-7\nanother-boot\nnet user\n0\nsocket\n1").unwrap();
    let error = join(&store, 1, 2, HASTY).err().unwrap();
    assert!(matches!(error, Error::OtherHost { other: 0, .. }), "{error}");
    let said = error.to_string();
    assert!(said.contains("rank 0 runs on node-7") && said.contains("use `nccl`") && said.contains("`mpi`"), "{said}");
}

#[test]
fn a_store_that_is_gone_is_said() {
    let (server, store) = store();
    drop(server);
    refused(join(&store, 0, 2, HASTY), "talk to the store");
}
