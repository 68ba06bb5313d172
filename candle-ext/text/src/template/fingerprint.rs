//! Fingerprint of a chat template, for the key of a token cache.

use std::collections::BTreeMap;

use serde_json::Value as Json;
use sha2::{Digest, Sha256};

use super::ChatTemplate;

impl ChatTemplate {
    /// Returns a SHA-256 of the template's source and variables, in hexadecimal.
    ///
    /// Covers the template for chats with tools. Excludes the template's path and the clock: see
    /// [`ChatTemplate::reads_clock`].
    pub fn fingerprint(&self) -> String {
        let variables: BTreeMap<&str, &Json> = self.variables.iter().map(|(name, v)| (name.as_str(), v)).collect();
        let with_tools = self.with_tools.as_ref().map(|template| template.fingerprint());
        let parts = serde_json::json!([self.source, variables, with_tools]);
        Sha256::digest(parts.to_string()).iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Returns true if the output may depend on the date, that is, the template calls `strftime_now`.
    pub fn reads_clock(&self) -> bool {
        let with_tools = self.with_tools.as_ref();
        self.source.contains("strftime_now") || with_tools.is_some_and(|template| template.reads_clock())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::template::Clock;

    fn template(name: &str, source: &str) -> ChatTemplate {
        ChatTemplate::new(name, source).unwrap()
    }

    #[test]
    fn an_identity_is_what_is_printed_and_not_where_it_is_from_or_when() {
        let plain = template("a.jinja", "{{ x }}");
        assert_eq!(plain.fingerprint(), template("/other/b.jinja", "{{ x }}").fingerprint());
        assert_eq!(plain.fingerprint(), template("a.jinja", "{{ x }}").with_clock(Clock::Fixed(1)).fingerprint());
        let with = |first, second| {
            let template = template("a.jinja", "{{ x }}");
            template.with_variable(first, "1").with_variable(second, "2").fingerprint()
        };
        assert_eq!(
            with("x", "y"),
            template("a", "{{ x }}").with_variable("y", "2").with_variable("x", "1").fingerprint()
        );
        let tools = |source| template("a.jinja", "{{ x }}").with_tool_use(template("t", source)).fingerprint();
        let all = [plain.fingerprint(), template("a.jinja", "{{ y }}").fingerprint(), with("x", "y"), with("y", "x")];
        let all: Vec<_> = all.into_iter().chain([tools("{{ x }}"), tools("{{ y }}")]).collect();
        for (index, fingerprint) in all.iter().enumerate() {
            assert!(!all[..index].contains(fingerprint), "{index}");
        }
    }

    #[test]
    fn a_template_that_prints_the_date_is_reported() {
        let source = "{{ strftime_now('%d') }}";
        assert!(template("a", source).reads_clock());
        assert!(!template("a", "{{ x }}").reads_clock());
        assert!(template("a", "{{ x }}").with_tool_use(template("t", source)).reads_clock());
    }
}
