//! The bytes that rank 0 sends in a step, by its profile, compared with the formulas of docs/scaling.md.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use suite::{program, root};

/// Returns the recipe of a causal run with full rows only.
fn recipe(folder: &Path) -> Value {
    let text: String = (0..6000).map(|i| format!("After {i} comes {}, and before it {}.\n", i + 1, i - 1)).collect();
    fs::write(folder.join("text.jsonl"), json!({"text": text}).to_string()).unwrap();
    json!({
        "type": "causal", "device": "cpu", "output_dir": folder.join("run"), "train_iters": N_STEPS,
        "model": {"dtype": "f32", "config": {
            "model_type": "llama", "hidden_size": D, "intermediate_size": F, "num_hidden_layers": N_BLOCKS,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": V, "max_position_embeddings": T,
            "rms_norm_eps": 1e-5, "tie_word_embeddings": true,
        }},
        "tokenizer": {"name_or_path": root().join("recipes/quickstart/tokenizer")},
        "data": {
            "sources": [folder.join("text.jsonl")], "max_length": T, "truncation": "split", "cache_dir": folder.join("cache"),
        },
        "scheduler": {"name": "constant"}, "checkpoint": "none",
    })
}

const N_STEPS: usize = 3;
const N_BLOCKS: usize = 4;
/// hidden_size, intermediate_size, vocab_size, and tokens per row.
const D: usize = 128;
const F: usize = 256;
const V: usize = 1024;
const T: usize = 512;
/// Elements of all KV heads of a token.
const KV: usize = D / 2;

/// Returns the profile of rank 0, without start-up and shutdown.
fn profile(n_ranks: usize, arguments: &[&str]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("recipe.yaml");
    fs::write(&path, recipe(folder.path()).to_string()).unwrap();
    let mut launch = Command::new(program("launch"));
    launch.args(["--standalone", "--nproc-per-node", &n_ranks.to_string(), "--"]).arg(program("trainer"));
    launch.args(["-q", "train"]).arg(&path).args(arguments).args(["--profile", "tottime"]);
    launch.env("RAYON_NUM_THREADS", "1").env("HF_HUB_OFFLINE", "1").stdin(Stdio::null());
    let output = launch.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    fs::read_to_string(folder.path().join("run/profile.txt")).unwrap()
}

/// Returns the number of spans with this name in a profile.
fn n_spans(profile: &str, name: &str) -> usize {
    let count = |row: &str| {
        let columns: Vec<&str> = row.split_whitespace().collect();
        let (numbers, words) = columns.split_at_checked(4)?;
        let is_meant = words.join(" ").split(',').next() == Some(name);
        is_meant.then(|| numbers[0].parse::<usize>().unwrap())
    };
    profile.lines().filter_map(count).sum()
}

/// Returns the bytes of f32 that rank 0 sent in a step.
fn sent(n_ranks: usize, arguments: &[&str]) -> f64 {
    let table = profile(n_ranks, arguments);
    let rows = table.lines().filter(|row| !row.contains("  world "));
    let megabytes = rows.filter_map(|row| {
        let (_, sent) = row.strip_suffix(" MB sent")?.rsplit_once(", ")?;
        Some(sent.parse::<f64>().unwrap())
    });
    megabytes.sum::<f64>() * 1e6 / N_STEPS as f64
}

#[test]
fn ranks_send_what_the_formulas_say() {
    let block = 2 * D * D + 2 * KV * D + 3 * F * D + 2 * D;
    let params = V * D + N_BLOCKS * block + D;
    // All-gathers of the weights in stage 3: forward and backward of all blocks, except backward of the last, which is still
    // gathered; the tied embedding once as the embedding and once as the head.
    let gathered = 2 * N_BLOCKS * block - block + 2 * V * D + D;
    let activation = T * D;
    let stage = |stage| format!("deepspeed.zero_optimization.stage={stage}");
    let (one, two, three) = (stage(1), stage(2), stage(3));
    // Before the first step, the owners of shards broadcast their initial weights.
    let published = params / N_STEPS / 2;
    for (n, arguments, want) in [
        (2, vec!["gradient_accumulation_steps=2"], 2 * params / 2),
        (4, vec![], 2 * params * 3 / 4),
        (2, vec!["gradient_accumulation_steps=2", &one], 2 * params / 2 + published),
        (2, vec!["gradient_accumulation_steps=2", &two], 3 * params / 2 + published),
        (2, vec![&three], (params + gathered) / 2),
        (2, vec!["tensor_parallel_size=2"], (10 * N_BLOCKS + 4) * activation / 2),
        (2, vec!["tensor_parallel_size=2", "sequence_parallel=false"], (4 * N_BLOCKS + 2) * activation),
        (2, vec!["pipeline_parallel_size=2", "gradient_accumulation_steps=4"], 4 * activation + V * D),
        (2, vec!["sequence_parallel_size=2"], 2 * N_BLOCKS * T * (2 * D + 2 * KV) / 4 + 2 * params / 2),
        (2, vec!["context_parallel_size=2"], N_BLOCKS * 2 * T / 2 * 2 * KV + 2 * params / 2),
    ] {
        let (sent, want) = (sent(n, &arguments), 4.0 * want as f64);
        eprintln!("{n} {arguments:?}: {sent:.0} bytes, {want:.0} by the formula, {:.4}", sent / want);
        assert!((sent / want - 1.0).abs() < 0.02, "{n} {arguments:?}: {sent} bytes, {want} by the formula");
    }
}

/// Gradients take 2 bytes per element instead of 4; all-gathers of weights and broadcasts take as many as before.
#[test]
fn gradients_that_ranks_sum_in_bf16_take_half_the_bytes() {
    let block = 2 * D * D + 2 * KV * D + 3 * F * D + 2 * D;
    let params = (V * D + N_BLOCKS * block + D) as f64;
    let (reduced, bf16) = (params / 2.0, "deepspeed.communication_data_type=bf16");
    let stage = |stage| format!("deepspeed.zero_optimization.stage={stage}");
    let (one, two, three) = (stage(1), stage(2), stage(3));
    // An all-reduce is a reduce-scatter and an all-gather; stage 2 reduces each of two micro-batches.
    for (n_reductions, arguments) in [
        (2.0, vec!["gradient_accumulation_steps=2"]),
        (1.0, vec!["gradient_accumulation_steps=2", &one]),
        (2.0, vec!["gradient_accumulation_steps=2", &two]),
        (1.0, vec![&three]),
    ] {
        let [wide, narrow] = [vec![], vec![bf16]].map(|more| sent(2, &[&arguments[..], &more].concat()));
        let (saved, want) = (wide - narrow, 2.0 * n_reductions * reduced);
        eprintln!("{arguments:?}: {saved:.0} bytes less, {want:.0} by the formula");
        assert!((saved / want - 1.0).abs() < 0.02, "{arguments:?}: {saved} bytes less, {want} by the formula");
    }
}

/// A step in bf16 gathers the linear layers of a block in a byte per weight instead of two, and the embedding in two.
#[test]
fn gathered_fp8_weights_take_half_the_bytes_of_bf16() {
    let linears = 2 * D * D + 2 * KV * D + 3 * F * D;
    let (norms, rest) = (2 * D, 2 * V * D + D);
    let fp8 = ["deepspeed.zero_optimization.stage=3", "model.dtype=bf16", "precision.recipe=current"];
    // Gradients are f32.
    let gradients = 4 * (V * D + N_BLOCKS * (linears + norms) + D) / 2;
    let gathered =
        |bytes_of_weight: usize| ((2 * N_BLOCKS - 1) * (bytes_of_weight * linears + 2 * norms) + 2 * rest) / 2;
    let [bf16, codes] = [(2, vec![]), (1, vec!["precision.fp8_param_gather=true"])].map(|(n_bytes, more)| {
        let (sent, want) = (sent(2, &[&fp8[..], &more].concat()), (gradients + gathered(n_bytes)) as f64);
        eprintln!("{more:?}: {sent:.0} bytes, {want:.0} by the formula, {:.4}", sent / want);
        assert!((sent / want - 1.0).abs() < 0.02, "{more:?}: {sent} bytes, {want} by the formula");
        sent - gradients as f64
    });
    eprintln!("all-gathers: {codes:.0} of {bf16:.0} bytes, {:.3}", codes / bf16);
}

/// A mixture of experts with full rows: each token selects two of four experts.
const EXPERTS: [&str; 6] = [
    "model.config.model_type=qwen3_moe",
    "model.config.head_dim=32",
    "model.config.num_experts=4",
    "model.config.num_experts_per_tok=2",
    "model.config.moe_intermediate_size=64",
    "model.config.norm_topk_prob=true",
];

/// Compares the exchanges and the host's waits of a layer of experts in a step. `want` has all-gathers, all-to-alls and
/// reduce-scatters.
fn check_exchanges(arguments: &[&str], n_waits: u32, want: [u32; 3]) {
    let of_layers = |n: usize| {
        let layers = format!("model.config.num_hidden_layers={n}");
        profile(2, &[&EXPERTS[..], &["expert_parallel_size=2", &layers], arguments].concat())
    };
    let (two, three) = (of_layers(2), of_layers(3));
    let of_a_layer = |name: &str| (n_spans(&three, name) as f64 - n_spans(&two, name) as f64) / N_STEPS as f64;
    assert_eq!(of_a_layer("to_host"), f64::from(n_waits), "{arguments:?}: {three}");
    for (op, n) in ["all_gather", "all_to_all", "reduce_scatter"].into_iter().zip(want) {
        assert_eq!(of_a_layer(&format!("ep-etp {op} exchange")), f64::from(n), "{arguments:?} {op}: {three}");
    }
}

/// The host waits for the counts alone: once per layer and step, with either dispatcher.
#[test]
fn a_layer_of_experts_waits_once_for_its_counts() {
    check_exchanges(&["moe.token_dispatcher_type=alltoall"], 1, [1, 6, 0]);
    check_exchanges(&["moe.token_dispatcher_type=allgather"], 1, [5, 0, 3]);
}

/// Backward sends tokens a second time if it computes the layer again. The counts and the host's wait are those of forward.
#[test]
fn a_recomputed_layer_of_experts_does_not_wait_again() {
    for checkpointing in ["selective", "full", "offload"] {
        let checkpointing = format!("model.activation_checkpoint={checkpointing}");
        check_exchanges(&["moe.token_dispatcher_type=alltoall", &checkpointing], 1, [1, 9, 0]);
        check_exchanges(&["moe.token_dispatcher_type=allgather", &checkpointing], 1, [8, 0, 4]);
    }
}

#[test]
fn a_layer_of_padded_experts_exchanges_no_counts_and_waits_for_nothing() {
    let padded = ["moe.expert_capacity_factor=1.5", "moe.pad_expert_input_to_capacity=true"];
    check_exchanges(&[&padded[..], &["moe.token_dispatcher_type=alltoall"]].concat(), 0, [0, 6, 0]);
    check_exchanges(&[&padded[..], &["moe.token_dispatcher_type=allgather"]].concat(), 0, [4, 0, 3]);
}

/// Tokens forward and sums back, and their gradients; weights of tokens, their gradients, and the selected experts.
#[test]
fn expert_parallel_ranks_send_what_the_formula_says() {
    let arguments = [&EXPERTS[..], &["expert_parallel_size=2", "moe.token_dispatcher_type=allgather"]].concat();
    let (n_experts, top_k, head_dim) = (4, 2, 32);
    let block = 2 * D * D + 2 * KV * D + n_experts * D + 2 * D + 2 * head_dim;
    let dense = V * D + N_BLOCKS * block + D;
    let want = 4.0 * (N_BLOCKS * T * (4 * D + 3 * top_k) + dense) as f64;
    let sent = sent(2, &arguments);
    eprintln!("{sent:.0} bytes, {want:.0} by the formula, {:.4}", sent / want);
    assert!((sent / want - 1.0).abs() < 0.02, "{sent} bytes, {want} by the formula");
}
