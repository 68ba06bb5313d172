//! Rewrites a template's source before it is parsed.
//!
//! `{% generation %}` is transformers' own tag, which minijinja does not know, and no template
//! says where a message begins. Both are answered by markers: calls that print a position
//! into the text, to be taken out again by `markers`. A marker stands between block tags and
//! takes over the whitespace control of the tag it stands beside, so that it changes nothing
//! else; lines are not moved, so that an error still names the author's line.

use super::markers::{CLOSE_LOOP, FENCE, GENERATION, TURN};

/// The source without `generation` tags, which mean nothing when only text is wanted.
pub(super) fn plain(source: &str) -> String {
    rewrite(source, |tag| match tag.keyword {
        "generation" => Some(tag.replaced("if true")),
        "endgeneration" => Some(tag.replaced("endif")),
        _ => None,
    })
}

/// The source with a marker at each end of a `generation` block.
pub(super) fn with_generation_marks(source: &str) -> String {
    rewrite(source, generation_mark)
}

/// The same, with a marker also where each iteration of a loop begins, carrying the loop's
/// variables, and one where each loop has ended.
pub(super) fn with_loop_marks(source: &str) -> String {
    let mut open_loops = Vec::new();
    let mut n_loops = 0;
    rewrite(source, |tag| match tag.keyword {
        "for" => {
            n_loops += 1;
            open_loops.push(n_loops);
            let mut arguments = loop_variables(tag.body)?;
            // Some templates count: `for i in range(messages | length)`, then `messages[i]`.
            if source.contains(&format!("messages[{arguments}]")) {
                arguments = format!("messages[{arguments}]");
            }
            Some(tag.followed_by(&format!("{TURN}({FENCE}, {n_loops}, {arguments})")))
        }
        "endfor" => {
            let loop_id = open_loops.pop()?;
            Some(tag.followed_by(&format!("{CLOSE_LOOP}({FENCE}, {loop_id})")))
        }
        _ => generation_mark(tag),
    })
}

fn generation_mark(tag: &Tag<'_>) -> Option<String> {
    let call = |opens: bool| format!("{{{{ {GENERATION}({FENCE}, {opens}) }}}}");
    match tag.keyword {
        "generation" => Some(tag.replaced(&format!("if true %}}{}{{% endif %}}{{% if true", call(true)))),
        "endgeneration" => Some(tag.replaced(&format!("endif %}}{{% if true %}}{}{{% endif", call(false)))),
        _ => None,
    }
}

/// Whether the template says itself what the assistant generates.
pub(super) fn has_generation(source: &str) -> bool {
    let mut found = false;
    rewrite(source, |tag| {
        found |= tag.keyword == "generation";
        None
    });
    found
}

/// `for a, b in xs` binds `a, b`.
fn loop_variables(body: &str) -> Option<String> {
    let target = body.strip_prefix("for")?;
    let end = target.match_indices("in").map(|(at, _)| at).find(|at| {
        target[..*at].ends_with(char::is_whitespace) && target[at + 2..].starts_with(|next: char| !is_word(next))
    })?;
    let names: Vec<&str> =
        target[..end].split(|letter: char| !is_word(letter)).filter(|name| !name.is_empty()).collect();
    (!names.is_empty()).then(|| names.join(", "))
}

fn is_word(letter: char) -> bool {
    letter.is_alphanumeric() || letter == '_'
}

/// A block tag, `{%- body -%}`.
struct Tag<'a> {
    keyword: &'a str,
    body: &'a str,
    /// The whitespace control behind the opening delimiter and before the closing one.
    open_sign: &'a str,
    close_sign: &'a str,
}

impl Tag<'_> {
    fn replaced(&self, body: &str) -> String {
        format!("{{%{} {body} {}%}}", self.open_sign, self.close_sign)
    }

    fn followed_by(&self, call: &str) -> String {
        let (open, body, close) = (self.open_sign, self.body, self.close_sign);
        format!("{{%{open} {body} %}}{{{{ {call} }}}}{{% if true %}}{{% endif {close}%}}")
    }
}

/// Copies the source, with each block tag replaced by what `change` says, if it says something.
fn rewrite<'a>(source: &'a str, mut change: impl FnMut(&Tag<'a>) -> Option<String>) -> String {
    let mut out = String::with_capacity(source.len() + 256);
    let mut rest = source;
    let mut in_raw = false;
    while let Some(start) = rest.find("{").filter(|at| at + 2 <= rest.len()) {
        let (text, from) = rest.split_at(start);
        out.push_str(text);
        let length = match &from.as_bytes()[1] {
            b'#' if !in_raw => from.find("#}").map_or(from.len(), |at| at + 2),
            b'{' if !in_raw => end_of_code(from, "}}"),
            b'%' => end_of_code(from, "%}"),
            _ => 1,
        };
        let (code, after) = from.split_at(length);
        match parse_tag(code) {
            Some(tag) if !in_raw || tag.keyword == "endraw" => {
                in_raw = tag.keyword == "raw";
                out.push_str(&change(&tag).unwrap_or_else(|| code.to_owned()));
                rest = after;
            }
            // In raw text a delimiter is only text: go on behind its first character.
            Some(_) => {
                out.push('{');
                rest = &from[1..];
            }
            None => {
                out.push_str(code);
                rest = after;
            }
        }
    }
    out.push_str(rest);
    out
}

fn parse_tag(code: &str) -> Option<Tag<'_>> {
    let inner = code.strip_prefix("{%")?.strip_suffix("%}")?;
    let (open_sign, inner) = match inner.as_bytes().first() {
        Some(b'-' | b'+') => inner.split_at(1),
        _ => ("", inner),
    };
    let (inner, close_sign) = match inner.as_bytes().last() {
        Some(b'-' | b'+') => inner.split_at(inner.len() - 1),
        _ => (inner, ""),
    };
    let body = inner.trim();
    let end = body.find(|letter| !is_word(letter)).unwrap_or(body.len());
    Some(Tag { keyword: &body[..end], body, open_sign, close_sign })
}

/// The length of the code that `from` begins with, up to and with its closing delimiter. As in
/// Jinja, a delimiter inside quotes or brackets closes nothing.
fn end_of_code(from: &str, delimiter: &str) -> usize {
    let bytes = from.as_bytes();
    let mut depth = 0usize;
    let mut at = 2;
    while at < bytes.len() {
        match bytes[at] {
            _ if depth == 0 && bytes[at..].starts_with(delimiter.as_bytes()) => return at + 2,
            quote @ (b'"' | b'\'') => at = end_of_quote(bytes, at, quote),
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        at += 1;
    }
    from.len()
}

fn end_of_quote(bytes: &[u8], start: usize, quote: u8) -> usize {
    let mut at = start + 1;
    while at < bytes.len() && bytes[at] != quote {
        at += if bytes[at] == b'\\' { 2 } else { 1 };
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loops(source: &str) -> Vec<String> {
        let mut found = Vec::new();
        rewrite(source, |tag| {
            found.extend(loop_variables(tag.body).filter(|_| tag.keyword == "for"));
            None
        });
        found
    }

    #[test]
    fn nothing_to_change_changes_nothing() {
        for source in [
            "",
            "{",
            "{%",
            "{{",
            "{#",
            "a{%- if x -%}\n {{ {'a': {}} }} {% endif +%}b",
            "é{é{%é",
            "{% raw %}{% generation %}{{ '{%' }}{% endraw %}",
            "{# {% generation %} #}",
            "{{ '{% generation %}' }}",
            "{% if '%}' == \"\\\"%}\" %}x{% endif %}",
        ] {
            assert_eq!(plain(source), source);
            assert!(!has_generation(source), "{source}");
        }
    }

    #[test]
    fn loop_variables_are_found() {
        let source = "{% for index, inner in inside %}{%- for(a,b)in[1]-%}{%for x in y if z%}";
        assert_eq!(loops(source), ["index, inner", "x"]);
        assert_eq!(loops("{% for (key, value) in pairs %}"), ["key, value"]);
    }

    #[test]
    fn whitespace_control_is_kept() {
        assert_eq!(plain("{%- generation -%}x{%+ endgeneration %}"), "{%- if true -%}x{%+ endif %}");
    }
}
