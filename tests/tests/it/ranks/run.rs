//! A run of a tiny recipe on several ranks, each in a process of its own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use candlewick_comm::store::Server;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use suite::{later_wins, program, root, wait_for_exit, wait_for_files};

/// A run in a folder of its own. All runs of a test have equal steps of 8 micro-batches over all ranks.
pub(crate) struct TrainerRun {
    pub(crate) folder: PathBuf,
    pub(crate) n_ranks: usize,
    arguments: Vec<String>,
}

impl TrainerRun {
    pub(crate) fn new(folder: &Path, n_ranks: usize, arguments: &[&str]) -> Self {
        let mut all = vec![
            "device=cpu".to_owned(),
            "train_iters=5".to_owned(),
            "data.pack_samples=false".to_owned(),
            format!("gradient_accumulation_steps={}", 8 / n_ranks),
            format!("output_dir={}", folder.display()),
            format!("data.cache_dir={}/cache", folder.display()),
            "data.eval_sources=[recipes/quickstart/eval.jsonl]".to_owned(),
            "eval_interval=5".to_owned(),
        ];
        all.extend(arguments.iter().map(|argument| (*argument).to_owned()));
        Self { folder: folder.to_owned(), n_ranks, arguments: later_wins(all) }
    }

    /// Returns this run with more recipe keys.
    pub(crate) fn with(&self, more: &[&str]) -> Self {
        let more = more.iter().map(|argument| (*argument).to_owned());
        Self { arguments: later_wins(self.arguments.iter().cloned().chain(more)), folder: self.folder.clone(), ..*self }
    }

    /// Returns the trainer's command.
    pub(crate) fn trainer(&self) -> Command {
        let mut trainer = Command::new(program("trainer"));
        trainer.args(["-q", "train", "tests/golden/llama.yaml"]).args(&self.arguments);
        as_in_a_test(trainer)
    }

    /// Returns the launcher's command for this run.
    pub(crate) fn launch(&self, flags: &[&str]) -> Command {
        let mut launch = Command::new(program("launch"));
        launch.args(["--standalone", "--nproc-per-node", &self.n_ranks.to_string()]).args(flags).arg("--");
        self.started_by(launch)
    }

    /// Returns this run's command with another program as its launcher. `starter` is the command line before the trainer.
    pub(crate) fn started_by(&self, mut starter: Command) -> Command {
        starter.arg(program("trainer")).args(["-q", "train", "tests/golden/llama.yaml"]).args(&self.arguments);
        as_in_a_test(starter)
    }

    /// Returns the command of one rank. Its rendezvous is the store at `port`, which exists already or is created by rank 0.
    pub(crate) fn rank(&self, rank: usize, port: u16, is_store_there: bool) -> Command {
        let mut trainer = self.trainer();
        if self.n_ranks > 1 {
            let n = self.n_ranks.to_string();
            trainer.envs([("RANK", rank.to_string()), ("LOCAL_RANK", rank.to_string()), ("WORLD_SIZE", n.clone())]);
            trainer.envs([("LOCAL_WORLD_SIZE", n), ("MASTER_PORT", port.to_string())]);
            trainer.env("MASTER_ADDR", "127.0.0.1");
            trainer.env("TORCHELASTIC_USE_AGENT_STORE", if is_store_there { "True" } else { "False" });
        }
        trainer
    }

    /// Starts the ranks with a store in this process, as a launcher does.
    pub(crate) fn start(&self) -> TrainerProcesses {
        let store = Server::bind("127.0.0.1:0").unwrap();
        let mut ranks = TrainerProcesses::of((0..self.n_ranks).map(|rank| self.rank(rank, store.port(), true)));
        ranks.store = Some(store);
        ranks
    }

    /// Starts the ranks with a store in rank 0.
    pub(crate) fn start_at(&self, host: &str, port: u16) -> TrainerProcesses {
        TrainerProcesses::of((0..self.n_ranks).map(|rank| {
            let mut command = self.rank(rank, port, false);
            command.env("MASTER_ADDR", host);
            command
        }))
    }

    /// Runs to the end and panics if a rank fails.
    #[track_caller]
    pub(crate) fn finish(&self) -> &Self {
        for (rank, (status, stderr)) in self.start().wait().into_iter().enumerate() {
            assert!(status.success(), "rank {rank} of {}: {status}: {stderr}", self.n_ranks);
        }
        self
    }

    /// Returns the metrics recorded so far.
    pub(crate) fn records(&self) -> Vec<Value> {
        let lines = fs::read_to_string(self.folder.join("metrics.jsonl")).unwrap_or_default();
        // The last line may be half written.
        lines.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    /// Returns the reason for the end that `run.json` has.
    pub(crate) fn exit_reason(&self) -> String {
        let run: Value = serde_json::from_slice(&fs::read(self.folder.join("run.json")).unwrap()).unwrap();
        run["exit"]["reason"].as_str().unwrap().to_owned()
    }

    /// Returns losses and gradient norms by step, and eval losses.
    pub(crate) fn curve(&self) -> Vec<(u64, [f64; 2])> {
        let numbers = self.records().into_iter().filter_map(|record| {
            let norm = record.get("grad_norm").and_then(Value::as_f64).unwrap_or(0.0);
            let loss = record.get("loss").or_else(|| record.get("loss/eval"))?;
            Some((record["iter"].as_u64()?, [loss.as_f64()?, norm]))
        });
        numbers.collect()
    }
}

fn as_in_a_test(mut command: Command) -> Command {
    command.current_dir(root()).env("RAYON_NUM_THREADS", "1").env("RUST_LOG", "warn").env_remove("RUST_BACKTRACE");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

/// Running processes, killed on drop.
pub(crate) struct TrainerProcesses {
    pub(crate) children: Vec<Child>,
    store: Option<Server>,
}

impl TrainerProcesses {
    pub(crate) fn of(commands: impl IntoIterator<Item = Command>) -> Self {
        Self { children: commands.into_iter().map(|mut command| command.spawn().unwrap()).collect(), store: None }
    }

    /// Waits for all to exit; returns the status and stderr of each.
    pub(crate) fn wait(mut self) -> Vec<(ExitStatus, String)> {
        let outputs = std::mem::take(&mut self.children).into_iter().map(|child| child.wait_with_output().unwrap());
        outputs.map(|output| (output.status, String::from_utf8_lossy(&output.stderr).into_owned())).collect()
    }

    /// Waits for all to exit, and panics if one still runs after `limit`.
    #[track_caller]
    pub(crate) fn wait_within(mut self, limit: Duration) -> Vec<(ExitStatus, String)> {
        let pids: Vec<Pid> = self.children.iter().map(Pid::from_child).collect();
        let running = wait_for_exit(&pids, limit);
        if !running.is_empty() {
            self.kill();
            panic!("{running:?} still ran after {limit:?}; stderr of all: {:?}", self.wait());
        }
        self.wait()
    }

    /// Removes one process and returns it.
    pub(crate) fn take(&mut self, rank: usize) -> Self {
        Self { children: vec![self.children.remove(rank)], store: None }
    }

    pub(crate) fn signal(&self, rank: usize, signal: Signal) {
        kill_process(self.pid(rank), signal).unwrap();
    }

    pub(crate) fn pid(&self, rank: usize) -> Pid {
        Pid::from_child(&self.children[rank])
    }

    fn kill(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
        }
    }
}

impl Drop for TrainerProcesses {
    fn drop(&mut self) {
        self.kill();
        for child in &mut self.children {
            let _ = child.wait();
        }
    }
}

/// Waits for at most three minutes until a condition on the files under `folder` holds.
#[track_caller]
pub(crate) fn until(folder: &Path, name: &str, condition: impl Fn() -> bool) {
    wait_for_files(folder, name, Duration::from_secs(180), condition);
}
