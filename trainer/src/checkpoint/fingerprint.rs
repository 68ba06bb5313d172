//! What of a plan must not change between a save and its resumption, kept key by key so that a
//! refusal can say which key changed and from what.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Holds the leaves of a JSON tree under dotted keys, as JSON text: a number read back from a
/// file may differ from itself in its last bit, its text does not.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Fingerprint(BTreeMap<String, String>);

impl Fingerprint {
    /// Takes the leaves of `plan`: pass only what decides the weights (model, data, batch sizes,
    /// optimizer, schedule, seed), not paths of logs or how often to save.
    pub fn of(plan: &Value) -> Self {
        let mut leaves = BTreeMap::new();
        flatten("", plan, &mut leaves);
        Self(leaves)
    }

    /// Lists what `now` has otherwise, one line a key. `self` is the saved one.
    pub fn differences(&self, now: &Fingerprint) -> Vec<String> {
        let keys: std::collections::BTreeSet<&String> = self.0.keys().chain(now.0.keys()).collect();
        keys.into_iter()
            .filter(|key| self.0.get(*key) != now.0.get(*key))
            .map(|key| format!("{key}: {} in the save, {} now", show(self.0.get(key)), show(now.0.get(key))))
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
    fn a_changed_an_added_and_a_removed_key_are_named() {
        let saved = Fingerprint::of(&json!({"data": {"max_length": 512, "sources": ["a"]}, "seed": 1}));
        let now = Fingerprint::of(&json!({"data": {"max_length": 1024, "sources": ["a", "b"]}}));
        assert_eq!(
            saved.differences(&now),
            [
                "data.max_length: 512 in the save, 1024 now",
                "data.sources.1: absent in the save, \"b\" now",
                "seed: 1 in the save, absent now",
            ]
        );
        assert!(saved.differences(&saved).is_empty());
    }

    #[test]
    fn the_order_of_keys_does_not_matter_and_json_keeps_it() {
        let one = Fingerprint::of(&json!({"a": {}, "b": [], "c": null, "d": 0.1}));
        let other = Fingerprint::of(&json!({"d": 0.1, "c": null, "b": [], "a": {}}));
        let read: Fingerprint = serde_json::from_str(&serde_json::to_string(&one).unwrap()).unwrap();
        assert!(one.differences(&other).is_empty());
        assert!(one.differences(&read).is_empty());
    }

    #[test]
    fn every_float_is_itself_after_a_round_trip() {
        let floats: Vec<f64> = (0..2000).map(|i| 0.1 * f64::from(i) * 10f64.powi(i % 80 - 40)).collect();
        let saved = Fingerprint::of(&json!(floats));
        let read: Fingerprint = serde_json::from_str(&serde_json::to_string(&saved).unwrap()).unwrap();
        assert!(read.differences(&saved).is_empty());
    }
}
