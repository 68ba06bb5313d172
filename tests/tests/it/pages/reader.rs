//! A folder in which a reader follows a page: it writes the files that the page shows, and runs its commands.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use serde_json::Value;
use suite::{program, root, wait_for_files};

use super::hub_cache::HubCache;
use super::markdown::{Block, Marker, blocks};
use crate::hub_server::HubServer;

/// Texts of commands that the tests replace, with the reason.
const REPLACED: &[(&str, &str, &str)] = &[
    (
        "cargo run --release --bin trainer -- train recipes/quickstart.yaml",
        "trainer train recipes/quickstart.yaml train_iters=20",
        "cargo has built the program; 1124 steps take a minute",
    ),
    ("=MODEL ", "=Qwen/Qwen3-0.6B ", "a placeholder"),
    ("hf_...", "hf_secret", "a placeholder"),
    ("http://127.0.0.1:8000/", "http://ADDRESS/", "the tests' server has another port"),
    ("cp \"$(command -v", "ln -s \"$(command -v", "the programs of the tests are large"),
];

/// The address of a server in [`REPLACED`].
const ADDRESS: &str = "ADDRESS";

/// A part of the warning about a run with few steps.
const FEW_STEPS: &str = "can teach little";

/// A command and its result.
pub(super) struct Followed {
    pub(super) command: String,
    pub(super) output: Output,
    /// Number of requests that the Hub server received.
    pub(super) n_requests: usize,
}

/// The Hub of a reader's commands.
enum ReaderHub {
    /// A cache with all repositories. Only `--push-to-hub` sends requests.
    Cache,
    /// A server with all repositories, and an empty cache.
    Server,
}

/// A folder with the repository's recipes, a Hub cache and the results of commands.
pub(super) struct Reader {
    folder: tempfile::TempDir,
    /// The folder in it that the commands have changed to.
    current: PathBuf,
    hub: ReaderHub,
    server_of_hub: HubServer,
    /// The variables that commands have exported.
    exported: BTreeMap<String, String>,
    /// The last server that a command has started, with its address.
    server: Option<(Child, String)>,
    pub(super) followed: Vec<Followed>,
}

impl Reader {
    /// Creates the folder, with a cache of the tiny models and data sets of [`HubCache`].
    pub(super) fn new() -> Self {
        let reader = Self::with_hub(ReaderHub::Cache, HubServer::start([]));
        HubCache::shared().copy_to(&reader.path("hf-home/hub"));
        reader
    }

    /// Creates the folder, with a Hub server that has the tiny models and data sets.
    pub(super) fn online() -> Self {
        Self::with_hub(ReaderHub::Server, HubServer::start(HubCache::shared().repositories()))
    }

    fn with_hub(hub: ReaderHub, server_of_hub: HubServer) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let current = folder.path().to_owned();
        let (exported, followed) = (BTreeMap::new(), Vec::new());
        let reader = Self { folder, current, hub, server_of_hub, exported, server: None, followed };
        for name in ["recipes", "scripts", "tests"] {
            symlink(root().join(name), reader.path(name)).unwrap();
        }
        // curl fails if a server answers with an error.
        reader.write(".curlrc", "fail-with-body\n");
        reader
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes a file, and creates its folder.
    pub(super) fn write(&self, name: &str, text: &str) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// Writes the named files of a page, and runs its commands, in the order of the page.
    pub(super) fn follow(&mut self, page: &str) {
        blocks(page).iter().for_each(|block| self.follow_block(block));
    }

    /// Writes the file of a block, or runs its commands.
    pub(super) fn follow_block(&mut self, block: &Block<'_>) {
        if let Some(name) = block.file_name().filter(|_| block.language == "yaml") {
            self.write(name, &block.text);
        }
        if block.runs() {
            self.run_block(block);
        }
    }

    fn run_block(&mut self, block: &Block<'_>) {
        let commands = block.commands();
        assert!(!commands.is_empty(), "line {}: the block has no command", block.line);
        for (i, command) in commands.iter().enumerate() {
            let code = match block.marker {
                Marker::ExitCode(code) if i + 1 == commands.len() => code,
                _ => 0,
            };
            self.follow_command(command, code);
        }
    }

    /// Runs a command of a page, which ends with this exit code.
    fn follow_command(&mut self, command: &str, code: i32) {
        if let Some(variables) = command.strip_prefix("export ") {
            let set = variables.split(' ').map(|variable| variable.split_once('=').unwrap());
            self.exported.extend(set.map(|(name, value)| (name.to_owned(), replaced(value))));
            return;
        }
        if let Some(folder) = command.strip_prefix("cd ") {
            self.current.push(folder);
            return;
        }
        if ["trainer serve ", "evaluator serve "].iter().any(|serve| command.starts_with(serve)) {
            self.serve(command);
            return;
        }
        let n_earlier = self.server_of_hub.log().len();
        let output = self.run(command);
        let n_requests = self.server_of_hub.log().len() - n_earlier;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert!(
            output.status.code() == Some(code),
            "{command}\nended with {}, not {code}\n{}{}",
            output.status,
            text(&output.stdout),
            text(&output.stderr)
        );
        assert!(
            !text(&output.stderr).contains(FEW_STEPS),
            "{command}: a run on a page must teach something\n{}",
            text(&output.stderr)
        );
        self.followed.push(Followed { command: command.to_owned(), output, n_requests });
    }

    /// Runs a command line in a shell, as the reader does, without a network.
    pub(super) fn run(&self, line: &str) -> Output {
        // Only a chat reads its input.
        self.run_with_input(line, "How do I resume a run?\n/quit\n")
    }

    /// Runs a command line like [`Reader::run`], with this input.
    pub(super) fn run_with_input(&self, line: &str, input: &str) -> Output {
        let mut child = self.shell(&replaced(line)).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
        child.wait_with_output().unwrap()
    }

    fn shell(&self, line: &str) -> Command {
        let address = self.server.as_ref().map_or("", |(_, address)| address);
        let programs = program("trainer").parent().unwrap().display().to_string();
        let path = format!("{programs}:{}", std::env::var("PATH").unwrap_or_default());
        let mut command = Command::new("sh");
        command.args(["-ec", &line.replace(ADDRESS, address)]).current_dir(&self.current).stdin(Stdio::piped());
        command.env("PATH", path).env("RAYON_NUM_THREADS", "2").env("LAUNCH", program("launch"));
        command.env("HF_HOME", self.path("hf-home")).env("XDG_CACHE_HOME", self.path("cache"));
        command.env("CURL_HOME", self.folder.path());
        let hub = ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN"];
        for name in ["RUST_BACKTRACE", "RUST_LOG", "RANK", "WORLD_SIZE"].iter().chain(&hub) {
            command.env_remove(name);
        }
        match self.hub {
            ReaderHub::Cache if !line.contains("--push-to-hub") => command.env("HF_HUB_OFFLINE", "1"),
            _ => command.env("HF_ENDPOINT", self.server_of_hub.endpoint()),
        };
        command.envs(&self.exported);
        command
    }

    /// Starts a server at a free port, and waits for its address.
    fn serve(&mut self, command: &str) {
        self.stop();
        let log = self.path("server.log");
        // The log of an earlier server has its address.
        let _ = fs::remove_file(&log);
        let line = format!("exec {command} --port 0 2>server.log");
        let server = self.shell(&replaced(&line)).stdout(Stdio::null()).spawn().unwrap();
        let address = || {
            let said = fs::read_to_string(&log).unwrap_or_default();
            Some(said.split_once(" at http://")?.1.split_once("/v1\n")?.0.to_owned())
        };
        wait_for_files(self.folder.path(), command, Duration::from_secs(180), || address().is_some());
        self.server = Some((server, address().unwrap()));
    }

    /// Ends the server.
    fn stop(&mut self) {
        if let Some((mut server, _)) = self.server.take() {
            server.kill().unwrap();
            server.wait().unwrap();
        }
    }

    /// Returns the losses that `evaluator score` printed, in order.
    pub(super) fn losses(&self) -> Vec<f64> {
        let scores = self.followed.iter().filter(|followed| followed.command.starts_with("evaluator score"));
        let json = |followed: &Followed| serde_json::from_slice::<Value>(&followed.output.stdout).unwrap();
        scores.filter_map(|followed| json(followed)["loss"].as_f64()).collect()
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.stop();
    }
}

fn replaced(command: &str) -> String {
    REPLACED.iter().fold(command.to_owned(), |command, (from, to, _)| command.replace(from, to))
}
