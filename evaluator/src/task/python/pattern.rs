//! Python's regular expressions, rewritten for `fancy_regex`, with `re.findall`, `re.sub` and `re.split`.
//!
//! Differences that the rewriting removes:
//!
//! - `$` also matches before a final line feed.
//!
//! - `\s` contains U+001C to U+001F, and `\w` contains no marks.
//!
//! - `[` and `&&` are literal inside a class, and so is a `{` that is not a repetition.

use fancy_regex::{Regex, RegexBuilder};

/// Compiled pattern of Python's `re` module.
#[derive(Debug)]
pub(crate) struct PythonRegex {
    regex: Regex,
    n_groups: usize,
}

/// Flags `re.IGNORECASE` and `re.MULTILINE`.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Flags {
    pub(crate) ignore_case: bool,
    pub(crate) multi_line: bool,
}

/// Match: byte range, and the groups from group 1 on. A group without a match is empty.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RegexMatch {
    pub(crate) start: usize,
    pub(crate) end: usize,
    pub(crate) groups: Vec<String>,
}

impl PythonRegex {
    /// Compiles a pattern. The error contains the regex engine's message.
    pub(crate) fn new(pattern: &str) -> Result<Self, String> {
        Self::with_flags(pattern, Flags::default())
    }

    pub(crate) fn with_flags(pattern: &str, flags: Flags) -> Result<Self, String> {
        let regex = RegexBuilder::new(&rewrite(pattern, flags))
            .case_insensitive(flags.ignore_case)
            .multi_line(flags.multi_line)
            .backtrack_limit(50_000_000)
            .build()
            .map_err(|error| format!("unsupported regular expression {pattern:?}: {error}"))?;
        let n_groups = regex.captures_len() - 1;
        Ok(Self { regex, n_groups })
    }

    /// Returns all matches. As in Python, an empty match may directly follow another match.
    pub(crate) fn find_all(&self, text: &str) -> Result<Vec<RegexMatch>, String> {
        let mut all = Vec::new();
        let (mut from, mut empty_at) = (0, None);
        while let Some(found) = self.find_from(text, from)? {
            if found.start == found.end && empty_at == Some(found.start) {
                let Some(c) = text[from..].chars().next() else { break };
                from += c.len_utf8();
                empty_at = None;
                continue;
            }
            from = found.end;
            empty_at = (found.start == found.end).then_some(found.end);
            all.push(found);
        }
        Ok(all)
    }

    /// Returns an element of `re.findall`: the match, its only group, or all groups.
    pub(crate) fn findall_item<'a>(&self, text: &'a str, found: &'a RegexMatch) -> Vec<&'a str> {
        match self.n_groups {
            0 => vec![&text[found.start..found.end]],
            _ => found.groups.iter().map(String::as_str).collect(),
        }
    }

    /// Returns true if `re.findall` returns tuples.
    pub(crate) fn has_several_groups(&self) -> bool {
        self.n_groups > 1
    }

    /// Implements `re.sub` with a function as the replacement.
    pub(crate) fn replace(&self, text: &str, with: impl Fn(&RegexMatch) -> String) -> Result<String, String> {
        let (mut out, mut at) = (String::new(), 0);
        for found in self.find_all(text)? {
            out.push_str(&text[at..found.start]);
            out.push_str(&with(&found));
            at = found.end;
        }
        out.push_str(&text[at..]);
        Ok(out)
    }

    /// Implements `re.sub(pattern, "", text)`.
    pub(crate) fn remove(&self, text: &str) -> Result<String, String> {
        self.replace(text, |_| String::new())
    }

    /// Implements `re.split` for a pattern without groups.
    pub(crate) fn split<'a>(&self, text: &'a str) -> Result<Vec<&'a str>, String> {
        let (mut parts, mut at) = (Vec::new(), 0);
        for found in self.find_all(text)? {
            parts.push(&text[at..found.start]);
            at = found.end;
        }
        parts.push(&text[at..]);
        Ok(parts)
    }

    fn find_from(&self, text: &str, from: usize) -> Result<Option<RegexMatch>, String> {
        let captures = self.regex.captures_from_pos(text, from).map_err(|error| error.to_string())?;
        let Some(captures) = captures else { return Ok(None) };
        let Some(whole) = captures.get(0) else { return Ok(None) };
        let group = |i| captures.get(i).map_or(String::new(), |group| group.as_str().to_owned());
        let groups = (1..=self.n_groups).map(group).collect();
        Ok(Some(RegexMatch { start: whole.start(), end: whole.end(), groups }))
    }
}

/// Implements `re.escape`.
pub(crate) fn escape(text: &str) -> String {
    text.chars().flat_map(|c| [is_special(c).then_some('\\'), Some(c)]).flatten().collect()
}

fn is_special(c: char) -> bool {
    "()[]{}?*+-|^$\\.&~# \t\n\r\u{b}\u{c}".contains(c)
}

const SPACE: &str = r"\s\x1c-\x1f";
const WORD: &str = r"\p{L}\p{N}_";

fn rewrite(pattern: &str, flags: Flags) -> String {
    let (inline, pattern) = inline_flags(pattern);
    let is_multi_line = flags.multi_line || inline.contains('m');
    let kept: String = inline.chars().filter(|c| "imsx".contains(*c)).collect();
    let mut out = if kept.is_empty() { String::new() } else { format!("(?{kept})") };
    let chars: Vec<char> = pattern.chars().collect();
    let mut at = 0;
    while at < chars.len() {
        match chars[at] {
            '\\' if at + 1 < chars.len() => {
                out.push_str(&escaped(chars[at + 1]));
                at += 2;
            }
            '[' => at = class(&chars, at, &mut out),
            '$' if !is_multi_line => {
                out.push_str(r"(?=\n?\z)");
                at += 1;
            }
            '{' => at = repetition(&chars, at, &mut out),
            '}' => {
                out.push_str(r"\}");
                at += 1;
            }
            c => {
                out.push(c);
                at += 1;
            }
        }
    }
    out
}

/// Splits a pattern into its leading inline flags, such as `(?s)`, and the rest.
fn inline_flags(pattern: &str) -> (&str, &str) {
    let flags = pattern.strip_prefix("(?").and_then(|rest| rest.split_once(')'));
    match flags {
        Some((flags, rest)) if !flags.is_empty() && flags.chars().all(|c| "aiLmsux".contains(c)) => (flags, rest),
        _ => ("", pattern),
    }
}

/// Rewrites the escape sequence of `c` outside of a class.
fn escaped(c: char) -> String {
    match c {
        's' => format!("[{SPACE}]"),
        'S' => format!("[^{SPACE}]"),
        'w' => format!("[{WORD}]"),
        'W' => format!("[^{WORD}]"),
        'd' => r"\p{Nd}".into(),
        'D' => r"\P{Nd}".into(),
        'Z' => r"\z".into(),
        c if c.is_ascii_alphanumeric() => format!("\\{c}"),
        c => literal(c),
    }
}

/// Escapes a character that matches itself, inside and outside of a class.
fn literal(c: char) -> String {
    if c.is_ascii() && !c.is_ascii_alphanumeric() { format!("\\x{:02X}", u32::from(c)) } else { c.to_string() }
}

/// Rewrites the class at `start` and returns the index after it. The regex engine reports an unclosed class.
fn class(chars: &[char], start: usize, out: &mut String) -> usize {
    out.push('[');
    let mut at = start + 1;
    if chars.get(at) == Some(&'^') {
        out.push('^');
        at += 1;
    }
    let first = at;
    while let Some(&c) = chars.get(at) {
        match c {
            ']' if at > first => {
                out.push(']');
                return at + 1;
            }
            '\\' if at + 1 < chars.len() => {
                out.push_str(&escaped_in_class(chars[at + 1]));
                at += 1;
            }
            // A range needs both ends; otherwise the hyphen is literal.
            '-' if at > first && chars.get(at + 1).is_some_and(|next| *next != ']') => out.push('-'),
            c => out.push_str(&literal(c)),
        }
        at += 1;
    }
    at
}

fn escaped_in_class(c: char) -> String {
    match c {
        's' => SPACE.into(),
        'w' => WORD.into(),
        'b' => r"\x08".into(),
        'S' | 'W' | 'd' | 'D' => escaped(c),
        c if c.is_ascii_alphanumeric() => format!("\\{c}"),
        c => literal(c),
    }
}

/// Rewrites a repetition such as `{2,3}`, or escapes a literal brace.
fn repetition(chars: &[char], start: usize, out: &mut String) -> usize {
    let length = chars[start..].iter().position(|c| *c == '}');
    let inside: Option<String> = length.map(|length| chars[start + 1..start + length].iter().collect());
    let Some((length, inside)) = length.zip(inside) else {
        out.push_str(r"\{");
        return start + 1;
    };
    let is_number = |text: &str| text.chars().all(|c| c.is_ascii_digit());
    match inside.split_once(',') {
        None if !inside.is_empty() && is_number(&inside) => out.push_str(&format!("{{{inside}}}")),
        Some((low, high)) if is_number(low) && is_number(high) => {
            let low = if low.is_empty() { "0" } else { low };
            out.push_str(&format!("{{{low},{high}}}"));
        }
        _ => {
            out.push_str(r"\{");
            return start + 1;
        }
    }
    start + length + 1
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(pattern: &str, text: &str, want: &[&[&str]]) {
        let pattern = PythonRegex::new(pattern).unwrap();
        let found = pattern.find_all(text).unwrap();
        let got: Vec<Vec<&str>> = found.iter().map(|found| pattern.findall_item(text, found)).collect();
        assert_eq!(got, want);
    }

    // CPython's `re.findall` returns these values.
    #[test]
    fn findall_is_pythons() {
        check("x*", "axb", &[&[""], &["x"], &[""], &[""]]);
        check(r"(-?[$0-9.,]{2,})|(-?[0-9]+)", "a $18.5, b 7", &[&["$18.5,", ""], &["", "7"]]);
        check(r"#### (\-?[0-9\.\,]+)", "x #### -1,000.", &[&["-1,000."]]);
        check(r"(?<=the answer is )(.*)(?=.)", "so the answer is (B).\nx", &[&["(B)"]]);
        check(r"\([A-Z]\)([^\n^(]*)", "(A) one\n(B) two", &[&[" one"], &[" two"]]);
        check(r"[[\]]", "a[b]", &[&["["], &["]"]]);
        check(r"\\boxed{(.*?)}", r"\boxed{7}", &[&["7"]]);
        check(r"\w+", "e\u{301}a b_1", &[&["e"], &["a"], &["b_1"]]);
        check("a{,2}", "aaa", &[&["aa"], &["a"], &[""]]);
        check(r"[\s\-]+", "a\u{1c}- b", &[&["\u{1c}- "]]);
    }

    #[test]
    fn a_dollar_matches_before_a_last_line_feed() {
        let pattern = PythonRegex::new(r"\.$").unwrap();
        assert_eq!(pattern.remove("a.\n").unwrap(), "a\n");
        assert_eq!(pattern.remove("a.\n.").unwrap(), "a.\n");
        let lines = PythonRegex::with_flags(r"^\s*-.*$", Flags { multi_line: true, ..Flags::default() }).unwrap();
        assert_eq!(lines.find_all("- a\nb\n - c").unwrap().len(), 2);
    }

    #[test]
    fn flags_at_the_head_hold_for_all() {
        let pattern = PythonRegex::new("(?s).*#### ").unwrap();
        assert_eq!(pattern.remove("a\nb #### 7").unwrap(), "7");
        let pattern = PythonRegex::with_flags("Ab", Flags { ignore_case: true, ..Flags::default() }).unwrap();
        assert_eq!(pattern.find_all("xaB").unwrap().len(), 1);
    }

    #[test]
    fn splitting_keeps_empty_parts() {
        let pattern = PythonRegex::new(r"\s+").unwrap();
        assert_eq!(pattern.split(" a b ").unwrap(), ["", "a", "b", ""]);
        assert_eq!(pattern.split("").unwrap(), [""]);
    }

    #[test]
    fn escape_makes_any_text_plain() {
        let text = "a.b[c]{2} \\ (d)|&~#$^*+?-é<>";
        let pattern = PythonRegex::new(&escape(text)).unwrap();
        assert_eq!(pattern.find_all(text).unwrap().len(), 1);
    }

    #[test]
    fn an_invalid_pattern_is_refused() {
        for pattern in ["(", "[", "a**", "(?P<a>"] {
            assert!(PythonRegex::new(pattern).unwrap_err().contains("unsupported regular expression"), "{pattern}");
        }
    }
}
