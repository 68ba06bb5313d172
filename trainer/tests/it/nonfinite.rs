//! Losses and gradients that are not finite.

use std::collections::HashMap;

use candle_core::{Device, Tensor, safetensors};
use serde_json::Value;

use crate::support::{Run, stderr, workspace};

/// Returns a run whose last row alone has the character §, for which the model's embedding is NaN.
fn poisoned() -> Run {
    let run = Run::new();
    run.edit("tie_word_embeddings: true", "tie_word_embeddings: false");
    run.train_ok(&["train_iters=1"]);
    let folder = run.path().join("poisoned");
    std::fs::rename(run.export_folder(), &folder).unwrap();
    let tokenizer = std::fs::read(workspace().join("recipes/quickstart/tokenizer/tokenizer.json")).unwrap();
    let tokenizer: Value = serde_json::from_slice(&tokenizer).unwrap();
    // The bytes of § in a byte-level vocabulary.
    let id = tokenizer["model"]["vocab"]["§"].as_u64().unwrap() as usize;
    let path = folder.join("model.safetensors");
    let mut weights: HashMap<String, Tensor> = safetensors::load(&path, &Device::Cpu).unwrap();
    let table = weights.get_mut("model.embed_tokens.weight").unwrap();
    let width = table.dim(1).unwrap();
    *table = table
        .slice_assign(&[id..id + 1, 0..width], &Tensor::full(f32::NAN, (1, width), &Device::Cpu).unwrap())
        .unwrap();
    safetensors::save(&weights, &path).unwrap();
    let rows = std::fs::read_to_string(run.path().join("train.jsonl")).unwrap();
    let row =
        r#"{"messages": [{"role": "user", "content": "What is in §?"}, {"role": "assistant", "content": "Much."}]}"#;
    run.write("train.jsonl", &format!("{rows}{row}\n"));
    run
}

fn overrides(run: &Run) -> [String; 3] {
    let model = format!("model={{name_or_path: {}, dtype: f32}}", run.path().join("poisoned").display());
    [model, "micro_batch_size=1".into(), "train_iters=30".into()]
}

#[test]
fn a_nonfinite_loss_ends_the_run_and_names_its_row() {
    let run = poisoned();
    let overrides = overrides(&run);
    let output = run.train(&overrides.each_ref().map(String::as_str));
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(i32::from(trainer::exit::ExitCode::NonFinite as u8)), "{said}");
    assert!(said.contains("the loss is not finite") && said.contains("train.jsonl:81"), "{said}");
    assert!(!said.contains("f16"), "{said}");
    assert!(run.losses().iter().all(|loss| loss.is_finite()), "{:?}", run.losses());
    let replayed = run.replay(&["--rows", "1"]);
    let text = String::from_utf8_lossy(&replayed.stdout).into_owned();
    assert!(replayed.status.success(), "{}", stderr(&replayed));
    for words in ["the loss or a gradient is not finite", "loss not finite", "train.jsonl:81", "What is in §?"] {
        assert!(text.contains(words), "no {words:?} in:\n{text}");
    }
}

/// Activations of large weights exceed the range of f16, but not that of bf16.
#[test]
fn an_overflow_in_f16_names_the_dtype() {
    let remedy = "Values above 65504 overflow in f16: set model.dtype to bf16 or f32.";
    let train = |dtype: &str, more: &[&str]| {
        let dtype = format!("model.dtype={dtype}");
        let arguments = [&dtype, "model.config.initializer_range=10", "train_iters=1"];
        let output = Run::new().train(&[&arguments, more].concat());
        (output.status.code(), stderr(&output))
    };
    let nonfinite = Some(i32::from(trainer::exit::ExitCode::NonFinite as u8));
    for more in [vec![], vec!["on_nonfinite=skip"]] {
        let (code, said) = train("f16", &more);
        assert!(code == nonfinite && said.contains(remedy) && said.contains("ower the learning rate"), "{said}");
    }
    let (code, said) = train("bf16", &[]);
    assert_eq!(code, Some(0), "{said}");
}

/// Large logits and a coefficient that is finite in f32 make gradients that are not.
#[test]
fn a_coefficient_that_makes_the_gradient_nonfinite_is_named() {
    let arguments = ["moe.z_loss_coeff=3e38", "model.config.initializer_range=10", "train_iters=2"];
    let output = Run::of_experts().train(&arguments);
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(i32::from(trainer::exit::ExitCode::NonFinite as u8)), "{said}");
    let want = "the gradient is not finite: z_loss with moe.z_loss_coeff is ";
    assert!(said.contains(want) && said.contains("; lower moe.z_loss_coeff. Samples: "), "{said}");
}

#[test]
fn a_nonfinite_step_is_skipped_with_on_nonfinite_skip() {
    let run = poisoned();
    let [model, micro, iters] = overrides(&run);
    run.train_ok(&[&model, &micro, &iters, "on_nonfinite=skip"]);
    let skipped = run.report()["skipped_steps"].as_u64().unwrap();
    assert!((1..5).contains(&skipped), "{skipped} steps have the row");
    assert!(*run.losses().last().unwrap() < 0.7 * run.losses()[0], "{:?}", run.losses());
    let weights = safetensors::load(run.export_folder().join("model.safetensors"), &Device::Cpu).unwrap();
    let before = safetensors::load(run.path().join("poisoned/model.safetensors"), &Device::Cpu).unwrap();
    for (name, weight) in weights {
        let n_nan =
            |x: &Tensor| x.flatten_all().unwrap().to_vec1::<f32>().unwrap().iter().filter(|x| x.is_nan()).count();
        assert_eq!(n_nan(&weight), n_nan(&before[&name]), "{name}");
    }
}

#[test]
fn a_run_that_skips_every_step_fails_and_exports_nothing() {
    let run = poisoned();
    let [model, micro, _] = overrides(&run);
    let row = std::fs::read_to_string(run.path().join("train.jsonl")).unwrap().lines().last().unwrap().to_owned();
    run.write("train.jsonl", &row);
    std::fs::remove_dir_all(run.path().join("hf")).unwrap();
    let interval = "checkpoint.1.save_every_n_steps=1";
    let output = run.train(&[&model, &micro, "train_iters=2", "on_nonfinite=skip", interval]);
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(i32::from(trainer::exit::ExitCode::NonFinite as u8)), "{said}");
    assert!(said.contains("all 2 steps were skipped"), "{said}");
    assert!(!run.has_exports());
    assert_eq!(run.report()["exit"]["code"], 5);
}

/// An f16 has 11 significant bits. After some steps the losses differ by 2%.
#[test]
fn the_losses_of_f16_are_those_of_f32() {
    let (full, half) = (Run::new(), Run::new());
    full.train_ok(&["train_iters=8"]);
    half.train_ok(&["train_iters=8", "model.dtype=fp16"]);
    assert_eq!(half.report()["skipped_steps"], 0);
    for (full, half) in full.losses().iter().zip(half.losses()) {
        assert!((full - half).abs() < 0.02 * full && *full != half, "{full} {half}");
    }
}

/// 2^24 times these gradients overflows f16. The loss scaler halves the scale until they fit.
#[test]
fn an_overflowing_loss_scale_is_halved_until_the_gradient_fits() {
    let run = Run::new();
    run.train_ok(&["model.dtype=fp16", "deepspeed.fp16={enabled: true, initial_scale_power: 24, hysteresis: 1}"]);
    let scales: Vec<f64> = run.metrics().iter().filter_map(|record| record["loss_scale"].as_f64()).collect();
    let skipped = run.report()["skipped_steps"].as_u64().unwrap() as usize;
    assert!(skipped > 0 && skipped < 20, "{skipped}: {scales:?}");
    assert_eq!(scales.last(), Some(&2f64.powi(24 - skipped as i32)), "{scales:?}");
    assert!(*run.losses().last().unwrap() < 0.9 * run.losses()[0], "{:?}", run.losses());
}

/// Moments with fewer significant bits change the losses only slightly.
#[test]
fn the_losses_with_bf16_moments_are_those_with_f32_moments() {
    let (full, half) = (Run::new(), Run::new());
    full.train_ok(&[]);
    half.train_ok(&["deepspeed.bf16.bf16_optimizer_states=true"]);
    for (full, half) in full.losses().iter().zip(half.losses()) {
        assert!((full - half).abs() < 0.05 * full, "{full} {half}");
    }
    assert!(full.exported() != half.exported(), "moments were kept in f32");
}
