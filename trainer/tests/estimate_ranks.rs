//! What ranks that share sequences allocate, counted, beside what the estimate says of each. One test: all of its process is
//! counted, and the ranks are its threads.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "support/estimated.rs"]
mod estimated;

use candlewick_comm::{Options, World, threads};
use candlewick_text::hub::{Hub, HubSettings};
use estimated::Case;
use peak_alloc::PeakAlloc;
use trainer::estimate::Class;
use trainer::run::{Began, prepare_data, train};

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

#[test]
fn ranks_of_a_ring_allocate_what_the_formulas_say() {
    let long = "data.max_length=2048";
    // The buffers that products keep are made by the first run.
    train_in_process(1, &Case::new(&["train_iters=1"]));
    for (n_ranks, arguments) in [
        (2, vec!["context_parallel_size=2", long]),
        (3, vec!["context_parallel_size=3", long, "model.dtype=bf16", "model.activation_checkpoint=full"]),
    ] {
        let case = Case::on_ranks(n_ranks, &arguments);
        let counted = train_in_process(n_ranks, &case) / n_ranks;
        let account = case.estimate().peak().account.clone();
        let said = account.total() - account.of(Class::Program) - account.of(Class::Allocator);
        case.compare(said, counted as u64, 0.1);
    }
}

/// Returns the most bytes that were allocated at once, beyond those before.
fn train_in_process(n_ranks: usize, case: &Case) -> usize {
    let hub = || Hub::new(HubSettings { offline: true, ..HubSettings::from_env() }).unwrap();
    prepare_data(&case.plan, &hub(), Began::now()).unwrap();
    let before = ALLOCATOR.current_usage();
    ALLOCATOR.reset_peak_usage();
    let rank = |world: &World| {
        let mut plan = case.plan.clone();
        if world.rank() > 0 {
            // As in processes of their own: the first rank alone writes.
            (plan.log.output_dir, plan.log.metrics_path) = (None, None);
        }
        train(&plan, &hub(), world, world.rank(), &candle_core::Device::Cpu).map(|_| ()).map_err(|e| format!("{e:#}"))
    };
    threads::run(n_ranks, Options::default(), rank).unwrap();
    ALLOCATOR.peak_usage() - before
}
