//! Python's `text % arguments`.

use minijinja::formatting::{self, FormatStyle};
use minijinja::value::ValueKind;
use minijinja::{Error, State, Value};

use super::{LongInteger, check_defined, invalid, print};
use crate::template::limits::check_size;

/// Implements `text % arguments`: a tuple's items, or one other value.
///
/// # Errors
/// If the text names an unknown conversion, or the arguments are too few, too many or of another type.
pub(super) fn format(state: &State, text: &str, arguments: &[Value]) -> Result<String, Error> {
    arguments.iter().try_for_each(|argument| check_defined(state, argument))?;
    let mut out = String::new();
    let mut arguments = FormatArguments { all: arguments, next: 0, by_key: false };
    let mut rest = text;
    while let Some(at) = rest.find('%') {
        out.push_str(&rest[..at]);
        let length = conversion(&rest[at..], &mut arguments, &mut out)?;
        rest = &rest[at + length..];
        check_size(Some(out.len()))?;
    }
    out.push_str(rest);
    arguments.finish()?;
    Ok(out)
}

/// Prints one conversion, such as `%(name)-5.2f`, and returns its length in bytes.
fn conversion(text: &str, arguments: &mut FormatArguments, out: &mut String) -> Result<usize, Error> {
    let incomplete = || invalid("incomplete format: the text ends within a `%` conversion; write `%%` for one `%`");
    let mut at = 1;
    let key = match text[at..].strip_prefix('(') {
        Some(after) => {
            let length = after.find(')').ok_or_else(incomplete)?;
            at += length + 2;
            Some(&after[..length])
        }
        None => None,
    };
    let start = at;
    at += text[at..].find(|c: char| !"#0- +".contains(c)).ok_or_else(incomplete)?;
    let mut spec = format!("%{}", &text[start..at]);
    for prefix in ["", "."] {
        let Some(after) = text[at..].strip_prefix(prefix) else { continue };
        at += prefix.len();
        let length = after.find(|c: char| !c.is_ascii_digit()).ok_or_else(incomplete)?;
        let digits = match after.strip_prefix('*') {
            Some(_) => i64::try_from(arguments.next()?.clone())?.to_string(),
            None => after[..length].to_owned(),
        };
        at += if after.starts_with('*') { 1 } else { length };
        check_size(digits.trim_start_matches('-').parse().ok().or((digits.is_empty()).then_some(0)))?;
        spec = spec + prefix + &digits;
    }
    at += text[at..].find(|c: char| !"hlL".contains(c)).ok_or_else(incomplete)?;
    let kind = text[at..].chars().next().ok_or_else(incomplete)?;
    if kind == '%' {
        out.push('%');
    } else {
        let value = match key {
            Some(key) => arguments.of(key)?,
            None => arguments.next()?.clone(),
        };
        out.push_str(&converted(&spec, kind, &value)?);
    }
    Ok(at + kind.len_utf8())
}

fn converted(spec: &str, kind: char, value: &Value) -> Result<String, Error> {
    let print = |spec: String, value: Value| formatting::format(FormatStyle::Printf, &spec, &[value]);
    match kind {
        's' => print(format!("{spec}s"), Value::from(print::str(value)?)),
        'r' => print(format!("{spec}s"), Value::from(print::repr(value)?)),
        'd' | 'i' | 'u' => match as_float(value) {
            Some(_) if value.downcast_object_ref::<LongInteger>().is_some() => {
                print(format!("{spec}s"), Value::from(value.to_string()))
            }
            Some(float) if is_float(value) => print(format!("{spec}d"), Value::from(float as i128)),
            Some(_) => print(format!("{spec}d"), value.clone()),
            None => Err(wrong(kind, "a number", value)),
        },
        'f' | 'F' | 'e' | 'E' | 'g' | 'G' => match as_float(value) {
            Some(float) => print(format!("{spec}{kind}"), Value::from(float)),
            None => Err(wrong(kind, "a number", value)),
        },
        'x' | 'X' | 'o' if value.is_integer() || value.kind() == ValueKind::Bool => {
            print(format!("{spec}{kind}"), value.clone())
        }
        'x' | 'X' | 'o' => Err(wrong(kind, "an integer", value)),
        'c' => print(format!("{spec}c"), value.clone()),
        other => Err(invalid(format!("`%{other}` is no conversion; write `%%` for one `%`"))),
    }
}

fn is_float(value: &Value) -> bool {
    value.is_number() && !value.is_integer()
}

/// Converts a number or a boolean.
fn as_float(value: &Value) -> Option<f64> {
    match value.kind() {
        ValueKind::Bool => Some(f64::from(u8::from(value.is_true()))),
        _ if is_float(value) => f64::try_from(value.clone()).ok(),
        _ if value.is_integer() || value.downcast_object_ref::<LongInteger>().is_some() => {
            value.to_string().parse().ok()
        }
        _ => None,
    }
}

fn wrong(kind: char, expected: &str, value: &Value) -> Error {
    invalid(format!("`%{kind}` needs {expected}, found a value of type {}", value.kind()))
}

/// FormatArguments that conversions take in order, or by key.
struct FormatArguments<'a> {
    all: &'a [Value],
    next: usize,
    by_key: bool,
}

impl FormatArguments<'_> {
    fn next(&mut self) -> Result<&Value, Error> {
        let found = self.all.get(self.next).ok_or_else(|| invalid("not enough arguments for the `%` conversions"))?;
        self.next += 1;
        Ok(found)
    }

    fn of(&mut self, key: &str) -> Result<Value, Error> {
        self.by_key = true;
        match self.all {
            [map] if map.kind() == ValueKind::Map => {
                let found = map.get_item(&Value::from(key))?;
                if found.is_undefined() {
                    Err(invalid(format!("`%({key})`: the dict has no such key")))
                } else {
                    Ok(found)
                }
            }
            _ => Err(invalid(format!("`%({key})` needs a dict"))),
        }
    }

    /// Fails if arguments are left. As in Python, a dict may be left.
    fn finish(&self) -> Result<(), Error> {
        let is_dict = matches!(self.all, [map] if map.kind() == ValueKind::Map);
        match self.next < self.all.len() && !self.by_key && !is_dict {
            true => Err(invalid("not all arguments have a `%` conversion")),
            false => Ok(()),
        }
    }
}
