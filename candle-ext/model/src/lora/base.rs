//! The base weights that an adapter was trained on: recorded in its folder, compared before the adapter is used.

use std::path::Path;

use serde_json::json;

use super::AdapterFolder;
use crate::{ModelError, checkpoint::Checkpoint, config::json::read_object};

/// The file of an adapter folder that records the base weights. PEFT ignores it.
pub const BASE_RECORD: &str = ".candlewick_base.json";

/// The base weights that an adapter was trained on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BaseRecord {
    /// The name or path of the base model.
    pub model: String,
    /// The [`Checkpoint::identity`] of its weights.
    pub weights: String,
}

impl BaseRecord {
    /// Returns the text of [`BASE_RECORD`].
    pub fn to_json(&self) -> String {
        json!({"model": self.model, "weights": self.weights}).to_string() + "\n"
    }

    /// Reads the record of an adapter folder; PEFT's own folders have none.
    pub(super) fn read(folder: &Path) -> Result<Option<Self>, ModelError> {
        let path = folder.join(BASE_RECORD);
        if !path.exists() {
            return Ok(None);
        }
        let map = read_object(&path)?;
        let text = |key: &str| map.get(key).and_then(|value| value.as_str()).map(str::to_owned);
        match (text("model"), text("weights")) {
            (Some(model), Some(weights)) => Ok(Some(Self { model, weights })),
            _ => Err(ModelError::malformed(&path, "expected the strings \"model\" and \"weights\"; remove the file")),
        }
    }
}

impl AdapterFolder {
    /// Compares the weights of `base` with those that the adapter was trained on, if its folder records them.
    ///
    /// # Errors
    /// If they differ: the base model was trained again, converted or replaced.
    pub fn check_base(&self, base: &Checkpoint) -> Result<(), ModelError> {
        let Some(BaseRecord { model, weights }) = &self.base else { return Ok(()) };
        let found = base.identity();
        if found == *weights {
            return Ok(());
        }
        let folder = self.weights.folder();
        let problem = format!(
            "the adapter was trained on other weights than those in {}: on {model} with the hash {weights}, found {found}; \
             give the base model that it was trained on, or remove {} to use it on these weights",
            base.folder().display(),
            folder.join(BASE_RECORD).display(),
        );
        Err(ModelError::mismatch(folder, problem))
    }
}
