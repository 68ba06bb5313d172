//! Python's methods of `str` where Rust's differ: the separators U+001C to U+001F are blank to Python.

/// `str.isspace` of one character.
pub(crate) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// `str.strip()`.
pub(crate) fn strip(text: &str) -> &str {
    text.trim_matches(is_space)
}

/// `str.lstrip()`.
pub(crate) fn lstrip(text: &str) -> &str {
    text.trim_start_matches(is_space)
}

/// `str.rstrip()`.
pub(crate) fn rstrip(text: &str) -> &str {
    text.trim_end_matches(is_space)
}

/// `str.split()`: the words between blanks.
pub(crate) fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(is_space).filter(|word| !word.is_empty())
}

/// `text[-1].isspace()`, false for an empty text.
pub(crate) fn ends_blank(text: &str) -> bool {
    text.chars().next_back().is_some_and(is_space)
}

/// `text[0].isspace()`, false for an empty text.
pub(crate) fn starts_blank(text: &str) -> bool {
    text.chars().next().is_some_and(is_space)
}

/// `len(text)`: Python counts code points.
pub(crate) fn len(text: &str) -> usize {
    text.chars().count()
}

/// `str.capitalize()`: the first character in title case, the others in lower case.
pub(crate) fn capitalize(text: &str) -> String {
    let mut chars = text.chars();
    let Some(first) = chars.next() else { return String::new() };
    // What has several letters in upper case keeps only the first of them: title case.
    let mut upper = first.to_uppercase();
    let head: String = upper.next().into_iter().chain(upper.flat_map(char::to_lowercase)).collect();
    head + &chars.as_str().to_lowercase()
}

/// `str.isupper()`: there are letters with case, and all of them are capital.
pub(crate) fn is_upper(text: &str) -> bool {
    text.chars().any(char::is_uppercase) && !text.chars().any(char::is_lowercase)
}

/// `str.islower()`.
pub(crate) fn is_lower(text: &str) -> bool {
    text.chars().any(char::is_lowercase) && !text.chars().any(char::is_uppercase)
}

/// `str.isdigit()` for the digits that a number can be read from.
pub(crate) fn is_digit(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())
}

/// `string.punctuation`.
pub(crate) const PUNCTUATION: &str = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~";

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
