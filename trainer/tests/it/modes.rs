//! Training with memory-saving modes, compared with training without.

use crate::support::Run;

#[test]
fn a_run_that_offloads_or_recomputes_ends_with_the_same_weights() {
    let plain = Run::new();
    plain.train_ok(&[]);
    for mode in ["full", "selective", "offload", "{offload: 0.5}", "{every: 2}"] {
        let run = Run::new();
        run.train_ok(&[&format!("model.activation_checkpoint={mode}")]);
        assert!(run.exported() == plain.exported(), "{mode}");
    }
}

/// Tiles sum in another order, so the losses differ by rounding.
#[test]
fn a_run_with_a_tiled_mlp_has_the_losses_of_one_without() {
    let (plain, tiled) = (Run::new(), Run::new());
    plain.train_ok(&[]);
    tiled.train_ok(&["tiled_mlp_compute=true"]);
    let (plain_losses, tiled_losses) = (plain.losses(), tiled.losses());
    assert_eq!(plain_losses.len(), 24);
    for (plain, tiled) in plain_losses.iter().zip(&tiled_losses) {
        assert!((plain - tiled).abs() < 1e-4 * plain, "{plain} {tiled}");
    }
    assert!(plain.exported() != tiled.exported(), "nothing was tiled");
}

#[test]
fn a_run_on_the_cpu_logs_that_its_optimizer_is_not_offloaded() {
    let (plain, offloaded) = (Run::new(), Run::new());
    plain.train_ok(&["train_iters=4"]);
    offloaded.train_ok(&["train_iters=4", "deepspeed.zero_optimization.offload_optimizer.device=cpu"]);
    assert!(offloaded.exported() == plain.exported());
    let notes = offloaded.report()["notes"].to_string();
    assert!(notes.contains("the optimizer is not offloaded: the compute device is the CPU"), "{notes}");
}
