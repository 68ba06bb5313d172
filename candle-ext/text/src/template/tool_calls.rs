//! Format of tool calls, read from a chat that the template renders.

use serde_json::{Map, Value as Json, json};

use super::{AddGenerationPrompt, ChatTemplate};
use crate::conversation::{Conversation, Message};

/// Text of tool calls that the assistant writes: the opening, calls with separators between them, and the closing.
///
/// A call has a name and arguments. Both are fields of a JSON object, or the name precedes the arguments. These are a JSON object,
/// or one text for each parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCallFormat {
    /// Text before the first call: `<tool_call>` and a line break.
    pub opening: String,
    /// Text of a call before the name: `{"name": "`.
    pub before_name: String,
    /// Text between the name and the arguments: `", "arguments": `.
    pub between: String,
    /// Text of a call after the arguments: `}`.
    pub after_arguments: String,
    /// Text between two calls; `None` if the template renders only one.
    pub separator: Option<String>,
    /// Text after the last call.
    pub closing: String,
    /// Keys of the JSON object; `None` if the call is no object.
    pub keys: Option<ToolCallKeys>,
    /// Texts of the parameters; `None` if the arguments are a JSON object.
    pub parameters: Option<ToolCallParameters>,
}

/// Text of each parameter of a call, in which a string has no quotes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCallParameters {
    /// Text before the name: `<parameter=`.
    pub before_name: String,
    /// Text between the name and the value: `>` and a line break.
    pub between: String,
    /// Text after the value: a line break, `</parameter>` and a line break.
    pub after_value: String,
}

/// Keys of the JSON object of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCallKeys {
    /// Key of the function's name.
    pub name: String,
    /// Key of the arguments.
    pub arguments: String,
}

/// Names of the functions that the example chat calls.
const NAMES: [&str; 2] = ["candlewickfirst", "candlewicksecond"];

/// Keys and values of their arguments.
const KEY: &str = "candlewickkey";
const OTHER_KEY: &str = "candlewickother";
const VALUES: [&str; 2] = ["candlewickvalue", "candlewickword"];

/// End tag of the thinking that a template may print before the calls.
const END_OF_THINKING: &str = "</think>";

impl ChatTemplate {
    /// Returns the format in which the assistant calls tools. `None` if the template renders no calls, or in another format.
    pub fn tool_call_format(&self) -> Option<ToolCallFormat> {
        // Some templates raise an error if a message has two calls.
        self.format_of(2).or_else(|| self.format_of(1))
    }

    fn format_of(&self, n_calls: usize) -> Option<ToolCallFormat> {
        let chat = example(n_calls);
        let printed = self.print(&chat, AddGenerationPrompt::No).ok()?;
        let ends = printed.ends_of_turn();
        let span = printed.turns().ok()?.into_iter().find(|span| span.message == Some(1))?;
        let written = printed.text[span.range].trim_end();
        let written = ends.iter().find_map(|end| written.strip_suffix(end.as_str())).unwrap_or(written);
        let written = written.split_once(END_OF_THINKING).map_or(written, |(_, rest)| rest.trim_start());
        let calls = NAMES[..n_calls].iter().map(|name| PrintedCall::find(written, name)).collect::<Option<Vec<_>>>()?;
        let (first, last) = (calls.first()?, calls.last()?);
        let separator = match &*calls {
            [first, second] => Some(written.get(first.end..second.start)?.to_owned()),
            _ => None,
        };
        Some(ToolCallFormat {
            opening: written[..first.start].to_owned(),
            before_name: first.before_name.clone(),
            between: first.between.clone(),
            after_arguments: first.after_arguments.clone(),
            separator,
            closing: written[last.end..].trim_end().to_owned(),
            keys: first.keys.clone(),
            parameters: first.parameters.clone(),
        })
    }
}

/// Returns a chat of which the answer has tool calls.
fn example(n_calls: usize) -> Conversation {
    let text = json!({"type": "string", "description": "d"});
    let parameters = json!({"type": "object", "properties": {KEY: text, OTHER_KEY: text}});
    let tool = |name: &&str| json!({"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}});
    // Mistral's template requires ids of nine letters and digits.
    let call = |name: &&str| json!({"id": &name[name.len() - 9..], "type": "function", "function": {"name": name, "arguments": {KEY: VALUES[0], OTHER_KEY: VALUES[1]}}});
    let answer = Message::new("assistant", "").with("tool_calls", NAMES[..n_calls].iter().map(call).collect());
    Conversation::new([Message::new("user", "question"), answer]).with_tools(NAMES.iter().map(tool).collect())
}

/// A call in the printed text.
struct PrintedCall {
    /// Range of the call.
    start: usize,
    end: usize,
    before_name: String,
    between: String,
    after_arguments: String,
    keys: Option<ToolCallKeys>,
    parameters: Option<ToolCallParameters>,
}

impl PrintedCall {
    fn find(text: &str, name: &str) -> Option<Self> {
        Self::find_json(text, name).or_else(|| Self::find_parameters(text, name))
    }

    fn find_json(text: &str, name: &str) -> Option<Self> {
        let at = text.find(name)?;
        let after = at + name.len();
        let arguments = after + text[after..].find(KEY)?;
        // The arguments are an object that begins with the key.
        let arguments = after + text[after..arguments].rfind('{')?;
        let object = text[..at].rmatch_indices('{').find_map(|(start, _)| {
            let (fields, n_bytes) = object_at(&text[start..])?;
            Some((start, start + n_bytes, keys(&fields, name)?))
        });
        if let Some((start, end, keys)) = object {
            let (before_name, between) = (text[start..at].to_owned(), text[after..arguments].to_owned());
            let after_arguments = "}".to_owned();
            return Some(Self {
                start,
                end,
                before_name,
                between,
                after_arguments,
                keys: Some(keys),
                parameters: None,
            });
        }
        let (_, n_bytes) = object_at(&text[arguments..])?;
        let between = text[after..arguments].to_owned();
        let (end, before_name, after_arguments) = (arguments + n_bytes, String::new(), String::new());
        let call = Self { start: at, end, before_name, between, after_arguments, keys: None, parameters: None };
        Some(call).filter(|call| !call.between.trim().is_empty())
    }

    /// Finds a call such as `<function=NAME>`, with a tag for each parameter, and `</function>`.
    fn find_parameters(text: &str, name: &str) -> Option<Self> {
        let at = text.find(name)?;
        let start = text[..at].rfind('<')?;
        let after = at + name.len();
        let key = after + text[after..].find(KEY)?;
        let opening = after + text[after..key].rfind('<')?;
        let before_name = &text[opening..key];
        let (between, rest) = text[key + KEY.len()..].split_once(VALUES[0])?;
        let (after_first, rest) = rest.split_once(OTHER_KEY)?;
        let after_value = after_first.strip_suffix(before_name)?;
        let rest = rest.strip_prefix(between)?.strip_prefix(VALUES[1])?.strip_prefix(after_value)?;
        let after_arguments = &rest[..=rest.find('>')?];
        // A name between two tags would look like the content of one.
        let has_end = after_arguments.starts_with("</") && !text[start..at].contains('>');
        has_end.then(|| Self {
            start,
            end: text.len() - rest.len() + after_arguments.len(),
            before_name: text[start..at].to_owned(),
            between: text[after..opening].to_owned(),
            after_arguments: after_arguments.to_owned(),
            keys: None,
            parameters: Some(ToolCallParameters {
                before_name: before_name.to_owned(),
                between: between.to_owned(),
                after_value: after_value.to_owned(),
            }),
        })
    }
}

/// Returns the keys of a call's object, in which the name precedes the arguments.
fn keys(fields: &Map<String, Json>, name: &str) -> Option<ToolCallKeys> {
    let position = |is_it: &dyn Fn(&Json) -> bool| fields.iter().position(|(_, value)| is_it(value));
    let at_name = position(&|value| value == name)?;
    let at_arguments = position(&|value| value.get(KEY).is_some())?;
    let key = |at: usize| fields.keys().nth(at).cloned();
    (at_name < at_arguments).then_some(ToolCallKeys { name: key(at_name)?, arguments: key(at_arguments)? })
}

/// Parses the JSON object at the beginning of a text. Returns its fields and its number of bytes.
fn object_at(text: &str) -> Option<(Map<String, Json>, usize)> {
    let mut values = serde_json::Deserializer::from_str(text).into_iter::<Map<String, Json>>();
    let fields = values.next()?.ok()?;
    Some((fields, values.byte_offset()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::path::Path;

    use super::*;

    fn format_of(template: &str) -> Option<ToolCallFormat> {
        ChatTemplate::new("template", template).unwrap().tool_call_format()
    }

    fn of_fixture(family: &str) -> Option<ToolCallFormat> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/chat").join(family);
        format_of(&std::fs::read_to_string(folder.join("chat_template.jinja")).unwrap())
    }

    /// Compares the parts of a format: opening, before name, between, after, separator, closing.
    #[track_caller]
    fn check(found: Option<ToolCallFormat>, parts: [&str; 4], separator: Option<&str>, closing: &str) {
        let found = found.unwrap();
        let own = [&found.opening, &found.before_name, &found.between, &found.after_arguments];
        assert_eq!(own, parts);
        assert_eq!((found.separator.as_deref(), found.closing.as_str()), (separator, closing));
    }

    #[test]
    fn templates_of_families_show_their_formats() {
        for family in ["qwen2_5", "qwen3"] {
            let parts = ["<tool_call>\n", "{\"name\": \"", "\", \"arguments\": ", "}"];
            check(of_fixture(family), parts, Some("\n</tool_call>\n<tool_call>\n"), "\n</tool_call>");
        }
        check(of_fixture("llama3_2"), ["", "{\"name\": \"", "\", \"parameters\": ", "}"], None, "");
        assert_eq!(of_fixture("llama3_2").unwrap().keys.unwrap().arguments, "parameters");
        assert_eq!(of_fixture("smollm2"), None);
        assert_eq!(of_fixture("llama3"), None);
    }

    /// Returns a template that prints the text of messages, and that of calls by `calls`.
    fn template(calls: &str) -> String {
        format!(
            "{{%- for m in messages %}}[{{{{ m.role }}}}]{{%- if m.tool_calls %}}{calls}{{%- else %}}{{{{ m.content }}}}{{%- endif %}}\
             </s>{{%- endfor %}}{{%- if add_generation_prompt %}}[assistant]{{%- endif %}}"
        )
    }

    #[test]
    fn the_format_may_be_an_array_or_a_name_before_the_arguments() {
        let mistral = "[TOOL_CALLS] [{%- for c in m.tool_calls %}{\"name\": \"{{ c.function.name }}\", \"arguments\": \
                       {{ c.function.arguments | tojson }}, \"id\": \"{{ c.id }}\"}{%- if not loop.last %}, {% endif %}\
                       {%- endfor %}]";
        let parts = ["[TOOL_CALLS] [", "{\"name\": \"", "\", \"arguments\": ", "}"];
        check(format_of(&template(mistral)), parts, Some(", "), "]");
        let named = "{%- for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[ARGS]\
                     {{ c.function.arguments | tojson }}{%- endfor %}";
        check(format_of(&template(named)), ["[TOOL_CALLS]", "", "[ARGS]", ""], Some("[TOOL_CALLS]"), "");
        assert_eq!(format_of(&template(named)).unwrap().keys, None);
    }

    #[test]
    fn the_parameters_may_be_texts_between_tags() {
        // The calls of Qwen3-Coder's template.
        let coder = "{%- for c in m.tool_calls %}{{- '\n<tool_call>\n<function=' + c.function.name + '>\n' }}\
                     {%- for name, value in c.function.arguments|items %}{{- '<parameter=' + name + '>\n' }}\
                     {{- value if value is string else value | tojson }}{{- '\n</parameter>\n' }}{%- endfor %}\
                     {{- '</function>\n</tool_call>' }}{%- endfor %}";
        let found = format_of(&template(coder));
        let parameters = found.as_ref().unwrap().parameters.clone().unwrap();
        let separator = "\n</tool_call>\n<tool_call>\n";
        check(found, ["\n<tool_call>\n", "<function=", ">\n", "</function>"], Some(separator), "\n</tool_call>");
        let parts = [&*parameters.before_name, &*parameters.between, &*parameters.after_value];
        assert_eq!(parts, ["<parameter=", ">\n", "\n</parameter>\n"]);
    }

    #[test]
    fn a_format_without_json_is_not_known() {
        for calls in
            ["", "{{ m.tool_calls[0].function.name }}()", "<f><{{ m.tool_calls[0].function.name }}>candlewickkey</f>"]
        {
            assert_eq!(format_of(&template(calls)), None, "{calls}");
        }
    }
}
