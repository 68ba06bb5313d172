//! What lm-evaluation-harness takes from Python without saying so: how values print, which characters are blank, what
//! its regular expressions mean, how literals read. Prompts, filters and hashes depend on each of them.

pub(crate) mod literal;
pub(crate) mod pattern;
pub(crate) mod repr;
pub(crate) mod text;
