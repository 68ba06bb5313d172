//! The training objective of a run.

use candlewick_parallel::{OBJECTIVES, Objective};
use serde::Serialize;

use crate::data::DataKind;

/// The objective of each kind of data: a line per kind.
const OF_KIND: [(DataKind, &str); 2] = [(DataKind::Sft, "causal_lm"), (DataKind::Causal, "causal_lm")];

/// The training objective, by its name among [`OBJECTIVES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct ObjectivePlan {
    name: &'static str,
}

impl ObjectivePlan {
    /// Returns the objective of a run of this kind.
    pub(crate) fn of(kind: DataKind) -> Self {
        let (_, name) = OF_KIND.iter().find(|(of, _)| *of == kind).expect("each kind has an objective");
        Self { name }
    }

    /// Returns the objective.
    pub(crate) fn objective(self) -> &'static dyn Objective {
        let (_, objective) = OBJECTIVES.iter().find(|(name, _)| *name == self.name).expect("the objective is listed");
        *objective
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_data_has_a_listed_objective() {
        for kind in [DataKind::Sft, DataKind::Causal] {
            assert!(ObjectivePlan::of(kind).objective().columns().is_empty(), "{kind:?}");
        }
    }
}
