//! The `tojson` filter of transformers: Python's `json.dumps` with `ensure_ascii=False`, without HTML escapes, keys
//! in order.

use std::fmt::Write;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};

/// Implements `json.dumps(value, ensure_ascii, indent, separators, sort_keys)`.
pub(super) fn tojson(value: &Value, options: Kwargs) -> Result<String, Error> {
    let layout = Layout::from_options(&options)?;
    options.assert_all_used()?;
    let mut out = String::new();
    layout.write(&mut out, value, 0)?;
    Ok(out)
}

struct Layout {
    /// Text of one indentation level. `None` puts everything on one line.
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    sort_keys: bool,
    ensure_ascii: bool,
}

impl Layout {
    fn from_options(options: &Kwargs) -> Result<Self, Error> {
        let indent = match options.get::<Option<Value>>("indent")? {
            None => None,
            Some(spaces) if spaces.is_none() => None,
            Some(spaces) => Some(match spaces.as_str() {
                Some(text) => text.to_owned(),
                None => " ".repeat(usize::try_from(spaces).unwrap_or(0).min(64)),
            }),
        };
        let (item_separator, key_separator) = match options.get::<Option<Vec<String>>>("separators")? {
            None if indent.is_some() => (",".into(), ": ".into()),
            None => (", ".into(), ": ".into()),
            Some(pair) => <[String; 2]>::try_from(pair).map(Into::into).map_err(|_| {
                let message = "tojson: separators must be a pair, such as (',', ':')";
                Error::new(ErrorKind::InvalidOperation, message)
            })?,
        };
        Ok(Self {
            indent,
            item_separator,
            key_separator,
            sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
            ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        })
    }

    fn write(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&number(value)),
            ValueKind::String => self.write_text(out, value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.write_items(out, "[]", items.len(), depth, |out, item_idx| {
                    self.write(out, &items[item_idx], depth + 1)
                })?;
            }
            ValueKind::Map => {
                let keys = self.keys(value)?;
                self.write_items(out, "{}", keys.len(), depth, |out, key_idx| {
                    let key = &keys[key_idx];
                    self.write_key(out, key)?;
                    out.push_str(&self.key_separator);
                    self.write(out, &value.get_item(key)?, depth + 1)
                })?;
            }
            kind => {
                let message = format!("tojson: a value of type {kind} has no JSON form");
                return Err(Error::new(ErrorKind::InvalidOperation, message));
            }
        }
        Ok(())
    }

    fn keys(&self, map: &Value) -> Result<Vec<Value>, Error> {
        let mut keys: Vec<Value> = map.try_iter()?.collect();
        if self.sort_keys {
            keys.sort();
        }
        Ok(keys)
    }

    fn write_key(&self, out: &mut String, key: &Value) -> Result<(), Error> {
        match key.as_str() {
            Some(text) => self.write_text(out, text),
            None => {
                let mut text = String::new();
                self.write(&mut text, key, 0)?;
                self.write_text(out, &text);
            }
        }
        Ok(())
    }

    fn write_items(
        &self,
        out: &mut String,
        brackets: &str,
        n_items: usize,
        depth: usize,
        mut write_item: impl FnMut(&mut String, usize) -> Result<(), Error>,
    ) -> Result<(), Error> {
        out.push_str(&brackets[..1]);
        for item_idx in 0..n_items {
            if item_idx > 0 {
                out.push_str(&self.item_separator);
            }
            self.new_line(out, depth + 1);
            write_item(out, item_idx)?;
        }
        if n_items > 0 {
            self.new_line(out, depth);
        }
        out.push_str(&brackets[1..]);
        Ok(())
    }

    fn new_line(&self, out: &mut String, depth: usize) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            out.push_str(&indent.repeat(depth));
        }
    }

    fn write_text(&self, out: &mut String, text: &str) {
        out.push('"');
        for letter in text.chars() {
            match letter {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                control if control < ' ' => push_escape(out, control),
                letter if self.ensure_ascii && letter > '\u{7e}' => push_escape(out, letter),
                letter => out.push(letter),
            }
        }
        out.push('"');
    }
}

fn push_escape(out: &mut String, letter: char) {
    for unit in letter.encode_utf16(&mut [0; 2]) {
        write!(out, "\\u{unit:04x}").expect("writing to a String does not fail");
    }
}

fn number(value: &Value) -> String {
    match f64::try_from(value.clone()) {
        Ok(float) if !value.is_integer() => python_float(float),
        _ => value.to_string(),
    }
}

/// Formats a float like Python's `repr`: shortest digits, an exponent from 1e16 and below 1e-4.
fn python_float(float: f64) -> String {
    if float.is_nan() {
        return "NaN".into();
    }
    if float.is_infinite() {
        return if float > 0.0 { "Infinity".into() } else { "-Infinity".into() };
    }
    let scientific = format!("{float:e}");
    let (digits, exponent) = scientific.split_once('e').expect("the format has an exponent");
    let exponent: i32 = exponent.parse().expect("the exponent is a number");
    if (-4..16).contains(&exponent) {
        return format!("{float:?}");
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_print_as_in_python() {
        for (float, want) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.5, "1.5"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.25e22, "1.25e+22"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (1e100, "1e+100"),
            (5e-324, "5e-324"),
            (f64::NAN, "NaN"),
            (-f64::INFINITY, "-Infinity"),
        ] {
            assert_eq!(python_float(float), want);
        }
    }
}
