//! FP8 scales of a trained model: a file of its export, with which inference can multiply in FP8.

use std::collections::BTreeMap;
use std::path::Path;

use candlewick_ops::Fp8LinearScales;
use serde_json::{Map, Value, json};

use crate::{ModelError, config::json::read_object};

/// File of an export with the scales of its run: for each linear layer that multiplies in FP8, the factors of input and weight
/// before they are rounded to E4M3.
pub const FP8_SCALES: &str = "fp8_scales.json";

/// Returns scales by module name as the JSON text of [`FP8_SCALES`].
pub fn fp8_scales_to_json(scales: &BTreeMap<String, Fp8LinearScales>) -> String {
    let of_module = |(module, scales): (&String, &Fp8LinearScales)| {
        (module.clone(), json!({"input": scales.input, "weight": scales.weight}))
    };
    format!("{:#}\n", Value::Object(scales.iter().map(of_module).collect()))
}

/// Reads the scales of an export by module name; `None` if the folder has none.
pub fn read_fp8_scales(folder: &Path) -> Result<Option<BTreeMap<String, Fp8LinearScales>>, ModelError> {
    let path = folder.join(FP8_SCALES);
    if !path.is_file() {
        return Ok(None);
    }
    let of_module = |(module, scales): (String, Value)| {
        let number = |key: &str| {
            let scale = scales.get(key).and_then(Value::as_f64).map(|scale| scale as f32);
            scale.filter(|scale| scale.is_finite() && *scale > 0.0).ok_or_else(|| {
                let found = scales.get(key).map_or("nothing".to_owned(), Value::to_string);
                let problem = format!("{module}: expected a positive number as `{key}`, found {found}; export again");
                ModelError::malformed(&path, problem)
            })
        };
        let scales = Fp8LinearScales { input: number("input")?, weight: number("weight")? };
        Ok((module, scales))
    };
    let modules: Map<String, Value> = read_object(&path)?;
    modules.into_iter().map(of_module).collect::<Result<_, _>>().map(Some)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn scales_are_read_as_they_were_written() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(read_fp8_scales(folder.path()).unwrap(), None);
        let odd = [448.0 / 3.0, f32::MIN_POSITIVE, f32::MAX, 1.0 / 3.0, 0.1, 16_777_217.0];
        let scales = odd.iter().enumerate().map(|(i, &input)| {
            (format!("model.layers.{i}.mlp.up_proj"), Fp8LinearScales { input, weight: 1.0 / input.sqrt() })
        });
        let scales: BTreeMap<_, _> = scales.collect();
        std::fs::write(folder.path().join(FP8_SCALES), fp8_scales_to_json(&scales)).unwrap();
        assert_eq!(read_fp8_scales(folder.path()).unwrap(), Some(scales));
    }

    #[test]
    fn a_scale_that_is_no_positive_number_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        for (text, words) in [
            (r#"{"a": {"input": 1}}"#, "a: expected a positive number as `weight`, found nothing"),
            (r#"{"a": {"input": 0, "weight": 1}}"#, "as `input`, found 0"),
            (r#"{"a": 3}"#, "as `input`, found nothing"),
        ] {
            std::fs::write(folder.path().join(FP8_SCALES), text).unwrap();
            let error = read_fp8_scales(folder.path()).unwrap_err().to_string();
            assert!(error.contains(words) && error.contains(FP8_SCALES), "{error}");
        }
    }
}
