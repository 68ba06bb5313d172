//! Several ranks, which are threads of the process: peak memory that training allocates, compared with the estimate.

use candlewick_comm::{Options, World, threads};
use candlewick_runtime::run_id::RunId;
use candlewick_text::hub::{Hub, HubSettings};
use trainer::estimate::{Category, DeviceKind, Setup, estimate_stage};
use trainer::run::{prepare_data, train};

use crate::estimated::Case;
use crate::{ALLOCATOR, alone};

/// A mixture of experts. Rows of experts are most of its memory.
const EXPERTS: [&str; 6] = [
    "model.config.model_type=qwen3_moe",
    "model.config.num_experts=8",
    "model.config.num_experts_per_tok=4",
    "model.config.moe_intermediate_size=256",
    "model.config.norm_topk_prob=true",
    "data.max_length=2048",
];

/// Twice the rows of a balanced load.
const PADDED: [&str; 2] = ["moe.expert_capacity_factor=2", "moe.pad_expert_input_to_capacity=true"];

#[test]
fn ranks_allocate_what_the_formulas_say() {
    alone("ranks::ranks_allocate_what_the_formulas_say", check_all);
}

fn check_all() {
    let (long, tall) = ("data.max_length=2048", "model.config.num_hidden_layers=6");
    // The first run allocates the GEMM buffers.
    train_in_process(1, &Case::new(&["train_iters=1"]));
    for (n_ranks, arguments) in [
        (3, vec!["context_parallel_size=3", long, "model.dtype=bf16", "model.activation_checkpoint=full"]),
        (2, vec!["context_parallel_size=2", long, "model.activation_checkpoint=selective"]),
        (2, vec!["tensor_parallel_size=2", long, "model.activation_checkpoint=selective"]),
        (2, vec!["tensor_parallel_size=2", long]),
        (2, vec!["tensor_parallel_size=2", "sequence_parallel=false", long, "model.activation_checkpoint=full"]),
        (2, vec!["tensor_parallel_size=2", long, "model.dtype=bf16", "model.peft_config={r: 16}"]),
        (
            2,
            vec!["pipeline_parallel_size=2", tall, "virtual_pipeline_parallel_size=3", "gradient_accumulation_steps=4"],
        ),
        (2, vec!["pipeline_parallel_size=2", tall, "pipeline_schedule=afab", "gradient_accumulation_steps=4"]),
        (4, vec!["pipeline_parallel_size=2", "tensor_parallel_size=2", long, "gradient_accumulation_steps=2"]),
        (4, vec!["tensor_parallel_size=2", "deepspeed.zero_optimization.stage=3", long]),
        (2, vec!["tensor_parallel_size=2", "model.mtp_num_layers=2", long]),
        (2, vec!["pipeline_parallel_size=2", tall, "model.mtp_num_layers=1", "gradient_accumulation_steps=2"]),
        (2, vec!["deepspeed.zero_optimization.stage=2", "model.mtp_num_layers=2", long]),
        (2, vec!["deepspeed.zero_optimization.stage=3", "model.mtp_num_layers=2", long]),
        (2, vec!["deepspeed.communication_data_type=bf16"]),
        (2, vec!["deepspeed.communication_data_type=bf16", "deepspeed.zero_optimization.stage=1"]),
        (2, vec!["deepspeed.communication_data_type=bf16", "deepspeed.zero_optimization.stage=2"]),
        (2, vec!["deepspeed.communication_data_type=bf16", "deepspeed.zero_optimization.stage=3"]),
        (2, [&EXPERTS[..], &["expert_parallel_size=2"]].concat()),
        (2, [&EXPERTS[..], &["expert_parallel_size=2", "model.dtype=bf16"]].concat()),
        (2, [&EXPERTS[..], &["expert_parallel_size=2", "model.dtype=bf16", "precision.recipe=current"]].concat()),
        (2, [&EXPERTS[..], &["expert_parallel_size=2", "model.dtype=bf16", "precision.recipe=blockwise"]].concat()),
        (4, [&EXPERTS[..], &["expert_parallel_size=2", "expert_tensor_parallel_size=2"]].concat()),
        (2, [&EXPERTS[..], &["expert_parallel_size=2", "moe.token_dispatcher_type=allgather"]].concat()),
        (2, [&EXPERTS[..], &["expert_parallel_size=2", "tiled_mlp_compute=true"]].concat()),
        (
            2,
            [
                &EXPERTS[..],
                &["expert_parallel_size=2", "tiled_mlp_compute=true", "moe.token_dispatcher_type=allgather"],
            ]
            .concat(),
        ),
        (2, [&EXPERTS[..], &PADDED, &["expert_parallel_size=2"]].concat()),
        (2, [&EXPERTS[..], &PADDED, &["expert_parallel_size=2", "moe.token_dispatcher_type=allgather"]].concat()),
    ] {
        let case = Case::on_ranks(n_ranks, &arguments);
        let setup = Setup::of(&case.plan, DeviceKind::Cpu).unwrap();
        let n_stages = setup.layout.n_stages();
        let of_stage = |stage| {
            let breakdown = estimate_stage(&Setup { stage, ..setup.clone() }).peak().breakdown.clone();
            breakdown.total() - breakdown.of(Category::Program) - breakdown.of(Category::Allocator)
        };
        let estimated = (0..n_stages).map(of_stage).sum::<u64>() / n_stages as u64;
        case.compare(estimated, largest_of_some_runs(n_ranks, &case, estimated), 0.1);
    }
}

/// Returns the bytes of one rank, in the run of up to five that allocated most.
///
/// The peak of the sum over the ranks is at most the sum of their peaks. It is smaller in a run whose ranks reach theirs at
/// different times. Further runs are made if the first one allocated much less than the estimate.
fn largest_of_some_runs(n_ranks: usize, case: &Case, estimated: u64) -> u64 {
    let mut measured = 0;
    for _ in 0..5 {
        measured = measured.max((train_in_process(n_ranks, case) / n_ranks) as u64);
        if estimated as f64 / (measured as f64) < 1.08 {
            break;
        }
    }
    measured
}

/// Returns the peak of allocated bytes, summed over the ranks, minus the bytes that were allocated before.
fn train_in_process(n_ranks: usize, case: &Case) -> usize {
    let hub = || Hub::new(HubSettings { offline: true, ..HubSettings::from_env() }).unwrap();
    prepare_data(&case.plan, &hub(), RunId::now()).unwrap();
    let before = ALLOCATOR.current_usage();
    ALLOCATOR.reset_peak_usage();
    let rank = |world: &World| {
        let mut plan = case.plan.clone();
        if world.rank() > 0 {
            // The first rank alone writes, as with a process for each rank.
            (plan.log.output_dir, plan.log.metrics_path) = (None, None);
        }
        train(&plan, &hub(), world, &candle_core::Device::Cpu).map(|_| ()).map_err(|e| format!("{e:#}"))
    };
    threads::run(n_ranks, Options::default(), rank).unwrap();
    ALLOCATOR.peak_usage() - before
}
