//! Metrics and the request log.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use super::{CHAT, COMPLETIONS, Server, read, user, with};
use crate::support;

fn metrics(server: &Server) -> BTreeMap<String, f64> {
    let text = read(server.send("GET /metrics", ""));
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    assert!(head.contains(" 200 ") && head.contains("text/plain; version=0.0.4"), "{head}");
    let samples = body.lines().filter(|line| !line.starts_with('#'));
    samples
        .map(|line| line.rsplit_once(' ').unwrap())
        .map(|(name, value)| (name.to_owned(), value.parse().unwrap()))
        .collect()
}

/// Sends a whole, a streamed, a refused and an unknown request. Returns the number of generated tokens.
fn send_requests(server: &Server) -> u64 {
    let body = json!({"messages": user("a secret"), "temperature": 0, "max_tokens": 5});
    let chat = server.ok(CHAT, &body);
    server.streamed(CHAT, &with(body.clone(), json!({"stream": true})));
    let completion = server.ok(COMPLETIONS, &json!({"prompt": "Hi", "max_tokens": 3, "n": 2, "temperature": 0}));
    assert_eq!(server.post(CHAT, &with(body, json!({"top_p": 7}))).0, 400);
    assert_eq!(server.post("/a/secret/path", &json!({})).0, 404);
    let tokens = |response: &Value| response["usage"]["completion_tokens"].as_u64().unwrap();
    2 * tokens(&chat) + tokens(&completion)
}

#[test]
fn metrics_count_requests_and_tokens() {
    let server = Server::start(&[]);
    let n_tokens = send_requests(&server);
    let metrics = metrics(&server);
    let labels =
        |route: &str, status: u16| format!("candlewick_requests_total{{route=\"{route}\",status=\"{status}\"}}");
    for (name, want) in [
        (labels(CHAT, 200), 2.0),
        (labels(CHAT, 400), 1.0),
        (labels(COMPLETIONS, 200), 1.0),
        (labels("other", 404), 1.0),
        ("candlewick_requests_in_flight".to_owned(), 0.0),
        ("candlewick_sequences_running".to_owned(), 0.0),
        ("candlewick_sequences_waiting".to_owned(), 0.0),
        ("candlewick_generated_tokens_total".to_owned(), n_tokens as f64),
        ("candlewick_time_to_first_token_seconds_count".to_owned(), 3.0),
        (format!("candlewick_request_duration_seconds_count{{route=\"{CHAT}\"}}"), 2.0),
    ] {
        assert_eq!(metrics.get(&name), Some(&want), "{name} in {metrics:?}");
    }
    assert!(metrics["candlewick_prompt_tokens_total"] > 0.0);
    assert!(!metrics.keys().any(|name| name.contains("secret")), "{metrics:?}");
}

#[test]
fn metrics_need_the_key() {
    let server = Server::start(&["--api-key", "secret"]);
    assert!(read(server.send("GET /metrics", "")).contains(" 401 "));
}

#[test]
fn the_request_log_has_a_line_for_each_request_without_its_contents() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("requests.jsonl");
    let mut server = Server::start(&["--request-log", log.to_str().unwrap()]);
    let n_tokens = send_requests(&server);
    server.signal("-TERM");
    assert!(server.wait().success());
    let text = fs::read_to_string(&log).unwrap();
    assert!(!text.contains("secret"), "{text}");
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let found: Vec<(&str, u64, bool)> = lines
        .iter()
        .map(|line| (line["route"].as_str().unwrap(), line["status"].as_u64().unwrap(), line["stream"] == true))
        .collect();
    let want =
        [(CHAT, 200, false), (CHAT, 200, true), (COMPLETIONS, 200, false), (CHAT, 400, false), ("other", 404, false)];
    assert_eq!(found, want);
    assert_eq!(lines.iter().map(|line| line["completion_tokens"].as_u64().unwrap()).sum::<u64>(), n_tokens);
    for line in &lines[..3] {
        assert!(line["id"].as_str().unwrap().contains("cmpl-") && line["model"] == "tiny", "{line}");
        let reasons = line["finish_reasons"].as_array().unwrap();
        assert!(!reasons.is_empty() && reasons.iter().all(|reason| reason == "length" || reason == "stop"), "{line}");
        assert!(line["seconds"].as_f64() >= line["time_to_first_token"].as_f64(), "{line}");
        assert!(line["time"].as_str().unwrap().ends_with('Z') && line["prompt_tokens"].as_u64() > Some(0), "{line}");
    }
    assert_eq!((&lines[3]["id"], &lines[3]["finish_reasons"]), (&Value::Null, &json!([])));
}

#[test]
fn a_server_whose_log_is_not_read_answers() {
    let folder = tempfile::tempdir().unwrap();
    let model = support::export(folder.path(), 1);
    let mut command = Command::new(env!("CARGO_BIN_EXE_evaluator"));
    command.arg("serve").arg(&model).args(["--device", "cpu", "--port", "0"]).env("RUST_LOG", "info");
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let address =
        lines.find_map(|line| Some(line.unwrap().split_once(" at http://")?.1.strip_suffix("/v1")?.to_owned()));
    let mut server = Server { child, address: address.unwrap(), model, _folder: folder };
    // The line of a request has the finish reasons of 128 choices, so the pipe is full long before the last one.
    for _ in 0..200 {
        let response = server.ok(COMPLETIONS, &json!({"prompt": "Hi", "max_tokens": 0, "n": 128}));
        assert_eq!(response["choices"][127]["finish_reason"], "length");
    }
    assert_eq!(server.post("/x", &json!({})).0, 404);
    server.signal("-TERM");
    assert!(server.wait().success());
    drop(lines);
}
