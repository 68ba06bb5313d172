//! `trainer generate` and `trainer chat` on several ranks, started by the launcher.

use std::fs;
use std::io::{Read, Write};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use candlewick_comm::store::Server;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use suite::{program, wait_for_exit};

use super::{TrainedRuns, ok, text};
use crate::ranks::faults::trainer_of_rank;

/// Time limit of an end without a hang on a busy machine.
const SOON: Duration = Duration::from_secs(90);

/// The penalty makes the answers longer.
const GENERATE: [&str; 10] = [
    "generate",
    "full",
    "--prompt",
    "What comes after 5?",
    "--prompt",
    "Hi",
    "--prompt",
    "What comes after 70?",
    "--max-new-tokens=24",
    "--repetition-penalty=1.5",
];

/// Numbers of ranks, and options that divide the model over them.
const MESHES: [(&str, &[&str]); 5] = [
    ("2", &["--tensor-parallel-size", "2"]),
    ("2", &["--pipeline-parallel-size", "2"]),
    ("2", &["--zero-stage", "3"]),
    ("2", &[]),
    ("4", &["--tensor-parallel-size", "2"]),
];

/// Runs the trainer on several ranks. `flags` are those of the launcher.
fn launched(runs: &TrainedRuns, n_ranks: &str, flags: &[&str], arguments: &[&str], stdin: &str) -> Output {
    let trainer = program("trainer");
    let launch = ["--standalone", "--nproc-per-node", n_ranks];
    let trainer = ["--", trainer.to_str().unwrap()];
    runs.run("launch", &[&launch, flags, &trainer, arguments, &["--device", "cpu"]].concat(), stdin)
}

/// Runs `evaluator score` on several ranks and returns its JSON, which one of them prints.
#[track_caller]
fn scored(runs: &TrainedRuns, n_ranks: &str, mesh: &[&str], arguments: &[&str]) -> Value {
    let evaluator = program("evaluator");
    let launch = ["--standalone", "--nproc-per-node", n_ranks, "--", evaluator.to_str().unwrap(), "score"];
    let output = ok(runs.run("launch", &[&launch, arguments, mesh, &["--device", "cpu"]].concat(), ""));
    let printed = text(&output.stdout);
    assert_eq!(printed.lines().count(), 1, "{n_ranks} ranks, {mesh:?}: {printed}");
    serde_json::from_str(printed.trim_start_matches("[0]: ")).unwrap()
}

fn alone(runs: &TrainedRuns, arguments: &[&str], stdin: &str) -> Output {
    ok(runs.run("trainer", &[arguments, &["--device", "cpu"]].concat(), stdin))
}

fn count(output: &Output, phrase: &str) -> usize {
    text(&output.stderr).matches(phrase).count()
}

/// Checks that one rank prints an error with these phrases, and returns what all ranks printed on stdout.
#[track_caller]
fn fails_once(output: &Output, code: i32, phrases: &[&str]) -> String {
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{said}");
    let of_ranks: Vec<&str> = said.lines().filter(|line| line.starts_with('[')).collect();
    for phrase in phrases {
        assert_eq!(of_ranks.iter().filter(|line| line.contains(phrase)).count(), 1, "{phrase:?} in {said}");
    }
    text(&output.stdout)
}

#[test]
fn several_ranks_generate_the_texts_of_one() {
    let runs = TrainedRuns::shared();
    let sampled = ["--temperature", "1.5", "--top-p", "0.95", "--seed", "3"];
    let adapter = ["--raw", "--adapter", "lora"];
    for (options, meshes) in [(&[][..], &MESHES[..]), (&sampled, &MESHES[..4]), (&adapter, &MESHES[..3])] {
        let arguments = [&GENERATE[..], options].concat();
        let one = alone(runs, &arguments, "");
        assert_eq!(count(&one, " tokens/s "), 3);
        for (n_ranks, mesh) in meshes {
            let several = ok(launched(runs, n_ranks, &["--interactive"], &[&arguments[..], mesh].concat(), ""));
            assert_eq!(text(&several.stdout), text(&one.stdout), "{n_ranks} ranks, {mesh:?} {options:?}");
            assert_eq!(count(&several, " tokens/s "), 3, "{}", text(&several.stderr));
        }
    }
}

#[test]
fn ranks_that_divide_experts_generate_and_chat_as_one() {
    let runs = TrainedRuns::shared();
    let sizes = ["--num-experts", "4", "--num-experts-per-tok", "2", "--granularity", "1"];
    ok(runs.run("trainer", &[&["upcycle", "full", "--output", "experts"], &sizes[..]].concat(), ""));
    let generate = ["generate", "experts", "--prompt", "Hi", "--prompt", "What comes after 5?"];
    for (arguments, input) in [(&generate[..], ""), (&["chat", "experts"], "Hi\nWhat comes after 5?\n")] {
        let one = alone(runs, arguments, input);
        let experts = [arguments, &["--expert-parallel-size", "2"]].concat();
        let two = ok(launched(runs, "2", &["--interactive"], &experts, input));
        assert_eq!(text(&two.stdout), text(&one.stdout), "{}", text(&two.stderr));
        assert_eq!(count(&two, " tokens/s "), 2);
    }
}

/// Tensor parallelism rounds differently. The rows are no multiple of the ranks.
#[test]
fn several_ranks_print_the_scores_of_one() {
    let runs = TrainedRuns::shared();
    let (data, text) =
        (["--model", "full", "--data", "eval.jsonl", "--limit", "5"], ["--model", "full", "--text", "A cloud"]);
    let (loss, tokens) = (scored(runs, "1", &[], &data), scored(runs, "1", &[], &text));
    assert_eq!(loss["rows"], 5);
    for (n_ranks, mesh) in MESHES.into_iter().chain([("3", &[][..])]) {
        let [found, of_text] = [&data[..], &text].map(|arguments| scored(runs, n_ranks, mesh, arguments));
        let is_rounded = mesh.first() == Some(&"--tensor-parallel-size");
        let (number, want) = (found["loss"].as_f64().unwrap(), loss["loss"].as_f64().unwrap());
        assert!((number - want).abs() < 1e-6 && (is_rounded || found == loss), "{n_ranks} {mesh:?}: {found} {loss}");
        assert_eq!((&found["tokens"], &found["rows"]), (&loss["tokens"], &loss["rows"]));
        assert!(is_rounded || of_text == tokens, "{n_ranks} {mesh:?}: {of_text} {tokens}");
        let logprob = |tokens: &Value| tokens[1]["logprob"].as_f64().unwrap();
        assert!((logprob(&of_text) - logprob(&tokens)).abs() < 1e-5, "{n_ranks} {mesh:?}: {of_text} {tokens}");
    }
}

/// Replicas that share experts run equally many forwards.
#[test]
fn ranks_that_divide_experts_print_the_scores_of_one() {
    let runs = TrainedRuns::shared();
    let sizes = ["--num-experts", "4", "--num-experts-per-tok", "2", "--granularity", "1"];
    ok(runs.run("trainer", &[&["upcycle", "full", "--output", "scored-experts"], &sizes[..]].concat(), ""));
    let arguments = ["--model", "scored-experts", "--data", "eval.jsonl", "--limit", "5"];
    let one = scored(runs, "1", &[], &arguments);
    for (n_ranks, mesh) in [
        ("2", &["--expert-parallel-size", "2"][..]),
        ("4", &["--expert-parallel-size", "2", "--zero-stage", "3"]),
        ("4", &["--expert-parallel-size", "2", "--pipeline-parallel-size", "2"]),
    ] {
        assert_eq!(scored(runs, n_ranks, mesh, &arguments), one, "{n_ranks} {mesh:?}");
    }
}

#[test]
fn rank_0_reads_stdin_for_all_ranks() {
    let runs = TrainedRuns::shared();
    let arguments = ["generate", "full", "--messages", "-"];
    let one = alone(runs, &arguments, super::MESSAGES);
    for (n_ranks, mesh) in MESHES.into_iter().take(4) {
        let arguments = [&arguments[..], mesh].concat();
        let several = ok(launched(runs, n_ranks, &["--interactive"], &arguments, super::MESSAGES));
        assert_eq!(several.stdout, one.stdout, "{mesh:?}");
    }
    let arguments = [&arguments[..], &["--tensor-parallel-size", "2"]].concat();
    let bad = launched(runs, "2", &[], &arguments, "nonsense");
    fails_once(&bad, 3, &["neither JSON nor JSON lines"]);
}

/// The first round has one prompt of each replica, and the second replica's is too long.
#[test]
fn a_prompt_that_fails_is_reported_after_the_answers_before_it() {
    let runs = TrainedRuns::shared();
    let long = "wolf ".repeat(200);
    let arguments = ["generate", "full", "--prompt", "Hi", "--prompt", &long, "--prompt", "Ho"];
    let one = runs.run("trainer", &[&arguments[..], &["--device", "cpu"]].concat(), "");
    assert_eq!(one.status.code(), Some(3));
    for (n_ranks, mesh) in MESHES.into_iter().take(4) {
        let several = launched(runs, n_ranks, &[], &[&arguments[..], mesh].concat(), "");
        let printed = fails_once(&several, 3, &["context has 128"]);
        assert_eq!(printed.replace("[0]: ", ""), text(&one.stdout), "{mesh:?}");
    }
}

#[test]
fn several_ranks_chat_as_one() {
    let runs = TrainedRuns::shared();
    let lines = "What comes after 5?\n/retry\n/edit Hi\n/adapter lora\nWhat comes after 5?\n/adapter nope\n/undo\n\
                 /system Be brief.\nAnd 9?\n/nonsense\n";
    let arguments = ["chat", "full", "--temperature", "0.8", "--max-new-tokens", "24"];
    let long = "wolf ".repeat(200) + "\n";
    // The input ends, or a command ends the chat.
    let ended = format!("{lines}/quit\nunread\n");
    for (input, meshes) in [(lines.to_owned() + &long, &MESHES[..3]), (ended, &MESHES[..1])] {
        let one = alone(runs, &arguments, &input);
        for (n_ranks, mesh) in meshes {
            let several = ok(launched(runs, n_ranks, &["--interactive"], &[&arguments[..], mesh].concat(), &input));
            assert_eq!(text(&several.stdout), text(&one.stdout), "{mesh:?}");
            for phrase in [" tokens/s ", "the chat continues with the loaded model", "no command /nonsense", "shorten"]
            {
                assert_eq!(count(&several, phrase), count(&one, phrase), "{phrase}: {}", text(&several.stderr));
            }
        }
    }
}

#[test]
fn an_error_of_all_ranks_appears_once() {
    let runs = TrainedRuns::shared();
    let weights = runs.copy_model("damaged").join("model.safetensors");
    fs::write(&weights, &fs::read(&weights).unwrap()[..5000]).unwrap();
    let two = ["--tensor-parallel-size", "2"];
    let (prompt, chat) = (["generate", "damaged", "--prompt", "Hi"], ["chat", "damaged"]);
    for arguments in [&prompt[..], &chat] {
        let output = launched(runs, "2", &[], &[arguments, &two].concat(), "Hi\n");
        fails_once(&output, 6, &["model.safetensors"]);
    }
    let missing = launched(runs, "2", &[], &["generate", "full/modle", "--prompt", "Hi", two[0], two[1]], "");
    fails_once(&missing, 3, &["neither a folder here nor a Hub id"]);
    let replicas = launched(runs, "2", &[], &["chat", "full"], "Hi\n");
    fails_once(&replicas, 2, &["2 ranks hold 2; start 1"]);
    let heads = launched(runs, "3", &[], &["chat", "full", "--tensor-parallel-size", "3"], "");
    fails_once(&heads, 2, &["4 attention heads, 2 KV heads"]);
}

/// A chat on two ranks that has answered once, and waits for its next line.
struct WaitingChat {
    processes: Vec<Child>,
    /// The rendezvous of ranks without a launcher.
    _store: Option<Server>,
}

impl WaitingChat {
    /// Starts a chat by the launcher.
    fn launched(runs: &TrainedRuns) -> Self {
        let mut launch = Command::new(program("launch"));
        launch.args(["--standalone", "--nproc-per-node", "2", "--interactive", "--"]).arg(program("trainer"));
        Self::start(runs, vec![launch], None)
    }

    /// Starts each rank without a launcher.
    fn of_ranks(runs: &TrainedRuns) -> Self {
        let store = Server::bind("127.0.0.1:0").unwrap();
        let rank = |rank: &str| {
            let mut trainer = Command::new(program("trainer"));
            trainer.envs([("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")]);
            trainer.envs([("MASTER_ADDR", "127.0.0.1"), ("TORCHELASTIC_USE_AGENT_STORE", "True")]);
            trainer.env("MASTER_PORT", store.port().to_string());
            trainer
        };
        Self::start(runs, ["0", "1"].map(rank).into(), Some(store))
    }

    fn start(runs: &TrainedRuns, commands: Vec<Command>, store: Option<Server>) -> Self {
        let started = commands.into_iter().map(|mut command| {
            let model = runs.path("full");
            command.arg("chat").arg(model).args(["--tensor-parallel-size", "2", "--device", "cpu"]);
            command.env("RAYON_NUM_THREADS", "1").env_remove("RUST_BACKTRACE");
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        });
        let mut processes: Vec<Child> = started.collect();
        processes[0].stdin.as_mut().unwrap().write_all(b"What comes after 5?\n").unwrap();
        let answer = processes[0].stdout.as_mut().unwrap();
        let mut byte = [0];
        while byte != *b"\n" {
            assert_eq!(answer.read(&mut byte).unwrap(), 1, "the chat ended before its answer");
        }
        Self { processes, _store: store }
    }

    fn pid(&self, index: usize) -> Pid {
        Pid::from_child(&self.processes[index])
    }

    /// Waits for the end of one of the processes, without an end of its input.
    #[track_caller]
    fn wait(mut self, index: usize) -> (Option<i32>, String) {
        let running = wait_for_exit(&[self.pid(index)], SOON);
        assert!(running.is_empty(), "it still runs after {SOON:?}");
        let mut said = String::new();
        self.processes[index].stderr.take().unwrap().read_to_string(&mut said).unwrap();
        (self.processes[index].wait().unwrap().code(), said)
    }
}

impl Drop for WaitingChat {
    fn drop(&mut self) {
        for process in &mut self.processes {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

#[test]
fn ctrl_c_ends_a_chat_on_all_ranks() {
    let chat = WaitingChat::launched(TrainedRuns::shared());
    kill_process(chat.pid(0), Signal::INT).unwrap();
    let (code, said) = chat.wait(0);
    assert_eq!(code, Some(130), "{said}");
    assert!(!said.contains("error") && !said.contains("failed"), "{said}");
}

#[test]
fn the_end_of_a_rank_ends_a_chat_that_waits_for_its_user() {
    let runs = TrainedRuns::shared();
    let chat = WaitingChat::launched(runs);
    kill_process(trainer_of_rank(&runs.path("full"), 1), Signal::KILL).unwrap();
    let (code, said) = chat.wait(0);
    assert!(code == Some(137) && said.contains("launch: rank 1 failed first"), "{code:?} {said}");
    let chat = WaitingChat::of_ranks(runs);
    kill_process(chat.pid(0), Signal::KILL).unwrap();
    let (code, said) = chat.wait(1);
    assert!(code == Some(7) && said.contains("rank 0 (pid "), "{code:?} {said}");
}
