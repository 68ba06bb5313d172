//! Runs whose linear layers multiply in FP8.

use crate::support::{Run, stderr};

const DELAYED: &[&str] = &["precision.recipe=delayed", "precision.amax_history_len=4"];
const STOCHASTIC: &[&str] = &["precision.recipe=current", "precision.gradient_rounding=stochastic"];
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
fn filtered_layers_stay_in_the_dtype_of_the_model() {
    let loss = |arguments: &[&str]| {
        let run = Run::new();
        run.train_ok(&[&["train_iters=1", "checkpoint=null"], arguments].concat());
        run.losses()[0]
    };
    let (dense, all) = (loss(&[]), loss(DELAYED));
    let one =
        loss(&[DELAYED, &["precision.filter_fqns=[q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj]"]].concat());
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
