//! The HTTP server `evaluator serve`: responses equal those of the library, and errors have OpenAI's format.

mod adapters;
mod completions;
mod observability;
mod reasoning;
mod requests;
mod scheduling;
mod structured;
mod tools;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use candle_core::{DType, Device};
use candlewick_inference::generate::GenerateOptions;
use candlewick_inference::lm::{GeneratedText, Lm};
use serde_json::{Value, json};

use crate::support;

/// A running server with a tiny model.
struct Server {
    child: Child,
    address: String,
    model: PathBuf,
    _folder: tempfile::TempDir,
}

impl Server {
    fn start(options: &[&str]) -> Self {
        Self::start_with(options, |_| {})
    }

    /// Starts a server, after `change` has changed the model's folder.
    fn start_with(options: &[&str], change: impl FnOnce(&Path)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let model = support::export(folder.path(), 1);
        change(&model);
        Self::start_model(options, folder, model)
    }

    fn start_model(options: &[&str], folder: tempfile::TempDir, model: PathBuf) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_evaluator"));
        command.arg("serve").arg(&model).args(["--served-model-name", "tiny", "--device", "cpu", "--port", "0"]);
        command.args(options).env("RAYON_NUM_THREADS", "2").env_remove("CANDLEWICK_API_KEY").stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut said = Vec::new();
        let address = loop {
            let line = lines.next().unwrap_or_else(|| panic!("the server ended: {said:?}")).unwrap();
            if let Some((_, rest)) = line.split_once(" at http://").filter(|_| line.starts_with("serving tiny")) {
                break rest.strip_suffix("/v1").unwrap().to_owned();
            }
            said.push(line);
        };
        std::thread::spawn(move || lines.for_each(drop));
        Self { child, address, model, _folder: folder }
    }

    fn lm(&self) -> Lm {
        Lm::load(&self.model, None, DType::F32, Device::Cpu).unwrap()
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(180))).unwrap();
        stream
    }

    /// Sends a request, and returns the connection.
    fn send(&self, head: &str, body: &str) -> TcpStream {
        let mut stream = self.connect();
        let length = body.len();
        write!(stream, "{head} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}")
            .unwrap();
        stream
    }

    fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        received(self.send(&format!("POST {path}"), &body.to_string()))
    }

    #[track_caller]
    fn ok(&self, path: &str, body: &Value) -> Value {
        let (status, response) = self.post(path, body);
        assert_eq!(status, 200, "{response}");
        response
    }

    /// Returns the chunks of a streamed response.
    fn streamed(&self, path: &str, body: &Value) -> Vec<Value> {
        let text = read(self.send(&format!("POST {path}"), &body.to_string()));
        let (head, events) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.contains("200 OK") && head.contains("text/event-stream"), "{head}");
        let mut events: Vec<&str> =
            events.trim_end().split("\n\n").map(|it| it.strip_prefix("data: ").unwrap()).collect();
        assert_eq!(events.pop(), Some("[DONE]"));
        events.into_iter().map(|event| serde_json::from_str(event).unwrap()).collect()
    }

    fn signal(&self, name: &str) {
        assert!(Command::new("kill").args([name, &self.child.id().to_string()]).status().unwrap().success());
    }

    fn wait(&mut self) -> ExitStatus {
        self.child.wait().unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn read(mut stream: TcpStream) -> String {
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

/// Returns the status and the JSON body of a response.
fn received(stream: TcpStream) -> (u16, Value) {
    let text = read(stream);
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {text}")))
}

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

fn user(text: &str) -> Value {
    json!([{"role": "user", "content": text}])
}

fn with(mut body: Value, fields: Value) -> Value {
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

fn greedy(n: usize) -> GenerateOptions {
    GenerateOptions { max_new_tokens: n, ..GenerateOptions::default() }
}

fn complete(lm: &Lm, prompt: &str, options: &GenerateOptions) -> GeneratedText {
    lm.complete(prompt, options, &mut |_| Ok(std::ops::ControlFlow::Continue(()))).unwrap()
}

/// Joins the texts of one choice's chunks.
fn joined(chunks: &[Value], index: usize, pointer: &str) -> String {
    let choices = chunks.iter().flat_map(|chunk| chunk["choices"].as_array().unwrap());
    let own = choices.filter(|choice| choice["index"] == index);
    own.filter_map(|choice| choice.pointer(pointer).and_then(Value::as_str)).collect()
}

#[test]
fn a_server_that_cannot_start_reports_the_option() {
    let server = Server::start(&[]);
    let port = server.address.rsplit_once(':').unwrap().1;
    let serve = |options: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_evaluator"));
        let output = command.arg("serve").arg(&server.model).args(["--device", "cpu"]).args(options).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    for (options, want) in [
        (&["--port", port][..], format!("failed to listen on 127.0.0.1:{port}")),
        (&["--port", "0", "--max-model-len", "65"], "--max-model-len 65: the model's context has 64 tokens".to_owned()),
        (&["--host", "example.org"], "invalid value 'example.org' for '--host <ADDRESS>'".to_owned()),
        (&["--max-queue", "0"], "invalid value '0' for '--max-queue <N>'".to_owned()),
        (&["--max-queue", "2305843009213693952"], "expected an integer from 1 to 65536".to_owned()),
        (&["--max-num-seqs", "2305843009213693952"], "expected an integer from 1 to 65536".to_owned()),
        (&["--shutdown-timeout", "x"], "invalid value 'x' for '--shutdown-timeout".to_owned()),
        (&["--request-log", "/nonexistent/log"], "failed to open --request-log /nonexistent/log".to_owned()),
        (&["--lora-modules", "first"], "expected NAME=PATH".to_owned()),
        (&["--served-model-name", "a", "--lora-modules", "a=x"], "the name a is used twice".to_owned()),
        (&["--max-model-len", "60", "--max-total-tokens", "59"], "--max-total-tokens must be at least".to_owned()),
        (&["--chat-template-kwargs", "[1]"], "expected a JSON object".to_owned()),
        (&["--chat-template-kwargs", "{\"tools\": 1}"], "tools is set for each conversation".to_owned()),
    ] {
        let (code, said) = serve(options);
        assert!(code == Some(2) && said.contains(&want), "{options:?}: {code:?} {said}");
        assert!(!said.contains("serving"), "{options:?}: {said}");
    }
}
