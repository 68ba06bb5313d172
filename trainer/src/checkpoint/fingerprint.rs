//! The settings of a plan that must be equal in a checkpoint and in the run that resumes it.
//!
//! They are compared key by key, so that the error names each key with both values.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The key of the hash of an adapter's base weights, in the settings of the model.
pub(crate) const FROZEN_WEIGHTS: &str = "frozen weights";

/// The leaves of a JSON tree by dotted key, as JSON text.
///
/// Text round-trips exactly. A float that is parsed again may differ in its last bit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Fingerprint(BTreeMap<String, String>);

impl Fingerprint {
    /// Collects the leaves of `plan`. Pass only settings that determine the weights (model, data, batch sizes,
    /// optimizer, schedule, seed), not log paths or checkpoint intervals.
    pub fn of(plan: &Value) -> Self {
        let mut leaves = BTreeMap::new();
        flatten("", plan, &mut leaves);
        Self(leaves)
    }

    /// Returns the value of a dotted key.
    pub fn get(&self, key: &str) -> Option<Value> {
        serde_json::from_str(self.0.get(key)?).ok()
    }

    /// Lists the keys whose values differ in `now`, one line for each. `self` comes from the checkpoint.
    pub fn differences(&self, now: &Fingerprint) -> Vec<String> {
        let keys: std::collections::BTreeSet<&String> = self.0.keys().chain(now.0.keys()).collect();
        keys.into_iter()
            .filter(|key| self.0.get(*key) != now.0.get(*key))
            .map(|key| format!("{key}: {} in the checkpoint, {} now", show(self.0.get(key)), show(now.0.get(key))))
            .collect()
    }
}

fn flatten(key: &str, value: &Value, leaves: &mut BTreeMap<String, String>) {
    let child = |name: &str| if key.is_empty() { name.to_owned() } else { format!("{key}.{name}") };
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            fields.iter().for_each(|(name, value)| flatten(&child(name), value, leaves));
        }
        Value::Array(items) if !items.is_empty() => {
            items.iter().enumerate().for_each(|(i, value)| flatten(&child(&i.to_string()), value, leaves));
        }
        leaf => {
            leaves.insert(key.to_owned(), leaf.to_string());
        }
    }
}

fn show(value: Option<&String>) -> &str {
    value.map_or("absent", String::as_str)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn changed_added_and_removed_keys_are_named() {
        let saved = Fingerprint::of(&json!({"data": {"max_length": 512, "sources": ["a"]}, "seed": 1}));
        let now = Fingerprint::of(&json!({"data": {"max_length": 1024, "sources": ["a", "b"]}}));
        assert_eq!(
            saved.differences(&now),
            [
                "data.max_length: 512 in the checkpoint, 1024 now",
                "data.sources.1: absent in the checkpoint, \"b\" now",
                "seed: 1 in the checkpoint, absent now",
            ]
        );
        assert!(saved.differences(&saved).is_empty());
    }

    #[test]
    fn key_order_is_ignored_and_json_round_trips() {
        let one = Fingerprint::of(&json!({"a": {}, "b": [], "c": null, "d": 0.1}));
        let other = Fingerprint::of(&json!({"d": 0.1, "c": null, "b": [], "a": {}}));
        let read: Fingerprint = serde_json::from_str(&serde_json::to_string(&one).unwrap()).unwrap();
        assert!(one.differences(&other).is_empty());
        assert!(one.differences(&read).is_empty());
    }

    #[test]
    fn every_float_round_trips_exactly() {
        let floats: Vec<f64> = (0..2000).map(|i| 0.1 * f64::from(i) * 10f64.powi(i % 80 - 40)).collect();
        let saved = Fingerprint::of(&json!(floats));
        let read: Fingerprint = serde_json::from_str(&serde_json::to_string(&saved).unwrap()).unwrap();
        assert!(read.differences(&saved).is_empty());
    }
}
