//! Runs whose linear layers multiply in FP8.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use candle_core::{DType, Device};
use candlewick_inference::lm::Lm;
use candlewick_model::{Config, read_fp8_scales};
use candlewick_ops::Fp8LinearScales;
use serde_json::Value;

use crate::support::{Run, stderr};

const DELAYED: &[&str] = &["precision.recipe=delayed", "precision.amax_history_len=4"];
const STOCHASTIC: &[&str] = &["precision.recipe=current", "precision.gradient_rounding=stochastic"];
const EXCLUDING: &[&str] = &["precision.recipe=current", "precision.exclude_slower_modules=true"];
const BLOCKWISE: &[&str] = &["precision.recipe=blockwise", "precision.format=hybrid"];

#[test]
fn a_resumed_run_has_the_losses_of_an_uninterrupted_one() {
    let dense = Run::new();
    dense.train_ok(&[]);
    for recipe in [DELAYED, STOCHASTIC, BLOCKWISE] {
        let whole = Run::new();
        whole.train_ok(recipe);
        let parts = Run::new();
        parts.train_ok(&[recipe, &["exit_iteration=7"]].concat());
        parts.train_ok(recipe);
        parts.assert_resumed();
        assert_eq!(parts.losses(), whole.losses(), "{recipe:?}");
        assert!(whole.exported() == parts.exported(), "{recipe:?}");
        let (first, last) = (whole.losses()[0], *whole.losses().last().unwrap());
        assert_ne!(first, dense.losses()[0], "{recipe:?} changes the loss");
        assert!((last / dense.losses().last().unwrap() - 1.0).abs() < 0.05, "{recipe:?}: {last}");
    }
}

/// The codes of experts follow their weights: a resumed run, which quantizes the loaded ones, has the losses of an uninterrupted
/// one, whose weights each step changes.
#[test]
fn a_resumed_run_of_experts_has_the_losses_of_an_uninterrupted_one() {
    for recipe in [DELAYED, BLOCKWISE] {
        let arguments = [recipe, &["precision.exclude_modules=[self_attn]", "train_iters=6"]].concat();
        let whole = run_of_experts();
        whole.train_ok(&arguments);
        let parts = run_of_experts();
        parts.train_ok(&[&arguments[..], &["exit_iteration=3"]].concat());
        parts.train_ok(&arguments);
        parts.assert_resumed();
        assert_eq!(parts.losses(), whole.losses(), "{recipe:?}");
    }
}

/// A checkpoint of a run without FP8 resumes with it and the other way; the change is logged.
#[test]
fn fp8_may_be_turned_on_and_off_on_resume() {
    let run = Run::new();
    run.train_ok(&["exit_iteration=7"]);
    let on = run.train(&[DELAYED, &["exit_iteration=12"]].concat());
    let log = stderr(&on);
    assert!(
        on.status.success()
            && log.contains("precision.recipe.delayed.amax_history_len: absent in the checkpoint, 4 now"),
        "{log}"
    );
    run.assert_resumed();
    let longer = run.train(&["precision.recipe=delayed", "precision.amax_history_len=8", "exit_iteration=14"]);
    assert!(longer.status.success(), "{}", stderr(&longer));
    run.assert_resumed();
    run.train_ok(&[]);
    run.assert_resumed();
}

/// With all layers filtered but one, the loss differs from that of all layers.
#[test]
fn excluded_modules_stay_in_the_dtype_of_the_model() {
    let loss = |arguments: &[&str]| {
        let run = Run::new();
        run.train_ok(&[&["train_iters=1", "checkpoint=null"], arguments].concat());
        run.losses()[0]
    };
    let (dense, all) = (loss(&[]), loss(DELAYED));
    let one =
        loss(&[DELAYED, &["precision.exclude_modules=[q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj]"]].concat());
    let middle =
        loss(&[DELAYED, &["precision.first_last_layers_bf16=true", "precision.num_layers_at_end_in_bf16=0"]].concat());
    let losses = [dense, all, one, middle];
    for (i, a) in losses.iter().enumerate() {
        assert!(losses[..i].iter().all(|b| a != b), "{losses:?}");
    }
}

/// An adapter on an FP8 base learns nearly as well as on the dense base, with and without FP8 matmuls.
#[test]
fn an_adapter_trains_on_an_fp8_base() {
    const LORA: &str = "model.peft_config={r: 4, lora_alpha: 16, target_modules: all-linear}";
    let losses = |arguments: &[&str]| {
        let run = Run::new();
        run.train_ok(&[&[LORA, "optimizer.learning_rate=1e-2"], arguments].concat());
        run.losses()
    };
    let dense = losses(&[]);
    let base = "model.quantize_base=fp8";
    for quantized in [losses(&[base]), losses(&[base, "precision.recipe=blockwise"])] {
        assert_ne!(quantized[0], dense[0], "quantizing the base changes the loss");
        let (last, of_dense) = (quantized.last().unwrap(), dense.last().unwrap());
        assert!(*last < 0.99 * quantized[0] && (last / of_dense - 1.0).abs() < 0.02, "{quantized:?} and {dense:?}");
    }
}

/// Statistics are written at their interval, for each quantized tensor, and change no result.
#[test]
fn statistics_of_quantized_tensors_are_in_the_metrics() {
    let silent = Run::new();
    silent.train_ok(DELAYED);
    let run = Run::new();
    run.train_ok(&[DELAYED, &["precision.stats_interval=5", "precision.exclude_modules=[layers.1.]"]].concat());
    let records: Vec<Value> = run.metrics().into_iter().filter(|record| record["fp8"].is_object()).collect();
    let steps: Vec<u64> = records.iter().map(|record| record["iter"].as_u64().unwrap()).collect();
    assert_eq!(steps, [5, 10, 15, 20]);
    for record in &records {
        let layers = record["fp8"].as_object().unwrap();
        assert_eq!(layers.len(), 7, "the layers of one block");
        for (module, tensors) in layers {
            assert!(module.starts_with("model.layers.0."), "{module}");
            for name in ["input", "weight", "grad_output"] {
                let number = |key: &str| tensors[name][key].as_f64().unwrap();
                assert!(number("amax") > 0.0 && number("mse") > 0.0, "{module} {name}: {tensors}");
                assert!(number("mse") < 0.01 * number("amax").powi(2), "{module} {name}: {tensors}");
                assert!((0.0..0.5).contains(&number("underflow")), "{module} {name}: {tensors}");
                assert!((0.0..0.05).contains(&number("overflow")), "{module} {name}: {tensors}");
            }
        }
    }
    let with_stats = Run::new();
    with_stats.train_ok(&[DELAYED, &["precision.stats_interval=5"]].concat());
    assert_eq!(with_stats.losses(), silent.losses());
}

/// Statistics are those of the selected modules and tensors alone, with the numbers that they have among all.
#[test]
fn statistics_are_those_of_the_selected_modules_and_tensors() {
    let stats = |arguments: &[&str]| {
        let run = Run::new();
        run.train_ok(
            &[DELAYED, &["precision.stats_interval=2", "train_iters=2", "checkpoint=null"], arguments].concat(),
        );
        run.metrics().into_iter().find(|record| record["fp8"].is_object()).unwrap()["fp8"].clone()
    };
    let all = stats(&[]);
    let some =
        stats(&["precision.stats_modules=[layers.1.mlp, q_proj]", "precision.stats_tensors=[activation, grad_output]"]);
    let modules: Vec<&String> = some.as_object().unwrap().keys().collect();
    let (mlp, q) = ("model.layers.1.mlp", "self_attn.q_proj");
    assert!(modules.len() == 5 && modules.iter().all(|name| name.contains(mlp) || name.ends_with(q)), "{modules:?}");
    for (module, tensors) in some.as_object().unwrap() {
        let names: Vec<&String> = tensors.as_object().unwrap().keys().collect();
        assert_eq!(names, ["grad_output", "input"], "{module}");
        assert!(names.into_iter().all(|name| tensors[name] == all[module][name]), "{module}: {tensors}");
    }
}

/// Operands that are rounded but multiplied in the dtype of the model show the effect of FP8 on the loss: the loss is nearly that of
/// FP8 with scales that are powers of two.
#[test]
fn fake_quantization_has_the_losses_of_fp8() {
    let losses = |arguments: &[&str]| {
        let run = Run::new();
        run.train_ok(&[&["train_iters=6", "checkpoint=null"], arguments].concat());
        run.losses()
    };
    let dense = losses(&[]);
    for recipe in ["precision={recipe: current, power_of_two_scales: true}", "precision={recipe: blockwise}"] {
        let (fp8, fake) = (losses(&[recipe]), losses(&[recipe, "precision.fake_quantize=true"]));
        for ((fp8, fake), dense) in fp8.iter().zip(&fake).zip(&dense) {
            assert!(fake != dense && (fake - fp8).abs() < 0.1 * (fp8 - dense).abs().max(1e-3), "{fake} {fp8} {dense}");
        }
    }
}

/// The advice has each size once, for the recipe's scales or for all three. Layers that a run computes together are measured as one:
/// an MLP of which all layers multiply in FP8, q, k and v, or gate and up.
#[test]
fn advice_measures_every_size() {
    const KINDS: [&str; 3] = ["mlps", "shared_inputs", "sizes"];
    let run = Run::new();
    let advice = |arguments: &[&str]| -> Vec<Value> {
        let output = run.command("fp8-advise", arguments).arg("--json").output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let modules = |advice: &Value, key: &str| -> Vec<String> {
        let of_rows = advice[key].as_array().unwrap().iter().flat_map(|row| row["modules"].as_array().unwrap());
        of_rows.map(|module| module.as_str().unwrap().to_owned()).collect()
    };
    let all = advice(&[]);
    let names: Vec<&str> = all.iter().map(|advice| advice["recipe"].as_str().unwrap()).collect();
    assert_eq!(names, ["delayed", "current", "blockwise"]);
    for advice in &all {
        let [mlps, qkv, others] = KINDS.map(|kind| modules(advice, kind));
        assert!(mlps.len() == 2 * 3 && mlps.iter().all(|module| module.contains(".mlp.")), "{advice}");
        assert!(qkv.len() == 2 * 3 && !qkv.iter().any(|module| module.ends_with("o_proj")), "{advice}");
        assert!(others.len() == 2 && others.iter().all(|module| module.ends_with(".self_attn.o_proj")), "{advice}");
        for row in KINDS.into_iter().flat_map(|key| advice[key].as_array().unwrap()) {
            assert!(row["dense_ms"].as_f64().unwrap() > 0.0 && row["fp8_ms"].as_f64().unwrap() > 0.0, "{row}");
        }
        assert!(KINDS.iter().all(|kind| advice[kind].as_array().unwrap().len() == 1), "{advice}");
    }
    let one = advice(&["precision.recipe=blockwise", "precision.exclude_modules=[layers.0.]"]);
    let of_one = KINDS.map(|kind| modules(&one[0], kind)).concat();
    assert!(one.len() == 1 && of_one.len() == 7);
    assert!(of_one.iter().all(|module| module.starts_with("model.layers.1.")));
    // Gate and up of an MLP that is not fused still share their input.
    for (apart, n_singles) in [
        (&["precision.exclude_modules=[down_proj]"][..], 2),
        (&["model.peft_config={r: 4, lora_alpha: 16, target_modules: [down_proj]}"], 4),
    ] {
        let advice = advice(&[&["precision.recipe=current"][..], apart].concat());
        let n_modules = KINDS.map(|kind| modules(&advice[0], kind).len());
        assert_eq!(n_modules, [0, 2 * 5, n_singles], "{apart:?}");
    }
    let text = run.command("fp8-advise", &[]).output().unwrap();
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(
        text.contains("precision.recipe: delayed on cpu") && text.contains("MLP ") && text.contains("speed-up"),
        "{text}"
    );
}

/// Layers that are slower in FP8 stay in the dtype of the model: on the CPU these are all or nearly all. The run has the losses of
/// one that excludes them by name.
#[test]
fn slower_modules_stay_in_the_dtype_of_the_model() {
    let run = Run::new();
    let log = run.train(&[EXCLUDING, &["exit_iteration=7"]].concat());
    assert!(log.status.success(), "{}", stderr(&log));
    let slower = slower_modules(&run);
    let text = stderr(&log);
    let numbers =
        format!("{} linear layers multiply in FP8, {} are faster in model.dtype", 14 - slower.len(), slower.len());
    assert!(!slower.is_empty() && text.contains(&numbers), "{slower:?}: {text}");
    let named = Run::new();
    let exclude = format!("precision.exclude_modules=[{}]", slower.join(", "));
    match slower.len() {
        14 => named.train_ok(&["exit_iteration=7"]),
        _ => named.train_ok(&["precision.recipe=current", &exclude, "exit_iteration=7"]),
    }
    assert_eq!(run.losses(), named.losses());
}

/// A resumed run does not measure again, because times differ: it keeps the modules of its checkpoint. With other settings of FP8
/// it measures.
#[test]
fn a_resumed_run_keeps_the_slower_modules_of_its_checkpoint() {
    let run = Run::new();
    run.train_ok(&[EXCLUDING, &["exit_iteration=7"]].concat());
    let slower = slower_modules(&run);
    let resumed = run.train(&[EXCLUDING, &["exit_iteration=14"]].concat());
    let log = stderr(&resumed);
    let note = format!("{} stay in model.dtype, as in the run that is continued", slower.len());
    assert!(resumed.status.success() && log.contains(&note), "{log}");
    run.assert_resumed();
    assert_eq!(slower_modules(&run), slower);
    let changed = run.train(&[EXCLUDING, &["precision.format=e4m3"]].concat());
    let log = stderr(&changed);
    assert!(changed.status.success() && log.contains("are faster in model.dtype"), "{log}");
}

/// Returns the modules that the newest checkpoint names as slower.
fn slower_modules(run: &Run) -> Vec<String> {
    let folders = std::fs::read_dir(run.path().join("checkpoints")).unwrap();
    let mut states: Vec<Value> = folders
        .filter_map(|folder| std::fs::read(folder.unwrap().path().join("state.json")).ok())
        .map(|state| serde_json::from_slice(&state).unwrap())
        .collect();
    states.sort_by_key(|state| state["step"].as_u64());
    serde_json::from_value(states.last().unwrap()["slower_modules"].clone()).unwrap()
}

/// The export of a run with delayed scaling has the scales of its last step, which inference can use. They change the loss as
/// little as FP8 does. Scales of other recipes follow from the tensors, so that such an export has none.
#[test]
fn an_export_has_the_scales_of_delayed_scaling() {
    let run = Run::new();
    // The newest sharded checkpoint is of step 20.
    run.train_ok(&[DELAYED, &["precision.exclude_modules=[o_proj]", "train_iters=20"]].concat());
    let folder = run.export_folder();
    let scales = scales_of(&folder).unwrap();
    assert_eq!(scales.len(), 12, "all linear layers of two blocks but o_proj");
    assert!(scales.values().flatten().all(|scales| scales.input != 1.0 && scales.weight != 1.0), "{scales:?}");
    let load = || Lm::load(&folder, None, DType::F32, Device::Cpu).unwrap();
    let (dense, fp8) = (loss(&load()), loss(&load().with_fp8_scales().unwrap()));
    assert!(fp8 != dense && (fp8 / dense - 1.0).abs() < 0.05, "{fp8} {dense}");
    // An export of a checkpoint needs the record of the run in a folder above.
    std::fs::copy(run.path().join("run/run.json"), run.path().join("run.json")).unwrap();
    for source in [run.export_folder(), run.path().join("checkpoints")] {
        let output = tempfile::tempdir().unwrap();
        let exported = output.path().join("exported");
        let args = [source.as_path(), Path::new("--output"), &exported, Path::new("--skip-check")];
        let mut command = Command::new(env!("CARGO_BIN_EXE_trainer"));
        let log = command.arg("export").args(args).current_dir(run.path()).output().unwrap();
        assert!(log.status.success(), "{}", stderr(&log));
        assert_eq!(scales_of(&exported).as_ref(), Some(&scales), "{}", source.display());
    }

    let current = Run::new();
    current.train_ok(&["precision.recipe=current", "train_iters=1"]);
    assert_eq!(scales_of(&current.export_folder()), None);
}

/// Returns the scales of an export.
fn scales_of(folder: &Path) -> Option<BTreeMap<String, Vec<Fp8LinearScales>>> {
    read_fp8_scales(folder, &Config::read(folder).unwrap()).unwrap()
}

/// Each expert has scales of its own.
#[test]
fn an_export_has_the_scales_of_routed_experts() {
    let run = run_of_experts();
    run.train_ok(&[DELAYED, &["precision.exclude_modules=[self_attn]", "train_iters=4"]].concat());
    let folder = run.export_folder();
    let scales = scales_of(&folder).unwrap();
    let names: Vec<&str> = scales.keys().map(String::as_str).collect();
    assert!(names.len() == 4 && names.iter().all(|name| name.contains(".mlp.experts.")), "{names:?}");
    assert!(scales.values().all(|experts| experts.len() == 4 && experts[0] != experts[1]), "{scales:?}");
    let load = || Lm::load(&folder, None, DType::F32, Device::Cpu).unwrap();
    let (dense, fp8) = (loss(&load()), loss(&load().with_fp8_scales().unwrap()));
    assert!(fp8 != dense && (fp8 / dense - 1.0).abs() < 0.05, "{fp8} {dense}");
}

/// Returns a run of a mixture of 4 experts.
fn run_of_experts() -> Run {
    let run = Run::new();
    run.edit("LlamaForCausalLM", "Qwen3MoeForCausalLM");
    run.edit("model_type: llama", "model_type: qwen3_moe\n    head_dim: 8");
    let experts = "num_experts: 4\n    num_experts_per_tok: 2\n    moe_intermediate_size: 16\n    norm_topk_prob: true";
    run.edit("    rms_norm_eps", &format!("    {experts}\n    rms_norm_eps"));
    run
}

/// Returns the log-likelihood of a text.
fn loss(lm: &Lm) -> f64 {
    let tokens = lm.score("<|im_start|>user\nSay wolf 4 times.<|im_end|>").unwrap();
    tokens.iter().filter_map(|token| token.logprob).map(f64::from).sum()
}
