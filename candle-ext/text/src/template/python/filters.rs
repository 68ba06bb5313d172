//! Filters and tests of Jinja that minijinja lacks, or that differ from it.

use std::sync::LazyLock;

use minijinja::value::{Kwargs, Rest, ValueKind, ValueOrKwargs, from_args};
use minijinja::{Environment, Error, State, Value, filters};
use minijinja_contrib::filters as contrib;
use regex_automata::meta::Regex;

use super::{LongInteger, invalid, methods, percent, text, text_of};
use crate::template::limits::check_size;

pub(super) fn install(environment: &mut Environment<'_>) {
    environment.add_filter("int", int);
    environment.add_filter("float", float);
    environment.add_filter("string", string);
    environment.add_filter("join", join);
    environment.add_filter("replace", replace);
    environment.add_filter("indent", indent);
    environment.add_filter("format", format);
    install_text_filters(environment);
    install_refusals(environment);
    install_tests(environment);
}

fn install_text_filters(environment: &mut Environment<'_>) {
    environment.add_filter("upper", |state: &State, value: &Value| Ok(text_of(state, value)?.to_uppercase()));
    environment.add_filter("lower", |state: &State, value: &Value| Ok(text_of(state, value)?.to_lowercase()));
    environment.add_filter("title", |state: &State, value: &Value| Ok(filters::title(text_of(state, value)?)));
    environment.add_filter("capitalize", |state: &State, value: &Value| Ok(text::capitalize(&text_of(state, value)?)));
    environment.add_filter("trim", trim);
    environment.add_filter("wordcount", |state: &State, value: &Value| Ok(n_words(&text_of(state, value)?)));
    environment.add_filter("center", center);
    environment.add_filter("truncate", truncate);
    environment.add_filter("striptags", |state: &State, value: &Value| {
        Ok(contrib::striptags(text_of(state, value)?.into_owned()))
    });
    environment.add_filter("urlencode", urlencode);
    environment.add_filter("filesizeformat", file_size);
}

/// Registers filters that fail with a way out.
fn install_refusals(environment: &mut Environment<'_>) {
    for (name, reason) in [
        ("random", "its value differs from run to run; choose an item by its index"),
        ("wordwrap", "wrap the text in the data"),
        ("xmlattr", "write the attributes in a loop"),
        ("pprint", "use `| tojson(indent=2)`"),
        ("urlize", "write the link out"),
        ("forceescape", "use `| escape`"),
    ] {
        environment.add_filter(name, move |_: &Value, _: Rest<ValueOrKwargs>| -> Result<Value, Error> {
            Err(invalid(format!("the filter `{name}` is not supported: {reason}")))
        });
    }
}

fn install_tests(environment: &mut Environment<'_>) {
    environment.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
    environment.add_test("sequence", is_sequence);
    environment.add_test("number", |value: &Value| value.is_number() || is_bool(value) || is_long(value));
    environment.add_test("integer", |value: &Value| value.is_integer() || is_long(value));
    environment.add_test("callable", is_callable);
}

fn is_bool(value: &Value) -> bool {
    value.kind() == ValueKind::Bool
}

fn is_long(value: &Value) -> bool {
    value.downcast_object_ref::<LongInteger>().is_some()
}

/// Returns true for functions and macros. Values of the data cannot be called.
fn is_callable(value: &Value) -> bool {
    let is_macro = value.as_object().is_some_and(|object| object.type_name().ends_with("::Macro"));
    is_macro || value.kind() == ValueKind::Plain && !is_long(value)
}

/// Returns true for values with a length and items, as Python does: strings and dicts too.
fn is_sequence(value: &Value) -> bool {
    let kind = value.kind();
    matches!(kind, ValueKind::Seq | ValueKind::String | ValueKind::Map | ValueKind::Undefined)
}

/// Converts to an integer, with a default of 0 for other values as in Jinja. minijinja fails on them.
fn int(
    state: &mut State<'_, '_>,
    value: &Value,
    default: Option<Value>,
    base: Option<u32>,
    options: Kwargs,
) -> Result<Value, Error> {
    if is_long(value) {
        return Ok(value.clone());
    }
    let default = default_or(default, &options, Value::from(0))?;
    filters::int(state, &trimmed(value), Some(default), base, options)
}

fn float(state: &mut State<'_, '_>, value: &Value, default: Option<Value>, options: Kwargs) -> Result<Value, Error> {
    let default = default_or(default, &options, Value::from(0.0))?;
    filters::float(state, &trimmed(value), Some(default), options)
}

fn trimmed(value: &Value) -> Value {
    value.as_str().map_or_else(|| value.clone(), |text| Value::from(text.trim()))
}

fn default_or(given: Option<Value>, options: &Kwargs, otherwise: Value) -> Result<Value, Error> {
    let named = options.get::<Option<Value>>("default")?;
    Ok(given.or(named).unwrap_or(otherwise))
}

fn string(state: &State, value: &Value) -> Result<Value, Error> {
    match value.as_str() {
        Some(text) => check_size(Some(text.len())).map(|()| value.clone()),
        None => text_of(state, value).map(Value::from),
    }
}

fn join(
    state: &mut State,
    value: &Value,
    separator: Option<&Value>,
    attribute: Option<Value>,
    options: Kwargs,
) -> Result<String, Error> {
    let (named, attribute) = (options.get::<Option<Value>>("d")?, attribute.or(options.get("attribute")?));
    options.assert_all_used()?;
    let separator = match separator.or(named.as_ref()) {
        Some(separator) => text_of(state, separator)?.into_owned(),
        None => String::new(),
    };
    let items = match attribute {
        Some(attribute) => {
            let options = Value::from(Kwargs::from_iter([("attribute", attribute)]));
            state.apply_filter("map", &[value.clone(), options])?
        }
        None => value.clone(),
    };
    if items.is_undefined() {
        return text_of(state, &items).map(Into::into);
    }
    let items = items.try_iter().map_err(|_| invalid(format!("cannot join a value of type {}", value.kind())))?;
    methods::join(items, &separator)
}

fn replace(state: &State, value: &Value, from: &Value, to: &Value, rest: Rest<ValueOrKwargs>) -> Result<String, Error> {
    let rest = rest.into_values();
    let (count, options): (Option<i64>, Kwargs) = from_args(&rest)?;
    let count = count.or(options.get("count")?);
    options.assert_all_used()?;
    methods::replace(&text_of(state, value)?, &text_of(state, from)?, &text_of(state, to)?, count)
}

/// Implements Jinja's `indent`, whose width may be a text.
fn indent(state: &State, value: &Value, rest: Rest<ValueOrKwargs>) -> Result<String, Error> {
    let rest = rest.into_values();
    let (width, first, blank, options): (Option<Value>, Option<bool>, Option<bool>, Kwargs) = from_args(&rest)?;
    let (width, first) = (width.or(options.get("width")?), first.or(options.get("first")?).unwrap_or(false));
    let blank = blank.or(options.get("blank")?).unwrap_or(false);
    options.assert_all_used()?;
    let value = text_of(state, value)?;
    let lines = text::lines(&value);
    let width = width.unwrap_or_else(|| Value::from(4));
    let n_bytes = width.as_str().map_or_else(|| usize::try_from(width.clone()), |width| Ok(width.len()))?;
    check_size(n_bytes.checked_mul(lines.len()).and_then(|added| added.checked_add(value.len())))?;
    let margin = width.as_str().map_or_else(|| " ".repeat(n_bytes), str::to_owned);
    let indented = lines.iter().enumerate().map(|(line_idx, line)| match line_idx {
        0 if first => format!("{margin}{line}"),
        0 => (*line).to_owned(),
        _ if blank || !line.is_empty() => format!("{margin}{line}"),
        _ => String::new(),
    });
    Ok(indented.collect::<Vec<_>>().join("\n"))
}

/// Implements `text % arguments`, or `text % named`.
fn format(state: &State, text: &str, arguments: Rest<ValueOrKwargs>) -> Result<String, Error> {
    percent::format(state, text, &arguments.into_values())
}

fn trim(state: &State, value: &Value, letters: Option<&str>) -> Result<String, Error> {
    let value = text_of(state, value)?;
    Ok(match letters {
        Some(letters) => value.trim_matches(|c| letters.contains(c)).to_owned(),
        None => text::strip(&value).to_owned(),
    })
}

/// Counts the words of Python's `\w+`.
fn n_words(text: &str) -> usize {
    static WORD: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"[\p{L}\p{N}_]+").expect("the pattern is a constant"));
    WORD.find_iter(text).count()
}

fn center(state: &State, value: &Value, width: Option<usize>, options: Kwargs) -> Result<String, Error> {
    let width = width.or(options.get("width")?).unwrap_or(80);
    options.assert_all_used()?;
    check_size(Some(width))?;
    methods::center(&text_of(state, value)?, width)
}

fn truncate(state: &State, value: &Value, rest: Rest<ValueOrKwargs>) -> Result<String, Error> {
    type Arguments<'a> = (Option<usize>, Option<bool>, Option<&'a str>, Option<usize>, Kwargs);
    let rest = rest.into_values();
    let (length, kill_words, end, leeway, options): Arguments = from_args(&rest)?;
    let length = length.or(options.get("length")?).unwrap_or(255);
    let kill_words = kill_words.or(options.get("killwords")?).unwrap_or(false);
    let named_end = options.get::<Option<&str>>("end")?;
    let end = end.or(named_end).unwrap_or("...");
    let leeway = leeway.or(options.get("leeway")?).unwrap_or(5);
    options.assert_all_used()?;
    let value = text_of(state, value)?;
    if text::len(&value) <= length.saturating_add(leeway) {
        return Ok(value.into_owned());
    }
    let n_kept = length.checked_sub(text::len(end));
    let n_kept = n_kept.ok_or_else(|| invalid(format!("truncate: the length {length} is shorter than the end")))?;
    let kept: String = value.chars().take(n_kept).collect();
    let kept = if kill_words { &kept } else { kept.rsplit_once(' ').map_or(kept.as_str(), |(words, _)| words) };
    Ok(format!("{kept}{end}"))
}

/// Encodes a text, or the pairs of a dict or a list, as Jinja does.
fn urlencode(state: &State, value: &Value) -> Result<String, Error> {
    let quoted = |value: &Value, safe: &str| -> Result<String, Error> { Ok(quote(&text_of(state, value)?, safe)) };
    let pairs: Vec<Value> = match value.kind() {
        ValueKind::Map => {
            let keys = value.try_iter()?;
            keys.map(|key| Ok([key.clone(), value.get_item(&key)?].into_iter().collect()))
                .collect::<Result<_, Error>>()?
        }
        ValueKind::Seq | ValueKind::Iterable => value.try_iter()?.collect(),
        _ => return quoted(value, "/"),
    };
    let pair = |pair: Value| -> Result<String, Error> {
        let (key, value) = (pair.get_item_by_index(0)?, pair.get_item_by_index(1)?);
        Ok(format!("{}={}", quoted(&key, "")?, quoted(&value, "")?).replace("%20", "+"))
    };
    Ok(pairs.into_iter().map(pair).collect::<Result<Vec<_>, _>>()?.join("&"))
}

fn quote(text: &str, safe: &str) -> String {
    let mut out = String::new();
    for byte in text.bytes() {
        match byte {
            byte if byte.is_ascii_alphanumeric() || b"_.-~".contains(&byte) || safe.as_bytes().contains(&byte) => {
                out.push(byte.into());
            }
            byte => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}

/// Implements Jinja's `filesizeformat`, which reads a number or its text.
fn file_size(value: &Value, binary: Option<bool>) -> Result<String, Error> {
    let number = match value.as_str() {
        Some(text) => text.trim().parse().ok(),
        None => f64::try_from(value.clone()).ok(),
    };
    let number = number.ok_or_else(|| invalid("filesizeformat: the value is not a number"))?;
    let base = if binary.unwrap_or(false) { 1024.0 } else { 1000.0 };
    Ok(match number {
        1.0 => "1 Byte".to_owned(),
        // Jinja prints whole bytes, and compares without the sign's removal.
        small if small < base => format!("{} Bytes", small.trunc()),
        large => contrib::filesizeformat(large, binary),
    })
}
