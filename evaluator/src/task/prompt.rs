//! Prompt formats: chat turns joined as plain text, or formatted by a chat template.

use candlewick_text::conversation::{Conversation, Message as ChatMessage};
use candlewick_text::template::{AddGenerationPrompt, ChatTemplate, TemplateError};
use serde_json::{Map, Value as Json};

use super::python::text::{ends_with_space, rstrip, starts_with_space, strip};
use super::unsafe_code::UnsafeCodePolicy;

/// Formatter that renders chat turns as a prompt.
pub trait ChatFormatter: Sync {
    /// Renders (role, content) pairs as a prompt. `ending` selects whether the assistant's header follows.
    fn apply_chat_template(&self, turns: &[(&str, &str)], ending: AddGenerationPrompt)
    -> Result<String, TemplateError>;
}

impl ChatFormatter for ChatTemplate {
    fn apply_chat_template(
        &self,
        turns: &[(&str, &str)],
        ending: AddGenerationPrompt,
    ) -> Result<String, TemplateError> {
        let messages = turns.iter().map(|(role, content)| ChatMessage::new(*role, *content));
        self.render(&Conversation::new(messages), ending)
    }
}

/// Prompt options of a run.
#[derive(Clone, Default)]
pub struct PromptOptions<'a> {
    /// Number of few-shot examples; a task that requires zero overrides it.
    pub num_fewshot: Option<usize>,
    /// Seed of few-shot sampling.
    pub fewshot_seed: u64,
    /// True to reproduce lm-eval exactly (`--compat lm-eval`).
    pub compat: bool,
    /// Chat template for prompts, if they are chats.
    pub chat: Option<&'a dyn ChatFormatter>,
    /// System instruction, before the task's `description`.
    pub system_instruction: Option<String>,
    /// True if each few-shot example is a chat turn.
    pub fewshot_as_multiturn: bool,
    /// Number of evaluated documents; below 1 a fraction, rounded up.
    pub limit: Option<f64>,
    /// Indices of the evaluated documents.
    pub samples: Option<Vec<usize>>,
    /// Overrides of the task's `generation_kwargs`.
    pub gen_kwargs: Map<String, Json>,
    /// Permission to run model-written code.
    pub unsafe_code: UnsafeCodePolicy,
}

/// Chat turn, with the delimiter that follows it in plain text.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PromptTurn {
    pub(crate) role: &'static str,
    pub(crate) content: String,
    pub(crate) delimiter: String,
}

/// Format of prompts: plain text or chat template.
#[derive(Clone, Copy)]
pub(crate) struct PromptFormat<'a> {
    pub(crate) chat: Option<&'a dyn ChatFormatter>,
    /// True if few-shot examples are separate chat turns, false if one user turn holds all of them.
    pub(crate) as_multiturn: bool,
}

impl PromptTurn {
    pub(crate) fn new(role: &'static str, content: impl Into<String>, delimiter: &str) -> Self {
        Self { role, content: content.into(), delimiter: delimiter.to_owned() }
    }

    fn as_text(&self) -> [&str; 2] {
        [&self.content, &self.delimiter]
    }
}

/// Builds the turns of one question: the user's, and the assistant's if there is an answer or a prefix of it.
pub(crate) fn question_turns(
    question: &str,
    answer: Option<&str>,
    prefix: Option<&str>,
    delimiters: (&str, &str),
) -> Vec<PromptTurn> {
    let (target, fewshot) = delimiters;
    let (answer, prefix) = (answer.filter(|a| !a.is_empty()), prefix.filter(|p| !p.is_empty()));
    let is_delimited = match (answer, prefix) {
        (_, Some(prefix)) => !question.is_empty() && !ends_with_space(question) && !starts_with_space(prefix),
        (answer, None) => answer.is_some(),
    };
    let mut turns = vec![PromptTurn::new("user", question, if is_delimited { target } else { "" })];
    match (answer, prefix) {
        (Some(answer), prefix) => {
            turns.push(PromptTurn::new("assistant", join_texts(prefix.unwrap_or(""), answer, " "), fewshot));
        }
        (None, Some(prefix)) => turns.push(PromptTurn::new("assistant", prefix, "")),
        (None, None) => {}
    }
    turns
}

/// Joins two texts with a delimiter, unless one is empty or there is whitespace between them already.
pub(crate) fn join_texts(first: &str, second: &str, delimiter: &str) -> String {
    let is_plain = first.is_empty() || second.is_empty() || ends_with_space(first) || starts_with_space(second);
    if is_plain { format!("{first}{second}") } else { format!("{first}{delimiter}{second}") }
}

impl PromptFormat<'_> {
    /// Formats turns as a prompt. With `has_prefix`, the last turn is the beginning of the response, which the model
    /// continues.
    pub(crate) fn print(&self, turns: &[PromptTurn], has_prefix: bool) -> Result<String, TemplateError> {
        let Some(chat) = self.chat else {
            return Ok(turns.iter().flat_map(PromptTurn::as_text).collect());
        };
        let turns = if self.as_multiturn { plain(turns) } else { single(turns) };
        let turns: Vec<(&str, &str)> = turns.iter().map(|(role, content)| (*role, content.as_str())).collect();
        match print(chat, &turns, has_prefix) {
            Err(error) if turns.iter().any(|(role, _)| *role == "system") => {
                tracing::warn!("the chat template rejects the system role; the system message is omitted: {error}");
                let others: Vec<_> = turns.iter().filter(|(role, _)| *role != "system").copied().collect();
                print(chat, &others, has_prefix)
            }
            printed => printed,
        }
    }
}

fn print(chat: &dyn ChatFormatter, turns: &[(&str, &str)], has_prefix: bool) -> Result<String, TemplateError> {
    if !has_prefix {
        return chat.apply_chat_template(turns, AddGenerationPrompt::Yes);
    }
    let text = chat.apply_chat_template(turns, AddGenerationPrompt::No)?;
    let last = turns.last().map_or("", |(_, content)| content);
    Ok(truncate_after(&text, last))
}

/// Cuts a prompt after the last turn's content, so that the model continues that turn.
fn truncate_after(text: &str, content: &str) -> String {
    let Some(at) = text.rfind(strip(content)) else { return text.to_owned() };
    let whole = content.trim_start_matches(super::python::text::is_space);
    let kept = if text[at..].starts_with(whole) { whole } else { rstrip(whole) };
    text[..at + kept.len()].to_owned()
}

fn plain(turns: &[PromptTurn]) -> Vec<(&'static str, String)> {
    turns.iter().map(|turn| (turn.role, turn.content.clone())).collect()
}

/// Merges all turns into one user turn, except the system turn and a final assistant turn.
fn single(turns: &[PromptTurn]) -> Vec<(&'static str, String)> {
    let (system, turns) = match turns.split_first() {
        Some((first, rest)) if first.role == "system" => (Some(first), rest),
        _ => (None, turns),
    };
    let (turns, prefix) = match turns.split_last() {
        Some((last, rest)) if last.role == "assistant" => (rest, Some(last)),
        _ => (turns, None),
    };
    let mut texts: Vec<&str> = turns.iter().flat_map(PromptTurn::as_text).collect();
    // In plain text, the last turn's delimiter would precede the response; the user turn ends without it.
    texts.pop();
    let user = ("user", texts.concat());
    let system = system.map(|turn| (turn.role, turn.content.clone()));
    let prefix = prefix.map(|turn| (turn.role, turn.content.clone()));
    system.into_iter().chain([user]).chain(prefix).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    struct Tags;

    impl ChatFormatter for Tags {
        fn apply_chat_template(
            &self,
            turns: &[(&str, &str)],
            ending: AddGenerationPrompt,
        ) -> Result<String, TemplateError> {
            let turns: String = turns.iter().map(|(role, content)| format!("<{role}>{content}</{role}>")).collect();
            Ok(turns + if ending == AddGenerationPrompt::Yes { "<assistant>" } else { "" })
        }
    }

    fn shot() -> Vec<PromptTurn> {
        let mut all = vec![PromptTurn::new("system", "S\n\n", "")];
        all.extend(question_turns("Q1", Some("A1"), None, (" ", "\n\n")));
        all.extend(question_turns("Q2", None, None, (" ", "")));
        all
    }

    #[track_caller]
    fn check(as_multiturn: bool, turns: &[PromptTurn], has_prefix: bool, want: &str) {
        let style = PromptFormat { chat: Some(&Tags), as_multiturn };
        assert_eq!(style.print(turns, has_prefix).unwrap(), want);
    }

    #[test]
    fn examples_are_turns_or_one_turn() {
        let text = PromptFormat { chat: None, as_multiturn: false }.print(&shot(), false).unwrap();
        assert_eq!(text, "S\n\nQ1 A1\n\nQ2");
        let turns = "<system>S\n\n</system><user>Q1</user><assistant>A1</assistant><user>Q2</user><assistant>";
        check(true, &shot(), false, turns);
        check(false, &shot(), false, "<system>S\n\n</system><user>Q1 A1\n\nQ2</user><assistant>");
    }

    #[test]
    fn a_prefix_begins_the_answer() {
        let turns = question_turns("Q", None, Some("So: "), (" ", ""));
        assert_eq!(turns[0].delimiter, " ");
        check(true, &turns, true, "<user>Q</user><assistant>So: ");
        check(false, &turns, true, "<user>Q</user><assistant>So: ");
    }
}
