//! The list of all objectives.

use super::causal::CausalLm;
use super::Objective;

/// Objectives by name: a line per objective.
pub const OBJECTIVES: &[(&str, &dyn Objective)] = &[("causal_lm", &CausalLm)];
