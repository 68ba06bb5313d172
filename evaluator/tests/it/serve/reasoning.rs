//! Thinking of chat completions.

use serde_json::{Value, json};

use super::{CHAT, COMPLETIONS, Server, joined, user, with};
use crate::support::scripted::Scripted;

/// Template whose generation prompt opens the thinking. The tags have several tokens.
const OPENED: Scripted<'_> = Scripted {
    chat_template: "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}{{ '<think>\n' }}",
    added_tokens: &[],
    scripts: &["\n12</think>34"],
};

/// Template without tags, and a tokenizer that has them.
const GENERATED: Scripted<'_> = Scripted {
    chat_template: "{% for m in messages %}{{ m.content }}{% endfor %}{{ '\n' }}",
    added_tokens: &["<think>", "</think>"],
    scripts: &["\n<think>12</think>34"],
};

fn start(scripted: &Scripted<'_>, options: &[&str]) -> Server {
    let folder = tempfile::tempdir().unwrap();
    let model = scripted.export(folder.path());
    Server::start_model(options, folder, model)
}

fn chat(fields: Value) -> Value {
    with(json!({"messages": user("Hi"), "temperature": 0}), fields)
}

/// Checks reasoning, content and finish reason of whole and streamed chats.
#[track_caller]
fn check(server: &Server, fields: Value, (reasoning, content, reason): (Option<&str>, &str, &str)) {
    let body = chat(with(fields, json!({"n": 2})));
    let response = server.ok(CHAT, &body);
    let chunks = server.streamed(CHAT, &with(body, json!({"stream": true})));
    for index in 0..2 {
        let choice = &response["choices"][index];
        let message = &choice["message"];
        let found = (message.get("reasoning_content").and_then(Value::as_str), message["content"].as_str().unwrap());
        assert_eq!(found, (reasoning, content), "{response}");
        assert_eq!(choice["finish_reason"], reason);
        let parts = ["/delta/reasoning_content", "/delta/content"].map(|pointer| joined(&chunks, index, pointer));
        assert_eq!(parts, [reasoning.unwrap_or_default(), content], "{chunks:?}");
    }
}

#[test]
fn thinking_that_the_prompt_opens_is_reasoning_content() {
    let server = start(&OPENED, &[]);
    check(&server, json!({}), (Some("12"), "34", "stop"));
    check(&server, json!({"max_tokens": 2}), (Some("12"), "", "length"));
    check(&server, json!({"max_tokens": 4}), (Some("12</"), "", "length"));
    let completion = server.ok(COMPLETIONS, &json!({"prompt": "Hi<think>\n", "temperature": 0}));
    assert_eq!(completion["choices"][0]["text"], "12</think>34");
}

#[test]
fn thinking_that_the_reply_opens_is_reasoning_content() {
    let server = start(&GENERATED, &[]);
    check(&server, json!({}), (Some("12"), "34", "stop"));
    check(&server, json!({"max_tokens": 1}), (None, "", "length"));
    check(&server, json!({"max_tokens": 2, "logprobs": true}), (Some("1"), "", "length"));
    // A reply may come back with its reasoning.
    let response = server.ok(CHAT, &chat(json!({})));
    let messages = json!([user("Hi")[0], response["choices"][0]["message"], user("Ho")[0]]);
    check(&server, json!({"messages": messages}), (Some("12"), "34", "stop"));
}

#[test]
fn the_format_none_leaves_thinking_in_the_content() {
    let server = start(&GENERATED, &["--reasoning-format", "none"]);
    check(&server, json!({}), (None, "<think>12</think>34", "stop"));
}

#[test]
fn a_model_without_tags_has_no_reasoning() {
    let scripted = Scripted { added_tokens: &[], scripts: &["\n<think>12"], ..GENERATED };
    check(&start(&scripted, &[]), json!({}), (None, "<think>12", "stop"));
}
