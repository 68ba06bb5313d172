//! Methods of Python's strings and lists. minijinja-contrib has the others, and those of dicts.

use minijinja::value::{Kwargs, Rest, Tuple, ValueKind, from_args};
use minijinja::{Error, State, Value};
use minijinja_contrib::pycompat;

use super::{invalid, print, text};
use crate::template::limits::check_size;

/// Calls a method: one of those here, or one of minijinja-contrib.
pub(super) fn call(state: &mut State<'_, '_>, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let own = match (value.as_str(), value.kind()) {
        (Some(text), _) => text_method(text, name, args)?,
        (None, ValueKind::Seq | ValueKind::Iterable) => list_method(value, name, args)?,
        _ => None,
    };
    match own {
        Some(result) => Ok(result),
        None => pycompat::unknown_method_callback(state, value, name, args),
    }
}

fn text_method(value: &str, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    Ok(Some(match (name, args.len()) {
        ("strip", 0) => Value::from(text::strip(value)),
        ("lstrip", 0) => Value::from(text::lstrip(value)),
        ("rstrip", 0) => Value::from(text::rstrip(value)),
        ("split", 0) => text::words(value).map(Value::from).collect(),
        ("capitalize", 0) => Value::from(text::capitalize(value)),
        ("swapcase", 0) => Value::from(text::swap_case(value)),
        ("isdecimal", 0) => Value::from(!value.is_empty() && value.chars().all(text::is_decimal)),
        ("isprintable", 0) => Value::from(value.chars().all(print::is_printable)),
        ("isspace", 0) => Value::from(!value.is_empty() && value.chars().all(text::is_space)),
        ("join", 1) => Value::from(join(args[0].try_iter()?, value)?),
        ("replace", _) => replace_method(value, args)?,
        ("index" | "rindex", _) => index(value, name, args)?,
        ("removeprefix", 1) => Value::from(value.strip_prefix(one(args)?).unwrap_or(value)),
        ("removesuffix", 1) => Value::from(value.strip_suffix(one(args)?).unwrap_or(value)),
        ("rsplit", _) => return rsplit(value, args),
        ("partition" | "rpartition", 1) => partition(value, name, one(args)?)?,
        ("zfill", 1) => Value::from(zfill(value, width(&args[0])?)?),
        ("ljust" | "rjust" | "center", _) => Value::from(justify(value, name, args)?),
        ("expandtabs", _) => Value::from(expand_tabs(value, args)?),
        ("casefold", 0) if value.is_ascii() => Value::from(value.to_ascii_lowercase()),
        ("casefold" | "encode" | "translate" | "format_map" | "isidentifier" | "istitle", _) => {
            return Err(invalid(format!(
                "the method `{name}` of strings is not supported; use another expression, or put its result into a \
                 column of the data"
            )));
        }
        _ => return Ok(None),
    }))
}

fn one(args: &[Value]) -> Result<&str, Error> {
    let (text,) = from_args(args)?;
    Ok(text)
}

fn width(value: &Value) -> Result<usize, Error> {
    let width = i64::try_from(value.clone())?.max(0) as usize;
    check_size(Some(width)).map(|()| width)
}

/// Joins the `str` of each value.
pub(super) fn join(values: impl Iterator<Item = Value>, separator: &str) -> Result<String, Error> {
    let mut out = String::new();
    for (value_idx, value) in values.enumerate() {
        if value_idx > 0 {
            out.push_str(separator);
        }
        match value.as_str() {
            Some(text) => out.push_str(text),
            None => out.push_str(&print::str(&value)?),
        }
        check_size(Some(out.len()))?;
    }
    Ok(out)
}

fn replace_method(value: &str, args: &[Value]) -> Result<Value, Error> {
    let (from, to, count): (&str, &str, Option<i64>) = from_args(args)?;
    replace(value, from, to, count).map(Value::from)
}

/// Implements `text.replace(from, to, count)`. A negative count is unlimited.
pub(super) fn replace(text: &str, from: &str, to: &str, count: Option<i64>) -> Result<String, Error> {
    let most = count.and_then(|count| usize::try_from(count).ok()).unwrap_or(usize::MAX);
    let n_found = if from.is_empty() { text.chars().count() + 1 } else { text.matches(from).count() };
    check_size(n_found.min(most).checked_mul(to.len()).and_then(|added| added.checked_add(text.len())))?;
    Ok(text.replacen(from, to, most))
}

fn index(value: &str, name: &str, args: &[Value]) -> Result<Value, Error> {
    let part = one(args)?;
    let at = if name == "index" { value.find(part) } else { value.rfind(part) };
    let at = at.ok_or_else(|| invalid("substring not found"))?;
    Ok(Value::from(text::len(&value[..at])))
}

/// Implements `rsplit` with a separator. Without one and without a limit it equals `split`.
fn rsplit(value: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let (separator, limit, options): (Option<&str>, Option<i64>, Kwargs) = from_args(args)?;
    let limit = limit.or(options.get("maxsplit")?).and_then(|limit| usize::try_from(limit).ok());
    let n_parts = limit.map_or(usize::MAX, |limit| limit.saturating_add(1));
    let mut parts: Vec<Value> = match (separator, limit) {
        (Some(""), _) => return Err(invalid("rsplit: the separator is empty")),
        (Some(separator), _) => value.rsplitn(n_parts, separator).map(Value::from).collect(),
        (None, None) => text::words(value).map(Value::from).collect::<Vec<_>>().into_iter().rev().collect(),
        (None, Some(_)) => return Err(invalid("rsplit with a limit needs a separator, such as ' '")),
    };
    parts.reverse();
    Ok(Some(Value::from(parts)))
}

fn partition(value: &str, name: &str, separator: &str) -> Result<Value, Error> {
    if separator.is_empty() {
        return Err(invalid(format!("{name}: the separator is empty")));
    }
    let parts = match name {
        "partition" => value.split_once(separator).map_or([value, "", ""], |(a, b)| [a, separator, b]),
        _ => value.rsplit_once(separator).map_or(["", "", value], |(a, b)| [a, separator, b]),
    };
    Ok(Value::from(Tuple::from(parts.map(Value::from).to_vec())))
}

fn zfill(value: &str, width: usize) -> Result<String, Error> {
    let zeros = "0".repeat(width.saturating_sub(text::len(value)));
    let sign = value.find(|c| c != '+' && c != '-').map_or(0, |at| at.min(1));
    Ok(format!("{}{zeros}{}", &value[..sign], &value[sign..]))
}

fn justify(value: &str, name: &str, args: &[Value]) -> Result<String, Error> {
    let (full, fill): (&Value, Option<&str>) = from_args(args)?;
    let fill = fill.unwrap_or(" ");
    if text::len(fill) != 1 {
        return Err(invalid(format!("{name}: the fill character must be one character")));
    }
    let full = width(full)?;
    let missing = full.saturating_sub(text::len(value));
    let left = match name {
        "ljust" => 0,
        "rjust" => missing,
        // As in Python, an odd rest goes to the right, but to the left if the width is odd.
        _ => missing / 2 + (missing & full & 1),
    };
    Ok(format!("{}{value}{}", fill.repeat(left), fill.repeat(missing - left)))
}

/// Implements `text.center(width)`.
pub(super) fn center(value: &str, width: usize) -> Result<String, Error> {
    justify(value, "center", &[Value::from(width)])
}

fn expand_tabs(value: &str, args: &[Value]) -> Result<String, Error> {
    let (size, options): (Option<&Value>, Kwargs) = from_args(args)?;
    let size = match size.or(options.get("tabsize")?) {
        Some(size) => width(size)?,
        None => 8,
    };
    let (mut out, mut column) = (String::new(), 0);
    for c in value.chars() {
        match c {
            '\t' => {
                let n_spaces = if size == 0 { 0 } else { size - column % size };
                check_size(Some(out.len() + n_spaces))?;
                out.extend(std::iter::repeat_n(' ', n_spaces));
                column += n_spaces;
            }
            c => {
                out.push(c);
                column = if c == '\n' || c == '\r' { 0 } else { column + 1 };
            }
        }
    }
    Ok(out)
}

fn list_method(value: &Value, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    if name != "index" {
        return Ok(None);
    }
    let (item, bounds): (&Value, Rest<usize>) = from_args(args)?;
    let from = bounds.first().copied().unwrap_or(0);
    let to = bounds.get(1).copied().unwrap_or(usize::MAX);
    let at = value.try_iter()?.enumerate().skip(from).find(|(at, other)| *at < to && other == item);
    let missing = || invalid(format!("{} is not in the list", print::repr(item).unwrap_or_default()));
    at.map(|(at, _)| Some(Value::from(at))).ok_or_else(missing)
}
