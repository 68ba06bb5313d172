//! The list of all objectives.

use super::Objective;
use super::causal::CausalLm;

/// Objectives by name: a line per objective.
pub const OBJECTIVES: &[(&str, &dyn Objective)] = &[("causal_lm", &CausalLm)];
