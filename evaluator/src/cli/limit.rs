//! `--limit`: a number of documents, or a fraction of them.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

/// Limit on the evaluated documents of each task: a count, or a fraction if below 1.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(transparent)]
pub(super) struct Limit(f64);

impl Limit {
    pub(super) fn value(self) -> f64 {
        self.0
    }
}

impl FromStr for Limit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let limit = text.parse().ok().filter(|limit: &f64| limit.is_finite() && *limit > 0.0);
        limit.map(Self).ok_or_else(|| "expected a number of documents greater than 0, or a fraction such as 0.1".into())
    }
}

/// Prints the number as Python's `float`, as in lm-eval's header line.
impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_a_finite_number_above_0() {
        for (text, shown) in [("20", "20.0"), ("0.25", "0.25"), ("1e3", "1000.0")] {
            assert_eq!(text.parse::<Limit>().map(|limit| limit.to_string()).as_deref(), Ok(shown));
        }
        for text in ["-1", "nan", "inf", "0", "", "all"] {
            assert!(text.parse::<Limit>().is_err(), "{text}");
        }
    }
}
