//! Memory that activation checkpointing, offload and tiling save, measured by a counting allocator.

use std::process::Command;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use candlewick_comm::Solo;
use candlewick_model::{Config, Model, TiledMlp};
use candlewick_ops::CuSeqlens;
use candlewick_parallel::{
    ActivationCheckpointing, Engine, LossScale, Micro, MicroColumns, OffloadTarget, ParamDtypes, ParamStore,
    ShardingGroups, StoreMode,
};
use peak_alloc::PeakAlloc;
use serde_json::json;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// Variable of the environment that is set in the measuring process.
const CHILD: &str = "CANDLEWICK_TEST_MEMORY";

const N_BLOCKS: usize = 8;
const N_TOKENS: usize = 1024;
const WIDTH: usize = 64;
/// Bytes of a layer's input, the unit of all bounds. The MLP is four times as wide.
const INPUT: usize = N_TOKENS * WIDTH * 4;

fn model() -> Model {
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": N_BLOCKS, "num_attention_heads": 4,
        "vocab_size": 16, "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "tie_word_embeddings": true
    });
    Model::new(Config::from_json(config).unwrap(), None).unwrap()
}

/// Compares a store's reported bytes with the bytes that it allocated.
#[track_caller]
fn check_store_bytes(dtypes: ParamDtypes, n_bytes_of_weight: u64) {
    let before = ALLOCATOR.current_usage();
    let model = model();
    let store = ParamStore::new(&model, dtypes, StoreMode::Train, &Device::Cpu, ShardingGroups::single_rank()).unwrap();
    let allocated = (ALLOCATOR.current_usage() - before) as u64;
    let bytes = store.device_bytes();
    // Names, shapes and tensors' structs also take memory, which does not depend on the size of the parameters.
    let limit = bytes.total() + 5120 * model.base_params().count() as u64;
    assert!((bytes.total()..limit).contains(&allocated), "{bytes:?}, {allocated} allocated");
    let n_weights = bytes.weights / dtypes.compute.size_in_bytes() as u64;
    assert!(bytes.total().abs_diff(n_weights * n_bytes_of_weight) < bytes.total() / 50, "{bytes:?}");
}

/// Returns the peak bytes that a forward and backward allocates.
fn peak(checkpointing: Vec<ActivationCheckpointing>, tiled_mlp: TiledMlp) -> usize {
    let model = model();
    let store = ParamStore::new(
        &model,
        ParamDtypes::computing_in(DType::F32),
        StoreMode::Train,
        &Device::Cpu,
        ShardingGroups::single_rank(),
    )
    .unwrap();
    let folder = OffloadTarget::Folder(std::env::temp_dir());
    let engine = Engine::new(model, store, checkpointing, Arc::new(Solo), Device::Cpu)
        .with_offload_target(folder)
        .with_tiled_mlp(tiled_mlp);
    let micro = Micro {
        ids: Tensor::zeros(N_TOKENS, DType::U32, &Device::Cpu).unwrap(),
        targets: Tensor::zeros(N_TOKENS, DType::I64, &Device::Cpu).unwrap(),
        positions: (0..N_TOKENS as u32).map(|i| i % 64).collect(),
        seqs: CuSeqlens::packed((0..=N_TOKENS).step_by(64).collect()).unwrap(),
        padding: Vec::new(),
        columns: MicroColumns::default(),
    };
    let before = ALLOCATOR.current_usage();
    ALLOCATOR.reset_peak_usage();
    engine.forward_backward(std::slice::from_ref(&micro), &LossScale::mean_over(1.0), |_| 5).unwrap();
    ALLOCATOR.peak_usage() - before
}

/// The allocator's counters are global, so the measurements run in a process of their own. It has two threads on each machine,
/// because each thread keeps buffers.
#[test]
fn each_checkpointing_mode_saves_the_expected_memory() {
    if std::env::var_os(CHILD).is_some() {
        return measure();
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["memory::each_checkpointing_mode_saves_the_expected_memory", "--exact", "--nocapture"])
        .env(CHILD, "1")
        .env("RAYON_NUM_THREADS", "2")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

fn measure() {
    check_store_bytes(ParamDtypes::computing_in(DType::F32), 16);
    check_store_bytes(ParamDtypes::computing_in(DType::BF16), 18);
    check_store_bytes(ParamDtypes { compute: DType::BF16, masters: DType::BF16, optimizer_states: DType::BF16 }, 8);
    let of = |checkpointing, tiled_mlp| peak(vec![checkpointing; N_BLOCKS], tiled_mlp);
    // The first run allocates threads and thread-local GEMM scratch.
    of(ActivationCheckpointing::None, TiledMlp::Off);
    let keep = of(ActivationCheckpointing::None, TiledMlp::Off);
    let tiled = of(ActivationCheckpointing::None, TiledMlp::On);
    let full = of(ActivationCheckpointing::Full, TiledMlp::Off);
    let full_tiled = of(ActivationCheckpointing::Full, TiledMlp::On);
    let selective = of(ActivationCheckpointing::Selective, TiledMlp::Off);
    let offloaded = of(ActivationCheckpointing::Offload, TiledMlp::Off);
    let mut half = vec![ActivationCheckpointing::Offload; N_BLOCKS / 2];
    half.resize(N_BLOCKS, ActivationCheckpointing::Full);
    let half_offloaded = peak(half, TiledMlp::Off);
    let all =
        [keep, tiled, full, full_tiled, selective, half_offloaded, offloaded].map(|bytes| bytes as f64 / INPUT as f64);
    // Selective checkpointing saves gate and up of each MLP, 8 inputs.
    assert!(keep > tiled + N_BLOCKS * 15 / 2 * INPUT, "{all:.1?}");
    assert!(keep > full + N_BLOCKS * 11 * INPUT, "{all:.1?}");
    // Attention's output is as wide as an input. The last layer's is alive anyway; the log-sum-exps take a sixteenth.
    assert!(selective > full + 13 * INPUT / 2 && selective < full + 8 * INPUT, "{all:.1?}");
    // The MLP and its gradients dominate the one layer that is recomputed; with tiles, attention's packed operands count.
    assert!(full > full_tiled + 11 * INPUT, "{all:.1?}");
    // The last of 8 inputs is in use at the memory peak.
    assert!(full > offloaded + 11 * INPUT / 2, "{all:.1?}");
    assert!(full > half_offloaded + 5 * INPUT / 2 && half_offloaded > offloaded + 5 * INPUT / 2, "{all:.1?}");
}
