//! Loss and gradients of the engine under every activation checkpointing and batching.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use candlewick_comm::Solo;
use candlewick_model::{Config, ForwardContext, LoraConfig, Model, SingleDevice};
use candlewick_ops::{
    CrossEntropy, CuSeqlens, GradPolicy, GradScaler, LossGrad, LossScaling, Reduction, StepDecision, Tape,
    UpdateOutcome, linear_cross_entropy,
};
use candlewick_parallel::{
    ActivationCheckpointing, CpuOffload, Engine, KvCache, LossScale, MasterRounding, Micro, MicroColumns,
    OPTIMIZER_KINDS, OptimizerGroups, ParamDtypes, ParamStore, ShardingGroups, StoreMode, StoreOptions,
};
use rand::{Rng, SeedableRng};
use serde_json::json;

const VOCAB: u32 = 50;

pub(crate) fn config(tied: bool) -> Config {
    Config::from_json(json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCAB, "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": tied, "initializer_range": 0.2
    }))
    .unwrap()
}

fn engine(model: Model, dtype: DType, checkpointing: ActivationCheckpointing) -> Engine {
    engine_in(model, ParamDtypes::computing_in(dtype), checkpointing)
}

fn engine_in(model: Model, dtypes: ParamDtypes, checkpointing: ActivationCheckpointing) -> Engine {
    engine_with(model, dtypes, CpuOffload::default(), checkpointing)
}

fn engine_with(
    model: Model,
    dtypes: ParamDtypes,
    cpu_offload: CpuOffload,
    checkpointing: ActivationCheckpointing,
) -> Engine {
    let store = filled_store(&model, dtypes, cpu_offload);
    let plan = vec![checkpointing; model.n_blocks()];
    Engine::new(model, store, plan, Arc::new(Solo), Device::Cpu)
}

pub(crate) fn filled_store(model: &Model, dtypes: ParamDtypes, cpu_offload: CpuOffload) -> ParamStore {
    let optimizer = OptimizerGroups::of_all(OPTIMIZER_KINDS[0].with_defaults(), 0.1);
    let options = StoreOptions { cpu_offload, optimizer, ..StoreOptions::new(dtypes, StoreMode::Train) };
    let store = ParamStore::of_units(model.units(), options, &Device::Cpu, ShardingGroups::single_rank()).unwrap();
    store
        .fill(|spec| {
            let mut values = vec![0f32; spec.numel()];
            spec.initialise(3, &mut values);
            if spec.name.ends_with("lora_B.weight") {
                values.iter_mut().enumerate().for_each(|(i, x)| *x = (i as f32 * 0.7).sin() * 0.1);
            }
            Tensor::from_vec(values, spec.shape.as_slice(), &Device::Cpu)
        })
        .unwrap();
    store
}

pub(crate) fn micro(sequences: &[Vec<(u32, i64)>]) -> Micro {
    let mut ends = vec![0];
    let (mut ids, mut targets, mut positions) = (Vec::new(), Vec::new(), Vec::new());
    for sequence in sequences {
        for (position, &(id, target)) in sequence.iter().enumerate() {
            ids.push(id);
            targets.push(target);
            positions.push(position as u32);
        }
        ends.push(ids.len());
    }
    Micro {
        ids: Tensor::new(ids, &Device::Cpu).unwrap(),
        targets: Tensor::new(targets, &Device::Cpu).unwrap(),
        positions,
        seqs: CuSeqlens::packed(ends).unwrap(),
        padding: Vec::new(),
        columns: MicroColumns::default(),
    }
}

pub(crate) fn sequences(lengths: &[usize]) -> Vec<Vec<(u32, i64)>> {
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(11);
    let mut token = || {
        let target = if rng.random_bool(0.3) { Micro::IGNORED } else { i64::from(rng.random_range(0..VOCAB)) };
        (rng.random_range(0..VOCAB), target)
    };
    lengths.iter().map(|&n| (0..n).map(|_| token()).collect()).collect()
}

fn forward_backward(engine: &Engine, micro: &Micro, scale: &LossScale, key: u64) -> Tensor {
    engine.forward_backward(std::slice::from_ref(micro), scale, |_| key).unwrap().micros.remove(0)
}

/// Offloaded weights, fetched for each unit: tied ones, frozen ones under LoRA, in two dtypes.
#[test]
fn offloaded_weights_give_the_same_gradients() {
    let lora = LoraConfig::from_json(&json!({"r": 4, "lora_alpha": 8, "target_modules": "all-linear"})).unwrap();
    let all = sequences(&[9, 5]);
    for (adapter, dtype) in [(None, DType::F32), (None, DType::BF16), (Some(lora), DType::F32)] {
        let of = |cpu_offload| {
            let model = Model::new(config(true), adapter.clone()).unwrap();
            let engine =
                engine_with(model, ParamDtypes::computing_in(dtype), cpu_offload, ActivationCheckpointing::Full);
            let losses = [1, 2].map(|key| {
                engine.store().zero_grads().unwrap();
                let loss = train(&engine, &micro(&all), &all, key);
                step(&engine, 1e-2, &scaler(GradPolicy::NO_CLIP_NO_SCALE));
                loss
            });
            (losses, grads(&engine))
        };
        assert_eq!(of(CpuOffload { optimizer: 1.0, weights: true }), of(CpuOffload::default()));
    }
}

/// Computes forward and backward of one micro-batch; returns its part of the step's mean loss.
pub(crate) fn train(engine: &Engine, micro: &Micro, of: &[Vec<(u32, i64)>], key: u64) -> f64 {
    let sum = forward_backward(engine, micro, &scale_of(of), key);
    f64::from(sum.to_scalar::<f32>().unwrap()) / n_targets(of)
}

fn scaler(policy: GradPolicy) -> GradScaler {
    GradScaler::new(policy, 0, &Device::Cpu).unwrap()
}

/// Takes the step decision and updates the weights.
fn step(engine: &Engine, lr: f64, scaler: &GradScaler) -> StepDecision {
    let losses = Tensor::zeros(1, DType::F32, &Device::Cpu).unwrap();
    let squares = engine.store().grad_squares().unwrap();
    scaler.update(&squares, &losses).unwrap();
    engine.store().step(lr, scaler, MasterRounding::Nearest).unwrap();
    StepDecision::read(&scaler.state().to_vec1::<f32>().unwrap())
}

fn scale_of(sequences: &[Vec<(u32, i64)>]) -> LossScale {
    LossScale::mean_over(n_targets(sequences))
}

fn n_targets(sequences: &[Vec<(u32, i64)>]) -> f64 {
    sequences.iter().flatten().filter(|(_, target)| *target != Micro::IGNORED).count() as f64
}

fn flat(x: &Tensor) -> Vec<f32> {
    x.flatten_all().unwrap().to_dtype(DType::F32).unwrap().to_vec1().unwrap()
}

pub(crate) fn grads(engine: &Engine) -> Vec<(String, Vec<f32>)> {
    engine.store().states().unwrap().into_iter().map(|state| (state.name, flat(&state.grad))).collect()
}

#[track_caller]
fn assert_close(ours: &[(String, Vec<f32>)], other: &[(String, Vec<f32>)], bound: f64) {
    assert_eq!(ours.len(), other.len());
    for ((name, a), (_, b)) in ours.iter().zip(other) {
        let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|v| v * v).sum::<f64>().sqrt();
        let difference = norm(&mut a.iter().zip(b).map(|(a, b)| f64::from(a - b)));
        let scale = norm(&mut b.iter().map(|&b| f64::from(b)));
        assert!(scale > 0.0, "{name} has no gradient");
        assert!(difference <= bound * scale, "{name}: {:e}", difference / scale);
    }
}

#[test]
fn activation_checkpointing_changes_no_gradient() {
    let batch = sequences(&[7, 1, 12]);
    let run = |checkpointing| {
        let engine = engine(Model::new(config(true), None).unwrap(), DType::F32, checkpointing);
        let loss = train(&engine, &micro(&batch), &batch, 5);
        (loss, grads(&engine))
    };
    let keep = run(ActivationCheckpointing::None);
    assert!(keep.0.is_finite() && keep.0 > 0.0);
    assert!(keep == run(ActivationCheckpointing::Full));
    assert!(keep == run(ActivationCheckpointing::Selective));
    assert!(keep == run(ActivationCheckpointing::Offload));
}

/// Some parameters get no gradient in a step: without targets the head, without micro-batches all of them.
#[test]
fn gradients_of_an_earlier_step_are_cleared() {
    let all = sequences(&[9, 5]);
    let ignored: Vec<Vec<_>> =
        all.iter().map(|sequence| sequence.iter().map(|(id, _)| (*id, Micro::IGNORED)).collect()).collect();
    let lora = LoraConfig::from_json(&json!({"r": 4, "lora_alpha": 8, "target_modules": "all-linear"})).unwrap();
    for (tied, adapter) in [(true, None), (false, None), (true, Some(lora))] {
        let of = |steps: &[&[Micro]]| {
            let engine =
                engine(Model::new(config(tied), adapter.clone()).unwrap(), DType::F32, ActivationCheckpointing::None);
            for micros in steps {
                engine.store().zero_grads().unwrap();
                engine.forward_backward(micros, &scale_of(&all), |_| 5).unwrap();
            }
            grads(&engine)
        };
        let (first, second) = ([micro(&all), micro(&all[..1])], [micro(&all[1..]), micro(&all)]);
        for last in [&second[..], &[micro(&ignored)], &[]] {
            assert!(of(&[&first, last]) == of(&[last]), "tied {tied}, {} micro-batches", last.len());
        }
        assert!(of(&[&first, &[]]).iter().all(|(_, grad)| grad.iter().all(|x| *x == 0.0)));
    }
}

#[test]
fn the_engines_gradient_is_the_whole_graphs_gradient() {
    for tied in [true, false] {
        let batch = sequences(&[9, 5]);
        let scale = scale_of(&batch);
        let by_block = engine(Model::new(config(tied), None).unwrap(), DType::F32, ActivationCheckpointing::None);
        forward_backward(&by_block, &micro(&batch), &scale, 5);

        let whole = engine(Model::new(config(tied), None).unwrap(), DType::F32, ActivationCheckpointing::None);
        let (model, store, micro) = (whole.model(), whole.store(), micro(&batch));
        let (cos, sin) = model.rope(&micro.positions, &model.length_classes(&micro.positions), &Device::Cpu).unwrap();
        let context = ForwardContext::on_single_device([&cos, &sin], &micro.seqs);
        let head = store.fetch(model.n_blocks() + 1).unwrap();
        let tape = Tape::record(&[], || {
            let mut x = model.embed(store.fetch(0)?, &micro.ids, &SingleDevice)?;
            for block_idx in 0..model.n_blocks() {
                x = model.block(store.fetch(block_idx + 1)?, &x, &context)?;
            }
            model.final_norm(head, &x)
        });
        let tape = tape.unwrap();
        let spec =
            CrossEntropy { reduction: Reduction::Sum, ignore_index: Micro::IGNORED, label_smoothing: 0.0, chunk: 3 };
        let lm_head = model.lm_head(head).unwrap();
        let upstream = LossGrad::Scalar(1.0 / n_targets(&batch));
        let out = linear_cross_entropy(tape.output(), &lm_head, &micro.targets, &spec, upstream).unwrap();
        tape.backward(&out.dx.unwrap()).unwrap();
        assert_close(&grads(&by_block), &grads(&whole), 1e-6);
    }
}

#[test]
fn the_cuda_kernels_take_the_step_that_the_cpus_take() {
    let batch = sequences(&[9, 1, 14]);
    let lora = json!({"r": 4, "lora_alpha": 16, "lora_dropout": 0.3, "target_modules": "all-linear"});
    for adapter in [None, Some(LoraConfig::from_json(&lora).unwrap())] {
        let run = || {
            let model = Model::new(config(true), adapter.clone()).unwrap();
            let engine = engine(model, DType::F32, ActivationCheckpointing::Full);
            engine.store().zero_grads().unwrap();
            let loss = train(&engine, &micro(&batch), &batch, 5);
            let gradients = grads(&engine);
            let scaler = scaler(GradPolicy { max_norm: Some(0.1), ..GradPolicy::NO_CLIP_NO_SCALE });
            let norm = step(&engine, 1e-2, &scaler).norm;
            (loss, gradients, norm, engine.loss(&micro(&batch)).unwrap())
        };
        let (cpu, cuda) = (run(), candlewick_ops::emulate(run));
        for (a, b) in [(cpu.0, cuda.0), (cpu.2, cuda.2), (cpu.3, cuda.3)] {
            assert!((a - b).abs() <= 1e-5 * a.abs(), "{a} on the CPU, {b} by CUDA's kernels");
        }
        assert_close(&cuda.1, &cpu.1, 1e-5);
    }
}

/// One step's batch as micro-batches of packed or padded sequences gives one loss and one gradient.
#[test]
fn the_split_of_a_step_into_micro_batches_changes_neither_loss_nor_gradient() {
    let batch = sequences(&[7, 3, 12, 5]);
    let padded: Vec<_> = batch
        .iter()
        .map(|sequence| {
            let mut sequence = sequence.clone();
            sequence.resize(16, (0, Micro::IGNORED));
            sequence
        })
        .collect();
    let run = |micros: Vec<Micro>| {
        let engine = engine(Model::new(config(true), None).unwrap(), DType::F32, ActivationCheckpointing::Full);
        let loss: f64 = micros.iter().map(|micro| train(&engine, micro, &batch, 5)).sum();
        (loss, grads(&engine))
    };
    let together = run(vec![micro(&batch)]);
    let apart = batch.chunks(1).map(micro).collect();
    let in_twos = batch.chunks(2).map(micro).collect();
    for other in [apart, in_twos, vec![micro(&padded)], padded.chunks(1).map(micro).collect()] {
        let other = run(other);
        assert!((together.0 - other.0).abs() <= 1e-6 * together.0, "{} {}", together.0, other.0);
        assert_close(&other.1, &together.1, 1e-5);
    }
}

#[test]
fn the_loss_without_a_tape_is_the_loss_with_one() {
    let batch = sequences(&[6, 9]);
    let engine = engine(Model::new(config(false), None).unwrap(), DType::F32, ActivationCheckpointing::None);
    let with = forward_backward(&engine, &micro(&batch), &LossScale::mean_over(1.0), 5);
    let before = grads(&engine);
    assert_eq!(engine.loss(&micro(&batch)).unwrap(), f64::from(with.to_scalar::<f32>().unwrap()));
    assert!(before == grads(&engine), "an evaluation touched the gradients");
}

#[test]
fn an_adapters_base_has_no_gradient_and_its_factors_do() {
    let lora = json!({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": "all-linear"});
    let lora = LoraConfig::from_json(&lora);
    let model = Model::new(config(true), Some(lora.unwrap())).unwrap();
    let engine = engine(model, DType::F32, ActivationCheckpointing::Full);
    let batch = sequences(&[8]);
    forward_backward(&engine, &micro(&batch), &LossScale::mean_over(1.0), 5);
    let grads = grads(&engine);
    assert_eq!(grads.len(), 3 * 7 * 2);
    for (name, grad) in &grads {
        assert!(name.contains("lora_"), "{name} is trained");
        assert!(grad.iter().any(|g| *g != 0.0), "{name} has no gradient");
    }
}

#[test]
fn dropout_is_the_same_when_recomputed_and_absent_in_evaluation() {
    let run = |p: f64, checkpointing, key| {
        let lora = json!({"r": 4, "lora_alpha": 16, "lora_dropout": p, "target_modules": "all-linear"});
        let model = Model::new(config(true), Some(LoraConfig::from_json(&lora).unwrap())).unwrap();
        let engine = engine(model, DType::F32, checkpointing);
        let batch = sequences(&[12, 7]);
        let loss = train(&engine, &micro(&batch), &batch, key);
        (loss, grads(&engine), engine.loss(&micro(&batch)).unwrap())
    };
    let (loss, gradients, held_out) = run(0.5, ActivationCheckpointing::None, 5);
    assert!((loss, gradients.clone(), held_out) == run(0.5, ActivationCheckpointing::Full, 5));
    assert!((loss, gradients.clone(), held_out) == run(0.5, ActivationCheckpointing::Selective, 5));
    assert!((loss, gradients.clone(), held_out) == run(0.5, ActivationCheckpointing::Offload, 5));
    let (other_loss, _, other_held_out) = run(0.5, ActivationCheckpointing::None, 6);
    assert_ne!(loss, other_loss, "another key drops others");
    assert_eq!(held_out, other_held_out);
    let (undropped, _, plain) = run(0.0, ActivationCheckpointing::None, 5);
    assert_eq!(plain, held_out, "evaluation drops nothing");
    assert_ne!(loss, undropped);
}

#[test]
fn steps_in_bf16_lower_the_loss_and_move_masters_and_copies() {
    let engine = engine(Model::new(config(true), None).unwrap(), DType::BF16, ActivationCheckpointing::None);
    let batch = sequences(&[10, 10]);
    let mut losses = Vec::new();
    let scaler = scaler(GradPolicy::NO_CLIP_NO_SCALE);
    for _ in 0..8 {
        engine.store().zero_grads().unwrap();
        losses.push(train(&engine, &micro(&batch), &batch, 5));
        step(&engine, 5e-3, &scaler);
    }
    assert!(losses[7] < 0.8 * losses[0], "{losses:?}");
    for (master, copy) in engine.store().masters().zip(engine.store().values()) {
        let (master, copy) = (master.unwrap().1, copy.unwrap().1);
        assert_eq!((master.dtype(), copy.dtype()), (DType::F32, DType::BF16));
        assert_eq!(flat(&master.to_dtype(DType::BF16).unwrap()), flat(&copy));
    }
}

/// With a factor of 2^40 on the loss the gradients overflow f16, with 2^10 they are those of f32 but for f16's rounding.
#[test]
fn half_precision_scales_the_loss_and_skips_what_overflows() {
    let batch = sequences(&[10, 10]);
    let run = |initial: f64, dtype| {
        let engine = engine(Model::new(config(true), None).unwrap(), dtype, ActivationCheckpointing::Full);
        let loss_scaling = LossScaling { initial, window: 100, hysteresis: 1, min: 1.0 };
        let scaler = scaler(GradPolicy { loss_scaling, ..GradPolicy::NO_CLIP_NO_SCALE });
        engine.store().zero_grads().unwrap();
        let scale = scale_of(&batch).times(scaler.loss_scale().unwrap());
        forward_backward(&engine, &micro(&batch), &scale, 5);
        let before: Vec<f32> = engine.store().masters().flat_map(|master| flat(&master.unwrap().1)).collect();
        let verdict = step(&engine, 5e-3, &scaler);
        let after: Vec<f32> = engine.store().masters().flat_map(|master| flat(&master.unwrap().1)).collect();
        (verdict, before == after)
    };
    let (overflow, is_unchanged) = run(2f64.powi(40), DType::F16);
    assert!(is_unchanged);
    assert_eq!((overflow.outcome, overflow.next.loss_scale), (UpdateOutcome::Overflowed, 2f64.powi(39)));
    let ((half, is_unchanged), (full, _)) = (run(1024.0, DType::F16), run(1.0, DType::F32));
    assert!(!is_unchanged);
    assert!((half.norm / full.norm - 1.0).abs() < 2e-3, "{} {}", half.norm, full.norm);
}

#[test]
fn moments_in_bf16_take_half_the_memory_and_nearly_the_same_steps() {
    let batch = sequences(&[10, 10]);
    let run = |moments| {
        let model = Model::new(config(true), None).unwrap();
        let dtypes = ParamDtypes { optimizer_states: moments, ..ParamDtypes::computing_in(DType::F32) };
        let engine = engine_in(model, dtypes, ActivationCheckpointing::None);
        let scaler = scaler(GradPolicy::NO_CLIP_NO_SCALE);
        let mut loss = 0.0;
        for _ in 0..8 {
            engine.store().zero_grads().unwrap();
            loss = train(&engine, &micro(&batch), &batch, 5);
            step(&engine, 5e-3, &scaler);
        }
        let states = engine.store().states().unwrap();
        assert!(states.iter().all(|state| state.slots.iter().all(|(_, x)| x.dtype() == moments)));
        loss
    };
    let (full, half) = (run(DType::F32), run(DType::BF16));
    assert!((half / full - 1.0).abs() < 0.01, "{half} {full}");
    assert_ne!(half, full);
}

#[test]
fn masters_and_gradients_in_bf16_are_what_the_ops_read_and_write() {
    let batch = sequences(&[10, 10]);
    let run = |masters| {
        let dtypes = ParamDtypes { masters, ..ParamDtypes::computing_in(DType::BF16) };
        let engine = engine_in(Model::new(config(true), None).unwrap(), dtypes, ActivationCheckpointing::None);
        let scaler = scaler(GradPolicy::NO_CLIP_NO_SCALE);
        let mut losses = Vec::new();
        for _ in 0..8 {
            engine.store().zero_grads().unwrap();
            losses.push(train(&engine, &micro(&batch), &batch, 5));
            step(&engine, 2e-2, &scaler);
        }
        let states = engine.store().states().unwrap();
        assert!(states.iter().all(|state| [&state.master, &state.grad].iter().all(|x| x.dtype() == masters)));
        losses
    };
    let (full, half) = (run(DType::F32), run(DType::BF16));
    assert_eq!(full[0], half[0]);
    assert!((half[7] / full[7] - 1.0).abs() < 0.1, "{half:?} {full:?}");
}

#[test]
fn a_cache_gives_the_logits_of_the_whole_sequence() {
    let engine = engine(Model::new(config(true), None).unwrap(), DType::F32, ActivationCheckpointing::None);
    let ids: Vec<u32> = (0..11).map(|i| (i * 7) % VOCAB).collect();
    let cache = KvCache::new(engine.model().n_blocks(), ids.len());
    let class = engine.model().length_class(ids.len());
    let mut cached = engine.next_logits(&ids[..4], 0, class, &cache).unwrap();
    for (i, id) in ids.iter().enumerate().skip(4) {
        cached = engine.next_logits(&[*id], i, class, &cache).unwrap();
    }
    assert_eq!(cache.n_tokens(), ids.len());
    let whole = engine.next_logits(&ids, 0, class, &SingleDevice).unwrap();
    let (cached, whole) = (flat(&cached), flat(&whole));
    for (a, b) in cached.iter().zip(&whole) {
        assert!((a - b).abs() < 1e-4 * (1.0 + b.abs()), "{a} {b}");
    }
    assert!(engine.next_logits(&[1], ids.len(), class, &cache).is_err(), "the cache is full");
}
