//! Layers for multi-token prediction, compared with megatron-core's GPTModel.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor};
use candlewick_comm::mesh::{Degrees, Mesh};
use candlewick_comm::{Options, Solo, World, threads};
use candlewick_model::checkpoint::Checkpoint;
use candlewick_model::{AttentionCall, Config, Model, SequenceMixing, SingleDevice};
use candlewick_ops::CuSeqlens;
use candlewick_parallel::{
    ActivationCheckpointing, AuxiliaryLoss, CausalLm, Engine, LossScale, Micro, MicroColumns, ParallelGroups,
    ParamDtypes, ParamStore, PipelineLayout, SequenceParallel, ShardingGroups, StepLoss, StoreMode, ZeroStage,
    mtp_loss_name,
};

const N_LAYERS: usize = 2;
/// Megatron-LM's default.
const LOSS_SCALING_FACTOR: f64 = 0.1;

fn engine(folder: &Path, n_mtp_layers: usize) -> Engine {
    let config = Config::read(folder).unwrap().with_mtp_layers(n_mtp_layers);
    let model = Model::new(config, None).unwrap();
    let (dtypes, sharding) = (ParamDtypes::computing_in(DType::F32), ShardingGroups::single_rank());
    let store = ParamStore::new(&model, dtypes, StoreMode::Train, &Device::Cpu, sharding).unwrap();
    let checkpoint = Checkpoint::open(folder).unwrap();
    store.fill(|spec| checkpoint.param(spec, DType::F32, &Device::Cpu)).unwrap();
    let checkpointing = vec![ActivationCheckpointing::Full; model.n_blocks()];
    Engine::new(model, store, checkpointing, Arc::new(Solo), Device::Cpu)
}

/// Returns the sequences of Megatron's batch, packed.
fn micro(reference: &BTreeMap<String, Tensor>) -> Micro {
    let (n_sequences, length) = reference["ids"].dims2().unwrap();
    let ids: Vec<u32> =
        reference["ids"].flatten_all().unwrap().to_vec1::<i64>().unwrap().iter().map(|id| *id as u32).collect();
    Micro {
        ids: Tensor::new(ids, &Device::Cpu).unwrap(),
        targets: reference["targets"].flatten_all().unwrap(),
        positions: (0..n_sequences).flat_map(|_| 0..length as u32).collect(),
        seqs: CuSeqlens::packed((0..=n_sequences).map(|i| i * length).collect()).unwrap(),
        padding: Vec::new(),
        columns: MicroColumns::default(),
    }
}

/// Counts the targets that are `depth` positions later in their sequence.
fn n_targets(reference: &BTreeMap<String, Tensor>, depth: usize) -> f64 {
    let rows = reference["targets"].to_vec2::<i64>().unwrap();
    rows.iter().flat_map(|row| row.iter().skip(depth)).filter(|target| **target != Micro::IGNORED).count() as f64
}

#[track_caller]
fn assert_close(what: &str, ours: &Tensor, theirs: &Tensor) {
    let norm = |x: &Tensor| f64::from(x.sqr().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap()).sqrt();
    let error = norm(&(ours - theirs).unwrap()) / norm(theirs);
    assert!(error < 1e-5, "{what}: off by {error:.1e}");
}

/// f32 matmuls sum at most 40 terms, in another order than torch's. A relative 1e-5 is about a hundred roundings.
#[test]
fn losses_and_gradients_equal_those_of_megatron() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/mtp");
    let reference: BTreeMap<String, Tensor> =
        candle_core::safetensors::load(folder.join("reference.safetensors"), &Device::Cpu)
            .unwrap()
            .into_iter()
            .collect();
    let engine = engine(&folder, N_LAYERS);
    let auxiliary: Vec<AuxiliaryLoss> = (1..=N_LAYERS)
        .map(|depth| AuxiliaryLoss {
            name: mtp_loss_name(depth),
            coefficient: LOSS_SCALING_FACTOR / N_LAYERS as f64,
            normalizer: n_targets(&reference, depth),
        })
        .collect();
    let scale = LossScale::mean_over(n_targets(&reference, 0));
    let loss = StepLoss { objective: &CausalLm, scale, auxiliary: &auxiliary };
    engine.store().zero_grads().unwrap();
    let losses = engine.forward_backward(&[micro(&reference)], loss, |_| 0).unwrap();

    assert_close("loss", &(&losses.micros[0] / n_targets(&reference, 0)).unwrap(), &reference["loss"]);
    for (depth, sums) in (1..).zip(&losses.auxiliary) {
        let mean = (sums.sum_all().unwrap() / n_targets(&reference, depth)).unwrap();
        assert_close(&mtp_loss_name(depth), &mean, &reference[&format!("mtp_{depth}_loss")]);
    }
    let states = engine.store().states().unwrap();
    let grads = reference.keys().filter(|name| name.starts_with("grad.")).count();
    assert_eq!(states.len(), grads, "every parameter has a gradient");
    for state in states {
        assert_close(
            &state.name,
            &state.grad.reshape(state.shape.as_slice()).unwrap(),
            &reference[&format!("grad.{}", state.name)],
        );
    }
}

/// Evaluation and models without the setting do not see the layers.
#[test]
fn mtp_layers_change_no_evaluation() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/mtp");
    let reference = candle_core::safetensors::load(folder.join("reference.safetensors"), &Device::Cpu).unwrap();
    let micro = micro(&reference.into_iter().collect());
    let losses = |n_mtp_layers| engine(&folder, n_mtp_layers).token_losses(&micro).unwrap();
    assert_eq!(losses(N_LAYERS), losses(0));
}

#[test]
fn a_step_without_coefficients_of_mtp_layers_is_an_error() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/mtp");
    let reference = candle_core::safetensors::load(folder.join("reference.safetensors"), &Device::Cpu).unwrap();
    let micro = micro(&reference.into_iter().collect());
    let engine = engine(&folder, N_LAYERS);
    engine.store().zero_grads().unwrap();
    let error = engine.forward_backward(&[micro], &LossScale::mean_over(1.0), |_| 0).unwrap_err().to_string();
    assert!(error.contains("mtp_1 loss"), "{error}");
}

thread_local! {
    /// The engine of this thread's rank.
    static ENGINE: RefCell<Option<Rc<Engine>>> = const { RefCell::new(None) };
    /// The most bytes of parameters, gradients and moments during attention of MTP layers.
    static MOST_BYTES: RefCell<u64> = const { RefCell::new(0) };
}

/// Attention that notes the bytes of the engine's store in MTP layers.
struct NotesBytes;

impl SequenceMixing for NotesBytes {
    fn attention(&self, call: &AttentionCall) -> Result<Tensor> {
        let engine = ENGINE.with_borrow(Option::clone);
        let engine = engine.filter(|engine| call.layer_idx >= engine.model().n_blocks());
        let now = engine.map_or(0, |engine| engine.store().device_bytes().total());
        MOST_BYTES.with_borrow_mut(|most| *most = now.max(*most));
        SingleDevice.attention(call)
    }
}

/// Returns the engine of one of two ranks, whose weights are zeros.
fn sharded_engine(folder: &Path, world: &World, zero_stage: ZeroStage, n_mtp_layers: usize) -> Result<Engine> {
    let model = Model::new(Config::read(folder).unwrap().with_mtp_layers(n_mtp_layers), None).unwrap();
    let mesh = Mesh::new(Degrees { dp_shard: 2, ..Degrees::default() }, world.size()).unwrap();
    let groups = ParallelGroups::new(&mesh, &*world.group())?;
    let layout = PipelineLayout::single_stage(model.n_blocks());
    let sharding = groups.sharding_groups(Some(zero_stage), layout, SequenceParallel::Off);
    let dtypes = ParamDtypes::computing_in(DType::F32);
    let store = ParamStore::new(&model, dtypes, StoreMode::Train, &Device::Cpu, sharding)?;
    let checkpointing = vec![ActivationCheckpointing::Full; model.n_blocks()];
    Ok(Engine::new(model, store, checkpointing, Arc::clone(&groups.loss), Device::Cpu))
}

/// Returns the most bytes of a store in MTP layers, over those before the step, on the first of two ranks.
fn bytes_of_step(zero_stage: ZeroStage, n_mtp_layers: usize) -> u64 {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/mtp");
    let rank = |world: &World| -> Result<u64> {
        let engine = sharded_engine(&folder, world, zero_stage, n_mtp_layers)?;
        let engine = Rc::new(engine.with_attention_hook(Arc::new(NotesBytes)));
        engine.store().zero_grads()?;
        let before = engine.store().device_bytes().total();
        ENGINE.set(Some(Rc::clone(&engine)));
        let reference = candle_core::safetensors::load(folder.join("reference.safetensors"), &Device::Cpu)?;
        let loss = |depth| AuxiliaryLoss { name: mtp_loss_name(depth), coefficient: 0.1, normalizer: 1.0 };
        let auxiliary: Vec<AuxiliaryLoss> = (1..=n_mtp_layers).map(loss).collect();
        let loss = StepLoss { objective: &CausalLm, scale: LossScale::mean_over(1.0), auxiliary: &auxiliary };
        let stepped = engine.forward_backward(&[micro(&reference.into_iter().collect())], loss, |_| 0);
        ENGINE.set(None);
        stepped?;
        Ok(MOST_BYTES.take() - before)
    };
    threads::run(2, Options::default(), rank).unwrap()[0]
}

/// The model has an output layer of its own, so only training reads the embedding together with it.
#[test]
fn evaluation_gathers_the_output_layer_without_the_embedding() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/mtp");
    let rank = |world: &World| -> Result<u64> {
        let engine = sharded_engine(&folder, world, ZeroStage::Three, N_LAYERS)?;
        let bytes = || engine.store().device_bytes().weights;
        let (before, head) = (bytes(), engine.model().units().len() - 1);
        engine.store().fetch(head)?;
        let gathered = bytes() - before;
        engine.store().release(head);
        assert_eq!(bytes(), before);
        Ok(gathered)
    };
    let (vocab, hidden) = (40, 16);
    // Buffers are padded.
    let numel = threads::run(2, Options::default(), rank).unwrap()[0] / 4;
    assert!((hidden + vocab * hidden..2 * vocab * hidden).contains(&numel), "{numel}");
}

#[test]
fn a_step_holds_the_weights_and_gradients_of_one_mtp_layer_at_a_time() {
    for zero_stage in [ZeroStage::Two, ZeroStage::Three] {
        let [one, four] = [1, 4].map(|n_mtp_layers| bytes_of_step(zero_stage, n_mtp_layers));
        assert!(one > 0);
        assert_eq!(one, four, "{zero_stage:?}");
    }
}
