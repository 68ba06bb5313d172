//! Units of metrics, and their formatting for people.

use candlewick_text::quantity::grouped;
use serde::Serialize;

use crate::metrics::{duration, quantity};

/// Unit of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MetricUnit {
    /// A number such as a loss.
    Plain,
    /// A number that needs an exponent, such as a learning rate.
    Exponent,
    /// A count or rate, with a decimal unit: 1.5M.
    Count,
    /// A count with separators: 1,124.
    Integer,
    /// Bytes.
    Bytes,
    /// Seconds.
    Seconds,
    /// A fraction, shown in percent.
    Percent,
}

impl MetricUnit {
    /// Formats a value.
    pub fn format(self, value: f64) -> String {
        match self {
            _ if !value.is_finite() => "not finite".to_owned(),
            Self::Plain => plain(value),
            Self::Exponent => format!("{value:.3e}"),
            Self::Count => quantity(if value < 100.0 { value } else { value.round() }),
            Self::Integer => grouped(value.max(0.0) as usize),
            Self::Bytes if value.abs() < 1e8 => format!("{:.2} MB", value / 1e6),
            Self::Bytes => format!("{:.2} GB", value / 1e9),
            Self::Seconds => duration(value.max(0.0)),
            Self::Percent => format!("{:.1}%", 100.0 * value),
        }
    }
}

/// Formats a number with four decimals, or with an exponent if these would show too few or too many digits.
fn plain(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        size if !(1e-3..1e6).contains(&size) => format!("{value:.3e}"),
        size if size >= 1e3 => format!("{value:.1}"),
        _ => format!("{value:.4}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_have_the_digits_of_their_unit() {
        for (unit, value, want) in [
            (MetricUnit::Plain, 1.23456, "1.2346"),
            (MetricUnit::Plain, 0.0, "0"),
            (MetricUnit::Plain, 1.5e-5, "1.500e-5"),
            (MetricUnit::Plain, 12_345.67, "12345.7"),
            (MetricUnit::Plain, f64::NAN, "not finite"),
            (MetricUnit::Exponent, 1e-5, "1.000e-5"),
            (MetricUnit::Count, 51_859.655, "51.86K"),
            (MetricUnit::Integer, 1124.0, "1,124"),
            (MetricUnit::Bytes, 2.1e9, "2.10 GB"),
            (MetricUnit::Bytes, 15.5e6, "15.50 MB"),
            (MetricUnit::Seconds, 3661.4, "1:01:01"),
            (MetricUnit::Percent, 0.4123, "41.2%"),
        ] {
            assert_eq!(unit.format(value), want);
        }
    }
}
