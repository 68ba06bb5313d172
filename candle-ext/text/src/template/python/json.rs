//! The filters `tojson` of transformers and of Jinja, which write as Python's `json.dumps`.

use std::fmt::Write;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, Value};

use super::globals::PythonRange;
use super::{LongInteger, invalid, print};
use crate::template::limits::check_size;

/// Implements the filter of transformers: `json.dumps(value, ensure_ascii, indent, separators, sort_keys)`. Its keys
/// stay in order, and it escapes no letters.
pub(in crate::template) fn tojson(value: &Value, options: Kwargs) -> Result<String, Error> {
    let layout = Layout::from_options(&options)?;
    options.assert_all_used()?;
    layout.dumps(value)
}

/// Implements Jinja's own filter: sorted keys, only ASCII, and escapes for HTML.
///
/// # Errors
/// If the value has no JSON form, or the text exceeds the limit on texts.
pub fn html_safe_json(value: &Value, indent: Option<Value>, options: Kwargs) -> Result<String, Error> {
    let indent = indent.or(options.get("indent")?);
    options.assert_all_used()?;
    let options = [("sort_keys", Value::from(true)), ("ensure_ascii", Value::from(true))];
    let indent = indent.map(|indent| ("indent", indent));
    let layout = Layout::from_options(&options.into_iter().chain(indent).collect())?;
    let escapes = [("<", "\\u003c"), (">", "\\u003e"), ("&", "\\u0026"), ("'", "\\u0027")];
    Ok(escapes.iter().fold(layout.dumps(value)?, |text, (letter, escape)| text.replace(letter, escape)))
}

/// Implements `json.dumps(value, indent=2, ensure_ascii=False)`.
///
/// # Errors
/// If the value has no JSON form, or the text exceeds the limit on texts.
pub fn indented_json(value: &Value) -> Result<String, Error> {
    tojson(value, Kwargs::from_iter([("indent", Value::from(2))]))
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
            Some(pair) => <[String; 2]>::try_from(pair)
                .map(Into::into)
                .map_err(|_| invalid("tojson: separators must be a pair, such as (',', ':')"))?,
        };
        Ok(Self {
            indent,
            item_separator,
            key_separator,
            sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
            ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        })
    }

    fn dumps(&self, value: &Value) -> Result<String, Error> {
        let mut out = String::new();
        self.write(&mut out, value, 0)?;
        Ok(out)
    }

    fn write(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        match value.kind() {
            _ if value.downcast_object_ref::<PythonRange>().is_some() => {
                return Err(invalid("tojson: a range has no JSON form; convert it with `| list`"));
            }
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
            _ if value.downcast_object_ref::<LongInteger>().is_some() => out.push_str(&value.to_string()),
            kind => {
                return Err(invalid(format!("tojson: a value of type {kind} has no JSON form")));
            }
        }
        check_size(Some(out.len()))
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

/// Writes a number as `json.dumps`, which has other names than `repr` for infinities and NaN.
fn number(value: &Value) -> String {
    let text = print::number(value);
    match text.as_str() {
        "nan" => "NaN".into(),
        "inf" => "Infinity".into(),
        "-inf" => "-Infinity".into(),
        _ => text,
    }
}
