mod capacity;
mod expert_counts;
mod grouped_libraries;
mod grouped_linear;
mod layer;
mod linear_f64;
mod permute;
pub(crate) mod router;
mod router_fixture;
mod router_loss;
mod router_noise;
mod router_statistics;
mod weighted_swiglu;

use candle_core::{DType, Device, Tensor};
use candlewick_ops::{
    CountedExperts, ExpertAssignment, ExpertChoice, RouterSpec, RouterStatistics, RouterStatisticsSpec, ScoreFunction,
    no_grad, route_with_statistics,
};

use crate::cases::{OpCase, TestDevice, check_each};

/// Devices with a kernel of every op of this folder.
pub(crate) fn devices() -> Vec<TestDevice> {
    TestDevice::all()
}

pub(crate) fn check_all_dtypes(case: &OpCase<'_>) {
    check_each([DType::F32, DType::BF16, DType::F16], |dtype| case.check_on(&devices(), dtype));
}

pub(crate) fn u32s(values: &[u32]) -> Tensor {
    Tensor::new(values, &Device::Cpu).unwrap()
}

pub(crate) fn to_u32s(x: &Tensor) -> Vec<u32> {
    x.to_device(&Device::Cpu).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Returns k distinct experts per token, u32 [t, k]; expert 1 gets no token, and every `dropped`-th slot is dropped.
pub(crate) fn experts(t: usize, k: usize, e: usize, dropped: Option<usize>) -> Tensor {
    let slot = |i: usize| match dropped {
        Some(every) if i % every == every - 1 => u32::MAX,
        _ => {
            let expert = (i / k * (i / k + 3) + i % k) % (e - 1);
            (if expert == 0 { 0 } else { expert + 1 }) as u32
        }
    };
    Tensor::from_vec((0..t * k).map(slot).collect(), (t, k), &Device::Cpu).unwrap()
}

/// Returns an assignment of [`experts`] on a device.
pub(crate) fn assignment(experts: &Tensor, n_experts: usize, device: &Device) -> ExpertAssignment {
    ExpertAssignment::new(&experts.to_device(device).unwrap(), n_experts).unwrap()
}

/// Returns the statistics of all tokens.
pub(crate) fn statistics(logits: &Tensor, score: ScoreFunction) -> candle_core::Result<RouterStatistics> {
    let spec = RouterSpec { top_k: 1, score, ..router::SPEC };
    let counted = RouterStatisticsSpec { token_mask: None, experts: CountedExperts::Chosen };
    Ok(no_grad(|| route_with_statistics(logits, ExpertChoice::ByScore { bias: None }, spec, counted))?.1)
}
