//! Conversations in a file: a JSON list of messages, an object with `messages`, or JSON lines of either.

use anyhow::{Result, anyhow, bail};
use candlewick_text::conversation::{Conversation, Message};
use candlewick_text::format::message_from_fields;
use candlewick_text::long_integer;
use serde_json::{Map, Value as Json};

/// Parses the conversations of a text.
///
/// A list of messages, or lines of one message each, is one conversation. An object with `messages` (and optionally
/// `tools`) is a conversation; lists or lines of such objects are several.
pub fn conversations(text: &str) -> Result<Vec<Conversation>> {
    let text = text.trim_start_matches('\u{feff}');
    let values: Vec<(String, Json)> = match long_integer::parse(text) {
        Ok(Json::Array(items)) => items.into_iter().zip(1..).map(|(item, i)| (format!("item {i}"), item)).collect(),
        Ok(value) => vec![("the file".to_owned(), value)],
        Err(whole) => lines(text, &whole)?,
    };
    let is_message = |(_, value): &(String, Json)| value.get("role").is_some();
    if values.is_empty() {
        bail!("there is no message");
    }
    if values.iter().all(is_message) {
        let messages = values.into_iter().map(|(place, value)| message(&place, value)).collect::<Result<Vec<_>>>()?;
        return Ok(vec![Conversation::new(messages)]);
    }
    values.into_iter().map(|(place, value)| conversation(&place, value)).collect()
}

fn lines(text: &str, whole: &serde_json::Error) -> Result<Vec<(String, Json)>> {
    let full = text.lines().zip(1..).filter(|(line, _)| !line.trim().is_empty());
    let mut values = Vec::new();
    for (line, i) in full {
        match long_integer::parse(line) {
            Ok(value) => values.push((format!("line {i}"), value)),
            // If the first line is not JSON, the file is reported as malformed JSON.
            Err(_) if values.is_empty() => bail!("it is neither JSON nor JSON lines: {whole}"),
            Err(error) => bail!("line {i} is not JSON: {error}"),
        }
    }
    Ok(values)
}

fn conversation(place: &str, value: Json) -> Result<Conversation> {
    let wrong = || {
        anyhow!(
            "{place} is no conversation: expected {{\"messages\": [{{\"role\": \"user\", \"content\": \"...\"}}]}}, or a \
             list of messages alone"
        )
    };
    let (items, tools) = match value {
        Json::Array(items) => (items, None),
        Json::Object(mut fields) => {
            let Some(Json::Array(items)) = fields.remove("messages") else { return Err(wrong()) };
            (items, fields.remove("tools").filter(|tools| !tools.is_null()))
        }
        _ => return Err(wrong()),
    };
    let places = (1..).map(|i| format!("{place}, message {i}"));
    let messages = places.zip(items).map(|(place, item)| message(&place, item)).collect::<Result<Vec<_>>>()?;
    if messages.is_empty() {
        bail!("{place} has no messages");
    }
    let chat = Conversation::new(messages);
    Ok(match tools {
        Some(tools) => chat.with_tools(tools),
        None => chat,
    })
}

fn message(place: &str, value: Json) -> Result<Message> {
    let fields: Map<String, Json> = match value {
        Json::Object(fields) => fields,
        _ => bail!("{place} is no message: expected {{\"role\": \"user\", \"content\": \"...\"}}"),
    };
    message_from_fields(fields).map_err(|problem| anyhow!("{place}: {problem}"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const USER: &str = r#"{"role": "user", "content": "hi"}"#;
    const SYSTEM: &str = r#"{"role": "system", "content": "be kind"}"#;

    #[track_caller]
    fn check(text: &str, want: &[usize]) {
        let found: Vec<usize> = conversations(text).unwrap().iter().map(|chat| chat.messages.len()).collect();
        assert_eq!(found, want, "{text}");
    }

    #[test]
    fn lists_objects_and_lines_are_read() {
        check(USER, &[1]);
        check(&format!("\u{feff}[{SYSTEM},\n{USER}]"), &[2]);
        check(&format!("{SYSTEM}\n\n{USER}\n"), &[2]);
        let chat = format!(r#"{{"messages": [{SYSTEM}, {USER}]}}"#);
        check(&chat, &[2]);
        check(&format!("{chat}\n{chat}\n"), &[2, 2]);
        check(&format!("[{chat}, {chat}, {chat}]"), &[2, 2, 2]);
        check(&format!("[[{USER}], [{SYSTEM}, {USER}]]"), &[1, 2]);
    }

    #[test]
    fn tools_come_along() {
        let text = format!(r#"{{"messages": [{USER}], "tools": [{{"name": "f"}}]}}"#);
        assert!(conversations(&text).unwrap()[0].tools.is_some());
    }

    #[test]
    fn a_row_that_is_no_conversation_is_named() {
        for (text, want) in [
            ("", "no message"),
            ("[]", "no message"),
            ("hello", "neither JSON nor JSON lines"),
            ("{\"role\": \"user\", \"content\": \"a\"}\nhello", "line 2 is not JSON"),
            ("[3]", "item 1 is no conversation"),
            (r#"{"messages": []}"#, "has no messages"),
            (r#"{"messages": [{"role": "user", "content": 3}]}"#, "message 1: read a user message"),
            (r#"[{"role": "user", "content": [{"type": "image"}]}]"#, "item 1: part 0 of `content` is image (image)"),
            (r#"{"role": "user", "content": [{"type": "image"}]}"#, "images are not supported"),
            (r#"{"prompt": "hi"}"#, "expected {\"messages\""),
        ] {
            let error = format!("{:#}", conversations(text).unwrap_err());
            assert!(error.contains(want), "{error}");
        }
    }
}
