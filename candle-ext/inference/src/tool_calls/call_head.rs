//! Beginning of a call: the text up to its arguments.

use candlewick_text::template::{ToolCallFormat, ToolCallKeys};

use super::call_object::ARGUMENTS_KEYS;

/// Beginning of a held text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum CallHead {
    /// A call of `name`, whose arguments begin after `n_bytes`.
    Begun { name: String, n_bytes: usize },
    /// A text that may become a call.
    Incomplete,
    /// An object in which the name and an object of arguments are not the first fields.
    OtherObject,
    /// A call without arguments.
    Broken,
    /// No call.
    Absent,
}

/// Longest name of a function in bytes.
const MAX_NAME_BYTES: usize = 200;

/// Reason why a text does not have the expected part.
enum PartError {
    /// The text ends before it.
    Incomplete,
    /// The text has another one.
    Other,
}

impl CallHead {
    /// Reads the beginning of a text.
    pub(super) fn read(text: &str, format: &ToolCallFormat) -> Self {
        match (&format.keys, &format.parameters) {
            (Some(keys), _) => Self::of_object(text, keys),
            (None, None) => Self::before_object(text, format.between.trim()),
            (None, Some(_)) => Self::before_parameters(text, format.before_name.trim(), format.between.trim()),
        }
    }

    fn of_object(text: &str, keys: &ToolCallKeys) -> Self {
        if !text.starts_with('{') {
            return Self::Absent;
        }
        let mut rest = text;
        match name_of_object(&mut rest, keys) {
            Ok(name) => Self::Begun { name, n_bytes: text.len() - rest.len() },
            // The name of a complete object is never so far.
            Err(PartError::Incomplete) if text.len() <= 3 * MAX_NAME_BYTES => Self::Incomplete,
            Err(_) => Self::OtherObject,
        }
    }

    /// Reads a name and the text between it and a JSON object.
    fn before_object(text: &str, between: &str) -> Self {
        let Some((name, after)) = text.split_once(between) else {
            let may_be_name = text.len() < MAX_NAME_BYTES && !text.contains('\n');
            return if may_be_name { Self::Incomplete } else { Self::Absent };
        };
        let arguments = after.trim_start();
        match arguments.chars().next() {
            None => Self::Incomplete,
            Some('{') => Self::Begun { name: name.trim().to_owned(), n_bytes: text.len() - arguments.len() },
            Some(_) => Self::Broken,
        }
    }

    /// Reads a name between two texts, such as `<function=` and `>`.
    fn before_parameters(text: &str, before: &str, between: &str) -> Self {
        let Some(rest) = text.strip_prefix(before) else {
            return if before.starts_with(text) { Self::Incomplete } else { Self::Absent };
        };
        match rest.split_once(between) {
            Some((name, after)) if name.len() <= MAX_NAME_BYTES && !name.contains('\n') => {
                Self::Begun { name: name.trim().to_owned(), n_bytes: text.len() - after.len() }
            }
            None if rest.len() <= MAX_NAME_BYTES && !rest.contains('\n') => Self::Incomplete,
            _ => Self::Absent,
        }
    }
}

/// Reads the beginning of an object: the name, and the key of an object of arguments.
fn name_of_object(rest: &mut &str, keys: &ToolCallKeys) -> Result<String, PartError> {
    expect(rest, "{")?;
    let key = string(rest)?;
    expect(rest, ":")?;
    let name = string(rest)?;
    expect(rest, ",")?;
    let arguments_key = string(rest)?;
    expect(rest, ":")?;
    let is_known = key == keys.name && (arguments_key == keys.arguments || ARGUMENTS_KEYS.contains(&&*arguments_key));
    *rest = rest.trim_start();
    match rest.chars().next() {
        None => Err(PartError::Incomplete),
        Some('{') if is_known => Ok(name),
        Some(_) => Err(PartError::Other),
    }
}

/// Removes white space and a text from the beginning.
fn expect(rest: &mut &str, part: &str) -> Result<(), PartError> {
    let text = rest.trim_start();
    let after = text.strip_prefix(part);
    *rest = after.ok_or(if text.is_empty() { PartError::Incomplete } else { PartError::Other })?;
    Ok(())
}

/// Removes white space and a JSON string from the beginning.
fn string(rest: &mut &str) -> Result<String, PartError> {
    expect(rest, "\"")?;
    let mut is_escaped = false;
    let ends = |byte: &u8| {
        let ends = *byte == b'"' && !is_escaped;
        is_escaped = *byte == b'\\' && !is_escaped;
        ends
    };
    let n_bytes = rest.as_bytes().iter().position(ends).ok_or(PartError::Incomplete)?;
    let string = serde_json::from_str(&format!("\"{}\"", &rest[..n_bytes])).map_err(|_| PartError::Other)?;
    *rest = &rest[n_bytes + 1..];
    Ok(string)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_begins_with_its_name_and_arguments() {
        let keys = ToolCallKeys { name: "name".to_owned(), arguments: "arguments".to_owned() };
        let head = |text: &str| CallHead::of_object(text, &keys);
        let whole = "{\"name\": \"f\\\"g\", \"parameters\" : {";
        assert_eq!(head(whole), CallHead::Begun { name: "f\"g".to_owned(), n_bytes: whole.len() - 1 });
        (1..whole.len()).for_each(|end| assert_eq!(head(&whole[..end]), CallHead::Incomplete, "{}", &whole[..end]));
        for other in
            ["{\"arguments\": {", "{\"name\": 5", "{\"name\": \"f\"}", "{\"name\": \"f\", \"arguments\": \"", "{}"]
        {
            assert_eq!(head(other), CallHead::OtherObject, "{other}");
        }
        assert_eq!(head("a{"), CallHead::Absent);
    }
}
