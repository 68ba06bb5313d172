//! Secret of a store, which its clients send first. torch's TCPStore has none.

use std::fmt;

/// Secret of a store. Its `Debug` output hides the text.
#[derive(Clone)]
pub struct StoreSecret(String);

impl StoreSecret {
    /// Environment variable of launchers and ranks that holds the secret.
    pub const VARIABLE: &str = "CANDLEWICK_STORE_SECRET";

    /// Creates a secret.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// Creates a secret from its variable in the environment; returns `None` if that is unset or empty.
    pub fn from_variable(text: Option<&String>) -> Option<Self> {
        text.filter(|text| !text.is_empty()).map(Self::new)
    }

    /// Returns the text, for the environment of a process.
    pub fn text(&self) -> &str {
        &self.0
    }
}

impl PartialEq for StoreSecret {
    /// Compares secrets; the time depends on the length of `other` only.
    fn eq(&self, other: &Self) -> bool {
        is_equal_in_constant_time(other.0.as_bytes(), self.0.as_bytes())
    }
}

/// Compares secrets; the time depends on the length of `a` only.
pub fn is_equal_in_constant_time(a: &[u8], b: &[u8]) -> bool {
    let differences = a.iter().zip(b.iter().cycle()).fold(0, |sum, (a, b)| sum | (a ^ b));
    a.len() == b.len() && std::hint::black_box(differences) == 0
}

impl Eq for StoreSecret {}

impl fmt::Debug for StoreSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StoreSecret")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_compared_whole_and_never_shown() {
        let secret = StoreSecret::new("abc");
        assert_eq!(secret, StoreSecret::new("abc"));
        for other in ["", "ab", "abd", "abcabc"] {
            assert!(secret != StoreSecret::new(other) && StoreSecret::new(other) != secret, "{other}");
        }
        assert!(!format!("{secret:?}").contains("abc"));
        assert_eq!(StoreSecret::from_variable(Some(&"abc".to_owned())), Some(secret));
        assert_eq!(StoreSecret::from_variable(Some(&String::new())), None);
        assert_eq!(StoreSecret::from_variable(None), None);
    }
}
