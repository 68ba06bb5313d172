//! Tool calls in a streamed reply, in the format that the chat template renders.

mod call_head;
mod call_object;
mod parameters;
mod scanner;

use std::sync::Arc;

use candlewick_text::template::ToolCallFormat;

use call_head::CallHead;
use call_object::whole_object;
pub use parameters::OfferedFunction;
use parameters::{ParameterReader, ParameterStep};
use scanner::ObjectScanner;

/// Call of a function, or the newest part of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCallPart {
    /// Index of the call in the reply.
    pub index: usize,
    /// Name of the function, in the first part.
    pub name: Option<String>,
    /// Text of the arguments, a JSON object. It is that of the model, unless the model writes no JSON.
    pub arguments: String,
}

/// Content and calls of a reply, or of its newest part.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReplyContent {
    /// Text around the calls.
    pub text: String,
    /// Parts of calls, at most one of each call.
    pub calls: Vec<ToolCallPart>,
}

/// Separates a streamed reply into content and tool calls. A call begins once its name and the beginning of its arguments are
/// there. Text that is no call is content, and so is all text after it.
///
/// The default parser returns all text as content.
#[derive(Clone, Debug, Default)]
pub struct ToolCallParser {
    format: Option<Arc<ToolCallFormat>>,
    functions: Arc<[OfferedFunction]>,
    state: ParserState,
    /// Text of the call, or text that may begin one.
    held: String,
    /// Text between the last call and `held`, such as a tag.
    skipped: String,
    /// Position in an object whose name is not its first field.
    scanned: ObjectScanner,
    n_calls: usize,
}

#[derive(Clone, Debug, Default)]
enum ParserState {
    /// Text before or after calls.
    #[default]
    Content,
    /// Text of calls, between two of them.
    Calls,
    /// JSON object of arguments.
    Arguments(ObjectScanner),
    /// Rest of a call's object, after the arguments.
    ObjectEnd(ObjectScanner),
    /// Parameters that are no JSON.
    Parameters(ParameterReader),
    /// Text that is not parsed.
    Plain,
}

/// Progress of the parser.
enum ParserStep {
    /// The next step may read more of the text.
    Continue,
    /// More text is needed.
    Wait,
}

/// Token before a call in Llama 3.1, in tokenizers that do not mark it as special.
const PYTHON_TAG: &str = "<|python_tag|>";

impl ReplyContent {
    /// Appends the next part of the reply.
    pub fn append(&mut self, part: Self) {
        self.text += &part.text;
        part.calls.into_iter().for_each(|call| self.append_call(call));
    }

    fn append_call(&mut self, part: ToolCallPart) {
        match self.calls.last_mut().filter(|last| last.index == part.index) {
            Some(last) => last.arguments += &part.arguments,
            None => self.calls.push(part),
        }
    }
}

impl ToolCallParser {
    /// Creates the parser of a reply that may call these functions.
    pub fn new(format: Arc<ToolCallFormat>, functions: Arc<[OfferedFunction]>) -> Self {
        Self { format: Some(format), functions, ..Self::default() }
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
        parsed
    }

    /// Returns the number of calls that have begun.
    pub fn n_calls(&self) -> usize {
        self.n_calls
    }

    /// Returns the remaining text. The beginning of a call is content, unless its name is certain.
    pub fn finish(&mut self) -> ReplyContent {
        let held = std::mem::take(&mut self.held);
        let text = match self.state {
            ParserState::Arguments(_) | ParserState::ObjectEnd(_) | ParserState::Parameters(_) => String::new(),
            ParserState::Calls if self.n_calls > 0 => {
                let text = self.text_after_call() + &held;
                // The rest is the beginning of another call, or of the end.
                let is_separator = |format: &ToolCallFormat| {
                    let parts = [&*format.opening, &*format.closing, format.separator.as_deref().unwrap_or_default()];
                    parts.iter().any(|part| part.trim().starts_with(text.trim()))
                };
                let is_incomplete = self.format.as_deref().is_some_and(is_separator);
                if is_incomplete { String::new() } else { text }
            }
            _ => std::mem::take(&mut self.skipped) + &held,
        };
        ReplyContent { text, calls: Vec::new() }
    }

    fn step(&mut self, format: &ToolCallFormat, parsed: &mut ReplyContent) -> ParserStep {
        match &mut self.state {
            ParserState::Content => self.find_opening(format, parsed),
            ParserState::Calls => self.begin_call(format, parsed),
            ParserState::Arguments(_) => self.read_arguments(format, parsed),
            ParserState::ObjectEnd(_) => self.read_object_end(),
            ParserState::Parameters(reader) => {
                let mut arguments = String::new();
                let step = reader.step(format, &mut self.held, &mut arguments);
                self.add_arguments(arguments, parsed);
                match step {
                    ParameterStep::Continue => ParserStep::Continue,
                    ParameterStep::Wait => ParserStep::Wait,
                    ParameterStep::End => self.end_call(),
                }
            }
            ParserState::Plain => {
                parsed.text += &std::mem::take(&mut self.held);
                ParserStep::Wait
            }
        }
    }

    fn find_opening(&mut self, format: &ToolCallFormat, parsed: &mut ReplyContent) -> ParserStep {
        let tag = tag(&format.opening);
        if tag.is_empty() {
            return self.find_object();
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

    /// Decides about a reply in a format without tags: it begins with a call, or has none.
    fn find_object(&mut self) -> ParserStep {
        let text = self.held.trim_start();
        if text.is_empty() || (text.len() < PYTHON_TAG.len() && PYTHON_TAG.starts_with(text)) {
            return ParserStep::Wait;
        }
        let rest = text.strip_prefix(PYTHON_TAG).unwrap_or(text).trim_start();
        match rest.chars().next() {
            None => ParserStep::Wait,
            Some('{') => {
                let n_bytes = self.held.len() - rest.len();
                self.skipped = self.held.drain(..n_bytes).collect();
                self.state = ParserState::Calls;
                ParserStep::Continue
            }
            Some(_) => {
                self.state = ParserState::Plain;
                ParserStep::Continue
            }
        }
    }

    /// Reads the text between two calls, and the beginning of the next.
    fn begin_call(&mut self, format: &ToolCallFormat, parsed: &mut ReplyContent) -> ParserStep {
        if self.scanned.is_at_start() && self.skip_separators(format) {
            return ParserStep::Continue;
        }
        if self.held.is_empty() {
            return ParserStep::Wait;
        }
        match CallHead::read(&self.held, format) {
            CallHead::Begun { name, n_bytes } if self.may_call(&name, format) => {
                self.held.drain(..n_bytes);
                self.state = match &format.parameters {
                    Some(_) => ParserState::Parameters(ParameterReader::new(&self.functions, &name)),
                    None => ParserState::Arguments(ObjectScanner::default()),
                };
                self.add_call(name, String::new(), parsed);
                ParserStep::Continue
            }
            CallHead::Begun { .. } | CallHead::Broken => self.give_up(parsed),
            CallHead::Incomplete => ParserStep::Wait,
            CallHead::OtherObject => self.read_whole_object(format, parsed),
            CallHead::Absent if self.separators(format).any(|text| text.starts_with(&self.held)) => ParserStep::Wait,
            CallHead::Absent => self.leave_calls(parsed),
        }
    }

    /// Reads a call's object in which the name and the arguments are not the first fields.
    fn read_whole_object(&mut self, format: &ToolCallFormat, parsed: &mut ReplyContent) -> ParserStep {
        let Some(n_bytes) = self.scanned.end(&self.held) else { return ParserStep::Wait };
        let call = format.keys.as_ref().and_then(|keys| whole_object(&self.held[..n_bytes], keys));
        match call.filter(|(name, _)| self.may_call(name, format)) {
            Some((name, arguments)) => {
                self.held.drain(..n_bytes);
                self.add_call(name, arguments, parsed);
                self.end_call()
            }
            None => self.give_up(parsed),
        }
    }

    fn read_arguments(&mut self, format: &ToolCallFormat, parsed: &mut ReplyContent) -> ParserStep {
        let ParserState::Arguments(scanner) = &mut self.state else { return ParserStep::Continue };
        let end = scanner.end_after(&self.held);
        let rest = end.map(|n_bytes| self.held.split_off(n_bytes)).unwrap_or_default();
        let arguments = std::mem::replace(&mut self.held, rest);
        self.add_arguments(arguments, parsed);
        match (end, &format.keys) {
            (None, _) => ParserStep::Wait,
            (Some(_), None) => self.end_call(),
            (Some(_), Some(_)) => {
                self.state = ParserState::ObjectEnd(ObjectScanner::within_object());
                ParserStep::Continue
            }
        }
    }

    /// Skips the rest of a call's object after its arguments. Models omit the brace at times.
    fn read_object_end(&mut self) -> ParserStep {
        let ParserState::ObjectEnd(scanner) = &mut self.state else { return ParserStep::Continue };
        if scanner.is_at_start() {
            self.held = self.held.trim_start().to_owned();
            match self.held.chars().next() {
                None => return ParserStep::Wait,
                Some('}' | ',') => {}
                Some(_) => return self.end_call(),
            }
        }
        let end = scanner.end_after(&self.held);
        self.held.drain(..end.unwrap_or(self.held.len()));
        if end.is_some() { self.end_call() } else { ParserStep::Wait }
    }

    fn end_call(&mut self) -> ParserStep {
        (self.state, self.scanned) = (ParserState::Calls, ObjectScanner::default());
        ParserStep::Continue
    }

    fn add_call(&mut self, name: String, arguments: String, parsed: &mut ReplyContent) {
        self.skipped.clear();
        parsed.calls.push(ToolCallPart { index: self.n_calls, name: Some(name), arguments });
        self.n_calls += 1;
    }

    /// Adds text to the arguments of the last call.
    fn add_arguments(&mut self, arguments: String, parsed: &mut ReplyContent) {
        if !arguments.is_empty() {
            parsed.append_call(ToolCallPart { index: self.n_calls - 1, name: None, arguments });
        }
    }

    /// Returns true if the model may call this function. Without a tag, an object of an unknown function may be content.
    fn may_call(&self, name: &str, format: &ToolCallFormat) -> bool {
        let is_known = || self.functions.iter().any(|function| function.name == name);
        !name.is_empty() && (!tag(&format.opening).is_empty() || is_known())
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

    /// Continues with content after the calls.
    fn leave_calls(&mut self, parsed: &mut ReplyContent) -> ParserStep {
        if self.n_calls == 0 {
            return self.give_up(parsed);
        }
        parsed.text += &self.text_after_call();
        let has_tag = self.format.as_deref().is_some_and(|format| !tag(&format.opening).is_empty());
        self.state = if has_tag { ParserState::Content } else { ParserState::Plain };
        ParserStep::Continue
    }

    /// Returns all text since the last call as content.
    fn give_up(&mut self, parsed: &mut ReplyContent) -> ParserStep {
        parsed.text += &match self.n_calls > 0 {
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
