//! Declaration and check of an optimizer's hyperparameters.

/// A hyperparameter of an optimizer: one number, or several.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hyperparameter {
    /// Key in recipes.
    pub name: &'static str,
    /// Default numbers.
    pub default: &'static [f64],
    /// Numbers that are allowed.
    pub range: HyperparameterRange,
}

/// Range of a hyperparameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HyperparameterRange {
    /// At least 0 and below 1: the decay rate of a running mean.
    DecayRate,
    /// Above 0.
    Positive,
}

impl HyperparameterRange {
    fn contains(self, x: f64) -> bool {
        match self {
            Self::DecayRate => (0.0..1.0).contains(&x),
            Self::Positive => x > 0.0 && x.is_finite(),
        }
    }

    fn text(self) -> &'static str {
        match self {
            Self::DecayRate => "at least 0 and below 1",
            Self::Positive => "above 0",
        }
    }
}

impl Hyperparameter {
    /// Checks numbers that a user wrote. The error completes "KEY: ".
    pub fn check(&self, values: &[f64]) -> Result<(), String> {
        let is_right = values.len() == self.default.len() && values.iter().all(|x| self.range.contains(*x));
        if is_right {
            return Ok(());
        }
        let range = self.range.text();
        let found = values.iter().map(f64::to_string).collect::<Vec<_>>().join(", ");
        Err(match (self.default.len(), values) {
            (1, [value]) => format!("expected {range}, found {value}"),
            (1, _) => format!("expected one number {range}, found [{found}]"),
            (2, _) => format!("expected two numbers of {range}, found [{found}]"),
            (n, _) => format!("expected {n} numbers of {range}, found [{found}]"),
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_number_outside_its_range_is_refused_with_the_range() {
        let rates = Hyperparameter { name: "rates", default: &[0.9, 0.99], range: HyperparameterRange::DecayRate };
        rates.check(&[0.0, 0.5]).unwrap();
        let refused = rates.check(&[0.9, 1.0]).unwrap_err();
        assert_eq!(refused, "expected two numbers of at least 0 and below 1, found [0.9, 1]");
        assert!(rates.check(&[0.9]).unwrap_err().starts_with("expected two numbers"));
        let eps = Hyperparameter { name: "eps", default: &[1e-8], range: HyperparameterRange::Positive };
        eps.check(&[1e-6]).unwrap();
        for value in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert_eq!(eps.check(&[value]).unwrap_err(), format!("expected above 0, found {value}"));
        }
    }
}
