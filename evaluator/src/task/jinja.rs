//! Jinja templates of task files, with lm-eval's settings, Python's string methods and Python's formatting.

mod concat;
mod limits;

use std::sync::{Arc, OnceLock};

use candlewick_text::template::budget::{self, RenderFailure};
use minijinja::value::{Serde, ValueKind, from_args};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, State, UndefinedBehavior, Value};
use minijinja_contrib::pycompat;
use serde_json::Value as Json;

use limits::{add_template, check_replace, check_size, invalid, too_large};

use super::builtin::Doc;
use super::python::pattern::{PythonRegex, RegexMatch};
use super::python::{repr, text};

/// Compiled template.
#[derive(Clone, Debug)]
pub(crate) struct Template {
    environment: Arc<Environment<'static>>,
    /// Error of an earlier rendering that exceeded a limit; later renderings return it at once.
    given_up: Arc<OnceLock<String>>,
}

const NAME: &str = "field";

impl Template {
    /// Compiles a template. The error names the line.
    pub(crate) fn new(source: &str) -> Result<Self, String> {
        let mut environment = Environment::new();
        let syntax = minijinja::syntax::SyntaxConfig::builder().keep_trailing_newline(true).build();
        environment.set_syntax(syntax.map_err(|error| error.to_string())?);
        environment.set_undefined_behavior(UndefinedBehavior::Strict);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_formatter(print);
        environment.set_unknown_method_callback(method);
        environment.add_filter("regex_replace", regex_replace);
        environment.add_filter("string", string);
        let source = concat::with_python_texts(source);
        let environment = add_template(environment, NAME, source).map_err(|error| describe(&error))?;
        Ok(Self { environment: Arc::new(environment), given_up: Arc::default() })
    }

    /// Renders with the columns of a document as variables.
    pub(crate) fn render(&self, doc: &Doc) -> Result<String, String> {
        if let Some(reason) = self.given_up.get() {
            return Err(reason.clone());
        }
        budget::render(&self.environment, NAME, Value::from(Serde(doc))).map_err(|failure| match failure {
            RenderFailure::LimitExceeded(reason) => self.given_up.get_or_init(|| reason).clone(),
            RenderFailure::Template(error) => explain(&error, doc),
        })
    }
}

fn explain(error: &Error, doc: &Doc) -> String {
    let columns: Vec<&str> = doc.keys().map(String::as_str).collect();
    match error.kind() {
        ErrorKind::UndefinedError => format!("{}; columns are {}", describe(error), columns.join(", ")),
        ErrorKind::WriteFailure => too_large(),
        ErrorKind::OutOfFuel => "it exceeds the limit on instructions; shorten its loops".to_owned(),
        _ => describe(error),
    }
}

fn describe(error: &Error) -> String {
    let what = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    match error.line() {
        Some(line) if line > 1 => format!("line {line} of the template: {what}"),
        _ => what,
    }
}

/// Prints a value as Python's `str` does.
fn print(out: &mut Output, _: &mut State, value: &Value) -> Result<(), Error> {
    let written = match value.as_str() {
        Some(text) => out.write_str(text),
        None => out.write_str(&string(value.clone())?),
    };
    written.map_err(|error| invalid(error.to_string()))
}

/// Implements Python's `str(value)`.
fn string(value: Value) -> Result<String, Error> {
    if value.is_undefined() {
        return Err(Error::from(ErrorKind::UndefinedError));
    }
    let text = repr::str(&json(&value));
    check_size(Some(text.len()))?;
    Ok(text)
}

fn json(value: &Value) -> Json {
    serde_json::to_value(value).unwrap_or_else(|_| Json::String(value.to_string()))
}

/// Implements `re.sub(pattern, replacement, text, count)`; a count of 0 is unlimited.
fn regex_replace(text: &str, pattern: &str, replacement: &str, count: Option<usize>) -> Result<String, Error> {
    let pattern = PythonRegex::new(pattern).map_err(invalid)?;
    let most = count.filter(|count| *count > 0).unwrap_or(usize::MAX);
    let (mut out, mut at) = (String::new(), 0);
    for found in pattern.find_all(text).map_err(invalid)?.into_iter().take(most) {
        out.push_str(&text[at..found.start]);
        out.push_str(&expand(replacement, text, &found));
        at = found.end;
    }
    Ok(out + &text[at..])
}

/// Expands `\1` and `\g<1>` in a replacement.
fn expand(replacement: &str, text: &str, found: &RegexMatch) -> String {
    let group = |index: usize| match index {
        0 => &text[found.start..found.end],
        index => found.groups.get(index - 1).map_or("", String::as_str),
    };
    let (mut out, mut rest) = (String::new(), replacement);
    while let Some(at) = rest.find('\\') {
        out.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        let named = rest.strip_prefix("g<").and_then(|rest| rest.split_once('>'));
        if let Some((index, after)) = named.and_then(|(index, after)| Some((index.parse().ok()?, after))) {
            out.push_str(group(index));
            rest = after;
            continue;
        }
        let Some(c) = rest.chars().next() else { break };
        rest = &rest[c.len_utf8()..];
        match c {
            'n' => out.push('\n'),
            't' => out.push('\t'),
            '\\' => out.push('\\'),
            c if c.is_ascii_digit() => out.push_str(group(c as usize - '0' as usize)),
            c => out.extend(['\\', c]),
        }
    }
    out + rest
}

/// Calls a Python method: minijinja-contrib's, or one that it lacks.
fn method(state: &mut State<'_, '_>, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let own = match (value.as_str(), value.kind()) {
        (Some(text), _) => text_method(text, name, args)?,
        (None, ValueKind::Seq) => list_method(value, name, args)?,
        _ => None,
    };
    match own {
        Some(result) => Ok(result),
        None => pycompat::unknown_method_callback(state, value, name, args),
    }
}

fn text_method(value: &str, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    if let ("replace", [from, to, ..]) = (name, args) {
        check_replace(value, from.as_str().unwrap_or_default(), to.as_str().unwrap_or_default())?;
    }
    Ok(Some(match (name, args.len()) {
        ("strip", 0) => Value::from(text::strip(value)),
        ("lstrip", 0) => Value::from(text::lstrip(value)),
        ("rstrip", 0) => Value::from(text::rstrip(value)),
        ("split", 0) => text::words(value).map(Value::from).collect(),
        ("capitalize", 0) => Value::from(text::capitalize(value)),
        ("index", _) => {
            let (part,): (&str,) = from_args(args)?;
            let at = value.find(part).ok_or_else(|| invalid("substring not found"))?;
            Value::from(text::len(&value[..at]))
        }
        ("removeprefix", _) => {
            let (part,): (&str,) = from_args(args)?;
            Value::from(value.strip_prefix(part).unwrap_or(value))
        }
        ("removesuffix", _) => {
            let (part,): (&str,) = from_args(args)?;
            Value::from(value.strip_suffix(part).unwrap_or(value))
        }
        ("rsplit", _) => return rsplit(value, args).map(Some),
        ("partition", _) => {
            let (at,): (&str,) = from_args(args)?;
            let (before, after) = value.split_once(at).unwrap_or((value, ""));
            let found = if before.len() == value.len() { "" } else { at };
            [before, found, after].into_iter().map(Value::from).collect()
        }
        ("zfill", _) => {
            let (width,): (usize,) = from_args(args)?;
            check_size(Some(width))?;
            Value::from(format!("{}{value}", "0".repeat(width.saturating_sub(text::len(value)))))
        }
        _ => return Ok(None),
    }))
}

fn rsplit(value: &str, args: &[Value]) -> Result<Value, Error> {
    let (separator, most): (&str, Option<usize>) = from_args(args)?;
    if separator.is_empty() {
        return Err(invalid("empty separator"));
    }
    let n_parts = most.map_or(usize::MAX, |most| most.saturating_add(1));
    let mut parts: Vec<Value> = value.rsplitn(n_parts, separator).map(Value::from).collect();
    parts.reverse();
    Ok(Value::from(parts))
}

fn list_method(value: &Value, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    if name != "index" {
        return Ok(None);
    }
    let (item,): (&Value,) = from_args(args)?;
    let at = value.try_iter()?.position(|other| other == *item);
    at.map(|at| Some(Value::from(at))).ok_or_else(|| invalid(format!("{} is not in the list", repr::repr(&json(item)))))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    fn render(source: &str, doc: Json) -> Result<String, String> {
        Template::new(source)?.render(doc.as_object().unwrap())
    }

    #[track_caller]
    fn check(source: &str, doc: Json, want: &str) {
        assert_eq!(render(source, doc).as_deref(), Ok(want));
    }

    // Jinja2 prints these texts.
    #[test]
    fn values_print_as_in_python() {
        check(
            "{{x}}|{{y}}|{{z}}|{{n}}",
            json!({"x": ["a", "it's"], "y": true, "z": 1.0, "n": null}),
            "['a', \"it's\"]|True|1.0|None",
        );
        check("{{[a, b]}}\n", json!({"a": "x", "b": 2}), "['x', 2]\n");
        let doc = json!({"yes": true, "none": null, "list": ["a", false], "half": 0.5, "text": "it"});
        check("{{yes|string}} {{list|string|length}} {{none|string|lower}}", doc.clone(), "True 12 none");
        check("{{yes ~ none ~ list}}|{{half ~ 1}}|{{text ~ '!'}}", doc.clone(), "TrueNone['a', False]|0.51|it!");
        check("{% if text ~ yes == 'itTrue' %}same{% endif %}", doc, "same");
        assert!(render("{{ nothing ~ 1 }}", json!({})).is_err());
    }

    #[test]
    fn methods_are_pythons() {
        let doc = json!({"text": " a b c", "choices": {"label": ["A", "B"], "text": ["x", "y"]}, "key": " B"});
        check("{{text.split(' ')[:-1]|join(' ')}}", doc.clone(), " a b");
        check("{{' '+text.split(' ')[-1]}}", doc.clone(), " c");
        check("{{choices.label.index(key.lstrip())}}", doc.clone(), "1");
        check("{{choices.text[0]}}{% if choices.text|length > 2 %}!{% endif %}", doc.clone(), "x");
        check("{{answer.split('#')[-1].strip() if answer is defined else key}}", doc.clone(), " B");
        check("{{text|regex_replace('([a-b]) ', '<\\\\1>')}}", doc.clone(), " <a><b>c");
        check("{{text.rsplit(' ', 1)}}", doc, "[' a b', 'c']");
    }

    #[test]
    fn an_undefined_name_is_an_error_that_lists_the_defined_ones() {
        let error = render("{{ qestion }}", json!({"question": "x"})).unwrap_err();
        assert!(error.contains("columns are question"), "{error}");
        assert!(render("{{ a", json!({})).is_err());
        assert!(render("{{ x.index('C') }}", json!({"x": ["A"]})).unwrap_err().contains("'C' is not in the list"));
    }

    #[test]
    fn a_template_that_never_ends_is_stopped() {
        let loops = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}";
        assert!(render(loops, json!({})).unwrap_err().contains("limit on instructions"));
        check("{% for i in range(10000) %}{{ '' if i else 'x' }}{% endfor %}", json!({}), "x");
    }

    #[test]
    fn a_text_that_grows_too_large_is_stopped() {
        let doc = json!({"text": "a".repeat(1 << 20)});
        for source in [
            "{% for i in range(100) %}{{ text }}{% endfor %}",
            "{{ 'x'.zfill(3000000000) }}",
            "{{ text.replace('a', text) }}",
            "{{ text|replace('', text) }}",
            "{{ text|indent(2000000000) }}{{ 'a'|indent(width=99999999999, first=true) }}",
            "{% set ns = namespace(t=text) %}{% for i in range(60) %}{% set ns.t = ns.t ~ ns.t %}{% endfor %}",
        ] {
            let error = render(source, doc.clone()).unwrap_err();
            assert!(error.contains("longer than 64 MiB"), "{source}: {error}");
        }
        check(
            "{{ 'ab'|replace('b', 'c') }}{{ 'ab'.replace('', '-') }}{{ 'a\nb'|indent(1) }}",
            json!({}),
            "ac-a-b-a\n b",
        );
    }

    #[test]
    fn deep_nesting_is_read_or_refused() {
        let nots = |n: usize| format!("{{{{ {} 1 }}}}", "not ".repeat(n));
        check(&nots(10_000), json!({}), "True");
        assert!(render(&nots(50_000), json!({})).unwrap_err().contains("the maximum is 65536"));
    }
}
