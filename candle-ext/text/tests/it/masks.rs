//! Loss masks by role, of the last turn and of the ends of turns, compared with those that
//! `tests/reference/role_masks.py` found with transformers.

use candlewick_text::conversation::{ChatRole, Conversation, Message};
use candlewick_text::format::Document;
use candlewick_text::render::{
    EmptyAnswerLoss, EosLoss, LossMask, PromptForm, RenderOptions, RoleSet, Sample, render_chat, render_document,
};
use candlewick_text::template::ChatTemplate;
use candlewick_text::tokenizer::Tokenizer;
use serde_json::json;

use crate::chat::{for_each_golden, json, stock_template, targets, tokenizer};

fn roles(roles: impl IntoIterator<Item = ChatRole>) -> RenderOptions {
    RenderOptions { roles: RoleSet::of(roles), ..with_empty_answers() }
}

fn with_empty_answers() -> RenderOptions {
    RenderOptions { empty_answers: EmptyAnswerLoss::Include, ..RenderOptions::default() }
}

/// Returns the runs of targets as ranges of tokens.
fn runs(sample: &Sample) -> Vec<[usize; 2]> {
    let mut found: Vec<[usize; 2]> = Vec::new();
    for (idx, _) in sample.is_target.iter().enumerate().filter(|(_, is_target)| **is_target) {
        match found.last_mut() {
            Some(run) if run[1] == idx => run[1] = idx + 1,
            _ => found.push([idx, idx + 1]),
        }
    }
    found
}

/// Checks the masks of all conversations, families and templates with these options.
fn check(key: &str, options: RenderOptions) {
    for_each_golden(|title, tokenizer, template, chat, golden| {
        if golden.get("error").is_some() {
            return;
        }
        let mut names = title.split(", ");
        let (family, name) = (names.next().unwrap(), names.next().unwrap());
        let masks = json(&format!("{family}/role_masks.json"));
        let sample = render_chat(tokenizer, template, chat, options).unwrap();
        if !sample.sample_warnings.has_unrendered() {
            let want: Vec<[usize; 2]> = serde_json::from_value(masks[name][key].clone()).unwrap();
            assert_eq!(runs(&sample), want, "{key}: {title}");
        }
    });
}

#[test]
fn contents_of_other_roles_are_those_of_transformers() {
    check("user", roles([ChatRole::User]));
    check("system", roles([ChatRole::System]));
    check("tool", roles([ChatRole::Tool]));
}

#[test]
fn the_last_turn_is_that_of_transformers() {
    check("last", RenderOptions { targets: LossMask::LastTurn, ..with_empty_answers() });
}

#[test]
fn ends_of_turns_are_those_of_transformers() {
    check("none", RenderOptions { eos: EosLoss::None, ..with_empty_answers() });
    check("all", RenderOptions { eos: EosLoss::All, ..with_empty_answers() });
    check("last_eos", RenderOptions { eos: EosLoss::Last, ..with_empty_answers() });
}

fn chat() -> Conversation {
    Conversation::new([
        Message::new("system", "Be brief."),
        Message::new("user", "2+2?"),
        Message::new("assistant", "4"),
        Message::new("user", "Yes."),
        Message::new("assistant", "Hello!"),
    ])
}

#[track_caller]
fn check_targets(family: &str, chat: &Conversation, options: RenderOptions, want: &[&str]) {
    let tokenizer = tokenizer(family);
    let sample = render_chat(&tokenizer, &stock_template(&tokenizer), chat, options).unwrap();
    assert_eq!(targets(&tokenizer, &sample), want);
}

#[test]
fn several_roles_are_trained_on_together() {
    let both = roles([ChatRole::User, ChatRole::Assistant]);
    let want = ["2+2?<|im_end|>", "4<|im_end|>", "Yes.<|im_end|>", "Hello!<|im_end|>"];
    check_targets("qwen2_5", &chat(), both, &want);
    check_targets("qwen2_5", &chat(), RenderOptions { eos: EosLoss::None, ..both }, &["2+2?", "4", "Yes.", "Hello!"]);
    check_targets("qwen2_5", &chat(), RenderOptions { targets: LossMask::LastTurn, ..both }, &["Hello!<|im_end|>"]);
    let user = RenderOptions { targets: LossMask::LastTurn, ..roles([ChatRole::User]) };
    check_targets("qwen2_5", &chat(), user, &["Yes.<|im_end|>"]);
}

#[test]
fn an_injected_system_prompt_is_never_a_target() {
    let chat = Conversation::new([Message::new("user", "2+2?"), Message::new("assistant", "4")]);
    let all = roles([ChatRole::System, ChatRole::User, ChatRole::Assistant]);
    check_targets("qwen2_5", &chat, all, &["2+2?<|im_end|>", "4<|im_end|>"]);
    check_targets("smollm2", &chat, all, &["2+2?<|im_end|>", "4<|im_end|>"]);
}

#[test]
fn a_message_of_weight_0_is_no_target_in_any_role() {
    let mut chat = chat();
    chat.messages[1] = Message::new("user", "2+2?").with("weight", json!(0));
    check_targets("qwen2_5", &chat, roles([ChatRole::User]), &["Yes.<|im_end|>"]);
}

#[test]
fn without_ends_of_turns_the_rest_of_all_tokens_is_trained_on() {
    let options = RenderOptions { targets: LossMask::AllTokens, eos: EosLoss::None, ..RenderOptions::default() };
    let tokenizer = tokenizer("qwen2_5");
    let sample = render_chat(&tokenizer, &stock_template(&tokenizer), &chat(), options).unwrap();
    assert_eq!(sample.len() - sample.n_targets(), 5);
    let last = RenderOptions { eos: EosLoss::Last, ..options };
    let sample = render_chat(&tokenizer, &stock_template(&tokenizer), &chat(), last).unwrap();
    assert_eq!(sample.len() - sample.n_targets(), 4);
}

/// A template without special tokens has textual ends of turns.
#[test]
fn an_end_of_turn_may_be_text() {
    let tokenizer = tokenizer("smollm2");
    let source = "{% for m in messages %}{{ m.role }}:\n{{ m.content }}/end\n{% endfor %}\
                  {% if add_generation_prompt %}assistant:\n{% endif %}";
    let template = ChatTemplate::new("text", source).unwrap();
    let chat = Conversation::new([Message::new("user", "a"), Message::new("assistant", "b")]);
    let with = |eos| {
        let options = RenderOptions { eos, ..roles([ChatRole::User, ChatRole::Assistant]) };
        targets(&tokenizer, &render_chat(&tokenizer, &template, &chat, options).unwrap())
    };
    assert_eq!(with(EosLoss::Turn), ["a/end", "b/end"]);
    assert_eq!(with(EosLoss::None), ["a", "b"]);
    assert_eq!(with(EosLoss::Last), ["a", "b/end"]);
}

#[test]
fn a_template_that_changes_with_marked_contents_is_refused() {
    let tokenizer = tokenizer("smollm2");
    let template =
        ChatTemplate::new("odd", "{% for m in messages %}{{ m.content }}{{ m.content | length }}{% endfor %}").unwrap();
    let chat = Conversation::new([Message::new("user", "a")]);
    let error = render_chat(&tokenizer, &template, &chat, roles([ChatRole::User])).unwrap_err().to_string();
    assert!(error.contains("find the contents of messages") && error.contains("roles_to_train"), "{error}");
}

fn pair(tokenizer: &Tokenizer, options: RenderOptions) -> (String, Vec<String>) {
    let document = Document::PromptCompletion { prompt: "2+2?".into(), completion: " 4".into() };
    let sample = render_document(tokenizer, Some(&stock_template(tokenizer)), document, options).unwrap();
    let text = tokenizer.decode(&sample.ids, candlewick_text::tokenizer::SpecialTokens::Include).unwrap();
    (text, targets(tokenizer, &sample))
}

#[test]
fn a_prompt_and_its_completion_can_stay_text() {
    let tokenizer = tokenizer("qwen2_5");
    let text = RenderOptions { prompt_form: PromptForm::Text, ..RenderOptions::default() };
    assert_eq!(pair(&tokenizer, text), ("2+2? 4<|im_end|>".into(), vec![" 4<|im_end|>".into()]));
    let without = RenderOptions { eos: EosLoss::None, ..text };
    assert_eq!(pair(&tokenizer, without).1, [" 4"]);
    let all = RenderOptions { targets: LossMask::AllTokens, ..text };
    assert_eq!(pair(&tokenizer, all).1, ["2+2? 4<|im_end|>"]);
    assert!(pair(&tokenizer, RenderOptions::default()).0.contains("<|im_start|>user\n2+2?"));
    let chat = Document::Conversation(chat());
    let error = render_document(&tokenizer, Some(&stock_template(&tokenizer)), chat, text).unwrap_err().to_string();
    assert!(error.contains("apply_chat_template"), "{error}");
}
