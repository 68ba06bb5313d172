//! Escaping of control and format characters in untrusted text, for terminals.

use std::borrow::Cow;
use std::fmt::Write;

/// Escapes control characters, bidirectional marks and invisible format characters, as in `\u{1b}`. Keeps line
/// breaks and tabs.
pub fn printable(text: &str) -> Cow<'_, str> {
    if !text.contains(is_hidden) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for letter in text.chars() {
        match is_hidden(letter) {
            true => write!(out, "{}", letter.escape_default()).expect("writing to a String does not fail"),
            false => out.push(letter),
        }
    }
    Cow::Owned(out)
}

/// Returns true for characters to escape. Joiners and variation selectors are not escaped: they are part of words
/// and emoji.
fn is_hidden(letter: char) -> bool {
    match letter {
        '\n' | '\t' => false,
        '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}' | '\u{200e}' | '\u{200f}' | '\u{feff}' => true,
        '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{fff9}'..='\u{fffb}' => true,
        '\u{e0000}'..='\u{e007f}' => true,
        letter => letter.is_control(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped() {
        for (text, want) in [
            ("a\x1b[2Jb", "a\\u{1b}[2Jb"),
            ("x\u{202e}y\u{2066}", "x\\u{202e}y\\u{2066}"),
            ("\r\0\u{7f}\u{9b}", "\\r\\u{0}\\u{7f}\\u{9b}"),
            ("\u{feff}\u{e0041}", "\\u{feff}\\u{e0041}"),
            ("two\nlines\tand \u{1f469}\u{200d}\u{1f680} é", "two\nlines\tand \u{1f469}\u{200d}\u{1f680} é"),
        ] {
            assert_eq!(printable(text), want);
        }
    }
}
