//! Activation checkpointing, offload and tiling: loss and gradients are unchanged for every model family.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use candlewick_comm::Solo;
use candlewick_model::{Config, LoraConfig, Model, TiledMlp};
use candlewick_ops::CuSeqlens;
use candlewick_parallel::{
    ActivationCheckpointing, Engine, KvCache, LossScale, Micro, MicroColumns, OffloadTarget, ParamDtypes, ParamStore,
    ShardingGroups, StoreMode,
};
use serde_json::{Value, json};

const VOCAB: usize = 50;
const N_BLOCKS: usize = 3;

/// Two long sequences and one of one token: 77 tokens are three tiles of a model 32 wide, the last of them shorter.
const LENGTHS: [usize; 3] = [40, 1, 36];

const FAMILIES: [(&str, &str); 3] =
    [("LlamaForCausalLM", "llama"), ("Qwen2ForCausalLM", "qwen2"), ("Qwen3ForCausalLM", "qwen3")];

/// A case: a family, its trained parameters and the dtype.
#[derive(Clone)]
struct Case {
    config: Value,
    lora: Option<Value>,
    dtype: DType,
}

fn cases() -> Vec<Case> {
    let dropped = json!({"r": 4, "lora_alpha": 16, "lora_dropout": 0.3, "target_modules": "all-linear"});
    let config = |(architecture, model_type): (&str, &str)| {
        json!({
            "architectures": [architecture], "model_type": model_type,
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": N_BLOCKS, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCAB, "max_position_embeddings": 128,
            "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": true, "initializer_range": 0.2
        })
    };
    let mut cases = Vec::new();
    for family in FAMILIES {
        cases.push(Case { config: config(family), lora: None, dtype: DType::F32 });
        cases.push(Case { config: config(family), lora: Some(dropped.clone()), dtype: DType::F32 });
    }
    let mut with_mlp_bias = config(FAMILIES[0]);
    with_mlp_bias["mlp_bias"] = json!(true);
    cases.push(Case { config: with_mlp_bias, lora: None, dtype: DType::F32 });
    cases.push(Case { config: config(FAMILIES[2]), lora: None, dtype: DType::BF16 });
    let mut experts = config(("Qwen2MoeForCausalLM", "qwen2_moe"));
    for (key, value) in [
        ("num_experts", 6),
        ("num_experts_per_tok", 2),
        ("moe_intermediate_size", 12),
        ("shared_expert_intermediate_size", 24),
    ] {
        experts[key] = json!(value);
    }
    let on_experts = json!({"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj", "mlp.gate"]});
    cases.push(Case { config: experts.clone(), lora: None, dtype: DType::F32 });
    cases.push(Case { config: experts, lora: Some(on_experts), dtype: DType::F32 });
    cases
}

fn engine(case: &Case, checkpointing: Vec<ActivationCheckpointing>, tiled_mlp: TiledMlp) -> Engine {
    let lora = case.lora.as_ref().map(|lora| LoraConfig::from_json(lora).unwrap());
    let model = Model::new(Config::from_json(case.config.clone()).unwrap(), lora).unwrap();
    let dtypes = ParamDtypes::computing_in(case.dtype);
    let store = ParamStore::new(&model, dtypes, StoreMode::Train, &Device::Cpu, ShardingGroups::single_rank()).unwrap();
    store
        .fill(|spec| {
            let mut values = vec![0f32; spec.numel()];
            spec.initialise(3, &mut values);
            if spec.name.ends_with("lora_B.weight") || spec.name.ends_with("bias") {
                values.iter_mut().enumerate().for_each(|(i, x)| *x = (i as f32 * 0.7).sin() * 0.1);
            }
            Tensor::from_vec(values, spec.shape.as_slice(), &Device::Cpu)
        })
        .unwrap();
    Engine::new(model, store, checkpointing, Arc::new(Solo), Device::Cpu).with_tiled_mlp(tiled_mlp)
}

fn micro() -> Micro {
    let n: usize = LENGTHS.iter().sum();
    let ids: Vec<u32> = (0..n).map(|i| (i * i + 3 * i) as u32 % VOCAB as u32).collect();
    let targets: Vec<i64> = ids.iter().map(|id| if id % 7 == 0 { Micro::IGNORED } else { i64::from(id / 2) }).collect();
    let mut ends = vec![0];
    LENGTHS.iter().for_each(|length| ends.push(ends[ends.len() - 1] + length));
    Micro {
        ids: Tensor::new(ids, &Device::Cpu).unwrap(),
        targets: Tensor::new(targets, &Device::Cpu).unwrap(),
        positions: LENGTHS.iter().flat_map(|&length| 0..length as u32).collect(),
        seqs: CuSeqlens::packed(ends).unwrap(),
        padding: Vec::new(),
        columns: MicroColumns::default(),
    }
}

/// Results of one micro-batch: losses with and without a tape, and all gradients by name.
#[derive(PartialEq)]
struct Results {
    loss: f32,
    held_out: f64,
    grads: Vec<(String, Vec<f32>)>,
}

fn run(case: &Case, checkpointing: Vec<ActivationCheckpointing>, tiled_mlp: TiledMlp) -> Results {
    run_on(engine(case, checkpointing, tiled_mlp).with_offload_target(OffloadTarget::Folder(std::env::temp_dir())))
}

fn run_on(engine: Engine) -> Results {
    let loss =
        engine.forward_backward(&[micro()], &LossScale::mean_over(60.0), |_| 5).unwrap().micros[0].to_scalar().unwrap();
    let flat = |x: &Tensor| x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let grads = engine.store().states().unwrap().into_iter().map(|state| (state.name, flat(&state.grad))).collect();
    Results { loss, held_out: engine.loss(&micro()).unwrap(), grads }
}

fn all(checkpointing: ActivationCheckpointing) -> Vec<ActivationCheckpointing> {
    vec![checkpointing; N_BLOCKS]
}

#[test]
fn activation_checkpointing_changes_no_bit_in_any_family() {
    let mixed =
        vec![ActivationCheckpointing::Offload, ActivationCheckpointing::Selective, ActivationCheckpointing::None];
    for case in cases() {
        for tiled_mlp in [TiledMlp::Off, TiledMlp::On] {
            let keep = run(&case, all(ActivationCheckpointing::None), tiled_mlp);
            assert!(keep.loss.is_finite() && keep.loss > 0.0);
            for checkpointing in
                [ActivationCheckpointing::Full, ActivationCheckpointing::Selective, ActivationCheckpointing::Offload]
                    .map(all)
                    .into_iter()
                    .chain([mixed.clone()])
            {
                assert!(
                    keep == run(&case, checkpointing.clone(), tiled_mlp),
                    "{checkpointing:?} {tiled_mlp:?} {}",
                    case.config
                );
            }
        }
    }
}

#[test]
fn the_offload_target_changes_no_bit() {
    for case in cases() {
        let engine = || engine(&case, all(ActivationCheckpointing::Offload), TiledMlp::Off);
        let folder = OffloadTarget::Folder(std::env::temp_dir());
        assert!(
            run_on(engine().with_offload_target(folder))
                == run_on(engine().with_offload_target(OffloadTarget::HostMemory))
        );
    }
}

/// Rows are computed as in one piece. The sums over rows in the gradients of the MLP's weights have another order, hence
/// a bound on those. So has the sum of the gradients of the input of routed and shared experts.
#[test]
fn a_tiled_mlp_gives_the_same_losses_and_gradients_in_every_family() {
    for case in cases() {
        let whole = run(&case, all(ActivationCheckpointing::None), TiledMlp::Off);
        for checkpointing in [
            ActivationCheckpointing::None,
            ActivationCheckpointing::Full,
            ActivationCheckpointing::Selective,
            ActivationCheckpointing::Offload,
        ] {
            let tiled = run(&case, all(checkpointing), TiledMlp::On);
            assert_eq!((tiled.loss, tiled.held_out), (whole.loss, whole.held_out), "{}", case.config);
            for ((name, tiled), (_, whole)) in tiled.grads.iter().zip(&whole.grads) {
                let has_experts = !case.config["num_experts"].is_null();
                let bound = if name.contains("mlp.") || has_experts { 1e-6 } else { 0.0 };
                assert_close(name, tiled, whole, bound);
            }
        }
    }
}

#[track_caller]
fn assert_close(name: &str, ours: &[f32], other: &[f32], bound: f64) {
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|v| v * v).sum::<f64>().sqrt();
    let difference = norm(&mut ours.iter().zip(other).map(|(a, b)| f64::from(a - b)));
    let scale = norm(&mut other.iter().map(|&b| f64::from(b)));
    assert!(scale > 0.0, "{name} has no gradient");
    assert!(difference <= bound * scale, "{name}: {:e}", difference / scale);
}

/// A prompt is computed in tiles too; a single token is one tile.
#[test]
fn generation_gives_the_same_logits_with_tiles() {
    let ids: Vec<u32> = (0..70).map(|i| (i * 7) % VOCAB as u32).collect();
    let logits = |tiled_mlp| {
        let engine = engine(&cases()[0], all(ActivationCheckpointing::None), tiled_mlp);
        let cache = KvCache::new(N_BLOCKS, ids.len());
        let class = engine.model().length_class(ids.len());
        let prompt = engine.next_logits(&ids[..69], 0, class, &cache).unwrap().to_vec1::<f32>().unwrap();
        (prompt, engine.next_logits(&ids[69..], 69, class, &cache).unwrap().to_vec1::<f32>().unwrap())
    };
    assert!(logits(TiledMlp::Off) == logits(TiledMlp::On));
}
