//! The backend `local` through its public API. Each test starts this binary once per rank.

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
const HASTY: Duration = Duration::from_secs(1);

/// Variable with a rank's scenario, rank, world size, port and timeout.
const VARIABLE: &str = "CANDLEWICK_TEST_RANK";

/// Runs one rank. Returns immediately without the variable, when it runs as a test.
#[test]
fn rank() {
    let Ok(arguments) = std::env::var(VARIABLE) else { return };
    let words: Vec<&str> = arguments.split(' ').collect();
    let [scenario, rank, size, port, timeout] = words[..] else { panic!("{arguments}") };
    let number = |word: &str| word.parse::<usize>().unwrap();
    let timeout = Duration::from_millis(number(timeout) as u64);
    let store = Client::connect("127.0.0.1", number(port) as u16, PATIENT).unwrap();
    if timeout < PATIENT {
        await_starts(&store, number(rank), number(size));
    }
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

/// Waits until the processes of all ranks have started. A timeout also covers joining, and processes start slowly on a busy
/// machine.
fn await_starts(store: &Client, rank: usize, size: usize) {
    let key = |rank: usize| format!("started/{rank}");
    store.set(&key(rank), b"").unwrap();
    let keys: Vec<String> = (0..size).map(key).collect();
    store.wait(&keys.iter().map(String::as_str).collect::<Vec<_>>()).unwrap();
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
        // The other ranks wait in a call that this rank does not delay.
        "error-early" if last => {
            let _started =
                group.split("part", &[(0..group.size()).collect()])?.start_all_reduce(&many()?, Reduce::Sum)?;
            return Err(Error::Tensor(candle_core::Error::Msg("read row 17".to_owned())));
        }
        "error-early" => {
            let _part = group.split("part", &[(0..group.size()).collect()])?;
            group.barrier()?;
        }
        // All ranks report a message larger than any socket buffer.
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
        // Exit in the middle of a message, of which the others wait for the rest.
        "kill-within" if last => {
            let _sent = group.start_all_reduce(&many()?, Reduce::Sum)?;
            kill_process(rustix::process::getpid(), Signal::KILL).unwrap();
        }
        "kill-within" => drop(group.all_reduce(&many()?, Reduce::Sum)?),
        "stop" if last => stop(world)?,
        "stop-while-busy" if last => world.keep_alive().during(|| stop(world))?,
        "stop-with-busy-peer" if last => {
            world.keep_alive().during(|| world.await_failure(PATIENT));
            group.barrier()?;
        }
        "stop-with-busy-peer" if world.rank() == 1 => stop(world)?,
        "busy" if last => {
            assert_eq!(world.keep_alive().during(|| world.await_failure(Duration::from_secs(7))), None);
            group.all_reduce(&x, Reduce::Sum)?;
        }
        // Rank 0 waits for the exited rank only transitively.
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
        // Rank 0 waits for the last rank through the two between them.
        "stop-chain" | "busy-chain" => {
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
        // The tensor is so large that this process would exit before the operation completes.
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
    // The signal may be delivered a moment later.
    world.await_failure(PATIENT);
    world.group().barrier()
}

/// Process of a rank.
struct Rank(Child);

/// Exit code and result line of a rank.
#[derive(Debug, PartialEq)]
struct End {
    code: Option<i32>,
    message: String,
}

impl Rank {
    fn start(scenario: &str, rank: usize, size: usize, port: u16, timeout: Duration) -> Self {
        let arguments = format!("{scenario} {rank} {size} {port} {}", timeout.as_millis());
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["local::rank", "--exact", "--nocapture", "--test-threads=1"]).env(VARIABLE, arguments);
        Self(command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap())
    }

    fn end(mut self) -> End {
        let mut output = String::new();
        self.0.stdout.take().unwrap().read_to_string(&mut output).unwrap();
        let code = self.0.wait().unwrap().code();
        // The test harness prints text before the result on the same line.
        let message = output.lines().find_map(|line| Some(line.split_once("RESULT ")?.1.to_owned()));
        End { code, message: message.unwrap_or_default() }
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
    assert!(first.iter().all(|end| *end == first[0] && end.code == Some(0) && !end.message.is_empty()), "{first:?}");
    assert_eq!(first, second);
}

#[test]
fn one_process_passes_all_cases() {
    check(1);
}

#[test]
fn two_processes_pass_all_cases() {
    check(2);
}

#[test]
fn three_processes_pass_all_cases() {
    check(3);
}

#[test]
fn four_processes_pass_all_cases() {
    check(4);
}

#[test]
fn processes_and_threads_have_the_same_bits() {
    let options = Options { timeout: PATIENT, record: false };
    let threads = candlewick_comm::threads::run(3, options, |world| crate::cases::check(&*world.group())).unwrap();
    assert_eq!(run("all", 3, PATIENT)[0].message, format!("{:x}", threads[0]));
}

#[test]
fn recorded_sequences_are_equal_across_processes() {
    let ends = run("calls", 2, PATIENT);
    assert!(ends[0] == ends[1] && ends[0].code == Some(0), "{ends:?}");
    assert_eq!(ends[0].message, "world: split 1; part: all_gather 1 (f32 [3]); world: all_reduce 2 (max, f32 [3])");
}

#[test]
fn a_dropped_pending_still_completes() {
    let ends = run("pending", 2, PATIENT);
    assert!(ends.iter().all(|end| end.code == Some(0) && end.message == "done"), "{ends:?}");
}

/// Runs a scenario in which the last rank fails. Returns the message that all other ranks report.
#[track_caller]
fn root_cause(scenario: &str, size: usize) -> String {
    let mut ends = run(scenario, size, PATIENT);
    ends.pop();
    assert!(ends.iter().all(|end| end.code == Some(1) && end.message == ends[0].message), "{ends:?}");
    ends[0].message.clone()
}

#[test]
fn mismatched_calls_are_both_named() {
    let message = root_cause("mismatch", 3);
    assert!(message.contains("calls all_reduce 1 (sum, f32 [3]), rank 2 (pid "), "{message}");
    assert!(message.contains(") calls all_gather 1 (f32 [3]) (seen by rank "), "{message}");
}

#[test]
fn a_failed_rank_aborts_the_others() {
    for scenario in ["error", "error-early"] {
        let began = Instant::now();
        assert_eq!(root_cause(scenario, 3), "continue: rank 2 failed to read row 17");
        assert!(began.elapsed() < PATIENT / 2, "the ranks waited for the timeout");
    }
}

#[test]
fn a_panicked_rank_aborts_the_others() {
    assert_eq!(root_cause("panic", 3), "continue: rank 2 failed to finish: it panicked");
}

#[test]
fn ranks_that_fail_concurrently_report_one_failure() {
    let ends = run("long", 3, PATIENT);
    assert!(
        ends.iter().all(|end| end.code == Some(1) && end.message == ends[0].message),
        "the ranks report different failures"
    );
    assert!(
        ends[0].message.starts_with("continue: rank ")
            && ends[0].message.ends_with('ö')
            && ends[0].message.len() < 1 << 15
    );
}

#[test]
fn a_rank_without_file_descriptors_is_named() {
    let message = root_cause("descriptors", 2);
    assert!(
        message.starts_with("continue: rank 0 (pid ") && message.contains(") failed to accept a connection: "),
        "{message}"
    );
}

#[test]
fn a_killed_rank_is_named_immediately() {
    for scenario in ["kill", "kill-within", "exit"] {
        let began = Instant::now();
        let message = root_cause(scenario, 3);
        assert!(
            message.starts_with("continue: rank 2 (pid ")
                && message.contains(") exited without leaving the process group (seen by"),
            "{message}"
        );
        assert!(began.elapsed() < PATIENT / 2, "the ranks waited for the timeout");
    }
}

#[test]
fn a_killed_rank_is_named_by_ranks_that_do_not_wait_for_it() {
    let mut ends = run("chain", 4, PATIENT);
    ends.pop();
    // Rank 0 waits for rank 1, which waits for rank 2, which waits for the exited rank.
    assert!(ends.iter().all(|end| end.code == Some(1) && end.message == ends[0].message), "{ends:?}");
    assert!(ends[0].message.starts_with("continue: rank 3 (pid "), "{ends:?}");
}

#[test]
fn a_rank_that_leaves_early_does_not_cause_a_timeout() {
    let message = root_cause("leave", 2);
    assert!(
        message.starts_with("finish all_reduce 1 (sum, f32 [3]) in group world of ranks [0, 1]: rank 1 (pid "),
        "{message}"
    );
    assert!(message.ends_with(") has left the process group (seen by rank 0)"), "{message}");
}

#[test]
fn a_busy_rank_does_not_time_out() {
    for (scenario, size) in [("busy", 3), ("busy-chain", 4)] {
        // A busy machine may suspend a waiting rank for longer than the timeout.
        let is_done = |ends: &Vec<End>| ends.iter().all(|end| end.code == Some(0) && end.message == "done");
        let mut runs = (0..5).map(|_| run(scenario, size, Duration::from_secs(3)));
        assert!(runs.any(|ends| is_done(&ends)), "{scenario}: each of five runs timed out");
    }
}

#[test]
fn a_stopped_rank_is_named_after_the_timeout() {
    let message = check_stop("stop", 3, 2);
    assert!(message.starts_with("finish all_reduce 1 (sum, f32 [3]) in group world of ranks [0, 1, 2]: "), "{message}");
}

#[test]
fn a_rank_that_stops_while_busy_is_named_after_the_timeout() {
    check_stop("stop-while-busy", 3, 2);
}

/// The other ranks wait for a busy rank and a stopped one. The busy rank does not extend their timeout.
#[test]
fn a_rank_that_stops_while_another_is_busy_is_named_after_the_timeout() {
    check_stop("stop-with-busy-peer", 3, 1);
}

/// Rank 0 waits for rank 1, which waits for rank 2, which waits for the stopped rank.
#[test]
fn a_stopped_rank_is_named_by_ranks_that_do_not_wait_for_it() {
    check_stop("stop-chain", 4, 3);
}

/// Runs a scenario in which rank `stopped` stops. Returns the message that all ranks report.
#[track_caller]
fn check_stop(scenario: &str, size: usize, stopped: usize) -> String {
    let server = Server::bind("127.0.0.1:0").unwrap();
    let timeout = Duration::from_secs(3);
    let mut ranks: Vec<_> = (0..size).map(|rank| Rank::start(scenario, rank, size, server.port(), timeout)).collect();
    let late = ranks.remove(stopped);
    let pid = late.pid();
    let began = Instant::now();
    let ends: Vec<_> = ranks.into_iter().map(Rank::end).collect();
    assert!(began.elapsed() < PATIENT / 2, "{scenario}: they waited for {:?}", began.elapsed());
    assert!(ends.iter().all(|end| end.code == Some(1) && end.message == ends[0].message), "{scenario}: {ends:?}");
    let (named, message) = (format!(": rank {stopped} (pid "), &ends[0].message);
    assert!(
        message.contains(&named) && message.contains(") timed out after 3s without a heartbeat (seen by rank "),
        "{scenario}: {message}"
    );
    // The stopped rank receives the failure after it continues, also without the store.
    drop(server);
    kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::CONT).unwrap();
    let late = late.end();
    assert_eq!((late.code, &late.message), (Some(1), message), "{scenario}");
    late.message
}

/// Joins in this process, for errors before any rank is connected.
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
    let message = joined.err().unwrap().to_string();
    assert!(message.contains(want), "{message}");
}

#[test]
fn a_rank_may_join_late() {
    let server = Server::bind("127.0.0.1:0").unwrap();
    let first = Rank::start("pending", 0, 2, server.port(), PATIENT);
    let store = Client::connect("127.0.0.1", server.port(), PATIENT).unwrap();
    store.wait(&["local/0/peer"]).unwrap();
    let second = Rank::start("pending", 1, 2, server.port(), PATIENT);
    assert_eq!((first.end().code, second.end().code), (Some(0), Some(0)));
}

#[test]
fn ranks_that_do_not_join_are_named() {
    let (_server, store) = store();
    refused(join(&store, 1, 4, HASTY), "join the group of 4 ranks as rank 1: rank 0, 2, 3 did not join within 1s");
}

#[test]
fn inconsistent_ranks_are_rejected() {
    let (_server, store) = store();
    refused(
        join(&store, 2, 2, HASTY),
        "join the group of 2 ranks as rank 2: the rank must be less than the world size",
    );
    refused(join(&store, 0, 2, HASTY), "rank 1 did not join");
    refused(join(&store, 0, 2, HASTY), "as rank 0: another process has already joined as this rank");
    refused(join(&store, 1, 3, HASTY), "as rank 1: rank 0 was started for 2 ranks");
    store.set("local/0/peer", b"something else").unwrap();
    refused(join(&store.with_prefix("again"), 1, 2, HASTY), "rank 0 did not join");
    store.set("fresh/local/0/peer", b"something else").unwrap();
    refused(join(&store.with_prefix("fresh"), 1, 2, HASTY), "rank 0 runs another version of this program");
}

/// Joins as rank 0 of three in a thread of this process. Ranks 1 and 2 exist in the store only. `as_rank_1` gets a connection
/// to rank 0. Returns the error of rank 0.
#[track_caller]
fn joined_by_a_raw_connection(timeout: Duration, as_rank_1: impl FnOnce(UnixStream)) -> String {
    let (_server, store) = store();
    let ours = store.new_connection().unwrap();
    let first = std::thread::spawn(move || join(&ours, 0, 3, timeout).err().unwrap().to_string());
    let peer = store.get("local/0/peer").unwrap();
    for rank in [1, 2] {
        store.set(&format!("local/{rank}/peer"), &peer).unwrap();
    }
    let socket = String::from_utf8(peer).unwrap().split('\n').nth(6).unwrap().to_owned();
    as_rank_1(UnixStream::connect_addr(&SocketAddr::from_abstract_name(socket).unwrap()).unwrap());
    first.join().unwrap()
}

/// Encodes the hello of a connection.
fn hello(rank: u32) -> Vec<u8> {
    [&rank.to_le_bytes()[..], &7u32.to_le_bytes(), b"control"].concat()
}

#[test]
fn a_rank_that_exits_while_others_join_is_named_immediately() {
    let began = Instant::now();
    let message = joined_by_a_raw_connection(PATIENT, |mut stream| stream.write_all(&hello(1)).unwrap());
    assert!(
        message.starts_with("continue: rank 1 (pid ") && message.contains(") exited without leaving the process group"),
        "{message}"
    );
    assert!(began.elapsed() < PATIENT / 2, "the ranks waited for the timeout");
}

#[test]
fn a_connection_of_an_invalid_rank_is_ignored() {
    for invalid in [0, 3, u32::MAX] {
        let message = joined_by_a_raw_connection(HASTY, |mut stream| stream.write_all(&hello(invalid)).unwrap());
        assert!(message.starts_with("connect rank 0 to the other ranks: rank 1 (pid "), "{message}");
    }
}

#[test]
fn ranks_of_another_user_or_container_are_rejected() {
    let (_server, store) = store();
    let name = |store: &Client| {
        refused(join(store, 0, 2, HASTY), "rank 1 did not join");
        String::from_utf8(store.get("local/0/peer").unwrap()).unwrap()
    };
    let peer = name(&store);
    let changed = |line: usize| {
        let mut lines: Vec<&str> = peer.split('\n').collect();
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
fn the_longest_timeout_is_valid() {
    let server = Server::bind("127.0.0.1:0").unwrap();
    let ranks = [0, 1].map(|rank| {
        let store = Client::connect("127.0.0.1", server.port(), Duration::MAX).unwrap();
        std::thread::spawn(move || join(&store, rank, 2, Duration::MAX)?.group().barrier())
    });
    ranks.into_iter().for_each(|rank| rank.join().unwrap().unwrap());
}

#[test]
fn ranks_on_two_hosts_get_an_error_with_the_backends_to_use() {
    let (_server, store) = store();
    store.set("local/0/peer", b"candlewick-peer-1\n2\nnode-7\nanother-boot\nnet user\n0\nsocket\n1").unwrap();
    let error = join(&store, 1, 2, HASTY).err().unwrap();
    assert!(matches!(error, Error::OtherHost { other: 0, .. }), "{error}");
    let message = error.to_string();
    assert!(
        message.contains("rank 0 runs on node-7") && message.contains("use `nccl`") && message.contains("`mpi`"),
        "{message}"
    );
}

#[test]
fn a_lost_store_is_reported() {
    let (server, store) = store();
    drop(server);
    refused(join(&store, 0, 2, HASTY), "communicate with the store");
}
