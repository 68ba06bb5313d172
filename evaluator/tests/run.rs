//! `evaluator run` and `evaluator answer` from the command line to the files.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "support/room.rs"]
mod room;
mod support;

use std::fs;
use std::net::TcpListener;
use std::process::Output;

use room::{Room, json_of, success};
use serde_json::Value;

#[test]
fn a_run_writes_what_lm_eval_writes() {
    let room = Room::new();
    let output = success(room.run(&["--limit", "20", "--output-path", "out", "--log-samples", "--num_fewshot", "0"]));
    let shown = String::from_utf8(output.stdout).unwrap();
    assert!(shown.contains("|choose") && shown.contains("|speak") && shown.contains("exact_match"), "{shown}");
    let results = json_of(&room.written_with("out", "results_", ".json"));
    assert_eq!(results["n-samples"]["choose"]["effective"], 20);
    assert_eq!(results["n-samples"]["choose"]["truncated"], 0);
    assert_eq!(results["config"]["model_dtype"], "torch.float32");
    assert_eq!(results["config"]["fewshot_seed"], 1234);
    assert_eq!(results["max_length"], support::CONTEXT);
    assert!(results["results"]["choose"]["acc,none"].is_number(), "{results}");
    let samples = fs::read_to_string(room.written("out", "samples_speak_")).unwrap();
    assert_eq!(samples.lines().count(), 20);
    // The same as JSON, and nothing is asked again.
    let answers = room.written("out", "answers").join("..");
    let log = fs::read_dir(answers.join("answers")).unwrap().next().unwrap().unwrap().path();
    let before = fs::read_to_string(&log).unwrap();
    let output = success(room.run(&["--limit", "20", "--output-path", "out", "--batch-size", "3", "--json"]));
    let again: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(again["results"], results["results"]);
    assert_eq!(fs::read_to_string(&log).unwrap(), before);
}

/// What two processes and more say, the first one in JSON.
fn together(room: &Room, n_ranks: usize, arguments: &[&str]) -> Vec<Output> {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let tasks = ["run", "--tasks", "choose,speak", "--include-path", ".", "--json"];
    let start = |rank: usize| {
        let mut command = room.command(&[&tasks[..], arguments].concat());
        let (rank, n) = (rank.to_string(), n_ranks.to_string());
        let variables = [("RANK", &*rank), ("LOCAL_RANK", &*rank), ("WORLD_SIZE", &*n), ("LOCAL_WORLD_SIZE", &*n)];
        command.envs(variables).env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
        command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap()
    };
    let ranks: Vec<_> = (0..n_ranks).map(start).collect();
    ranks.into_iter().map(|process| process.wait_with_output().unwrap()).collect()
}

#[test]
fn two_processes_make_the_results_of_one() {
    let room = Room::new();
    let alone: Value = serde_json::from_slice(&success(room.run(&["--json"])).stdout).unwrap();
    let ranks: Vec<_> = together(&room, 2, &["--output-path", "out"]).into_iter().map(success).collect();
    let together: Value = serde_json::from_slice(&ranks[0].stdout).unwrap();
    assert_eq!(together["results"], alone["results"]);
    assert_eq!(together["task_hashes"], alone["task_hashes"]);
    assert!(ranks[1].stdout.is_empty());
    assert_eq!(fs::read_dir(room.written("out", "answers")).unwrap().count(), 2);
}

/// Sums over parts of a matrix round otherwise: no score of these tasks is so close that it matters.
#[test]
fn ranks_that_have_a_model_together_make_the_results_of_one() {
    let room = Room::new();
    let alone: Value = serde_json::from_slice(&success(room.run(&["--json"])).stdout).unwrap();
    for (n_ranks, arguments, n_copies) in [
        (2, vec!["--tensor-parallel-size", "2"], 1),
        (2, vec!["--pipeline_parallel_size", "2"], 1),
        (2, vec!["--zero-stage", "3"], 1),
        (4, vec!["--tensor-parallel-size", "2"], 2),
        (4, vec!["--tensor-parallel-size", "2", "--pipeline-parallel-size", "2"], 1),
    ] {
        let out = format!("out-{n_ranks}-{}", arguments.join("-"));
        let ranks = together(&room, n_ranks, &[&arguments[..], &["--output-path", &out]].concat());
        let ranks: Vec<_> = ranks.into_iter().map(success).collect();
        let results: Value = serde_json::from_slice(&ranks[0].stdout).unwrap();
        assert_eq!(results["results"], alone["results"], "{arguments:?}");
        assert_eq!(fs::read_dir(room.written(&out, "answers")).unwrap().count(), n_copies, "{arguments:?}");
    }
}

#[test]
fn parts_that_a_model_does_not_fall_into_are_refused() {
    let room = Room::new();
    for (n_ranks, arguments, said) in [
        (3, ["--tensor-parallel-size", "2"], "3 ranks cannot have copies of a model in 2 parts each"),
        (3, ["--tensor-parallel-size", "3"], "cannot be shared so; use 1 or 2"),
        (3, ["--pipeline-parallel-size", "3"], "--pipeline-parallel-size 3: the model has 2 blocks"),
    ] {
        let ended = together(&room, n_ranks, &arguments);
        for output in &ended {
            // Who hears of another's end before its own says that.
            let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!([Some(2), Some(7)].contains(&output.status.code()) && stderr.contains(said), "{stderr}");
        }
        assert!(ended.iter().any(|output| output.status.code() == Some(2)));
    }
}

#[test]
fn what_cannot_be_written_is_a_failure() {
    let room = Room::new();
    room.write("out", "a file where a folder should be");
    let output = room.run(&["--limit", "2", "--output-path", "out"]);
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("failed to create") && said.contains("out"), "{said}");
}

#[test]
fn documents_that_do_not_fit_are_counted() {
    let room = Room::new();
    let output = success(room.run(&["--limit", "4", "--max-length", "16", "--json"]));
    let results: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(results["n-samples"]["choose"]["truncated"], 4, "{}", results["n-samples"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("choose: 4 documents were truncated"));
}

#[test]
fn requests_are_answered_line_by_line() {
    let room = Room::new();
    room.write(
        "requests.jsonl",
        "{\"type\": \"loglikelihood\", \"context\": \"Say\", \"continuation\": \" wolf\"}\n\n\
         {\"type\": \"loglikelihood_rolling\", \"text\": \"Say wolf 4 times.\"}\n\
         {\"type\": \"generate_until\", \"context\": \"Say\", \"until\": [\"x\"], \"max_gen_toks\": 3}\n",
    );
    let output = success(room.command(&["answer", "requests.jsonl"]).output().unwrap());
    let lines: Vec<Value> =
        String::from_utf8(output.stdout).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 3);
    assert!(lines[0]["logprob"].is_number() && lines[1]["loglikelihood"].is_number() && lines[2]["text"].is_string());
    room.write("wrong.jsonl", "{\"type\": \"loglikelihood\", \"contxt\": \"Say\", \"continuation\": \" wolf\"}\n");
    let output = room.command(&["answer", "wrong.jsonl"]).output().unwrap();
    assert_eq!(output.status.code(), Some(3));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("line 1 of wrong.jsonl") && said.contains("unknown field `contxt`"), "{said}");
}
