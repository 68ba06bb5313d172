//! What the modes that trade time for memory save, measured by a counting allocator.
#![allow(clippy::unwrap_used, missing_docs)]

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use candlewick_comm::Solo;
use candlewick_model::{Config, Model, TiledMlp};
use candlewick_ops::Seqs;
use candlewick_parallel::{
    ActivationCheckpointing, Engine, LossScale, Micro, OffloadTarget, ParamDtypes, ParamStore, ShardingGroups,
    StoreMode,
};
use peak_alloc::PeakAlloc;
use serde_json::json;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

const N_BLOCKS: usize = 8;
const N_TOKENS: usize = 1024;
const WIDTH: usize = 64;
/// The bytes of a block's input, the unit of everything here. The MLP is four times as wide.
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

/// The bytes of a store's buffers: those that it tells, and those that it allocated.
#[track_caller]
fn check_store_bytes(dtypes: ParamDtypes, n_bytes_of_weight: u64) {
    let before = ALLOCATOR.current_usage();
    let store = ParamStore::new(&model(), dtypes, StoreMode::Train, &Device::Cpu, ShardingGroups::alone()).unwrap();
    let allocated = (ALLOCATOR.current_usage() - before) as f64;
    let bytes = store.device_bytes();
    // Names and shapes are allocated, too.
    assert!((bytes.total() as f64 / allocated - 1.0).abs() < 0.05, "{bytes:?}, {allocated} allocated");
    let n_weights = bytes.weights / dtypes.compute.size_in_bytes() as u64;
    assert!(bytes.total().abs_diff(n_weights * n_bytes_of_weight) < bytes.total() / 50, "{bytes:?}");
}

/// The most bytes alive during a forward and backward, above what was alive before.
fn peak(checkpointing: Vec<ActivationCheckpointing>, tiled_mlp: TiledMlp) -> usize {
    let model = model();
    let store = ParamStore::new(
        &model,
        ParamDtypes::computing_in(DType::F32),
        StoreMode::Train,
        &Device::Cpu,
        ShardingGroups::alone(),
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
        seqs: Seqs::packed((0..=N_TOKENS).step_by(64).collect()).unwrap(),
    };
    let before = ALLOCATOR.current_usage();
    ALLOCATOR.reset_peak_usage();
    engine.forward_backward(std::slice::from_ref(&micro), &LossScale::mean_over(1.0), |_| 5).unwrap();
    ALLOCATOR.peak_usage() - before
}

/// One test, because the counters are global.
#[test]
fn each_mode_saves_what_it_promises() {
    check_store_bytes(ParamDtypes::computing_in(DType::F32), 16);
    check_store_bytes(ParamDtypes::computing_in(DType::BF16), 18);
    check_store_bytes(ParamDtypes { compute: DType::BF16, masters: DType::BF16, moments: DType::BF16 }, 8);
    let of = |checkpointing, tiled_mlp| peak(vec![checkpointing; N_BLOCKS], tiled_mlp);
    // Threads and thread-local scratch of the matrix product are made by the first run.
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
    // WeightCopy each block's MLP gate and up are kept or not, 8 inputs.
    assert!(keep > tiled + N_BLOCKS * 15 / 2 * INPUT, "{all:.1?}");
    assert!(keep > full + N_BLOCKS * 11 * INPUT, "{all:.1?}");
    // Attention's output is as wide as an input; of the last block's it is there anyway, and so are its sums, a sixteenth.
    assert!(selective > full + 13 * INPUT / 2 && selective < full + 8 * INPUT, "{all:.1?}");
    // Within the one block that is computed again the MLP is most, with its gradients.
    assert!(full > full_tiled + 12 * INPUT, "{all:.1?}");
    // WeightCopy 8 inputs the last is in use when memory is at its peak.
    assert!(full > offloaded + 11 * INPUT / 2, "{all:.1?}");
    assert!(full > half_offloaded + 5 * INPUT / 2 && half_offloaded > offloaded + 5 * INPUT / 2, "{all:.1?}");
}
