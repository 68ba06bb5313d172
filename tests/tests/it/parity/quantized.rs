//! An adapter on a base of 8-bit weights trains alike on any number of ranks and on a dense base of equal values.

use std::collections::BTreeMap;

use candle_core::{Result, Tensor};
use candlewick_comm::mesh::Degrees;
use candlewick_comm::{Options, World, threads};
use candlewick_ops::{QuantFormat, ScaleBlock, ScaleRounding, WeightStorage, dequantize, quantize};
use candlewick_parallel::{Engine, LossScale, SequenceParallel, ZeroStage};

use super::case::{BATCHINGS, DENSE_BASE, ModelCase, PARAMETERS, micros};
use super::rank::{Strategy, engine};
use super::{ONE, PP_OP, TP_OPS, ZERO_OPS, check_all, hybrid, pipeline, tensor, zero};

/// Signed integers with a scale per 8 by 8 elements, a format for this test only.
static INT8: QuantFormat = QuantFormat {
    name: "int8",
    codes: &{
        let mut codes = [0.0; 256];
        let mut code = 0;
        while code < 256 {
            codes[code] = code as u8 as i8 as f32;
            code += 1;
        }
        codes
    },
    block: ScaleBlock::Tile { rows: 8, columns: 8 },
    scales: ScaleRounding::PowerOfTwo,
};

const QUANTIZED: ModelCase = DENSE_BASE.stored_as(WeightStorage::Quantized(&INT8));

/// Adapters of experts and routers on quantized experts.
const QUANTIZED_EXPERTS: ModelCase = PARAMETERS.stored_as(WeightStorage::Quantized(&INT8));

#[track_caller]
fn check(strategy: Strategy, known: &[&str]) {
    check_all(strategy, &[QUANTIZED], &BATCHINGS, known);
}

#[test]
fn parity_of_a_quantized_base_with_zero() {
    check(zero(2, ZeroStage::One), &ZERO_OPS);
    check(zero(2, ZeroStage::Two), &ZERO_OPS);
    check(zero(3, ZeroStage::Three), &ZERO_OPS);
    check(hybrid(2, 2, ZeroStage::Three), &ZERO_OPS);
}

#[test]
fn parity_of_a_quantized_base_with_tensor_parallelism() {
    check(tensor(Degrees { tp: 2, ..ONE }, SequenceParallel::On), &TP_OPS);
    let strategy = tensor(Degrees { tp: 2, dp_shard: 2, ..ONE }, SequenceParallel::On);
    check(Strategy { zero_stage: Some(ZeroStage::Three), ..strategy }, &TP_OPS);
}

#[test]
fn parity_of_a_quantized_base_with_a_pipeline() {
    let strategy =
        pipeline(Degrees { pp: 2, ..ONE }, candlewick_parallel::PipelineScheduleKind::OneForwardOneBackward, &[2, 2]);
    check_all(strategy, &[QUANTIZED], &[super::case::Batching::Accumulated(5)], &[PP_OP]);
}

#[test]
fn parity_of_quantized_experts_with_expert_parallelism() {
    let n_quantized = |case: ModelCase| {
        let units = case.model().units().to_vec();
        let params = units.into_iter().flat_map(|unit| unit.params);
        params.filter(|param| param.storage != WeightStorage::Dense && param.name.contains(".experts.")).count()
    };
    assert_eq!([n_quantized(QUANTIZED_EXPERTS), n_quantized(PARAMETERS)], [2 * 2, 0]);
    let strategy = Strategy {
        degrees: Degrees { dp_shard: 4, ep: 2, ..ONE },
        zero_stage: Some(ZeroStage::Three),
        ..Strategy::ONE_RANK
    };
    check_all(strategy, &[QUANTIZED_EXPERTS], &BATCHINGS[..1], &["ep-etp all_to_all"]);
}

/// A quarter of the MLP's 48 columns is no multiple of the 8 columns of a scale.
#[test]
fn slices_that_split_a_scale_are_refused_by_name() {
    let strategy = tensor(Degrees { tp: 4, ..ONE }, SequenceParallel::Off);
    let built =
        on_ranks(strategy, |world| Ok(engine(world, strategy, QUANTIZED, None).err().map(|error| error.to_string())));
    for error in built {
        let error = error.unwrap();
        assert!(error.contains("mlp.") && error.contains("int8 values with one scale cannot be split at"), "{error}");
    }
}

fn on_ranks<T: Send>(strategy: Strategy, run: impl Fn(&World) -> Result<T> + Sync) -> Vec<T> {
    threads::run(strategy.degrees.n_ranks(), Options::default(), run).unwrap()
}

fn flat(x: &Tensor) -> Vec<f32> {
    x.flatten_all().unwrap().to_vec1().unwrap()
}

type Values = BTreeMap<String, Tensor>;

fn masters(engine: &Engine) -> Values {
    engine.store().masters().map(|master| master.map(|(spec, value)| (spec.name.clone(), value)).unwrap()).collect()
}

/// Loss and gradients of one rank with these weights.
fn gradients(case: ModelCase, weights: &Values) -> (f32, Vec<(String, Vec<f32>)>) {
    let run = |world: &World| {
        let engine = engine(world, Strategy::ONE_RANK, case, None)?;
        engine.store().fill(|spec| Ok::<_, candle_core::Error>(weights[&spec.name].clone()))?;
        let (micros, n_targets) = micros(BATCHINGS[0], 0, 0, 1);
        let sums = engine.forward_backward(&micros, &LossScale::mean_over(n_targets), |_| 5)?;
        let grads = engine.store().states()?.into_iter().map(|state| (state.name, flat(&state.grad))).collect();
        Ok((sums.micros[0].to_scalar()?, grads))
    };
    on_ranks(Strategy::ONE_RANK, run).remove(0)
}

#[test]
fn a_quantized_base_gives_the_bits_of_a_dense_one_with_its_values() {
    let weights =
        on_ranks(Strategy::ONE_RANK, |world| Ok(masters(&engine(world, Strategy::ONE_RANK, QUANTIZED, None)?)))
            .remove(0);
    let random =
        on_ranks(Strategy::ONE_RANK, |world| Ok(masters(&engine(world, Strategy::ONE_RANK, DENSE_BASE, None)?)))
            .remove(0);
    let mut n_quantized = 0;
    for (name, value) in &random {
        let is_quantized = name.contains("_proj.weight");
        let want = match is_quantized {
            true => dequantize(&quantize(value, &INT8).unwrap(), &INT8, value.dims(), value.dtype()).unwrap(),
            false => value.clone(),
        };
        assert_eq!(flat(&weights[name]), flat(&want), "{name}");
        n_quantized += usize::from(is_quantized);
    }
    assert_eq!(n_quantized, 4 * 7);
    let (quantized, dense) = (gradients(QUANTIZED, &weights), gradients(DENSE_BASE, &weights));
    assert!(quantized == dense, "losses {} and {}", quantized.0, dense.0);
    assert!(gradients(DENSE_BASE, &random).0 != dense.0, "quantizing changes the loss");
}

/// Exported values are quantized to equal bytes on any mesh.
#[test]
fn an_export_of_a_quantized_base_is_filled_into_another_mesh() {
    let saved = {
        let strategy = zero(2, ZeroStage::Three);
        on_ranks(strategy, |world| Ok(masters(&engine(world, strategy, QUANTIZED, None)?))).remove(0)
    };
    for strategy in [
        Strategy::ONE_RANK,
        zero(3, ZeroStage::One),
        tensor(Degrees { tp: 2, dp_shard: 2, ..ONE }, SequenceParallel::On),
    ] {
        let again = on_ranks(strategy, |world| {
            let engine = engine(world, strategy, QUANTIZED, None)?;
            engine.store().fill(|spec| Ok::<_, candle_core::Error>(saved[&spec.name].clone()))?;
            Ok(masters(&engine))
        });
        for again in again {
            for (name, value) in &saved {
                assert_eq!(flat(&again[name]), flat(value), "{strategy:?}: {name}");
            }
        }
    }
}

/// The weights of a rank take the bytes that their storage declares.
#[test]
fn a_store_takes_the_bytes_of_the_storage() {
    let bytes = |case: ModelCase| {
        on_ranks(Strategy::ONE_RANK, |world| {
            Ok(engine(world, Strategy::ONE_RANK, case, None)?.store().device_bytes().weights)
        })
        .remove(0)
    };
    let specs = QUANTIZED.model();
    let saved: usize = specs
        .units()
        .iter()
        .flat_map(|unit| &unit.params)
        .filter(|spec| spec.storage != WeightStorage::Dense)
        .map(|spec| 4 * spec.numel() - spec.storage.n_bytes(&spec.shape, candle_core::DType::F32).unwrap())
        .sum();
    let padding = 4 * 7 * 512;
    let (dense, quantized) = (bytes(DENSE_BASE), bytes(QUANTIZED));
    assert!(dense.abs_diff(quantized + saved as u64) <= padding, "dense {dense}, quantized {quantized}, {saved} fewer");
}
