//! Groups of parameters by name pattern: each parameter takes the step of its group, as if it were alone.

use candle_core::{DType, Device, Tensor};
use candlewick_model::{Config, Model};
use candlewick_ops::{AdamW, AdamWState, AdamWStep, GradPolicy, GradScaler, adamw, copy_into};
use candlewick_parallel::{
    DecayedParams, MasterRounding, OPTIMIZER_KINDS, OptimizerGroup, OptimizerGroups, ParamDtypes, ParamPattern,
    ParamState, ParamStore, ShardingGroups, StoreMode, StoreOptions,
};
use serde_json::json;

const LR: f64 = 1e-2;
const BETAS: [f64; 2] = [0.9, 0.99];
const OTHER_BETAS: [f64; 2] = [0.5, 0.6];

/// Returns a group of parameters with a pattern.
fn group(
    pattern: &str,
    betas: [f64; 2],
    (lr_factor, weight_decay): (f64, f64),
    decayed: DecayedParams,
) -> OptimizerGroup {
    let kind = OPTIMIZER_KINDS[0].with(&[("betas", &betas)]).unwrap();
    OptimizerGroup { pattern: Some(ParamPattern::parse(pattern).unwrap()), kind, lr_factor, weight_decay, decayed }
}

fn store(optimizer: OptimizerGroups) -> ParamStore {
    let config = json!({
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 16, "intermediate_size": 24,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 20,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": false
    });
    let model = Model::new(Config::from_json(config).unwrap(), None).unwrap();
    let options =
        StoreOptions { optimizer, ..StoreOptions::new(ParamDtypes::computing_in(DType::F32), StoreMode::Train) };
    let store = ParamStore::of_units(model.units(), options, &Device::Cpu, ShardingGroups::single_rank()).unwrap();
    let value = |i: usize| ((i * 5 + 1) as f32).sin();
    let initial = |n: usize, shape: &[usize]| Tensor::from_iter((0..n).map(value), &Device::Cpu)?.reshape(shape);
    store.fill(|spec| initial(spec.numel(), &spec.shape)).unwrap();
    for (i, state) in store.states().unwrap().iter().enumerate() {
        let grads = (0..state.grad.elem_count()).map(|j| ((i * 7 + j * 3) as f32).sin() * 0.3);
        copy_into(&state.grad, &Tensor::from_iter(grads, &Device::Cpu).unwrap()).unwrap();
    }
    store
}

fn values(x: &Tensor) -> Vec<f32> {
    x.to_vec1().unwrap()
}

/// Returns the weights of a parameter after a step of AdamW on it alone.
fn alone(state: &ParamState, scaler: &GradScaler, hyper: AdamW) -> Vec<f32> {
    let copy = |x: &Tensor| x.copy().unwrap();
    let (master, grad) = (copy(&state.master), copy(&state.grad));
    let [exp_avg, exp_avg_sq] = [0, 1].map(|slot: usize| copy(&state.slots[slot].1));
    let step = AdamWStep::new(&hyper, scaler).unwrap();
    let own = AdamWState { master: &master, grad: &grad, exp_avg: &exp_avg, exp_avg_sq: &exp_avg_sq, compute: None };
    adamw(&hyper, &step, own).unwrap();
    values(&master)
}

/// Takes a step, and compares each parameter with the hyperparameters that `want` has for its name: betas, factor of the learning
/// rate, and weight decay.
#[track_caller]
fn check(groups: OptimizerGroups, want: impl Fn(&str) -> ([f64; 2], f64, f64)) {
    let store = store(groups);
    let scaler = GradScaler::new(GradPolicy::NO_CLIP_NO_SCALE, 0, &Device::Cpu).unwrap();
    scaler.update(&store.grad_squares().unwrap(), &Tensor::zeros(1, DType::F32, &Device::Cpu).unwrap()).unwrap();
    let expected: Vec<_> = store
        .states()
        .unwrap()
        .iter()
        .map(|state| {
            let ([beta1, beta2], factor, weight_decay) = want(&state.name);
            alone(state, &scaler, AdamW { lr: LR * factor, beta1, beta2, eps: 1e-8, weight_decay })
        })
        .collect();
    store.step(LR, &scaler, MasterRounding::Nearest).unwrap();
    for (state, expected) in store.states().unwrap().iter().zip(expected) {
        assert_eq!(values(&state.master), expected, "{}", state.name);
    }
}

fn is_vector(name: &str) -> bool {
    name.contains("norm") || name.ends_with("bias")
}

#[test]
fn without_groups_matrices_alone_have_weight_decay() {
    let all = OPTIMIZER_KINDS[0].with(&[("betas", &BETAS)]).unwrap();
    check(OptimizerGroups::of_all(all, 0.1), |name| (BETAS, 1.0, if is_vector(name) { 0.0 } else { 0.1 }));
}

#[test]
fn the_first_group_that_matches_a_name_updates_the_parameter() {
    let others = OptimizerGroup::of_all(OPTIMIZER_KINDS[0].with(&[("betas", &BETAS)]).unwrap(), 0.1);
    let by_pattern = vec![
        group(r"layers\.1\..*proj", OTHER_BETAS, (0.25, 0.3), DecayedParams::Matrices),
        group("proj|norm", BETAS, (4.0, 0.2), DecayedParams::All),
    ];
    check(OptimizerGroups::new(by_pattern, others), |name| match name {
        _ if name.contains("layers.1.") && name.contains("proj") => {
            (OTHER_BETAS, 0.25, if is_vector(name) { 0.0 } else { 0.3 })
        }
        _ if name.contains("proj") || name.contains("norm") => (BETAS, 4.0, 0.2),
        _ => (BETAS, 1.0, 0.1),
    });
}
