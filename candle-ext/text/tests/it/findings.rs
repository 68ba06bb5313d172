//! Messages and tool calls that a template does not render, and empty answers, with the stock templates of the families.

use std::path::PathBuf;

use candlewick_text::conversation::{Conversation, Message};
use candlewick_text::format::Document;
use candlewick_text::render::{
    EmptyAnswerLoss, RenderOptions, Sample, render_chat, render_completion, render_document,
};
use candlewick_text::sample_warning::SampleWarning;
use candlewick_text::template::{AddGenerationPrompt, ChatTemplate};
use candlewick_text::tokenizer::{SpecialTokens, Tokenizer};
use serde_json::{Value as Json, json};

struct Family {
    tokenizer: Tokenizer,
    template: ChatTemplate,
}

impl Family {
    fn new(name: &str) -> Self {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/chat").join(name);
        let tokenizer = Tokenizer::from_directory(folder).unwrap();
        let template = tokenizer.chat_template(None).unwrap().unwrap();
        Self { tokenizer, template }
    }

    fn render(&self, chat: &Conversation, options: RenderOptions) -> (Sample, String) {
        let sample = render_chat(&self.tokenizer, &self.template, chat, options).unwrap();
        let targets = sample.ids.iter().zip(&sample.is_target).filter(|(_, is_target)| **is_target);
        let targets: Vec<u32> = targets.map(|(id, _)| *id).collect();
        let targets = self.tokenizer.decode(&targets, SpecialTokens::Include).unwrap();
        (sample, targets)
    }

    #[track_caller]
    fn check(&self, chat: &Conversation, sample_warnings: &[SampleWarning], targets: &str) {
        let (sample, got) = self.render(chat, RenderOptions::default());
        let all = [
            SampleWarning::EmptyResponse,
            SampleWarning::ResponseNotRendered,
            SampleWarning::ToolDefinitionsNotRendered,
            SampleWarning::ReasoningNotRendered,
            SampleWarning::TokenSpansPromptBoundary,
            SampleWarning::MessageNotRendered,
        ];
        let found: Vec<SampleWarning> =
            all.into_iter().filter(|finding| sample.sample_warnings.contains(*finding)).collect();
        assert_eq!(found, sample_warnings);
        assert_eq!(got, targets);
    }
}

fn user(text: &str) -> Message {
    Message::new("user", text)
}

fn assistant(text: &str) -> Message {
    Message::new("assistant", text)
}

fn fields(json: Json) -> Message {
    Message::from_fields(json.as_object().unwrap().clone()).unwrap()
}

/// A tool call in OpenAI's format.
fn call() -> Message {
    let function = json!({"name": "weather", "arguments": "{\"city\": \"Oslo\"}"});
    fields(json!({"role": "assistant", "content": null, "tool_calls": [{"type": "function", "function": function}]}))
}

fn tools() -> Json {
    json!([{"type": "function", "function": {"name": "weather", "description": "d", "parameters": {}}}])
}

#[test]
fn tool_calls_that_a_template_does_not_render_are_found_and_not_learned() {
    let chat = Conversation::new([user("Oslo?"), call(), Message::new("tool", "rain"), assistant("Rain.")]);
    let smollm = Family::new("smollm2");
    smollm.check(&chat, &[SampleWarning::ResponseNotRendered], "Rain.<|im_end|>");
    let offered = chat.clone().with_tools(tools());
    smollm.check(
        &offered,
        &[SampleWarning::ResponseNotRendered, SampleWarning::ToolDefinitionsNotRendered],
        "Rain.<|im_end|>",
    );
    let learned = "<tool_call>\n{\"name\": \"weather\", \"arguments\": \"{\\\"city\\\": \\\"Oslo\\\"}\"}\n</tool_call>\
                   <|im_end|>Rain.<|im_end|>";
    Family::new("qwen2_5").check(&chat, &[], learned);
    Family::new("qwen2_5").check(&offered, &[], learned);
}

/// A template that reads the calls without printing them, and one that prints the first only.
#[test]
fn reading_tool_calls_is_not_rendering_them() {
    let smollm = Family::new("smollm2");
    let chatml = |calls: &str| {
        let source = format!(
            "{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{{% if m.tool_calls %}}{calls}{{% else %}}\
             {{{{ m.content }}}}{{% endif %}}<|im_end|>\n{{% endfor %}}\
             {{% if add_generation_prompt %}}<|im_start|>assistant\n{{% endif %}}"
        );
        ChatTemplate::new("test", &source).unwrap()
    };
    let mut two = call();
    let calls = two.fields()["tool_calls"].as_array().unwrap().clone();
    two = two.with("tool_calls", json!([calls[0], calls[0]]));
    let unrendered = |template: &ChatTemplate, message: &Message| {
        let chat = Conversation::new([user("Oslo?"), message.clone()]);
        template.unrendered_parts(&chat, AddGenerationPrompt::No).tool_calls
    };
    assert_eq!(unrendered(&chatml("a call"), &call()), [1]);
    let first = chatml("{{ m.tool_calls[0].function.name }}");
    assert_eq!(unrendered(&first, &call()), Vec::<usize>::new());
    assert_eq!(unrendered(&first, &two), [1]);
    assert_eq!(unrendered(&smollm.template, &two), [1]);
}

/// Checks the text of an adapted chat: it has `want`, and omits the contents of the messages `omitted`.
#[track_caller]
fn check_contents(template: &ChatTemplate, messages: &[(&str, &str)], want: &str, omitted: &[usize]) {
    let chat = Conversation::new(messages.iter().map(|(role, content)| Message::new(*role, *content)));
    let adapted = template.adapt(&chat);
    let text = template.render(&adapted, AddGenerationPrompt::No).unwrap();
    assert!(text.contains(want), "{text}");
    for ending in [AddGenerationPrompt::No, AddGenerationPrompt::Yes] {
        assert_eq!(template.unrendered_parts(&adapted, ending).contents, omitted, "{text}");
    }
}

#[test]
fn a_role_that_a_template_does_not_render_gets_its_usual_name() {
    let template = |name| Family::new(name).template;
    let rhyme = [("developer", "Rhyme."), ("user", "hi"), ("assistant", "bye")];
    check_contents(&template("qwen2_5"), &rhyme, "<|im_start|>system\nRhyme.<|im_end|>\n<|im_start|>user", &[]);
    check_contents(&template("qwen3"), &rhyme, "<|im_start|>system\nRhyme.<|im_end|>", &[]);
    check_contents(&template("smollm2"), &rhyme, "<|im_start|>developer\nRhyme.<|im_end|>", &[]);
    check_contents(&template("llama3_2"), &rhyme, "<|start_header_id|>developer<|end_header_id|>\n\nRhyme.", &[]);
    for role in ["function", "observation", "ipython", "tool_response", "tool"] {
        for result in ["rain", ""] {
            let talk = [("user", "Oslo?"), ("assistant", "Wait."), (role, result), ("assistant", "It rains.")];
            let want = format!("<tool_response>\n{result}\n</tool_response>");
            check_contents(&template("qwen2_5"), &talk, &want, &[]);
            check_contents(&template("qwen3"), &talk, &want, &[]);
            check_contents(&template("smollm2"), &talk, &format!("<|im_start|>{role}\n{result}<"), &[]);
        }
    }
    let talk = [("user", "Oslo?"), ("observation", "rain"), ("assistant", "It rains.")];
    check_contents(&template("llama3_2"), &talk, "<|start_header_id|>observation<|end_header_id|>\n\nrain", &[]);
    // A template may reject the role, or both names.
    let strict = |roles: &str| {
        let source = format!(
            "{{% for m in messages %}}{{% if m.role not in {roles} %}}{{{{ raise_exception('unknown role') }}}}\
             {{% endif %}}<{{{{ m.role }}}}>{{{{ m.content }}}}{{% endfor %}}"
        );
        ChatTemplate::new("strict", &source).unwrap()
    };
    check_contents(&strict("['system', 'user', 'assistant']"), &rhyme, "<system>Rhyme.<user>hi", &[]);
    let chat = Conversation::new([Message::new("developer", "Rhyme."), user("hi")]);
    assert_eq!(strict("['user', 'assistant']").adapt(&chat).messages, chat.messages);
}

#[test]
fn messages_that_a_template_does_not_render_are_found() {
    let qwen3 = Family::new("qwen3").template;
    let text = "<|im_start|>user";
    check_contents(&qwen3, &[("narrator", "Once upon a time."), ("user", "hi"), ("assistant", "ho")], text, &[0]);
    // The text has the content as a part of a header, or of another message.
    check_contents(&qwen3, &[("narrator", "a"), ("user", "hi"), ("assistant", "ho")], text, &[0]);
    let story = "Once upon a time, there was a queen.";
    check_contents(&qwen3, &[("narrator", story), ("user", story), ("assistant", story)], text, &[0]);
    let quoted = format!("You say {story}");
    check_contents(&qwen3, &[("user", story), ("narrator", story), ("assistant", &quoted)], text, &[1]);
    let first_system = "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}\
                        {% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}";
    let late = [("system", "Be kind."), ("user", "hi"), ("system", "Be brief."), ("assistant", "ho")];
    check_contents(&ChatTemplate::new("first", first_system).unwrap(), &late, text, &[2]);
    // A template of content parts iterates over the letters of a text.
    let parts = "{% for m in messages %}<|im_start|>{{ m.role }}\n\
                 {% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}";
    check_contents(&ChatTemplate::new("parts", parts).unwrap(), &[("user", "hi"), ("assistant", "ho")], text, &[0, 1]);
}

#[test]
fn rendered_messages_are_found_in_changed_form() {
    let [qwen3, llama] = ["qwen3", "llama3_2"].map(|name| Family::new(name).template);
    let long = "x".repeat(40);
    for content in ["", " \n ", " so \n", "a \"b\"\n\\ é", "<think>\nno\n</think>\n\nyes", "<think>no</think>", &long]
    {
        for template in [&qwen3, &llama] {
            let talk = [
                ("user", content),
                ("assistant", content),
                ("tool", content),
                ("user", content),
                ("assistant", content),
            ];
            check_contents(template, &talk, "", &[]);
        }
    }
    let tags = format!("<tool_response>\n{long}\n</tool_response>");
    check_contents(&qwen3, &[("user", &long), ("assistant", &long), ("user", &tags), ("assistant", "ho")], "", &[]);
}

#[test]
fn a_turn_that_is_not_rendered_whole_is_not_learned() {
    let beside = call().with("content", json!("Let me look."));
    let rest = [Message::new("tool", "rain"), assistant("Rain.")];
    let chat = Conversation::new([user("Oslo?"), beside].into_iter().chain(rest));
    Family::new("llama3_2").check(&chat, &[SampleWarning::MessageNotRendered], "Rain.<|eot_id|>");
    let narrated = Conversation::new([Message::new("narrator", "Once."), user("hi"), assistant("ho")]);
    Family::new("qwen3").check(&narrated, &[SampleWarning::MessageNotRendered], "<think>\n\n</think>\n\nho<|im_end|>");
}

#[test]
fn tools_that_a_template_does_not_render_are_found() {
    let chat = Conversation::new([user("hi"), assistant("ho")]).with_tools(tools());
    Family::new("smollm2").check(&chat, &[SampleWarning::ToolDefinitionsNotRendered], "ho<|im_end|>");
    Family::new("qwen2_5").check(&chat, &[], "ho<|im_end|>");
}

#[test]
fn reasoning_of_earlier_answers_is_left_out_by_design() {
    let thought = |text: &str| assistant(text).with("reasoning_content", json!("so so"));
    let chat = Conversation::new([user("1"), thought("one"), user("2"), thought("two")]);
    let qwen3 = Family::new("qwen3");
    qwen3.check(&chat, &[], "one<|im_end|><think>\nso so\n</think>\n\ntwo<|im_end|>");
    let smollm = Family::new("smollm2");
    smollm.check(&chat, &[SampleWarning::ReasoningNotRendered], "one<|im_end|>two<|im_end|>");

    let needs_system = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}\
                        {% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}\
                        {% if add_generation_prompt %}[assistant]{% endif %}";
    let template = ChatTemplate::new("needs system", needs_system).unwrap();
    let chat = Conversation::new([Message::new("system", "s"), user("1"), thought("one")]);
    let sample = render_chat(&smollm.tokenizer, &template, &chat, RenderOptions::default()).unwrap();
    assert!(sample.sample_warnings.contains(SampleWarning::ReasoningNotRendered));

    // An answer of reasoning alone is lost if the template does not print reasoning.
    let chat = Conversation::new([user("1"), thought(""), user("2"), assistant("two")]);
    let lost = [SampleWarning::ResponseNotRendered, SampleWarning::ReasoningNotRendered];
    smollm.check(&chat, &lost, "two<|im_end|>");
    qwen3.check(&chat, &[SampleWarning::EmptyResponse], "<think>\n\n</think>\n\ntwo<|im_end|>");
}

#[test]
fn an_empty_answer_is_a_target_only_if_requested() {
    let smollm = Family::new("smollm2");
    for content in [json!(""), json!(" \n")] {
        let empty = fields(json!({"role": "assistant", "content": content}));
        let chat = Conversation::new([user("1"), empty, user("2"), assistant("two")]);
        smollm.check(&chat, &[SampleWarning::EmptyResponse], "two<|im_end|>");
    }
    let chat = Conversation::new([user("1"), assistant(""), user("2"), assistant("two")]);
    let learn = RenderOptions { empty_answers: EmptyAnswerLoss::Include, ..RenderOptions::default() };
    assert_eq!(smollm.render(&chat, learn).1, "<|im_end|>two<|im_end|>");
    // A turn of weight 0 is masked from the loss, so there is no warning.
    let chat = Conversation::new([user("1"), assistant("").with("weight", json!(0)), user("2"), assistant("two")]);
    smollm.check(&chat, &[], "two<|im_end|>");

    let complete = |options| render_completion(&smollm.tokenizer, "1", "", options).unwrap();
    assert_eq!(complete(RenderOptions::default()).n_targets(), 0);
    assert!(complete(RenderOptions::default()).sample_warnings.contains(SampleWarning::EmptyResponse));
    assert_eq!(complete(learn).n_targets(), 1);
}

/// A template may print nothing for an empty answer: there is no turn to find.
#[test]
fn an_empty_answer_may_leave_no_text() {
    let smollm = Family::new("smollm2");
    let source = "{% for m in messages %}{% if m.content %}[{{ m.role }}]{{ m.content }};{% endif %}{% endfor %}\
                  {% if add_generation_prompt %}[assistant]{% endif %}";
    let template = ChatTemplate::new("test", source).unwrap();
    let chat = Conversation::new([user("1"), assistant(""), user("2"), assistant("two")]);
    let sample = render_chat(&smollm.tokenizer, &template, &chat, RenderOptions::default()).unwrap();
    assert!(sample.n_targets() > 0 && sample.sample_warnings.contains(SampleWarning::EmptyResponse));
}

#[test]
fn missing_content_is_an_empty_text_where_a_template_needs_one() {
    let chat = Conversation::new([user("Oslo?"), call()]);
    let smollm = Family::new("smollm2").template.render(&chat, AddGenerationPrompt::No).unwrap();
    assert!(smollm.ends_with("<|im_start|>assistant\n<|im_end|>\n"), "{smollm}");
    for family in ["qwen2_5", "qwen3"] {
        let text = Family::new(family).template.render(&chat, AddGenerationPrompt::No).unwrap();
        assert!(text.contains("<tool_call>\n{\"name\": \"weather\"") && !text.contains("None"), "{text}");
    }
}

#[test]
fn content_that_a_template_cannot_print_is_named() {
    let parts = fields(json!({"role": "user", "content": [{"type": "image", "image": "a.png"}]}));
    let chat = Conversation::new([Message::new("system", "s"), parts, assistant("x")]);
    let error = Family::new("smollm2").template.render(&chat, AddGenerationPrompt::No).unwrap_err().to_string();
    assert!(error.contains("message 1 (user): `content` is a list"), "{error}");
}

/// Qwen's tokenizer has one token for a line break and the blank after it.
#[test]
fn a_target_that_begins_in_the_prompt_is_found() {
    let smollm = Family::new("smollm2");
    let chat = |answer: &str| Conversation::new([user("2+2="), assistant(answer)]);
    let merged = |answer: &str| {
        let (sample, _) = smollm.render(&chat(answer), RenderOptions::default());
        sample.sample_warnings.contains(SampleWarning::TokenSpansPromptBoundary)
    };
    assert!(merged(" 4") || merged("\n4"), "the tokenizer merges white space");
    assert!(!merged("4"));
    let sample = render_completion(&smollm.tokenizer, "The ca", "t sat", RenderOptions::default()).unwrap();
    assert!(sample.sample_warnings.contains(SampleWarning::TokenSpansPromptBoundary));
    let sample = render_completion(&smollm.tokenizer, "The", " cat", RenderOptions::default()).unwrap();
    assert!(!sample.sample_warnings.contains(SampleWarning::TokenSpansPromptBoundary));
}

/// Data sets keep OpenAI's arguments as JSON text, and templates expect objects.
#[test]
fn arguments_of_documents_are_encoded_once() {
    let chat = Conversation::new([user("Oslo?"), call()]);
    for (name, want) in [
        ("qwen2_5", r#""arguments": {"city": "Oslo"}}"#),
        ("llama3_2", r#""parameters": {"city": "Oslo"}}"#),
        ("qwen3", r#""arguments": {"city": "Oslo"}}"#),
    ] {
        let Family { tokenizer, template } = Family::new(name);
        let document = Document::Conversation(chat.clone());
        let sample = render_document(&tokenizer, Some(&template), document, RenderOptions::default()).unwrap();
        let text = tokenizer.decode(&sample.ids, SpecialTokens::Include).unwrap();
        assert!(text.contains(want), "{name}: {text}");
    }
    let printed =
        ChatTemplate::new("raw", "{% for m in messages %}{{ m.tool_calls[0].function.arguments }}{% endfor %}");
    let printed = printed.unwrap();
    let only_call = Conversation::new([call()]);
    let text = printed.render(&printed.adapt(&only_call), AddGenerationPrompt::No).unwrap();
    assert_eq!(text, r#"{"city": "Oslo"}"#);
}
