//! Chats rendered, tokenized and masked as transformers does it, on the stock templates and real
//! token ids of four model families. The goldens are written by `tests/reference/chat_goldens.py`.

use std::ops::Range;
use std::path::PathBuf;

use candlewick_text::conversation::{Conversation, Message};
use candlewick_text::render::{
    EmptyAnswerLoss, EmptyThinkLoss, LossMask, RenderOptions, Sample, TextSpecialTokens, render_chat,
    render_completion, render_prompt, render_text,
};
use candlewick_text::template::{AddGenerationPrompt, ChatTemplate, Clock};
use candlewick_text::tokenizer::{SpecialTokens, Tokenizer};
use serde_json::{Map, Value as Json};

const FAMILIES: [&str; 5] = ["smollm2", "llama3", "llama3_2", "qwen2_5", "qwen3"];

fn fixture(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/chat").join(path)
}

pub(crate) fn json(path: &str) -> Map<String, Json> {
    serde_json::from_slice(&std::fs::read(fixture(path)).unwrap()).unwrap()
}

pub(crate) fn conversation(json: &Json) -> Conversation {
    let messages = json["messages"].as_array().unwrap().iter();
    let message = |it: &Json| {
        // Originals accept a null content without tool calls, too.
        let is_null = it["content"].is_null() && it.get("tool_calls").is_none();
        let mut fields = it.as_object().unwrap().clone();
        if is_null {
            fields.insert("content".to_owned(), "".into());
        }
        let message = Message::from_fields(fields).unwrap();
        if is_null { message.with("content", Json::Null) } else { message }
    };
    let tools = json.get("tools").cloned();
    Conversation { messages: messages.map(message).collect(), tools }
}

pub(crate) fn tokenizer(family: &str) -> Tokenizer {
    Tokenizer::from_directory(fixture(family)).unwrap()
}

/// Time at which the goldens were made.
fn at_golden_time(template: ChatTemplate) -> ChatTemplate {
    template.with_clock(Clock::Fixed(1_721_984_703))
}

pub(crate) fn stock_template(tokenizer: &Tokenizer) -> ChatTemplate {
    at_golden_time(tokenizer.chat_template(None).unwrap().unwrap())
}

/// Returns the template with generation blocks.
fn patched_template(family: &str, tokenizer: &Tokenizer) -> ChatTemplate {
    let path = fixture(family).join("generation.jinja");
    let source = std::fs::read_to_string(&path).unwrap();
    let template = ChatTemplate::new(path.display().to_string(), &source).unwrap();
    assert!(template.has_generation_blocks());
    at_golden_time(tokenizer.with_special_tokens(template))
}

pub(crate) fn with_kwargs(template: ChatTemplate, chat: &Json) -> ChatTemplate {
    let kwargs = chat.get("kwargs").and_then(Json::as_object).cloned().unwrap_or_default();
    kwargs.into_iter().fold(template, |template, (name, v)| template.with_variable(name, v))
}

/// Calls `check` with every golden of every family, and each of its two templates.
pub(crate) fn for_each_golden(check: impl Fn(&str, &Tokenizer, &ChatTemplate, &Conversation, &Json)) {
    let chats = json("chats.json");
    let mut n_goldens = 0;
    for family in FAMILIES {
        let tokenizer = tokenizer(family);
        let goldens = json(&format!("{family}/goldens.json"));
        for (name, chat) in &chats {
            for template in [stock_template(&tokenizer), patched_template(family, &tokenizer)] {
                let template = with_kwargs(template, chat);
                let title = format!("{family}, {name}, {}", template.name());
                check(&title, &tokenizer, &template, &conversation(chat), &goldens[name]);
                n_goldens += 1;
            }
        }
    }
    assert_eq!(n_goldens, FAMILIES.len() * chats.len() * 2);
}

fn spans_of(golden: &Json) -> Vec<Range<usize>> {
    let number = |value: &Json| usize::try_from(value.as_u64().unwrap()).unwrap();
    let spans = golden["spans"].as_array().unwrap().iter();
    spans.map(|span| number(&span[0])..number(&span[1])).collect()
}

fn ids_of(golden: &Json) -> Vec<u32> {
    serde_json::from_value(golden["ids"].clone()).unwrap()
}

fn mask_of(golden: &Json) -> Vec<bool> {
    golden["mask"].as_str().unwrap().chars().map(|mask| mask == '1').collect()
}

#[test]
fn texts_are_those_of_transformers() {
    for_each_golden(|title, _, template, chat, golden| {
        let closed = template.render(chat, AddGenerationPrompt::No);
        if golden.get("error").is_some() {
            // The goldens' errors are the stock templates'. A missing content is an empty text here.
            let is_filled = chat.messages.iter().any(|message| message.text().is_none());
            assert!(closed.is_err() || template.has_generation_blocks() || is_filled, "{title}: {closed:?}");
            return;
        }
        assert_eq!(closed.unwrap(), golden["text"].as_str().unwrap(), "{title}");
        let prompt = template.render(chat, AddGenerationPrompt::Yes).unwrap();
        assert_eq!(prompt, golden["prompt"].as_str().unwrap(), "{title}");
    });
}

/// Spans come from generation blocks, or without them from the turns.
#[test]
fn spans_are_those_of_generation_blocks() {
    for_each_golden(|title, _, template, chat, golden| {
        if golden.get("error").is_none() {
            let rendered = template.render_turns(chat).unwrap();
            let show = |spans: &[Range<usize>]| -> Vec<String> {
                spans.iter().map(|span| rendered.text[span.clone()].to_owned()).collect()
            };
            let got: Vec<Range<usize>> = rendered.spans.iter().map(|span| span.range.clone()).collect();
            let want = spans_of(golden);
            assert_eq!(show(&got), show(&want), "{title}");
            assert_eq!(got, want, "{title}");
            let is_answer = |message: usize| chat.messages[message].is_assistant();
            assert!(rendered.spans.iter().all(|span| span.message.is_some_and(is_answer)), "{title}");
        }
    });
}

#[test]
fn ids_and_masks_are_those_of_transformers() {
    for_each_golden(|title, tokenizer, template, chat, golden| {
        if golden.get("error").is_none() {
            let options = RenderOptions { empty_answers: EmptyAnswerLoss::Include, ..RenderOptions::default() };
            let sample = render_chat(tokenizer, template, chat, options).unwrap();
            assert_eq!(sample.ids, ids_of(golden), "{title}");
            if !sample.sample_warnings.has_unrendered() {
                assert_eq!(sample.is_target, mask_of(golden), "{title}");
            }
            assert_eq!(sample.has_eos_target(tokenizer), sample.n_targets() > 0, "{title}");
            assert!(!sample.has_doubled_bos(tokenizer), "{title}");
            let prompt = render_prompt(tokenizer, template, chat).unwrap();
            let text = golden["prompt"].as_str().unwrap();
            assert_eq!(prompt, tokenizer.encode(text, SpecialTokens::Exclude).unwrap(), "{title}");
        }
    });
}

fn sample(family: &str, chat: &str, options: RenderOptions) -> (Tokenizer, Sample) {
    let tokenizer = tokenizer(family);
    let chat = conversation(&json("chats.json")[chat]);
    let sample = render_chat(&tokenizer, &stock_template(&tokenizer), &chat, options).unwrap();
    (tokenizer, sample)
}

/// Returns the text of each contiguous run of targets.
pub(crate) fn targets(tokenizer: &Tokenizer, sample: &Sample) -> Vec<String> {
    let marked: Vec<(u32, bool)> = sample.ids.iter().copied().zip(sample.is_target.iter().copied()).collect();
    let stretches = marked.chunk_by(|left, right| left.1 == right.1);
    let decode = |stretch: &[(u32, bool)]| {
        let ids: Vec<u32> = stretch.iter().map(|(id, _)| *id).collect();
        tokenizer.decode(&ids, SpecialTokens::Include).unwrap()
    };
    stretches.filter(|stretch| stretch[0].1).map(decode).collect()
}

#[test]
fn every_token_is_a_target_when_inputs_are_not_masked() {
    let options = RenderOptions { targets: LossMask::AllTokens, ..Default::default() };
    let (_, all) = sample("qwen3", "repeated_answers", options);
    assert_eq!(all.n_targets(), all.len());
    assert_eq!(all.ids, sample("qwen3", "repeated_answers", RenderOptions::default()).1.ids);
}

#[test]
fn the_last_answer_alone_can_be_the_target() {
    let options = RenderOptions { targets: LossMask::LastTurn, ..Default::default() };
    let (tokenizer, last) = sample("qwen2_5", "repeated_answers", options);
    assert_eq!(targets(&tokenizer, &last), ["Yes.<|im_end|>"]);
    assert_eq!(last.is_target.iter().rposition(|target| *target), Some(last.len() - 2));
    let (tokenizer, none) = sample("qwen2_5", "no_assistant", options);
    assert!(targets(&tokenizer, &none).is_empty());
}

#[test]
fn an_empty_thought_can_be_left_out() {
    let (tokenizer, with) = sample("qwen3", "one_turn", RenderOptions::default());
    assert_eq!(targets(&tokenizer, &with), ["<think>\n\n</think>\n\nHello!<|im_end|>"]);
    let options = RenderOptions { empty_think: EmptyThinkLoss::Mask, ..Default::default() };
    let (tokenizer, without) = sample("qwen3", "one_turn", options);
    assert_eq!(targets(&tokenizer, &without), ["Hello!<|im_end|>"]);
    assert_eq!(with.ids, without.ids);
    let (tokenizer, real) = sample("qwen3", "thoughts_apart", options);
    assert!(targets(&tokenizer, &real)[1].starts_with("<think>\nTwo and two."));
}

fn as_text(tokenizer: &Tokenizer, add_bos_token: Option<bool>, add_eos_token: bool) -> String {
    let sample =
        render_text(tokenizer, "Yes.", TextSpecialTokens { add_bos_token, add_eos_token, max_text_tokens: None })
            .unwrap();
    tokenizer.decode(&sample.ids, SpecialTokens::Include).unwrap()
}

#[test]
fn bos_of_plain_text_is_the_tokenizers_and_eos_ends_it() {
    let llama = tokenizer("llama3_2");
    let text = |text| render_text(&llama, text, TextSpecialTokens::default()).unwrap();
    assert_eq!(as_text(&llama, None, true), "<|begin_of_text|>Yes.<|eot_id|>");
    assert_eq!(text("Yes.").is_target, [false, true, true, true]);
    assert!(text("Yes.").has_eos_target(&llama));
    assert!(!text("Yes.").has_doubled_bos(&llama));
    assert!(text("<|begin_of_text|>Yes.").has_doubled_bos(&llama));
    let encode = |text| llama.encode(text, SpecialTokens::Include).unwrap();
    assert_eq!(encode("<|begin_of_text|>Yes."), encode("Yes."), "a prompt has one BOS");

    // SmolLM2 names a BOS token, `<|im_start|>`, that its tokenizer does not add.
    let smollm = tokenizer("smollm2");
    assert_eq!(smollm.bos().unwrap().text, "<|im_start|>");
    assert_eq!(as_text(&smollm, None, true), "Yes.<|im_end|>");
    assert_eq!(as_text(&smollm, Some(true), false), "<|im_start|>Yes.");
    assert_eq!(as_text(&llama, Some(false), false), "Yes.");

    let qwen = tokenizer("qwen2_5");
    assert_eq!(as_text(&qwen, None, true), "Yes.<|im_end|>");
    let sample = render_text(&qwen, "Yes.", TextSpecialTokens::default()).unwrap();
    assert_eq!(sample.n_targets(), sample.len());
    assert!(render_text(&qwen, " \n", TextSpecialTokens::default()).unwrap().is_empty());
    let error =
        render_text(&qwen, "Yes.", TextSpecialTokens { add_bos_token: Some(true), ..TextSpecialTokens::default() });
    assert!(error.unwrap_err().to_string().contains("the tokenizer names no bos_token"));
}

/// A text is scored as [`SpecialTokens::Include`] encodes it: training sees the same tokens, and EOS after them.
#[test]
fn training_and_scoring_give_a_text_the_same_tokens() {
    for family in FAMILIES {
        let tokenizer = tokenizer(family);
        let text = "The cat sat.\nAnd stood up.";
        let scored = tokenizer.encode(text, SpecialTokens::Include).unwrap();
        let ids = |add_eos_token| {
            let specials = TextSpecialTokens { add_eos_token, ..TextSpecialTokens::default() };
            render_text(&tokenizer, text, specials).unwrap().ids
        };
        assert_eq!(ids(false), scored, "{family}");
        assert_eq!(ids(true), [scored, vec![tokenizer.eos().unwrap().id]].concat(), "{family}");
    }
}

#[test]
fn a_completion_and_eos_are_targets_and_its_prompt_is_not() {
    let qwen = tokenizer("qwen2_5");
    let sample = render_completion(&qwen, "Weather", " in 東京?", RenderOptions::default()).unwrap();
    assert_eq!(targets(&qwen, &sample), [" in 東京?<|im_end|>"]);
    assert_eq!(qwen.decode(&sample.ids, SpecialTokens::Exclude).unwrap(), "Weather in 東京?");
    assert!(sample.has_eos_target(&qwen));
}

/// Several tokens may share one character: they are targets together or not at all.
#[test]
fn the_tokens_of_one_character_have_one_mask() {
    let qwen = tokenizer("qwen2_5");
    let family = "👩‍👩‍👧";
    for (prompt, completion) in [("😀", family), (family, "😀"), ("", family)] {
        let sample = render_completion(&qwen, prompt, completion, RenderOptions::default()).unwrap();
        assert_eq!(targets(&qwen, &sample), [format!("{completion}<|im_end|>")]);
    }
    let encoded = qwen.encode_with_offsets(&format!("a{family}b")).unwrap();
    assert!(encoded.ids.len() > 5, "the text has tokens that share characters");
    let mut covered = 0;
    for offsets in &encoded.offsets {
        assert!(offsets.start <= covered && offsets.start < offsets.end, "{encoded:?}");
        covered = offsets.end;
    }
    assert_eq!(covered, 2 + family.len());
}

#[test]
fn a_turn_of_weight_0_is_context_and_not_learned() {
    let tokenizer = tokenizer("smollm2");
    let turn = |weight: Json| Message::new("assistant", "yes").with("weight", weight);
    let chat = |first: Json| {
        Conversation::new([Message::new("user", "a"), turn(first), Message::new("user", "b"), turn(1.into())])
    };
    for template in [stock_template(&tokenizer), patched_template("smollm2", &tokenizer)] {
        let render = |chat| render_chat(&tokenizer, &template, &chat, RenderOptions::default()).unwrap();
        let (both, last) = (render(chat(1.into())), render(chat(0.into())));
        assert_eq!(both.ids, last.ids);
        assert_eq!(both.n_targets(), 2 * last.n_targets());
        let first_target = |sample: &Sample| sample.is_target.iter().position(|it| *it).unwrap();
        assert!(first_target(&both) < first_target(&last));
    }
}

/// A turn with a thought and an answer has two blocks, one without a thought has one.
#[test]
fn a_weight_is_that_of_all_blocks_of_its_turn() {
    let tokenizer = tokenizer("smollm2");
    let source = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.thought }}\
                  {% endgeneration %}|{% generation %}{{ m.content }}{% endgeneration %}|{% else %}\
                  {{ m.content }}|{% endif %}{% endfor %}";
    let template = ChatTemplate::new("blocks", source).unwrap();
    let check = |weights: [i32; 3], targets: LossMask, want: &[&str]| {
        let turn = |text: &str, weight: i32| Message::new("assistant", text).with("weight", weight.into());
        let thoughtful = |text, weight| turn(text, weight).with("thought", "hm".into());
        let answers = [thoughtful("one", weights[0]), turn("two", weights[1]), thoughtful("three", weights[2])];
        let chat = Conversation::new(answers.into_iter().flat_map(|answer| [Message::new("user", "go"), answer]));
        let options = RenderOptions { targets, ..Default::default() };
        let sample = render_chat(&tokenizer, &template, &chat, options).unwrap();
        assert_eq!(self::targets(&tokenizer, &sample), want);
    };
    check([1, 1, 1], LossMask::Turns, &["hm", "one", "two", "hm", "three"]);
    check([0, 1, 1], LossMask::Turns, &["two", "hm", "three"]);
    check([1, 0, 1], LossMask::Turns, &["hm", "one", "hm", "three"]);
    check([1, 1, 0], LossMask::Turns, &["hm", "one", "two"]);
    check([1, 1, 1], LossMask::LastTurn, &["hm", "three"]);
    check([1, 1, 0], LossMask::LastTurn, &["two"]);
}

#[test]
fn a_weight_of_0_needs_blocks_inside_of_turns() {
    let tokenizer = tokenizer("smollm2");
    let source = "{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}";
    let template = ChatTemplate::new("outside", source).unwrap();
    let chat = |weight: i32| {
        Conversation::new([
            Message::new("user", "a"),
            Message::new("assistant", "yes").with("weight", weight.into()),
            Message::new("assistant", "no"),
        ])
    };
    let render = |weight| render_chat(&tokenizer, &template, &chat(weight), RenderOptions::default());
    assert!(render(1).unwrap().n_targets() > 0);
    let error = render(0).unwrap_err().to_string();
    assert!(
        error.starts_with("leave out message 1 (it is empty, not rendered or of weight 0): chat template outside has"),
        "{error}"
    );
}
