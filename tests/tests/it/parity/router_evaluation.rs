//! Losses of training and of evaluation on one rank, with settings of the routers.

use std::time::Duration;

use candle_core::{Device, Result, Tensor};
use candlewick_comm::{Options, World, threads};
use candlewick_model::{ExpertCapacity, ExpertSelection, ForcedExpertLoad, RouterDtype, RouterSettings};
use candlewick_ops::{DropPolicy, cpu_gemm_kernel};
use candlewick_parallel::{LossScale, StepLoss};

use super::case::{Batching, QWEN3_MOE, micros};
use super::rank::{Strategy, engine_with_routers};

/// Losses of each micro-batch.
#[derive(Debug, PartialEq)]
struct RoutedLosses {
    trained: Vec<f64>,
    evaluated: Vec<f64>,
}

/// Computes the losses. `offset` is added to the routers' weights.
fn losses(router: RouterSettings, dropout_key: u64, offset: f32) -> RoutedLosses {
    let rank = |world: &World| -> Result<_> {
        let engine = engine_with_routers(world, Strategy::ONE_RANK, QWEN3_MOE, router.clone(), None)?;
        engine.store().fill(|spec| {
            let mut values = vec![0f32; spec.numel()];
            spec.initialise(3, &mut values);
            if spec.name.ends_with("gate.weight") {
                values.iter_mut().for_each(|x| *x += offset);
            }
            Tensor::from_vec(values, spec.shape.as_slice(), &Device::Cpu)
        })?;
        let (micros, _) = micros(Batching::Packed, 0, 0, 1);
        let sums = engine.forward_backward(&micros, StepLoss::from(&LossScale::mean_over(1.0)), |_| dropout_key)?;
        let trained = sums.micros.iter().map(|sum| Ok(f64::from(sum.to_scalar::<f32>()?)));
        let evaluated = micros.iter().map(|micro| engine.loss(micro));
        Ok(RoutedLosses { trained: trained.collect::<Result<_>>()?, evaluated: evaluated.collect::<Result<_>>()? })
    };
    let options = Options { timeout: Duration::from_secs(120), record: false };
    threads::run(1, options, rank).unwrap().remove(0)
}

#[test]
fn evaluation_has_the_router_dtype_of_training() {
    // Large logits with small differences: sums in f32 change the weights of the experts.
    let of = |dtype| losses(RouterSettings { dtype, ..RouterSettings::default() }, 5, 1e3);
    let RoutedLosses { trained, evaluated } = of(RouterDtype::F64);
    assert_eq!(trained, evaluated);
    // The errors of AMX are equal for all experts here, and softmax ignores them.
    if cpu_gemm_kernel() != "amx" {
        assert_ne!(evaluated, of(RouterDtype::F32).evaluated, "routers compute in f32");
    }
}

#[test]
fn evaluation_has_the_models_selection_without_capacity_and_noise() {
    let default = RouterSettings::default;
    let plain = losses(default(), 5, 0.0);
    assert_eq!(plain.trained, plain.evaluated);
    let capacity = Some(ExpertCapacity { factor: 0.5, policy: DropPolicy::Weights });
    for router in [
        RouterSettings { capacity, ..default() },
        RouterSettings { selection: ExpertSelection::Sinkhorn, ..default() },
        RouterSettings { input_jitter_eps: 0.5, ..default() },
        RouterSettings { forced_load: ForcedExpertLoad::Random, ..default() },
    ] {
        let RoutedLosses { trained, evaluated } = losses(router.clone(), 5, 0.0);
        assert_eq!(evaluated, plain.evaluated, "{router:?}");
        assert_ne!(trained, plain.trained, "{router:?}");
    }
}

#[test]
fn noise_of_routers_depends_on_the_key_of_a_micro_batch() {
    for router in [
        RouterSettings { input_jitter_eps: 0.5, ..RouterSettings::default() },
        RouterSettings { forced_load: ForcedExpertLoad::Random, ..RouterSettings::default() },
    ] {
        let trained = |key| losses(router.clone(), key, 0.0).trained;
        assert_eq!(trained(5), trained(5), "{router:?}");
        assert_ne!(trained(5), trained(6), "{router:?}");
    }
    let plain = |key| losses(RouterSettings::default(), key, 0.0);
    assert_eq!(plain(5), plain(6));
}
