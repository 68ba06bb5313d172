//! Rewriting of a template's source before it is parsed.
//!
//! minijinja lacks transformers' `{% generation %}` tag, and templates do not mark where a message begins. Both are
//! replaced by markers: calls that print a position into the text, which `markers` removes again.
//!
//! A marker is placed between block tags and copies the whitespace control of the tag next to it, so the rest of the
//! output is unchanged. Line numbers stay the same, for errors.

use super::markers::{CLOSE_LOOP, FENCE, GENERATION, TURN};

/// Removes `generation` tags, which have no effect on the text.
pub(super) fn plain(source: &str) -> String {
    rewrite(source, |tag| match tag.keyword {
        "generation" => Some(tag.replaced("if true")),
        "endgeneration" => Some(tag.replaced("endif")),
        _ => None,
    })
}

/// Inserts a marker at each end of a `generation` block.
pub(super) fn mark_generation_blocks(source: &str) -> String {
    rewrite(source, generation_mark)
}

/// Inserts markers as [`mark_generation_blocks`] does, and also in loops.
///
/// Each iteration begins with a marker that has the loop's variables. Each loop ends with one.
pub(super) fn mark_generation_blocks_and_loops(source: &str) -> String {
    let mut open_loops = Vec::new();
    let mut n_loops = 0;
    rewrite(source, |tag| match tag.keyword {
        "for" => {
            n_loops += 1;
            open_loops.push(n_loops);
            let mut arguments = loop_variables(tag.body)?;
            // Some templates use an index: `for i in range(messages | length)`, then `messages[i]`.
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

/// Returns true if the template has `generation` blocks.
pub(super) fn has_generation(source: &str) -> bool {
    let mut found = false;
    rewrite(source, |tag| {
        found |= tag.keyword == "generation";
        None
    });
    found
}

/// Returns the loop variables: `a, b` of `for a, b in xs`.
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

/// Block tag, `{%- body -%}`.
struct Tag<'a> {
    keyword: &'a str,
    body: &'a str,
    /// Whitespace control after the opening delimiter and before the closing one.
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

/// Copies the source and replaces each block tag by the result of `change`, if there is one.
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
            // In raw text a delimiter is plain text: continue after its first character.
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

/// Returns the length of the code at the start of `from`, including its closing delimiter. As in Jinja, delimiters
/// inside quotes or brackets do not count.
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
