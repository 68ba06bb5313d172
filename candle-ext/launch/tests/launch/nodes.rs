//! Several launchers as nodes of one job. They run on one machine and communicate through the store only.

use std::fs;
use std::path::Path;
use std::process::Command;

use candlewick_comm::store::{Client, Error, StoreSecret};
use rustix::process::Signal;

use crate::launcher::{
    AWAIT_SIGNALS, Launcher, LauncherOutput, START_CHILD, STORE_SECRET, TIMEOUT, command, connect_to_store,
    create_gate, free_port, open_gate, start, start_script, temp_folder, wait_for_count, wait_for_file,
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

/// Starts the launcher of a node: two workers on node 0, one on the others.
fn node(job: &Job, rank: usize, script: &str) -> Launcher {
    start(&mut node_command(job, rank, script))
}

fn node_command(job: &Job, rank: usize, script: &str) -> Command {
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
    let mut command = command(&arguments);
    command.env(StoreSecret::VARIABLE, STORE_SECRET);
    command
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
    let nodes = [node(&job, 0, "exec sleep infinity"), node(&job, 1, "exit 3")];
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
            [ $TORCHELASTIC_RESTART_COUNT = 0 ] && exec sleep infinity; echo $RANK of $WORLD_SIZE";
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
    let script = format!("echo > {0}/$RANK; : < {0}/end", path.display());
    create_gate(&path.join("end"));
    let nodes = [node(&job, 0, &script), node(&job, 1, &script)];
    wait_for_ranks(&path, &["0", "1", "2"]);
    node(&job, 1, &script)
        .wait()
        .exits_with(1)
        .stderr_contains(&["join as node 1: a launcher on ", "has this --node-rank already"]);
    let _gate = open_gate(&path.join("end"));
    for node in nodes {
        node.wait().exits_with(0);
    }
}

fn wait_for_ranks(path: &Path, ranks: &[&str]) {
    ranks.iter().for_each(|rank| drop(wait_for_file(&path.join(rank))));
}

#[test]
fn a_late_node_joins_by_a_rerendezvous() {
    let job = c10d_rendezvous(free_port(), "1:2", &["--rdzv-conf", "last_call_timeout=0.1"]);
    let (_folder, path) = temp_folder();
    let script = format!(
        "echo > {0}/$WORLD_SIZE.$RANK; [ $WORLD_SIZE = 3 ] && echo $RANK $TORCHELASTIC_RESTART_COUNT && exit 0
         exec sleep infinity",
        path.display()
    );
    let first = node(&job, 0, &script);
    wait_for_ranks(&path, &["2.0", "2.1"]);
    let second = node(&job, 1, &script);
    let output = [first.wait(), second.wait()];
    output[0].exits_with(0).stderr_contains(&["another node joined: restarting the worker group"]);
    let mut lines: Vec<_> = output.iter().flat_map(|output| output.stdout.lines()).collect();
    lines.sort_unstable();
    // A membership change is no restart, as in torchrun.
    assert_eq!(lines, ["[0]: 0 0", "[1]: 1 0", "[2]: 2 0"]);
}

#[test]
fn a_missing_node_is_named_after_the_timeout() {
    let job = Job { flags: &["--rdzv-conf", "timeout=2"], ..static_rendezvous(free_port()) };
    node(&job, 0, "true")
        .wait()
        .exits_with(1)
        .stderr_contains(&["complete the rendezvous of 2 nodes at 127.0.0.1:", "node 1 did not join"]);
    node(&job, 1, "true").wait().exits_with(1).stderr_contains(&["connect to the store at 127.0.0.1:", "refused"]);
}

#[test]
fn a_signal_interrupts_the_wait_for_nodes() {
    let job = static_rendezvous(free_port());
    let waiting = node(&job, 0, "true");
    connect_to_store(job.port);
    waiting.signal(Signal::INT);
    waiting.wait().exits_with(130);
}

#[test]
fn a_killed_store_host_ends_the_other_node() {
    let job = static_rendezvous(free_port());
    let (_folder, path) = temp_folder();
    let script = format!("echo > {}/$RANK; exec sleep infinity", path.display());
    let nodes = [node(&job, 0, &script), node(&job, 1, &script)];
    wait_for_ranks(&path, &["0", "1", "2"]);
    nodes[0].signal(Signal::KILL);
    let [first, second] = nodes.map(Launcher::wait);
    assert_eq!(first.exit_code, None);
    second.exits_with(7).stderr_contains(&["lost the connection to the store host"]);
}

#[test]
fn clients_of_the_launchers_store_need_its_secret() {
    for (flags, needs_secret) in [(&[][..], true), (&["--allow-torch-clients"], false)] {
        let (_folder, path) = temp_folder();
        let script =
            format!("echo $MASTER_ADDR $MASTER_PORT $CANDLEWICK_STORE_SECRET > {0}/at; : < {0}/end", path.display());
        create_gate(&path.join("end"));
        let launcher = start_script(1, flags, &script);
        let at = wait_for_file(&path.join("at"));
        let words: Vec<&str> = at.split(' ').collect();
        let secret = words.get(2).map(|secret| StoreSecret::new(*secret));
        assert_eq!(secret.is_some(), needs_secret);
        let connect = |secret| Client::connect_with_secret(words[0], words[1].parse().unwrap(), TIMEOUT, secret);
        assert_eq!(matches!(connect(None), Err(Error::Refused { .. })), needs_secret);
        let client = connect(secret).unwrap();
        client.set("key", b"value").unwrap();
        assert_eq!(client.get("key").unwrap(), b"value");
        let _gate = open_gate(&path.join("end"));
        let output = launcher.wait();
        output.exits_with(0);
        assert!(words.get(2).is_none_or(|secret| !output.stderr.contains(secret)), "{}", output.stderr);
    }
}

#[test]
fn several_nodes_need_a_secret_unless_they_let_in_torch() {
    for job in [static_rendezvous(free_port()), c10d_rendezvous(free_port(), "1:2", &[])] {
        let output = start(node_command(&job, 0, "exit 0").env_remove(StoreSecret::VARIABLE)).wait();
        output.exits_with(2).stderr_contains(&[
            StoreSecret::VARIABLE,
            "torch's clients cannot send it: for them use --allow-torch-clients",
        ]);
    }
    for is_open in [false, true] {
        let flags: &[&str] = if is_open { &["--allow-torch-clients"] } else { &[] };
        let job = Job { flags, ..static_rendezvous(free_port()) };
        let (_folder, path) = temp_folder();
        let script = format!("echo $CANDLEWICK_STORE_SECRET > {0}/secret$RANK; : < {0}/end$RANK", path.display());
        for rank in 0..3 {
            create_gate(&path.join(format!("end{rank}")));
        }
        let nodes = [0, 1].map(|rank| {
            let mut command = node_command(&job, rank, &script);
            if is_open {
                command.env_remove(StoreSecret::VARIABLE);
            }
            start(&mut command)
        });
        for rank in 0..3 {
            let secret = wait_for_file(&path.join(format!("secret{rank}")));
            assert_eq!(secret, if is_open { "" } else { STORE_SECRET });
        }
        let stranger = Client::connect("127.0.0.1", job.port, TIMEOUT);
        assert_eq!(matches!(stranger, Err(Error::Refused { .. })), !is_open);
        let _gates: Vec<_> = (0..3).map(|rank| open_gate(&path.join(format!("end{rank}")))).collect();
        for node in nodes {
            node.wait().exits_with(0);
        }
    }
}

#[test]
fn launchers_with_different_secrets_report_the_variable() {
    let job = static_rendezvous(free_port());
    let host = start(node_command(&job, 0, "exec sleep infinity").env(StoreSecret::VARIABLE, "first-secret"));
    let output = start(node_command(&job, 1, "exit 0").env(StoreSecret::VARIABLE, "second-secret")).wait();
    output.exits_with(1).stderr_contains(&["the store refuses the secret", StoreSecret::VARIABLE]);
    assert!(!output.stderr.contains("first-secret") && !output.stderr.contains("second-secret"));
    host.signal(Signal::TERM);
    host.wait();
    let mut dry_run = command(&["--dry-run", "--", "sh", "-c", "exit"]);
    let printed = start(dry_run.env(StoreSecret::VARIABLE, "first-secret")).wait();
    assert!(!printed.exits_with(0).stdout.contains("first-secret"), "{}", printed.stdout);
    // With one secret, the nodes find each other.
    let job = static_rendezvous(free_port());
    let nodes =
        [0, 1].map(|rank| start(node_command(&job, rank, PRINT_RANKS).env(StoreSecret::VARIABLE, "one-secret")));
    for node in nodes {
        node.wait().exits_with(0);
    }
}

/// Keys of dead workers in a reused store would give gloo their addresses.
#[test]
fn restarted_workers_get_an_empty_store() {
    for job in [static_rendezvous(free_port()), c10d_rendezvous(free_port(), "2", &[])] {
        let job = Job { flags: &["--max-restarts", "1"], ..job };
        let (_folder, path) = temp_folder();
        let script = format!(
            "cd {}; n=$TORCHELASTIC_RESTART_COUNT; echo $MASTER_ADDR $MASTER_PORT > at$n.$RANK
             : < end$n; exit $((1 - n))",
            path.display()
        );
        ["end0", "end1"].iter().for_each(|gate| create_gate(&path.join(gate)));
        let nodes = [node(&job, 0, &script), node(&job, 1, &script)];
        let mut gates = Vec::new();
        for attempt in 0..2 {
            let at = [0, 1, 2].map(|rank| wait_for_file(&path.join(format!("at{attempt}.{rank}"))));
            assert!(at.iter().all(|other| *other == at[0]), "{at:?}");
            let (host, port) = at[0].split_once(' ').unwrap();
            let secret = Some(StoreSecret::new(STORE_SECRET));
            let client = Client::connect_with_secret(host, port.parse().unwrap(), TIMEOUT, secret);
            let client = client.unwrap();
            assert!(!client.check(&["key"]).unwrap());
            client.set("key", b"value").unwrap();
            gates.push(open_gate(&path.join(format!("end{attempt}"))));
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
    // The first node may start alone. Its workers exit only after the second node was killed.
    let script = format!(
        "echo > {0}/$WORLD_SIZE.$RANK; [ $WORLD_SIZE = 2 ] && [ -e {0}/lost ] && exit 0; exec sleep infinity",
        path.display()
    );
    let first = node(&job, 0, &script);
    connect_to_store(job.port);
    let second = node(&job, 1, &script);
    wait_for_ranks(&path, &["3.0", "3.1", "3.2"]);
    fs::write(path.join("lost"), "").unwrap();
    second.signal(Signal::KILL);
    first
        .wait()
        .exits_with(0)
        .stderr_contains(&["sent no heartbeat for 3s", "restarting the worker group: restart 1 of 1"]);
    assert_eq!(second.wait().exit_code, None);
}

/// Sends SIGTERM to one of two nodes and returns the outputs of both.
#[track_caller]
fn check_stop(job: &Job, stopped: usize, script: &str) -> [LauncherOutput; 2] {
    let (_folder, path) = temp_folder();
    let script = format!("cd {}; {START_CHILD}; {script}; echo > $RANK; {AWAIT_SIGNALS}", path.display());
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
        "echo > {0}/$WORLD_SIZE.$RANK; [ $WORLD_SIZE = 2 ] && [ -e {0}/left ] && exit 0; exec sleep infinity",
        path.display()
    );
    let first = node(&job, 0, &script);
    connect_to_store(job.port);
    let second = node(&job, 1, &script);
    wait_for_ranks(&path, &["3.0", "3.1", "3.2"]);
    fs::write(path.join("left"), "").unwrap();
    second.signal(Signal::TERM);
    first.wait().exits_with(0).stderr_contains(&["another node left: restarting the worker group"]);
    second.wait().exits_with(143);
}

#[test]
fn the_first_failure_is_published_before_the_other_workers_exit() {
    let job = static_rendezvous(free_port());
    let (_folder, path) = temp_folder();
    // Rank 0 fails. Rank 1, on the same node, exits only after rank 2 has received SIGTERM.
    let script = format!(
        "cd {}; {START_CHILD}
         case $RANK in
         0) echo > 0; : < fail; exit 5;;
         1) trap '' TERM; echo > 1; : < end; exit 0;;
         2) trap 'echo > terminated; exit 1' TERM; echo > 2; {AWAIT_SIGNALS};;
         esac",
        path.display()
    );
    ["fail", "end"].iter().for_each(|gate| create_gate(&path.join(gate)));
    let nodes = [node(&job, 0, &script), node(&job, 1, &script)];
    wait_for_ranks(&path, &["0", "1", "2"]);
    let _fail = open_gate(&path.join("fail"));
    wait_for_file(&path.join("terminated"));
    let _end = open_gate(&path.join("end"));
    let nodes = nodes.map(Launcher::wait);
    nodes[0].exits_with(5).stderr_contains(&["rank 0 failed first"]);
    nodes[1].exits_with(7).stderr_contains(&["workers of another node failed: rank 0 on ", "exit code 5"]);
    assert!(!nodes[1].stderr.contains("failed first"), "{}", nodes[1].stderr);
}

#[test]
fn a_node_whose_ranks_report_a_peer_failure_is_not_the_root_cause() {
    let job = static_rendezvous(free_port());
    let (_folder, path) = temp_folder();
    let script = format!(
        "[ $RANK = 2 ] && echo > {0}/exiting && exit 7; [ $RANK = 1 ] && exec sleep infinity; : < {0}/fail; exit 5",
        path.display()
    );
    create_gate(&path.join("fail"));
    let nodes = [node(&job, 0, &script), node(&job, 1, &script)];
    wait_for_file(&path.join("exiting"));
    let _fail = open_gate(&path.join("fail"));
    let nodes = nodes.map(Launcher::wait);
    nodes[0].exits_with(5);
    nodes[1].exits_with(7).stderr_contains(&["rank 0 on "]);
    assert!(!nodes[1].stderr.contains("rank 2 failed first"), "{}", nodes[1].stderr);
}

#[test]
fn a_node_that_left_while_waiting_may_join_again() {
    // The heartbeat timeout alone would not free its place in time.
    let flags = &["--rdzv-conf", "keep_alive_interval=100"];
    for job in [Job { n_nodes: "3", flags, ..static_rendezvous(free_port()) }, c10d_rendezvous(free_port(), "3", flags)]
    {
        let host = node(&job, 0, PRINT_RANKS);
        let id = if job.backend == "static" { "none" } else { "job7" };
        let store = connect_to_store(job.port).with_prefix(&format!("launch/{id}/0"));
        wait_for_count(&store, "here/0");
        let waiting = node(&job, 1, PRINT_RANKS);
        wait_for_count(&store, "here/1");
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
    let store = connect_to_store(job.port).with_prefix("launch/none/0");
    let waiting = node(&job, 1, PRINT_RANKS);
    wait_for_count(&store, "here/1");
    waiting.signal(Signal::KILL);
    waiting.wait();
    for node in [host, node(&job, 1, PRINT_RANKS), node(&job, 2, PRINT_RANKS)] {
        node.wait().exits_with(0);
    }
}

#[test]
fn launchers_with_different_settings_name_the_difference() {
    // The node that detects the difference leaves. The other may time out.
    let job = Job { flags: &["--rdzv-conf", "timeout=5"], ..static_rendezvous(free_port()) };
    let other = Job { flags: &["--rdzv-conf", "timeout=5", "--max-restarts", "2"], ..static_rendezvous(job.port) };
    let output = [node(&job, 0, PRINT_RANKS), node(&other, 1, PRINT_RANKS)].map(Launcher::wait);
    let said = |output: &LauncherOutput| {
        output.stderr.contains("match the settings of the launcher on ") && output.stderr.contains("--max-restarts is ")
    };
    assert!(output.iter().any(said), "{}\n{}", output[0].stderr, output[1].stderr);
    assert!(output.iter().all(|output| output.exit_code == Some(1) && output.stdout.is_empty()));
}

/// Starts two nodes. The ranks of `done_ranks` exit with 0, the others run until a signal.
fn start_half_done(job: &Job, done_ranks: &str) -> [Launcher; 2] {
    let script = format!("case $RANK in {done_ranks}) exit 0;; esac; exec sleep infinity");
    let nodes = [node(job, 0, &script), node(job, 1, &script)];
    let store = connect_to_store(job.port).with_prefix("launch/none/0");
    wait_for_count(&store, "done");
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
    host.wait().exits_with(7).stderr_contains(&["node 1 sent no heartbeat for 3s"]);
}

#[test]
fn a_store_host_that_succeeded_announces_its_stop() {
    let [host, other] = start_half_done(&static_rendezvous(free_port()), "0 | 1");
    host.signal(Signal::TERM);
    other.wait().exits_with(7).stderr_contains(&["another node was stopped: the launcher on "]);
    host.wait().exits_with(143);
}
