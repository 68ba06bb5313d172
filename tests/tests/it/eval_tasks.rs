//! Evaluation of tasks during training gives the scores of `evaluator run` on the checkpoint of that step.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use candlewick_comm::store::Server;
use serde_json::{Value, json};
use suite::{program, root, wait_for_files};

/// A folder with two tasks, their data, and the runs of a tiny model.
struct TaskFolder(tempfile::TempDir);

const TASKS: [&str; 2] = ["choose", "texts"];

impl TaskFolder {
    fn new() -> Self {
        let fixture = Self(tempfile::tempdir().unwrap());
        let rows = (0..9).map(|i| {
            let choices = ["wolf", "cloud", "a b c", "yes"];
            json!({"q": format!("Say {} {i} times.", choices[i % 4]), "choices": choices, "gold": i % 4}).to_string()
        });
        fs::write(fixture.path("data.jsonl"), rows.collect::<Vec<_>>().join("\n")).unwrap();
        let task = |name: &str, rest: &str| {
            let head = format!(
                "task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {}}}}}\ntest_split: test\n",
                fixture.path("data.jsonl").display()
            );
            fs::write(fixture.path(&format!("{name}.yaml")), head + rest).unwrap();
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
        fixture
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Returns the trainer's command: a golden recipe for five steps, with an evaluation after every second step.
    fn trainer(&self, arguments: &[&str]) -> Command {
        self.command("train", arguments)
    }

    fn command(&self, what: &str, arguments: &[&str]) -> Command {
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

    /// Trains on `n_ranks` ranks, which must all succeed.
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

    /// Returns the scores of each evaluation in the metrics, by step.
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

    /// Returns the scores of `evaluator run` on a checkpoint.
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

    /// Checks that the scores of every step equal those of its checkpoint. `model` returns the arguments that name it.
    #[track_caller]
    fn check_scores(&self, model: impl Fn(&Path) -> Vec<String>) {
        self.check_scores_within(0.0, model);
    }

    #[track_caller]
    fn check_scores_within(&self, tolerance: f64, model: impl Fn(&Path) -> Vec<String>) {
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
fn scores_in_training_equal_scores_of_the_checkpoints() {
    let fixture = TaskFolder::new();
    success(&fixture.train(&[&fixture.saves()]));
    fixture.check_scores(model);
    let run: Value = serde_json::from_str(&fs::read_to_string(fixture.path("run/run.json")).unwrap()).unwrap();
    let data = format!("choose: test = {} (9 documents)", fixture.path("data.jsonl").display());
    assert!(run["notes"].as_array().unwrap().contains(&json!(data)), "{}", run["notes"]);
    let bits: Vec<f64> = fixture.scores().iter().map(|(_, scores)| scores["texts/bits_per_byte"]).collect();
    assert!(bits[0] != bits[1] && bits[1] != bits[2], "the weights are those of the step: {bits:?}");
}

#[test]
fn ranks_share_the_documents_and_agree() {
    for sharing in ["seed=7", "deepspeed={zero_optimization: {stage: 2}}"] {
        let fixture = TaskFolder::new();
        fixture.train_as(2, &[&fixture.saves(), sharing]);
        fixture.check_scores(model);
    }
}

/// Sums over ranks round in another order than those of one rank.
#[test]
fn ranks_that_share_a_model_evaluate_together() {
    for (n_ranks, sharing) in [
        (2, vec!["tensor_parallel_size=2"]),
        (2, vec!["pipeline_parallel_size=2", "virtual_pipeline_parallel_size=1"]),
        (2, vec!["deepspeed={zero_optimization: {stage: 3}}"]),
        (2, vec!["sequence_parallel_size=2"]),
        (4, vec!["tensor_parallel_size=2", "context_parallel_size=2"]),
    ] {
        let fixture = TaskFolder::new();
        fixture.train_as(n_ranks, &[&[&*fixture.saves()], &sharing[..]].concat());
        fixture.check_scores_within(1e-4, model);
    }
}

/// Expert-parallel ranks exchange tokens in every forward, also ranks without documents.
#[test]
fn ranks_that_divide_experts_evaluate_together() {
    let experts = "model.config={model_type: qwen3_moe, num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 16, \
                   norm_topk_prob: true, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, \
                   num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8, vocab_size: 600, \
                   max_position_embeddings: 256, rms_norm_eps: 1e-5}";
    let samples = "generate={prompts: [Say wolf 4 times.], max_new_tokens: 4}";
    for (n_ranks, sharing) in [
        (2, vec!["expert_parallel_size=2"]),
        (4, vec!["expert_parallel_size=2", "expert_tensor_parallel_size=2"]),
        (4, vec!["expert_parallel_size=4", "deepspeed={zero_optimization: {stage: 3}}", "eval.limit=2"]),
    ] {
        let fixture = TaskFolder::new();
        fixture.train_as(n_ranks, &[&[&*fixture.saves(), experts, samples], &sharing[..]].concat());
        if !sharing.contains(&"eval.limit=2") {
            fixture.check_scores_within(1e-4, model);
        }
        assert_eq!(fixture.scores().len(), 3);
    }
}

#[test]
fn an_adapter_in_training_is_evaluated_with_its_base() {
    let base = TaskFolder::new();
    success(&base.train(&[&base.saves()]));
    let fixture = TaskFolder::new();
    let folder = base.path("hf/global_step_5").display().to_string();
    let lora = "model.peft_config={r: 4, lora_alpha: 8, lora_dropout: 0.2, target_modules: all-linear}";
    let model_config = format!("model={{name_or_path: {folder}, dtype: f32}}");
    success(&fixture.train(&[&model_config, lora, &fixture.saves()]));
    fixture.check_scores(|save| vec![folder.clone(), "--adapter".to_owned(), save.display().to_string()]);
}

#[test]
fn the_best_checkpoint_is_kept_and_a_resumed_run_repeats_no_evaluation() {
    let fixture = TaskFolder::new();
    let folder = |name: &str| fixture.path(name).display().to_string();
    let every = "save_every_n_steps: 1, keep: 1";
    let saves = format!(
        "checkpoint=[{{output_dir: {}, auto_resume: true, {every}}}, {{type: huggingface, output_dir: {}, {every}}}]",
        folder("saves"),
        folder("hf")
    );
    // The loss falls, so that the first checkpoint is the worst.
    let best = ["metric_for_best_model=eval/texts/bits_per_byte", "greater_is_better=true", "eval.interval=1"];
    let arguments = [&[saves.as_str()], &best[..]].concat();
    success(&fixture.train(&[&arguments[..], &["exit_iteration=3"]].concat()));
    success(&fixture.train(&arguments));
    let scores = fixture.scores();
    assert_eq!(scores.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
    let bits = |(step, scores): &(u64, BTreeMap<String, f64>)| (*step, scores["texts/bits_per_byte"]);
    let (best, value) = scores.iter().map(bits).max_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
    assert!(best < 5, "the newest would stay in any case: {scores:?}");
    let names = |name: &str| {
        let mut names: Vec<String> = fs::read_dir(fixture.path(name))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.retain(|name| name.contains("global_step"));
        names.sort();
        names
    };
    assert_eq!(names("hf"), [format!("global_step_{best}"), "global_step_5".to_owned()]);
    assert_eq!(names("saves").len(), 2, "{:?}", names("saves"));
    let report: Value = serde_json::from_slice(&fs::read(fixture.path("run/run.json")).unwrap()).unwrap();
    assert_eq!(report["metrics"]["best"], json!({"iter": best, "metric": "texts/bits_per_byte", "value": value}));
}

/// The evaluation would take minutes. The resumed run repeats it.
#[test]
fn a_termination_signal_ends_a_running_evaluation() {
    let fixture = TaskFolder::new();
    let rows: Vec<String> = (0..4000).map(|i| json!({"q": format!("Say {i}.")}).to_string()).collect();
    fs::write(fixture.path("long.jsonl"), rows.join("\n")).unwrap();
    let task = format!(
        "task: long\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {}}}}}\ntest_split: test\n\
         output_type: generate_until\ndoc_to_text: q\ndoc_to_target: q\nmetric_list: [{{metric: exact_match}}]\n\
         generation_kwargs: {{until: []}}\n",
        fixture.path("long.jsonl").display()
    );
    fs::write(fixture.path("long.yaml"), task).unwrap();
    let saves = format!("checkpoint=[{{output_dir: {}, auto_resume: true}}]", fixture.path("saves").display());
    let begun = [&saves, "eval.tasks=[long]", "eval.interval=1", "eval.max_gen_toks=100"];
    let child = fixture.trainer(&begun).spawn().unwrap();
    let metrics = fixture.path("run/metrics.jsonl");
    wait_for_files(&fixture.path("run"), "the first step", Duration::from_secs(180), || {
        fs::read_to_string(&metrics).is_ok_and(|lines| lines.contains("\"iter\":1"))
    });
    // SAFETY: the child has not been waited for, so that its pid is valid.
    unsafe { libc::kill(child.id() as i32, libc::SIGTERM) };
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(75), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(fixture.scores(), [], "the tasks came to an end");
    success(&fixture.train(&[&saves, "eval.tasks=[long]", "eval.interval=1", "eval.limit=3", "eval.max_gen_toks=2"]));
    assert_eq!(fixture.scores().iter().map(|(step, _)| *step).collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
}

#[test]
fn missing_files_are_reported_before_training_starts() {
    let fixture = TaskFolder::new();
    let refused = |arguments: &[&str], words: &[&str]| {
        for what in ["train", "check"] {
            let output = fixture.command(what, arguments).output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(output.status.code(), Some(2), "{what}: {said}");
            words.iter().for_each(|word| assert!(said.contains(word), "{what}: {word:?} is not in {said}"));
        }
        assert!(!fixture.path("run/metrics.jsonl").exists());
    };
    refused(&["eval.tasks=[chose]"], &["chose", "choose"]);
    let unmatched = ["eval.data chose: no selected task has that name", "did you mean `choose`?"];
    refused(&["eval.data={chose: /nope}"], &unmatched);
    refused(&["metric_for_best_model=chose/acc"], &["eval.tasks has no task `chose`"]);
    refused(&["metric_for_best_model=choose/f1"], &["choose has no metric `f1`", "acc, brier_score"]);
    refused(
        &["eval.tasks=[humaneval]"],
        &["run task humaneval: it runs model-written code", "eval.confirm_run_unsafe_code: true"],
    );
}
