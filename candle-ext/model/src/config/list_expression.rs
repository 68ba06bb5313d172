//! Python expressions of lists of 0 and 1, such as `([1]*3+[0])*3` of Megatron-LM's `--moe-layer-freq`.
//!
//! Lists, integers, `+`, `*` and parentheses. Sizes and nesting are limited.

/// Maximum number of entries of a list, and maximum integer.
const MAX_ENTRIES: usize = 10_000;
/// Maximum number of nested parentheses.
const MAX_NESTING: usize = 32;

/// Problem of an expression, at a column that counts characters from 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ExpressionError {
    pub(super) column: usize,
    pub(super) problem: String,
}

/// Returns the entries of the list that `text` evaluates to; true is 1.
pub(super) fn evaluate_list(text: &str) -> Result<Vec<bool>, ExpressionError> {
    let mut parser = ExpressionParser { text, position: 0, nesting: 0 };
    let value = parser.sum()?;
    match (parser.peek(), value) {
        (None, Operand::List(list)) => Ok(list),
        (None, Operand::Integer(n)) => Err(parser.error(0, format!("expected a list, found the integer {n}"))),
        (Some(_), _) => Err(parser.unexpected("`+`, `*` or the end")),
    }
}

enum Operand {
    Integer(usize),
    List(Vec<bool>),
}

/// Recursive descent over the bytes of a text. `position` is always the start of a character.
struct ExpressionParser<'a> {
    text: &'a str,
    position: usize,
    nesting: usize,
}

impl ExpressionParser<'_> {
    fn sum(&mut self) -> Result<Operand, ExpressionError> {
        let mut left = self.product()?;
        while let Some(operator) = self.take(b'+') {
            left = match (left, self.product()?) {
                (Operand::Integer(a), Operand::Integer(b)) => Operand::Integer(self.bounded(operator, a + b)?),
                (Operand::List(a), Operand::List(b)) => {
                    self.bounded(operator, a.len() + b.len())?;
                    Operand::List([a, b].concat())
                }
                _ => return Err(self.error(operator, "cannot add a list and an integer; write the integer as a list")),
            };
        }
        Ok(left)
    }

    fn product(&mut self) -> Result<Operand, ExpressionError> {
        let mut left = self.operand()?;
        while let Some(operator) = self.take(b'*') {
            // Operands are at most MAX_ENTRIES, so nothing overflows.
            left = match (left, self.operand()?) {
                (Operand::Integer(a), Operand::Integer(b)) => Operand::Integer(self.bounded(operator, a * b)?),
                (Operand::List(list), Operand::Integer(n)) | (Operand::Integer(n), Operand::List(list)) => {
                    self.bounded(operator, list.len() * n)?;
                    Operand::List(list.repeat(n))
                }
                _ => return Err(self.error(operator, "cannot multiply two lists; multiply a list by an integer")),
            };
        }
        Ok(left)
    }

    fn operand(&mut self) -> Result<Operand, ExpressionError> {
        match self.peek() {
            Some(b'0'..=b'9') => self.integer().map(Operand::Integer),
            Some(b'[') => self.list().map(Operand::List),
            Some(b'(') => self.parentheses(),
            _ => Err(self.unexpected("an integer, `[` or `(`")),
        }
    }

    fn parentheses(&mut self) -> Result<Operand, ExpressionError> {
        if self.nesting == MAX_NESTING {
            let problem = format!("more than {MAX_NESTING} nested parentheses; remove some");
            return Err(self.error(self.position, problem));
        }
        self.position += 1;
        self.nesting += 1;
        let value = self.sum()?;
        self.nesting -= 1;
        self.take(b')').map(|_| value).ok_or_else(|| self.unexpected("`+`, `*` or `)`"))
    }

    fn list(&mut self) -> Result<Vec<bool>, ExpressionError> {
        self.position += 1;
        let mut entries = Vec::new();
        while self.take(b']').is_none() {
            entries.push(self.entry()?);
            self.bounded(self.position, entries.len())?;
            if self.take(b',').is_none() && self.peek() != Some(b']') {
                return Err(self.unexpected("`,` or `]`"));
            }
        }
        Ok(entries)
    }

    fn entry(&mut self) -> Result<bool, ExpressionError> {
        let Some(b'0'..=b'9') = self.peek() else { return Err(self.unexpected("0 or 1")) };
        let start = self.position;
        match self.integer()? {
            0 => Ok(false),
            1 => Ok(true),
            n => Err(self.error(start, format!("expected 0 or 1, found {n}"))),
        }
    }

    fn integer(&mut self) -> Result<usize, ExpressionError> {
        let start = self.position;
        let rest = &self.text[start..];
        let n_digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        self.position += n_digits;
        self.bounded(start, rest[..n_digits].parse().unwrap_or(usize::MAX))
    }

    /// Returns `n`, or an error at `position` if it is too large.
    fn bounded(&self, position: usize, n: usize) -> Result<usize, ExpressionError> {
        match n {
            ..=MAX_ENTRIES => Ok(n),
            _ => Err(self.error(position, format!("more than {MAX_ENTRIES} entries; write one for each layer"))),
        }
    }

    /// Skips spaces and returns the next byte.
    fn peek(&mut self) -> Option<u8> {
        let rest = &self.text[self.position..];
        self.position += rest.len() - rest.trim_start().len();
        self.text.as_bytes().get(self.position).copied()
    }

    /// Skips `byte` if it is next, and returns its position.
    fn take(&mut self, byte: u8) -> Option<usize> {
        let is_next = self.peek() == Some(byte);
        self.position += usize::from(is_next);
        is_next.then(|| self.position - 1)
    }

    fn unexpected(&mut self, expected: &str) -> ExpressionError {
        self.peek();
        let found = match self.text[self.position..].chars().next() {
            Some(character) => format!("`{character}`"),
            None => "the end".to_owned(),
        };
        self.error(self.position, format!("expected {expected}, found {found}"))
    }

    fn error(&self, position: usize, problem: impl Into<String>) -> ExpressionError {
        ExpressionError { column: self.text[..position].chars().count() + 1, problem: problem.into() }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn digits(text: &str) -> String {
        evaluate_list(text).unwrap().into_iter().map(|entry| if entry { '1' } else { '0' }).collect()
    }

    /// The first three are examples of Megatron-LM's help.
    #[test]
    fn an_expression_has_the_list_of_python() {
        for (text, want) in [
            ("([1]*3+[0]*1)*3", "111011101110"),
            ("([0]+[1]*23)", "011111111111111111111111"),
            ("([1]*3+[0]*2)*2", "1110011100"),
            ("[0]*3+[1]*45", &format!("000{}", "1".repeat(45))),
            ("[1]", "1"),
            (" [ 1 , 0,\t0, ] ", "100"),
            ("2*[1,0]", "1010"),
            ("[1,0]*2*2", "10101010"),
            ("[1]*(1+2*2)", "11111"),
            ("[0]+[1]*2+[0]", "0110"),
            ("(([0]))*2+[]*3+[1]*0", "00"),
        ] {
            assert_eq!(digits(text), want, "{text}");
        }
    }

    #[test]
    fn an_error_has_the_column_of_the_problem() {
        for (text, column, problem) in [
            ("([1]*3+", 8, "expected an integer, `[` or `(`, found the end"),
            ("[1]*3)", 6, "expected `+`, `*` or the end, found `)`"),
            ("([1]*3", 7, "expected `+`, `*` or `)`, found the end"),
            ("[1,2]*3", 4, "expected 0 or 1, found 2"),
            ("[1 0]", 4, "expected `,` or `]`, found `0`"),
            ("[1,,0]", 4, "expected 0 or 1, found `,`"),
            ("[[1]]", 2, "expected 0 or 1, found `[`"),
            ("[1,", 4, "expected 0 or 1, found the end"),
            ("[-1]", 2, "expected 0 or 1, found `-`"),
            ("[1]*-1", 5, "expected an integer, `[` or `(`, found `-`"),
            ("[1]*é", 5, "expected an integer, `[` or `(`, found `é`"),
            ("[1]\u{2003}é", 5, "expected `+`, `*` or the end, found `é`"),
            ("[1] + 2", 5, "cannot add a list and an integer; write the integer as a list"),
            ("[1]*[0]", 4, "cannot multiply two lists; multiply a list by an integer"),
            ("2*3", 1, "expected a list, found the integer 6"),
            ("", 1, "expected an integer, `[` or `(`, found the end"),
            ("__import__('os')", 1, "expected an integer, `[` or `(`, found `_`"),
        ] {
            assert_eq!(evaluate_list(text), Err(ExpressionError { column, problem: problem.to_owned() }), "{text}");
        }
    }

    #[test]
    fn sizes_and_nesting_are_limited() {
        let nested = |n: usize| format!("{}[1]{}", "(".repeat(n), ")".repeat(n));
        assert_eq!(digits("[1]*100*100").len(), MAX_ENTRIES);
        assert_eq!(digits(&nested(MAX_NESTING)), "1");
        for (text, column, part) in [
            ("[1]*100*101", 8, "more than 10000 entries"),
            ("[1]*10001", 5, "more than 10000 entries"),
            ("[1]*99999999999999999999999999", 5, "more than 10000 entries"),
            ("[1]*10000+[1]", 10, "more than 10000 entries"),
            ("(9999*9999)*[]", 6, "more than 10000 entries"),
            (&format!("[{}]", "1,".repeat(20_000)), 20_003, "more than 10000 entries"),
            (&nested(MAX_NESTING + 1), 33, "more than 32 nested parentheses"),
            (&"(".repeat(1_000_000), 33, "more than 32 nested parentheses"),
        ] {
            let error = evaluate_list(text).unwrap_err();
            assert!(error.problem.contains(part) && error.column == column, "{error:?}");
        }
    }
}
