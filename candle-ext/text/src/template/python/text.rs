//! Methods of Python's `str` that differ from Rust's: Python counts U+001C to U+001F as whitespace.

use std::sync::LazyLock;

use regex_automata::meta::Regex;

/// Implements `str.isspace` for one character.
pub fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// Implements `str.strip()`.
pub fn strip(text: &str) -> &str {
    text.trim_matches(is_space)
}

/// Implements `str.lstrip()`.
pub fn lstrip(text: &str) -> &str {
    text.trim_start_matches(is_space)
}

/// Implements `str.rstrip()`.
pub fn rstrip(text: &str) -> &str {
    text.trim_end_matches(is_space)
}

/// Implements `str.split()`: returns the words between whitespace.
pub fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(is_space).filter(|word| !word.is_empty())
}

/// Implements `text[-1].isspace()`; false for an empty text.
pub fn ends_with_space(text: &str) -> bool {
    text.chars().next_back().is_some_and(is_space)
}

/// Implements `text[0].isspace()`; false for an empty text.
pub fn starts_with_space(text: &str) -> bool {
    text.chars().next().is_some_and(is_space)
}

/// Implements `len(text)`: counts code points.
pub fn len(text: &str) -> usize {
    text.chars().count()
}

/// Implements `str.capitalize()`: the first character in title case, the others in lower case.
pub fn capitalize(text: &str) -> String {
    let mut chars = text.chars();
    let Some(first) = chars.next() else { return String::new() };
    // A title-case character that expands to several letters keeps only the first in upper case.
    let mut upper = first.to_uppercase();
    let head: String = upper.next().into_iter().chain(upper.flat_map(char::to_lowercase)).collect();
    head + &chars.as_str().to_lowercase()
}

/// Implements `(text + "\n").splitlines()`.
pub fn lines(text: &str) -> Vec<&str> {
    let is_break = |c: char| {
        matches!(c, '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}')
    };
    let (mut lines, mut rest) = (Vec::new(), text);
    while let Some(at) = rest.find(is_break) {
        let length =
            if rest[at..].starts_with("\r\n") { 2 } else { rest[at..].chars().next().map_or(1, char::len_utf8) };
        lines.push(&rest[..at]);
        rest = &rest[at + length..];
    }
    lines.push(rest);
    lines
}

/// Implements `str.swapcase()`.
pub fn swap_case(text: &str) -> String {
    let swapped = |c: char| match c.is_uppercase() {
        true => c.to_lowercase().collect::<String>(),
        false => c.to_uppercase().collect(),
    };
    text.chars().map(swapped).collect()
}

/// Implements `str.isdecimal()` for one character: a digit of any script.
pub fn is_decimal(c: char) -> bool {
    static DECIMAL: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"\p{Nd}").expect("the pattern is a constant"));
    if c.is_ascii() { c.is_ascii_digit() } else { DECIMAL.is_match(c.encode_utf8(&mut [0; 4]).as_bytes()) }
}

/// Implements `str.isupper()`: all cased letters are upper case, and there is at least one.
pub fn is_upper(text: &str) -> bool {
    text.chars().any(char::is_uppercase) && !text.chars().any(char::is_lowercase)
}

/// Implements `str.islower()`.
pub fn is_lower(text: &str) -> bool {
    text.chars().any(char::is_lowercase) && !text.chars().any(char::is_uppercase)
}

/// Implements `str.isdigit()` for decimal digits.
pub fn is_digit(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())
}

/// Python's `string.punctuation`.
pub const PUNCTUATION: &str = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn information_separators_are_blank() {
        assert_eq!(strip("\u{1c} a\u{1f}\u{a0}"), "a");
        assert_eq!(words(" a\u{1d}b ").collect::<Vec<_>>(), ["a", "b"]);
    }

    #[test]
    fn capitalize_lowers_the_rest() {
        assert_eq!(capitalize("hELLO World"), "Hello world");
        assert_eq!(capitalize("ßA"), "Ssa");
        assert_eq!(capitalize(""), "");
    }

    #[test]
    fn case_needs_letters() {
        assert!(is_upper("A1!") && !is_upper("1!") && !is_upper("Ab"));
        assert!(is_lower("a b") && !is_lower("1"));
    }
}
