//! `evaluator run` and `evaluator answer`, from the command line to the output files.

use std::fs;
use std::process::{Command, Output};

use candlewick_comm::store::Server;
use candlewick_model::{Config, FP8_SCALES, fp8_scales_to_json};
use candlewick_ops::Fp8LinearScales;
use serde_json::Value;

use crate::support::workspace::{Workspace, json_of, success};

#[test]
fn a_run_writes_what_lm_eval_writes() {
    let workspace = Workspace::new();
    let output =
        success(workspace.run(&["--limit", "20", "--output-path", "out", "--log-samples", "--num_fewshot", "0"]));
    let shown = String::from_utf8(output.stdout).unwrap();
    assert!(shown.contains("|choose") && shown.contains("|speak") && shown.contains("exact_match"), "{shown}");
    let results = json_of(&workspace.written_with("out", "results_", ".json"));
    assert_eq!(results["n-samples"]["choose"]["effective"], 20);
    assert_eq!(results["n-samples"]["choose"]["truncated"], 0);
    assert_eq!(results["config"]["model_dtype"], "torch.float32");
    assert_eq!(results["config"]["fewshot_seed"], 1234);
    assert_eq!(results["max_length"], crate::support::CONTEXT);
    // The keys equal lm-eval's, except for the version of transformers.
    for key in [
        "results group_subtasks configs versions n-shot higher_is_better n-samples config git_hash date pretty_env_info",
        "lm_eval_version upper_git_hash tokenizer_pad_token tokenizer_eos_token tokenizer_bos_token eot_token_id max_length",
        "model_source model_name model_name_sanitized system_instruction system_instruction_sha fewshot_as_multiturn",
        "chat_template chat_template_sha task_hashes total_evaluation_time_seconds",
    ]
    .iter()
    .flat_map(|keys| keys.split(' '))
    {
        assert!(results.get(key).is_some(), "{key}");
    }
    assert!(shown.ends_with("No document was truncated, skipped or empty.\n"), "{shown}");
    let header = shown.lines().next().unwrap();
    assert!(header.starts_with("hf ({'pretrained': '") && header.contains("model'}), gen_kwargs: ({}), "), "{header}");
    assert!(header.ends_with("limit: 20.0, num_fewshot: 0, batch_size: auto"), "{header}");
    let remarks = String::from_utf8(output.stderr).unwrap();
    let data = format!("choose: test = {} (30 documents)\n", workspace.path("data.jsonl").display());
    assert!(remarks.contains(&data) && remarks.contains("--limit SHOULD ONLY BE USED FOR TESTING."), "{remarks}");
    assert_eq!(results["data"]["choose"]["documents"], 30);
    assert!(results["data"]["choose"].get("fewshot").is_none());
    assert!(results["results"]["choose"]["acc,none"].is_number(), "{results}");
    let samples = fs::read_to_string(workspace.written("out", "samples_speak_")).unwrap();
    assert_eq!(samples.lines().count(), 20);
    // The second run prints JSON, and takes all responses from the cache.
    let answers = workspace.written("out", "answers").join("..");
    let log = fs::read_dir(answers.join("answers")).unwrap().next().unwrap().unwrap().path();
    let before = fs::read_to_string(&log).unwrap();
    let output = success(workspace.run(&["--limit", "20", "--output-path", "out", "--batch-size", "3", "--json"]));
    let again: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(again["results"], results["results"]);
    assert_eq!(fs::read_to_string(&log).unwrap(), before);
}

#[test]
fn a_model_is_quantized_with_the_scales_of_its_export() {
    let workspace = Workspace::new();
    let quantized = ["--limit", "4", "--quantization", "fp8", "--json"];
    let refused = workspace.run(&quantized);
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(refused.status.code() == Some(2) && said.contains("has no fp8_scales.json"), "{said}");

    let scales = Fp8LinearScales { input: 20.0, weight: 300.0 };
    let scales = [("model.layers.0.mlp.up_proj".to_owned(), vec![scales])].into();
    let scales = fp8_scales_to_json(&scales, &Config::read(&workspace.path("model")).unwrap());
    fs::write(workspace.path("model").join(FP8_SCALES), scales).unwrap();
    let results = |arguments: &[&str]| -> Value {
        let output = success(workspace.run(arguments));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let (one, four) = (
        results(&[&quantized[..], &["--batch-size", "1"]].concat()),
        results(&[&quantized[..], &["--batch-size", "4"]].concat()),
    );
    assert_eq!(one["config"]["model_args"]["quantization"], "fp8");
    assert_eq!(one["results"], four["results"]);
    let dense = results(&["--limit", "4", "--json"]);
    assert!(dense["config"]["model_args"].get("quantization").is_none(), "{dense}");
}

#[test]
fn examples_from_the_evaluated_split_are_named() {
    let workspace = Workspace::new();
    let run = ["--limit", "2", "--num-fewshot", "1", "--output-path", "out", "--verbosity", "error"];
    let output = success(workspace.run(&run));
    let shown = String::from_utf8(output.stdout).unwrap();
    let note = "choose: its few-shot examples come from the evaluated split (test)\nspeak: its few-shot examples come";
    assert!(shown.contains(note), "{shown}");
    let results = json_of(&workspace.written_with("out", "results_", ".json"));
    let fewshot = &results["data"]["choose"]["fewshot"];
    assert_eq!((&fewshot["split"], &fewshot["is_evaluated_split"]), (&Value::from("test"), &Value::from(true)));
    // Only the paths of the written files.
    let remarks = String::from_utf8(output.stderr).unwrap();
    assert!(remarks.lines().all(|line| line.starts_with("out/")), "{remarks}");
}

/// Names, versions and documents of a task may hold escape sequences, which would reach the user's terminal.
#[test]
fn control_characters_of_a_task_are_escaped() {
    let workspace = Workspace::new();
    let task = fs::read_to_string(workspace.path("choose.yaml")).unwrap();
    let task = task.replace("task: choose", "task: \"\\e[2Jc\\u009bh\"\nmetadata: {version: \"\\e]0;x\\a\\u202e\"}");
    let task = task.replace("Q: {{q}}", "\\e[31m{{q}}");
    workspace.write("hostile.yaml", &task);
    let run = ["run", "--tasks", "hostile.yaml", "--limit", "2", "--write-out"];
    for arguments in [&run[..], &[&run[..], &["--json"]].concat()] {
        let output = success(workspace.command(arguments).output().unwrap());
        let said = [output.stdout, output.stderr].map(|said| String::from_utf8(said).unwrap());
        for said in &said {
            assert!(!said.contains(['\u{1b}', '\u{7}', '\u{9b}', '\u{202e}']), "{said:?}");
        }
        assert!(said[0].contains("\\u001b[2J") && said[0].contains("\\u202e"), "{said:?}");
    }
    let listed = workspace.evaluator(&["ls", "--include-path", "hostile.yaml"]).output().unwrap();
    assert!(String::from_utf8(success(listed).stdout).unwrap().contains("\\u001b[2Jc\\u009bh"));
}

#[test]
fn programs_of_the_model_are_run_if_that_is_confirmed() {
    if Command::new("python3").arg("-V").output().is_err() {
        return;
    }
    let workspace = Workspace::new();
    let row = serde_json::json!({
        "task_id": "T/0", "prompt": "def one():\n", "entry_point": "one", "test": "def check(f):\n    assert f() == 1\n",
    });
    workspace.write("test.jsonl", &row.to_string());
    let run =
        ["run", "--tasks", "humaneval", "--data", "humaneval=test.jsonl", "--gen-kwargs", "max_gen_toks=4", "--json"];
    let output = success(workspace.command(&[&run[..], &["--confirm_run_unsafe_code"]].concat()).output().unwrap());
    let results: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(results["results"]["humaneval"]["pass@1,create_test"], 0.0, "{}", results["results"]);
    let output = workspace.command(&run).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(2) && said.contains("--confirm-run-unsafe-code"), "{said}");
}

#[test]
fn a_model_of_nan_generates_nothing_that_is_scored() {
    let workspace = Workspace::new();
    let path = workspace.path("model/model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    bytes[8 + header..].chunks_exact_mut(4).for_each(|value| value.copy_from_slice(&f32::NAN.to_le_bytes()));
    fs::write(&path, bytes).unwrap();
    let sampled = ["--gen-kwargs", "do_sample=true,temperature=1.0"];
    for (task, more) in [("choose", &[][..]), ("speak", &[][..]), ("speak", &sampled[..])] {
        let run = ["run", "--tasks", task, "--include-path", ".", "--limit", "2"];
        let output = workspace.command(&[&run[..], more].concat()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(5) && said.contains("NaN"), "{task}: {said}");
    }
}

#[test]
fn a_tasks_name_is_no_path() {
    let workspace = Workspace::new();
    let task = fs::read_to_string(workspace.path("choose.yaml")).unwrap().replace("task: choose", "task: ../../a/b");
    workspace.write("slash.yaml", &task);
    let run = ["run", "--tasks", "slash.yaml", "--limit", "2", "--output-path", "out", "--log-samples"];
    success(workspace.command(&run).output().unwrap());
    let samples = workspace.written("out", "samples_______a_b_");
    assert_eq!(fs::read_to_string(&samples).unwrap().lines().count(), 2);
    // The results file has the task's metrics.
    let (samples, again) = (samples.to_str().unwrap(), samples.to_str().unwrap());
    let output = success(workspace.evaluator(&["compare", samples, again, "--fail-below", "acc=0"]).output().unwrap());
    assert!(String::from_utf8(output.stdout).unwrap().contains("acc,none"));
}

/// Runs `evaluator run` on several ranks, and returns the output of each process.
fn together(workspace: &Workspace, n_ranks: usize, arguments: &[&str]) -> Vec<Output> {
    let store = Server::bind("127.0.0.1:0").unwrap();
    let tasks = ["run", "--tasks", "choose,speak", "--include-path", ".", "--json"];
    let start = |rank: usize| {
        let mut command = workspace.command(&[&tasks[..], arguments].concat());
        let (rank, n) = (rank.to_string(), n_ranks.to_string());
        let variables = [("RANK", &*rank), ("LOCAL_RANK", &*rank), ("WORLD_SIZE", &*n), ("LOCAL_WORLD_SIZE", &*n)];
        command.envs(variables).env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", store.port().to_string());
        command.env("TORCHELASTIC_USE_AGENT_STORE", "True");
        command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap()
    };
    let ranks: Vec<_> = (0..n_ranks).map(start).collect();
    ranks.into_iter().map(|process| process.wait_with_output().unwrap()).collect()
}

#[test]
fn two_processes_give_the_results_of_one() {
    let workspace = Workspace::new();
    let alone: Value = serde_json::from_slice(&success(workspace.run(&["--json"])).stdout).unwrap();
    let ranks: Vec<_> = together(&workspace, 2, &["--output-path", "out"]).into_iter().map(success).collect();
    let together: Value = serde_json::from_slice(&ranks[0].stdout).unwrap();
    assert_eq!(together["results"], alone["results"]);
    assert_eq!(together["task_hashes"], alone["task_hashes"]);
    assert!(ranks[1].stdout.is_empty());
    assert_eq!(fs::read_dir(workspace.written("out", "answers")).unwrap().count(), 2);
}

/// Tasks of all output types with few-shot examples have equal scores and equal records in equal order.
#[test]
fn any_number_of_ranks_gives_the_results_of_one() {
    let workspace = Workspace::new();
    for mode in [&[][..], &["--compat", "lm-eval"]] {
        let made = |n_ranks: usize| {
            let out = format!("out-{}-{n_ranks}", mode.len());
            let arguments = ["--tasks", "texts", "--num-fewshot", "2", "--log-samples", "--output-path", &out];
            let ranks = together(&workspace, n_ranks, &[&arguments[..], mode].concat());
            let results: Value =
                serde_json::from_slice(&ranks.into_iter().map(success).next().unwrap().stdout).unwrap();
            let samples = ["choose", "speak", "texts"]
                .map(|task| fs::read_to_string(workspace.written(&out, &format!("samples_{task}_"))).unwrap());
            let scores = ["results", "n-samples", "n-shot", "task_hashes"].map(|key| results[key].clone());
            (scores, samples)
        };
        let (scores, samples) = made(1);
        assert!(samples.iter().all(|samples| samples.lines().count() == 30));
        assert!(scores[0]["texts"]["byte_perplexity,none"].is_number() && scores[2]["choose"] == 2, "{scores:?}");
        for n_ranks in 2..=4 {
            let found = made(n_ranks);
            assert_eq!(found.0, scores, "{n_ranks} {mode:?}");
            assert!(found.1 == samples, "the records of {n_ranks} ranks are others: {mode:?}");
        }
    }
}

/// Tensor parallelism changes the rounding of sums; no score of these tasks is that close.
#[test]
fn ranks_that_share_a_model_give_the_results_of_one() {
    let workspace = Workspace::new();
    let alone: Value = serde_json::from_slice(&success(workspace.run(&["--json"])).stdout).unwrap();
    for (n_ranks, arguments, n_copies) in [
        (2, vec!["--tensor-parallel-size", "2"], 1),
        (2, vec!["--pipeline_parallel_size", "2"], 1),
        (2, vec!["--zero-stage", "3"], 1),
        (4, vec!["--tensor-parallel-size", "2"], 2),
        (4, vec!["--tensor-parallel-size", "2", "--pipeline-parallel-size", "2"], 1),
    ] {
        let out = format!("out-{n_ranks}-{}", arguments.join("-"));
        let ranks = together(&workspace, n_ranks, &[&arguments[..], &["--output-path", &out]].concat());
        let ranks: Vec<_> = ranks.into_iter().map(success).collect();
        let results: Value = serde_json::from_slice(&ranks[0].stdout).unwrap();
        assert_eq!(results["results"], alone["results"], "{arguments:?}");
        assert_eq!(fs::read_dir(workspace.written(&out, "answers")).unwrap().count(), n_copies, "{arguments:?}");
    }
}

#[test]
fn a_tensor_parallel_size_that_does_not_divide_the_model_is_refused() {
    let workspace = Workspace::new();
    for (n_ranks, arguments, said) in [
        (3, ["--tensor-parallel-size", "2"], "3 ranks cannot hold copies of a model over 2 ranks each"),
        (3, ["--tensor-parallel-size", "3"], "cannot all be divided by it; use 1 or 2"),
        (3, ["--pipeline-parallel-size", "3"], "--pipeline-parallel-size 3: the model has 2 blocks"),
        (2, ["--expert-parallel-size", "2"], "--expert-parallel-size: the model has no experts"),
        (3, ["--expert-parallel-size", "2"], "the 3 ranks of a pipeline stage cannot be divided by it"),
    ] {
        let ended = together(&workspace, n_ranks, &arguments);
        for output in &ended {
            // The ranks print one error once.
            let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
            let want = if output.status.code() == Some(7) { "see the log of rank 0" } else { said };
            assert!([Some(2), Some(7)].contains(&output.status.code()) && stderr.contains(want), "{stderr}");
        }
        assert!(ended.iter().any(|output| output.status.code() == Some(2)));
    }
}

#[test]
fn an_unwritable_output_is_an_error() {
    let workspace = Workspace::new();
    workspace.write("out", "a file where a folder should be");
    let output = workspace.run(&["--limit", "2", "--output-path", "out"]);
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("failed to create") && said.contains("out"), "{said}");
}

#[test]
fn documents_that_do_not_fit_are_counted() {
    let workspace = Workspace::new();
    let output = success(workspace.run(&["--limit", "4", "--max-length", "16", "--json"]));
    let results: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(results["n-samples"]["choose"]["truncated"], 4, "{}", results["n-samples"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("choose: 4 documents were truncated"));
}

#[test]
fn requests_are_answered_line_by_line() {
    let workspace = Workspace::new();
    workspace.write(
        "requests.jsonl",
        "{\"type\": \"loglikelihood\", \"context\": \"Say\", \"continuation\": \" wolf\"}\n\n\
         {\"type\": \"loglikelihood_rolling\", \"text\": \"Say wolf 4 times.\"}\n\
         {\"type\": \"generate_until\", \"context\": \"Say\", \"until\": [\"x\"], \"max_gen_toks\": 3}\n",
    );
    let output = success(workspace.command(&["answer", "requests.jsonl"]).output().unwrap());
    let lines: Vec<Value> =
        String::from_utf8(output.stdout).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 3);
    assert!(lines[0]["logprob"].is_number() && lines[1]["loglikelihood"].is_number() && lines[2]["text"].is_string());
    workspace.write("wrong.jsonl", "{\"type\": \"loglikelihood\", \"contxt\": \"Say\", \"continuation\": \" wolf\"}\n");
    let output = workspace.command(&["answer", "wrong.jsonl"]).output().unwrap();
    assert_eq!(output.status.code(), Some(3));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("line 1 of wrong.jsonl") && said.contains("unknown field `contxt`"), "{said}");
}

#[test]
fn options_may_be_written_as_for_lm_eval() {
    let workspace = Workspace::new();
    let mut command =
        workspace.evaluator(&["run", "--model", "hf", "--model_args", "pretrained=model,dtype=float32", "device=cpu"]);
    command.args([
        "--tasks",
        "choose",
        "speak",
        "--include_path",
        ".",
        "--seed",
        "0,None,8,52",
        "--limit",
        "3",
        "--json",
    ]);
    command.args([
        "--gen_kwargs",
        r#"until=["a, b","\n"],max_gen_toks=5"#,
        "max_new_tokens=7",
        "--trust_remote_code",
        "-w",
    ]);
    command.args(["--max_batch_size", "2", "--verbosity", "INFO"]);
    let output = success(command.output().unwrap());
    let said = String::from_utf8(output.stderr).unwrap();
    for words in [
        "speak: generation_kwargs: max_new_tokens=7 has no effect",
        "--trust-remote-code has no effect",
        "choose: target: 0",
    ] {
        assert!(said.contains(words), "{words:?} is not in {said}");
    }
    let results: Value = serde_json::from_slice(&output.stdout).unwrap();
    let config = &results["config"];
    assert_eq!(config["model_args"]["pretrained"], "model");
    let seeds = ["random_seed", "numpy_seed", "torch_seed", "fewshot_seed"].map(|key| config[key].clone());
    assert_eq!(seeds, [Value::from(0), Value::Null, Value::from(8), Value::from(52)]);
    let kwargs = &results["configs"]["speak"]["generation_kwargs"];
    assert_eq!((&kwargs["until"], &kwargs["max_gen_toks"]), (&serde_json::json!(["a, b", "\n"]), &Value::from(5)));
    assert_eq!(results["configs"]["speak"]["num_fewshot"], 0);
}

#[test]
fn options_that_have_no_effect_are_refused() {
    let workspace = Workspace::new();
    let refused = |arguments: &[&str], words: &str| {
        let output = workspace.run(arguments);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(words), "{words:?} is not in {said}");
    };
    refused(&["--check_integrity"], "`evaluator show TASK`");
    refused(&["--wandb_args", "project=x"], "files of --output-path");
    refused(&["--metadata", "a=1"], "--metadata is not supported");
    refused(&["--model-args", "max_lenght=3"], "did you mean `max_length`?");
    refused(&["--gen-kwargs", "greedy"], "is not key=value");
    refused(&["--predict-only"], "--output-path");
    refused(&["--chat-template-args", "a=1"], "--apply-chat-template");
    refused(&["--seed", "1,2"], "four separated by commas");
    refused(&["--apply-chat-template", "--enable-thinking"], "--enable-thinking needs tasks that generate, but choose");
}

#[test]
fn predictions_are_written_down() {
    let workspace = Workspace::new();
    let output = success(workspace.run(&["--predict-only", "--output-path", "out", "--limit", "4", "--json"]));
    let results: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(results["results"]["speak"]["bypass,none"], 999.0, "{results}");
    assert_eq!(fs::read_to_string(workspace.written("out", "samples_speak_")).unwrap().lines().count(), 4);
}

/// In a chat no delimiter precedes a choice, so an empty choice has no tokens.
#[test]
fn a_document_with_a_choice_of_no_tokens_is_left_out_and_counted() {
    let workspace = Workspace::new();
    let row = |i: usize| {
        let choices = if i == 2 { ["yes", ""] } else { ["yes", "no"] };
        serde_json::json!({"q": format!("Say {i}"), "choices": choices, "gold": 0, "goal": 1}).to_string()
    };
    workspace.write("data.jsonl", &(0..5).map(row).collect::<Vec<_>>().join("\n"));
    workspace.write(
        "model/chat_template.jinja",
        "{% for turn in messages %}{{ turn.content }}{% endfor %} {{ mood|default('so') }}:",
    );
    let run = |more: &[&str]| {
        let tasks = ["run", "--tasks", "choose", "--include-path", "choose.yaml", "--apply-chat-template"];
        workspace.command(&[&tasks[..], more].concat()).output().unwrap()
    };
    let shown = String::from_utf8(success(run(&[])).stdout).unwrap();
    assert!(shown.ends_with("choose: of 5 documents 1 skipped\n"), "{shown}");
    let results: Value = serde_json::from_slice(&success(run(&["--json"])).stdout).unwrap();
    assert_eq!(results["n-samples"]["choose"]["effective"], 4);
    let output = run(&["--compat", "lm-eval"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("process a document of task choose") && said.contains("data.jsonl:3"), "{said}");
    assert!(said.contains("it has no tokens of its own") && output.status.code() == Some(3), "{said}");
}

#[test]
fn a_template_is_given_its_variables() {
    let workspace = Workspace::new();
    workspace.write(
        "model/chat_template.jinja",
        "{% for turn in messages %}{{ turn.content }}{% endfor %} {{ mood|default('so') }}:",
    );
    let shown = |more: &[&str]| {
        let show =
            ["show", "choose", "--include-path", "choose.yaml", "--model", "model", "--apply-chat-template", "--json"];
        let output = success(workspace.evaluator(&[&show[..], more].concat()).output().unwrap());
        let shown: Value = serde_json::from_slice(&output.stdout).unwrap();
        shown[0]["requests"][0].clone()
    };
    let context = |more: &[&str]| shown(more)["context"].as_str().unwrap().to_owned();
    assert!(context(&[]).ends_with(" so:"));
    assert!(context(&["--chat-template-args", r#"{"mood": "glad"}"#]).ends_with(" glad:"));
    assert!(context(&["--chat_template_args", "mood=sad"]).ends_with(" sad:"));
    // The scored tokens are the continuation's; the context is truncated to the model's 64 tokens.
    let request = shown(&["--num-fewshot", "3"]);
    let n = |key: &str| request[key].as_array().unwrap().len();
    assert_eq!(n("context_tokens") + n("continuation_tokens"), crate::support::CONTEXT + 1, "{request}");
    assert!(request["truncated"].as_u64().unwrap() > 0, "{request}");
    let joined: Vec<&str> =
        request["continuation_tokens"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    assert_eq!(joined.concat().trim(), request["continuation"].as_str().unwrap().trim());
}
