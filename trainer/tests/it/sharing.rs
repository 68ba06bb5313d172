//! `trainer mesh` and `trainer verify-parallel`: parallel plans, and their results compared with one rank's.

use std::path::Path;
use std::process::Command;

/// Runs a subcommand on the small recipe of the golden curves; returns the exit code and the output.
fn run(command: &str, arguments: &[&str]) -> (i32, String) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut trainer = Command::new(env!("CARGO_BIN_EXE_trainer"));
    let output = trainer.current_dir(root).args([command, "tests/golden/llama.yaml"]).args(arguments).output().unwrap();
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
    let (code, text) = run("mesh", &["--ranks", "3", "tensor_parallel_size=2"]);
    assert_eq!(code, 2, "{text}");
    assert!(text.contains("3 ranks cannot be divided into groups of 2"), "{text}");
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
