//! Requests that the server refuses.

use std::io::{Read, Write};

use serde_json::{Value, json};

use super::{CHAT, COMPLETIONS, Server, read, received, user, with};
use crate::support::scripted::Scripted;

#[test]
fn bad_requests_get_errors_that_name_the_field() {
    let server = Server::start(&["--max-queue", "4"]);
    let chat = |fields: Value| (CHAT, with(json!({"messages": user("Hi"), "max_tokens": 2}), fields));
    let completion = |fields: Value| (COMPLETIONS, with(json!({"prompt": "Hi", "max_tokens": 2}), fields));
    let long = "wolf ".repeat(150);
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
        (chat(json!({"presence_penalty": 2.5})), 400, json!("presence_penalty"), "a number from -2 to 2"),
        (chat(json!({"frequency_penalty": "x"})), 400, json!("frequency_penalty"), "expected a number"),
        (
            chat(json!({"logit_bias": {"600": 1}})),
            400,
            json!("logit_bias"),
            "the key \"600\", expected the id of a token",
        ),
        (chat(json!({"logit_bias": {"x": 1}})), 400, json!("logit_bias"), "the key \"x\""),
        (
            chat(json!({"logit_bias": {"5": 101}})),
            400,
            json!("logit_bias"),
            "token 5 is 101, expected a number from -100",
        ),
        (chat(json!({"logit_bias": [1]})), 400, json!("logit_bias"), "expected an object"),
        (chat(json!({"guided_json": {"type": "object"}})), 400, json!("guided_json"), "use response_format"),
        (chat(json!({"model": "gpt-4o"})), 404, json!(null), "this server has \"tiny\""),
        (chat(json!({"model": 4})), 400, json!("model"), "expected a string"),
        (
            chat(json!({"messages": user(&long)})),
            400,
            json!(null),
            "This model's maximum context length is 64 tokens. However, your request has",
        ),
        (completion(json!({"prompt": vec![5; 64]})), 400, json!(null), "your request has 64 input tokens"),
        (
            completion(json!({"prompt": vec![5; 65], "max_tokens": 0, "echo": true})),
            400,
            json!(null),
            "your request has 65 input tokens",
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
        (completion(json!({"min_tokens": 2})), 400, json!("min_tokens"), "min_tokens is 2, which is not supported"),
        (completion(json!({"use_beam_search": true})), 400, json!("use_beam_search"), "not supported"),
        (completion(json!({"temprature": 0})), 400, json!("temprature"), "not a field of this request"),
        (completion(json!({"tools": []})), 400, json!("tools"), "not a field of this request"),
        (
            completion(json!({"max_completion_tokens": 3, "max_tokens": 4})),
            400,
            json!("max_completion_tokens"),
            "max_tokens is 4; remove one",
        ),
        (completion(json!({"repeat_penalty": 1.1})), 400, json!("repeat_penalty"), "use repetition_penalty"),
        (completion(json!({"stop_token_ids": [600]})), 400, json!("stop_token_ids"), "token ids below 600"),
        (completion(json!({"stop_token_ids": [-1]})), 400, json!("stop_token_ids"), "has -1"),
        (completion(json!({"ignore_eos": 1})), 400, json!("ignore_eos"), "true or false"),
        (completion(json!({"stream_options": {}})), 400, json!("stream_options"), "needs stream: true"),
        (completion(json!({"stream": true, "stream_options": {"x": 1}})), 400, json!("x"), "not a field"),
        (
            completion(json!({"stream": true, "stream_options": {"continuous_usage_stats": true}})),
            400,
            json!("continuous_usage_stats"),
            "use include_usage",
        ),
        (chat(json!({"functions": [{"name": "f"}]})), 400, json!("functions"), "use tools"),
        (chat(json!({"reasoning_effort": "high"})), 400, json!("reasoning_effort"), "in chat_template_kwargs"),
        (chat(json!({"enable_thinking": false})), 400, json!("enable_thinking"), "in chat_template_kwargs"),
        (chat(json!({"continue_final_message": true})), 400, json!("continue_final_message"), "not supported"),
        (chat(json!({"prompt_logprobs": 1})), 400, json!("prompt_logprobs"), "not a field"),
        (chat(json!({("n".repeat(500)): 1})), 400, json!("n".repeat(60)), "not a field"),
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
        &chat(json!({
            "response_format": {"type": "text"}, "presence_penalty": 0.0, "tools": [], "user": "u", "metadata": {"a": "b"},
            "min_tokens": 0, "length_penalty": 1.0, "skip_special_tokens": true, "add_generation_prompt": true, "unknown": null,
        }))
        .1,
    );
}

/// Template that prints three roles.
const THREE_ROLES: Scripted<'_> = Scripted {
    chat_template: "{% for m in messages if m.role in ['system', 'user', 'assistant'] %}\
                    {{ m.role }}: {{ m.content }}\n{% endfor %}{{ '\n' }}",
    added_tokens: &[],
    scripts: &["\n12"],
};

#[test]
fn messages_that_the_template_does_not_render_are_renamed_or_refused() {
    let folder = tempfile::tempdir().unwrap();
    let model = THREE_ROLES.export(folder.path());
    let server = Server::start_model(&[], folder, model);
    let body = |role: &str| {
        let messages = json!([{"role": role, "content": "Be brief."}, {"role": "user", "content": "Hi"}]);
        json!({"messages": messages, "max_tokens": 2})
    };
    let n_tokens = |role: &str| server.ok(CHAT, &body(role))["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(n_tokens("developer"), n_tokens("system"));
    for role in ["tool", "function", "narrator"] {
        let (status, response) = server.post(CHAT, &body(role));
        assert_eq!((status, &response["error"]["param"]), (400, &json!("messages")), "{response}");
        let want = format!("does not render the content of message 0 ({role})");
        assert!(response["error"]["message"].as_str().unwrap().contains(&want), "{response}");
    }
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

/// Returns the largest memory of the server so far, in MB.
fn peak_memory(server: &Server) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.child.id())).unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    peak.trim().strip_suffix(" kB").unwrap().parse::<usize>().unwrap() / 1024
}

#[test]
#[cfg(target_os = "linux")]
fn hostile_requests_are_refused_before_memory_is_allocated() {
    let server = Server::start(&["--max-queue", "4"]);
    let before = peak_memory(&server);
    let long = "a".repeat(15 << 20);
    let chat = |text: &str| json!({"messages": user(text)}).to_string();
    for (path, body, want) in [
        (COMPLETIONS, json!({"prompt": "a", "n": 5_000_000}).to_string(), "at most 4"),
        (COMPLETIONS, json!({"prompt": "a", "n": 5_000_000, "echo": true}).to_string(), "at most 4"),
        (COMPLETIONS, json!({"prompt": "a", "n": u64::MAX}).to_string(), "at most 4"),
        (COMPLETIONS, json!({"prompt": ["a", "b"], "n": 3}).to_string(), "at most 4"),
        (COMPLETIONS, json!({"prompt": "a", "best_of": 5_000_000}).to_string(), "not supported"),
        (COMPLETIONS, json!({"prompt": "a", "stop": "b".repeat(1025)}).to_string(), "at most 1024"),
        (CHAT, json!({"messages": user("a"), "n": 5_000_000}).to_string(), "at most 4"),
        (CHAT, json!({"messages": user("a"), "model": long}).to_string(), "model is \"aaaa"),
        (COMPLETIONS, format!("{{\"prompt\":[{}\"a\"]}}", "\"a\",".repeat(1_000_000)), "at most 4"),
        (COMPLETIONS, format!("{{\"prompt\":[{}0]}}", "0,".repeat(7_000_000)), "values or commas"),
        (COMPLETIONS, format!("{{\"prompt\":[{}[]]}}", "[],".repeat(5_000_000)), "values or commas"),
        (COMPLETIONS, json!({"prompt": long}).to_string(), "bytes, at most"),
        (COMPLETIONS, json!({"prompt": ["a", long]}).to_string(), "bytes, at most"),
        (CHAT, chat(&long), "bytes, at most"),
    ] {
        let shown = &body[..body.len().min(60)];
        let (status, response) = received(server.send(&format!("POST {path}"), &body));
        let message = response["error"]["message"].as_str().unwrap();
        assert!((400..500).contains(&status) && message.contains(want), "{shown}: {status} {message:.200}");
        assert!(message.len() < 300, "{shown}: {} bytes", message.len());
    }
    let grown = peak_memory(&server) - before;
    assert!(grown < 250, "the requests took {grown} MB");
    server.ok(COMPLETIONS, &json!({"prompt": "Hi", "max_tokens": 1}));
}

#[test]
fn a_web_page_is_refused_unless_its_origin_is_allowed() {
    let server = Server::start(&["--allowed-hosts", "gpu-box", "--allowed-origins", "https://chat.example"]);
    let get = |headers: &str| read(server.send(&format!("GET /v1/models HTTP/1.0\r\n{headers}X: "), ""));
    for (headers, status, want) in [
        ("Host: localhost:8000\r\n", "200", ""),
        ("Host: gpu-box\r\n", "200", ""),
        ("Host: evil.example\r\n", "403", "start it with --allowed-hosts"),
        ("Host: evil.example\r\nHost: localhost\r\n", "403", "host_not_allowed"),
        ("Origin: https://evil.example\r\n", "403", "start it with --allowed-origins"),
        ("Origin: null\r\n", "403", "origin_not_allowed"),
        ("Origin: http://localhost:3000\r\n", "200", ""),
        ("Origin: https://chat.example\r\n", "200", "access-control-allow-origin: https://chat.example"),
    ] {
        let text = get(headers);
        assert!(
            text.starts_with(&format!("HTTP/1.1 {status}")) || text.starts_with(&format!("HTTP/1.0 {status}")),
            "{headers}: {text}"
        );
        assert!(text.contains(want), "{headers}: {text}");
    }
    let preflight = |origin| read(server.send(&format!("OPTIONS {CHAT} HTTP/1.0\r\nOrigin: {origin}\r\nX: "), ""));
    let allowed = preflight("https://chat.example");
    assert!(allowed.contains(" 204 ") && allowed.contains("content-type"), "{allowed}");
    assert!(preflight("https://evil.example").contains(" 403 "));
    assert!(preflight("http://localhost:3000").contains(" 405 "));
}

#[test]
fn half_requests_do_not_keep_a_stopping_server() {
    let mut server = Server::start(&[]);
    let half = [
        "",
        "POST ",
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n",
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{",
    ];
    let half: Vec<_> = half
        .iter()
        .map(|sent| {
            let mut stream = server.connect();
            stream.write_all(sent.as_bytes()).unwrap();
            stream
        })
        .collect();
    server.ok(COMPLETIONS, &json!({"prompt": "Hi", "max_tokens": 1}));
    server.signal("-TERM");
    assert!(server.wait().success());
    drop(half);
}
