//! Runs with the modes that trade time for memory learn what the others learn.

use crate::support::Run;

#[test]
fn a_run_that_parks_or_recomputes_ends_with_the_same_weights() {
    let plain = Run::new();
    plain.train_ok(&[]);
    for mode in ["full", "selective", "offload", "{offload: 0.5}", "{every: 2}"] {
        let run = Run::new();
        run.train_ok(&[&format!("model.activation_checkpoint={mode}")]);
        assert!(run.exported() == plain.exported(), "{mode}");
    }
}

/// Sums over tiles are in another order: the runs part by rounding, no more.
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
fn an_optimizer_cannot_leave_a_cpu_for_the_host_and_it_is_said() {
    let (plain, offloaded) = (Run::new(), Run::new());
    plain.train_ok(&["train_iters=4"]);
    offloaded.train_ok(&["train_iters=4", "deepspeed.zero_optimization.offload_optimizer.device=cpu"]);
    assert!(offloaded.exported() == plain.exported());
    let notes = offloaded.report()["notes"].to_string();
    assert!(notes.contains("the optimizer is not offloaded: what computes is the CPU"), "{notes}");
}
