//! `evaluator run` and `evaluator answer` from the command line to the files.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "support/room.rs"]
mod room;
mod support;

use std::fs;
use std::net::TcpListener;

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

#[test]
fn two_processes_make_the_results_of_one() {
    let room = Room::new();
    let alone: Value = serde_json::from_slice(&success(room.run(&["--json"])).stdout).unwrap();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let tasks = ["run", "--tasks", "choose,speak", "--include-path", ".", "--json", "--output-path", "out"];
    let start = |rank: usize| {
        let mut command = room.command(&tasks);
        let rank = rank.to_string();
        let variables = [("RANK", &*rank), ("LOCAL_RANK", &*rank), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")];
        command.envs(variables).env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
        command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap()
    };
    let ranks = [start(0), start(1)].map(|process| success(process.wait_with_output().unwrap()));
    let together: Value = serde_json::from_slice(&ranks[0].stdout).unwrap();
    assert_eq!(together["results"], alone["results"]);
    assert_eq!(together["task_hashes"], alone["task_hashes"]);
    assert!(ranks[1].stdout.is_empty());
    assert_eq!(fs::read_dir(room.written("out", "answers")).unwrap().count(), 2);
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
