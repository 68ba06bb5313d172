//! Completions and chats: texts, log-probabilities and samples.

use std::collections::BTreeSet;
use std::net::TcpStream;

use candlewick_text::conversation::{Conversation, Message};
use candlewick_text::tokenizer::SpecialTokens;
use serde_json::{Value, json};

use super::{CHAT, COMPLETIONS, Server, complete, greedy, joined, received, user, with};
use crate::support::{CONTEXT, export_long_rope};

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
    // Text parts are one text.
    let parts = json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "Say wolf 4 times."}]}]});
    assert_eq!(server.ok(CHAT, &with(body, parts))["choices"], whole["choices"]);
}

/// Tokens of the prompt are scored in the same forward as those of the library, up to the rounding of f32.
#[test]
fn echoed_prompts_have_the_log_probabilities_of_the_library() {
    check_echoed(&Server::start(&[]));
}

/// Prompts within and beyond the original context begin with the same tokens.
#[test]
fn echoed_prompts_of_a_model_with_longrope_have_the_log_probabilities_of_the_library() {
    let folder = tempfile::tempdir().unwrap();
    let model = export_long_rope(folder.path(), 1, 11);
    check_echoed(&Server::start_model(&[], folder, model));
}

fn check_echoed(server: &Server) {
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
    let full = server.ok(COMPLETIONS, &json!({"prompt": full, "echo": true, "max_tokens": 0, "logprobs": 1}));
    assert_eq!(full["choices"][0]["logprobs"]["tokens"].as_array().unwrap().len(), CONTEXT);
}

#[test]
fn prompt_and_completion_have_at_most_max_model_len_tokens() {
    let server = Server::start(&["--max-model-len", "50", "--max-total-tokens", "50"]);
    // The penalty raises the tokens of the prompt, so no stop token ends the text.
    let sampling = json!({"temperature": 0, "repetition_penalty": 0.001});
    for (n_prompt, max_tokens, want) in [(45, 100, 5), (45, 5, 5), (45, 4, 4), (49, 16, 1), (50, 0, 0)] {
        let body = with(json!({"prompt": vec![5; n_prompt], "max_tokens": max_tokens}), sampling.clone());
        let usage = server.ok(COMPLETIONS, &body)["usage"].clone();
        let total = n_prompt + want;
        assert_eq!((&usage["completion_tokens"], &usage["total_tokens"]), (&json!(want), &json!(total)), "{body}");
    }
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

/// With LongRoPE the keys of a prompt depend on the limit of new tokens.
#[test]
fn requests_with_longrope_share_prefixes_of_their_own_length_only() {
    let folder = tempfile::tempdir().unwrap();
    let model = export_long_rope(folder.path(), 1, 20);
    let server = Server::start_model(&[], folder, model);
    let lm = server.lm();
    let prompt = "Say wolf 5 times, or 6.";
    let [short, long] = [8, 9].map(|max_tokens| complete(&lm, prompt, &greedy(max_tokens)).text);
    assert!(!long.starts_with(&short), "the last token is beyond the original context: {short:?} {long:?}");
    for (max_tokens, want) in [(8, &short), (9, &long), (8, &short), (9, &long)] {
        let body = json!({"prompt": prompt, "max_tokens": max_tokens, "temperature": 0});
        assert_eq!(server.ok(COMPLETIONS, &body)["choices"][0]["text"], *want, "{max_tokens}");
    }
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
fn penalties_and_a_bias_change_the_tokens_but_not_the_log_probabilities() {
    let server = Server::start(&[]);
    for (path, prompt) in [(CHAT, json!({"messages": user("Hi")})), (COMPLETIONS, json!({"prompt": "Hi"}))] {
        let logprobs = if path == CHAT { json!({"logprobs": true}) } else { json!({"logprobs": 0}) };
        let body = with(with(prompt, logprobs), json!({"max_tokens": 10, "temperature": 0}));
        let tokens = |fields: Value| -> Vec<(String, f64)> {
            let logprobs = server.ok(path, &with(body.clone(), fields))["choices"][0]["logprobs"].clone();
            let list = |values: &Value| values.as_array().unwrap().clone();
            let (tokens, values): (Vec<Value>, Vec<Value>) = match path {
                CHAT => {
                    list(&logprobs["content"]).iter().map(|it| (it["token"].clone(), it["logprob"].clone())).unzip()
                }
                _ => (list(&logprobs["tokens"]), list(&logprobs["token_logprobs"])),
            };
            tokens.iter().zip(values).map(|(token, logprob)| (token.to_string(), logprob.as_f64().unwrap())).collect()
        };
        let forced = tokens(json!({"logit_bias": {"40": 100}}));
        assert!(forced.iter().all(|(token, _)| *token == forced[0].0), "{forced:?}");
        // The log-probabilities are those of the model, which the bias of 100 does not raise to 0.
        assert!(forced.iter().all(|(_, logprob)| *logprob < -1.0), "{forced:?}");
        // A penalty of 2 on each occurrence exceeds the small differences of a random model's logits.
        for penalty in [json!({"presence_penalty": 2}), json!({"frequency_penalty": 2})] {
            let distinct: BTreeSet<String> =
                tokens(penalty.clone()).into_iter().map(|(token, _)| token.to_string()).collect();
            assert_eq!(distinct.len(), 10, "{penalty}");
        }
    }
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
fn tokens_of_the_request_end_a_text_and_those_of_the_model_may_be_text() {
    let server = Server::start(&[]);
    let eos = *server.lm().tokenizer().eos_ids().iter().next().unwrap();
    let ended = |path: &str, token: u32, fields: Value| {
        let prompt = if path == CHAT { json!({"messages": user("Hi")}) } else { json!({"prompt": "Hi"}) };
        let forced = json!({"logit_bias": {(token.to_string()): 100}, "temperature": 0, "max_tokens": 4});
        let response = server.ok(path, &with(with(prompt, forced), fields));
        let reason = response["choices"][0]["finish_reason"].as_str().unwrap().to_owned();
        (reason, response["usage"]["completion_tokens"].as_u64().unwrap())
    };
    for path in [CHAT, COMPLETIONS] {
        for (token, fields, reason, n_tokens) in [
            (40, json!({}), "length", 4),
            (40, json!({"stop_token_ids": [41, 40]}), "stop", 1),
            (eos, json!({}), "stop", 1),
            (eos, json!({"ignore_eos": true}), "length", 4),
            (40, json!({"ignore_eos": true, "stop_token_ids": [40]}), "stop", 1),
        ] {
            assert_eq!(ended(path, token, fields.clone()), (reason.to_owned(), n_tokens), "{path} {token} {fields}");
        }
    }
}

#[test]
fn both_names_of_the_token_limit_are_accepted() {
    let server = Server::start(&[]);
    for fields in [json!({"max_completion_tokens": 3}), json!({"max_completion_tokens": 3, "max_tokens": 3})] {
        for (path, prompt) in [(CHAT, json!({"messages": user("Hi")})), (COMPLETIONS, json!({"prompt": "Hi"}))] {
            let body = with(with(prompt, fields.clone()), json!({"ignore_eos": true}));
            assert_eq!(server.ok(path, &body)["usage"]["completion_tokens"], 3, "{body}");
        }
    }
}

/// Tokens of the request are text of a schema, unlike those of the model.
#[test]
fn a_token_of_the_request_ends_a_text_with_a_schema() {
    let server = Server::start(&[]);
    let id = |text: &str| server.lm().tokenizer().encode(text, SpecialTokens::Exclude).unwrap()[0];
    let schema = json!({"type": "object", "properties": {"a": {"const": 7}}, "required": ["a"]});
    let format = json!({"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}});
    let body = json!({"prompt": "Hi", "max_tokens": 30, "temperature": 0, "response_format": format});
    let choice = |stop: u32| {
        server.ok(COMPLETIONS, &with(body.clone(), json!({"stop_token_ids": [stop]})))["choices"][0].clone()
    };
    for (stop, want) in [("}", "{\"a\":7"), ("7", "{\"a\":"), ("x", "{\"a\":7}")] {
        let choice = choice(id(stop));
        let text: String = choice["text"].as_str().unwrap().split_whitespace().collect();
        assert_eq!((text.as_str(), &choice["finish_reason"]), (want, &json!("stop")), "{stop}");
    }
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
        let token = entry["token"].as_str().unwrap();
        assert!(token.starts_with("bytes:") || entry["bytes"] == json!(token.as_bytes()), "{entry}");
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
