//! W&B and MLflow on 127.0.0.1: the endpoints that a run uses, with the state that it leaves.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

/// Behaviour of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    Healthy,
    /// Responds with this status.
    Status(u16),
    /// Never responds.
    Silent,
    /// Responds with this JSON.
    Json(&'static str),
    /// Closes connections without a response after this many requests.
    DiesAfter(usize),
}

pub(crate) struct TrackingServer {
    url: String,
    received: Arc<Mutex<Received>>,
}

/// State of the server.
#[derive(Clone, Debug, Default)]
pub(crate) struct Received {
    pub(crate) n_requests: usize,
    /// Values of the header `authorization`.
    pub(crate) authorizations: Vec<String>,
    /// Variables of each `upsertBucket`.
    pub(crate) upserts: Vec<Value>,
    /// Lines of W&B's history.
    pub(crate) history: Vec<Value>,
    pub(crate) summary: Value,
    /// Exit codes of W&B runs that ended.
    pub(crate) exits: Vec<Value>,
    /// MLflow's runs.
    pub(crate) runs: Vec<MlflowRun>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct MlflowRun {
    pub(crate) tags: BTreeMap<String, String>,
    pub(crate) params: BTreeMap<String, String>,
    /// Values by name and step, in the order of arrival.
    pub(crate) metrics: Vec<(String, u64, f64)>,
    pub(crate) status: Vec<String>,
}

impl TrackingServer {
    pub(crate) fn start(fault: Fault) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let received = Arc::new(Mutex::new(Received::default()));
        let state = received.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let state = state.clone();
                std::thread::spawn(move || respond(stream, fault, &state));
            }
        });
        Self { url, received }
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    pub(crate) fn received(&self) -> Received {
        self.received.lock().unwrap().clone()
    }
}

/// Reads one request and responds. A client that disconnects is no error.
fn respond(stream: TcpStream, fault: Fault, state: &Mutex<Received>) {
    let mut reader = BufReader::new(&stream);
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).unwrap_or(0) == 0 {
            return;
        }
        if line == "\r\n" {
            break;
        }
        lines.push(line.trim_end().to_owned());
    }
    let header = |name: &str| {
        let found = lines.iter().filter_map(|line| line.split_once(": "));
        found.filter(|(own, _)| own.eq_ignore_ascii_case(name)).map(|(_, value)| value.to_owned()).next()
    };
    let mut body = vec![0; header("content-length").map_or(0, |length| length.parse().unwrap())];
    if reader.read_exact(&mut body).is_err() {
        return;
    }
    let n_requests = {
        let mut state = state.lock().unwrap();
        state.n_requests += 1;
        state.authorizations.extend(header("authorization"));
        state.n_requests
    };
    let path = lines[0].split(' ').nth(1).unwrap().to_owned();
    let (status, response) = match fault {
        // Some servers repeat the credentials in their message.
        Fault::Status(status) => (status, json!({"error": header("authorization")})),
        Fault::Silent => {
            let _ = reader.read(&mut [0]);
            return;
        }
        Fault::DiesAfter(n) if n_requests > n => return,
        Fault::Json(text) => (200, serde_json::from_str(text).unwrap()),
        Fault::Healthy | Fault::DiesAfter(_) => {
            let body = serde_json::from_slice(&body).unwrap_or(Value::Null);
            state.lock().unwrap().handle(&path, &body)
        }
    };
    let response = response.to_string();
    let head = format!("HTTP/1.1 {status} X\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", response.len());
    let _ = (&stream).write_all((head + &response).as_bytes());
}

impl Received {
    fn handle(&mut self, path: &str, body: &Value) -> (u16, Value) {
        let path = path.split('?').next().unwrap();
        match path.strip_prefix("/api/2.0/mlflow/") {
            Some(endpoint) => self.mlflow(endpoint, body),
            None if path == "/graphql" => (200, json!({"data": self.graphql(body)})),
            None if path.ends_with("/file_stream") => {
                self.file_stream(body);
                (200, json!({}))
            }
            None => (404, json!({"error": path})),
        }
    }

    fn graphql(&mut self, body: &Value) -> Value {
        let variables = &body["variables"];
        match body["operationName"].as_str().unwrap() {
            "RunResumeStatus" if self.upserts.is_empty() => json!({"model": {"bucket": null}}),
            "RunResumeStatus" => {
                let tail: Vec<String> = self.history.last().iter().map(|line| line.to_string()).collect();
                let tail = json!(tail).to_string();
                json!({"model": {"bucket": {"historyLineCount": self.history.len(), "historyTail": tail}}})
            }
            "UpsertBucket" => {
                self.upserts.push(variables.clone());
                let project = json!({"name": variables["project"], "entity": {"name": "team"}});
                json!({"upsertBucket": {"bucket": {"name": variables["name"], "project": project}, "inserted": true}})
            }
            other => panic!("unknown operation {other}"),
        }
    }

    fn file_stream(&mut self, body: &Value) {
        let history = &body["files"]["wandb-history.jsonl"];
        for (idx, line) in history["content"].as_array().into_iter().flatten().enumerate() {
            let at = history["offset"].as_u64().unwrap() as usize + idx;
            assert!(at <= self.history.len(), "the history has a gap at line {at}");
            self.history.truncate(at);
            self.history.push(serde_json::from_str(line.as_str().unwrap()).unwrap());
        }
        if let Some(summary) = body["files"]["wandb-summary.json"]["content"][0].as_str() {
            self.summary = serde_json::from_str(summary).unwrap();
        }
        if body["complete"] == true {
            self.exits.push(body["exitcode"].clone());
        }
    }

    fn mlflow(&mut self, endpoint: &str, body: &Value) -> (u16, Value) {
        let response = match endpoint {
            "experiments/get-by-name" => return (404, json!({"error_code": "RESOURCE_DOES_NOT_EXIST"})),
            "experiments/create" => json!({"experiment_id": "7"}),
            "runs/search" => json!({"runs": (0..self.runs.len()).map(|idx| self.run_json(idx)).collect::<Vec<_>>()}),
            "runs/create" => {
                self.runs.push(MlflowRun { tags: pairs(&body["tags"]), ..MlflowRun::default() });
                json!({"run": self.run_json(self.runs.len() - 1)})
            }
            "runs/update" => {
                let status = body["status"].as_str().unwrap().to_owned();
                self.run(body).status.push(status);
                json!({})
            }
            "runs/log-batch" => {
                let params = pairs(&body["params"]);
                let metrics = body["metrics"].as_array().cloned().unwrap_or_default();
                assert!(params.len() <= 100 && metrics.len() <= 1000, "the batch is larger than MLflow's limits");
                let run = self.run(body);
                run.params.extend(params);
                run.tags.extend(pairs(&body["tags"]));
                let metric = |metric: &Value| {
                    let key = metric["key"].as_str().unwrap().to_owned();
                    (key, metric["step"].as_u64().unwrap(), metric["value"].as_f64().unwrap())
                };
                run.metrics.extend(metrics.iter().map(metric));
                json!({})
            }
            other => return (404, json!({"error": other})),
        };
        (200, response)
    }

    fn run(&mut self, body: &Value) -> &mut MlflowRun {
        let id: usize = body["run_id"].as_str().unwrap().parse().unwrap();
        &mut self.runs[id]
    }

    fn run_json(&self, idx: usize) -> Value {
        let run = &self.runs[idx];
        let last: BTreeMap<&String, u64> = run.metrics.iter().map(|(key, step, _)| (key, *step)).collect();
        let metrics: Vec<Value> = last.iter().map(|(key, step)| json!({"key": key, "step": step})).collect();
        let params: Vec<Value> = run.params.iter().map(|(key, value)| json!({"key": key, "value": value})).collect();
        json!({
            "info": {"run_id": idx.to_string(), "experiment_id": "7"},
            "data": {"metrics": metrics, "params": params},
        })
    }
}

fn pairs(list: &Value) -> BTreeMap<String, String> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    list.as_array().into_iter().flatten().map(|pair| (text(&pair["key"]), text(&pair["value"]))).collect()
}
