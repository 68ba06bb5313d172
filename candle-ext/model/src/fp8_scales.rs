//! FP8 scales of a trained model: a file of its export, with which inference can multiply in FP8.

use std::collections::BTreeMap;
use std::path::Path;

use candlewick_ops::Fp8LinearScales;
use serde_json::{Map, Value, json};

use crate::{ModelError, config::json::read_object};

/// File of an export with the scales of its run: for each linear layer that multiplies in FP8, the factors of input and weight
/// before they are rounded to E4M3. Routed experts have lists with a factor for each expert.
pub const FP8_SCALES: &str = "fp8_scales.json";

/// Returns scales by module name as the JSON text of [`FP8_SCALES`].
pub fn fp8_scales_to_json(scales: &BTreeMap<String, Vec<Fp8LinearScales>>) -> String {
    let of_module = |(module, matrices): (&String, &Vec<Fp8LinearScales>)| {
        let of = |scale: fn(&Fp8LinearScales) -> f32| match matrices.as_slice() {
            [matrix] => json!(scale(matrix)),
            matrices => matrices.iter().map(scale).collect(),
        };
        (module.clone(), json!({"input": of(|matrix| matrix.input), "weight": of(|matrix| matrix.weight)}))
    };
    format!("{:#}\n", Value::Object(scales.iter().map(of_module).collect()))
}

/// Reads the scales of an export by module name, one for each matrix; `None` if the folder has none.
pub fn read_fp8_scales(folder: &Path) -> Result<Option<BTreeMap<String, Vec<Fp8LinearScales>>>, ModelError> {
    let path = folder.join(FP8_SCALES);
    if !path.is_file() {
        return Ok(None);
    }
    let of_module = |(module, scales): (String, Value)| {
        let malformed = |problem| ModelError::malformed(&path, format!("{module}: {problem}; export again"));
        let [inputs, weights] = [numbers(&scales, "input"), numbers(&scales, "weight")];
        let (inputs, weights) = (inputs.map_err(malformed)?, weights.map_err(malformed)?);
        if inputs.len() != weights.len() {
            return Err(malformed(format!("{} scales of inputs and {} of weights", inputs.len(), weights.len())));
        }
        let matrices = inputs.into_iter().zip(weights).map(|(input, weight)| Fp8LinearScales { input, weight });
        Ok((module, matrices.collect()))
    };
    let modules: Map<String, Value> = read_object(&path)?;
    if modules.is_empty() {
        return Err(ModelError::malformed(&path, "it has no module, so nothing would multiply in FP8; export again"));
    }
    modules.into_iter().map(of_module).collect::<Result<_, _>>().map(Some)
}

/// Returns the numbers of a key: one, or a list.
fn numbers(scales: &Value, key: &str) -> Result<Vec<f32>, String> {
    let found = scales.get(key);
    let all = found.and_then(Value::as_array).map_or_else(|| Vec::from_iter(found), |all| all.iter().collect());
    let number =
        |value: &Value| value.as_f64().map(|scale| scale as f32).filter(|scale| scale.is_normal() && *scale > 0.0);
    let numbers: Option<Vec<f32>> = all.into_iter().map(number).collect();
    numbers.filter(|numbers| !numbers.is_empty()).ok_or_else(|| {
        let found = found.map_or("nothing".to_owned(), Value::to_string);
        format!("expected a positive number as `{key}`, or a list of them, found {found}")
    })
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
            (format!("model.layers.{i}.mlp.up_proj"), vec![Fp8LinearScales { input, weight: 1.0 / input.sqrt() }])
        });
        let mut scales: BTreeMap<_, _> = scales.collect();
        let experts = odd.map(|weight| Fp8LinearScales { input: 3.0, weight });
        scales.insert("model.layers.0.mlp.experts.down_proj".to_owned(), experts.to_vec());
        std::fs::write(folder.path().join(FP8_SCALES), fp8_scales_to_json(&scales)).unwrap();
        assert_eq!(read_fp8_scales(folder.path()).unwrap(), Some(scales));
    }

    #[test]
    fn a_scale_that_is_no_positive_number_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        for (text, words) in [
            (r#"{"a": {"input": 1}}"#, "a: expected a positive number as `weight`, or a list of them, found nothing"),
            (r#"{"a": {"input": 0, "weight": 1}}"#, "as `input`, or a list of them, found 0"),
            // The inverse of a subnormal number is infinite.
            (r#"{"a": {"input": 1e-40, "weight": 1}}"#, "as `input`, or a list of them, found 1e-40"),
            (r#"{"a": {"input": 1, "weight": 1e39}}"#, "as `weight`, or a list of them, found 1e+39"),
            ("{}", "it has no module, so nothing would multiply in FP8; export again"),
            (r#"{"a": 3}"#, "as `input`, or a list of them, found nothing"),
            (r#"{"a": {"input": [1, -1], "weight": [1, 1]}}"#, "found [1,-1]"),
            (r#"{"a": {"input": [], "weight": []}}"#, "found []"),
            (r#"{"a": {"input": [1, 2], "weight": 1}}"#, "a: 2 scales of inputs and 1 of weights; export again"),
        ] {
            std::fs::write(folder.path().join(FP8_SCALES), text).unwrap();
            let error = read_fp8_scales(folder.path()).unwrap_err().to_string();
            assert!(error.contains(words) && error.contains(FP8_SCALES), "{error}");
        }
    }
}
