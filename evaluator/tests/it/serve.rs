//! The HTTP server `evaluator serve`: responses equal those of the library, and errors have OpenAI's format.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use candle_core::{DType, Device};
use candlewick_inference::generate::GenerateOptions;
use candlewick_inference::lm::{GeneratedText, Lm};
use candlewick_text::conversation::{Conversation, Message};
use candlewick_text::tokenizer::SpecialTokens;
use serde_json::{Value, json};

use crate::support::{self, CONTEXT};

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
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
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
fn a_chat_has_the_reply_of_the_library_whole_and_streamed() {
    let server = Server::start(&[]);
    let lm = server.lm();
    let chat = Conversation::new([Message::new("user", "Say wolf 4 times.")]);
    let want = lm.chat(&chat, &greedy(20), &mut |_| Ok(std::ops::ControlFlow::Continue(()))).unwrap();
    let body = json!({"model": "tiny", "messages": user("Say wolf 4 times."), "temperature": 0, "max_tokens": 20});
    let whole = server.ok(CHAT, &body);
    let choice = &whole["choices"][0];
    assert_eq!(choice["message"], json!({"role": "assistant", "content": want.text, "refusal": null}));
    let n_prompt = want.timings.prompt_tokens;
    let usage = &whole["usage"];
    assert_eq!(
        (usage["prompt_tokens"].clone(), usage["total_tokens"].clone()),
        (json!(n_prompt), json!(n_prompt as u64 + usage["completion_tokens"].as_u64().unwrap()))
    );
    assert_eq!(choice["finish_reason"], if want.timings.new_tokens == 20 { "length" } else { "stop" });
    let stream = json!({"stream": true, "stream_options": {"include_usage": true}});
    let chunks = server.streamed(CHAT, &with(body.clone(), stream));
    assert_eq!(chunks[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    assert_eq!(joined(&chunks, 0, "/delta/content"), want.text);
    let (last, end) = (&chunks[chunks.len() - 1], &chunks[chunks.len() - 2]);
    assert_eq!((&last["choices"], &last["usage"]), (&json!([]), usage));
    assert_eq!(end["choices"][0]["finish_reason"], choice["finish_reason"]);
    // Text parts are one text, and unknown fields are ignored.
    let parts =
        json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "Say wolf 4 times."}]}], "x": 1});
    assert_eq!(server.ok(CHAT, &with(body, parts))["choices"], whole["choices"]);
}

/// Tokens of the prompt are scored in the same forward as those of the library, up to the rounding of f32.
#[test]
fn echoed_prompts_have_the_log_probabilities_of_the_library() {
    let server = Server::start(&[]);
    let lm = server.lm();
    let texts = ["Say wolf 4 times.", "Spell the word cloud.", "Say wolf 5 times, or 6."];
    let ids = texts.map(|text| lm.tokenizer().encode(text, SpecialTokens::Include).unwrap());
    let fields = json!({"echo": true, "max_tokens": 1, "logprobs": 1, "temperature": 0});
    for prompts in [json!(texts), json!(ids)] {
        let response = server.ok(COMPLETIONS, &with(json!({"prompt": prompts}), fields.clone()));
        assert_eq!(response["choices"].as_array().unwrap().len(), 3);
        for ((choice, text), ids) in response["choices"].as_array().unwrap().iter().zip(texts).zip(&ids) {
            let want = lm.score(text).unwrap();
            let found = choice["logprobs"]["token_logprobs"].as_array().unwrap();
            assert_eq!((found.len(), &found[0]), (ids.len() + 1, &Value::Null));
            for (found, want) in found.iter().zip(&want).skip(1) {
                let difference = found.as_f64().unwrap() - f64::from(want.logprob.unwrap());
                assert!(difference.abs() < 1e-5, "{found} {want:?}");
            }
            let top = choice["logprobs"]["top_logprobs"].as_array().unwrap();
            assert!(top.iter().skip(1).all(|top| (1..=2).contains(&top.as_object().unwrap().len())), "{top:?}");
            let largest =
                |top: &Value| top.as_object().unwrap().values().map(|it| it.as_f64().unwrap()).fold(f64::MIN, f64::max);
            assert!(top.iter().zip(found).skip(1).all(|(top, found)| largest(top) >= found.as_f64().unwrap()));
            // Greedy decoding takes the most probable token.
            assert_eq!(largest(&top[ids.len()]), found[ids.len()].as_f64().unwrap());
            assert!(choice["text"].as_str().unwrap().starts_with(text), "{choice}");
            let tokens: Vec<&str> =
                choice["logprobs"]["tokens"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
            assert_eq!(tokens[..ids.len()].concat(), text);
            let offset = tokens[..3].concat().chars().count();
            assert_eq!(choice["logprobs"]["text_offset"][3], offset);
        }
    }
    let nothing = server.ok(COMPLETIONS, &json!({"prompt": texts[0], "echo": true, "max_tokens": 0, "logprobs": 0}));
    assert_eq!((&nothing["choices"][0]["text"], &nothing["usage"]["completion_tokens"]), (&json!(texts[0]), &json!(0)));
    // A prompt that fills the context can be scored, too.
    let full = vec![5; CONTEXT];
    let full = server.ok(COMPLETIONS, &json!({"prompt": full, "echo": true, "max_tokens": 1, "logprobs": 1}));
    assert_eq!(full["choices"][0]["logprobs"]["tokens"].as_array().unwrap().len(), CONTEXT + 1);
}

#[test]
fn completions_do_not_depend_on_concurrent_requests() {
    let server = Server::start(&[]);
    let lm = server.lm();
    let prompts: Vec<String> = (0..6).map(|i| format!("Say wolf {i} times, say {}", "cloud ".repeat(i))).collect();
    let want: Vec<String> = prompts.iter().map(|prompt| complete(&lm, prompt, &greedy(12)).text).collect();
    let body = |prompt: &String| json!({"prompt": prompt, "max_tokens": 12, "temperature": 0});
    let connections: Vec<TcpStream> =
        prompts.iter().map(|prompt| server.send("POST /v1/completions", &body(prompt).to_string())).collect();
    let together = server.ok(COMPLETIONS, &json!({"prompt": prompts, "max_tokens": 12, "temperature": 0}));
    for (i, (connection, want)) in connections.into_iter().zip(&want).enumerate() {
        let (status, alone) = received(connection);
        assert_eq!((status, &alone["choices"][0]["text"]), (200, &json!(want)), "{}", prompts[i]);
        assert_eq!(&together["choices"][i]["text"], want);
    }
    // The longest common prefix of an earlier request is reused.
    let again = server.ok(COMPLETIONS, &body(&prompts[5]));
    assert_eq!(&again["choices"][0]["text"], &want[5]);
}

#[test]
fn choices_are_sampled_from_the_seed() {
    let server = Server::start(&[]);
    let body = json!({"messages": user("Hi"), "n": 3, "seed": 7, "max_tokens": 12, "temperature": 1.5});
    let contents = |body: &Value| -> Vec<Value> {
        let response = server.ok(CHAT, body);
        response["choices"].as_array().unwrap().iter().map(|choice| choice["message"]["content"].clone()).collect()
    };
    let all = contents(&body);
    assert_eq!(contents(&body), all);
    assert!(all[0] != all[1] && all[1] != all[2], "{all:?}");
    assert_eq!(contents(&with(body.clone(), json!({"n": 1})))[0], all[0]);
    assert_ne!(contents(&with(body.clone(), json!({"seed": -8}))), all);
    let chunks = server.streamed(CHAT, &with(body.clone(), json!({"stream": true})));
    for (index, content) in all.iter().enumerate() {
        assert_eq!(&joined(&chunks, index, "/delta/content"), content);
    }
    // One candidate is greedy decoding.
    let greedy = contents(&with(body.clone(), json!({"n": 1, "temperature": 0})));
    for one in [json!({"top_k": 1}), json!({"top_p": 1e-9}), json!({"min_p": 1.0})] {
        assert_eq!(contents(&with(with(body.clone(), json!({"n": 1})), one)), greedy);
    }
    assert_ne!(contents(&with(body.clone(), json!({"n": 1, "temperature": 0, "repetition_penalty": 0.1}))), greedy);
}

#[test]
fn stop_strings_end_a_text_and_are_left_out() {
    let server = Server::start(&[]);
    let whole = complete(&server.lm(), "Say wolf", &greedy(24)).text;
    let stop: String = whole.chars().skip(whole.chars().count() / 2).take(3).collect();
    let before = &whole[..whole.find(&stop).unwrap()];
    let body = json!({"prompt": "Say wolf", "max_tokens": 24, "temperature": 0, "stop": [stop, "never in there"]});
    let stopped = server.ok(COMPLETIONS, &body);
    assert_eq!(stopped["choices"][0]["text"], before);
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    let chunks = server.streamed(COMPLETIONS, &with(body, json!({"stream": true})));
    assert_eq!(joined(&chunks, 0, "/text"), before);
}

#[test]
fn log_probabilities_of_a_chat_belong_to_its_tokens() {
    let server = Server::start(&[]);
    let body = json!({
        "messages": user("Hi"), "temperature": 0, "max_tokens": 6, "logprobs": true, "top_logprobs": 3, "ignored": null
    });
    let response = server.ok(CHAT, &body);
    let content = response["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(response["usage"]["completion_tokens"], content.len());
    for entry in content {
        let top = entry["top_logprobs"].as_array().unwrap();
        assert_eq!((top.len(), &top[0]["token"], &top[0]["logprob"]), (3, &entry["token"], &entry["logprob"]));
        assert!(entry["bytes"].is_null() || entry["bytes"] == json!(entry["token"].as_str().unwrap().as_bytes()));
        let logprobs: Vec<f64> = top.iter().map(|top| top["logprob"].as_f64().unwrap()).collect();
        assert!(logprobs.is_sorted_by(|a, b| a >= b) && logprobs.iter().map(|it| it.exp()).sum::<f64>() < 1.0 + 1e-6);
    }
    let chunks = server.streamed(CHAT, &with(body, json!({"stream": true})));
    let of_chunk = |chunk: &Value| chunk["choices"][0]["logprobs"]["content"].as_array().cloned().unwrap_or_default();
    let streamed: Vec<Value> = chunks.iter().flat_map(of_chunk).collect();
    assert_eq!(streamed.len(), content.len());
    for (streamed, whole) in streamed.iter().zip(content) {
        assert_eq!(streamed["token"], whole["token"]);
        // The prompt's keys and values are reused, and a forward of one token rounds differently.
        let difference = streamed["logprob"].as_f64().unwrap() - whole["logprob"].as_f64().unwrap();
        assert!(difference.abs() < 1e-5, "{streamed} {whole}");
    }
}

#[test]
fn bad_requests_get_errors_that_name_the_field() {
    let server = Server::start(&["--max-queue", "4"]);
    let chat = |fields: Value| (CHAT, with(json!({"messages": user("Hi"), "max_tokens": 2}), fields));
    let completion = |fields: Value| (COMPLETIONS, with(json!({"prompt": "Hi", "max_tokens": 2}), fields));
    let long = "wolf ".repeat(200);
    for ((path, body), status, param, want) in [
        (chat(json!({"temperature": "hot"})), 400, json!("temperature"), "temperature is \"hot\", expected a number"),
        (chat(json!({"temperature": -1})), 400, json!("temperature"), "expected a number of at least 0"),
        (chat(json!({"top_p": 2})), 400, json!("top_p"), "at most 1"),
        (chat(json!({"top_k": -2})), 400, json!("top_k"), "top_k is -2"),
        (chat(json!({"min_p": []})), 400, json!("min_p"), "min_p is []"),
        (chat(json!({"seed": 1.5})), 400, json!("seed"), "expected an integer"),
        (chat(json!({"max_tokens": -1})), 400, json!("max_tokens"), "at least 0"),
        (chat(json!({"n": 0})), 400, json!("n"), "at least 1"),
        (chat(json!({"n": 5})), 400, json!(null), "at most 4"),
        (chat(json!({"stream": "yes"})), 400, json!("stream"), "true or false"),
        (chat(json!({"stop": [1]})), 400, json!("stop"), "a string or an array of strings"),
        (chat(json!({"stop": ""})), 400, json!("stop"), "empty string"),
        (chat(json!({"top_logprobs": 3})), 400, json!("top_logprobs"), "needs logprobs"),
        (chat(json!({"logprobs": true, "top_logprobs": 21})), 400, json!("top_logprobs"), "at most 20"),
        (chat(json!({"messages": []})), 400, json!("messages"), "missing or empty"),
        (chat(json!({"messages": null})), 400, json!("messages"), "missing or empty"),
        (chat(json!({"messages": [3]})), 400, json!("messages"), "messages[0] is 3, expected an object"),
        (chat(json!({"messages": [{"content": "Hi"}]})), 400, json!("messages"), "messages[0]"),
        (
            chat(json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})),
            400,
            json!("messages"),
            "image",
        ),
        (
            chat(json!({"messages": [{"role": "assistant", "content": "Hi"}]})),
            400,
            json!("messages"),
            "nothing to answer",
        ),
        (
            chat(json!({"tools": [{"type": "function", "function": {"name": "f"}}]})),
            400,
            json!("tools"),
            "does not render tools",
        ),
        (chat(json!({"chat_template_kwargs": {"messages": 1}})), 400, json!("chat_template_kwargs"), "messages is set"),
        (chat(json!({"response_format": {"type": "json_object"}})), 400, json!("response_format"), "json_object"),
        (chat(json!({"presence_penalty": 0.5})), 400, json!("presence_penalty"), "repetition_penalty"),
        (chat(json!({"logit_bias": {"5": 1}})), 400, json!("logit_bias"), "not supported"),
        (chat(json!({"model": "gpt-4o"})), 404, json!(null), "this server has \"tiny\""),
        (chat(json!({"model": 4})), 400, json!("model"), "expected a string"),
        (
            chat(json!({"messages": user(&long)})),
            400,
            json!(null),
            "the server's limit for prompt and completion is 64",
        ),
        (completion(json!({"prompt": null})), 400, json!("prompt"), "prompt is null"),
        (completion(json!({"prompt": []})), 400, json!("prompt"), "prompt is []"),
        (completion(json!({"prompt": [[]]})), 400, json!("prompt"), "has no tokens"),
        (completion(json!({"prompt": ""})), 400, json!("prompt"), "has no tokens"),
        (completion(json!({"prompt": [1, "a"]})), 400, json!("prompt"), "prompt is [1,\"a\"]"),
        (completion(json!({"prompt": [600]})), 400, json!("prompt"), "token 600, but the vocabulary has 600"),
        (completion(json!({"prompt": [1u64 << 40]})), 400, json!("prompt"), "the vocabulary has 600"),
        (completion(json!({"prompt": [-1]})), 400, json!("prompt"), "prompt is [-1]"),
        (completion(json!({"prompt": vec!["a"; 5]})), 400, json!(null), "at most 4"),
        (completion(json!({"logprobs": true})), 400, json!("logprobs"), "an integer"),
        (completion(json!({"suffix": "x"})), 400, json!("suffix"), "not supported"),
        (("/v1/embeddings", json!({})), 404, json!(null), "POST /v1/embeddings is not served"),
        (("/v1/models", json!({})), 405, json!(null), "does not accept POST"),
    ] {
        let (found, response) = server.post(path, &body);
        let error = &response["error"];
        assert_eq!((found, &error["param"]), (status, &param), "{body}: {response}");
        assert!(error["message"].as_str().unwrap().contains(want), "{body}: {error}");
        assert_eq!(error["type"], "invalid_request_error");
    }
    for (body, want) in
        [("", "not JSON"), ("[1]", "expected a JSON object"), ("{\"a\"", "not JSON"), ("\u{1}\u{2}", "not JSON")]
    {
        let (status, response) = received(server.send("POST /v1/completions", body));
        assert!(status == 400 && response["error"]["message"].as_str().unwrap().contains(want), "{response}");
    }
    let deep = "[".repeat(100_000);
    assert_eq!(received(server.send("POST /v1/completions", &deep)).0, 400);
    // After all of them the server still answers.
    server.ok(
        CHAT,
        &chat(json!({"response_format": {"type": "text"}, "presence_penalty": 0.0, "tools": [], "user": "u"})).1,
    );
}

#[test]
fn bodies_have_a_size_limit_and_a_type() {
    let server = Server::start(&[]);
    let mut stream = server.connect();
    write!(
        stream,
        "POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: 99999999\r\n\r\n"
    )
    .unwrap();
    let (status, response) = received(stream);
    assert!(status == 413 && response["error"]["message"].as_str().unwrap().contains("16777216 bytes"), "{response}");
    // A form of a web page is no request.
    let mut stream = server.connect();
    write!(stream, "POST /v1/completions HTTP/1.0\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\n{{}}")
        .unwrap();
    assert_eq!(received(stream).0, 415);
    let mut stream = server.connect();
    stream.write_all(b"\x00\xff nonsense\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    assert!(answer.is_empty() || answer.starts_with(b"HTTP/1.1 400"), "{answer:?}");
    server.ok(COMPLETIONS, &json!({"prompt": "Hi", "max_tokens": 1}));
}

#[test]
fn an_api_key_is_required_except_for_health() {
    let server = Server::start(&["--api-key", "secret"]);
    let get = |path: &str, header: &str| received(server.send(&format!("GET {path} HTTP/1.0\r\n{header}X: "), ""));
    assert_eq!(get("/health", "").0, 200);
    for header in ["", "Authorization: Bearer wrong\r\n", "Authorization: secret\r\n", "Authorization: Bearer \r\n"] {
        let (status, response) = get("/v1/models", header);
        assert_eq!((status, &response["error"]["code"]), (401, &json!("invalid_api_key")), "{header}");
    }
    let (status, models) = get("/v1/models", "Authorization: Bearer secret\r\n");
    assert_eq!(
        (status, &models["data"][0]["id"], &models["data"][0]["max_model_len"]),
        (200, &json!("tiny"), &json!(64))
    );
    assert_eq!(get("/v1/models/tiny", "Authorization: Bearer secret\r\n").0, 200);
    assert_eq!(get("/v1/models/owner/other", "Authorization: Bearer secret\r\n").0, 404);
    assert_eq!(server.post(CHAT, &json!({"messages": user("Hi")})).0, 401);
}

/// Lengthens the model's context, so that a generation takes minutes.
fn lengthen(model: &Path) {
    let path = model.join("config.json");
    let mut config: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    config["max_position_embeddings"] = json!(200_000);
    fs::write(path, config.to_string()).unwrap();
}

/// Starts a streamed generation, and returns after its first events.
fn begin(server: &Server, max_tokens: usize) -> BufReader<TcpStream> {
    let body = json!({"prompt": [5, 6, 7], "max_tokens": max_tokens, "stream": true, "temperature": 1e9, "seed": 3});
    let mut stream = BufReader::new(server.send("POST /v1/completions", &body.to_string()));
    let mut line = String::new();
    stream.read_line(&mut line).unwrap();
    assert!(line.contains("200 OK"), "{line}");
    stream
}

fn read_until_data(stream: &mut BufReader<TcpStream>) {
    let mut line = String::new();
    while !line.starts_with("data:") {
        line.clear();
        assert!(stream.read_line(&mut line).unwrap() > 0);
    }
}

/// Starts a generation that does not end soon, because the penalty raises the tokens of the prompt.
fn endless(server: &Server) -> BufReader<TcpStream> {
    let sampling = json!({"temperature": 0, "repetition_penalty": 0.001});
    let body = with(json!({"prompt": "Say wolf", "max_tokens": 150_000, "stream": true}), sampling);
    let mut stream = BufReader::new(server.send("POST /v1/completions", &body.to_string()));
    read_until_data(&mut stream);
    stream
}

#[test]
fn a_full_queue_refuses_requests_and_a_closed_connection_cancels_one() {
    let server = Server::start_with(&["--max-num-seqs", "1", "--max-queue", "1"], lengthen);
    let began = Instant::now();
    let running = endless(&server);
    let waiting = begin(&server, 3);
    let (status, refused) = server.post(COMPLETIONS, &json!({"prompt": "Hi", "max_tokens": 1}));
    assert_eq!((status, &refused["error"]["code"]), (429, &json!("queue_full")));
    assert_eq!(refused["error"]["type"], "rate_limit_error");
    running.get_ref().shutdown(Shutdown::Both).unwrap();
    drop(running);
    let text = read(waiting.into_inner());
    assert!(text.trim_end().ends_with("data: [DONE]"), "{text}");
    assert!(began.elapsed() < Duration::from_secs(60), "the closed connection's request was not cancelled");
}

#[test]
fn requests_do_not_reserve_all_tokens_that_they_may_generate() {
    // The KV cache holds one sequence of the maximum length.
    let server = Server::start_with(&["--max-model-len", "150000", "--max-total-tokens", "150001"], lengthen);
    let running = [endless(&server), endless(&server)];
    let body = json!({"messages": user("Say wolf"), "stream": true});
    let mut chat = BufReader::new(server.send(&format!("POST {CHAT}"), &body.to_string()));
    // The first event is the role, the second a token.
    read_until_data(&mut chat);
    read_until_data(&mut chat);
    drop(running);
}

/// Sequences that give their rows to earlier ones are computed again, with the same tokens.
#[test]
fn a_full_kv_cache_does_not_change_the_tokens() {
    let server = Server::start_with(&["--max-model-len", "900", "--max-total-tokens", "1000"], lengthen);
    let body = |i: usize| {
        let sampling = json!({"temperature": 0, "repetition_penalty": 0.001});
        with(
            json!({"prompt": format!("Say wolf {i} times."), "max_tokens": 700, "logprobs": 0, "echo": true}),
            sampling,
        )
    };
    let alone: Vec<Value> = (0..4).map(|i| server.ok(COMPLETIONS, &body(i))).collect();
    let together: Vec<Value> = std::thread::scope(|scope| {
        let server = &server;
        let send = |i: usize| scope.spawn(move || server.ok(COMPLETIONS, &body(i)));
        let threads: Vec<_> = (0..4).map(send).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for (alone, together) in alone.iter().zip(&together) {
        assert_eq!(alone["usage"], together["usage"]);
        assert_eq!(alone["choices"][0]["text"], together["choices"][0]["text"]);
        let n = |response: &Value| response["choices"][0]["logprobs"]["tokens"].as_array().unwrap().len();
        assert_eq!(n(alone), n(together), "each token has one log-probability");
    }
}

/// Writes an adapter with random factors for some modules of the first layer, and returns its folder.
fn adapter(folder: &Path, name: &str, r: usize, modules: &[(&str, usize, usize)]) -> PathBuf {
    let folder = folder.join(name);
    fs::create_dir(&folder).unwrap();
    let targets: Vec<&str> = modules.iter().map(|(module, ..)| module.rsplit('.').next().unwrap()).collect();
    let config = json!({
        "peft_type": "LORA", "r": r, "lora_alpha": 4 * r, "target_modules": targets, "base_model_name_or_path": "tiny",
        "task_type": "CAUSAL_LM",
    });
    fs::write(folder.join("adapter_config.json"), config.to_string()).unwrap();
    let mut tensors = std::collections::HashMap::new();
    for layer in 0..2 {
        for (module, out, input) in modules {
            for (factor, shape) in [("A", (r, *input)), ("B", (*out, r))] {
                let values: Vec<f32> =
                    (0..shape.0 * shape.1).map(|i| ((i * 37 + r * 11) % 17) as f32 / 17.0 - 0.5).collect();
                let name = format!("base_model.model.model.layers.{layer}.{module}.lora_{factor}.weight");
                tensors.insert(name, candle_core::Tensor::from_vec(values, shape, &Device::Cpu).unwrap());
            }
        }
    }
    candle_core::safetensors::save(&tensors, folder.join("adapter_model.safetensors")).unwrap();
    folder
}

fn two_adapters(folder: &Path) -> [PathBuf; 2] {
    let mlp = [("mlp.up_proj", 24, 16), ("mlp.down_proj", 16, 24)];
    [adapter(folder, "first", 2, &[("self_attn.q_proj", 16, 16)]), adapter(folder, "second", 4, &mlp)]
}

#[test]
fn a_request_chooses_an_adapter_by_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let adapters = two_adapters(folder.path());
    let [first, second] = adapters.each_ref().map(|path| path.display().to_string());
    let server = Server::start(&["--lora-modules", &format!("first={first}"), &format!("second={second}")]);
    let load = |adapter| Lm::load(&server.model, adapter, DType::F32, Device::Cpu).unwrap();
    let models = [("tiny", load(None)), ("first", load(Some(&adapters[0]))), ("second", load(Some(&adapters[1])))];
    let prompts: Vec<String> = (0..4).map(|i| format!("Say wolf {i} times.")).collect();
    let responses: Vec<(usize, usize, Value)> = std::thread::scope(|scope| {
        let (server, prompts) = (&server, &prompts);
        let send = |(model, prompt): (usize, usize)| {
            let name = ["tiny", "first", "second"][model];
            scope.spawn(move || {
                let body = json!({"model": name, "prompt": prompts[prompt], "max_tokens": 20, "temperature": 0});
                (model, prompt, server.ok(COMPLETIONS, &body))
            })
        };
        let threads: Vec<_> = (0..12).map(|i| send((i % 3, i / 3))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let mut texts = std::collections::BTreeSet::new();
    for (model, prompt, response) in responses {
        let want = complete(&models[model].1, &prompts[prompt], &greedy(20)).text;
        assert_eq!((&response["model"], &response["choices"][0]["text"]), (&json!(models[model].0), &json!(want)));
        texts.insert(want);
    }
    assert!(texts.len() > 8, "the adapters change the texts: {texts:?}");
    // A prompt that another model has computed is computed again.
    let prompt = "Say wolf 4 times, and cloud 5 times.";
    for (name, lm) in models.iter().rev() {
        let body = json!({"model": name, "prompt": prompt, "max_tokens": 20, "temperature": 0});
        let want = complete(lm, prompt, &greedy(20)).text;
        assert_eq!(server.ok(COMPLETIONS, &body)["choices"][0]["text"], want, "{name}");
    }
    let (status, list) = received(server.send("GET /v1/models", ""));
    let cards: Vec<(&Value, &Value)> =
        list["data"].as_array().unwrap().iter().map(|card| (&card["id"], &card["parent"])).collect();
    let (tiny, none) = (json!("tiny"), Value::Null);
    assert_eq!((status, cards), (200, vec![(&tiny, &none), (&json!("first"), &tiny), (&json!("second"), &tiny)]));
    let (status, error) = server.post(COMPLETIONS, &json!({"model": "third", "prompt": "Hi"}));
    assert_eq!((status, &error["error"]["code"]), (404, &json!("model_not_found")));
    let names = "this server has \"tiny\", \"first\", \"second\"";
    assert!(error["error"]["message"].as_str().unwrap().contains(names), "{error}");
}

#[test]
fn an_adapter_shares_the_weights_of_its_base() {
    let folder = tempfile::tempdir().unwrap();
    let model = support::export(folder.path(), 1);
    let base = Lm::load(&model, None, DType::F32, Device::Cpu).unwrap();
    let before = base.score("Say wolf 4 times.").unwrap();
    for path in two_adapters(folder.path()) {
        let shared = base.with_adapter(Some(&path)).unwrap();
        let own = Lm::load(&model, Some(&path), DType::F32, Device::Cpu).unwrap();
        let bytes = |lm: &Lm| lm.engine().store().device_bytes().weights;
        assert!(bytes(&shared) * 4 < bytes(&base) && bytes(&own) > bytes(&base), "{} {}", bytes(&shared), bytes(&own));
        let [a, b] = [&shared, &own].map(|lm| format!("{:?}", lm.score("Say wolf 4 times.").unwrap()));
        assert_eq!(a, b);
        assert_ne!(a, format!("{before:?}"));
    }
    assert_eq!(format!("{:?}", base.score("Say wolf 4 times.").unwrap()), format!("{before:?}"));
}

#[test]
fn a_signal_completes_running_requests_and_a_second_one_cancels_them() {
    let mut server = Server::start_with(&[], lengthen);
    let body = json!({"prompt": "Say wolf", "max_tokens": 400, "stream": true, "temperature": 0});
    let mut stream = BufReader::new(server.send("POST /v1/completions", &body.to_string()));
    read_until_data(&mut stream);
    server.signal("-TERM");
    let text = read(stream.into_inner());
    assert!(text.trim_end().ends_with("data: [DONE]"), "{text}");
    assert!(server.wait().success());
    assert!(TcpStream::connect(&server.address).is_err());

    let mut server = Server::start_with(&[], lengthen);
    let running = endless(&server);
    server.signal("-INT");
    while TcpStream::connect(&server.address).is_ok() {}
    server.signal("-INT");
    assert!(server.wait().success());
    assert!(!read(running.into_inner()).contains("[DONE]"));
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
        (&["--lora-modules", "first"], "expected NAME=PATH".to_owned()),
        (&["--served-model-name", "a", "--lora-modules", "a=x"], "the name a is used twice".to_owned()),
        (&["--max-model-len", "60", "--max-total-tokens", "60"], "--max-total-tokens must be greater than".to_owned()),
        (&["--chat-template-kwargs", "[1]"], "expected a JSON object".to_owned()),
        (&["--chat-template-kwargs", "{\"tools\": 1}"], "tools is set for each conversation".to_owned()),
    ] {
        let (code, said) = serve(options);
        assert!(code == Some(2) && said.contains(&want), "{options:?}: {code:?} {said}");
    }
}
