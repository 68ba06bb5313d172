//! Chat templates render as in transformers, whose output `tests/reference/chat_goldens.py` records. Malformed and hostile
//! templates are errors.

use candlewick_text::conversation::{Conversation, Message};
use candlewick_text::source::parse_value;
use candlewick_text::template::{AddGenerationPrompt, ChatTemplate, Clock, TemplateError};
use serde_json::{Value as Json, json};

fn chat(messages: &[(&str, &str)]) -> Conversation {
    Conversation::new(messages.iter().map(|(role, content)| Message::new(*role, *content)))
}

#[test]
fn snippets_print_what_transformers_prints() {
    let fixture = include_str!("../fixtures/chat/snippets.json");
    let fixture: Json = serde_json::from_str(fixture).unwrap();
    let messages = fixture["chat"]["messages"].as_array().unwrap().iter();
    let message = |it: &Json| Message::from_fields(it.as_object().unwrap().clone()).unwrap();
    let chat = Conversation::new(messages.map(message)).with_tools(fixture["chat"]["tools"].clone());
    let mut differences = Vec::new();
    for snippet in fixture["snippets"].as_array().unwrap() {
        let (source, want) = (snippet[0].as_str().unwrap(), snippet[1].as_str());
        let template = ChatTemplate::new("snippet", source);
        let got = template
            .map(|template| template.with_clock(Clock::Fixed(1_721_984_703)))
            .and_then(|template| template.render(&chat, AddGenerationPrompt::No));
        if got.as_deref().ok() != want {
            differences.push(format!("{source}\n  want {want:?}\n  got  {got:?}"));
        }
    }
    assert!(differences.is_empty(), "{}", differences.join("\n"));
}

/// Written by `tests/reference/jinja.py`.
const JINJA: &str = include_str!("../fixtures/jinja.json");

/// Renders a template with the variables of the fixture.
fn render_jinja(fixture: &Json, source: &str) -> Result<String, TemplateError> {
    let variables = fixture["variables"].as_object().unwrap();
    let template = ChatTemplate::new("test.jinja", source)?;
    let template =
        variables.iter().fold(template, |template, (name, value)| template.with_variable(name, value.clone()));
    template.render(&chat(&[("user", "x")]), AddGenerationPrompt::No)
}

#[test]
fn templates_print_what_jinja_prints_in_python() {
    let fixture = parse_value(JINJA).unwrap();
    let mut differences = Vec::new();
    for row in fixture["templates"].as_array().unwrap() {
        let (source, want) = (row[0].as_str().unwrap(), row[1].as_str());
        let got = render_jinja(&fixture, source);
        if got.as_deref().ok() != want {
            differences.push(format!("{source}\n  want {want:?}\n  got  {got:?}"));
        }
    }
    assert!(differences.is_empty(), "{}", differences.join("\n"));
}

#[test]
fn an_expression_that_is_not_supported_is_named_with_a_way_out() {
    let fixture = parse_value(JINJA).unwrap();
    for row in fixture["refused"].as_array().unwrap() {
        let error = render_jinja(&fixture, row[0].as_str().unwrap()).unwrap_err().to_string();
        assert!(error.contains(row[1].as_str().unwrap()), "{row}: {error}");
    }
}

/// Returns the assistant's text in a rendered chat, or the reason why it cannot be located.
#[track_caller]
fn check(source: &str, messages: &[(&str, &str)], want: Result<&[&str], &str>) {
    let template = ChatTemplate::new("test.jinja", source).unwrap();
    match (template.render_turns(&chat(messages)), want) {
        (Ok(got), Ok(want)) => {
            let spans: Vec<&str> = got.spans.iter().map(|span| &got.text[span.range.clone()]).collect();
            assert_eq!(spans, want, "in {:?}", got.text);
        }
        (Err(error), Err(want)) => assert!(error.to_string().contains(want), "{error}"),
        (got, want) => panic!("got {got:?}, want {want:?}"),
    }
}

const TALK: [(&str, &str); 4] = [("user", "same"), ("assistant", "same"), ("user", "same"), ("assistant", "same")];

#[test]
fn a_template_without_roles_or_prompt_gives_the_whole_turn() {
    let source = "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]\
                  {% else %} {{ m.content }}</s>{% endif %}{% endfor %}";
    check(source, &TALK, Ok(&[" same</s>", " same</s>"]));
}

#[test]
fn a_prompt_printed_in_the_last_turn_is_no_target() {
    let source = "{% for message in messages %}\n<|{{ message.role }}|>\n{{ message.content }}</s>\n\
                  {% if loop.last and add_generation_prompt %}\n<|assistant|>\n{% endif %}\n\
                  {% endfor %}";
    check(source, &TALK, Ok(&["same</s>", "same</s>"]));
}

#[test]
fn a_prompt_printed_in_the_turn_before_is_no_target() {
    let source = "{% for m in messages %}{% if m.role == 'user' %}U:{{ m.content }}\
                  {% if not loop.last %}\nA:{% endif %}{% else %}{{ m.content }}</s>{% endif %}\
                  {% endfor %}{% if add_generation_prompt %}\nA:{% endif %}";
    check(source, &TALK, Ok(&["same</s>", "same</s>"]));
}

#[test]
fn blank_lines_between_turns_are_no_targets() {
    let source = "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\
                  {% if m.role == 'assistant' %}</s>{% endif %}{% if not loop.last %}{{ '\n\n' }}\
                  {% endif %}{% endfor %}{% if add_generation_prompt %}{{ '\n\n### assistant:\n' }}\
                  {% endif %}";
    check(source, &TALK, Ok(&["same</s>", "same</s>"]));
}

#[test]
fn an_end_of_turn_printed_between_turns_is_a_target() {
    let source = "{% for m in messages %}{% if not loop.first %}<end>\n{% endif %}<{{ m.role }}>\
                  {{ m.content }}{% endfor %}<end>{% if add_generation_prompt %}{{ '\n<assistant>' }}\
                  {% endif %}";
    check(source, &TALK, Ok(&["same<end>", "same<end>"]));
    let eos_at_last = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}</s>";
    check(eos_at_last, &TALK, Ok(&["<assistant>same", "<assistant>same"]));
}

#[test]
fn looking_ahead_and_back_does_not_mislead() {
    let source = "{% for m in messages %}\
                  {% if not loop.last and messages[loop.index0 + 1].role == 'assistant' %}{% endif %}\
                  {% if loop.index0 and messages[loop.index0 - 1].role == 'user' %}{% endif %}\
                  <{{ m.role }}>{{ m.content }}</{{ messages[0].role }}>{% endfor %}\
                  {% if add_generation_prompt %}<assistant>{% endif %}";
    check(source, &TALK, Ok(&["same</user>", "same</user>"]));
}

#[test]
fn macros_and_captures_keep_their_turns() {
    let source = "{% macro turn(m) %}<{{ m.role }}>{{ m.content }}<end>\n{% endmacro %}\
                  {% macro all(ms) %}{% for m in ms %}{{ turn(m) }}{% endfor %}{% endmacro %}\
                  {% set text %}{{ all(messages) }}{% endset %}{{ text }}\
                  {% if add_generation_prompt %}<assistant>{% endif %}";
    check(source, &TALK, Ok(&["same<end>", "same<end>"]));
    let blocks = "{% macro turn(m) %}{% generation %}{{ m.content }}!{% endgeneration %}\
                  {% endmacro %}{% for m in messages %}{% set t = turn(m) %}\
                  {{ t if m.role == 'assistant' else m.content }}{% endfor %}";
    check(blocks, &TALK, Ok(&["same!", "same!"]));
}

#[test]
fn loops_are_left_and_skipped_without_harm() {
    let source = "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}\
                  <{{ m.role }}>{% for word in m.content.split() %}{{ word }}\
                  {% if word == 'stop' %}{% break %}{% endif %}{% endfor %}<end>{% endfor %}\
                  {% if add_generation_prompt %}<assistant>{% endif %}";
    let talk = [("system", "x"), ("user", "a b"), ("assistant", "a stop b"), ("user", "c")];
    check(source, &talk, Ok(&["astop<end>"]));
}

#[test]
fn sliced_reversed_and_filtered_messages_are_still_messages() {
    let source = "{{ messages[0].content }}{% for m in messages[1:] | reverse | list if m.content %}\
                  <{{ m.role }}>{{ m.content }}{% endfor %}";
    check(source, &[("system", "s"), ("user", "u"), ("assistant", "a")], Ok(&["<assistant>a"]));
}

#[test]
fn counted_messages_are_still_messages() {
    let source = "{% for i in range(messages | length) %}{% set m = messages[i] %}<{{ m.role }}>\
                  {{ m.content }}{% for n in range(2) %}{{ n }}{% endfor %}{% endfor %}";
    check(source, &TALK, Ok(&["<assistant>same01", "<assistant>same01"]));
}

#[test]
fn ambiguous_turns_are_an_error() {
    let rebuilt = "{% for text in messages | map(attribute='content') %}{{ text }}{% endfor %}";
    check(rebuilt, &TALK, Err("message 1 (assistant) leaves no text"));
    let twice = "{% for m in messages %}{{ m.content }}{% endfor %}\
                 {% for m in messages %}{{ m.content }}{% endfor %}";
    check(twice, &TALK, Err("message 1 (assistant) is printed in several places"));
    let disturbed = "{% set all %}{% for m in messages %}{{ m.content }}{% endfor %}{% endset %}\
                     {{ all }}{{ all | length }}";
    check(disturbed, &TALK, Err("prints something else when its turns are marked"));
    let headless = "{% for m in messages %}{{ m.content }}{% endfor %}\
                    {% if add_generation_prompt %}Assistant:{% endif %}";
    check(headless, &TALK, Err("does not begin with the generation prompt \"Assistant:\""));
    let advice = "Put {% generation %} ... {% endgeneration %} around it in the template";
    check(headless, &TALK, Err(advice));
}

/// A template that fails on the program's example chats is tried with the conversation and other answers.
#[test]
fn a_template_may_fail_on_example_chats() {
    let turns = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                 {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    let unless = |condition: &str| {
        format!("{{% if not ({condition}) %}}{{{{ raise_exception('refused') }}}}{{% endif %}}\n{turns}")
    };
    let needs_system = unless("messages[0].role == 'system'");
    let system = ("system", "same");
    check(&needs_system, &[system, TALK[0], TALK[1]], Ok(&["same<|im_end|>"]));
    check(&needs_system, &[system, TALK[0], TALK[1], TALK[2], TALK[3]], Ok(&["same<|im_end|>", "same<|im_end|>"]));
    let one_exchange = unless("messages | length <= 3");
    check(&one_exchange, &TALK[..2], Ok(&["same<|im_end|>"]));
    check(&one_exchange, &[system, TALK[0], TALK[1]], Ok(&["same<|im_end|>"]));
    check(
        &unless("messages[0].role == 'assistant'"),
        &[TALK[1], TALK[0], TALK[1], TALK[2]],
        Ok(&["same<|im_end|>"; 2]),
    );
    let fixed_answer = unless("messages | length == 1 or messages[1].content == 'same'");
    check(&fixed_answer, &TALK, Err("the template fails on example chats, which locate the text, in line 1: refused"));
    check(&fixed_answer, &TALK, Err("Put {% generation %} ... {% endgeneration %} around it in the template"));

    let answer = Message::new("assistant", "same").with("id", json!(1)).with("reasoning_content", json!("hm"));
    let chat = Conversation::new([Message::new("user", "same"), answer]).with_tools(json!([{"type": "function"}]));
    for condition in ["tools", "messages | length == 1 or messages[1].id is defined"] {
        let rendered = ChatTemplate::new("test.jinja", &unless(condition)).unwrap().render_turns(&chat).unwrap();
        let spans: Vec<&str> = rendered.spans.iter().map(|span| &rendered.text[span.range.clone()]).collect();
        assert_eq!(spans, ["same<|im_end|>"], "{condition}");
    }
}

#[test]
fn generation_blocks_have_the_last_word() {
    let source = "{% for m in messages %}\n{{ m.role }}: \n{%- if m.role == 'assistant' %}\n\
                  {% generation %}{{ m.content }}{% endgeneration %}\n{% else %}{{ m.content }}\
                  {% endif %}\n{% endfor %}";
    check(source, &TALK, Ok(&["same", "same"]));
    let nested = "{% generation %}{% generation %}{{ messages[1].content }}{% endgeneration %}\
                  {% endgeneration %}";
    check(nested, &TALK, Err("generation block begins or ends inside another one"));
}

#[test]
fn characters_set_aside_for_markers_may_be_in_the_text() {
    let source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}";
    let few = "\u{FDD0}2 1 1\u{FDD0}\u{FDD1}";
    check(source, &[("user", few), ("assistant", few)], Ok(&[&format!("<assistant>{few}")]));
    let all: String = ('\u{FDD0}'..='\u{FDEF}').collect();
    check(source, &[("user", &all), ("assistant", "a")], Err("when its turns are marked"));
}

#[track_caller]
fn fails(source: &str, want: &str) {
    let rendered = ChatTemplate::new("test.jinja", source)
        .and_then(|template| template.render(&chat(&TALK), AddGenerationPrompt::No));
    assert_eq!(rendered.unwrap_err().to_string(), want);
}

#[test]
fn errors_name_the_template_the_line_and_the_reason() {
    fails(
        "{% for m in messages %}\n{{ raise_exception('roles must alternate: ' + m.role) }}{% endfor %}",
        "render chat template test.jinja, line 2: roles must alternate: user",
    );
    fails(
        "a\nb\n{{ strftime_now('%Q') }}",
        "render chat template test.jinja, line 3: strftime_now does not know the directive `%Q`",
    );
    fails("{% generation %}\n{% for x in %}", "parse chat template test.jinja, line 2: unexpected end of block");
    let template = ChatTemplate::new("test.jinja", "{{ messages }}").unwrap();
    let error = template.render(&Conversation::default(), AddGenerationPrompt::No).unwrap_err();
    assert_eq!(error.to_string(), "render chat template test.jinja: the conversation has no messages");
}

/// Tool arguments are passed as in the row, and as an object only if the template cannot print a string.
#[test]
fn arguments_are_text_where_the_template_can_print_text() {
    let print = |source: &str, arguments: Json| {
        let call = json!([{"function": {"name": "f", "arguments": arguments}}]);
        let chat = Conversation::new([Message::new("assistant", "").with("tool_calls", call)]);
        let head = "{% for m in messages %}{% set a = m.tool_calls[0].function.arguments %}{% generation %}";
        let source = format!("{head}{source}{{% endgeneration %}}{{% endfor %}}");
        let template = ChatTemplate::new("calls", &source).unwrap();
        let rendered = template.render_turns(&chat).map_err(|error| error.to_string())?;
        assert_eq!(Ok(&rendered.text), template.render(&chat, AddGenerationPrompt::No).as_ref().map_err(|_| ()));
        Ok::<_, String>(rendered.text)
    };
    let (text, object) = (json!("{\"x\":  1}"), json!({"x": 1}));
    assert_eq!(print("{{ 'call: ' + a }}", text.clone()).unwrap(), "call: {\"x\":  1}");
    assert_eq!(print("{{ a | tojson }}", text.clone()).unwrap(), r#""{\"x\":  1}""#);
    assert_eq!(print("{{ a | tojson }}", object.clone()).unwrap(), "{\"x\": 1}");
    let branches = "{% if a is string %}{{ a }}{% else %}{{ a | tojson }}{% endif %}";
    assert_eq!(print(branches, text.clone()).unwrap(), "{\"x\":  1}");
    let items = "{% for k, v in a.items() %}{{ k }}={{ v }}{% endfor %}";
    assert_eq!(print(items, object).unwrap(), "x=1");
    assert_eq!(print(items, text).unwrap(), "x=1");
    let error = print(items, json!("not JSON")).unwrap_err();
    assert!(error.contains("render chat template calls, line 1"), "{error}");
}

/// A token limit cuts a call, and the client sends it back.
#[test]
fn arguments_that_are_no_object_are_empty_where_the_template_needs_an_object() {
    let print = |source: &str| {
        let call = |arguments: &str| json!({"function": {"name": "f", "arguments": arguments}});
        let calls = json!([call("{\"x\": 1}"), call("{\"x\": "), call("[1]"), call("")]);
        let chat = Conversation::new([Message::new("assistant", "").with("tool_calls", calls)]);
        let head = "{% for m in messages %}{% for c in m.tool_calls %}{% set a = c.function.arguments %}<";
        let template = ChatTemplate::new("calls", &format!("{head}{source}>{{% endfor %}}{{% endfor %}}")).unwrap();
        let chat = template.with_complete_arguments(template.adapt(&chat));
        template.render(&chat, AddGenerationPrompt::Yes).map_err(|error| error.to_string())
    };
    let items = "{% for k, v in a|items %}{{ k }}={{ v }}{% endfor %}";
    assert_eq!(print(items).unwrap(), "<x=1><><><>");
    assert_eq!(print("{{ a }}").unwrap(), "<{\"x\": 1}><{\"x\": ><[1]><>");
    assert!(print("{{ raise_exception('no calls') }}").unwrap_err().contains("no calls"));
}

#[test]
fn tools_choose_their_own_template() {
    let template = ChatTemplate::new("plain", "plain {{ x }}").unwrap();
    let tools = ChatTemplate::new("tools", "{{ tools | length }} tools {{ x }}").unwrap();
    let template = template.with_tool_use(tools).with_variable("x", "y");
    let chat = chat(&TALK);
    assert_eq!(template.render(&chat, AddGenerationPrompt::No).unwrap(), "plain y");
    let chat = chat.with_tools(json!([{}]));
    assert_eq!(template.render(&chat, AddGenerationPrompt::No).unwrap(), "1 tools y");
}

#[track_caller]
fn refused(source: &str, want: &str) {
    let chat = Conversation::new([Message::new("user", "x")]);
    let rendered =
        ChatTemplate::new("test", source).and_then(|template| template.render(&chat, AddGenerationPrompt::No));
    let error = rendered.unwrap_err().to_string();
    assert!(error.contains(want), "{want:?} is not in {error:.300}");
}

/// The memory of tests on other threads does not count in a child process.
#[test]
fn a_template_may_not_take_for_ever_or_print_without_end() {
    in_child("template::a_template_may_not_take_for_ever_or_print_without_end", || {
        let loops = "{% for a in range(100000) %}{% for b in range(100000) %}{{ '' }}{% endfor %}{% endfor %}";
        refused(loops, "it takes more than 50000000 instructions");
        let text = "x".repeat(100_000);
        refused(&format!("{{% for a in range(100000) %}}{text}{{% endfor %}}"), "it prints more than 64 MiB");
        refused(&format!("{{{{ strftime_now('%Y' * {}) }}}}", 100_000), "strftime_now: the format has");
        refused(&"x".repeat(300_000), "over the limit of 262144");
    });
}

/// Runs `check` in a child process: the thread of an abandoned rendering runs until its process ends.
fn in_child(test: &str, check: impl FnOnce()) {
    const CHILD: &str = "CANDLEWICK_TEST_CHILD";
    // A child that finds no test of this name exits with 0.
    const PASSED: i32 = 10;
    if std::env::var_os(CHILD).is_some() {
        check();
        std::process::exit(PASSED);
    }
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    let output = child.args([test, "--exact", "--nocapture"]).env(CHILD, "1").output().unwrap();
    assert_eq!(output.status.code(), Some(PASSED), "{}", String::from_utf8_lossy(&output.stderr));
}

fn check_given_up(body: &str) {
    let chat = Conversation::new([Message::new("user", "x")]);
    let source = format!("{{% set ns = namespace(x=['x'], t='x' * 1000) %}}{body}");
    let template = ChatTemplate::new("test", &source).unwrap();
    let first = std::time::Instant::now();
    let error = template.render(&chat, AddGenerationPrompt::No).unwrap_err();
    let first = first.elapsed();
    assert!(matches!(error, TemplateError::LimitExceeded { .. }), "{error:.300}");
    // Further renderings are refused at once. The shortest time counts, because a busy machine may suspend this process.
    let again = || {
        let again = std::time::Instant::now();
        assert!(template.render_turns(&chat).unwrap_err().to_string().contains("one rendering takes more than"));
        again.elapsed()
    };
    let again = (0..5).map(|_| again()).min().unwrap();
    assert!(again < first / 4, "{again:?} after {first:?}");
}

macro_rules! given_up {
    ($($test:ident: $body:expr;)*) => {
        $(#[test]
        fn $test() {
            in_child(concat!("template::", stringify!($test)), || check_given_up($body));
        })*
    };
}

given_up! {
    a_value_nested_without_end_is_given_up:
        "{% for i in range(10000) %}{% for j in range(1000) %}{% set ns.x = [ns.x] %}{% endfor %}{% endfor %}{{ ns.x }}";
}

#[test]
fn a_text_beyond_the_limit_is_refused_before_it_is_made() {
    let text = "{% set t = 'x' * 1000000 %}";
    for body in [
        "{% set ns = namespace(t=t) %}{% for i in range(60) %}{% set ns.t = ns.t ~ ns.t %}{% endfor %}",
        "{% set ns = namespace(t=t) %}{% for i in range(60) %}{% set ns.t = ns.t + ns.t %}{% endfor %}",
        "{{ range(100000) | join('x' * 20000) }}",
        "{{ t | join('x' * 10000) }}",
        "{{ ('x' * 20000).join(range(100000)) }}",
        "{{ t | replace('x', t) }}",
        "{{ t.replace('', t) }}",
        "{{ t * 1000000 }}",
        "{{ 1000000000000 * t }}",
        "{{ t | indent(2000000000) }}",
        "{{ t | indent(width=99999999999, first=true) }}",
        "{{ ('\\n' * 1000) | indent(t) }}",
        "{{ t.center(9000000000) }}",
        "{{ t | center(9000000000) }}",
        "{{ t.zfill(3000000000) }}",
        "{{ ('\\t' * 1000).expandtabs(1000000) }}",
        "{{ '%9000000000d' % 1 }}",
        "{{ '%.*f' % (9000000000, 1) }}",
        "{{ '%9000000000s' | format(1) }}",
        "{% set ns = namespace(x=[t]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | string }}",
    ] {
        refused(&format!("{text}{body}"), "a text is longer than 64 MiB");
    }
}

#[test]
fn a_list_beyond_the_limit_is_refused_before_it_is_made() {
    for (body, want) in [
        ("{% set ns.x = ns.x + ns.x %}", "a list is longer than 1048576 items"),
        ("{% set ns.x = ns.x * 3 %}", "a list is longer than 1048576 items"),
        ("{% set ns.x = 3 * ns.x %}", "a list is longer than 1048576 items"),
        ("{% set ns.t = ns.t + ns.t %}", "a list is longer than 1048576 items"),
        ("{% set ns.t = ns.t * 50000000 %}", "a list is longer than 1048576 items"),
    ] {
        let setup = "{% set ns = namespace(x=['x'], t=(1, 2)) %}";
        refused(&format!("{setup}{{% for i in range(60) %}}{body}{{% endfor %}}{{{{ ns.x | length }}}}"), want);
    }
}

#[test]
fn errors_of_operators_name_the_line_of_the_template() {
    for operation in ["'a' * none", "'a' + none", "none % 2"] {
        refused(&format!("x\n\n{{{{ {operation} }}}}"), "chat template test, line 3");
    }
}

#[test]
fn a_sum_may_have_many_terms() {
    let sum = format!("messages[0].content{}", " + messages[0].content".repeat(1000));
    let template = ChatTemplate::new("test", &format!("{{{{ {sum} }}}}")).unwrap();
    let chat = Conversation::new([Message::new("user", "x")]);
    assert_eq!(template.render(&chat, AddGenerationPrompt::No).unwrap(), "x".repeat(1001));
}

#[test]
fn a_deep_value_does_not_exhaust_the_stack() {
    in_child("template::a_deep_value_does_not_exhaust_the_stack", || {
        let chat = Conversation::new([Message::new("user", "x")]);
        let render = |body: &str, print: &str| {
            let loops = format!("{{% for i in range(100000) %}}{{% set ns.x = {body} %}}{{% endfor %}}");
            let source = format!("{{% set ns = namespace(x=[1]) %}}{loops}{print}");
            ChatTemplate::new("test", &source).unwrap().render(&chat, AddGenerationPrompt::No)
        };
        assert_eq!(render("[ns.x]", "fine").unwrap(), "fine");
        assert_eq!(render("{'a': ns.x}", "fine").unwrap(), "fine");
        // Each slice computes the length of all before it, which may take too long, but ends.
        let _ = render("ns.x[0:]", "");
        let _ = render("[ns.x]", "{{ ns.x }}");
    });
}

#[test]
fn nesting_does_not_exhaust_the_stack() {
    let chat = Conversation::new([Message::new("user", "x")]);
    for source in [
        format!("{{{{ {}1 }}}}", "not ".repeat(50_000)),
        format!("{{{{ 1{} }}}}", "+1".repeat(50_000)),
        format!("{{{{ x{} }}}}", ".a".repeat(50_000)),
        format!("{{{{ {}1{} }}}}", "(".repeat(50_000), ")".repeat(50_000)),
    ] {
        let template = ChatTemplate::new("test", &source);
        let _ = template.map(|template| template.render(&chat, AddGenerationPrompt::No));
    }
}
