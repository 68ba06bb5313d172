//! Rendering of a page from its templates.

use minijinja::{Environment, Error, Value, context};
use serde::Serialize;

/// Style of all pages: colors (light and dark), text, tables, facts.
const STYLE: &str = include_str!("style.css");
/// Templates of all pages. `frame.html` is the document around the blocks `title`, `head` and `body`.
/// `tables.html` has macros.
const TEMPLATES: [(&str, &str); 2] =
    [("frame.html", include_str!("frame.html")), ("tables.html", include_str!("tables.html"))];

/// Template of a page with its style and script.
#[derive(Clone, Copy, Debug)]
pub struct Page<'a> {
    /// Name of the template, one of `templates`. It extends `frame.html`.
    pub name: &'a str,
    /// Names and texts of the page's own templates.
    pub templates: &'a [(&'a str, &'a str)],
    /// Style that is added to the one of all pages.
    pub style: &'a str,
    /// Script at the end of the page; empty for none.
    pub script: &'a str,
}

impl Page<'_> {
    /// Renders the page as HTML. Values are HTML-escaped unless a template marks them as safe.
    ///
    /// # Errors
    /// If a template is malformed, or needs a value that is missing.
    pub fn render(&self, values: Value) -> Result<String, Error> {
        let mut environment = Environment::new();
        for (name, source) in TEMPLATES.iter().chain(self.templates) {
            environment.add_template(name, source)?;
        }
        let Self { style, script, .. } = *self;
        environment.get_template(self.name)?.render(context! { shared_style => STYLE, style, script, ..values })
    }
}

/// Returns a value as JSON for a `<script type="application/json">` element. Numbers that are not finite are null.
///
/// # Errors
/// If the value cannot be serialized.
pub fn script_json(value: &impl Serialize) -> Result<String, serde_json::Error> {
    // An unescaped `</script>` in a text would end the element.
    Ok(serde_json::to_string(value)?.replace('<', "\\u003c"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const BODY: &str = "{% extends \"frame.html\" %}{% block title %}{{ title }}{% endblock %}{% block body %}\
        {% from \"tables.html\" import facts, settings %}{{ facts(rows) }}{{ settings(rows) }}{% endblock %}";

    #[test]
    fn values_are_escaped_and_style_and_script_are_not() {
        let page = Page { name: "p.html", templates: &[("p.html", BODY)], style: "a > b {}", script: "1 < 2;" };
        let html = page.render(context! { title => "<i>", rows => [["a<b", "c&d"]] }).unwrap();
        assert!(html.starts_with("<!doctype html>\n") && html.ends_with("<script>1 < 2;</script>\n</body>\n</html>"));
        assert!(html.contains("<title>&lt;i&gt;</title>") && html.contains("a > b {}</style>"), "{html}");
        assert!(html.contains("<dt>a&lt;b</dt><dd>c&amp;d</dd>"), "{html}");
        assert!(html.contains("<th scope=\"row\">a&lt;b</th><td>c&amp;d</td>"), "{html}");
        let html = Page { script: "", ..page }.render(context! { title => "t", rows => [["a", "b"]] }).unwrap();
        assert!(!html.contains("<script"), "{html}");
    }

    #[test]
    fn data_for_a_script_cannot_end_its_element() {
        assert_eq!(script_json(&["</script>", "é"]).unwrap(), r#"["\u003c/script>","é"]"#);
        assert_eq!(script_json(&[1.0, f64::NAN, f64::INFINITY]).unwrap(), "[1.0,null,null]");
    }
}
