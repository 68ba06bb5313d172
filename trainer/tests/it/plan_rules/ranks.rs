//! Parallel degrees and communication backends.

use std::path::Path;

use candlewick_model::Config;
use serde_json::json;
use trainer::plan::{Plan, RanksPlan};
use trainer::recipe::{DdpBackend, FloatDtype, Loaded};
use trainer::resolve::{BuildFeatures, Environment, Machines, WorldInfo};

use super::{BASE, known, plan};

/// Resolves the plan of rank 0 of `n_ranks`, or returns the error.
pub(super) fn plan_of(n_ranks: usize, arguments: &[&str]) -> Result<Plan, String> {
    let arguments: Vec<String> = arguments.iter().map(|a| a.to_string()).collect();
    let loaded = Loaded::parse(Path::new("recipes/r.yaml"), BASE.to_owned(), &arguments);
    let loaded = loaded.map_err(|error| error.to_string())?;
    let known = Environment { world: WorldInfo::first_of(n_ranks), ..known() };
    Plan::resolve(&loaded, &known).map_err(|error| error.to_string())
}

fn of_ranks(n_ranks: usize, arguments: &[&str]) -> Result<RanksPlan, String> {
    plan_of(n_ranks, arguments).map(|plan| plan.ranks)
}

#[test]
fn the_zero_stage_sets_the_sharding_groups() {
    let plan = |dp_replicate, dp_shard, sequence, zero_stage| {
        Ok(RanksPlan { dp_replicate, dp_shard, sequence, zero_stage, ..RanksPlan::alone() })
    };
    let in_ring = |context, plan: Result<RanksPlan, String>| plan.map(|plan| RanksPlan { context, ..plan });
    const STAGE_3: &str = "deepspeed.zero_optimization.stage=3";
    const GROUPS_OF_4: &str = "deepspeed.zero_optimization.mics_shard_size=4";
    assert_eq!(of_ranks(8, &[]), plan(8, 1, 1, 0));
    assert_eq!(of_ranks(8, &[STAGE_3]), plan(1, 8, 1, 3));
    assert_eq!(of_ranks(8, &[STAGE_3, GROUPS_OF_4]), plan(2, 4, 1, 3));
    assert_eq!(of_ranks(8, &["sequence_parallel_size=4"]), plan(2, 1, 4, 0));
    assert_eq!(of_ranks(8, &[STAGE_3, "sequence_parallel_size=2"]), plan(1, 4, 2, 3));
    assert_eq!(of_ranks(8, &[STAGE_3, GROUPS_OF_4, "sequence_parallel_size=2"]), plan(2, 2, 2, 3));
    assert_eq!(of_ranks(1, &[STAGE_3]), plan(1, 1, 1, 0));
    assert_eq!(of_ranks(6, &["context_parallel_size=3"]), in_ring(3, plan(2, 1, 1, 0)));
    assert_eq!(of_ranks(6, &[STAGE_3, "context_parallel_size=3"]), in_ring(3, plan(1, 2, 1, 3)));
    let both = ["sequence_parallel_size=2", "context_parallel_size=2"];
    assert_eq!(of_ranks(8, &both), in_ring(2, plan(2, 1, 2, 0)));
    assert_eq!(of_ranks(8, &[&both[..], &[STAGE_3, GROUPS_OF_4]].concat()), in_ring(2, plan(2, 1, 2, 3)));
}

#[test]
fn the_dtype_of_communication_is_deepspeeds() {
    let given = |n_ranks, value: &str| plan_of(n_ranks, &[&format!("deepspeed.communication_data_type={value}")]);
    let sent = |value| given(2, value).unwrap().ranks.reduce_dtype;
    assert_eq!(plan_of(2, &[]).unwrap().ranks.reduce_dtype, None);
    assert_eq!(sent("fp32"), Some(FloatDtype::F32));
    assert_eq!(sent("bf16"), Some(FloatDtype::Bf16));
    assert_eq!(sent("fp16"), Some(FloatDtype::F16));
    let note = |n_ranks, value| given(n_ranks, value).unwrap().notes.join("\n");
    assert!(note(2, "fp16").contains("nothing scales the loss; sums above 65504 become inf"));
    assert!(!note(2, "bf16").contains("communication_data_type"));
    let alone = given(1, "bf16").unwrap();
    assert_eq!(alone.ranks.reduce_dtype, None);
    assert!(alone.notes.join("\n").contains("communication_data_type has no effect: no other rank"));
    // Tensor-parallel ranks sum in the dtype of gradients.
    let tensor = ["deepspeed.communication_data_type=bf16", "tensor_parallel_size=2"];
    let tensor = plan_of(2, &tensor).unwrap();
    assert_eq!(tensor.ranks.reduce_dtype, None);
    assert!(tensor.notes.join("\n").contains("communication_data_type has no effect: no other rank"));
    for value in ["int8", "8", "true"] {
        let error = given(2, value).unwrap_err();
        assert!(error.contains("communication_data_type: expected fp32, bf16 or fp16"), "{error}");
    }
    let of_fsdp = Loaded::parse(Path::new("recipes/r.yaml"), BASE.to_owned(), &["reduce_dtype=bf16".to_owned()]);
    let error = of_fsdp.unwrap_err().to_string();
    assert!(error.contains("deepspeed.communication_data_type"), "{error}");
}

#[test]
fn batch_invariance_refuses_settings_that_depend_on_the_batch() {
    const INVARIANT: &str = "deterministic=batch_invariant";
    let check = |argument: &str, wants: &[&str]| {
        let error = plan_of(4, &[INVARIANT, argument]).unwrap_err();
        for want in ["contradicts deterministic: batch_invariant", &format!("argument `{argument}`")] {
            assert!(error.contains(want), "no {want:?} in {error}");
        }
        assert!(wants.iter().all(|want| error.contains(want)), "{error}");
    };
    check("model.attn_implementation=cudnn", &["the plan of cudnn", "use auto or fused"]);
    for library in ["cublas", "cutlass"] {
        let moe = resolve_experts(&[INVARIANT, &format!("model.experts_implementation={library}")]).unwrap_err();
        assert!(moe.contains(&format!("the tiles of {library}")), "{moe}");
    }
    let four = |others: &[&str]| plan_wide(&[&[INVARIANT, "tensor_parallel_size=4"], others].concat());
    let error = four(&[]).unwrap_err();
    assert!(error.contains("argument `tensor_parallel_size=4`") && error.contains("use 1 or 2"), "{error}");
    four(&["device=cpu"]).unwrap();
    plan_wide(&["tensor_parallel_size=4"]).unwrap();
    for allowed in ["tensor_parallel_size=2", "model.attn_implementation=fused", "context_parallel_size=4"] {
        plan_of(4, &[INVARIANT, allowed]).unwrap();
    }
}

/// Resolves the base recipe for four ranks and a model with four KV heads.
fn plan_wide(arguments: &[&str]) -> Result<Plan, String> {
    plan_of(4, &[arguments, &["model.hf_config_kwargs={num_key_value_heads: 4}"]].concat())
}

/// Resolves the base recipe for a model with experts.
fn resolve_experts(arguments: &[&str]) -> Result<Plan, String> {
    let config = Config::from_json(json!({
        "model_type": "qwen3_moe", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "head_dim": 16, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
    }));
    let arguments: Vec<String> = arguments.iter().map(|a| a.to_string()).collect();
    let loaded = Loaded::parse(Path::new("recipes/r.yaml"), BASE.to_owned(), &arguments).unwrap();
    let known = Environment { config: Some(config.unwrap()), ..known() };
    Plan::resolve(&loaded, &known).map_err(|error| error.to_string())
}

#[test]
fn degrees_that_do_not_divide_the_ranks_are_refused_with_those_that_do() {
    let refused = |n_ranks, arguments: &[&str], want: [&str; 2]| {
        let message = of_ranks(n_ranks, arguments).unwrap_err();
        assert!(want.iter().all(|part| message.contains(part)), "{message}");
    };
    let groups_of_3 = ["deepspeed.zero_optimization.stage=2", "deepspeed.zero_optimization.mics_shard_size=3"];
    refused(8, &groups_of_3, ["8 ranks cannot be divided into groups of 3", "use 1 or 2 or 4 or 8"]);
    refused(6, &["sequence_parallel_size=4"], ["6 ranks cannot be divided into groups of 4", "use 1 or 2 or 3 or 6"]);
    let heads = "4 attention heads with 2 KV heads cannot be divided by 3";
    refused(6, &["sequence_parallel_size=3"], [heads, "use 1 or 2"]);
    refused(
        1,
        &["sequence_parallel_size=2"],
        ["1 rank cannot be divided into groups of 2", "pass their number with --ranks N"],
    );
    refused(2, &["sequence_parallel_size=0"], ["expected at least 1, found 0", "sequence_parallel_size"]);
    refused(2, &["context_parallel_size=0"], ["expected at least 1, found 0", "context_parallel_size"]);
    refused(6, &["context_parallel_size=4"], ["6 ranks cannot be divided into rings of 4", "use 1 or 2 or 3 or 6"]);
    let both = ["sequence_parallel_size=2", "context_parallel_size=2"];
    refused(6, &both, ["3 groups of 2 ranks cannot be divided into rings of 2", "use 1 or 3"]);
    let shards = [&groups_of_3[..], &["context_parallel_size=2"]].concat();
    refused(6, &shards, ["6 ranks cannot be divided into groups of 3, each a multiple of the 2 ranks", "use 2 or 6"]);
    let reference = ["context_parallel_size=2", "model.attn_implementation=reference"];
    refused(2, &reference, ["reference attention does not support chunks of the keys", "auto or fused"]);
}

#[test]
fn tensor_and_pipeline_parallel_sizes_set_the_mesh() {
    let plan = |stages, dp_replicate, dp_shard, tensor, zero_stage| {
        Ok(RanksPlan { stages, dp_replicate, dp_shard, tensor, zero_stage, ..RanksPlan::alone() })
    };
    assert_eq!(of_ranks(8, &["tensor_parallel_size=2"]), plan(1, 4, 1, 2, 0));
    assert_eq!(of_ranks(8, &["pipeline_parallel_size=2", "tensor_parallel_size=2"]), plan(2, 2, 1, 2, 0));
    let stage_1 = "deepspeed.zero_optimization.stage=1";
    assert_eq!(of_ranks(8, &["pipeline_parallel_size=2", "tensor_parallel_size=2", stage_1]), plan(2, 1, 2, 2, 1));
    let norms = of_ranks(2, &["tensor_parallel_size=2", "sequence_parallel=false"]).unwrap();
    assert!(!norms.sequence_parallel);
}

#[test]
fn a_model_that_cannot_be_divided_is_refused_with_sizes_that_can() {
    let refused = |n_ranks, arguments: &[&str], want: &[&str]| {
        let message = of_ranks(n_ranks, arguments).unwrap_err();
        assert!(want.iter().all(|part| message.contains(part)), "{message}");
    };
    refused(8, &["tensor_parallel_size=3"], &["8 ranks cannot be divided into groups of 3", "use 1 or 2 or 4 or 8"]);
    let heads = "4 attention heads, 2 KV heads and an MLP of";
    refused(8, &["tensor_parallel_size=4"], &[heads, "cannot be divided by 4", "use 1 or 2"]);
    let vocabulary = |n: usize| {
        format!(
            "model.hf_config_kwargs={{vocab_size: {n}, num_attention_heads: 16, \
        num_key_value_heads: 16, head_dim: 4, intermediate_size: 32}}"
        )
    };
    let few = "a vocabulary of 101 is too small for 16 ranks with 7 tokens each";
    refused(16, &["tensor_parallel_size=16", &vocabulary(101)], &[few, "use 1 or 2 or 4 or 8"]);
    assert!(of_ranks(16, &["tensor_parallel_size=16", &vocabulary(106)]).is_ok());
    refused(8, &["pipeline_parallel_size=3"], &["8 ranks cannot be divided into 3 stages", "use 1 or 2 or 4 or 8"]);
    refused(
        8,
        &["pipeline_parallel_size=8"],
        &["2 blocks are too few for 8 stages with 1 model chunk each", "at most 2"],
    );
    let two = ["pipeline_parallel_size=2", "pipeline_layers=[1]"];
    refused(8, &two, &["pipeline_layers: 1 numbers for 2 stages", "set 2 numbers"]);
    let three = ["pipeline_parallel_size=2", "pipeline_layers=[1, 2]"];
    refused(8, &three, &["the sum is 3 blocks, but the model has 2"]);
}

/// Resolves the communication backend of two ranks, or returns the error.
fn backend(features: BuildFeatures, machines: Machines, arguments: &[&str]) -> Result<DdpBackend, String> {
    let arguments: Vec<String> = arguments.iter().map(|a| a.to_string()).collect();
    let loaded = Loaded::parse(Path::new("recipes/r.yaml"), BASE.to_owned(), &arguments).unwrap();
    let known = Environment { world: WorldInfo { machines, ..WorldInfo::first_of(2) }, features, ..known() };
    Plan::resolve(&loaded, &known).map(|plan| plan.ranks.backend).map_err(|error| error.to_string())
}

/// Returns the notes of the plan of rank 0 of `n_ranks`.
fn notes_of_ranks(n_ranks: usize, arguments: &[&str]) -> Vec<String> {
    let arguments: Vec<String> = arguments.iter().map(|a| a.to_string()).collect();
    let loaded = Loaded::parse(Path::new("recipes/r.yaml"), BASE.to_owned(), &arguments).unwrap();
    let plan = Plan::resolve(&loaded, &Environment { world: WorldInfo::first_of(n_ranks), ..known() }).unwrap();
    plan.notes.into_iter().filter(|note| !is_general(note)).collect()
}

/// Returns true for a note of every plan of the base recipe.
fn is_general(note: &str) -> bool {
    let starts = ["optimizer.learning_rate is not set", "the model will be saved", "runs/r/stop_checkpoint: a signal"];
    starts.iter().any(|start| note.starts_with(start))
}

#[test]
fn settings_without_effect_and_idle_pipelines_are_noted() {
    let pipeline = ["pipeline_parallel_size=2", "pipeline_schedule=afab", "gradient_accumulation_steps=1"];
    for (n_ranks, arguments, want) in [
        (2, &["pipeline_schedule=afab"][..], "pipeline_schedule has no effect with one pipeline stage"),
        (2, &["sequence_parallel=false"], "sequence_parallel has no effect without tensor_parallel_size"),
        (
            2,
            &pipeline,
            "gradient_accumulation_steps: 1 is less than the 2 pipeline stages: the bubble is 50 %; raise it",
        ),
    ] {
        assert_eq!(notes_of_ranks(n_ranks, arguments), [want]);
    }
    assert!(notes_of_ranks(2, &["pipeline_parallel_size=2", "gradient_accumulation_steps=2"]).is_empty());
    assert!(notes_of_ranks(2, &["tensor_parallel_size=2", "sequence_parallel=false"]).is_empty());
}

/// For unknown machines, neither the features of this build nor the devices of this machine matter.
#[test]
fn a_plan_for_unknown_machines_ignores_this_one() {
    use Machines::Unknown;
    for arguments in [&["ddp_backend=nccl"][..], &["ddp_backend=mpi"], &["ddp_backend=nccl", "device=cuda"]] {
        assert!(backend(PLAIN, Unknown, arguments).is_ok(), "{arguments:?}");
    }
    let said = backend(PLAIN, Unknown, &["ddp_backend=nccl", "device=cpu"]).unwrap_err();
    assert!(said.contains("NCCL connects GPUs"), "{said}");
    let notes = notes_of_ranks(2, &["memory=auto", "device=cuda"]);
    assert_eq!(notes, ["memory: auto selects the modes on the machines of the ranks, by their free memory"]);
}

const PLAIN: BuildFeatures = BuildFeatures { mpi: false, nccl: false };
const ALL: BuildFeatures = BuildFeatures { mpi: true, nccl: true };

#[test]
fn usable_backends_are_accepted() {
    use Machines::{Nodes, One, Several};
    for (features, machines, arguments, want) in [
        (PLAIN, One, &[][..], DdpBackend::Auto),
        (PLAIN, Nodes, &[], DdpBackend::Auto),
        (ALL, Several, &["device=cpu"], DdpBackend::Auto),
        (ALL, Several, &["device=cuda"], DdpBackend::Auto),
        (PLAIN, One, &["ddp_backend=local"], DdpBackend::Local),
        (ALL, Nodes, &["ddp_backend=local", "device=cpu"], DdpBackend::Local),
        (ALL, Several, &["ddp_backend=mpi"], DdpBackend::Mpi),
        (ALL, One, &["ddp_backend=mpi", "device=cpu"], DdpBackend::Mpi),
        (ALL, Several, &["ddp_backend=nccl"], DdpBackend::Nccl),
        (ALL, One, &["ddp_backend=nccl", "device=cuda"], DdpBackend::Nccl),
        (PLAIN, One, &["ddp_backend=staged", "device=cpu"], DdpBackend::Staged),
        (ALL, Several, &["ddp_backend=staged", "device=cuda:1"], DdpBackend::Staged),
    ] {
        assert_eq!(backend(features, machines, arguments), Ok(want), "{features:?} {machines:?} {arguments:?}");
    }
}

#[test]
fn unusable_backends_are_refused_with_usable_ones() {
    use Machines::{One, Several};
    let no_mpi = BuildFeatures { mpi: false, ..ALL };
    for (features, machines, arguments, want) in [
        (PLAIN, Several, &[][..], ["run on several machines", "build it with `--features mpi`"]),
        (no_mpi, Several, &["device=cpu"], ["run on several machines", "build it with `--features mpi`"]),
        (no_mpi, One, &["ddp_backend=mpi"], ["built without MPI", "build it with `--features mpi`"]),
        (no_mpi, Several, &["ddp_backend=staged", "device=cuda"], ["run on several machines", "`--features mpi`"]),
        (PLAIN, One, &["ddp_backend=nccl"], ["built without CUDA", "scripts/build-gpu"]),
        (ALL, One, &["ddp_backend=nccl", "device=cpu"], ["connects GPUs", "set device: cuda"]),
        (ALL, One, &["ddp_backend=nccl", "device=cuda:1"], ["all ranks would use cuda:1", "staged"]),
        (ALL, One, &["ddp_backend=auto", "device=cuda:1"], ["all ranks would use cuda:1", "staged"]),
        (ALL, One, &["ddp_backend=local", "device=cuda"], ["exchanges CPU tensors", "nccl"]),
        (ALL, One, &["ddp_backend=mpi", "device=cuda"], ["exchanges CPU tensors", "nccl"]),
        (ALL, Several, &["ddp_backend=local"], ["run on several machines", "mpi"]),
    ] {
        let said = backend(features, machines, arguments).unwrap_err();
        assert!(want.iter().all(|part| said.contains(part)), "{features:?} {machines:?} {arguments:?}: {said}");
    }
    let said = Loaded::parse(Path::new("recipes/r.yaml"), BASE.to_owned(), &["ddp_backend=ncll".to_owned()]);
    let said = said.unwrap_err().to_string();
    assert!(said.contains("did you mean") && said.contains("nccl"), "{said}");
}

#[test]
fn one_rank_ignores_the_backend() {
    for backend in ["mpi", "nccl", "local", "staged"] {
        let plan = plan(&[&format!("ddp_backend={backend}")]);
        assert!(plan.notes.iter().any(|note| note.contains("ddp_backend has no effect")), "{:?}", plan.notes);
    }
    assert!(plan(&["ddp_backend=auto"]).notes.iter().all(|note| is_general(note)));
}
