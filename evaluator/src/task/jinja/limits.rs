//! Limits on templates: their length, and the instructions of one rendering.

use candlewick_text::template::parser;
use candlewick_text::template::python::invalid;
use minijinja::{Environment, Error};

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
    parser::add_template(&mut environment, name, source)?;
    Ok(environment)
}
