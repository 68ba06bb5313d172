//! Position markers in a rendered text.
//!
//! A marker is a command between two copies of a fence: a character that the text itself does not contain. Markers
//! are part of the text, so they survive macros, `set` blocks and filters, where an output offset would be wrong.
//! The caller compares the text without its markers to an unmarked rendering. They differ if the template inspected
//! a marker, for example its length.

use std::fmt;
use std::sync::Arc;

use minijinja::value::{DynObject, Enumerator, Object, Rest};
use minijinja::{Environment, State, Value};

pub(super) const GENERATION: &str = "__candlewick_generation";
pub(super) const TURN: &str = "__candlewick_turn";
pub(super) const CLOSE_LOOP: &str = "__candlewick_close_loop";
/// Template variable of the fence. Every call has it as an argument, so macros receive it too.
pub(super) const FENCE: &str = "__candlewick_fence";

/// Meaning of a marker at its position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Marker {
    GenerationOpens,
    GenerationCloses,
    /// Start of a loop iteration over this message.
    Turn {
        loop_id: usize,
        message: usize,
    },
    LoopCloses {
        loop_id: usize,
    },
    /// Start of the content of a message.
    ContentOpens {
        message: usize,
    },
    ContentCloses {
        message: usize,
    },
}

/// Returns a character that `text` does not contain, from those that Unicode reserves for internal use.
pub(super) fn fence(text: &str) -> Option<char> {
    ('\u{FDD0}'..='\u{FDEF}').find(|candidate| !text.contains(*candidate))
}

/// Removes the markers. Returns the text, and each mark with its byte offset in that text.
pub(super) fn extract(marked: &str, fence: char) -> Option<(String, Vec<(usize, Marker)>)> {
    let mut text = String::with_capacity(marked.len());
    let mut marks = Vec::new();
    for (piece_idx, piece) in marked.split(fence).enumerate() {
        match piece_idx % 2 {
            0 => text.push_str(piece),
            _ => marks.push((text.len(), parse(piece)?)),
        }
    }
    Some((text, marks))
}

fn parse(command: &str) -> Option<Marker> {
    let mut words = command.split(' ');
    let mut number = || words.next().and_then(|word| word.parse().ok());
    Some(match number()? {
        0 => Marker::GenerationOpens,
        1 => Marker::GenerationCloses,
        2 => Marker::Turn { loop_id: number()?, message: number()? },
        3 => Marker::LoopCloses { loop_id: number()? },
        4 => Marker::ContentOpens { message: number()? },
        5 => Marker::ContentCloses { message: number()? },
        _ => return None,
    })
}

/// Registers the functions that `source` inserts into templates.
pub(super) fn install(environment: &mut Environment<'_>) {
    environment.add_function(GENERATION, |fence: &str, opens: bool| fenced(fence, if opens { "0" } else { "1" }));
    environment.add_function(TURN, turn);
    environment.add_function(CLOSE_LOOP, close_loop);
}

/// Prints a marker if a loop variable is a message. Loops over tool calls or content parts print none.
fn turn(state: &mut State, fence: &str, loop_id: usize, variables: Rest<Value>) -> String {
    let turns = |value: &Value| value.downcast_object_ref::<Turn>().map(|turn| turn.index);
    let Some(message) = variables.iter().find_map(turns) else {
        return String::new();
    };
    state.set_temp(&open_loop(loop_id), Value::from(true));
    fenced(fence, &format!("2 {loop_id} {message}"))
}

fn close_loop(state: &mut State, fence: &str, loop_id: usize) -> String {
    match state.set_temp(&open_loop(loop_id), Value::from(false)) {
        Some(open) if open.is_true() => fenced(fence, &format!("3 {loop_id}")),
        _ => String::new(),
    }
}

fn open_loop(loop_id: usize) -> String {
    format!("open loop {loop_id}")
}

fn fenced(fence: &str, command: &str) -> String {
    format!("{fence}{command}{fence}")
}

/// Puts markers around the content of a message. White space at its ends stays outside, because templates trim it.
pub(super) fn around_content(content: &str, message: usize, fence: char) -> String {
    let fence = fence.to_string();
    let inner = content.trim();
    let (before, after) = content.split_once(inner).unwrap_or(("", ""));
    let (opens, closes) = (fenced(&fence, &format!("4 {message}")), fenced(&fence, &format!("5 {message}")));
    format!("{before}{opens}{inner}{closes}{after}")
}

/// Message with its index in the conversation. Templates see it as an ordinary dict.
pub(super) struct Turn {
    pub(super) index: usize,
    pub(super) fields: Value,
}

impl Turn {
    fn object(&self) -> Option<&DynObject> {
        self.fields.as_object()
    }
}

impl fmt::Debug for Turn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.fields.fmt(f)
    }
}

impl Object for Turn {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.object()?.get_value(key)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        self.object()?.get_value_by_str(key)
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        self.object().map_or(Enumerator::Empty, DynObject::enumerate)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn markers_are_extracted_with_their_positions() {
        let (text, marks) = extract("aé|2 1 7|b|3 1||0|c|1|", '|').unwrap();
        assert_eq!(text, "aébc");
        assert_eq!(
            marks,
            [
                (3, Marker::Turn { loop_id: 1, message: 7 }),
                (4, Marker::LoopCloses { loop_id: 1 }),
                (4, Marker::GenerationOpens),
                (5, Marker::GenerationCloses),
            ]
        );
    }

    #[test]
    fn a_fence_is_never_part_of_the_text() {
        assert_eq!(fence("x\u{FDD0}\u{FDD1}"), Some('\u{FDD2}'));
        let all: String = ('\u{FDD0}'..='\u{FDEF}').collect();
        assert_eq!(fence(&all), None);
    }

    #[test]
    fn markers_of_a_content_exclude_white_space_at_its_ends() {
        let marked = around_content(" a b\n", 3, '|');
        let want = [(1, Marker::ContentOpens { message: 3 }), (4, Marker::ContentCloses { message: 3 })];
        assert_eq!(extract(&marked, '|').unwrap(), (" a b\n".to_owned(), want.to_vec()));
    }

    #[test]
    fn a_broken_marker_is_refused() {
        for broken in ["|9|", "|2 1|", "|x|", "||"] {
            assert_eq!(extract(broken, '|'), None, "{broken}");
        }
    }
}
