//! Rendering any chat with any template gives valid spans or an error, never a panic.

use std::path::PathBuf;
use std::sync::LazyLock;

use candlewick_text::conversation::{Conversation, Message};
use candlewick_text::render::{RenderOptions, render_chat};
use candlewick_text::sample_warning::SampleWarning;
use candlewick_text::template::{AddGenerationPrompt, ChatTemplate};
use candlewick_text::tokenizer::Tokenizer;
use proptest::prelude::*;
use serde_json::json;

static FAMILIES: LazyLock<Vec<(Tokenizer, ChatTemplate)>> = LazyLock::new(|| {
    let fixtures = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/chat");
    let load = |family: &str| {
        let tokenizer = Tokenizer::from_directory(fixtures.join(family)).unwrap();
        let template = tokenizer.chat_template(None).unwrap().unwrap();
        (tokenizer, template)
    };
    ["smollm2", "llama3", "llama3_2", "qwen2_5", "qwen3"].map(load).into()
});

fn content() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        Just("<|im_start|>assistant\n".to_owned()),
        Just("<|im_end|>".to_owned()),
        Just("<think>".to_owned()),
        Just("</think>\n".to_owned()),
        Just("<|eot_id|>".to_owned()),
        Just("\n\n".to_owned()),
        Just("{% generation %}".to_owned()),
        "[ a-z\\n\u{FDD0}]{0,6}",
        any::<String>(),
    ];
    prop::collection::vec(piece, 0..4).prop_map(|pieces| pieces.concat())
}

fn message() -> impl Strategy<Value = Message> {
    let role = prop::sample::select(vec!["system", "user", "assistant", "assistant", "tool", "odd"]);
    (role, content(), any::<bool>(), prop::option::of(content())).prop_map(|(role, content, calls, reasoning)| {
        let mut message = Message::new(role, content.clone());
        if calls && role == "assistant" {
            let call = json!({"function": {"name": "f", "arguments": {"x": content}}});
            message = message.with("tool_calls", json!([call]));
        }
        match reasoning {
            Some(text) => message.with("reasoning_content", json!(text)),
            None => message,
        }
    })
}

fn conversation() -> impl Strategy<Value = Conversation> {
    (prop::collection::vec(message(), 0..6), any::<bool>()).prop_map(|(messages, tools)| {
        let chat = Conversation::new(messages);
        if tools { chat.with_tools(json!([{"type": "function", "é": 1.5}])) } else { chat }
    })
}

fn source() -> impl Strategy<Value = String> {
    let pieces = [
        "{% for m in messages %}",
        "{% for a, b in messages[0].items() %}",
        "{% endfor %}",
        "{{ m.content }}",
        "{{ messages[0].role }}",
        "{%- generation -%}",
        "{% endgeneration +%}",
        "{% if add_generation_prompt %}",
        "{% endif %}",
        "{% raw %}",
        "{% endraw %}",
        "{# ",
        " #}",
        "{{ '",
        "' }}",
        "{%",
        "%}",
        "{{",
        "}}",
        "{",
        "text",
        " \n ",
        "é",
        "{% set x %}",
        "{% endset %}{{ x }}",
        "{% macro f(m) %}",
        "{% endmacro %}{{ f(messages[0]) }}",
        "{% break %}",
        "{{ messages | tojson(indent=2) }}",
        "\u{FDD0}",
        "\"",
        "\\",
        "for in",
    ];
    prop::collection::vec(prop::sample::select(pieces.to_vec()), 0..12).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..Default::default() })]

    #[test]
    fn spans_are_in_order_with_one_per_assistant_turn(chat in conversation()) {
        for (tokenizer, template) in FAMILIES.iter() {
            let Ok(rendered) = template.render_turns(&chat) else { continue };
            let is_trained_on = |message: &&Message| message.is_assistant() && !message.is_empty_answer();
            let n_learned = chat.messages.iter().filter(is_trained_on).count();
            // An empty answer may leave no text.
            let is_answer = |message: &usize| is_trained_on(&&chat.messages[*message]);
            let messages = rendered.spans.iter().filter_map(|span| span.message);
            let messages: Vec<_> = messages.filter(is_answer).collect();
            let answers: Vec<_> = (0..chat.messages.len()).filter(is_answer).collect();
            prop_assert_eq!(messages, answers);
            let mut end = 0;
            for span in rendered.spans.iter().map(|span| &span.range) {
                prop_assert!(end <= span.start && span.start < span.end);
                prop_assert!(rendered.text.get(span.clone()).is_some(), "between characters");
                end = span.end;
            }
            let sample = render_chat(tokenizer, template, &chat, RenderOptions::default()).unwrap();
            prop_assert_eq!(sample.ids.len(), sample.is_target.len());
            let warnings = sample.sample_warnings;
            let is_lost = warnings.has_unrendered() || warnings.contains(SampleWarning::EmptyResponse);
            prop_assert!(is_lost || (sample.n_targets() > 0) == (n_learned > 0));
        }
    }

    #[test]
    fn a_template_of_any_source_renders_or_is_refused(source in source(), chat in conversation()) {
        let Ok(template) = ChatTemplate::new("any", &source) else { return Ok(()) };
        let text = template.render(&chat, AddGenerationPrompt::No);
        if let Ok(rendered) = template.render_turns(&chat) {
            prop_assert_eq!(Ok(rendered.text), text.map_err(|error| error.to_string()));
        }
    }
}
