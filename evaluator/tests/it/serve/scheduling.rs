//! The queue, the KV cache, closed connections and signals.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::{Shutdown, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{CHAT, COMPLETIONS, Server, read, user, with};

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
    assert!(began.elapsed() < Duration::from_secs(120), "the closed connection's request was not cancelled");
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
