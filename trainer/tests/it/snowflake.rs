//! Rows of Snowflake's SQL REST API, from a server on 127.0.0.1.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

use crate::support::{Run, stderr};

/// Requests that the server received: method and path, headers and body.
#[derive(Clone, Debug)]
struct Request {
    line: String,
    headers: String,
    body: Value,
}

struct Snowflake {
    url: String,
    requests: Arc<Mutex<Vec<Request>>>,
}

impl Snowflake {
    /// Starts a server that responds to the n-th request with the n-th response: status and body.
    fn start(responses: Vec<(u16, Value)>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::new()));
        let received = requests.clone();
        std::thread::spawn(move || {
            for ((status, body), stream) in responses.into_iter().zip(listener.incoming().flatten()) {
                received.lock().unwrap().push(respond(&stream, status, &body));
            }
        });
        Self { url, requests }
    }

    fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }
}

fn respond(mut stream: &TcpStream, status: u16, body: &Value) -> Request {
    let mut reader = BufReader::new(stream);
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        if line.trim_end().is_empty() {
            break;
        }
        lines.push(line.trim_end().to_lowercase());
    }
    let length = lines.iter().find_map(|line| line.strip_prefix("content-length: ")).map_or(0, |n| n.parse().unwrap());
    let mut text = vec![0; length];
    reader.read_exact(&mut text).unwrap();
    let body = body.to_string();
    let head = format!("HTTP/1.1 {status} X\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}", body.len());
    stream.write_all(head.as_bytes()).unwrap();
    Request {
        line: lines[0].clone(),
        headers: lines[1..].join("\n"),
        body: serde_json::from_slice(&text).unwrap_or(Value::Null),
    }
}

const HANDLE: &str = "01b2-c3";

fn texts(numbers: std::ops::Range<usize>) -> Value {
    let row = |i: usize| json!([format!("{i} comes before {}. {}", i + 1, "Yes. ".repeat(i % 5)), i.to_string()]);
    numbers.map(row).collect()
}

fn metadata(n_partitions: usize) -> Value {
    json!({
        "numRows": 40 * n_partitions,
        "rowType": [{"name": "TEXT", "type": "text"}, {"name": "ID", "type": "fixed", "scale": 0}],
        "partitionInfo": vec![json!({"rowCount": 40}); n_partitions],
    })
}

/// Trains on a Snowflake source with these variables.
fn train(run: &Run, source: &str, url: &str, authenticator: &str, more: &[&str]) -> std::process::Output {
    let source = format!("data.sources=[{{type: snowflake, {source}}}]");
    let keys = [
        &["type=causal", "train_iters=4", "data.eval_sources=[]", "eval_interval=0", "checkpoint=none", &source],
        more,
    ]
    .concat();
    let mut command = run.command("train", &keys);
    command.env("SNOWFLAKE_HOST", url).env("SNOWFLAKE_TOKEN", "t0k3n").env("SNOWFLAKE_WAREHOUSE", "WH");
    command.env("SNOWFLAKE_AUTHENTICATOR", authenticator).output().unwrap()
}

/// Lists the cached results of queries.
fn cached_rows(run: &Run) -> Vec<std::path::PathBuf> {
    let is_result = |path: &std::path::PathBuf| path.to_string_lossy().contains("snowflake-");
    let entries = std::fs::read_dir(run.path().join("cache")).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(is_result).collect()
}

const TABLE: &str = "table_name: DB.S.BOOKS, column_mapping: {TEXT: text}";

#[test]
fn a_table_trains_as_a_file_with_its_rows() {
    let file = Run::new();
    let rows = texts(0..80);
    let lines = rows.as_array().unwrap().iter().map(|row| json!({"text": row[0], "ID": row[1]}).to_string() + "\n");
    file.write("train.jsonl", &lines.collect::<String>());
    file.train_ok(&["type=causal", "train_iters=4", "data.eval_sources=[]", "eval_interval=0", "checkpoint=none"]);

    // The statement runs for a while, the server is busy once, and the result has two partitions.
    let server = Snowflake::start(vec![
        (202, json!({"statementHandle": HANDLE, "message": "in progress"})),
        (202, json!({"statementHandle": HANDLE})),
        (503, json!({"message": "busy"})),
        (200, json!({"statementHandle": HANDLE, "resultSetMetaData": metadata(2), "data": texts(0..40)})),
        (200, json!({"data": texts(40..80)})),
    ]);
    let run = Run::new();
    let output = train(&run, TABLE, &server.url, "programmatic_access_token", &[]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(run.losses(), file.losses());
    let requests = server.requests();
    assert!(requests[0].line.starts_with("post /api/v2/statements "), "{}", requests[0].line);
    assert_eq!(requests[0].body, json!({"statement": "SELECT * FROM DB.S.BOOKS", "warehouse": "WH"}));
    assert!(requests[1].line.starts_with(&format!("get /api/v2/statements/{HANDLE} ")), "{}", requests[1].line);
    assert!(
        requests[4].line.starts_with(&format!("get /api/v2/statements/{HANDLE}?partition=1 ")),
        "{}",
        requests[4].line
    );
    for request in &requests {
        assert!(request.headers.contains("authorization: bearer t0k3n"), "{}", request.headers);
        let token_type = "x-snowflake-authorization-token-type: programmatic_access_token";
        assert!(request.headers.contains(token_type), "{}", request.headers);
    }
    // A second run reads the rows that are cached, and the token is in no file.
    let again = train(&run, TABLE, &server.url, "programmatic_access_token", &[]);
    assert!(again.status.success(), "{}", stderr(&again));
    assert_eq!(server.requests().len(), 5);
    let report = std::fs::read_to_string(run.path().join("run/run.json")).unwrap();
    assert!(!report.contains("t0k3n"));
}

#[test]
fn a_limit_leaves_out_the_other_partitions() {
    let server = Snowflake::start(vec![(
        200,
        json!({"statementHandle": HANDLE, "resultSetMetaData": metadata(2), "data": texts(0..40)}),
    )]);
    let run = Run::new();
    let output = train(&run, &format!("{TABLE}, limit: 30"), &server.url, "oauth", &[]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).contains("30 rows"), "{}", stderr(&output));
    assert!(server.requests()[0].headers.contains("x-snowflake-authorization-token-type: oauth"));
}

#[test]
fn refusals_name_the_problem_and_the_remedy() {
    let run = Run::new();
    let one = |status: u16, body: Value| Snowflake::start(vec![(status, body)]).url;
    let two = |metadata: Value, second: Value| {
        let first = json!({"statementHandle": HANDLE, "resultSetMetaData": metadata, "data": texts(0..40)});
        Snowflake::start(vec![(200, first), (200, json!({"data": second}))]).url
    };
    let mut without_counts = metadata(2);
    without_counts["partitionInfo"] = json!([{}, {}]);
    let result = |data: Value| json!({"statementHandle": HANDLE, "resultSetMetaData": metadata(1), "data": data});
    for (url, source, authenticator, want) in [
        (
            one(422, json!({"message": "SQL compilation error"})),
            TABLE,
            "oauth",
            "run the Snowflake query `SELECT * FROM DB.S.BOOKS`: SQL compilation error",
        ),
        (
            one(401, json!({"message": "token t0k3n expired"})),
            TABLE,
            "oauth",
            "token (token) expired (HTTP status 401); SNOWFLAKE_TOKEN must be",
        ),
        (
            one(200, result(texts(0..40))),
            "table_name: A, column_mapping: {TEX: text}",
            "oauth",
            "rename column \"TEX\": the result has the columns TEXT, ID; did you mean \"TEXT\"?",
        ),
        (
            one(200, result(vec![json!(["a"]); 40].into())),
            TABLE,
            "oauth",
            "a row has 1 values, but there are 2 columns",
        ),
        (one(200, result(texts(0..39))), TABLE, "oauth", "partition 0 has 39 rows, but 40 are announced"),
        (two(metadata(2), texts(40..79)), TABLE, "oauth", "partition 1 has 39 rows, but 40 are announced"),
        (two(metadata(2), json!([])), TABLE, "oauth", "partition 1 has 0 rows, but 40 are announced"),
        (two(without_counts, texts(40..79)), TABLE, "oauth", "the result has 79 rows, but 80 are announced"),
        (
            one(200, json!({"statementHandle": "../x", "resultSetMetaData": metadata(1)})),
            TABLE,
            "oauth",
            "is no statementHandle",
        ),
        (one(200, json!([])), TABLE, "oauth", "read Snowflake's response"),
        ("http://127.0.0.1:1".into(), TABLE, "externalbrowser", "set SNOWFLAKE_AUTHENTICATOR"),
        ("http://127.0.0.1:1".into(), TABLE, "oauth", "reach Snowflake at http://127.0.0.1:1"),
        (
            one(401, json!({})).replace("http://", "http://me:t0k3n@"),
            TABLE,
            "oauth",
            "log in to Snowflake at http://127.0.0.1:",
        ),
    ] {
        let output = train(&run, source, &url, authenticator, &[]);
        assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
        assert!(stderr(&output).contains(want), "no {want:?} in {}", stderr(&output));
        assert!(!stderr(&output).contains("t0k3n"), "{}", stderr(&output));
        assert!(cached_rows(&run).is_empty(), "{want}");
    }
}
