//! `ast.literal_eval`: strings, numbers, lists, tuples, sets, dicts, `True`, `False` and `None`.

use candlewick_text::long_integer::from_digits;
use serde_json::{Map, Number, Value as Json};

/// Parses a Python literal. Tuples and sets become lists. The error names the first invalid character.
pub(crate) fn literal_eval(text: &str) -> Result<Json, String> {
    let mut reader = Reader { text, at: 0 };
    reader.skip_blanks();
    let value = reader.value()?;
    reader.skip_blanks();
    match reader.peek() {
        None => Ok(value),
        // A tuple without parentheses: `1, 2`.
        Some(',') => reader.items(vec![value], None),
        Some(_) => Err(reader.stopped()),
    }
}

/// Parses the literal at the beginning of a text, and ignores the rest.
pub(crate) fn literal_prefix(text: &str) -> Result<Json, String> {
    let mut reader = Reader { text, at: 0 };
    reader.skip_blanks();
    reader.value()
}

struct Reader<'a> {
    text: &'a str,
    at: usize,
}

impl Reader<'_> {
    fn peek(&self) -> Option<char> {
        self.text[self.at..].chars().next()
    }

    fn next(&mut self) -> Option<char> {
        let c = self.peek()?;
        self.at += c.len_utf8();
        Some(c)
    }

    fn take(&mut self, prefix: &str) -> bool {
        let found = self.text[self.at..].starts_with(prefix);
        self.at += if found { prefix.len() } else { 0 };
        found
    }

    fn skip_blanks(&mut self) {
        while self.peek().is_some_and(|c| c.is_ascii_whitespace()) {
            self.at += 1;
        }
    }

    fn stopped(&self) -> String {
        let rest: String = self.text[self.at..].chars().take(20).collect();
        format!("not a Python literal at character {}: {rest:?}", self.text[..self.at].chars().count() + 1)
    }

    fn value(&mut self) -> Result<Json, String> {
        match self.peek() {
            Some('[') => self.bracketed(']'),
            Some('(') => self.parenthesised(),
            Some('{') => self.braced(),
            Some('\'' | '"') => self.texts(),
            Some('u' | 'r' | 'U' | 'R') => self.texts(),
            Some(c) if c.is_ascii_digit() || "+-.".contains(c) => self.number(),
            _ if self.take("True") => Ok(Json::Bool(true)),
            _ if self.take("False") => Ok(Json::Bool(false)),
            _ if self.take("None") => Ok(Json::Null),
            _ => Err(self.stopped()),
        }
    }

    fn bracketed(&mut self, close: char) -> Result<Json, String> {
        self.next();
        self.items(Vec::new(), Some(close))
    }

    /// Parses `(a)` as a, and `(a,)` and `(a, b)` as tuples.
    fn parenthesised(&mut self) -> Result<Json, String> {
        self.next();
        self.skip_blanks();
        if self.take(")") {
            return Ok(Json::Array(Vec::new()));
        }
        let first = self.value()?;
        self.skip_blanks();
        if self.take(")") { Ok(first) } else { self.items(vec![first], Some(')')) }
    }

    /// Parses further items, up to `close` or the end of the text. `items` holds those already parsed.
    fn items(&mut self, mut items: Vec<Json>, close: Option<char>) -> Result<Json, String> {
        loop {
            self.skip_blanks();
            let separated = items.is_empty() || self.take(",");
            self.skip_blanks();
            if self.peek() == close {
                self.next();
                return Ok(Json::Array(items));
            }
            if !separated {
                return Err(self.stopped());
            }
            items.push(self.value()?);
        }
    }

    fn braced(&mut self) -> Result<Json, String> {
        let start = self.at;
        self.next();
        let mut fields = Map::new();
        loop {
            self.skip_blanks();
            let separated = fields.is_empty() || self.take(",");
            self.skip_blanks();
            if self.take("}") {
                return Ok(Json::Object(fields));
            }
            if !separated {
                return Err(self.stopped());
            }
            let key = self.value()?;
            self.skip_blanks();
            if !self.take(":") {
                self.at = start;
                return self.bracketed('}');
            }
            self.skip_blanks();
            fields.insert(super::repr::str(&key), self.value()?);
        }
    }

    /// Parses adjacent string literals, which Python concatenates.
    fn texts(&mut self) -> Result<Json, String> {
        let mut all = String::new();
        loop {
            let raw = match self.peek() {
                Some('r' | 'R') => self.next().is_some(),
                Some('u' | 'U') => self.next().is_none(),
                _ => false,
            };
            self.quoted(raw, &mut all)?;
            let after = self.at;
            self.skip_blanks();
            if !matches!(self.peek(), Some('\'' | '"')) {
                self.at = after;
                return Ok(Json::String(all));
            }
        }
    }

    fn quoted(&mut self, raw: bool, out: &mut String) -> Result<(), String> {
        let quote = ["'''", "\"\"\"", "'", "\""].into_iter().find(|quote| self.take(quote));
        let Some(quote) = quote else { return Err(self.stopped()) };
        loop {
            if self.take(quote) {
                return Ok(());
            }
            match self.next() {
                None => return Err("not a Python literal: unterminated string".into()),
                Some('\n') if quote.len() == 1 => return Err("not a Python literal: line break in a string".into()),
                Some('\\') if raw => {
                    out.push('\\');
                    out.extend(self.next());
                }
                Some('\\') => self.escape(out)?,
                Some(c) => out.push(c),
            }
        }
    }

    fn escape(&mut self, out: &mut String) -> Result<(), String> {
        let code = match self.next() {
            Some('n') => '\n',
            Some('t') => '\t',
            Some('r') => '\r',
            Some('a') => '\u{7}',
            Some('b') => '\u{8}',
            Some('f') => '\u{c}',
            Some('v') => '\u{b}',
            Some('\n') => return Ok(()),
            Some(c @ ('\\' | '\'' | '"')) => c,
            Some('x') => self.code(2)?,
            Some('u') => self.code(4)?,
            Some('U') => self.code(8)?,
            Some(c @ '0'..='7') => self.octal(c),
            Some(c) => {
                out.push('\\');
                c
            }
            None => return Err(self.stopped()),
        };
        out.push(code);
        Ok(())
    }

    fn code(&mut self, n_digits: usize) -> Result<char, String> {
        let digits = self.text.get(self.at..self.at + n_digits).ok_or_else(|| self.stopped())?;
        let code = u32::from_str_radix(digits, 16).ok().and_then(char::from_u32).ok_or_else(|| self.stopped())?;
        self.at += n_digits;
        Ok(code)
    }

    fn octal(&mut self, first: char) -> char {
        let mut code = first.to_digit(8).unwrap_or(0);
        for _ in 0..2 {
            let Some(digit) = self.peek().and_then(|c| c.to_digit(8)) else { break };
            code = code * 8 + digit;
            self.at += 1;
        }
        char::from_u32(code).unwrap_or('\u{fffd}')
    }

    fn number(&mut self) -> Result<Json, String> {
        let start = self.at;
        let mut is_exponent = false;
        while let Some(c) = self.peek() {
            let is_sign = "+-".contains(c) && (self.at == start || is_exponent);
            if !(c.is_ascii_digit() || c == '.' || c == '_' || "eE".contains(c) || is_sign) {
                break;
            }
            is_exponent = "eE".contains(c);
            self.at += 1;
        }
        let digits = self.text[start..self.at].replace('_', "");
        let integer = from_digits(digits.trim_start_matches('+'));
        let number = integer.or_else(|| digits.parse().ok().and_then(Number::from_f64).map(Json::Number));
        number.ok_or_else(|| {
            self.at = start;
            self.stopped()
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::super::repr::repr;
    use super::*;

    #[test]
    fn literals_of_all_kinds() {
        let text = r#" ["a", 'b\'\x41\n', ('c' "d"), (1,), -2.5e3, None, True, {'k': [1, 2,]}, {3}, ()] "#;
        let want = json!(["a", "b'A\n", "cd", [1], -2500.0, null, true, {"k": [1, 2]}, [3], []]);
        assert_eq!(literal_eval(text).unwrap(), want);
        assert_eq!(literal_eval("1, 'b'").unwrap(), json!([1, "b"]));
    }

    #[test]
    fn a_text_that_is_no_literal_is_an_error_with_its_position() {
        assert!(literal_eval("[1, x]").unwrap_err().contains("character 5"));
        assert!(literal_eval("['a").unwrap_err().contains("unterminated string"));
        for text in ["", "[1 2]", "[", "{1: }", "'a' b", "1.2.3", "[,]", "\\", "'\\x4'"] {
            assert!(literal_eval(text).is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn the_output_of_repr_is_parsed_back(texts in prop::collection::vec(".{0,12}", 0..4), number: i64, float: f64) {
            let value = json!([texts, number, float, {"k": texts}]);
            prop_assert_eq!(literal_eval(&repr(&value)).unwrap(), value);
        }

        #[test]
        fn any_text_is_a_literal_or_an_error(text in "[\\[\\](){},:'\"\\\\a-f0-9.+ ]{0,20}") {
            let _ = literal_eval(&text);
        }
    }
}
