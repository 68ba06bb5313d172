//! Runs in FP8 on several ranks, and their checkpoints.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{Device, Tensor, safetensors};

use super::run::TrainerRun;
use super::{ALL, EXPERTS, STAGE_1, STAGE_3};

const DELAYED: &str = "precision={recipe: delayed, amax_history_len: 3}";

/// The all-gather of FP8 codes changes no result: it may be turned on and off on resume.
#[test]
fn a_run_that_gathers_fp8_weights_resumes_with_the_bits_of_one_that_does_not() {
    let folder = tempfile::tempdir().unwrap();
    const GATHER: &str = "precision.fp8_param_gather=true";
    for recipe in [DELAYED, "precision={recipe: current}"] {
        let path = |name: &str| folder.path().join(format!("{}-{name}", recipe.len()));
        let run = |name: &str, arguments: &[&str]| {
            TrainerRun::new(&path(name), 2, &[&[recipe, STAGE_3], arguments].concat()).finish().curve()
        };
        let whole = run("whole", &[]);
        assert_eq!(run("gathered", &[GATHER]), whole, "{recipe}");
        let saves = path("parts").join("saves");
        let saves =
            format!("checkpoint=[{{output_dir: {}, auto_resume: true, save_every_n_steps: 1}}]", saves.display());
        run("parts", &[&saves, GATHER, "exit_iteration=2"]);
        run("parts", &[&saves, "exit_iteration=3"]);
        assert_eq!(run("parts", &[&saves, GATHER]), whole, "{recipe}");
    }
}

/// Returns the scales and amax histories of a checkpoint.
fn fp8_state(checkpoint: &Path) -> HashMap<String, Tensor> {
    let files = std::fs::read_dir(checkpoint).unwrap().map(|entry| entry.unwrap().path());
    let shards = files.filter(|file| file.extension().is_some_and(|extension| extension == "safetensors"));
    let tensors = shards.flat_map(|file| safetensors::load(file, &Device::Cpu).unwrap());
    tensors.filter(|(name, _)| name.starts_with("fp8/")).collect()
}

/// Returns the amax histories by module, a row per slot.
fn histories(checkpoint: &Path) -> HashMap<String, Vec<Vec<f32>>> {
    let history = |(name, tensor): (String, Tensor)| {
        let module = name.strip_suffix(".amax_history")?.to_owned();
        Some((module, tensor.reshape(((), 3)).unwrap().to_vec2().unwrap()))
    };
    fp8_state(checkpoint).into_iter().filter_map(history).collect()
}

/// Each of `parts` takes one step from the checkpoint of the previous one, on a mesh of its own. Every amax history continues, and
/// the losses stay near those of one rank: other sums move elements to the next FP8 number.
#[track_caller]
fn check_resume(common: &[&str], parts: &[(usize, &[&str])]) {
    let folder = tempfile::tempdir().unwrap();
    let common = [&[DELAYED], common].concat();
    let whole = TrainerRun::new(&folder.path().join("whole"), 1, &common).finish().curve();
    let dir = folder.path().join("saves");
    let saves = format!("checkpoint=[{{output_dir: {}, auto_resume: true, save_every_n_steps: 1}}]", dir.display());
    let mut before: Option<HashMap<String, Vec<Vec<f32>>>> = None;
    for (step, (n_ranks, arguments)) in (1..).zip(parts) {
        let exit = format!("exit_iteration={step}");
        let arguments = [&common[..], &[saves.as_str(), exit.as_str()], arguments].concat();
        TrainerRun::new(&folder.path().join("parts"), *n_ranks, &arguments).finish();
        let after = histories(&dir.join(format!("epoch_0_global_step_{step}")));
        assert!(!after.is_empty() && after.values().flatten().any(|slot| slot[0] > 0.0));
        for (module, slots) in &after {
            let Some(before) = &before else { continue };
            for (slot, before) in slots.iter().zip(&before[module]) {
                // An expert without tokens has no new amax.
                let continues = slot[1..] == before[..2] || slot == before;
                assert!(continues, "step {step} on {n_ranks} ranks, {module}: {before:?} became {slot:?}");
            }
        }
        before = Some(after);
    }
    let curve = TrainerRun::new(&folder.path().join("parts"), 1, &common).curve();
    assert!(curve.len() >= parts.len());
    for ((step, [loss, _]), (_, [of_one, _])) in curve.iter().zip(&whole) {
        assert!((loss - of_one).abs() <= 2e-3 * of_one, "step {step}: loss {loss}, one rank has {of_one}");
    }
}

#[test]
fn delayed_scales_are_resumed_on_other_meshes() {
    check_resume(
        &[],
        &[
            (2, &[STAGE_3]),
            (4, &["tensor_parallel_size=2", "pipeline_parallel_size=2", ALL]),
            (1, &[ALL]),
            (2, &["sequence_parallel_size=2", ALL]),
            (2, &[STAGE_1]),
        ],
    );
}

#[test]
fn delayed_scales_of_experts_are_resumed_on_other_meshes() {
    check_resume(
        &EXPERTS,
        &[
            (4, &["expert_parallel_size=4", STAGE_3]),
            (1, &[ALL]),
            (2, &["pipeline_parallel_size=2", ALL]),
            (4, &["expert_parallel_size=4", "tensor_parallel_size=2", "gradient_accumulation_steps=4"]),
            (2, &["expert_tensor_parallel_size=2", STAGE_1]),
        ],
    );
}
