//! Tasks of the evaluator during training: their scores are those of `evaluator run` on what is saved at that step.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use candlewick_comm::store::Server;
use serde_json::{Value, json};
use suite::{program, root};

/// A folder with two tasks and their data, in which a tiny model is trained.
struct Room(tempfile::TempDir);

const TASKS: [&str; 2] = ["choose", "texts"];

impl Room {
    fn new() -> Self {
        let room = Self(tempfile::tempdir().unwrap());
        let rows = (0..9).map(|i| {
            let choices = ["wolf", "cloud", "a b c", "yes"];
            json!({"q": format!("Say {} {i} times.", choices[i % 4]), "choices": choices, "gold": i % 4}).to_string()
        });
        fs::write(room.path("data.jsonl"), rows.collect::<Vec<_>>().join("\n")).unwrap();
        let task = |name: &str, rest: &str| {
            let head = format!(
                "task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {}}}}}\ntest_split: test\n",
                room.path("data.jsonl").display()
            );
            fs::write(room.path(&format!("{name}.yaml")), head + rest).unwrap();
        };
        task(
            "choose",
            "output_type: multiple_choice\ndoc_to_text: \"Q: {{q}}\\nA:\"\ndoc_to_choice: choices\ndoc_to_target: gold\n\
             metric_list: [{metric: acc}, {metric: brier_score, higher_is_better: false}]\n",
        );
        task(
            "texts",
            "output_type: loglikelihood_rolling\ndoc_to_text: \"\"\ndoc_to_target: q\n\
             metric_list: [{metric: bits_per_byte, higher_is_better: false}]\n",
        );
        room
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// What trains `recipe` of the golden curves with the tasks after every second of five steps.
    fn trainer(&self, arguments: &[&str]) -> Command {
        self.asked_to("train", arguments)
    }

    fn asked_to(&self, what: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(program("trainer"));
        command.current_dir(root()).args(["-q", what, "tests/golden/llama.yaml", "device=cpu", "train_iters=5"]);
        command.arg(format!("output_dir={}", self.path("run").display()));
        command.arg(format!("data.cache_dir={}", self.path("cache").display()));
        let tasks =
            format!("eval={{tasks: [choose, texts], include_path: [{}], interval: 2}}", self.0.path().display());
        command.arg(tasks).args(arguments).env("RAYON_NUM_THREADS", "1").stdout(Stdio::null()).stderr(Stdio::piped());
        command
    }

    fn train(&self, arguments: &[&str]) -> Output {
        self.trainer(arguments).output().unwrap()
    }

    /// Trains as so many ranks, which must all succeed.
    #[track_caller]
    fn train_as(&self, n_ranks: usize, arguments: &[&str]) {
        let store = Server::bind("127.0.0.1:0").unwrap();
        let start = |rank: usize| {
            let (rank, n) = (rank.to_string(), n_ranks.to_string());
            let mut command = self.trainer(arguments);
            command.envs([("RANK", &rank), ("LOCAL_RANK", &rank), ("WORLD_SIZE", &n), ("LOCAL_WORLD_SIZE", &n)]);
            command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", store.port().to_string());
            command.env("TORCHELASTIC_USE_AGENT_STORE", "True").spawn().unwrap()
        };
        let ranks: Vec<_> = (0..n_ranks).map(start).collect();
        ranks.into_iter().for_each(|rank| success(&rank.wait_with_output().unwrap()));
    }

    fn saves(&self) -> String {
        let export = format!("{{type: huggingface, output_dir: {}", self.path("hf").display());
        format!("checkpoint=[{export}, save_every_n_steps: 2, save_end_of_training: true}}]")
    }

    /// The scores of each evaluation in the metrics, by step.
    fn scores(&self) -> Vec<(u64, BTreeMap<String, f64>)> {
        let lines = fs::read_to_string(self.path("run/metrics.jsonl")).unwrap();
        let records = lines.lines().map(|line| serde_json::from_str::<serde_json::Map<String, Value>>(line).unwrap());
        let scores = |record: serde_json::Map<String, Value>| {
            let scores =
                record.iter().filter_map(|(key, value)| Some((key.strip_prefix("eval/")?.to_owned(), value.as_f64()?)));
            Some((record["iter"].as_u64()?, scores.collect::<BTreeMap<_, _>>()))
        };
        records.filter_map(scores).filter(|(_, scores)| !scores.is_empty()).collect()
    }

    /// What `evaluator run` says of a save.
    #[track_caller]
    fn evaluated(&self, model: &[&str]) -> BTreeMap<String, f64> {
        let mut command = Command::new(program("evaluator"));
        command
            .args(["run", "--tasks", "choose,texts", "--json", "--device", "cpu", "--include-path"])
            .arg(self.0.path());
        let output = command.arg("--model").args(model).env("HF_HUB_OFFLINE", "1").output().unwrap();
        success(&output);
        let results: Value = serde_json::from_slice(&output.stdout).unwrap();
        let of_task = |task: &str| {
            let fields = results["results"][task].as_object().unwrap().clone();
            let named = fields
                .into_iter()
                .filter_map(|(key, value)| Some((format!("{task}/{}", key.strip_suffix(",none")?), value.as_f64()?)));
            named.collect::<Vec<_>>()
        };
        TASKS.iter().flat_map(|task| of_task(task)).collect()
    }

    /// The scores of every step are those of its save. `model` names it.
    #[track_caller]
    fn check_saves(&self, model: impl Fn(&Path) -> Vec<String>) {
        self.check_saves_within(0.0, model);
    }

    #[track_caller]
    fn check_saves_within(&self, tolerance: f64, model: impl Fn(&Path) -> Vec<String>) {
        let scores = self.scores();
        assert_eq!(scores.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [2, 4, 5]);
        for (step, found) in scores {
            let model = model(&self.path(&format!("hf/global_step_{step}")));
            let model: Vec<&str> = model.iter().map(String::as_str).collect();
            let evaluated = self.evaluated(&model);
            let is_close = found
                .iter()
                .zip(&evaluated)
                .all(|((name, a), (other, b))| name == other && (a - b).abs() <= tolerance * b.abs());
            assert!(is_close && found.len() == evaluated.len(), "step {step}: {found:?}, saved {evaluated:?}");
            assert!(found.contains_key("choose/acc_stderr") && found.contains_key("texts/bits_per_byte"), "{found:?}");
        }
    }
}

#[track_caller]
fn success(output: &Output) {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn model(save: &Path) -> Vec<String> {
    vec![save.display().to_string()]
}

#[test]
fn scores_in_training_are_those_of_the_saves() {
    let room = Room::new();
    success(&room.train(&[&room.saves()]));
    room.check_saves(model);
    let run: Value = serde_json::from_str(&fs::read_to_string(room.path("run/run.json")).unwrap()).unwrap();
    let data = format!("choose: test = {} (9 documents)", room.path("data.jsonl").display());
    assert!(run["notes"].as_array().unwrap().contains(&json!(data)), "{}", run["notes"]);
    let bits: Vec<f64> = room.scores().iter().map(|(_, scores)| scores["texts/bits_per_byte"]).collect();
    assert!(bits[0] != bits[1] && bits[1] != bits[2], "the weights are those of the step: {bits:?}");
}

#[test]
fn ranks_share_the_documents_and_agree() {
    for sharing in ["seed=7", "deepspeed={zero_optimization: {stage: 2}}"] {
        let room = Room::new();
        room.train_as(2, &[&room.saves(), sharing]);
        room.check_saves(model);
    }
}

/// Sums over parts round otherwise than those of one rank.
#[test]
fn ranks_that_have_a_model_together_are_asked_together() {
    for (n_ranks, sharing) in [
        (2, vec!["tensor_parallel_size=2"]),
        (2, vec!["pipeline_parallel_size=2", "virtual_pipeline_parallel_size=1"]),
        (2, vec!["deepspeed={zero_optimization: {stage: 3}}"]),
        (2, vec!["sequence_parallel_size=2"]),
        (4, vec!["tensor_parallel_size=2", "context_parallel_size=2"]),
    ] {
        let room = Room::new();
        room.train_as(n_ranks, &[&[&*room.saves()], &sharing[..]].concat());
        room.check_saves_within(1e-4, model);
    }
}

#[test]
fn an_adapter_in_training_is_asked_with_its_base() {
    let base = Room::new();
    success(&base.train(&[&base.saves()]));
    let room = Room::new();
    let folder = base.path("hf/global_step_5").display().to_string();
    let lora = "model.peft_config={r: 4, lora_alpha: 8, lora_dropout: 0.2, target_modules: all-linear}";
    let model_config = format!("model={{name_or_path: {folder}, dtype: f32}}");
    success(&room.train(&[&model_config, lora, &room.saves()]));
    room.check_saves(|save| vec![folder.clone(), "--adapter".to_owned(), save.display().to_string()]);
}

#[test]
fn the_best_save_stays_and_a_resumed_run_asks_nothing_twice() {
    let room = Room::new();
    let folder = |name: &str| room.path(name).display().to_string();
    let every = "save_every_n_steps: 1, keep: 1";
    let saves = format!(
        "checkpoint=[{{output_dir: {}, auto_resume: true, {every}}}, {{type: huggingface, output_dir: {}, {every}}}]",
        folder("saves"),
        folder("hf")
    );
    // The loss falls, so that the worst is the first.
    let best = ["metric_for_best_model=eval/texts/bits_per_byte", "greater_is_better=true", "eval.interval=1"];
    let arguments = [&[saves.as_str()], &best[..]].concat();
    success(&room.train(&[&arguments[..], &["exit_iteration=3"]].concat()));
    success(&room.train(&arguments));
    let scores = room.scores();
    assert_eq!(scores.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
    let bits = |(step, scores): &(u64, BTreeMap<String, f64>)| (*step, scores["texts/bits_per_byte"]);
    let (best, value) = scores.iter().map(bits).max_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
    assert!(best < 5, "the newest would stay in any case: {scores:?}");
    let names = |name: &str| {
        let mut names: Vec<String> = fs::read_dir(room.path(name))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.retain(|name| name.contains("global_step"));
        names.sort();
        names
    };
    assert_eq!(names("hf"), [format!("global_step_{best}"), "global_step_5".to_owned()]);
    assert_eq!(names("saves").len(), 2, "{:?}", names("saves"));
    let report: Value = serde_json::from_slice(&fs::read(room.path("run/run.json")).unwrap()).unwrap();
    assert_eq!(report["metrics"]["best"], json!({"iter": best, "metric": "texts/bits_per_byte", "value": value}));
}

/// The tasks would take minutes: they are asked again by the run that goes on.
#[test]
fn a_termination_signal_ends_tasks_that_are_being_asked() {
    let room = Room::new();
    let rows: Vec<String> = (0..4000).map(|i| json!({"q": format!("Say {i}.")}).to_string()).collect();
    fs::write(room.path("long.jsonl"), rows.join("\n")).unwrap();
    let task = format!(
        "task: long\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {}}}}}\ntest_split: test\n\
         output_type: generate_until\ndoc_to_text: q\ndoc_to_target: q\nmetric_list: [{{metric: exact_match}}]\n\
         generation_kwargs: {{until: []}}\n",
        room.path("long.jsonl").display()
    );
    fs::write(room.path("long.yaml"), task).unwrap();
    let saves = format!("checkpoint=[{{output_dir: {}, auto_resume: true}}]", room.path("saves").display());
    let begun = [&saves, "eval.tasks=[long]", "eval.interval=1", "eval.max_gen_toks=100"];
    let child = room.trainer(&begun).spawn().unwrap();
    let metrics = room.path("run/metrics.jsonl");
    while !fs::read_to_string(&metrics).is_ok_and(|lines| lines.contains("\"iter\":1")) {
        std::thread::yield_now();
    }
    // SAFETY: a signal to a child that has not been waited for.
    unsafe { libc::kill(child.id() as i32, libc::SIGTERM) };
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(75), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(room.scores(), [], "the tasks came to an end");
    success(&room.train(&[&saves, "eval.tasks=[long]", "eval.interval=1", "eval.limit=3", "eval.max_gen_toks=2"]));
    assert_eq!(room.scores().iter().map(|(step, _)| *step).collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
}

#[test]
fn what_is_not_there_is_said_before_anything_is_trained() {
    let room = Room::new();
    let refused = |arguments: &[&str], words: &[&str]| {
        for what in ["train", "check"] {
            let output = room.asked_to(what, arguments).output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(output.status.code(), Some(2), "{what}: {said}");
            words.iter().for_each(|word| assert!(said.contains(word), "{what}: {word:?} is not in {said}"));
        }
        assert!(!room.path("run/metrics.jsonl").exists());
    };
    refused(&["eval.tasks=[chose]"], &["chose", "choose"]);
    let unmatched = ["eval.data chose: no selected task has that name", "did you mean `choose`?"];
    refused(&["eval.data={chose: /nope}"], &unmatched);
    refused(&["metric_for_best_model=chose/acc"], &["eval.tasks has no task `chose`"]);
    refused(&["metric_for_best_model=choose/f1"], &["choose has no metric `f1`", "acc, brier_score"]);
    refused(&["eval.tasks=[humaneval]"], &["humaneval runs code", "eval.confirm_run_unsafe_code: true"]);
}
