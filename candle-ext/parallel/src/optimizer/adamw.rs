//! AdamW: two running means per element, and a step in one pass over a flat buffer.

use std::sync::Arc;

use candle_core::Result;
use candlewick_ops::{AdamW, AdamWState, AdamWStep, GradScaler, adamw, adamw_stochastic};

use super::hyperparameter::{Hyperparameter, HyperparameterRange};
use super::kind::{
    ElementUpdates, KindDeclaration, OptimizerKind, ShardUpdate, SlotDtype, StateSlot, StepUpdates, UpdateNeed,
};

/// AdamW with the defaults of torch.
pub(super) static ADAMW: KindDeclaration = KindDeclaration {
    name: "adamw",
    recipe_names: &["fused_adam", "adamw", "adam", "cpu_adam", "fused_adam_moe", "cpu_adam_moe"],
    hyperparameters: &[
        Hyperparameter { name: "betas", default: &[0.9, 0.999], range: HyperparameterRange::DecayRate },
        Hyperparameter { name: "eps", default: &[1e-8], range: HyperparameterRange::Positive },
    ],
    build: |values| Arc::new(AdamWKind { beta1: values[0][0], beta2: values[0][1], eps: values[1][0] }),
};

/// AdamW's hyperparameters.
#[derive(Clone, Copy, Debug, PartialEq)]
struct AdamWKind {
    /// Decay rate of the gradient's running mean.
    beta1: f64,
    /// Decay rate of the squared gradient's running mean.
    beta2: f64,
    /// Term added to the denominator.
    eps: f64,
}

/// A step of AdamW with its bias corrections.
struct AdamWUpdates<'s> {
    kind: &'s AdamWKind,
    step: AdamWStep<'s>,
}

impl AdamWKind {
    fn hyper(&self, lr: f64, weight_decay: f64) -> AdamW {
        let Self { beta1, beta2, eps } = *self;
        AdamW { lr, beta1, beta2, eps, weight_decay }
    }
}

impl OptimizerKind for AdamWKind {
    fn name(&self) -> &'static str {
        ADAMW.name
    }

    fn settings(&self) -> Vec<(&'static str, f64)> {
        vec![("beta1", self.beta1), ("beta2", self.beta2), ("eps", self.eps)]
    }

    fn slots(&self) -> &'static [StateSlot] {
        const SLOTS: [StateSlot; 2] = [
            StateSlot { name: "exp_avg", dtype: SlotDtype::Configured },
            StateSlot { name: "exp_avg_sq", dtype: SlotDtype::Configured },
        ];
        &SLOTS
    }

    fn need(&self) -> UpdateNeed {
        UpdateNeed::Elements
    }

    fn rounds_stochastically(&self) -> bool {
        true
    }

    /// With a large eps, a step is proportional to the gradient. With a small eps it depends on the sign of small gradients.
    fn for_comparison(&self) -> Arc<dyn OptimizerKind> {
        Arc::new(Self { beta1: 0.9, beta2: 0.99, eps: 1.0 })
    }

    fn start_step<'s>(&'s self, scaler: &'s GradScaler) -> Result<StepUpdates<'s>> {
        let step = AdamWStep::new(&self.hyper(0.0, 0.0), scaler)?;
        Ok(StepUpdates::Elements(Box::new(AdamWUpdates { kind: self, step })))
    }
}

impl ElementUpdates for AdamWUpdates<'_> {
    fn update(&self, shard: &ShardUpdate<'_>) -> Result<()> {
        let [exp_avg, exp_avg_sq] = [0, 1].map(|slot| &shard.slots[slot]);
        let hyper = self.kind.hyper(shard.lr, shard.weight_decay);
        let ShardUpdate { master, grad, compute, rounding, .. } = shard;
        let state = AdamWState { master, grad, exp_avg, exp_avg_sq, compute: *compute };
        match rounding {
            None => adamw(&hyper, &self.step, state),
            Some(rounding) => adamw_stochastic(&hyper, &self.step, state, rounding),
        }
    }
}
