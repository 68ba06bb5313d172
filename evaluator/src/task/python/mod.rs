//! Python semantics that task files rely on: value formatting, whitespace, regular expressions and literals. Prompts,
//! filters and hashes depend on each of them.

pub(crate) mod literal;
pub(crate) mod pattern;
pub(crate) mod repr;

pub(crate) use candlewick_text::template::python::text;
