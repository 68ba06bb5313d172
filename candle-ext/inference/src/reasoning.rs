//! Thinking of a reply: `<think>...</think>` before the content.

use candlewick_text::template::ChatTemplate;
use candlewick_text::tokenizer::{SpecialTokens, Tokenizer, TokenizerError};
use clap::ValueEnum;

/// Text of a reply, or the newest part of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReplyText {
    /// Thinking, without its tags.
    pub reasoning: String,
    /// Text after the thinking.
    pub content: String,
}

/// Format of the thinking in a response.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ReasoningFormat {
    /// The thinking is in `reasoning_content`, if the model's chat template or tokenizer has `</think>`
    #[default]
    #[value(alias = "deepseek")]
    Auto,
    /// The thinking and its tags are in `content`
    None,
}

/// Splits a streamed reply into reasoning and content. Tags may be divided over several pieces of the stream.
///
/// White space around the reasoning and before the content is removed. The default parser returns all text as content.
#[derive(Clone, Debug, Default)]
pub struct ReasoningParser {
    state: ReasoningState,
    /// Text that may be the beginning of a tag, and white space that may precede one.
    held: String,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum ReasoningState {
    /// The reply may begin with the start tag.
    Start,
    /// White space after the start tag.
    BeforeReasoning,
    /// Text before the end tag.
    Reasoning,
    /// White space after the end tag.
    BeforeContent,
    /// All text is content.
    #[default]
    Content,
}

/// Thinking that a reply may begin with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReasoningStart {
    /// The reply has no thinking.
    None,
    /// The reply may begin with the start tag.
    Possible,
    /// The prompt ends with the start tag.
    Open,
}

const START_TAG: &str = "<think>";
const END_TAG: &str = "</think>";

/// Number of prompt tokens that contain a start tag at the end of the prompt.
const N_TAIL: usize = 16;

impl ReplyText {
    /// Appends the next part of the reply.
    pub fn append(&mut self, part: &Self) {
        self.reasoning += &part.reasoning;
        self.content += &part.content;
    }

    /// Returns true without reasoning and content.
    pub fn is_empty(&self) -> bool {
        self.reasoning.is_empty() && self.content.is_empty()
    }
}

impl ReasoningParser {
    /// Creates the parser of the reply to a prompt, which may end with the start tag.
    ///
    /// Only text is parsed: a model without the end tag, or with the end tag as a special token, has no reasoning.
    pub fn for_prompt(tokenizer: &Tokenizer, template: &ChatTemplate, prompt: &[u32]) -> Result<Self, TokenizerError> {
        let has_text_tag = match tokenizer.token_to_id(END_TAG) {
            Some(id) => !tokenizer.is_special(id),
            None => template.source().contains(END_TAG),
        };
        if !has_text_tag {
            return Ok(Self::default());
        }
        let tail = tokenizer.decode(&prompt[prompt.len().saturating_sub(N_TAIL)..], SpecialTokens::Include)?;
        Ok(Self::after(&tail))
    }

    /// Creates the parser of the reply of a thinking model to a prompt with this text at its end.
    fn after(prompt: &str) -> Self {
        let state = match prompt.trim_end().ends_with(START_TAG) {
            true => ReasoningState::BeforeReasoning,
            false => ReasoningState::Start,
        };
        Self { state, held: String::new() }
    }

    /// Returns the thinking that the text to come may begin with.
    pub fn start(&self) -> ReasoningStart {
        match self.state {
            ReasoningState::Start => ReasoningStart::Possible,
            ReasoningState::BeforeReasoning | ReasoningState::Reasoning => ReasoningStart::Open,
            ReasoningState::BeforeContent | ReasoningState::Content => ReasoningStart::None,
        }
    }

    /// Adds text and returns the parts that are certain. Both may be empty.
    pub fn push(&mut self, text: &str) -> ReplyText {
        self.held.push_str(text);
        let mut parsed = ReplyText::default();
        while self.advance(&mut parsed) {}
        parsed
    }

    /// Returns the remaining text. Reasoning without an end tag is reasoning.
    pub fn finish(&mut self) -> ReplyText {
        let held = std::mem::take(&mut self.held);
        match self.state {
            ReasoningState::Reasoning => ReplyText { reasoning: held.trim_end().to_owned(), content: String::new() },
            _ => ReplyText { reasoning: String::new(), content: held },
        }
    }

    /// Moves text from `held` to `parsed`. Returns true if the state has changed.
    fn advance(&mut self, parsed: &mut ReplyText) -> bool {
        match self.state {
            ReasoningState::Start => self.find_start_tag(),
            ReasoningState::BeforeReasoning => self.skip_white_space(ReasoningState::Reasoning),
            ReasoningState::Reasoning => self.find_end_tag(&mut parsed.reasoning),
            ReasoningState::BeforeContent => self.skip_white_space(ReasoningState::Content),
            ReasoningState::Content => {
                parsed.content += &std::mem::take(&mut self.held);
                false
            }
        }
    }

    fn find_start_tag(&mut self) -> bool {
        let text = self.held.trim_start();
        if let Some(rest) = text.strip_prefix(START_TAG) {
            (self.state, self.held) = (ReasoningState::BeforeReasoning, rest.to_owned());
            return true;
        }
        let may_begin_a_tag = START_TAG.starts_with(text);
        if !may_begin_a_tag {
            self.state = ReasoningState::Content;
        }
        !may_begin_a_tag
    }

    fn find_end_tag(&mut self, reasoning: &mut String) -> bool {
        if let Some((text, rest)) = self.held.split_once(END_TAG) {
            *reasoning += text.trim_end();
            (self.state, self.held) = (ReasoningState::BeforeContent, rest.to_owned());
            return true;
        }
        let may_begin_a_tag = |at: &usize| END_TAG.starts_with(self.held[*at..].trim_start());
        let at = self.held.char_indices().map(|(at, _)| at).find(may_begin_a_tag).unwrap_or(self.held.len());
        let rest = self.held.split_off(at);
        *reasoning += &std::mem::replace(&mut self.held, rest);
        false
    }

    /// Continues with `next` at the first character that is not white space.
    fn skip_white_space(&mut self, next: ReasoningState) -> bool {
        self.held = self.held.trim_start().to_owned();
        if !self.held.is_empty() {
            self.state = next;
        }
        !self.held.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parses a reply in pieces of every size, and returns its reasoning and content.
    #[track_caller]
    fn check(prompt: &str, reply: &str, (reasoning, content): (&str, &str)) {
        let chars: Vec<char> = reply.chars().collect();
        for size in 1..=chars.len().max(1) {
            let mut parser = ReasoningParser::after(prompt);
            let pieces = chars.chunks(size).map(|piece| parser.push(&piece.iter().collect::<String>()));
            let mut parts: Vec<ReplyText> = pieces.collect();
            parts.push(parser.finish());
            let whole = ReplyText {
                reasoning: parts.iter().map(|part| part.reasoning.as_str()).collect(),
                content: parts.iter().map(|part| part.content.as_str()).collect(),
            };
            let want = ReplyText { reasoning: reasoning.to_owned(), content: content.to_owned() };
            assert_eq!(whole, want, "{reply:?} in pieces of {size}");
        }
    }

    #[test]
    fn replies_are_split_at_tags_that_span_pieces() {
        let prompt = "<|im_start|>assistant\n";
        check(prompt, "<think>\nSo, so.\n</think>\n\nYes.\n", ("So, so.", "Yes.\n"));
        check(prompt, "\n<think>a</think>b", ("a", "b"));
        check(
            prompt,
            "<think>a\n\n < b </thin > c\n</think> é </think> <think>d",
            ("a\n\n < b </thin > c", "é </think> <think>d"),
        );
        check(prompt, "<think>\n\n</think>\n\nYes.", ("", "Yes."));
        check(prompt, "<think>a</think>", ("a", ""));
    }

    #[test]
    fn an_unfinished_block_is_reasoning() {
        check("", "<think>\nSo, \n", ("So,", ""));
        check("", "<think>So</thi", ("So</thi", ""));
        check("", "<think>\n", ("", ""));
        check("<think>\n", "So", ("So", ""));
    }

    #[test]
    fn a_prompt_may_open_or_close_the_block() {
        check("<|im_start|>assistant\n<think>\n", "So.\n</think>\n\nYes.", ("So.", "Yes."));
        check("<think>", "\n\n</think>\n\nYes.", ("", "Yes."));
        check("<think>\n\n</think>\n\n", "Yes, </think>.", ("", "Yes, </think>."));
    }

    #[test]
    fn a_reply_without_a_start_tag_is_content() {
        for reply in ["", " \n", "\n Yes.", "<", "<thin", "<thing>", "a <think>b</think>", "</think>"] {
            check("", reply, ("", reply));
        }
        let mut parser = ReasoningParser::default();
        assert_eq!(parser.push("<think>a</think>").content, "<think>a</think>");
        assert_eq!(parser.finish(), ReplyText::default());
    }

    #[test]
    fn certain_text_is_not_held() {
        let mut parser = ReasoningParser::after("");
        let mut push = |text: &str| {
            let ReplyText { reasoning, content } = parser.push(text);
            (reasoning, content)
        };
        assert_eq!(push("<think>\nSo "), ("So".to_owned(), String::new()));
        assert_eq!(push("</a"), (" </a".to_owned(), String::new()));
        assert_eq!(push("</think>b"), (String::new(), "b".to_owned()));
        assert_eq!(push(" <"), (String::new(), " <".to_owned()));
    }
}
