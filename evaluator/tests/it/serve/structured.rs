//! Replies in the format of `response_format`.

use serde_json::{Value, json};

use super::{CHAT, COMPLETIONS, Server, joined, received, user, with};

fn schema(schema: Value) -> Value {
    json!({"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}})
}

fn pet() -> Value {
    schema(json!({
        "type": "object",
        "properties": {"pet": {"enum": ["cat", "dog \u{1f642}"]}, "age": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["pet", "age"],
    }))
}

#[track_caller]
fn check_pet(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
    let fields = value.as_object().unwrap();
    let is_pet = fields["pet"] == "cat" || fields["pet"] == "dog \u{1f642}";
    assert!(is_pet && fields["age"].as_u64().unwrap() <= 9 && fields.len() == 2, "{text}");
}

#[test]
fn every_complete_choice_has_the_schema() {
    let server = Server::start(&[]);
    let mut n_ended = 0;
    for seed in 0..6 {
        let chat = with(json!({"messages": user("Hi"), "n": 4, "seed": seed, "max_tokens": 50}), pet());
        let whole = server.ok(CHAT, &chat);
        let chunks = server.streamed(CHAT, &with(chat, json!({"stream": true})));
        for (index, choice) in whole["choices"].as_array().unwrap().iter().enumerate() {
            let text = choice["message"]["content"].as_str().unwrap();
            assert_eq!(joined(&chunks, index, "/delta/content"), text);
            if choice["finish_reason"] == "stop" {
                check_pet(text);
                n_ended += 1;
            }
        }
    }
    assert!(n_ended >= 12, "{n_ended} of 24 choices ended");
}

#[test]
fn requests_with_different_formats_run_together() {
    let server = Server::start(&[]);
    let completion = |fields: Value| with(json!({"prompt": "Hi", "temperature": 0, "max_tokens": 30}), fields);
    let bodies = [
        completion(pet()),
        completion(json!({})),
        completion(schema(json!({"const": 7}))),
        completion(schema(json!({"enum": ["a", "b"]}))),
        completion(json!({"response_format": {"type": "json_object"}, "logprobs": 1})),
    ];
    let alone: Vec<Value> = bodies.iter().map(|body| server.ok(COMPLETIONS, body)["choices"].clone()).collect();
    let connections: Vec<_> =
        bodies.iter().map(|body| server.send(&format!("POST {COMPLETIONS}"), &body.to_string())).collect();
    for (connection, alone) in connections.into_iter().zip(&alone) {
        let choices = received(connection).1["choices"].clone();
        assert_eq!(choices[0]["text"], alone[0]["text"]);
    }
    assert_eq!(alone[2][0]["text"], "7");
    assert_eq!(alone[2][0]["finish_reason"], "stop");
    assert!(alone[4][0]["text"].as_str().unwrap().starts_with('{'), "{alone:?}");
}

#[test]
fn a_text_that_is_cut_off_has_the_finish_reason_length() {
    let server = Server::start(&[]);
    let body = with(json!({"messages": user("Hi"), "max_tokens": 3}), pet());
    let choice = server.ok(CHAT, &body)["choices"][0].clone();
    assert_eq!(choice["finish_reason"], "length");
    assert!(choice["message"]["content"].as_str().unwrap().starts_with('{'), "{choice}");
}

#[test]
fn formats_that_are_not_supported_are_refused_by_name() {
    let server = Server::start(&[]);
    let link = |i: usize| (format!("d{i}"), json!({"properties": {"a": {"$ref": format!("#/$defs/d{}", i + 1)}}}));
    let references = json!({"$defs": (0..400).map(link).collect::<serde_json::Map<_, _>>(), "$ref": "#/$defs/d0"});
    let big = schema(json!({"description": "a".repeat(70_000)}));
    for (format, want) in [
        (schema(json!({"type": "array", "uniqueItems": true})), "uniqueItems"),
        (schema(json!({"not": {"type": "string"}})), "\"not\""),
        (schema(json!({"type": "string", "pattern": "(?=a)b"})), "look-ahead"),
        (schema(json!({"$ref": "https://example.org/x"})), "https://example.org/x"),
        (schema(json!({"oneOf": [{"minimum": 1}, {"maximum": 5}]})), "oneOf"),
        (schema(json!(false)), "Unsatisfiable"),
        (schema(json!(3)), "not an object"),
        (big, "at most 65536"),
        (
            schema(json!({"allOf": (0..20).map(|i| json!({"pattern": format!("a{i}")})).collect::<Vec<_>>()})),
            "at most 8",
        ),
        (schema(references), "more than 200 levels"),
        (schema(json!({"multipleOf": 4_294_967_297u64})), "multipleOf is 4294967297"),
        (json!({"response_format": {"type": "xml"}}), "the type \"xml\""),
        (json!({"response_format": {}}), "the type null"),
        (json!({"response_format": {"type": "json_schema"}}), "no object json_schema"),
        (json!({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}), "no json_schema.schema"),
        (json!({"response_format": "json"}), "expected an object"),
    ] {
        for (path, prompt) in [(CHAT, json!({"messages": user("Hi")})), (COMPLETIONS, json!({"prompt": "Hi"}))] {
            let (status, response) = server.post(path, &with(prompt, format.clone()));
            let error = &response["error"];
            assert_eq!((status, &error["param"]), (400, &json!("response_format")), "{response}");
            assert!(error["message"].as_str().unwrap().contains(want), "{want}: {error}");
        }
    }
    // A schema that no text can have fails at its first token.
    let (status, response) = server.post(CHAT, &with(json!({"messages": user("Hi")}), schema(json!({"$ref": "#"}))));
    assert!(status == 400 && response["error"]["message"].as_str().unwrap().contains("too complex"), "{response}");
}
