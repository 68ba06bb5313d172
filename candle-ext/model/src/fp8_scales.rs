//! FP8 scales of a trained model: a file of its export, with which inference can multiply in FP8.

use std::collections::BTreeMap;
use std::path::Path;

use candlewick_ops::Fp8LinearScales;
use candlewick_text::files::is_present;
use serde_json::{Map, Value, json};

use crate::{Config, ModelError, config::json::read_object_with_unique_keys};

/// File of an export with the scales of its run: for each linear layer that multiplies in FP8, the factors of input and weight
/// before they are rounded to E4M3. Routed experts have lists with a factor for each expert. Modules that compute in the compute
/// dtype have `null`, so that an incomplete file is detected.
pub const FP8_SCALES: &str = "fp8_scales.json";

/// Returns scales by module name as the JSON text of [`FP8_SCALES`] for a model.
pub fn fp8_scales_to_json(scales: &BTreeMap<String, Vec<Fp8LinearScales>>, config: &Config) -> String {
    let of_module = |(module, matrices): (&String, &Vec<Fp8LinearScales>)| {
        let of = |scale: fn(&Fp8LinearScales) -> f32| match matrices.as_slice() {
            [matrix] => json!(scale(matrix)),
            matrices => matrices.iter().map(scale).collect(),
        };
        (module.clone(), json!({"input": of(|matrix| matrix.input), "weight": of(|matrix| matrix.weight)}))
    };
    let mut entries: BTreeMap<String, Value> = modules(config).map(|module| (module, Value::Null)).collect();
    entries.extend(scales.iter().map(of_module));
    format!("{:#}\n", Value::Object(entries.into_iter().collect()))
}

/// Returns the names of the linear layers and of the routed experts' matrices of a model.
fn modules(config: &Config) -> impl Iterator<Item = String> {
    (0..config.n_layers()).flat_map(|layer_idx| {
        let layer = config.layer(layer_idx);
        let linears = layer.linears().map(|linear| linear.module.clone());
        linears.chain(layer.expert_matrices().map(|matrix| matrix.name.clone())).collect::<Vec<_>>()
    })
}

/// Reads the scales of an export by module name, one for each matrix; `None` if the folder has none.
///
/// # Errors
/// If the file is damaged, or lacks a module of the model.
pub fn read_fp8_scales(
    folder: &Path,
    config: &Config,
) -> Result<Option<BTreeMap<String, Vec<Fp8LinearScales>>>, ModelError> {
    let path = folder.join(FP8_SCALES);
    if !is_present(&path) {
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
    let entries: Map<String, Value> = read_object_with_unique_keys(&path)?;
    if entries.values().all(Value::is_null) {
        return Err(ModelError::malformed(&path, "it has no module, so nothing would multiply in FP8; export again"));
    }
    check_complete(&entries, config).map_err(|problem| ModelError::malformed(&path, problem))?;
    entries.into_iter().filter(|(_, scales)| !scales.is_null()).map(of_module).collect::<Result<_, _>>().map(Some)
}

/// Fails unless each module of the model has an entry.
fn check_complete(entries: &Map<String, Value>, config: &Config) -> Result<(), String> {
    const SHOWN: usize = 3;
    let missing: Vec<String> = modules(config).filter(|module| !entries.contains_key(module)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let others = match missing.len() {
        ..=SHOWN => String::new(),
        n => format!(" and {} others", n - SHOWN),
    };
    let first = missing.iter().take(SHOWN).map(String::as_str).collect::<Vec<_>>().join(", ");
    Err(format!(
        "it has no entry for {first}{others}; take the file of this model's run, or export the run again; a module that computes \
         in the model's dtype has null"
    ))
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

    /// Returns a model of 2 layers, with experts in the second.
    fn config() -> Config {
        let config = json!({
            "model_type": "qwen3_moe", "num_hidden_layers": 2, "num_experts": 6, "num_experts_per_tok": 2,
            "mlp_only_layers": [0]
        });
        Config::from_json(config).unwrap()
    }

    #[test]
    fn scales_are_read_as_they_were_written() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(read_fp8_scales(folder.path(), &config()).unwrap(), None);
        let odd = [448.0 / 3.0, f32::MIN_POSITIVE, f32::MAX, 1.0 / 3.0, 0.1, 16_777_217.0];
        let names = ["q_proj", "k_proj", "v_proj", "o_proj"].map(|name| format!("model.layers.1.self_attn.{name}"));
        let scales = names.into_iter().zip(odd).map(|(module, input)| {
            let weight = 1.0 / input.sqrt();
            (module, vec![Fp8LinearScales { input, weight }])
        });
        let mut scales: BTreeMap<_, _> = scales.collect();
        let experts = odd.map(|weight| Fp8LinearScales { input: 3.0, weight });
        scales.insert("model.layers.1.mlp.experts.down_proj".to_owned(), experts.to_vec());
        let text = fp8_scales_to_json(&scales, &config());
        let entries: Map<String, Value> = serde_json::from_str(&text).unwrap();
        assert_eq!(entries.len(), 4 + 3 + 4 + 2, "attention and MLP, attention and experts");
        assert!(
            entries["model.layers.0.mlp.up_proj"].is_null()
                && entries["model.layers.1.mlp.experts.gate_up_proj"].is_null()
        );
        std::fs::write(folder.path().join(FP8_SCALES), text).unwrap();
        assert_eq!(read_fp8_scales(folder.path(), &config()).unwrap(), Some(scales));
    }

    #[test]
    fn an_incomplete_file_is_refused_with_the_first_missing_modules() {
        let folder = tempfile::tempdir().unwrap();
        let all: Vec<String> = modules(&config()).collect();
        let read = |missing: &[usize]| {
            let entry = |(i, module): (usize, &String)| {
                (!missing.contains(&i)).then(|| (module.clone(), json!({"input": 1, "weight": 1})))
            };
            let entries: Map<String, Value> = all.iter().enumerate().filter_map(entry).collect();
            std::fs::write(folder.path().join(FP8_SCALES), Value::Object(entries).to_string()).unwrap();
            read_fp8_scales(folder.path(), &config()).map_err(|error| error.to_string())
        };
        assert_eq!(read(&[]).unwrap().unwrap().len(), all.len());
        for (missing, want) in [
            (vec![4], "it has no entry for model.layers.0.mlp.gate_proj; take the file of this model's run"),
            (
                (4..9).collect(),
                "for model.layers.0.mlp.gate_proj, model.layers.0.mlp.up_proj, model.layers.0.mlp.down_proj and 2 others; take",
            ),
        ] {
            let error = read(&missing).unwrap_err();
            assert!(error.contains(want) && error.contains(FP8_SCALES), "{error}");
        }
    }

    #[test]
    fn a_scale_that_is_no_positive_number_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        for (entry, words) in [
            (r#"{"input": 1}"#, "a: expected a positive number as `weight`, or a list of them, found nothing"),
            (r#"{"input": 0, "weight": 1}"#, "as `input`, or a list of them, found 0"),
            // The inverse of a subnormal number is infinite.
            (r#"{"input": 1e-40, "weight": 1}"#, "as `input`, or a list of them, found 1e-40"),
            (r#"{"input": 1, "weight": 1e39}"#, "as `weight`, or a list of them, found 1e+39"),
            ("null", "it has no module, so nothing would multiply in FP8; export again"),
            ("3", "as `input`, or a list of them, found nothing"),
            (r#"{"input": [1, -1], "weight": [1, 1]}"#, "found [1,-1]"),
            (r#"{"input": [], "weight": []}"#, "found []"),
            (r#"{"input": [1, 2], "weight": 1}"#, "a: 2 scales of inputs and 1 of weights; export again"),
        ] {
            let mut entries: Map<String, Value> = modules(&config()).map(|module| (module, Value::Null)).collect();
            entries.insert("a".to_owned(), serde_json::from_str(entry).unwrap());
            std::fs::write(folder.path().join(FP8_SCALES), Value::Object(entries).to_string()).unwrap();
            let error = read_fp8_scales(folder.path(), &config()).unwrap_err().to_string();
            assert!(error.contains(words) && error.contains(FP8_SCALES), "{error}");
        }
        for text in [r#"{"a": null, "a": null}"#, r#"{"a": {"input": 1, "input": 2, "weight": 1}}"#] {
            std::fs::write(folder.path().join(FP8_SCALES), text).unwrap();
            let error = read_fp8_scales(folder.path(), &config()).unwrap_err().to_string();
            assert!(error.contains("appears twice at line 1") && error.contains(FP8_SCALES), "{error}");
        }
        std::fs::write(folder.path().join(FP8_SCALES), "{}").unwrap();
        assert!(read_fp8_scales(folder.path(), &config()).unwrap_err().to_string().contains("it has no module"));
    }
}
