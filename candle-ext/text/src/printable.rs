//! Untrusted text for terminals: escaped control and format characters, masked passwords, shortened lines.

use std::borrow::Cow;
use std::fmt::Write;

/// Escapes control characters, bidirectional marks and invisible format characters as JSON does, as in `\u001b`. Keeps
/// line breaks and tabs. So JSON stays JSON of the same value.
pub fn printable(text: &str) -> Cow<'_, str> {
    if !text.contains(is_hidden) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for letter in text.chars() {
        match is_hidden(letter) {
            true => escape(letter, &mut out),
            false => out.push(letter),
        }
    }
    Cow::Owned(out)
}

/// Replaces user names and passwords in URLs by as many asterisks.
pub fn mask_passwords(text: &str) -> Cow<'_, str> {
    let mut masked = Cow::Borrowed(text);
    for (scheme, _) in text.match_indices("://") {
        let start = scheme + "://".len();
        let is_end = |letter: char| letter.is_whitespace() || "/?#'\"<>`".contains(letter);
        let authority = &text[start..][..text[start..].find(is_end).unwrap_or(text.len() - start)];
        if let Some(at) = authority.rfind('@') {
            // One byte for one byte: positions stay.
            masked.to_mut().replace_range(start..start + at, &"*".repeat(at));
        }
    }
    masked
}

/// Shortens a text to at most `n_chars` characters, of which the last is `…`.
pub fn shortened(text: &str, n_chars: usize) -> Cow<'_, str> {
    if text.chars().nth(n_chars).is_none() {
        return Cow::Borrowed(text);
    }
    Cow::Owned(text.chars().take(n_chars.saturating_sub(1)).chain(['…']).collect())
}

/// Shortens each long line: names in files may have megabytes.
pub fn shorten_lines(text: &str) -> String {
    const HEAD: usize = 1_500;
    const TAIL: usize = 500;
    let short = |line: &str| {
        let n = line.chars().count();
        if n <= 2 * (HEAD + TAIL) {
            return line.to_owned();
        }
        let head: String = line.chars().take(HEAD).collect();
        let tail: String = line.chars().skip(n - TAIL).collect();
        format!("{head} ... ({} characters left out) ... {tail}", n - HEAD - TAIL)
    };
    text.split('\n').map(short).collect::<Vec<_>>().join("\n")
}

fn escape(letter: char, out: &mut String) {
    match letter {
        '\r' => out.push_str("\\r"),
        _ => letter.encode_utf16(&mut [0; 2]).iter().for_each(|unit| {
            write!(out, "\\u{unit:04x}").expect("writing to a String does not fail");
        }),
    }
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
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_shortened_to_a_number_of_characters() {
        for (text, want) in [("", ""), ("äbc", "äbc"), ("äbcd", "äb…"), ("\u{1f469}\u{1f680}cd", "\u{1f469}\u{1f680}…")]
        {
            assert_eq!(shortened(text, 3), want);
        }
    }

    #[test]
    fn control_characters_are_escaped() {
        for (text, want) in [
            ("a\x1b[2Jb", "a\\u001b[2Jb"),
            ("x\u{202e}y\u{2066}", "x\\u202ey\\u2066"),
            ("\r\0\u{7f}\u{9b}", "\\r\\u0000\\u007f\\u009b"),
            ("\u{feff}\u{e0041}", "\\ufeff\\udb40\\udc41"),
            ("two\nlines\tand \u{1f469}\u{200d}\u{1f680} é", "two\nlines\tand \u{1f469}\u{200d}\u{1f680} é"),
        ] {
            assert_eq!(printable(text), want);
        }
    }

    #[test]
    fn json_keeps_its_value() {
        let value = serde_json::json!({"a\u{9b}": ["\u{1b}[2J\r", "\u{202e}\u{e0041}\n\t\\"]});
        for json in [value.to_string(), format!("{value:#}")] {
            let escaped = printable(&json);
            assert!(!escaped.contains(is_hidden), "{escaped}");
            assert_eq!(serde_json::from_str::<serde_json::Value>(&escaped).unwrap(), value);
        }
    }
}
