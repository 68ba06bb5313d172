//! Training over MPI on two hosts, emulated by two network namespaces with a veth pair.
//!
//! The tests need the feature `mpi`, Open MPI's mpirun, `ip`, and the right to create namespaces. Otherwise they are skipped.
#![allow(clippy::unwrap_used, missing_docs)]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use suite::{later_wins, program, report_skip, root, wait_for_exit, wait_for_files};

/// Timeout of a rank in seconds.
const TIMEOUT: u64 = 6;

/// Two network namespaces, each with a host name, an address and an end of a veth pair; deleted on drop.
struct Hosts {
    names: [String; 2],
    addresses: [String; 2],
    folder: tempfile::TempDir,
}

impl Hosts {
    /// Creates the namespaces. The error is the reason why this machine does not support it.
    fn new(subnet: u8) -> Result<Self, String> {
        let mpirun = Command::new("mpirun").arg("--version").output().map_err(|error| format!("mpirun: {error}"))?;
        if !String::from_utf8_lossy(&mpirun.stdout).contains("Open MPI") {
            return Err("mpirun is not Open MPI's".to_owned());
        }
        let pid = std::process::id();
        let names = ["a", "b"].map(|end| format!("cw{pid}{end}{subnet}"));
        let addresses = [1, 2].map(|host| format!("10.213.{subnet}.{host}"));
        let hosts = Self { names, addresses, folder: tempfile::tempdir().unwrap() };
        hosts.names.iter().try_for_each(|name| ip(&["netns", "add", name]))?;
        let [a, b] = &hosts.names;
        ip(&["link", "add", "cable", "netns", a, "type", "veth", "peer", "name", "cable", "netns", b])?;
        for (name, address) in hosts.names.iter().zip(&hosts.addresses) {
            ip(&["-n", name, "addr", "add", &format!("{address}/24"), "dev", "cable"])?;
            ip(&["-n", name, "link", "set", "cable", "up"])?;
            ip(&["-n", name, "link", "set", "lo", "up"])?;
        }
        hosts.write_agent();
        Ok(hosts)
    }

    /// Writes the replacement of ssh that mpirun calls: `agent HOST COMMAND...`.
    fn write_agent(&self) {
        let path = self.folder.path().join("agent");
        let enter = |name: &str| format!("exec ip netns exec {name} unshare --uts sh -c \"hostname {name}; $*\"");
        let [a, b] = &self.names;
        let script = format!(
            "#!/bin/sh\nhost=$1\nshift\ncase $host in\n{}) {};;\n{}) {};;\nesac\nexit 1\n",
            self.addresses[0],
            enter(a),
            self.addresses[1],
            enter(b)
        );
        fs::write(&path, script).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// Returns a command in which mpirun starts `program` once on each host.
    fn mpirun(&self, program: &str, arguments: &[String]) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.names[0], "unshare", "--uts", "sh", "-c"]);
        command.args(["hostname \"$0\"; exec mpirun \"$@\"", &self.names[0]]);
        command.args(["--map-by", "node", "-n", "2", "-H", &self.addresses.join(",")]);
        command.args(["--mca", "plm_rsh_agent"]).arg(self.folder.path().join("agent"));
        // The hosts share a disk, and with it the session folder of Open MPI's daemons.
        command.args(["--mca", "btl", "self,tcp", "--mca", "pml", "ob1"]);
        command.args(["sh", "-c", program, "sh"]).args(arguments);
        command.current_dir(root()).env("RAYON_NUM_THREADS", "1").env_remove("RUST_BACKTRACE");
        command.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn cut(&self) {
        ip(&["-n", &self.names[0], "link", "set", "cable", "down"]).unwrap();
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for name in &self.names {
            // Processes that still run were started by this test and wait for the other host.
            let pids = Command::new("ip").args(["netns", "pids", name]).output().unwrap();
            let pids = String::from_utf8_lossy(&pids.stdout).into_owned();
            for pid in pids.split_whitespace().filter_map(|pid| Pid::from_raw(pid.parse().ok()?)) {
                let _ = kill_process(pid, Signal::KILL);
            }
            let _ = ip(&["netns", "del", name]);
        }
    }
}

fn ip(arguments: &[&str]) -> Result<(), String> {
    let output = Command::new("ip").args(arguments).output().map_err(|error| format!("ip: {error}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("ip {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr))),
    }
}

/// Program that each host starts: the trainer, which reads its rank from MPI's variables, or the launcher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Start {
    Trainer,
    Launcher,
}

impl Start {
    /// Returns a shell command; its arguments are recipe keys.
    fn line(self, master: &str) -> String {
        let trainer = program("trainer").display().to_string();
        let trainer = format!("{trainer} -q train tests/golden/llama.yaml \"$@\"");
        match self {
            Self::Trainer => format!("exec {trainer}"),
            Self::Launcher => format!(
                "LAUNCH={} CANDLEWICK_STORE_SECRET=word exec scripts/launch --nnodes 2 --node-rank $OMPI_COMM_WORLD_RANK --master-addr {master} \
                 --master-port 29417 --nproc-per-node 1 -- {trainer}",
                program("launch").display()
            ),
        }
    }
}

fn keys(folder: &Path, more: &[&str]) -> Vec<String> {
    let mut keys = vec![
        "device=cpu".to_owned(),
        "data.pack_samples=false".to_owned(),
        "gradient_accumulation_steps=4".to_owned(),
        "deepspeed.zero_optimization.stage=2".to_owned(),
        format!("output_dir={}", folder.display()),
        format!("data.cache_dir={}/cache", folder.display()),
    ];
    keys.extend(more.iter().map(|key| (*key).to_owned()));
    later_wins(keys)
}

fn losses(folder: &Path) -> Vec<(u64, f64)> {
    let lines = fs::read_to_string(folder.join("metrics.jsonl")).unwrap_or_default();
    let records = lines.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    records.filter_map(|record| Some((record["iter"].as_u64()?, record.get("loss")?.as_f64()?))).collect()
}

#[track_caller]
fn finish(run: &mut Command) -> Output {
    let output = run.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output
}

/// Trains on both hosts and on one, and compares the losses.
#[track_caller]
fn check(start: Start, subnet: u8, backend: &str) {
    let hosts = match Hosts::new(subnet) {
        Ok(hosts) => hosts,
        Err(why) => return report_skip(&why),
    };
    let folder = |name: &str| hosts.folder.path().join(name);
    let (both, one) = (folder("both"), folder("one"));
    finish(&mut hosts.mpirun(&start.line(&hosts.addresses[0]), &keys(&both, &["train_iters=4", backend])));
    let mut alone = Command::new(program("trainer"));
    alone.current_dir(root()).args(["-q", "train", "tests/golden/llama.yaml"]);
    finish(alone.args(keys(&one, &["train_iters=4", "gradient_accumulation_steps=8"])));
    let (both, one) = (losses(&both), losses(&one));
    assert!(both.len() == 4 && one.len() == 4, "{both:?} {one:?}");
    for ((step, ours), (_, theirs)) in both.iter().zip(&one) {
        assert!((ours - theirs).abs() <= 1e-5 * theirs.abs(), "step {step}: {ours}, one host has {theirs}");
    }
}

/// On two hosts, `auto` selects MPI and needs no MASTER_ADDR.
#[test]
fn two_hosts_give_the_loss_curve_of_one() {
    check(Start::Trainer, 1, "ddp_backend=auto");
}

#[test]
fn a_launcher_on_each_host_gives_the_loss_curve_of_one() {
    check(Start::Launcher, 2, "ddp_backend=mpi");
}

/// Returns the trainer's processes on both hosts.
fn trainers(hosts: &Hosts) -> Vec<Pid> {
    let is_trainer =
        |pid: &&str| fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim() == "trainer");
    let pids = |name: &String| -> Vec<Pid> {
        let output = Command::new("ip").args(["netns", "pids", name]).output().unwrap();
        let pids = String::from_utf8_lossy(&output.stdout).into_owned();
        let pids = pids.split_whitespace().filter(is_trainer);
        pids.filter_map(|pid| Pid::from_raw(pid.parse().unwrap())).collect()
    };
    hosts.names.iter().flat_map(pids).collect()
}

/// Kills a process and returns the text that it has written.
fn said_by(mut child: Child, files: &[PathBuf]) -> String {
    let _ = child.kill();
    let _ = child.wait();
    files.iter().map(|file| fs::read_to_string(file).unwrap_or_default()).collect()
}

/// The link goes down while both hosts train. Both report it within the timeout, and the run resumes from its newest
/// checkpoint.
#[test]
fn a_cut_cable_ends_both_hosts_and_the_run_resumes_later() {
    let hosts = match Hosts::new(3) {
        Ok(hosts) => hosts,
        Err(why) => return report_skip(&why),
    };
    let folder = hosts.folder.path().join("run");
    let save =
        format!("checkpoint=[{{output_dir: {}, save_every_n_steps: 1, keep: 2, auto_resume: true}}]", folder.display());
    let (timeout, stop) = (format!("ddp_timeout={TIMEOUT}"), "exit_iteration_this_run=2");
    // mpirun cannot forward the output of an unreachable host.
    let logs = ["0", "1"].map(|rank| hosts.folder.path().join(format!("stderr-{rank}")));
    let line = Start::Trainer.line(&hosts.addresses[0]);
    let line = format!("{} 2>{}/stderr-$OMPI_COMM_WORLD_RANK", line, hosts.folder.path().display());
    let child = hosts.mpirun(&line, &keys(&folder, &["train_iters=100000", &save, &timeout])).spawn().unwrap();
    wait_for_files(&folder, "the third step", Duration::from_secs(120), || losses(&folder).len() >= 3);
    let trainers = trainers(&hosts);
    assert_eq!(trainers.len(), 2);
    hosts.cut();
    let running = wait_for_exit(&trainers, Duration::from_secs(TIMEOUT + 20));
    assert!(running.is_empty(), "{running:?} still run");
    let n_steps = losses(&folder).len() as u64;
    let said = said_by(child, &logs);
    for rank in [0, 1] {
        let other = format!("rank {} (pid ", 1 - rank);
        let log = fs::read_to_string(&logs[rank]).unwrap();
        assert!(log.contains("failed to finish ") && log.contains(&other), "rank {rank}: {log}\nall: {said}");
        assert!(
            log.contains(&format!("timed out after {TIMEOUT}s without a heartbeat (seen by rank {rank})")),
            "rank {rank}: {log}"
        );
    }
    // One host alone resumes.
    let mut alone = Command::new(program("trainer"));
    alone.current_dir(root()).args(["-q", "train", "tests/golden/llama.yaml"]);
    let more = ["train_iters=100000", "gradient_accumulation_steps=8", &save, stop];
    finish(alone.args(keys(&folder, &more)));
    let steps: Vec<u64> = losses(&folder).into_iter().map(|(step, _)| step).collect();
    let resumed = &steps[steps.len() - 2..];
    assert!(resumed[0] + 1 == resumed[1] && resumed[0] + 1 >= n_steps && resumed[0] <= n_steps + 1, "{steps:?}");
}
