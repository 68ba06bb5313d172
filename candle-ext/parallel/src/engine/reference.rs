//! Log-probabilities of a frozen reference model.

use std::borrow::Cow;

use candle_core::{Result, Tensor, bail};

use super::Engine;
use crate::batch::{ColumnScope, Micro, MicroColumn};
use crate::objective::{Objective, REFERENCE_LOG_PROBS, ReferenceModel};

impl Engine {
    /// Sets the frozen engine of objectives with [`ReferenceModel::Frozen`], over the same ranks. It may share frozen weights with
    /// this one, see [`EngineSpec::build_sharing`](crate::EngineSpec::build_sharing).
    pub fn with_reference(self, reference: Engine) -> Self {
        Self { reference: Some(Box::new(reference)), ..self }
    }

    /// Returns the frozen engine of objectives with [`ReferenceModel::Frozen`].
    pub fn reference(&self) -> Option<&Engine> {
        self.reference.as_deref()
    }

    /// Returns the micro-batches with the columns of an objective: adds [`REFERENCE_LOG_PROBS`] if it needs them. Collective.
    pub(super) fn with_columns<'m>(&self, micros: &'m [Micro], objective: &dyn Objective) -> Result<Cow<'m, [Micro]>> {
        micros.iter().try_for_each(|micro| micro.check_columns(objective.columns()))?;
        match (objective.reference(), &self.reference) {
            (ReferenceModel::None, _) => Ok(Cow::Borrowed(micros)),
            (ReferenceModel::Frozen, Some(reference)) => {
                let with_reference = |micro: &Micro| {
                    let values = reference.token_log_probs(micro)?;
                    let columns = micro.columns.clone();
                    let column = MicroColumn { scope: ColumnScope::Token, values };
                    Ok(Micro { columns: columns.with(REFERENCE_LOG_PROBS, column), ..micro.clone() })
                };
                micros.iter().map(with_reference).collect::<Result<_>>().map(Cow::Owned)
            }
            (ReferenceModel::Frozen, None) => {
                bail!("the objective compares with a reference model, and the engine has none")
            }
        }
    }

    /// Returns the log-probability of each target of a micro-batch, f32 [t] on the device: 0 where there is no target, and on ranks
    /// without [losses](Engine::has_loss). Collective over the ranks that split the micro-batch or the model.
    pub fn token_log_probs(&self, micro: &Micro) -> Result<Tensor> {
        self.losses_of_tokens(micro)?.neg()
    }
}
