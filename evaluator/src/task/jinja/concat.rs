//! Python semantics for `~` in templates, which joins the `str` of both operands. minijinja formats operands as Rust
//! does, so both get the filter `string`, which formats as Python, before a template is compiled.

use std::ops::Range;

/// Appends the filter `string` to both operands of every `~`. An operand that contains an arithmetic operator is
/// unchanged.
pub(super) fn with_python_texts(source: &str) -> String {
    let mut inserted: Vec<usize> = Vec::new();
    for tag in tags(source) {
        let tokens = tokens(source, tag);
        for at in (0..tokens.len()).filter(|at| &source[tokens[*at].clone()] == "~") {
            inserted.extend(end_of_left(source, &tokens[..at]));
            inserted.extend(end_of_right(source, &tokens[at + 1..]));
        }
    }
    inserted.sort_unstable();
    inserted.dedup();
    let (mut out, mut from) = (String::new(), 0);
    for at in inserted {
        out += &source[from..at];
        out += "|string";
        from = at;
    }
    out + &source[from..]
}

/// Returns the ranges inside `{{ }}` and `{% %}`.
fn tags(source: &str) -> Vec<Range<usize>> {
    let (mut tags, mut at) = (Vec::new(), 0);
    while let Some(found) = source[at..].find('{') {
        let start = at + found;
        let end = match source.as_bytes().get(start + 1) {
            Some(b'{') => "}}",
            Some(b'%') => "%}",
            Some(b'#') => "#}",
            _ => {
                at = start + 1;
                continue;
            }
        };
        let inside = start + 2;
        let Some(length) = length_up_to(&source[inside..], end) else { break };
        if end != "#}" {
            tags.push(inside..inside + length);
        }
        at = inside + length + 2;
    }
    tags
}

/// Returns the number of bytes up to `end`, which must be outside of string literals.
fn length_up_to(text: &str, end: &str) -> Option<usize> {
    let mut at = 0;
    while !text[at..].starts_with(end) || end == "}}" && text[at..].starts_with("}}}") {
        at += match text[at..].chars().next()? {
            quote @ ('"' | '\'') if end != "#}" => quoted(&text[at..], quote),
            c => c.len_utf8(),
        };
    }
    Some(at)
}

/// Returns the length of a string literal in bytes.
fn quoted(text: &str, quote: char) -> usize {
    let mut is_escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            c if c == quote && !is_escaped => return at + 1,
            c => is_escaped = c == '\\' && !is_escaped,
        }
    }
    text.len()
}

/// Splits a tag into words, numbers, string literals and single characters.
fn tokens(source: &str, tag: Range<usize>) -> Vec<Range<usize>> {
    let (mut tokens, mut at) = (Vec::new(), tag.start);
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    while let Some(c) = source[at..tag.end].chars().next() {
        let rest = &source[at..tag.end];
        let length = match c {
            '"' | '\'' => quoted(rest, c),
            c if is_word(c) => rest.find(|c| !is_word(c)).unwrap_or(rest.len()),
            c => c.len_utf8(),
        };
        if !c.is_whitespace() {
            tokens.push(at..at + length);
        }
        at += length;
    }
    tokens
}

const OPERATORS: [&str; 4] = ["*", "/", "%", "-"];

/// Returns the end of the operand to the left of a `~`.
fn end_of_left(source: &str, before: &[Range<usize>]) -> Option<usize> {
    let text = |token: &Range<usize>| &source[token.clone()];
    let last = before.last()?;
    let mut first = before.len();
    // Skips calls, attributes and filters, back to the start of the operand.
    loop {
        first = beginning(source, &before[..first])?;
        match first.checked_sub(1).map(|at| text(&before[at])) {
            Some("." | "|") => first -= 1,
            Some(word) if is_value_end(word) && "([".contains(text(&before[first])) => {}
            Some(operator) if OPERATORS.contains(&operator) => return None,
            _ => return Some(last.end),
        }
    }
}

/// Returns the index at which the last word or pair of brackets starts.
fn beginning(source: &str, tokens: &[Range<usize>]) -> Option<usize> {
    let mut depth = 0_usize;
    for (at, token) in tokens.iter().enumerate().rev() {
        match &source[token.clone()] {
            ")" | "]" | "}" => depth += 1,
            "(" | "[" | "{" => depth = depth.checked_sub(1)?,
            word if depth == 0 && !is_value_end(word) => return None,
            _ => {}
        }
        if depth == 0 {
            return Some(at);
        }
    }
    None
}

/// Returns true if an operand may end with this token.
fn is_value_end(token: &str) -> bool {
    const NOT: [&str; 8] = ["if", "else", "in", "and", "or", "not", "is", "set"];
    let c = token.chars().next().unwrap_or(' ');
    c.is_alphanumeric() && !NOT.contains(&token) || "_\"')]}".contains(c)
}

/// Returns the end of the operand to the right of a `~`.
fn end_of_right(source: &str, after: &[Range<usize>]) -> Option<usize> {
    let text = |at: usize| after.get(at).map(|token| &source[token.clone()]);
    let mut at = closing(source, after, 0)?;
    loop {
        at = match text(at + 1) {
            Some("." | "|") => closing(source, after, at + 2)?,
            Some("(" | "[") => closing(source, after, at + 1)?,
            Some(operator) if OPERATORS[..3].contains(&operator) => return None,
            _ => return Some(after[at].end),
        };
    }
}

/// Returns the index of the last token of the word or pair of brackets that starts at `at`.
fn closing(source: &str, tokens: &[Range<usize>], at: usize) -> Option<usize> {
    let mut depth = 0_usize;
    for (at, token) in tokens.iter().enumerate().skip(at) {
        match &source[token.clone()] {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth = depth.checked_sub(1)?,
            word if depth == 0 && !is_value_end(word) => return None,
            _ => {}
        }
        if depth == 0 {
            return Some(at);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(source: &str, want: &str) {
        assert_eq!(with_python_texts(source), want);
    }

    #[test]
    fn both_sides_are_texts() {
        check("{{ a ~ b }}", "{{ a|string ~ b|string }}");
        check("a ~ b {# a ~ b #} {{ 'a ~ b' }}", "a ~ b {# a ~ b #} {{ 'a ~ b' }}");
        check(
            "{{ a.b[0] ~ f(x, '~')|upper ~ [1, c] }}!",
            "{{ a.b[0]|string ~ f(x, '~')|upper|string ~ [1, c]|string }}!",
        );
        check(
            "{% if a ~ b == c %}{{ (a ~ b) }}{% endif %}",
            "{% if a|string ~ b|string == c %}{{ (a|string ~ b|string) }}{% endif %}",
        );
        check("{{ a + b ~ c }}", "{{ a + b|string ~ c|string }}");
        check("{{ 'x' ~ {'k': [1]}['k'] }}", "{{ 'x'|string ~ {'k': [1]}['k']|string }}");
    }

    #[test]
    fn expressions_beyond_single_values_are_unchanged() {
        check("{{ a * b ~ c }}", "{{ a * b ~ c|string }}");
        check("{{ a ~ -1 }}", "{{ a|string ~ -1 }}");
        check("{{ a ~ b * c }}", "{{ a|string ~ b * c }}");
        check("{{ a ~", "{{ a ~");
        check("{{ ~ }}{% set x = ~ %}", "{{ ~ }}{% set x = ~ %}");
    }
}
