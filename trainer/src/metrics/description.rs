//! The description of a run: its size, its mesh and the versions of the program.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Serialize;
use serde_json::{Map, Value};

use super::host::Versions;

/// The description of a run. Every tracker logs it before the first step, and run.json has it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct RunDescription {
    /// The id of the run: its start in milliseconds since 1970.
    pub run_id: u64,
    /// The name of the run: `run_name`, else the name of its folder.
    pub name: String,
    /// The run's folder; empty if it has none.
    pub output_dir: PathBuf,
    /// The number of parameters.
    pub parameters: u64,
    /// The number of trained parameters.
    pub trained_parameters: u64,
    /// The number of parameters that a token uses, of a mixture of experts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub active_parameters: Option<u64>,
    /// The degrees of the device mesh, and `world_size`.
    pub mesh: BTreeMap<&'static str, usize>,
    /// The rows of a step.
    pub global_batch_size: usize,
    /// The maximum number of tokens of a step, if `data.max_length` limits it.
    pub global_batch_tokens: Option<usize>,
    /// The number of steps of the whole run.
    pub total_steps: usize,
    /// The device: `cpu`, or the name of the first GPU.
    pub device: String,
    /// The versions of the program.
    pub versions: Option<Versions>,
    /// The settings of the plan by key.
    #[serde(skip)]
    pub settings: BTreeMap<String, Value>,
}

impl RunDescription {
    /// Returns an id that no other run has: the start in base 36, and four digits that depend on the folder. Runs of a sweep
    /// may start in the same millisecond.
    pub(super) fn unique_id(&self) -> String {
        let folder = std::path::absolute(&self.output_dir).unwrap_or_else(|_| self.output_dir.clone());
        let digest = blake3::hash(folder.as_os_str().as_encoded_bytes()).to_hex();
        format!("{}-{}", base36(self.run_id), &digest[..4])
    }

    /// Returns the fields and the settings, without nested values. Names are joined by `/`.
    pub(super) fn parameters_by_name(&self) -> Map<String, Value> {
        let fields = match serde_json::to_value(self) {
            Ok(Value::Object(fields)) => fields,
            _ => Map::new(),
        };
        let settings = self.settings.iter().map(|(key, value)| (key.clone(), value.clone()));
        let all = fields.into_iter().flat_map(|(name, value)| leaves(&name, &value)).chain(settings);
        all.filter(|(_, value)| !value.is_null()).collect()
    }
}

/// Returns a number in base 36.
pub(super) fn base36(mut number: u64) -> String {
    const DIGITS: &[u8; 36] = b"0123456789abcdefghijklmnopqrstuvwxyz";
    let mut digits = Vec::new();
    while number > 0 || digits.is_empty() {
        digits.push(char::from(DIGITS[(number % 36) as usize]));
        number /= 36;
    }
    digits.iter().rev().collect()
}

/// Returns the values within `value` that are neither maps nor lists, by name. The parts of a name are joined by `/`.
///
/// An item of a list has the name of its index, or of its field `layer`.
pub(super) fn leaves(name: &str, value: &Value) -> Vec<(String, Value)> {
    let within = |part: &str, value: &Value| leaves(&format!("{name}/{part}"), value);
    match value {
        Value::Object(fields) => fields.iter().flat_map(|(part, value)| within(part, value)).collect(),
        Value::Array(items) => items.iter().enumerate().flat_map(|(idx, item)| within_list(name, idx, item)).collect(),
        _ => vec![(name.to_owned(), value.clone())],
    }
}

fn within_list(name: &str, idx: usize, item: &Value) -> Vec<(String, Value)> {
    let layer = item.get("layer").and_then(Value::as_u64);
    let Some((layer, fields)) = layer.zip(item.as_object()) else { return leaves(&format!("{name}/{idx}"), item) };
    let fields = fields.iter().filter(|(part, _)| *part != "layer");
    fields.flat_map(|(part, value)| leaves(&format!("{name}/{layer}/{part}"), value)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn runs_in_different_folders_have_different_ids() {
        let id = |folder: &str| {
            let (run_id, output_dir) = (1_767_323_045_007, PathBuf::from(folder));
            RunDescription { run_id, output_dir, ..RunDescription::default() }.unique_id()
        };
        assert_eq!(id("/a").len(), 13);
        assert_eq!(u64::from_str_radix(&id("/a")[..8], 36), Ok(1_767_323_045_007));
        assert_ne!(id("/a"), id("/b"));
    }

    #[test]
    fn parameters_have_the_fields_and_the_settings() {
        let run = RunDescription {
            parameters: 10,
            mesh: BTreeMap::from([("tp", 2)]),
            settings: BTreeMap::from([("data.sources".to_owned(), json!(["a.jsonl"]))]),
            ..RunDescription::default()
        };
        let found = run.parameters_by_name();
        assert_eq!(found["parameters"], 10);
        assert_eq!(found["mesh/tp"], 2);
        assert_eq!(found["data.sources"], json!(["a.jsonl"]));
        assert!(!found.contains_key("global_batch_tokens"), "an unknown number is logged");
    }
}
