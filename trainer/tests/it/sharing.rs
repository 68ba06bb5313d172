//! `trainer mesh` and `trainer verify-parallel`: parallel plans, and their results compared with one rank's.

use std::path::Path;
use std::process::Command;

/// Runs a subcommand on the small recipe of the golden curves; returns the exit code and the output.
fn run(command: &str, arguments: &[&str]) -> (i32, String) {
    run_on("tests/golden/llama.yaml", command, arguments)
}

/// Runs a subcommand on the recipe with 8 experts in 2 of its 3 layers.
fn run_on_experts(command: &str, arguments: &[&str]) -> (i32, String) {
    run_on("tests/golden/qwen3_moe.yaml", command, arguments)
}

fn run_on(recipe: &str, command: &str, arguments: &[&str]) -> (i32, String) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut trainer = Command::new(env!("CARGO_BIN_EXE_trainer"));
    let output = trainer.current_dir(root).args([command, recipe]).args(arguments).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.code().unwrap(), String::from_utf8_lossy(&text).into_owned())
}

const HEADS_OF_14: &str = "model.hf_config_kwargs={num_attention_heads: 14, num_key_value_heads: 14, hidden_size: 56, \
     intermediate_size: 56, vocab_size: 280}";

#[test]
fn a_plan_shows_mesh_stages_and_schedule() {
    let pipeline = ["--ranks", "4", "--schedule", "pipeline_parallel_size=2", "tensor_parallel_size=2"];
    let (code, text) = run("mesh", &[&pipeline[..], &["gradient_accumulation_steps=4"]].concat());
    assert_eq!(code, 0, "{text}");
    for part in ["4 ranks: pp 2 x tp 2", "rank  pp  tp", "stage 0: embedding", "head", "[3]", "bubble 20.0 %"] {
        assert!(text.contains(part), "no {part:?} in:\n{text}");
    }
    let (code, text) = run("mesh", &[&pipeline[..], &["gradient_accumulation_steps=100000000"]].concat());
    assert_eq!(code, 2, "{text}");
    assert!(text.contains("200000000 forward passes, over the limit of 1000000"), "{text}");
    let (code, text) = run("mesh", &["--ranks", "3", "tensor_parallel_size=2"]);
    assert_eq!(code, 2, "{text}");
    assert!(text.contains("3 ranks cannot be divided into groups of 2"), "{text}");
}

#[test]
fn a_plan_of_experts_shows_their_division_and_the_mtp_layer() {
    let mesh = ["--ranks", "8", "pipeline_parallel_size=2", "expert_parallel_size=2", "model.mtp_num_layers=1"];
    let (code, text) = run_on_experts("mesh", &mesh);
    assert_eq!(code, 0, "{text}");
    for part in
        ["experts of a layer: 8, 4 on a rank (ep 2)\n", "expert data parallel degree: 2 (", ", 1 MTP layer, head\n"]
    {
        assert!(text.contains(part), "no {part:?} in:\n{text}");
    }
    assert_eq!(text.matches("MTP layer").count(), 1, "{text}");
    let split = ["--ranks", "4", "expert_parallel_size=2", "expert_tensor_parallel_size=2"];
    let (code, text) = run_on_experts("mesh", &split);
    assert_eq!(code, 0, "{text}");
    for part in ["(ep 2), each split over 2 ranks (etp)\n", "expert data parallel degree: 1 ("] {
        assert!(text.contains(part), "no {part:?} in:\n{text}");
    }
    assert!(!text.contains("MTP"), "{text}");
    let (_, dense) = run("mesh", &["--ranks", "2"]);
    assert!(!dense.contains("expert"), "{dense}");
}

#[test]
fn an_estimate_and_a_check_of_experts_print_active_parameters() {
    let (_, estimate) = run_on_experts("estimate", &[]);
    assert!(estimate.contains(" parameters, ") && estimate.contains(" active, "), "{estimate}");
    let (_, json) = run_on_experts("estimate", &["--json"]);
    let mut json = serde_json::Deserializer::from_str(&json).into_iter::<serde_json::Value>();
    let json = json.next().unwrap().unwrap();
    let (active, all) = (json["n_active"].as_u64().unwrap(), json["n_parameters"].as_u64().unwrap());
    assert!(active < all, "{active} {all}");
    let (code, check) = run_on_experts("check", &[]);
    assert!(code == 0 && check.contains(", active: "), "{check}");
    for command in ["check", "estimate"] {
        let (_, dense) = run(command, &[]);
        assert!(!dense.contains("active: ") && !dense.contains(" active, "), "{dense}");
    }
}

/// A login node may lack the GPUs and the MPI of the nodes that train.
#[test]
fn a_plan_for_other_machines_needs_none_of_their_devices() {
    for arguments in
        [&["ddp_backend=nccl", "device=cuda", "memory=auto"][..], &["ddp_backend=mpi"], &["tensor_parallel_size=2"]]
    {
        for command in ["check", "mesh", "verify-parallel", "estimate"] {
            let (code, text) = run(command, &[&["--ranks", "2"], arguments].concat());
            assert!(code == 0 || (command, code) == ("estimate", 4), "{command} {arguments:?}: {code}: {text}");
        }
    }
    let (code, text) = run("check", &["tensor_parallel_size=2"]);
    assert!(code == 2 && text.contains("1 rank cannot be divided into groups of 2"), "{text}");
    assert!(text.contains("--ranks N"), "{text}");
}

#[test]
fn every_kind_of_parallelism_passes_verify_parallel() {
    for arguments in [
        &["--ranks", "2"][..],
        &["--ranks", "4", "deepspeed.zero_optimization.stage=3", "context_parallel_size=2"],
        &["--ranks", "4", "tensor_parallel_size=2", "pipeline_parallel_size=2", "virtual_pipeline_parallel_size=1"],
        // 101 tokens give 14 ranks fewer than 8 each.
        &["--ranks", "14", "tensor_parallel_size=14", HEADS_OF_14],
    ] {
        let (code, text) = run("verify-parallel", arguments);
        assert_eq!(code, 0, "{text}");
        for part in ["loss", "gradient norm", "attention", "embedding", "mlp", "norms", "equal: relative differences"] {
            assert!(text.contains(part), "no {part:?} in:\n{text}");
        }
        assert!(!text.contains("DIFFERENT"), "{text}");
    }
}
