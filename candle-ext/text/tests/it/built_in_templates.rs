//! Built-in chat templates: their texts equal those of other programs, their loss masks, and the tokens that they need.
//! `tests/reference/built_in_templates.py` and `axolotl_templates.py` write the texts.

use candlewick_text::conversation::{Conversation, Message};
use candlewick_text::render::{GENERATION_CONFIG, end_of_turn, generation_config_with_end_of_turn};
use candlewick_text::template::{AddGenerationPrompt, BuiltInTemplate, ChatTemplate, ChatTemplateSource};
use candlewick_text::tokenizer::Tokenizer;
use serde_json::{Value as Json, json};

use crate::chat::{conversation, json as fixture, tokenizer, with_kwargs};

fn template(name: &str) -> ChatTemplate {
    let source = BuiltInTemplate::find(name).unwrap().source;
    ChatTemplate::new(name, source).unwrap().with_variable("bos_token", "<s>").with_variable("eos_token", "</s>")
}

fn built_in(name: &str, tokenizer: &Tokenizer) -> ChatTemplate {
    ChatTemplateSource::parse(name).unwrap().compile(tokenizer).unwrap()
}

/// Compares a template to the original in a tokenizer's folder, on all chats of its goldens.
#[track_caller]
fn equals_the_original(name: &str, family: &str, is_comparable: impl Fn(&Json) -> bool) {
    let (tokenizer, goldens) = (tokenizer(family), fixture(&format!("{family}/goldens.json")));
    let mut n_compared = 0;
    for (title, chat) in fixture("chats.json").iter().filter(|(_, chat)| is_comparable(chat)) {
        let Some(text) = goldens[title]["text"].as_str() else { continue };
        let template = with_kwargs(built_in(name, &tokenizer), chat);
        let prompt = goldens[title]["prompt"].as_str().unwrap();
        let print = |ending| template.render(&conversation(chat), ending).unwrap();
        assert_eq!(print(AddGenerationPrompt::Yes), prompt, "{name}, {title}");
        // The first template of Llama 3 prints the generation prompt always.
        if text != prompt {
            assert_eq!(print(AddGenerationPrompt::No), text, "{name}, {title}");
        }
        n_compared += 1;
    }
    assert!(n_compared > 2, "{name}: {n_compared}");
}

#[test]
fn a_template_prints_what_the_original_prints() {
    equals_the_original("qwen3", "qwen3", |_| true);
    equals_the_original("qwen2.5", "qwen2_5", |_| true);
    equals_the_original("llama3", "llama3", |_| true);
    // The original has a default system message.
    equals_the_original("chatml", "smollm2", |chat| chat["messages"][0]["role"] == "system");
}

#[test]
fn a_template_prints_what_the_program_of_the_format_prints() {
    let goldens = include_str!("../fixtures/chat/built_in.json");
    let goldens: Vec<Json> = serde_json::from_str(goldens).unwrap();
    for golden in &goldens {
        let chat = conversation(golden);
        let is_question = chat.messages.last().unwrap().role() == "user";
        let ending = if is_question { AddGenerationPrompt::Yes } else { AddGenerationPrompt::No };
        let name = golden["template"].as_str().unwrap();
        assert_eq!(template(name).render(&chat, ending).unwrap(), golden["text"].as_str().unwrap(), "{golden}");
    }
    assert_eq!(goldens.len(), 36);
}

#[test]
fn the_template_of_qwen3_prints_calls_thinking_and_null_contents_as_the_original() {
    let goldens = include_str!("../fixtures/chat/built_in_qwen3.json");
    let goldens: Vec<Json> = serde_json::from_str(goldens).unwrap();
    for golden in &goldens {
        let chat = conversation(golden);
        let is_answer = chat.messages.last().unwrap().is_assistant();
        let ending = if is_answer { AddGenerationPrompt::No } else { AddGenerationPrompt::Yes };
        let text = with_kwargs(template("qwen3"), golden).render(&chat, ending).unwrap();
        assert_eq!(text, golden["text"].as_str().unwrap(), "{golden}");
    }
    assert_eq!(goldens.len(), 16);
}

#[test]
fn a_template_prints_what_axolotl_prints() {
    let goldens: Vec<Json> = serde_json::from_str(include_str!("../fixtures/chat/axolotl.json")).unwrap();
    for golden in &goldens {
        let text =
            template(golden["template"].as_str().unwrap()).render(&conversation(golden), AddGenerationPrompt::No);
        assert_eq!(text.unwrap(), golden["text"].as_str().unwrap(), "{golden}");
    }
    assert_eq!(goldens.len(), 54);
}

#[test]
fn a_null_content_is_never_printed_as_a_word() {
    for BuiltInTemplate { name, .. } in BuiltInTemplate::ALL {
        for role in ["user", "assistant"] {
            let mut chat = conversation(&json!({"messages": [
                {"role": "system", "content": "a"}, {"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}
            ]}));
            let null = chat.messages.iter_mut().find(|message| message.role() == role).unwrap();
            *null = null.clone().with("content", Json::Null).with("reasoning_content", json!("d"));
            if let Ok(text) = template(name).render(&chat, AddGenerationPrompt::No) {
                assert!(!text.contains("None") && !text.contains("none"), "{name}: {text}");
            }
        }
    }
}

#[test]
fn a_template_marks_the_answers_and_the_ends_of_their_turns() {
    let turns = [("user", "b a"), ("assistant", "a b"), ("user", "a b"), ("assistant", "b")];
    let chat = Conversation::new(turns.iter().map(|(role, text)| Message::new(*role, *text)));
    for BuiltInTemplate { name, .. } in BuiltInTemplate::ALL {
        let rendered = template(name).render_turns(&chat).unwrap();
        let spans: Vec<_> = rendered.spans.iter().map(|span| rendered.text[span.range.clone()].trim_start()).collect();
        let end = match *name {
            "chatml" | "qwen2.5" | "qwen3" => "<|im_end|>",
            "llama3" => "<|eot_id|>",
            "gemma" => "<end_of_turn>",
            "llama2" => " </s>",
            _ => "</s>",
        };
        let own = |text: &str| text.trim_start_matches("<think>\n\n</think>\n\n").to_owned();
        let spans: Vec<_> = spans.into_iter().map(own).collect();
        assert_eq!(spans, [format!("a b{end}"), format!("b{end}")], "{name}");
    }
}

#[test]
fn a_template_whose_markers_are_no_tokens_is_refused() {
    let check = |name: &str, family: &str, wanted: &[&str]| {
        let error = ChatTemplateSource::parse(name).unwrap().compile(&tokenizer(family)).unwrap_err().to_string();
        wanted.iter().for_each(|part| assert!(error.contains(part), "{part}: {error}"));
    };
    let usable = "choose a template that fits this tokenizer (llama3, llama2, zephyr, vicuna, alpaca)";
    check("chatml", "llama3", &["chatml", "no token <|im_start|>, <|im_end|>", usable, "add_tokens"]);
    check("llama3", "qwen3", &["<|start_header_id|>", "(chatml, qwen2.5, qwen3, llama2, zephyr, vicuna, alpaca)"]);
    check("gemma", "smollm2", &["<start_of_turn>"]);
}

#[test]
fn the_template_of_mistral_needs_a_sentencepiece_tokenizer_of_its_format() {
    let check = |tokens: &[&str], want: Option<&str>| {
        let folder = tempfile::tempdir().unwrap();
        let family = tokenizer("qwen3");
        let read = |file: &str| std::fs::read_to_string(family.directory().join(file)).unwrap();
        let mut file: Json = serde_json::from_str(&read("tokenizer.json")).unwrap();
        for (idx, token) in tokens.iter().enumerate() {
            file["added_tokens"].as_array_mut().unwrap().push(json!({
                "id": family.vocab_size() + idx, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true
            }));
        }
        std::fs::write(folder.path().join("tokenizer.json"), file.to_string()).unwrap();
        std::fs::write(folder.path().join("tokenizer_config.json"), read("tokenizer_config.json")).unwrap();
        let tokenizer = Tokenizer::from_directory(folder.path()).unwrap();
        let error = ChatTemplateSource::parse("mistral").unwrap().compile(&tokenizer).err().map(|it| it.to_string());
        assert_eq!(error.is_some(), want.is_some(), "{tokens:?}: {error:?}");
        let error = error.unwrap_or_default();
        assert!(error.contains(want.unwrap_or_default()) && !error.contains("mistral, "), "{tokens:?}: {error}");
    };
    check(&["[INST]", "[/INST]"], Some("it is not SentencePiece"));
    check(&["[INST]", "[/INST]", "▁"], None);
    check(&["[INST]", "[/INST]", "▁", "[SYSTEM_PROMPT]"], Some("[SYSTEM_PROMPT] belongs to a later format"));
}

#[test]
fn a_name_a_file_and_a_template_are_distinguished() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("own.jinja");
    std::fs::write(&path, "x").unwrap();
    let path = path.to_str().unwrap();
    assert_eq!(ChatTemplateSource::parse("chatml"), Ok(ChatTemplateSource::BuiltIn("chatml".into())));
    assert_eq!(ChatTemplateSource::parse(path), Ok(ChatTemplateSource::File(path.into())));
    assert_eq!(ChatTemplateSource::parse("{{ x }}"), Ok(ChatTemplateSource::Inline("{{ x }}".into())));
    let error = ChatTemplateSource::parse("chatlm").unwrap_err();
    for part in ["`chatlm` is neither", "llama3", "did you mean `chatml`?"] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn the_end_of_turn_is_added_to_the_eos_ids() {
    let family = tokenizer("qwen3");
    let (end, other) = (family.token_to_id("<|im_end|>").unwrap(), family.token_to_id("<|endoftext|>").unwrap());
    let folder = tempfile::tempdir().unwrap();
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(family.directory().join(file), folder.path().join(file)).unwrap();
    }
    let path = folder.path().join("tokenizer_config.json");
    let config = std::fs::read_to_string(&path)
        .unwrap()
        .replace("\"eos_token\":\"<|im_end|>\"", "\"eos_token\":\"<|endoftext|>\"");
    std::fs::write(&path, config).unwrap();
    std::fs::write(folder.path().join(GENERATION_CONFIG), r#"{"eos_token_id": 7, "top_p": 0.5}"#).unwrap();
    let base = Tokenizer::from_directory(folder.path()).unwrap();
    let template = built_in("chatml", &base);
    assert_eq!(end_of_turn(&base, &template), Some(end));
    let text = generation_config_with_end_of_turn(&base, &template, Some(folder.path())).unwrap().unwrap();
    let want = json!({"eos_token_id": [7, other, end], "top_p": 0.5});
    assert_eq!(serde_json::from_str::<Json>(&text).unwrap(), want);
    // The tokenizer of the family ends with this token already.
    assert_eq!(generation_config_with_end_of_turn(&family, &built_in("chatml", &family), None).unwrap(), None);
}
