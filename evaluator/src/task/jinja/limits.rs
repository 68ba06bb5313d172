//! Limits on templates: their length, the instructions of one rendering, and the size of texts.

use candlewick_text::template::limits::{self, MAX_OUTPUT};
use minijinja::value::{Kwargs, StringInput};
use minijinja::{Environment, Error, ErrorKind, State, Value, filters};

/// Maximum length of a template in bytes. The longest in lm-eval has 9 KB.
const MAX_SOURCE: usize = 64 << 10;
/// Maximum number of instructions in one rendering.
const FUEL: u64 = 20_000_000;

/// Adds a template to an environment and limits its renderings.
pub(super) fn add_template(
    mut environment: Environment<'static>,
    name: &'static str,
    source: String,
) -> Result<Environment<'static>, Error> {
    if source.len() > MAX_SOURCE {
        let n = source.len();
        return Err(invalid(format!("the template has {n} bytes; the maximum is {MAX_SOURCE}")));
    }
    environment.set_fuel(Some(FUEL));
    // With debug information, an error would hold values that may be nested too deeply to drop.
    environment.set_debug(false);
    environment.add_filter("replace", replace);
    environment.add_filter("indent", indent);
    limits::add_template(&mut environment, name, source)?;
    Ok(environment)
}

/// Creates an error of a template operation.
pub(super) fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

/// Returns an error if a text would exceed [`MAX_OUTPUT`] bytes. `None` means that its size overflows.
pub(super) fn check_size(n_bytes: Option<usize>) -> Result<(), Error> {
    match n_bytes {
        Some(n) if n <= MAX_OUTPUT => Ok(()),
        _ => Err(invalid(too_large())),
    }
}

/// Returns the message for a text above [`MAX_OUTPUT`] bytes.
pub(super) fn too_large() -> String {
    format!("a text is longer than {} MiB, the maximum", MAX_OUTPUT >> 20)
}

/// Checks the size of the result of `text.replace(from, to)`.
pub(super) fn check_replace(text: &str, from: &str, to: &str) -> Result<(), Error> {
    let n_found = if from.is_empty() { text.chars().count() + 1 } else { text.matches(from).count() };
    check_size(n_found.checked_mul(to.len()).and_then(|added| added.checked_add(text.len())))
}

fn replace(
    state: &mut State<'_, '_>,
    text: StringInput<'_>,
    from: StringInput<'_>,
    to: StringInput<'_>,
) -> Result<Value, Error> {
    check_replace(text.as_str(), from.as_str(), to.as_str())?;
    filters::replace(state, text, from, to)
}

fn indent(
    text: StringInput<'_>,
    width: Option<usize>,
    first: Option<bool>,
    blank: Option<bool>,
    options: Kwargs,
) -> Result<Value, Error> {
    let n_lines = text.as_str().split('\n').count();
    let wanted = width.or(options.peek::<Option<usize>>("width")?).unwrap_or(4);
    check_size(wanted.checked_mul(n_lines))?;
    filters::indent(text, width, first, blank, options)
}
