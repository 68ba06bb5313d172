//! The `mod`, `use` and path mentions of one Rust file, without its tests.

use std::collections::BTreeSet;
use std::ops::Range;

/// The part of a file that says which other files it depends on.
#[derive(Default)]
pub(crate) struct SourceFile {
    /// The names of `mod name;`.
    pub(crate) children: Vec<String>,
    pub(crate) imports: Vec<Import>,
    /// Paths of two or more segments outside of `use`.
    pub(crate) paths: Vec<Vec<String>>,
    /// Identifiers outside of `use`.
    pub(crate) words: BTreeSet<String>,
    /// The names of the items that the file defines.
    pub(crate) definitions: BTreeSet<String>,
}

/// One name that a `use` brings into scope; a glob has the name `*`.
pub(crate) struct Import {
    pub(crate) path: Vec<String>,
    pub(crate) name: String,
    pub(crate) is_reexport: bool,
}

impl SourceFile {
    pub(crate) fn parse(text: &str) -> Self {
        let tokens = tokens(text);
        let mut source = Self::default();
        let mut at = 0;
        while at < tokens.len() {
            at = source.take(&tokens, at);
        }
        source
    }

    /// Reads what begins at token `at`; returns where the next begins.
    fn take(&mut self, tokens: &[String], at: usize) -> usize {
        let word = |offset: usize| tokens.get(at + offset).map_or("", String::as_str);
        if let Some(end) = test_attribute(tokens, at) {
            return end_of_item(tokens, end);
        }
        if word(0) == "mod" && word(2) == ";" {
            self.children.push(word(1).to_owned());
            return at + 3;
        }
        if word(0) == "use" && word(1) != "<" {
            let end = end_of(tokens, at, ";");
            let is_reexport = at > 0 && matches!(tokens[at - 1].as_str(), "pub" | ")");
            self.imports.extend(leaves(&tokens[at + 1..end], &[], is_reexport));
            return end + 1;
        }
        const KEYWORDS: [&str; 9] = ["fn", "struct", "enum", "trait", "type", "const", "static", "union", "mod"];
        if KEYWORDS.contains(&word(0)) {
            self.definitions.insert(word(1).to_owned());
        }
        if word(0) == "macro_rules" {
            self.definitions.insert(word(2).to_owned());
        }
        self.take_path(tokens, at)
    }

    fn take_path(&mut self, tokens: &[String], at: usize) -> usize {
        if !is_word(&tokens[at]) {
            return at + 1;
        }
        let mut path = vec![tokens[at].clone()];
        let mut end = at + 1;
        while tokens.get(end).is_some_and(|token| token == "::") && tokens.get(end + 1).is_some_and(|t| is_word(t)) {
            path.push(tokens[end + 1].clone());
            end += 2;
        }
        self.words.insert(path[0].clone());
        let is_rest = at > 0 && matches!(tokens[at - 1].as_str(), "::" | ".");
        if path.len() > 1 && !is_rest {
            self.paths.push(path);
        }
        end
    }
}

/// Returns the end of a `#[cfg(test)]` or `#[cfg(all(test, ..))]` that begins at `at`.
fn test_attribute(tokens: &[String], at: usize) -> Option<usize> {
    let begins_with =
        |wanted: &[&str]| wanted.iter().enumerate().all(|(i, w)| tokens.get(at + i).is_some_and(|t| t == w));
    let is_test =
        begins_with(&["#", "[", "cfg", "(", "test", ")"]) || begins_with(&["#", "[", "cfg", "(", "all", "(", "test"]);
    is_test.then(|| end_of(tokens, at, "]") + 1)
}

/// Returns the end of the item that begins at `at`: its `;` or the brace that closes it.
fn end_of_item(tokens: &[String], mut at: usize) -> usize {
    while tokens.get(at).is_some_and(|token| token == "#") {
        at = end_of(tokens, at, "]") + 1;
    }
    let semicolon = end_of(tokens, at, ";");
    let brace = end_of(tokens, at, "}");
    let is_use =
        tokens[at..].iter().find(|token| matches!(token.as_str(), "use" | "{" | ";")).is_some_and(|t| t == "use");
    if is_use { semicolon + 1 } else { semicolon.min(brace) + 1 }
}

/// Returns where `wanted` stands after `from`, outside of any brackets that open after `from`, but for the bracket it closes.
fn end_of(tokens: &[String], from: usize, wanted: &str) -> usize {
    let mut depth = 0;
    for (at, token) in tokens.iter().enumerate().skip(from) {
        match token.as_str() {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth -= 1,
            _ => {}
        }
        if depth == 0 && token == wanted {
            return at;
        }
    }
    tokens.len()
}

/// Returns the names of a `use` tree below `prefix`.
fn leaves(tree: &[String], prefix: &[String], is_reexport: bool) -> Vec<Import> {
    parts(tree).into_iter().flat_map(|part| branch(&tree[part], prefix, is_reexport)).collect()
}

fn branch(branch: &[String], prefix: &[String], is_reexport: bool) -> Vec<Import> {
    let mut path = prefix.to_vec();
    for (at, token) in branch.iter().enumerate() {
        match token.as_str() {
            "::" => {}
            "{" => return leaves(&branch[at + 1..branch.len() - 1], &path, is_reexport),
            "as" => return vec![Import { path, name: branch[at + 1].clone(), is_reexport }],
            "*" => return vec![Import { path, name: "*".to_owned(), is_reexport }],
            "self" if !path.is_empty() => {}
            _ => path.push(token.clone()),
        }
    }
    let name = path.last().cloned().unwrap_or_default();
    if branch.is_empty() { Vec::new() } else { vec![Import { path, name, is_reexport }] }
}

/// Returns the parts of a list that its commas separate, outside of braces.
fn parts(list: &[String]) -> Vec<Range<usize>> {
    let (mut depth, mut start, mut parts) = (0, 0, Vec::new());
    for (at, token) in list.iter().enumerate() {
        match token.as_str() {
            "{" => depth += 1,
            "}" => depth -= 1,
            "," if depth == 0 => {
                parts.push(start..at);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(start..list.len());
    parts
}

fn is_word(token: &str) -> bool {
    token.starts_with(|first: char| first.is_alphabetic() || first == '_')
}

/// Splits Rust code into words, `::` and single characters, without comments and literals.
fn tokens(text: &str) -> Vec<String> {
    let mut tokens = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let length = match skipped(rest) {
            Some(length) => length,
            None => {
                let word = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
                let length = if word > 0 {
                    word
                } else if rest.starts_with("::") {
                    2
                } else {
                    first.len_utf8()
                };
                tokens.push(rest[..length].to_owned());
                length
            }
        };
        rest = &rest[length..];
    }
    tokens
}

/// Returns the length of the space, comment, literal or lifetime at the start of `rest`.
fn skipped(rest: &str) -> Option<usize> {
    let after = |opening: usize, closing: &str| {
        rest[opening..].find(closing).map_or(rest.len(), |at| opening + at + closing.len())
    };
    match rest.as_bytes() {
        [b'/', b'/', ..] => Some(after(0, "\n")),
        [b'/', b'*', ..] => Some(after(2, "*/")),
        [b'b', b'"' | b'\'', ..] => skipped(&rest[1..]).map(|length| length + 1),
        [b'r', b'"' | b'#', ..] | [b'b', b'r', b'"' | b'#', ..] => {
            let hashes: String = rest.trim_start_matches(['b', 'r']).chars().take_while(|c| *c == '#').collect();
            let opening = rest.find('"')? + 1;
            Some(after(opening, &format!("\"{hashes}")))
        }
        [b'"', ..] => Some(end_of_string(rest)),
        [b'\'', b'\\', ..] => Some(after(3, "'")),
        [b'\'', ..] => {
            let is_character = rest.chars().nth(2) == Some('\'');
            Some(if is_character { rest.char_indices().nth(3).map_or(rest.len(), |(at, _)| at) } else { 1 })
        }
        [byte, ..] if byte.is_ascii_whitespace() => Some(1),
        _ => None,
    }
}

fn end_of_string(rest: &str) -> usize {
    let mut is_escaped = true;
    for (at, character) in rest.char_indices() {
        match character {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            '"' => return at + 1,
            _ => {}
        }
    }
    rest.len()
}
