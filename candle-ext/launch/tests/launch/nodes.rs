//! Several launchers as several nodes. They share this machine and nothing else: all goes through the store.

use std::fs;
use std::path::Path;
use std::time::Duration;

use candlewick_comm::store::Client;
use rustix::process::Signal;

use crate::launcher::{
    Launcher, LauncherOutput, command, free_port, start, start_script, temp_folder, wait_for_file, wait_until,
};

struct Job {
    port: u16,
    backend: &'static str,
    n_nodes: &'static str,
    flags: &'static [&'static str],
}

fn static_rendezvous(port: u16) -> Job {
    Job { port, backend: "static", n_nodes: "2", flags: &[] }
}

fn c10d_rendezvous(port: u16, n_nodes: &'static str, flags: &'static [&'static str]) -> Job {
    Job { port, backend: "c10d", n_nodes, flags }
}

/// Starts the launcher of one node with one worker, or with two on node 0.
fn node(job: &Job, rank: usize, script: &str) -> Launcher {
    let port = job.port.to_string();
    let endpoint = format!("127.0.0.1:{port}");
    let (rank, n_workers) = (rank.to_string(), (if rank == 0 { 2 } else { 1 }).to_string());
    let mut arguments = vec!["--nnodes", job.n_nodes, "--nproc-per-node", &n_workers, "--rdzv-backend", job.backend];
    match job.backend {
        "static" => arguments.extend(["--node-rank", &rank, "--master-addr", "127.0.0.1", "--master-port", &port]),
        _ => arguments.extend(["--rdzv-endpoint", &endpoint, "--rdzv-id", "job7"]),
    }
    arguments.extend(job.flags);
    arguments.extend(["--", "sh", "-c", script]);
    start(&mut command(&arguments))
}

const PRINT_RANKS: &str = "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK/$GROUP_WORLD_SIZE";

#[test]
fn static_node_ranks_do_not_depend_on_the_order_of_arrival() {
    for order in [[0, 1], [1, 0]] {
        let job = static_rendezvous(free_port());
        let mut nodes: Vec<_> = order.iter().map(|rank| (*rank, node(&job, *rank, PRINT_RANKS))).collect();
        nodes.sort_by_key(|(rank, _)| *rank);
        let output: Vec<_> = nodes.into_iter().map(|(_, node)| node.wait()).collect();
        assert_eq!(output[0].exits_with(0).sorted_stdout(), ["[0]: 0/3 0/2 0/2", "[1]: 1/3 1/2 0/2"]);
        assert_eq!(output[1].exits_with(0).sorted_stdout(), ["[2]: 2/3 0/1 1/2"]);
    }
}

#[test]
fn c10d_node_ranks_follow_the_order_of_arrival() {
    let job = c10d_rendezvous(free_port(), "2", &[]);
    let nodes = [node(&job, 0, PRINT_RANKS), node(&job, 0, PRINT_RANKS)];
    let mut lines: Vec<_> =
        nodes.map(|node| node.wait().exits_with(0).stdout.clone()).concat().lines().map(str::to_owned).collect();
    lines.sort();
    let want = ["[0]: 0/4 0/2 0/2", "[1]: 1/4 1/2 0/2", "[2]: 2/4 0/2 1/2", "[3]: 3/4 1/2 1/2"];
    assert_eq!(lines, want);
}

#[test]
fn a_failure_on_one_node_ends_the_other_node() {
    let job = static_rendezvous(free_port());
    let nodes = [node(&job, 0, "exec sleep 1000"), node(&job, 1, "exit 3")];
    let [first, second] = nodes.map(Launcher::wait);
    second.exits_with(3).stderr_contains(&["rank 2 failed first"]);
    first.exits_with(7).stderr_contains(&["workers of another node failed: rank 2 on ", "exit code 3"]);
}

#[test]
fn a_failure_restarts_the_workers_of_all_nodes() {
    for job in [static_rendezvous(free_port()), c10d_rendezvous(free_port(), "2", &[])] {
        let flags: &[&str] = &["--max-restarts", "1"];
        let job = Job { flags, ..job };
        let script = "[ $TORCHELASTIC_RESTART_COUNT$RANK = 02 ] && exit 3
            [ $TORCHELASTIC_RESTART_COUNT = 0 ] && exec sleep 1000; echo $RANK of $WORLD_SIZE";
        let nodes = [node(&job, 0, script), node(&job, 1, script)];
        let mut lines: Vec<_> =
            nodes.map(|node| node.wait().exits_with(0).stdout.clone()).concat().lines().map(str::to_owned).collect();
        lines.sort();
        assert_eq!(lines, ["[0]: 0 of 3", "[1]: 1 of 3", "[2]: 2 of 3"], "{}", job.backend);
    }
}

#[test]
fn a_duplicate_node_rank_is_rejected() {
    let job = static_rendezvous(free_port());
    let (_folder, path) = temp_folder();
    let script = format!("echo > {0}/$RANK; while [ ! -e {0}/end ]; do sleep 0.01; done", path.display());
    let nodes = [node(&job, 0, &script), node(&job, 1, &script)];
    wait_for_ranks(&path, &["0", "1", "2"]);
    node(&job, 1, &script)
        .wait()
        .exits_with(1)
        .stderr_contains(&["be node 1: another launcher of this job has that --node-rank"]);
    fs::write(path.join("end"), "").unwrap();
    for node in nodes {
        node.wait().exits_with(0);
    }
}

fn wait_for_ranks(path: &Path, ranks: &[&str]) {
    ranks.iter().for_each(|rank| wait_until("a rank", || path.join(rank).exists()));
}

#[test]
fn a_late_node_joins_by_a_rerendezvous() {
    let job = c10d_rendezvous(free_port(), "1:2", &["--rdzv-conf", "last_call_timeout=0.1"]);
    let (_folder, path) = temp_folder();
    let script = format!(
        "echo > {0}/$WORLD_SIZE.$RANK; [ $WORLD_SIZE = 3 ] && echo $RANK $TORCHELASTIC_RESTART_COUNT && exit 0
         exec sleep 1000",
        path.display()
    );
    let first = node(&job, 0, &script);
    wait_for_ranks(&path, &["2.0", "2.1"]);
    let second = node(&job, 1, &script);
    let output = [first.wait(), second.wait()];
    output[0].exits_with(0).stderr_contains(&["another node came: starting all workers again"]);
    let mut lines: Vec<_> = output.iter().flat_map(|output| output.stdout.lines()).collect();
    lines.sort_unstable();
    // Nobody failed, so torchrun counts no restart.
    assert_eq!(lines, ["[0]: 0 0", "[1]: 1 0", "[2]: 2 0"]);
}

#[test]
fn a_missing_node_is_named_after_the_timeout() {
    let job = Job { flags: &["--rdzv-conf", "timeout=0.3"], ..static_rendezvous(free_port()) };
    node(&job, 0, "true").wait().exits_with(1).stderr_contains(&["meet 2 nodes at 127.0.0.1:", "node 1 did not come"]);
    node(&job, 1, "true").wait().exits_with(1).stderr_contains(&["meet at 127.0.0.1:", "refused"]);
}

#[test]
fn a_signal_interrupts_the_wait_for_nodes() {
    let job = static_rendezvous(free_port());
    let waiting = node(&job, 0, "true");
    wait_until("the store", || Client::connect("127.0.0.1", job.port, Duration::from_millis(50)).is_ok());
    waiting.signal(Signal::INT);
    waiting.wait().exits_with(130);
}

#[test]
fn a_killed_store_host_ends_the_other_node() {
    let job = static_rendezvous(free_port());
    let (_folder, path) = temp_folder();
    let script = format!("echo > {}/$RANK; exec sleep 1000", path.display());
    let nodes = [node(&job, 0, &script), node(&job, 1, &script)];
    wait_for_ranks(&path, &["0", "1", "2"]);
    nodes[0].signal(Signal::KILL);
    let [first, second] = nodes.map(Launcher::wait);
    assert_eq!(first.exit_code, None);
    second.exits_with(7).stderr_contains(&["the node that hosts the store is gone"]);
}

#[test]
fn workers_can_connect_to_the_launchers_store() {
    let (_folder, path) = temp_folder();
    let script =
        format!("echo $MASTER_ADDR $MASTER_PORT > {0}/at; while [ ! -e {0}/end ]; do sleep 0.01; done", path.display());
    let running = start_script(1, &[], &script);
    let at = wait_for_file(&path.join("at"));
    let (host, port) = at.split_once(' ').unwrap();
    let client = Client::connect(host, port.parse().unwrap(), Duration::from_secs(10)).unwrap();
    client.set("key", b"value").unwrap();
    assert_eq!(client.get("key").unwrap(), b"value");
    fs::write(path.join("end"), "").unwrap();
    running.wait().exits_with(0);
}

/// What dead workers left in their store, torch's gloo would take for addresses of living ones.
#[test]
fn restarted_workers_get_an_empty_store() {
    for job in [static_rendezvous(free_port()), c10d_rendezvous(free_port(), "2", &[])] {
        let job = Job { flags: &["--max-restarts", "1"], ..job };
        let (_folder, path) = temp_folder();
        let script = format!(
            "cd {}; n=$TORCHELASTIC_RESTART_COUNT; echo $MASTER_ADDR $MASTER_PORT > at$n.$RANK
             while [ ! -e end$n ]; do sleep 0.01; done; exit $((1 - n))",
            path.display()
        );
        let nodes = [node(&job, 0, &script), node(&job, 1, &script)];
        for attempt in 0..2 {
            let at = [0, 1, 2].map(|rank| wait_for_file(&path.join(format!("at{attempt}.{rank}"))));
            assert!(at.iter().all(|other| *other == at[0]), "{at:?}");
            let (host, port) = at[0].split_once(' ').unwrap();
            let client = Client::connect(host, port.parse().unwrap(), Duration::from_secs(10)).unwrap();
            assert!(!client.check(&["key"]).unwrap());
            client.set("key", b"value").unwrap();
            fs::write(path.join(format!("end{attempt}")), "").unwrap();
        }
        for node in nodes {
            node.wait().exits_with(0);
        }
    }
}

#[test]
fn a_lost_node_is_dropped_by_a_rerendezvous() {
    let flags = &["--max-restarts", "1", "--rdzv-conf", "last_call_timeout=0.3,keep_alive_interval=1"];
    let job = c10d_rendezvous(free_port(), "1:2", flags);
    let (_folder, path) = temp_folder();
    // The first may have begun alone; that is not the end.
    let script = format!(
        "echo > {0}/$WORLD_SIZE.$RANK; [ $WORLD_SIZE = 2 ] && [ -e {0}/lost ] && exit 0; exec sleep 1000",
        path.display()
    );
    let first = node(&job, 0, &script);
    wait_until("the store", || Client::connect("127.0.0.1", job.port, Duration::from_millis(50)).is_ok());
    let second = node(&job, 1, &script);
    wait_for_ranks(&path, &["3.0", "3.1", "3.2"]);
    fs::write(path.join("lost"), "").unwrap();
    second.signal(Signal::KILL);
    first
        .wait()
        .exits_with(0)
        .stderr_contains(&["was not heard of for 3s", "starting all workers again: restart 1 of 1"]);
    assert_eq!(second.wait().exit_code, None);
}

/// What two nodes do when one is asked to stop: it is told, and so is the other.
#[track_caller]
fn check_stop(job: &Job, stopped: usize, script: &str) -> [LauncherOutput; 2] {
    let (_folder, path) = temp_folder();
    let script = format!("cd {}; {script}; echo > $RANK; while :; do sleep 0.01; done", path.display());
    let nodes = [node(job, 0, &script), node(job, 1, &script)];
    wait_for_ranks(&path, &["0", "1", "2"]);
    nodes[stopped].signal(Signal::TERM);
    nodes.map(Launcher::wait)
}

#[test]
fn a_stopped_node_stops_the_other_node() {
    for stopped in [0, 1] {
        let output = check_stop(&static_rendezvous(free_port()), stopped, "trap 'exit 75' TERM");
        output[stopped].exits_with(75);
        output[1 - stopped]
            .exits_with(75)
            .stderr_contains(&["another node was stopped: the launcher on ", "signal 15 (SIGTERM)"]);
        let output = check_stop(&static_rendezvous(free_port()), stopped, "trap 'exit 1' TERM");
        output[stopped].exits_with(1);
        output[1 - stopped].exits_with(7).stderr_contains(&["workers of another node failed: "]);
    }
}

#[test]
fn a_stopped_node_is_dropped_if_min_nodes_remain() {
    let job = c10d_rendezvous(free_port(), "1:2", &["--rdzv-conf", "last_call_timeout=0.3"]);
    let (_folder, path) = temp_folder();
    let script = format!(
        "echo > {0}/$WORLD_SIZE.$RANK; [ $WORLD_SIZE = 2 ] && [ -e {0}/left ] && exit 0; exec sleep 1000",
        path.display()
    );
    let first = node(&job, 0, &script);
    wait_until("the store", || Client::connect("127.0.0.1", job.port, Duration::from_millis(50)).is_ok());
    let second = node(&job, 1, &script);
    wait_for_ranks(&path, &["3.0", "3.1", "3.2"]);
    fs::write(path.join("left"), "").unwrap();
    second.signal(Signal::TERM);
    first.wait().exits_with(0).stderr_contains(&["another node left: starting all workers again"]);
    second.wait().exits_with(143);
}

#[test]
fn the_first_failure_is_published_before_the_other_workers_exit() {
    let job = static_rendezvous(free_port());
    let (_folder, path) = temp_folder();
    // Rank 0 fails, rank 1 ends when the other node's rank has.
    let script = format!(
        "cd {}; echo > $RANK; until [ -e 0 ] && [ -e 1 ] && [ -e 2 ]; do sleep 0.01; done; [ $RANK = 0 ] && exit 5
         [ $RANK = 2 ] && trap 'echo > told; exit 1' TERM || trap '' TERM
         while [ $RANK = 2 ] || [ ! -e told ]; do sleep 0.01; done",
        path.display()
    );
    let nodes = [node(&job, 0, &script), node(&job, 1, &script)].map(Launcher::wait);
    nodes[0].exits_with(5).stderr_contains(&["rank 0 failed first"]);
    nodes[1].exits_with(7).stderr_contains(&["workers of another node failed: rank 0 on ", "exit code 5"]);
    assert!(!nodes[1].stderr.contains("failed first"), "{}", nodes[1].stderr);
}

#[test]
fn a_node_whose_ranks_report_a_peer_failure_is_not_the_root_cause() {
    let job = static_rendezvous(free_port());
    let (_folder, path) = temp_folder();
    let script = format!(
        "[ $RANK = 2 ] && echo > {0}/blamed && exit 7; [ $RANK = 1 ] && exec sleep 1000
         while [ ! -e {0}/blamed ]; do sleep 0.01; done; exit 5",
        path.display()
    );
    let nodes = [node(&job, 0, &script), node(&job, 1, &script)].map(Launcher::wait);
    nodes[0].exits_with(5);
    nodes[1].exits_with(7).stderr_contains(&["rank 0 on "]);
    assert!(!nodes[1].stderr.contains("rank 2 failed first"), "{}", nodes[1].stderr);
}

#[test]
fn a_node_that_left_while_waiting_may_join_again() {
    // Its silence alone would not make room for it in time.
    let flags = &["--rdzv-conf", "keep_alive_interval=100"];
    for job in [Job { n_nodes: "3", flags, ..static_rendezvous(free_port()) }, c10d_rendezvous(free_port(), "3", flags)]
    {
        let host = node(&job, 0, PRINT_RANKS);
        wait_until("the store", || Client::connect("127.0.0.1", job.port, Duration::from_millis(50)).is_ok());
        let store = Client::connect("127.0.0.1", job.port, Duration::from_secs(10)).unwrap();
        let id = if job.backend == "static" { "none" } else { "job7" };
        let store = store.with_prefix(&format!("launch/{id}/0"));
        wait_until("the host's beat", || store.add("here/0", 0).unwrap() > 0);
        let waiting = node(&job, 1, PRINT_RANKS);
        wait_until("a beat", || store.add("here/1", 0).unwrap() > 0);
        waiting.signal(Signal::INT);
        waiting.wait().exits_with(130);
        let others = [node(&job, 1, PRINT_RANKS), node(&job, 2, PRINT_RANKS)];
        host.wait().exits_with(0);
        let output = others.map(Launcher::wait);
        let mut lines: Vec<_> = output.iter().flat_map(|output| output.exits_with(0).stdout.lines()).collect();
        lines.sort_unstable();
        assert_eq!(lines, ["[2]: 2/4 0/1 1/3", "[3]: 3/4 0/1 2/3"], "{}", job.backend);
    }
}

#[test]
fn the_node_rank_of_a_dead_launcher_can_be_claimed() {
    let job = Job { n_nodes: "3", flags: &["--rdzv-conf", "keep_alive_interval=1"], ..static_rendezvous(free_port()) };
    let host = node(&job, 0, PRINT_RANKS);
    wait_until("the store", || Client::connect("127.0.0.1", job.port, Duration::from_millis(50)).is_ok());
    let store = Client::connect("127.0.0.1", job.port, Duration::from_secs(10)).unwrap().with_prefix("launch/none/0");
    let waiting = node(&job, 1, PRINT_RANKS);
    wait_until("a beat", || store.add("here/1", 0).unwrap() > 0);
    waiting.signal(Signal::KILL);
    waiting.wait();
    for node in [host, node(&job, 1, PRINT_RANKS), node(&job, 2, PRINT_RANKS)] {
        node.wait().exits_with(0);
    }
}

#[test]
fn launchers_with_different_settings_name_the_difference() {
    // Whoever notices first leaves; the other may wait for a better one.
    let job = Job { flags: &["--rdzv-conf", "timeout=5"], ..static_rendezvous(free_port()) };
    let other = Job { flags: &["--rdzv-conf", "timeout=5", "--max-restarts", "2"], ..static_rendezvous(job.port) };
    let output = [node(&job, 0, PRINT_RANKS), node(&other, 1, PRINT_RANKS)].map(Launcher::wait);
    let said = |output: &LauncherOutput| {
        output.stderr.contains("agree with the launcher on ") && output.stderr.contains("--max-restarts is ")
    };
    assert!(output.iter().any(said), "{}\n{}", output[0].stderr, output[1].stderr);
    assert!(output.iter().all(|output| output.exit_code == Some(1) && output.stdout.is_empty()));
}

/// Starts two nodes. The ranks of `done` end well, the others go on until they are told.
fn start_half_done(job: &Job, done_ranks: &str) -> [Launcher; 2] {
    let script = format!("case $RANK in {done_ranks}) exit 0;; esac; exec sleep 1000");
    let nodes = [node(job, 0, &script), node(job, 1, &script)];
    wait_until("the store", || Client::connect("127.0.0.1", job.port, Duration::from_millis(50)).is_ok());
    let store = Client::connect("127.0.0.1", job.port, Duration::from_secs(10)).unwrap().with_prefix("launch/none/0");
    wait_until("the end of half of the work", || store.add("done", 0).unwrap() > 0);
    nodes
}

#[test]
fn a_node_that_succeeded_needs_no_store() {
    let [host, other] = start_half_done(&static_rendezvous(free_port()), "2");
    host.signal(Signal::KILL);
    other.wait().exits_with(0);
    host.wait();
}

#[test]
fn a_store_host_that_succeeded_detects_lost_nodes() {
    let flags = &["--rdzv-conf", "keep_alive_interval=1"];
    let [host, other] = start_half_done(&Job { flags, ..static_rendezvous(free_port()) }, "0 | 1");
    other.signal(Signal::KILL);
    other.wait();
    host.wait().exits_with(7).stderr_contains(&["node 1 was not heard of for 3s"]);
}

#[test]
fn a_store_host_that_succeeded_announces_its_stop() {
    let [host, other] = start_half_done(&static_rendezvous(free_port()), "0 | 1");
    host.signal(Signal::TERM);
    other.wait().exits_with(7).stderr_contains(&["another node was stopped: the launcher on "]);
    host.wait().exits_with(143);
}
