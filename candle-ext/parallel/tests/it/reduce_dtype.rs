//! Gradients that ranks sum in another dtype than they accumulate in.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Result, Tensor};
use candlewick_comm::mesh::{Degrees, Mesh};
use candlewick_comm::{Options, Solo, threads};
use candlewick_model::Model;
use candlewick_parallel::{
    Engine, EngineSpec, LossScale, Micro, ParallelGroups, ParamDtypes, PipelineLayout, ZeroStage,
};

use crate::engine::{config, micro, sequences};

/// Gradients by the parameter's name, whole or a shard with its first element.
type Grads = BTreeMap<String, (usize, Tensor)>;

/// Returns the gradients of this rank after micro-batches.
fn grads(engine: &Engine, micros: &[Micro]) -> Result<Grads> {
    engine.store().zero_grads()?;
    engine.forward_backward(micros, &LossScale::mean_over(10.0), |_| 0)?;
    let states = engine.store().states()?;
    Ok(states.into_iter().map(|state| (state.name, (state.range.start, state.grad.flatten_all().unwrap()))).collect())
}

fn engine(
    groups: &ParallelGroups,
    zero_stage: Option<ZeroStage>,
    reduce_dtype: Option<DType>,
    dtypes: ParamDtypes,
) -> Result<Engine> {
    let model = Model::new(config(true), None).unwrap();
    let layout = PipelineLayout::single_stage(model.n_blocks());
    let spec = EngineSpec { zero_stage, reduce_dtype, ..EngineSpec::training(dtypes, layout) };
    let engine = spec.build(model, groups, Device::Cpu)?;
    engine.store().fill(|spec| {
        let mut values = vec![0f32; spec.numel()];
        spec.initialise(3, &mut values);
        Tensor::from_vec(values, spec.shape.as_slice(), &Device::Cpu)
    })?;
    Ok(engine)
}

/// Returns the micro-batches of a rank.
fn micros(rank: usize, n: usize) -> Vec<Micro> {
    (0..n).map(|idx| micro(&sequences(&[3 + rank, 7 + 2 * idx + rank]))).collect()
}

/// Returns the gradients of each rank on a mesh.
fn on_ranks(
    mesh: Degrees,
    zero_stage: Option<ZeroStage>,
    reduce_dtype: Option<DType>,
    (dtypes, n_micros): (ParamDtypes, usize),
) -> Vec<Grads> {
    let ranks = threads::run(mesh.n_ranks(), Options::default(), |world| -> Result<Grads> {
        let groups = ParallelGroups::new(&Mesh::new(mesh, world.size()).unwrap(), &*world.group())?;
        grads(&engine(&groups, zero_stage, reduce_dtype, dtypes)?, &micros(world.rank(), n_micros))
    });
    ranks.unwrap()
}

/// Returns the gradients of a rank alone.
fn alone(rank: usize, dtypes: ParamDtypes, n_micros: usize) -> Grads {
    let groups = ParallelGroups::new(&Mesh::new(Degrees::default(), 1).unwrap(), &Solo).unwrap();
    grads(&engine(&groups, None, None, dtypes).unwrap(), &micros(rank, n_micros)).unwrap()
}

/// Sums tensors in f32 after each was rounded to `sent`, and rounds the sum.
fn rounded_sum(tensors: &[Tensor], sent: DType) -> Tensor {
    let rounded = tensors.iter().map(|x| x.to_dtype(sent).unwrap().to_dtype(DType::F32).unwrap());
    rounded.reduce(|sum, x| (sum + x).unwrap()).unwrap().to_dtype(sent).unwrap()
}

/// Compares the gradients of ranks, which compute one micro-batch each, with naive sums.
#[track_caller]
fn check(mesh: Degrees, zero_stage: Option<ZeroStage>, sent: DType, dtypes: ParamDtypes) {
    let ranks = on_ranks(mesh, zero_stage, Some(sent), (dtypes, 1));
    let own: Vec<Grads> = (0..mesh.n_ranks()).map(|rank| alone(rank, dtypes, 1)).collect();
    let n_replicas = mesh.dp_replicate;
    for grads in ranks {
        for (name, (start, grad)) in grads {
            let parts: Vec<Tensor> = own.iter().map(|grads| grads[&name].1.clone()).collect();
            // The ranks of a replica sum first, then the replicas.
            let replicas = parts.chunks(mesh.n_ranks() / n_replicas).map(|parts| rounded_sum(parts, sent));
            let sum = rounded_sum(&replicas.collect::<Vec<_>>(), sent).to_dtype(dtypes.masters).unwrap();
            let want = sum.narrow(0, start, grad.elem_count()).unwrap();
            let [got, want] = [grad, want].map(|x| x.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap());
            assert!(got == want, "{mesh:?} {zero_stage:?} {sent:?} {name}");
        }
    }
}

fn data_parallel(dp_replicate: usize, dp_shard: usize) -> Degrees {
    Degrees { dp_replicate, dp_shard, ..Degrees::default() }
}

const STAGES: [Option<ZeroStage>; 4] = [None, Some(ZeroStage::One), Some(ZeroStage::Two), Some(ZeroStage::Three)];

#[test]
fn gradients_are_the_sums_of_gradients_rounded_to_the_dtype_of_communication() {
    let f32 = ParamDtypes::computing_in(DType::F32);
    for sent in [DType::BF16, DType::F16] {
        for stage in STAGES {
            check(data_parallel(1, 3), stage, sent, f32);
        }
        check(data_parallel(2, 1), None, sent, f32);
        check(data_parallel(2, 2), Some(ZeroStage::Two), sent, f32);
    }
    let bf16 = ParamDtypes { compute: DType::BF16, masters: DType::BF16, optimizer_states: DType::BF16 };
    check(data_parallel(1, 2), Some(ZeroStage::One), DType::F32, bf16);
}

#[test]
fn f32_is_the_default_and_one_rank_rounds_nothing() {
    let f32 = (ParamDtypes::computing_in(DType::F32), 2);
    let values = |ranks: Vec<Grads>| -> Vec<Vec<f32>> {
        ranks.into_iter().flatten().map(|(_, (_, grad))| grad.to_vec1().unwrap()).collect()
    };
    for stage in STAGES {
        let [default, given] =
            [None, Some(DType::F32)].map(|sent| values(on_ranks(data_parallel(1, 2), stage, sent, f32)));
        assert!(default == given, "{stage:?}");
        let [default, given] =
            [None, Some(DType::BF16)].map(|sent| values(on_ranks(data_parallel(1, 1), stage, sent, f32)));
        assert!(default == given, "{stage:?}");
    }
}
