//! Tool calls of chats.

use serde_json::{Value, json};

use super::{CHAT, Server, joined, user, with};
use crate::support::scripted::Scripted;

/// Template that renders tools, and calls in the format of Qwen and Hermes.
const TEMPLATE: &str = "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}\
    {% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\
    {% for c in m.tool_calls %}\n<tool_call>\n{\"name\": \"{{ c.function.name }}\", \"arguments\": \
    {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

const CALL: &str = "{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\"}}";

fn scripted(scripts: &[&str]) -> Server {
    let folder = tempfile::tempdir().unwrap();
    let added_tokens =
        &["<tool_call>", CALL, "{\"name\": \"time\", \"arguments\": {}}", "</tool_call>", "</tool_call >"];
    let model = Scripted { chat_template: TEMPLATE, added_tokens, scripts }.export(folder.path());
    // The tools take more tokens than the context of other tests' models.
    let config = model.join("config.json");
    let mut fields: Value = serde_json::from_slice(&std::fs::read(&config).unwrap()).unwrap();
    fields["max_position_embeddings"] = json!(4096);
    std::fs::write(config, fields.to_string()).unwrap();
    Server::start_model(&[], folder, model)
}

fn tools() -> Value {
    let weather = json!({"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]});
    json!({"tools": [
        {"type": "function", "function": {"name": "weather", "parameters": weather}},
        {"type": "function", "function": {"name": "time"}},
    ]})
}

fn body(fields: Value) -> Value {
    with(with(json!({"messages": user("Hi"), "temperature": 0, "max_tokens": 40}), tools()), fields)
}

/// Returns the names and arguments of calls, which must have the fields of OpenAI's format.
#[track_caller]
fn calls(message: &Value) -> Vec<(String, String)> {
    let text = |call: &Value, key: &str| call["function"][key].as_str().unwrap().to_owned();
    let call = |call: &Value| {
        assert!(call["type"] == "function" && call["id"].as_str().unwrap().len() == 9, "{call}");
        (text(call, "name"), text(call, "arguments"))
    };
    message["tool_calls"].as_array().map(|calls| calls.iter().map(call).collect()).unwrap_or_default()
}

#[test]
fn the_calls_of_a_reply_are_parsed_whole_and_streamed() {
    let server = scripted(&["\n<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\"}}</tool_call>\
                            {\"name\": \"time\", \"arguments\": {}}</tool_call >"]);
    let choice = server.ok(CHAT, &body(json!({})))["choices"][0].clone();
    let want =
        [("weather", "{\"city\": \"Rome\"}"), ("time", "{}")].map(|(name, text)| (name.to_owned(), text.to_owned()));
    assert_eq!(calls(&choice["message"]), want, "{choice}");
    assert_eq!(
        (&choice["finish_reason"], &choice["message"]["content"]),
        (&json!("tool_calls"), &json!("</tool_call >"))
    );
    let chunks = server.streamed(CHAT, &body(json!({"stream": true})));
    assert_eq!(calls(&json!({"tool_calls": joined_calls(&chunks, 0)})), want);
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");
    assert_eq!(joined(&chunks, 0, "/delta/content"), "</tool_call >");
}

/// Joins the parts of one choice's calls, as OpenAI's clients do: the first part of a call has its id, type and name.
fn joined_calls(chunks: &[Value], index: usize) -> Vec<Value> {
    let mut calls: Vec<Value> = Vec::new();
    let choices = chunks.iter().flat_map(|chunk| chunk["choices"].as_array().unwrap());
    let deltas = choices.filter(|choice| choice["index"] == index).map(|choice| &choice["delta"]);
    for part in deltas.filter_map(|delta| delta["tool_calls"].as_array()).flatten() {
        let at = part["index"].as_u64().unwrap() as usize;
        if at == calls.len() {
            calls.push(part.clone());
            continue;
        }
        assert!(at + 1 == calls.len() && part.get("id").is_none() && part["function"].get("name").is_none(), "{part}");
        let arguments = calls[at].pointer_mut("/function/arguments").unwrap();
        *arguments = json!(arguments.as_str().unwrap().to_owned() + part["function"]["arguments"].as_str().unwrap());
    }
    calls
}

#[test]
fn the_arguments_of_a_streamed_call_arrive_piece_by_piece() {
    let server = scripted(&["\nSay wolf"]);
    let fields =
        json!({"tool_choice": "required", "parallel_tool_calls": false, "temperature": 1, "n": 4, "max_tokens": 60});
    for seed in 0..3 {
        let fields = with(fields.clone(), json!({"seed": seed}));
        let whole = server.ok(CHAT, &body(fields.clone()));
        let chunks = server.streamed(CHAT, &body(with(fields, json!({"stream": true}))));
        for (index, choice) in whole["choices"].as_array().unwrap().iter().enumerate() {
            let streamed = joined_calls(&chunks, index);
            let text = |call: &Value| [call["function"]["name"].clone(), call["function"]["arguments"].clone()];
            let wanted = choice["message"]["tool_calls"].as_array().cloned().unwrap_or_default();
            assert!(streamed.iter().map(text).eq(wanted.iter().map(text)), "{streamed:?} {choice}");
        }
        let n_parts = chunks.iter().filter(|chunk| !chunk["choices"][0]["delta"]["tool_calls"].is_null()).count();
        let n_calls: usize = (0..4).map(|index| joined_calls(&chunks, index).len()).sum();
        assert!(n_parts > n_calls, "{n_parts} parts of {n_calls} calls");
    }
}

#[test]
fn a_reply_is_not_parsed_without_tools_or_if_the_call_is_incomplete() {
    let server = scripted(&["\n<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\"}}</tool_call>"]);
    let whole = format!("<tool_call>{CALL}</tool_call>");
    for fields in [json!({"tools": []}), json!({"tools": null}), json!({"tool_choice": "none"})] {
        let choice = server.ok(CHAT, &body(fields.clone()))["choices"][0].clone();
        assert_eq!(
            (&choice["message"]["content"], &choice["finish_reason"]),
            (&json!(whole), &json!("stop")),
            "{fields}"
        );
    }
    let choice = server.ok(CHAT, &body(json!({"max_tokens": 1})))["choices"][0].clone();
    assert_eq!((&choice["message"]["content"], &choice["finish_reason"]), (&json!("<tool_call>"), &json!("length")));
    let server = scripted(&["\n<tool_call></tool_call>Say wolf"]);
    let choice = server.ok(CHAT, &body(json!({})))["choices"][0].clone();
    assert_eq!(choice["message"]["content"], "<tool_call></tool_call>Say wolf");
    assert!(choice["message"].get("tool_calls").is_none() && choice["finish_reason"] == "stop", "{choice}");
}

#[test]
fn a_required_or_named_call_is_made_with_valid_arguments() {
    // This model would say something else.
    let server = scripted(&["\nSay wolf"]);
    let named = |name: &str| json!({"tool_choice": {"type": "function", "function": {"name": name}}});
    let mut n_ended = 0;
    for seed in 0..5 {
        let sampled = json!({"temperature": 1, "seed": seed, "max_tokens": 60});
        for choice in
            [json!({"tool_choice": "required", "parallel_tool_calls": false}), named("weather"), named("time")]
        {
            let response = server.ok(CHAT, &with(body(sampled.clone()), choice.clone()))["choices"][0].clone();
            if response["finish_reason"] == "length" {
                continue;
            }
            n_ended += 1;
            let calls = calls(&response["message"]);
            let [(name, arguments)] = &*calls else { panic!("{choice}: {response}") };
            let arguments: Value = serde_json::from_str(arguments).unwrap();
            let is_valid = match name.as_str() {
                "weather" => arguments["city"] == "Rome" || arguments["city"] == "Oslo",
                "time" => arguments == json!({}),
                _ => false,
            };
            assert!(is_valid && response["message"]["content"].is_null(), "{choice}: {response}");
            if let Some(wanted) = choice.pointer("/tool_choice/function/name") {
                assert_eq!(wanted, name);
            }
        }
    }
    assert!(n_ended >= 8, "{n_ended} of 15 replies ended");
}

#[test]
fn a_reply_with_tools_and_a_response_format_has_one_of_both() {
    let server = scripted(&["\nSay wolf"]);
    let format = json!({"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": "no"}}}});
    for seed in 0..5 {
        let fields = with(json!({"temperature": 1, "seed": seed, "max_tokens": 60}), format.clone());
        let choice = server.ok(CHAT, &body(fields))["choices"][0].clone();
        let is_complete = choice["finish_reason"] != "length";
        let is_call = !calls(&choice["message"]).is_empty();
        assert!(!is_complete || is_call || choice["message"]["content"] == "\"no\"", "{choice}");
    }
}

#[test]
fn choices_that_cannot_be_forced_are_refused() {
    let server = scripted(&["\nSay wolf"]);
    let function = |name: &str| json!({"tool_choice": {"type": "function", "function": {"name": name}}});
    let unsupported = json!({"type": "function", "function": {"name": "f", "parameters": {"not": {}}}});
    for (fields, param, want) in [
        (json!({"tool_choice": "always"}), "tool_choice", "expected \"auto\", \"none\", \"required\""),
        (function("rain"), "tool_choice", "the function rain, which is not in tools"),
        (json!({"tool_choice": "required", "tools": []}), "tool_choice", "needs tools"),
        (json!({"tool_choice": "required", "tools": [unsupported]}), "tools", "not"),
        (json!({"tool_choice": "required", "tools": vec![json!({"name": "f"}); 129]}), "tools", "at most 128"),
        (json!({"parallel_tool_calls": 1}), "parallel_tool_calls", "true or false"),
    ] {
        let (status, response) = server.post(CHAT, &body(fields));
        assert_eq!((status, &response["error"]["param"]), (400, &json!(param)), "{response}");
        assert!(response["error"]["message"].as_str().unwrap().contains(want), "{response}");
    }
}
