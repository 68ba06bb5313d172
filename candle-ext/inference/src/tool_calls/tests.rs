//! Replies in the formats of families, in random pieces.

use std::path::Path;

use candlewick_text::template::{ChatTemplate, ToolCallKeys};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::json;

use super::*;

/// Returns the format of a family's template.
fn of_template(family: &str) -> ToolCallFormat {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../text/tests/fixtures/chat").join(family);
    let text = std::fs::read_to_string(path.join("chat_template.jinja")).unwrap();
    ChatTemplate::new("template", &text).unwrap().tool_call_format().unwrap()
}

fn hermes() -> ToolCallFormat {
    of_template("qwen3")
}

fn llama() -> ToolCallFormat {
    of_template("llama3_2")
}

fn array() -> ToolCallFormat {
    ToolCallFormat {
        opening: "[TOOL_CALLS] [".to_owned(),
        before_name: "{\"name\": \"".to_owned(),
        between: "\", \"arguments\": ".to_owned(),
        after_arguments: "}".to_owned(),
        separator: Some(", ".to_owned()),
        closing: "]".to_owned(),
        keys: Some(ToolCallKeys { name: "name".to_owned(), arguments: "arguments".to_owned() }),
        parameters: None,
    }
}

fn named() -> ToolCallFormat {
    ToolCallFormat {
        opening: "[TOOL_CALLS]".to_owned(),
        before_name: String::new(),
        between: "[ARGS]".to_owned(),
        after_arguments: String::new(),
        separator: Some("[TOOL_CALLS]".to_owned()),
        closing: String::new(),
        keys: None,
        parameters: None,
    }
}

/// Calls as Qwen3-Coder's template prints them.
const CODER: &str = "{%- for m in messages %}<|im_start|>{{ m.role }}{{ '\\n' + m.content if m.content else '' }}\
    {%- for c in m.tool_calls or [] %}{{- '\\n<tool_call>\\n<function=' + c.function.name + '>\\n' }}\
    {%- for name, value in c.function.arguments|items %}{{- '<parameter=' + name + '>\\n' + value + '\\n</parameter>\\n' }}\
    {%- endfor %}{{- '</function>\\n</tool_call>' }}{%- endfor %}<|im_end|>\n{%- endfor %}\
    {%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}";

fn coder() -> ToolCallFormat {
    ChatTemplate::new("template", CODER).unwrap().tool_call_format().unwrap()
}

fn functions() -> Arc<[OfferedFunction]> {
    let parameters = json!({"properties": {
        "s": {"type": "string"}, "i": {"type": "integer"}, "x": {"type": "number"}, "b": {"type": "boolean"},
        "l": {"type": "array"}, "o": {"type": "object"}, "n": {"type": ["integer", "null"]},
        "e": {"enum": ["a", 1]}, "any": {"anyOf": [{"type": "string"}, {"type": "object"}]},
    }});
    [OfferedFunction { name: "f".to_owned(), parameters }].into()
}

/// Parses a reply in the given pieces.
fn parsed(format: &ToolCallFormat, pieces: &[String]) -> ReplyContent {
    let mut parser = ToolCallParser::new(Arc::new(format.clone()), functions());
    let mut whole = ReplyContent::default();
    pieces.iter().for_each(|piece| whole.append(parser.push(piece)));
    whole.append(parser.finish());
    assert_eq!(parser.n_calls(), whole.calls.len());
    whole
}

/// Compares the calls of a reply, whole, by the character, and in random pieces.
#[track_caller]
fn check(format: &ToolCallFormat, reply: &str, content: &str, calls: &[(&str, &str)]) {
    let chars: Vec<char> = reply.chars().collect();
    let mut random = ChaCha8Rng::from_seed([7; 32]);
    for longest in [chars.len().max(1), 1, 2, 3, 4, 6, 9, 15, 30] {
        let mut pieces = Vec::new();
        let mut rest = chars.as_slice();
        while !rest.is_empty() {
            let n = if longest == chars.len() { longest } else { random.random_range(1..=longest.min(rest.len())) };
            pieces.push(rest[..n].iter().collect::<String>());
            rest = &rest[n..];
        }
        let whole = parsed(format, &pieces);
        let name = |call: &ToolCallPart| call.name.clone().unwrap();
        let found: Vec<(String, &str)> = whole.calls.iter().map(|call| (name(call), &*call.arguments)).collect();
        let found: Vec<(&str, &str)> = found.iter().map(|(name, arguments)| (&**name, *arguments)).collect();
        assert_eq!((whole.text.as_str(), &*found), (content, calls), "{reply:?} in pieces {pieces:?}");
        assert!(whole.calls.iter().map(|call| call.index).eq(0..calls.len()));
    }
}

#[test]
fn calls_of_qwen_and_hermes_are_between_tags() {
    let arguments = "{\"a\": \"}</tool_call> \\\"\", \"n\": 12345678901234567890123}";
    let one = format!("<tool_call>\n{{\"name\": \"f\", \"arguments\": {arguments}}}\n</tool_call>");
    for format in [hermes(), of_template("qwen2_5")] {
        check(&format, &one, "", &[("f", arguments)]);
        check(&format, &format!("I call.\n\n{one}\n{one}"), "I call.", &[("f", arguments), ("f", arguments)]);
        check(&format, "<tool_call>{\"name\":\"g\",\"arguments\":{}}</tool_call> So.", "So.", &[("g", "{}")]);
        check(&format, "<tool_call>{\"name\":\"g\",\"parameters\":{}}", "", &[("g", "{}")]);
        check(&format, "<tool_call>{\"arguments\":\"{\\\"a\\\":1}\",\"name\":\"g\"}", "", &[("g", "{\"a\":1}")]);
        check(&format, "<tool_call>{\"arguments\": {\"a\": [1]}, \"name\":\"g\"}", "", &[("g", "{\"a\":[1]}")]);
        // A brace is missing.
        check(&format, "<tool_call>{\"name\":\"g\",\"arguments\":{}\n</tool_call> So.", "So.", &[("g", "{}")]);
    }
}

#[test]
fn a_text_that_is_no_call_is_content() {
    for reply in [
        "a <tool_call>\n{\"name\": \"f\", \"argum",
        "<tool_call>\nf(1)\n</tool_call>",
        "<tool_call>{\"name\": 5, \"arguments\": {}}</tool_call>",
        "<tool_call>{\"name\": \"f\", \"arguments\": [1]}</tool_call> b",
        "<tool_call>{\"name\": \"f\" \"arguments\": {}}</tool_call>",
        "<tool_call>\n</tool_call>",
        "<tool_call>",
        "a < b <tool",
        "{\"name\": \"f\", \"arguments\": {}}",
    ] {
        check(&hermes(), reply, reply, &[]);
    }
    let first = "<tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>";
    check(&hermes(), &format!("{first}<tool_call>{{\"name\""), "<tool_call>{\"name\"", &[("f", "{}")]);
    check(&hermes(), &format!("{first}\n<tool_call>5"), "<tool_call>5", &[("f", "{}")]);
}

#[test]
fn a_reply_that_ends_in_a_call_has_incomplete_arguments() {
    check(&hermes(), "a <tool_call>{\"name\":\"f\",\"arguments\":{\"a\": [1", "a", &[("f", "{\"a\": [1")]);
    check(&hermes(), "<tool_call>{\"name\":\"f\",\"arguments\":{\"a\": 1}, \"id\"", "", &[("f", "{\"a\": 1}")]);
    check(&coder(), "<tool_call>\n<function=f>\n<parameter=s>\na\nb", "", &[("f", "{\"s\": \"a\\nb")]);
}

#[test]
fn a_call_without_a_tag_begins_the_reply_and_is_of_a_known_function() {
    for tag in ["", " ", "<|python_tag|>"] {
        let reply = |rest: &str| format!("{tag}{rest}");
        let call = "{\"name\": \"f\", \"parameters\": {\"a\": 1}}";
        check(&llama(), &reply(call), "", &[("f", "{\"a\": 1}")]);
        check(&llama(), &reply(&format!("{call}; {call}")), "", &[("f", "{\"a\": 1}"), ("f", "{\"a\": 1}")]);
        check(&llama(), &reply(&format!("{call}; So.")), "; So.", &[("f", "{\"a\": 1}")]);
    }
    for reply in [
        "{\"name\": \"Ada\", \"parameters\": {}}",
        "{\"a\": {}}",
        "See {\"name\": \"f\", \"parameters\": {}}",
        "<|python_tag|>f.call(query=\"a\")",
        "<|python",
        "{",
        " ",
    ] {
        check(&llama(), reply, reply, &[]);
    }
}

#[test]
fn calls_of_mistral_are_an_array_or_have_the_name_first() {
    let call = "{\"name\": \"f\", \"arguments\": {\"a\": [1]}, \"id\": \"abcdefghi\"}";
    let arguments = "{\"a\": [1]}";
    check(&array(), &format!("[TOOL_CALLS] [{call}, {call}]"), "", &[("f", arguments), ("f", arguments)]);
    check(&array(), &format!("[TOOL_CALLS][{call}]"), "", &[("f", arguments)]);
    check(&array(), &format!("[TOOL_CALLS] [{call}] ; a"), "; a", &[("f", arguments)]);
    check(&named(), "[TOOL_CALLS]f[ARGS]{\"a\": 1}[TOOL_CALLS]g[ARGS]{}", "", &[("f", "{\"a\": 1}"), ("g", "{}")]);
    check(&named(), "b[TOOL_CALLS]f[ARGS]5", "b[TOOL_CALLS]f[ARGS]5", &[]);
}

#[test]
fn text_after_a_call_is_complete() {
    let call = "<tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>";
    for text in ["[1] is the source", "] a", ", a", "; a", ",;[a", "[", "[</tool_call> a"] {
        check(&hermes(), &format!("{call}\n{text}"), text, &[("f", "{}")]);
    }
}

#[test]
fn parameters_of_qwen3_coder_have_the_types_of_their_schemas() {
    let reply = |parameters: &[(&str, &str)]| {
        let one = |(name, value): &(&str, &str)| format!("<parameter={name}>\n{value}\n</parameter>\n");
        let all: String = parameters.iter().map(one).collect();
        format!("<tool_call>\n<function=f>\n{all}</function>\n</tool_call>")
    };
    let check_arguments =
        |parameters: &[(&str, &str)], want: &str| check(&coder(), &reply(parameters), "", &[("f", want)]);
    check_arguments(&[], "{}");
    for (name, text, want) in [
        ("s", "5", "\"5\""),
        ("s", "", "\"\""),
        ("s", "\na \"b\" <parameter> é\n", "\"\\na \\\"b\\\" <parameter> é\\n\""),
        ("unknown", "true", "\"true\""),
        ("i", "-5", "-5"),
        ("i", "12345678901234567890123", "12345678901234567890123"),
        ("i", "five", "\"five\""),
        ("x", "1.5", "1.5"),
        ("x", "2", "2"),
        ("b", "True", "true"),
        ("b", "false", "false"),
        ("b", "1", "\"1\""),
        ("l", "[1, \"a\"]", "[1,\"a\"]"),
        ("o", "{\"a\": {\"b\": null}}", "{\"a\":{\"b\":null}}"),
        ("n", "None", "null"),
        ("n", "7", "7"),
        ("e", "a", "\"a\""),
        ("e", "1", "1"),
        ("any", "{\"a\": 1}", "{\"a\":1}"),
        ("any", "[1]", "\"[1]\""),
    ] {
        check_arguments(&[(name, text)], &format!("{{\"{name}\": {want}}}"));
    }
    check_arguments(&[("s", "a"), ("i", "5"), ("unknown", "b")], "{\"s\": \"a\", \"i\": 5, \"unknown\": \"b\"}");
    let two = format!("So.\n{}\n{}\nDone.", reply(&[("i", "5")]), reply(&[("s", "a")]));
    check(&coder(), &two, "So.Done.", &[("f", "{\"i\": 5}"), ("f", "{\"s\": \"a\"}")]);
}

#[test]
fn ends_of_parameters_may_be_missing() {
    for (call, want) in [
        ("<function=f><parameter=s>a</parameter></function>", "{\"s\": \"a\"}"),
        ("<function=f>\n<parameter=s>\na\n<parameter=i>\n5\n</parameter>\n</function>", "{\"s\": \"a\", \"i\": 5}"),
        ("<function=f>\n<parameter=i>\n5\n</function>", "{\"i\": 5}"),
        ("<function=f>\n<parameter=i>\n5\n</parameter>", "{\"i\": 5}"),
    ] {
        check(&coder(), &format!("<tool_call>\n{call}\n</tool_call>"), "", &[("f", want)]);
    }
    for reply in ["<tool_call>\nf(1)", "<tool_call>\n<function=f\n>", "<tool_call>{\"name\": \"f\", \"arguments\": {}}"]
    {
        check(&coder(), reply, reply, &[]);
    }
}

#[test]
fn arguments_are_returned_as_they_are_written() {
    let mut parser = ToolCallParser::new(Arc::new(hermes()), functions());
    let mut push = |text: &str| parser.push(text).calls;
    let part = |name: Option<&str>, arguments: &str| {
        vec![ToolCallPart { index: 0, name: name.map(str::to_owned), arguments: arguments.to_owned() }]
    };
    assert_eq!(push("<tool_call>\n{\"name\": \"f\", \"arg"), []);
    assert_eq!(push("uments\": {"), part(Some("f"), "{"));
    assert_eq!(push("\"a\": \"x"), part(None, "\"a\": \"x"));
    assert_eq!(push("}\"}"), part(None, "}\"}"));
    assert_eq!(push("}\n</tool_call>"), []);
    let mut parser = ToolCallParser::new(Arc::new(coder()), functions());
    let mut push = |text: &str| parser.push(text).calls;
    assert_eq!(push("<tool_call>\n<function=f>"), part(Some("f"), ""));
    assert_eq!(push("\n<parameter=s>\nfn main"), part(None, "{\"s\": \"fn main"));
    assert_eq!(push("() {}\n</para"), part(None, "() {}"));
    assert_eq!(push("meter>\n</function>"), part(None, "\"}"));
}

#[test]
fn a_parser_without_a_format_returns_content() {
    let mut parser = ToolCallParser::default();
    assert_eq!(parser.push("<tool_call>{").text, "<tool_call>{");
    assert_eq!(parser.finish(), ReplyContent::default());
}
