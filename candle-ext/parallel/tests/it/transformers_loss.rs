//! The load-balancing loss of transformers over all layers, compared with transformers on the tiny checkpoints of each family.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Device, Result, Tensor};
use candlewick_comm::Solo;
use candlewick_comm::mesh::{Degrees, Mesh};
use candlewick_model::checkpoint::Checkpoint;
use candlewick_model::{Config, Model, RouterLoss, RouterSettings};
use candlewick_ops::CuSeqlens;
use candlewick_parallel::{
    ActivationCheckpointing, AuxiliaryLoss, Engine, EngineSpec, LossScale, Micro, MicroColumns, MicroLoss, Objective,
    ParallelGroups, ParamDtypes, PipelineLayout, StepLoss, TokenLosses,
};

/// Tolerance of f32 sums in another order.
const TOLERANCE: f64 = 1e-5;

/// The objective 0, which leaves the gradients of the routers' losses.
struct Nothing;

impl Objective for Nothing {
    fn loss(&self, tokens: &TokenLosses<'_>) -> Result<MicroLoss> {
        let loss = Tensor::zeros((), DType::F32, &Device::Cpu)?;
        let weights = Tensor::zeros(tokens.micro().seqs.n_tokens(), DType::F32, &Device::Cpu)?;
        Ok(MicroLoss::Weighted { loss, weights })
    }
}

fn engine(folder: &Path, loss: RouterLoss, checkpointing: ActivationCheckpointing) -> Engine {
    let model = Model::new(Config::read(folder).unwrap(), None).unwrap();
    let mesh = Mesh::new(Degrees::default(), 1).unwrap();
    let groups = ParallelGroups::new(&mesh, &Solo).unwrap().with_experts(&mesh, &Solo).unwrap();
    let n_blocks = model.n_blocks();
    let spec = EngineSpec {
        checkpointing: vec![checkpointing; n_blocks],
        router: RouterSettings { losses: vec![loss], ..RouterSettings::default() },
        ..EngineSpec::training(ParamDtypes::computing_in(DType::F32), PipelineLayout::single_stage(n_blocks))
    };
    let engine = spec.build(model, &groups, Device::Cpu).unwrap();
    let checkpoint = Checkpoint::open(folder).unwrap();
    engine.store().fill(|spec| checkpoint.param(spec, DType::F32, &Device::Cpu)).unwrap();
    engine
}

/// Returns the sequences of the reference, packed.
fn micro(reference: &HashMap<String, Tensor>) -> Micro {
    let ids = reference["ids"].to_dtype(DType::U32).unwrap();
    let lengths: Vec<usize> =
        reference["lengths"].to_vec1::<i64>().unwrap().iter().map(|length| *length as usize).collect();
    let ends = lengths.iter().scan(0, |end, length| {
        *end += length;
        Some(*end)
    });
    Micro {
        // A micro-batch without targets would not count.
        targets: Tensor::zeros(ids.elem_count(), DType::I64, &Device::Cpu).unwrap(),
        ids,
        positions: lengths.iter().flat_map(|length| 0..*length as u32).collect(),
        seqs: CuSeqlens::packed(std::iter::once(0).chain(ends).collect()).unwrap(),
        padding: Vec::new(),
        columns: MicroColumns::default(),
    }
}

#[track_caller]
fn assert_close(what: &str, ours: &Tensor, theirs: &Tensor) {
    let norm = |x: &Tensor| f64::from(x.sqr().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap()).sqrt();
    let error = norm(&(ours - theirs).unwrap());
    assert!(error <= TOLERANCE * norm(theirs), "{what}: off by {error:.1e} of {:.1e}", norm(theirs));
}

/// Compares a loss times `coefficient`. transformers pads both sequences to one length and masks the padding.
#[track_caller]
fn check(name: &str, checkpointing: ActivationCheckpointing, (loss, coefficient): (RouterLoss, f64)) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures").join(name);
    let reference = candle_core::safetensors::load(folder.join("reference.safetensors"), &Device::Cpu).unwrap();
    let (engine, micro) = (engine(&folder, loss, checkpointing), micro(&reference));
    let n_layers = engine.model().layers().filter(|layer| layer.n_experts().is_some()).count();
    let normalizer = (micro.seqs.n_tokens() * n_layers) as f64;
    let auxiliary = [AuxiliaryLoss { name: loss.name().to_owned(), coefficient, normalizer }];
    let loss = StepLoss { objective: &Nothing, scale: LossScale::mean_over(1.0), auxiliary: &auxiliary };
    engine.store().zero_grads().unwrap();
    let losses = engine.forward_backward(&[micro], loss, |_| 0).unwrap();
    let mean = (losses.auxiliary[0].sum_all().unwrap() * (coefficient / normalizer)).unwrap();
    assert_close(name, &mean, &reference["aux_loss"]);
    let mut n_grads = 0;
    for state in engine.store().states().unwrap() {
        let grad = state.grad.reshape(state.shape.as_slice()).unwrap();
        match reference.get(&format!("aux_grad.{}", state.name)) {
            Some(want) => assert_close(&state.name, &grad, &want.reshape(grad.shape()).unwrap()),
            None => assert_eq!(grad.sqr().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap(), 0.0),
        }
        n_grads += usize::from(reference.contains_key(&format!("aux_grad.{}", state.name)));
    }
    assert_eq!(n_grads, reference.keys().filter(|key| key.starts_with("aux_grad.")).count());
}

#[test]
fn the_loss_over_all_layers_and_its_gradients_equal_those_of_transformers() {
    for name in ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"] {
        for checkpointing in [
            ActivationCheckpointing::None,
            ActivationCheckpointing::Full,
            ActivationCheckpointing::Selective,
            ActivationCheckpointing::Offload,
        ] {
            check(name, checkpointing, (RouterLoss::TransformersLoadBalancing, 1.0));
        }
    }
}

/// One layer of this model has experts, of which a token selects two.
#[test]
fn the_loss_of_each_layer_times_k_over_layers_is_that_of_transformers_for_one_layer() {
    check("qwen3_moe", ActivationCheckpointing::None, (RouterLoss::LoadBalancing, 2.0));
}

/// Loss scaling, as in training in f16.
#[test]
fn a_loss_scale_multiplies_the_gradients_of_routers_losses() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures/qwen3_moe");
    let reference = candle_core::safetensors::load(folder.join("reference.safetensors"), &Device::Cpu).unwrap();
    for router_loss in [RouterLoss::TransformersLoadBalancing, RouterLoss::LoadBalancing, RouterLoss::Z] {
        let grads = |factor: Option<f32>| {
            let engine = engine(&folder, router_loss, ActivationCheckpointing::None);
            let name = router_loss.name().to_owned();
            let auxiliary = [AuxiliaryLoss { name, coefficient: 0.5, normalizer: 3.0 }];
            let factor = factor.map(|factor| Tensor::new(factor, &Device::Cpu).unwrap());
            let scale = LossScale::mean_over(1.0).times(factor);
            let loss = StepLoss { objective: &Nothing, scale, auxiliary: &auxiliary };
            engine.store().zero_grads().unwrap();
            engine.forward_backward(&[micro(&reference)], loss, |_| 0).unwrap();
            let states = engine.store().states().unwrap();
            states.iter().flat_map(|state| state.grad.to_vec1::<f32>().unwrap()).collect::<Vec<_>>()
        };
        let scaled: Vec<f32> = grads(None).iter().map(|grad| 8.0 * grad).collect();
        assert!(scaled.iter().any(|grad| *grad != 0.0));
        assert_eq!(grads(Some(8.0)), scaled, "{router_loss:?}");
    }
}
