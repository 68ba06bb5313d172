//! The trainer as several processes, started as torchrun starts them, gives the results of one process.

mod callbacks;
pub(crate) mod faults;
mod fp8;
mod routing;
pub(crate) mod run;
mod slurm_shell;
mod starters;
mod stop_preparation;

use std::fs;

use candlewick_comm::store::Server;
use rustix::process::Signal;
use suite::unused_address;

use run::{TrainerProcesses, TrainerRun, until};

/// Compares loss curves. Sums over ranks round in another order, which changes a loss by less than 1e-6 in five steps.
#[track_caller]
fn same_curve(ours: &[(u64, [f64; 2])], one_rank: &[(u64, [f64; 2])]) {
    assert_eq!(ours.len(), one_rank.len(), "{ours:?} against {one_rank:?}");
    for ((step, a), (other_step, b)) in ours.iter().zip(one_rank) {
        let close = a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 1e-5 * b.abs());
        assert!(step == other_step && close, "step {step}: {a:?}, one rank has {b:?}");
    }
}

#[test]
fn several_processes_give_the_loss_curve_of_one() {
    let folder = tempfile::tempdir().unwrap();
    let one = TrainerRun::new(&folder.path().join("one"), 1, &[]);
    let one_curve = one.finish().curve();
    assert_eq!(one_curve.len(), 6, "five steps and an evaluation");
    for (n_ranks, arguments) in [
        (2, vec!["memory=auto"]),
        (4, vec!["deepspeed.zero_optimization.stage=1"]),
        (2, vec!["deepspeed.zero_optimization.stage=2", "model.activation_checkpoint=full"]),
        (4, vec!["deepspeed.zero_optimization.stage=3", "deepspeed.zero_optimization.mics_shard_size=2"]),
        (2, vec!["sequence_parallel_size=2", "gradient_accumulation_steps=8"]),
        (2, vec!["tensor_parallel_size=2", "gradient_accumulation_steps=8"]),
        (2, vec!["pipeline_parallel_size=2", "gradient_accumulation_steps=8"]),
        (
            4,
            vec![
                "pipeline_parallel_size=2",
                "pipeline_schedule=afab",
                "tensor_parallel_size=2",
                "sequence_parallel=false",
                "gradient_accumulation_steps=8",
            ],
        ),
        (4, vec!["sequence_parallel_size=2", "gradient_accumulation_steps=4", "deepspeed.zero_optimization.stage=3"]),
        (3, vec!["context_parallel_size=3", "gradient_accumulation_steps=8", "tiled_mlp_compute=true"]),
        (2, vec!["context_parallel_size=2", "gradient_accumulation_steps=8", "model.activation_checkpoint=selective"]),
        (4, vec!["context_parallel_size=2", "sequence_parallel_size=2", "gradient_accumulation_steps=8"]),
    ] {
        let name = format!("{n_ranks}-{}", arguments.join("-")).replace(['.', '='], "-");
        let run = TrainerRun::new(&folder.path().join(name), n_ranks, &arguments);
        same_curve(&run.finish().curve(), &one_curve);
    }
}

/// Without a launcher, rank 0 has the store.
#[test]
fn ranks_rendezvous_at_rank_0() {
    let folder = tempfile::tempdir().unwrap();
    let (host, port) = unused_address();
    let run = TrainerRun::new(folder.path(), 2, &[]);
    for (status, stderr) in run.start_at(&host, port).wait() {
        assert!(status.success(), "{status}: {stderr}");
    }
}

/// Three ranks, and an epoch whose last step has too few micro-batches for all of them.
#[test]
fn a_rank_without_a_micro_batch_takes_part_in_the_step() {
    let folder = tempfile::tempdir().unwrap();
    let n_rows = suite::read("recipes/quickstart/eval.jsonl").lines().count();
    assert_eq!(n_rows % 6, 2, "the last step is to leave one rank without a micro-batch");
    let short = ["data.drop_last=false", "train_iters=0", "epochs=1", "gradient_accumulation_steps=2"];
    let run = |n_ranks, name: &str, more: &[&str]| {
        let arguments = [&short[..], more].concat();
        TrainerRun::new(&folder.path().join(name), n_ranks, &arguments).finish().curve()
    };
    let one = run(1, "one", &["gradient_accumulation_steps=6"]);
    same_curve(&run(3, "three", &["deepspeed.zero_optimization.stage=3"]), &one);
}

#[test]
fn a_checkpoint_is_resumed_by_any_number_of_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let whole = TrainerRun::new(&folder.path().join("whole"), 1, &[]).finish().curve();
    let saves = |name: &str| {
        let dir = folder.path().join(name).join("saves");
        format!("checkpoint=[{{output_dir: {}, auto_resume: true, save_every_n_steps: 1}}]", dir.display())
    };
    let parts = [
        (2, "deepspeed.zero_optimization.stage=3", "exit_iteration=2"),
        (1, "deepspeed.zero_optimization.stage=0", "exit_iteration=3"),
        (4, "deepspeed.zero_optimization.stage=1", "exit_iteration=4"),
        (2, "deepspeed.zero_optimization.stage=0", "exit_iteration=9"),
    ];
    for (n_ranks, stage, exit) in parts {
        TrainerRun::new(&folder.path().join("parts"), n_ranks, &[&saves("parts"), stage, exit]).finish();
    }
    let parts = TrainerRun::new(&folder.path().join("parts"), 1, &[]);
    // The metrics also hold a record of each resume.
    same_curve(&parts.curve(), &whole);
}

/// Each of `parts` resumes from the asynchronous checkpoint of the previous one. Together they give the loss curve of one
/// rank. `common` are arguments of all parts.
#[track_caller]
fn check_resume(common: &[&str], parts: &[(usize, &[&str])]) {
    let folder = tempfile::tempdir().unwrap();
    let whole = TrainerRun::new(&folder.path().join("whole"), 1, common).finish().curve();
    let dir = folder.path().join("saves");
    let saves = format!(
        "checkpoint=[{{output_dir: {}, auto_resume: true, save_every_n_steps: 1, async_save: true}}]",
        dir.display()
    );
    let said = [common, &[saves.as_str()]].concat();
    let run = |n_ranks, arguments: &[&str]| {
        TrainerRun::new(&folder.path().join("parts"), n_ranks, &[&said[..], arguments].concat())
    };
    for (step, (n_ranks, arguments)) in (1..).zip(parts) {
        let exit = format!("exit_iteration={step}");
        run(*n_ranks, &[*arguments, &[exit.as_str()]].concat()).finish();
    }
    same_curve(&run(1, &[]).finish().curve(), &whole);
    let newest = dir.join("epoch_0_global_step_5").join("manifest.json");
    assert!(newest.exists() || fs::read_dir(&dir).unwrap().count() >= 5);
}

/// Eight micro-batches per step where all ranks share micro-batches.
const ALL: &str = "gradient_accumulation_steps=8";
const STAGE_1: &str = "deepspeed.zero_optimization.stage=1";
const STAGE_3: &str = "deepspeed.zero_optimization.stage=3";

/// A small mixture of experts instead of the quickstart's model. Micro-batches, and so load-balancing losses, are equal on all
/// meshes.
const EXPERTS: [&str; 6] = [
    "model.config.model_type=qwen3_moe",
    "model.config.num_experts=8",
    "model.config.num_experts_per_tok=2",
    "model.config.moe_intermediate_size=32",
    "model.config.norm_topk_prob=true",
    "moe={aux_loss_coeff: 0.01, z_loss_coeff: 1e-3}",
];

#[test]
fn an_expert_parallel_checkpoint_is_resumed_on_other_meshes() {
    check_resume(
        &EXPERTS,
        &[
            (4, &["expert_parallel_size=4", STAGE_3]),
            (2, &["expert_tensor_parallel_size=2", STAGE_1]),
            (4, &["expert_parallel_size=2", "expert_tensor_parallel_size=2", STAGE_3]),
            (1, &[ALL]),
            (4, &["expert_parallel_size=4", "tensor_parallel_size=2", "gradient_accumulation_steps=4"]),
        ],
    );
}

/// A small mixture of experts with routers in f64, and with expert biases that change in every step.
const BIASED_EXPERTS: [&str; 8] = [
    "model.config.model_type=dots1",
    "model.config.n_routed_experts=8",
    "model.config.num_experts_per_tok=2",
    "model.config.moe_intermediate_size=32",
    "model.config.n_shared_experts=1",
    "model.config.norm_topk_prob=true",
    "model.config.first_k_dense_replace=1",
    "moe={router_bias_update_rate: 0.05, router_dtype: fp64}",
];

#[test]
fn expert_biases_are_resumed_on_other_meshes() {
    check_resume(
        &BIASED_EXPERTS,
        &[
            (4, &["expert_parallel_size=4", STAGE_3]),
            (2, &["pipeline_parallel_size=2", ALL]),
            (4, &["expert_parallel_size=2", STAGE_1]),
            (1, &[ALL]),
            (4, &["expert_parallel_size=4", "tensor_parallel_size=2", "gradient_accumulation_steps=4"]),
        ],
    );
}

/// The middle one of 3 layers is dense, in a family without a key for this.
#[test]
fn a_pattern_of_layers_is_resumed_on_other_meshes() {
    check_resume(
        &[
            "model.config.model_type=mixtral",
            "model.config.num_local_experts=8",
            "model.config.num_experts_per_tok=2",
            "model.config.moe_layer_freq=[1, 0, 1]",
            "moe={aux_loss_coeff: 0.01, z_loss_coeff: 1e-3}",
        ],
        &[
            (2, &["pipeline_parallel_size=2", ALL]),
            (4, &["expert_parallel_size=4", STAGE_3]),
            (3, &["pipeline_parallel_size=3", ALL]),
            (2, &["expert_tensor_parallel_size=2", STAGE_1]),
            (1, &[ALL]),
        ],
    );
}

/// The ranks tokenize disjoint parts of each chunk. Their steps are those of one rank, after each resume too.
#[test]
fn a_stream_gives_any_number_of_ranks_the_steps_of_one() {
    check_resume(
        &["data.streaming=true", "data.buffer_size=5", "data.dl_num_workers=1"],
        &[(2, &[STAGE_1]), (4, &["data.dl_num_workers=2"]), (2, &["sequence_parallel_size=2", ALL]), (1, &[ALL])],
    );
}

/// Each rank prefetches batches, and writes a memory profile of its own.
#[test]
fn workers_and_measurements_change_no_loss_on_several_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let one = TrainerRun::new(&folder.path().join("one"), 1, &[]).finish().curve();
    let profile = folder.path().join("profile");
    let dir = format!("mem_profiler_dir={}", profile.display());
    let keys = ["data.dl_num_workers=2", "mem_profiler=step", &dir, "deepspeed.wall_clock_breakdown=true", STAGE_3];
    same_curve(&TrainerRun::new(&folder.path().join("two"), 2, &keys).finish().curve(), &one);
    for rank in 0..2 {
        let trace = fs::read_to_string(profile.join(format!("{rank}.json"))).unwrap();
        assert!(trace.contains("micro-batch forward"), "{rank}");
        assert!(fs::read_to_string(profile.join(format!("{rank}.txt"))).unwrap().contains("peak: "));
    }
}

#[test]
fn a_checkpoint_of_adapters_of_experts_is_resumed_on_other_meshes() {
    let adapter = "model.peft_config={r: 4, target_modules: all-linear, target_parameters: [gate_up_proj, \
                   experts.down_proj, mlp.gate.weight]}";
    check_resume(
        &[&EXPERTS[..], &[adapter]].concat(),
        &[
            (4, &["expert_parallel_size=2", STAGE_3]),
            (4, &["expert_parallel_size=2", "expert_tensor_parallel_size=2", STAGE_1]),
            (1, &[ALL]),
            (4, &["expert_parallel_size=4", "tensor_parallel_size=2", "gradient_accumulation_steps=4"]),
            (2, &["pipeline_parallel_size=2", ALL]),
        ],
    );
}

#[test]
fn a_tensor_and_pipeline_parallel_checkpoint_is_resumed_on_other_meshes() {
    check_resume(
        &[],
        &[
            (4, &["tensor_parallel_size=2", "pipeline_parallel_size=2", ALL]),
            (2, &[STAGE_3]),
            (4, &["tensor_parallel_size=2", STAGE_1, "gradient_accumulation_steps=4"]),
            (2, &["pipeline_parallel_size=2", ALL]),
        ],
    );
}

#[test]
fn a_sequence_parallel_checkpoint_is_resumed_on_other_meshes() {
    let both = ["context_parallel_size=2", "sequence_parallel_size=2", ALL];
    check_resume(
        &[],
        &[
            (4, &both),
            (2, &[STAGE_3]),
            (4, &[both[0], both[1], both[2], STAGE_3]),
            (2, &["sequence_parallel_size=2", ALL]),
        ],
    );
}

#[test]
fn a_tensor_parallel_adapter_checkpoint_is_resumed_on_other_meshes() {
    let adapter = "model.peft_config={peft_type: LORA, r: 4, lora_alpha: 8, target_modules: all-linear}";
    check_resume(
        &[adapter],
        &[
            (4, &["tensor_parallel_size=2", "pipeline_parallel_size=2", ALL]),
            (2, &["tensor_parallel_size=2", ALL]),
            (2, &["pipeline_parallel_size=2", ALL]),
            (4, &["tensor_parallel_size=2", STAGE_1, "gradient_accumulation_steps=4"]),
        ],
    );
}

#[test]
fn another_batch_is_refused_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let saves =
        format!("checkpoint=[{{output_dir: {}, auto_resume: true, save_every_n_steps: 1}}]", folder.path().display());
    TrainerRun::new(&folder.path().join("run"), 1, &[&saves, "exit_iteration=1"]).finish();
    let other = TrainerRun::new(&folder.path().join("run"), 2, &[&saves, "gradient_accumulation_steps=8"]);
    let ended = other.start().wait();
    assert_eq!(ended[0].0.code(), Some(3), "{}", ended[0].1);
    let with_reason = |text: &str| ended.iter().filter(|(_, stderr)| stderr.contains(text)).count();
    let counts = ["rows a step was 8, now 16", "set gradient_accumulation_steps: 4"].map(with_reason);
    assert_eq!(counts, [1, 1], "{ended:#?}");
}

#[test]
fn exports_of_sharded_runs_equal_those_of_one_rank() {
    let folder = tempfile::tempdir().unwrap();
    let export = |n_ranks, name: &str, stage: &str| {
        let dir = folder.path().join(name).join("weights");
        let checkpoint =
            format!("checkpoint=[{{type: huggingface, output_dir: {}, save_end_of_training: true}}]", dir.display());
        TrainerRun::new(&folder.path().join(name), n_ranks, &[&checkpoint, stage]).finish();
        let bytes = fs::read(dir.join("global_step_5/model.safetensors")).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let floats =
            |data: &[u8]| data.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect::<Vec<_>>();
        let mut named: Vec<_> = tensors.iter().map(|(name, view)| (name.to_owned(), floats(view.data()))).collect();
        named.sort_by(|a, b| a.0.cmp(&b.0));
        named
    };
    let one = export(1, "one", "deepspeed.zero_optimization.stage=0");
    let shards = export(4, "four", "deepspeed.zero_optimization.stage=3");
    assert_eq!(one.len(), shards.len());
    assert!(one.len() > 20);
    for ((name, one), (other_name, other)) in one.iter().zip(&shards) {
        let square = |x: f32| f64::from(x).powi(2);
        let difference: f64 = one.iter().zip(other).map(|(a, b)| square(a - b)).sum();
        let norm: f64 = one.iter().map(|x| square(*x)).sum();
        // Adam's first steps have one size for any gradient: for a nearly zero gradient, rounding decides the sign.
        assert!(name == other_name && difference <= 1e-6 * norm, "{name}: {difference:e} of {norm:e}");
    }
}

#[test]
fn a_termination_signal_to_one_rank_checkpoints_and_stops_all() {
    let folder = tempfile::tempdir().unwrap();
    let saves = folder.path().join("saves");
    let checkpoint = format!("checkpoint=[{{output_dir: {}, auto_resume: true}}]", saves.display());
    let run =
        TrainerRun::new(&folder.path().join("run"), 2, &[&checkpoint, "train_iters=100000", "eval_interval=100000"]);
    let ranks = run.start();
    let metrics = run.folder.join("metrics.jsonl");
    until(metrics.parent().unwrap(), "a first step", || {
        fs::read_to_string(&metrics).is_ok_and(|text| text.lines().count() > 1)
    });
    ranks.signal(1, Signal::TERM);
    for (status, stderr) in ranks.wait() {
        assert_eq!(status.code(), Some(75), "{stderr}");
    }
    let saved: Vec<_> = fs::read_dir(&saves).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(saved.iter().any(|name| name.to_string_lossy().starts_with("epoch_")), "{saved:?}");
}

/// The number of cores and the temporary folder may differ between machines; everything else must be equal.
#[test]
fn ranks_of_unequal_machines_train_together() {
    let folder = tempfile::tempdir().unwrap();
    let run = TrainerRun::new(&folder.path().join("run"), 2, &["model.activation_checkpoint=offload"]);
    let temporary = folder.path().join("temporary");
    fs::create_dir(&temporary).unwrap();
    let start = |more: &[&str]| {
        let store = Server::bind("127.0.0.1:0").unwrap();
        let mut second = run.rank(1, store.port(), true);
        second.env("TMPDIR", &temporary).arg("data.num_proc=1").args(more);
        TrainerProcesses::of([run.rank(0, store.port(), true), second]).wait()
    };
    for (status, stderr) in start(&[]) {
        assert!(status.success(), "{status}: {stderr}");
    }
    let ended = start(&["seed=8"]);
    for ((status, stderr), said) in ended.iter().zip([
        "rank 1 has another plan than rank 0: seed is 8 there, and here 7",
        "rank 0 has another plan than rank 1: seed is 7 there, and here 8",
    ]) {
        assert!(status.code() == Some(2) && stderr.contains(said), "{status}: {stderr}");
    }
}

#[test]
fn unreadable_data_on_one_rank_are_an_error_on_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let run = TrainerRun::new(folder.path(), 2, &["data.sources=[/nowhere/at/all.jsonl]"]);
    let ended = run.start().wait();
    let codes: Vec<_> = ended.iter().map(|(status, _)| status.code().unwrap()).collect();
    assert!(codes.contains(&3) && codes.iter().all(|code| [3, 7].contains(code)), "{codes:?} {ended:?}");
}
