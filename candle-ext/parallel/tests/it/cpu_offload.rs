//! CPU offload of master weights, optimizer states and weights: training results are bit-identical.

use candle_core::{DType, Device, Tensor};
use candlewick_model::{Config, Model};
use candlewick_ops::{GradPolicy, GradScaler, LossScaling, copy_into};
use candlewick_parallel::{
    CpuOffload, MasterRounding, OPTIMIZER_KINDS, OptimizerGroups, ParamDtypes, ParamState, ParamStore, ShardingGroups,
    StoreMode, StoreOptions,
};
use serde_json::json;

const LR: f64 = 1e-2;

fn model() -> Model {
    let config = json!({
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2",
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 20, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "tie_word_embeddings": false, "initializer_range": 0.2
    });
    Model::new(Config::from_json(config).unwrap(), None).unwrap()
}

fn store(dtypes: ParamDtypes, cpu_offload: Option<CpuOffload>) -> ParamStore {
    let (model, device) = (model(), Device::Cpu);
    let options = StoreOptions {
        cpu_offload: cpu_offload.unwrap_or_default(),
        optimizer: OptimizerGroups::of_all(OPTIMIZER_KINDS[0].with_defaults(), 0.1),
        ..StoreOptions::new(dtypes, StoreMode::Train)
    };
    let store = ParamStore::of_units(model.units(), options, &device, ShardingGroups::single_rank()).unwrap();
    store
        .fill(|spec| {
            let mut values = vec![0f32; spec.numel()];
            spec.initialise(3, &mut values);
            Tensor::from_vec(values, spec.shape.as_slice(), &Device::Cpu)
        })
        .unwrap();
    store
}

fn optimizer(share: f64) -> Option<CpuOffload> {
    Some(CpuOffload { optimizer: share, weights: false })
}

/// Writes the gradients of step `number`, some of which overflow.
fn set_grads(store: &ParamStore, number: usize, overflows: bool) {
    for (i, state) in store.states().unwrap().into_iter().enumerate() {
        let n = state.grad.elem_count();
        let value = |j: usize| ((i * 7 + j * 3 + number) as f32).sin() * 0.3;
        let mut values: Vec<f32> = (0..n).map(value).collect();
        if overflows && i == 5 {
            values[0] = f32::INFINITY;
        }
        copy_into(&state.grad, &Tensor::new(values, &Device::Cpu).unwrap()).unwrap();
    }
}

/// Returns the whole state of a store after a few steps, one of which overflows.
fn after_steps(store: &ParamStore) -> Vec<Vec<f32>> {
    let loss_scaling = LossScaling { initial: 4.0, window: 100, hysteresis: 1, min: 1.0 };
    let policy = GradPolicy { max_norm: Some(0.5), loss_scaling, stop_on_nonfinite: false };
    let scaler = GradScaler::new(policy, 0, &Device::Cpu).unwrap();
    for number in 0..4 {
        set_grads(store, number, number == 2);
        let losses = Tensor::zeros(1, DType::F32, &Device::Cpu).unwrap();
        scaler.update(&store.grad_squares().unwrap(), &losses).unwrap();
        store.step(LR, &scaler, MasterRounding::Nearest).unwrap();
    }
    everything(store)
}

fn everything(store: &ParamStore) -> Vec<Vec<f32>> {
    let of_state = |state: ParamState| [state.master].into_iter().chain(state.slots.into_iter().map(|(_, slot)| slot));
    let states = store.states().unwrap().into_iter().flat_map(of_state);
    let values = store.values().map(|value| value.unwrap().1);
    let masters = store.masters().map(|master| master.unwrap().1);
    let flat = |x: Tensor| x.flatten_all().unwrap().to_dtype(DType::F32).unwrap().to_vec1().unwrap();
    states.chain(values).chain(masters).map(flat).collect()
}

#[test]
fn offloading_the_optimizer_changes_no_bit() {
    let (f32, bf16) = (DType::F32, DType::BF16);
    for (compute, masters, optimizer_states) in
        [(f32, f32, f32), (bf16, f32, f32), (bf16, f32, bf16), (bf16, bf16, bf16)]
    {
        let dtypes = ParamDtypes { compute, masters, optimizer_states };
        let together = after_steps(&store(dtypes, None));
        let untouched = everything(&store(dtypes, None));
        assert!(together != untouched, "no step was taken");
        for (optimizer, weights) in [(0.0, false), (0.4, false), (1.0, false), (1.0, true)] {
            let cpu_offload = CpuOffload { optimizer, weights };
            let apart = store(dtypes, Some(cpu_offload));
            assert!(everything(&apart) == untouched, "{cpu_offload:?} of {dtypes:?} before the first step");
            assert!(after_steps(&apart) == together, "{cpu_offload:?} of {dtypes:?}");
        }
    }
}

/// Ops never read the CPU copy, so a change shows only after the copy to the device.
#[test]
fn the_offloaded_fraction_of_the_parameters_is_on_the_host() {
    let n_apart = |share| {
        let store = store(ParamDtypes::computing_in(DType::F32), optimizer(share));
        for state in store.states().unwrap() {
            copy_into(&state.master, &state.master.ones_like().unwrap()).unwrap();
        }
        let is_apart = |value: &Tensor| value.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>();
        let values = store.values().map(|value| value.unwrap());
        let apart = values.filter(|(_, value)| is_apart(value).unwrap().iter().any(|x| *x != 1.0));
        apart.map(|(spec, _)| spec.name.clone()).filter(|name| name.contains("q_proj.weight")).count()
    };
    assert_eq!([0.0, 0.5, 1.0].map(n_apart), [0, 2, 4]);
}

#[test]
fn loaded_masters_reach_the_ops_after_a_refresh() {
    let store = store(ParamDtypes::computing_in(DType::BF16), optimizer(1.0));
    let state = store.states().unwrap().remove(3);
    copy_into(&state.master, &(state.master.ones_like().unwrap() * 0.3).unwrap()).unwrap();
    store.refresh().unwrap();
    let (_, value) = store.values().map(Result::unwrap).find(|(spec, _)| spec.name == state.name).unwrap();
    let want = Tensor::new(0.3f32, &Device::Cpu).unwrap().to_dtype(DType::BF16).unwrap();
    let want = want.broadcast_as(value.shape()).unwrap().to_dtype(DType::F32).unwrap();
    let flat = |x: &Tensor| x.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    assert_eq!(flat(&value), flat(&want));
}
