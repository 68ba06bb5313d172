//! Tool calls in a streamed reply, in the format that the chat template renders.

use std::sync::Arc;

use candlewick_text::long_integer;
use candlewick_text::template::{ToolCallFormat, ToolCallKeys};
use serde_json::{Map, Value as Json};

/// Call of a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    /// Name of the function.
    pub name: String,
    /// JSON object of the arguments.
    pub arguments: String,
}

/// Content and calls of a reply, or of its newest part.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReplyContent {
    /// Text around the calls.
    pub text: String,
    /// Complete calls.
    pub calls: Vec<ToolCall>,
}

/// Separates a streamed reply into content and tool calls. A call that cannot be parsed is content, and so is all text
/// after it.
///
/// The default parser returns all text as content.
#[derive(Clone, Debug, Default)]
pub struct ToolCallParser {
    format: Option<Arc<ToolCallFormat>>,
    /// Functions of the request.
    names: Arc<[String]>,
    state: ParserState,
    /// Text of the call, or text that may begin one.
    held: String,
    /// Text between the last call and `held`, such as a tag.
    skipped: String,
    scanned: ObjectScanner,
    n_calls: usize,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum ParserState {
    /// Text before or after calls.
    #[default]
    Content,
    /// Text of calls.
    Calls,
    /// Text that is not parsed.
    Plain,
}

/// Position of a JSON object's end, found without reading a byte twice.
#[derive(Clone, Copy, Debug, Default)]
struct ObjectScanner {
    n_bytes: usize,
    depth: usize,
    is_in_string: bool,
    is_escaped: bool,
}

/// Progress of the parser.
enum ParserStep {
    /// The next step may read more of the text.
    Continue,
    /// More text is needed.
    Wait,
}

impl ObjectScanner {
    /// Reads on in a text that begins with the object. Returns the number of bytes of the object if it is complete.
    fn end(&mut self, text: &str) -> Option<usize> {
        for byte in &text.as_bytes()[self.n_bytes..] {
            self.n_bytes += 1;
            match byte {
                _ if self.is_escaped => self.is_escaped = false,
                b'\\' if self.is_in_string => self.is_escaped = true,
                b'"' => self.is_in_string = !self.is_in_string,
                _ if self.is_in_string => {}
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' => {
                    self.depth = self.depth.saturating_sub(1);
                    if self.depth == 0 {
                        return Some(self.n_bytes);
                    }
                }
                _ => {}
            }
        }
        None
    }
}

impl ToolCallParser {
    /// Creates the parser of a reply that may call these functions.
    pub fn new(format: Arc<ToolCallFormat>, names: Arc<[String]>) -> Self {
        Self { format: Some(format), names, ..Self::default() }
    }

    /// Adds text and returns the parts that are certain.
    pub fn push(&mut self, text: &str) -> ReplyContent {
        self.held.push_str(text);
        let mut parsed = ReplyContent::default();
        let Some(format) = self.format.clone() else {
            parsed.text = std::mem::take(&mut self.held);
            return parsed;
        };
        while let ParserStep::Continue = self.step(&format, &mut parsed) {}
        self.n_calls += parsed.calls.len();
        parsed
    }

    /// Returns the remaining text. An incomplete call is content.
    pub fn finish(&mut self) -> ReplyContent {
        let held = std::mem::take(&mut self.held);
        if self.state != ParserState::Calls || self.n_calls == 0 {
            return ReplyContent { text: std::mem::take(&mut self.skipped) + &held, calls: Vec::new() };
        }
        let text = self.text_after_call() + &held;
        // The rest is the beginning of another call, or of the end.
        let is_separator = |format: &ToolCallFormat| {
            let parts = [&*format.opening, &*format.closing, format.separator.as_deref().unwrap_or_default()];
            parts.iter().any(|part| part.trim().starts_with(text.trim()))
        };
        let is_incomplete = self.format.as_deref().is_some_and(is_separator);
        let text = if is_incomplete { String::new() } else { text };
        ReplyContent { text, calls: Vec::new() }
    }

    fn step(&mut self, format: &ToolCallFormat, parsed: &mut ReplyContent) -> ParserStep {
        match self.state {
            ParserState::Content => self.find_opening(format, parsed),
            ParserState::Calls => self.read_call(format, parsed),
            ParserState::Plain => {
                parsed.text += &std::mem::take(&mut self.held);
                ParserStep::Wait
            }
        }
    }

    fn find_opening(&mut self, format: &ToolCallFormat, parsed: &mut ReplyContent) -> ParserStep {
        let tag = tag(&format.opening);
        if tag.is_empty() {
            // The whole reply is a call, or none of it is.
            return match self.held.trim_start().chars().next() {
                None => ParserStep::Wait,
                Some(first) => {
                    self.state = if first == '{' { ParserState::Calls } else { ParserState::Plain };
                    ParserStep::Continue
                }
            };
        }
        if let Some((before, rest)) = self.held.split_once(tag) {
            parsed.text += before.trim_end();
            self.skipped = self.held[before.trim_end().len()..self.held.len() - rest.len()].to_owned();
            (self.state, self.held) = (ParserState::Calls, rest.to_owned());
            return ParserStep::Continue;
        }
        let may_begin_the_tag = |at: &usize| tag.starts_with(self.held[*at..].trim_start());
        let at = self.held.char_indices().map(|(at, _)| at).find(may_begin_the_tag).unwrap_or(self.held.len());
        let rest = self.held.split_off(at);
        parsed.text += &std::mem::replace(&mut self.held, rest);
        ParserStep::Wait
    }

    /// Reads the next call, or the text between two calls.
    fn read_call(&mut self, format: &ToolCallFormat, parsed: &mut ReplyContent) -> ParserStep {
        if self.scanned.n_bytes == 0 && self.skip_separators(format) {
            return ParserStep::Continue;
        }
        if self.held.is_empty() {
            return ParserStep::Wait;
        }
        let at_object = match &format.keys {
            Some(_) => Some(0).filter(|_| self.held.starts_with('{')),
            None => self.held.find(format.between.trim()).map(|at| at + format.between.trim().len()),
        };
        let is_waiting = self.separators(format).any(|text| text.starts_with(&self.held));
        let Some(at_object) = at_object else {
            // A name precedes the arguments. It is short, and on one line.
            let may_be_name = format.keys.is_none() && self.held.len() < 200 && !self.held.contains('\n');
            return if is_waiting || may_be_name { ParserStep::Wait } else { self.leave_calls(parsed) };
        };
        let at_object = at_object + self.held[at_object..].len() - self.held[at_object..].trim_start().len();
        if !self.held[at_object..].starts_with('{') {
            return if self.held.len() == at_object { ParserStep::Wait } else { self.give_up(parsed) };
        }
        let Some(n_bytes) = self.scanned.end(&self.held[at_object..]) else { return ParserStep::Wait };
        let end = at_object + n_bytes;
        match self.call(format, &self.held[..at_object], &self.held[at_object..end]) {
            Some(call) => {
                parsed.calls.push(call);
                self.held.drain(..end);
                self.skipped.clear();
                self.scanned = ObjectScanner::default();
                ParserStep::Continue
            }
            None => self.give_up(parsed),
        }
    }

    /// Removes text between calls from the beginning of the held text. Returns true if there was any.
    fn skip_separators(&mut self, format: &ToolCallFormat) -> bool {
        let is_longer = |text: &String| text.len() > self.held.len() && text.starts_with(&self.held);
        if self.separators(format).any(|text| is_longer(&text)) {
            return false;
        }
        let separator = self.separators(format).find(|text| self.held.starts_with(text.as_str()));
        let n_bytes = separator.map_or(self.held.len() - self.held.trim_start().len(), |text| text.len());
        self.skipped.extend(self.held.drain(..n_bytes));
        n_bytes > 0
    }

    /// Returns the texts that may precede a call or follow it. Models write white space and brackets differently from the template.
    fn separators<'f>(&self, format: &'f ToolCallFormat) -> impl Iterator<Item = String> + use<'f> {
        let texts = [&*format.opening, &*format.closing, format.separator.as_deref().unwrap_or_default()];
        let texts = texts.into_iter().flat_map(|text| text.split_whitespace().chain([tag(text)]));
        texts.chain(["[", "]", ",", ";"]).filter(|text| !text.is_empty()).map(str::to_owned)
    }

    /// Removes the skipped text, and returns it without the end of the last call.
    fn text_after_call(&mut self) -> String {
        let skipped = std::mem::take(&mut self.skipped);
        let text = skipped.trim_start();
        let closing = self.format.as_deref().map_or("", |format| format.closing.trim());
        text.strip_prefix(closing).unwrap_or(text).trim_start().to_owned()
    }

    fn has_called(&self, parsed: &ReplyContent) -> bool {
        self.n_calls > 0 || !parsed.calls.is_empty()
    }

    /// Returns the call of an object, with the text before it.
    fn call(&self, format: &ToolCallFormat, before: &str, object: &str) -> Option<ToolCall> {
        let value = long_integer::parse(object).ok()?;
        let (name, arguments) = match &format.keys {
            Some(keys) => of_object(value, keys)?,
            None => (before.trim().strip_suffix(format.between.trim())?.trim().to_owned(), value),
        };
        // Without a tag, the object may be content.
        let is_known = !tag(&format.opening).is_empty() || self.names.contains(&name);
        let arguments = long_integer::to_text(&arguments.to_string()).into_owned();
        (is_known && !name.is_empty()).then_some(ToolCall { name, arguments })
    }

    /// Continues with content after the calls.
    fn leave_calls(&mut self, parsed: &mut ReplyContent) -> ParserStep {
        if !self.has_called(parsed) {
            return self.give_up(parsed);
        }
        parsed.text += &self.text_after_call();
        self.state = if format_has_tag(self.format.as_deref()) { ParserState::Content } else { ParserState::Plain };
        ParserStep::Continue
    }

    /// Returns all text since the last call as content.
    fn give_up(&mut self, parsed: &mut ReplyContent) -> ParserStep {
        parsed.text += &match self.has_called(parsed) {
            true => self.text_after_call(),
            false => std::mem::take(&mut self.skipped),
        };
        self.state = ParserState::Plain;
        ParserStep::Continue
    }
}

/// Returns the text that begins a call in every reply: without white space and brackets at its ends.
fn tag(opening: &str) -> &str {
    opening.trim().trim_end_matches(['[', '{']).trim()
}

fn format_has_tag(format: Option<&ToolCallFormat>) -> bool {
    format.is_some_and(|format| !tag(&format.opening).is_empty())
}

/// Returns the name and the arguments of a call's object. Models of a family differ in the key of the arguments.
fn of_object(value: Json, keys: &ToolCallKeys) -> Option<(String, Json)> {
    let Json::Object(mut fields) = value else { return None };
    let name = fields.get(&keys.name)?.as_str()?.to_owned();
    let arguments = [keys.arguments.as_str(), "arguments", "parameters"].into_iter().find_map(|key| fields.remove(key));
    match arguments {
        Some(Json::Object(arguments)) => Some((name, Json::Object(arguments))),
        Some(Json::String(text)) => Some((name, serde_json::from_str::<Map<String, Json>>(&text).ok()?.into())),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn format(opening: &str, separator: Option<&str>, closing: &str) -> ToolCallFormat {
        ToolCallFormat {
            opening: opening.to_owned(),
            before_name: "{\"name\": \"".to_owned(),
            between: "\", \"arguments\": ".to_owned(),
            after_arguments: "}".to_owned(),
            separator: separator.map(str::to_owned),
            closing: closing.to_owned(),
            keys: Some(ToolCallKeys { name: "name".to_owned(), arguments: "arguments".to_owned() }),
        }
    }

    fn hermes() -> ToolCallFormat {
        format("<tool_call>\n", Some("\n</tool_call>\n<tool_call>\n"), "\n</tool_call>")
    }

    fn named() -> ToolCallFormat {
        ToolCallFormat {
            before_name: String::new(),
            between: "[ARGS]".to_owned(),
            after_arguments: String::new(),
            keys: None,
            ..format("[TOOL_CALLS]", Some("[TOOL_CALLS]"), "")
        }
    }

    /// Parses a reply in pieces of every size.
    #[track_caller]
    fn check(format: &ToolCallFormat, reply: &str, content: &str, calls: &[(&str, &str)]) {
        let chars: Vec<char> = reply.chars().collect();
        for size in 1..=chars.len() {
            let mut parser = ToolCallParser::new(Arc::new(format.clone()), ["f".to_owned()].into());
            let mut whole = ReplyContent::default();
            let pieces: Vec<String> = chars.chunks(size).map(|piece| piece.iter().collect()).collect();
            let parts = pieces.iter().map(|piece| parser.push(piece)).collect::<Vec<_>>();
            for part in parts.into_iter().chain([parser.finish()]) {
                whole.text += &part.text;
                whole.calls.extend(part.calls);
            }
            let found: Vec<(&str, &str)> = whole.calls.iter().map(|call| (&*call.name, &*call.arguments)).collect();
            assert_eq!((whole.text.as_str(), &*found), (content, calls), "{reply:?} in pieces of {size}");
        }
    }

    #[test]
    fn calls_of_qwen_and_hermes_are_between_tags() {
        let one = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"}</tool_call> \\\"\", \"n\": 12345678901234567890123}}\n</tool_call>";
        let arguments = "{\"a\":\"}</tool_call> \\\"\",\"n\":12345678901234567890123}";
        check(&hermes(), one, "", &[("f", arguments)]);
        check(&hermes(), &format!("I call.\n\n{one}\n{one}"), "I call.", &[("f", arguments), ("f", arguments)]);
        check(&hermes(), "<tool_call>{\"name\":\"g\",\"arguments\":{}}</tool_call> So.", "So.", &[("g", "{}")]);
        check(&hermes(), "<tool_call>{\"name\":\"g\",\"parameters\":{}}", "", &[("g", "{}")]);
        check(&hermes(), "<tool_call>{\"arguments\":\"{\\\"a\\\":1}\",\"name\":\"g\"}", "", &[("g", "{\"a\":1}")]);
    }

    #[test]
    fn a_call_that_cannot_be_parsed_is_content() {
        for reply in [
            "a <tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}",
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
    fn a_call_without_a_tag_is_the_whole_reply_and_of_a_known_function() {
        let llama = format("", None, "");
        check(&llama, "{\"name\": \"f\", \"parameters\": {\"a\": 1}}", "", &[("f", "{\"a\":1}")]);
        check(
            &llama,
            " {\"name\": \"f\", \"arguments\": {}}; {\"name\": \"f\", \"arguments\": {}}",
            "",
            &[("f", "{}"), ("f", "{}")],
        );
        for reply in [
            "{\"name\": \"Ada\", \"parameters\": {}}",
            "{\"a\": {}}",
            "See {\"name\": \"f\", \"parameters\": {}}",
            "{",
            " ",
        ] {
            check(&llama, reply, reply, &[]);
        }
    }

    #[test]
    fn calls_of_mistral_are_an_array_or_have_the_name_first() {
        let array = format("[TOOL_CALLS] [", Some(", "), "]");
        let call = "{\"name\": \"f\", \"arguments\": {\"a\": [1]}}";
        check(&array, &format!("[TOOL_CALLS] [{call}, {call}]"), "", &[("f", "{\"a\":[1]}"), ("f", "{\"a\":[1]}")]);
        check(&array, &format!("[TOOL_CALLS][{call}]"), "", &[("f", "{\"a\":[1]}")]);
        check(&named(), "[TOOL_CALLS]f[ARGS]{\"a\": 1}[TOOL_CALLS]g[ARGS]{}", "", &[("f", "{\"a\":1}"), ("g", "{}")]);
        check(&named(), "b[TOOL_CALLS]f[ARGS]5", "b[TOOL_CALLS]f[ARGS]5", &[]);
    }

    #[test]
    fn text_after_a_call_is_complete() {
        let call = "<tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>";
        for text in ["[1] is the source", "] a", ", a", "; a", ",;[a", "[", "[</tool_call> a"] {
            check(&hermes(), &format!("{call}\n{text}"), text, &[("f", "{}")]);
        }
        let llama = format("", None, "");
        check(&llama, "{\"name\": \"f\", \"arguments\": {}}; So.", "; So.", &[("f", "{}")]);
        let array = format("[TOOL_CALLS] [", Some(", "), "]");
        check(&array, "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {}}] ; a", "; a", &[("f", "{}")]);
    }

    #[test]
    fn a_parser_without_a_format_returns_content() {
        let mut parser = ToolCallParser::default();
        assert_eq!(parser.push("<tool_call>{").text, "<tool_call>{");
        assert_eq!(parser.finish(), ReplyContent::default());
    }
}
