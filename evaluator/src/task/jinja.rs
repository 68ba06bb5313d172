//! Jinja templates of task files, with lm-eval's settings.

mod limits;

use std::sync::{Arc, OnceLock};

use candlewick_text::template::budget::{self, RenderFailure};
use candlewick_text::template::limits::too_large;
use candlewick_text::template::python::{self, from_json, invalid};
use minijinja::{Environment, Error, ErrorKind, UndefinedBehavior, Value};

use super::builtin::Doc;
use super::python::pattern::{PythonRegex, RegexMatch};
use limits::add_template;

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
        python::install(&mut environment);
        environment.add_filter("tojson", python::html_safe_json);
        environment.add_filter("regex_replace", regex_replace);
        let environment = add_template(environment, NAME, source.to_owned()).map_err(|error| describe(&error))?;
        Ok(Self { environment: Arc::new(environment), given_up: Arc::default() })
    }

    /// Renders with the columns of a document as variables.
    pub(crate) fn render(&self, doc: &Doc) -> Result<String, String> {
        if let Some(reason) = self.given_up.get() {
            return Err(reason.clone());
        }
        let columns = Value::from_pairs(doc.iter().map(|(name, value)| (name.as_str(), from_json(value))));
        budget::render(&self.environment, NAME, columns).map_err(|failure| match failure {
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use candlewick_text::source::parse_value;
    use serde_json::{Value as Json, json};

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

    /// Written by `tests/reference/jinja.py`.
    const JINJA: &str = include_str!("../../../candle-ext/text/tests/fixtures/jinja.json");

    #[test]
    fn templates_print_what_jinja_prints_in_python() {
        let fixture = parse_value(JINJA).unwrap();
        let mut differences = Vec::new();
        for row in fixture["templates"].as_array().unwrap() {
            let (source, want) = (row[0].as_str().unwrap(), row.get(2).unwrap_or(&row[1]).as_str());
            let got = render(source, fixture["variables"].clone());
            if got.as_deref().ok() != want {
                differences.push(format!("{source}\n  want {want:?}\n  got  {got:?}"));
            }
        }
        for row in fixture["refused"].as_array().unwrap() {
            let error = render(row[0].as_str().unwrap(), fixture["variables"].clone()).unwrap_err();
            assert!(error.contains(row[1].as_str().unwrap()), "{row}: {error}");
        }
        assert!(differences.is_empty(), "{}", differences.join("\n"));
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
