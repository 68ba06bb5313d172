//! Record of the base weights of an adapter, compared before the adapter is loaded.

use std::path::Path;

use candlewick_text::files::is_present;
use serde_json::json;

use crate::{ModelError, config::json::read_object_with_unique_keys};

/// File in an adapter folder that identifies the base weights. PEFT ignores it.
pub const BASE_MODEL_RECORD: &str = ".candlewick_base.json";

/// Identity of the base weights that an adapter was trained on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BaseModelRecord {
    /// Name or path of the base model.
    pub model: String,
    /// [`Checkpoint::identity`] of the base weights.
    pub weights: String,
}

impl BaseModelRecord {
    /// Returns the record as the JSON text of [`BASE_MODEL_RECORD`].
    pub fn to_json(&self) -> String {
        json!({"model": self.model, "weights": self.weights}).to_string() + "\n"
    }

    /// Reads the record of an adapter folder; `None` for an adapter that PEFT saved.
    pub(super) fn read(folder: &Path) -> Result<Option<Self>, ModelError> {
        let path = folder.join(BASE_MODEL_RECORD);
        if !is_present(&path) {
            return Ok(None);
        }
        let map = read_object_with_unique_keys(&path)?;
        let text = |key: &str| map.get(key).and_then(|value| value.as_str()).map(str::to_owned);
        match (text("model"), text("weights")) {
            (Some(model), Some(weights)) => Ok(Some(Self { model, weights })),
            _ => Err(ModelError::malformed(&path, "expected the strings \"model\" and \"weights\"; remove the file")),
        }
    }
}
