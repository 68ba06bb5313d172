//! `deterministic: batch_invariant`: refuses settings whose result for a row depends on the other rows.

use candlewick_ops::{AttentionImpl, DeviceChoice, GroupedGemmImpl};

use super::model::{ATTENTION, EXPERTS};
use super::resolver::Resolver;
use super::{Machines, moe, ranks as degrees};
use crate::plan::{ModelPlan, RanksPlan};
use crate::recipe::{DdpBackend, DeterministicMode};

/// The most ranks whose sum does not depend on the order: a sum of two commutes.
const MAX_SUMMANDS: usize = 2;

/// Reports each setting that contradicts `mode`.
pub(super) fn check(
    resolver: &mut Resolver,
    mode: DeterministicMode,
    (model, ranks, device): (&ModelPlan, &RanksPlan, DeviceChoice),
) {
    if mode != DeterministicMode::BatchInvariant {
        return;
    }
    let attention = model.attention.implementation;
    if matches!(attention, AttentionImpl::Cudnn | AttentionImpl::Flash) {
        report(resolver, ATTENTION, &format!("the plan of {attention} depends on the batch"), "use auto or fused");
    }
    let library = match model.experts_implementation {
        GroupedGemmImpl::Cublas => Some("cublas"),
        GroupedGemmImpl::Cutlass => Some("cutlass"),
        GroupedGemmImpl::Auto | GroupedGemmImpl::Fused => None,
    };
    if let Some(library) = library {
        report(resolver, EXPERTS, &format!("the tiles of {library} depend on the number of rows"), "use auto or fused");
    }
    let uses_nccl = may_use_nccl(resolver, ranks, device);
    for (key, size) in [(degrees::TENSOR, ranks.tensor), (moe::TENSOR_SIZE, ranks.expert_tensor)] {
        if uses_nccl && size > MAX_SUMMANDS {
            let reason = "the order in which NCCL sums more than 2 ranks depends on the number of rows";
            report(resolver, key, reason, "use 1 or 2");
        }
    }
}

fn report(resolver: &mut Resolver, key: &str, reason: &str, advice: &str) {
    let message = format!("{key} contradicts deterministic: batch_invariant: {reason}");
    resolver.report_with_advice(&[key], message, format!("{advice}, or deterministic: none"));
}

/// Returns true if the ranks communicate by NCCL, or may do so on other machines.
fn may_use_nccl(resolver: &Resolver, ranks: &RanksPlan, device: DeviceChoice) -> bool {
    let is_possible = resolver.env.features.nccl || resolver.env.world.machines == Machines::Unknown;
    is_possible && device != DeviceChoice::Cpu && matches!(ranks.backend, DdpBackend::Auto | DdpBackend::Nccl)
}
