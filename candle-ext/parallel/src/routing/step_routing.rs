//! Choice of the experts of a step.

use std::collections::BTreeMap;

/// Choice of the experts of a step's tokens.
#[derive(Clone, Copy, Debug, Default)]
pub enum StepRouting<'a> {
    /// The routers select the experts.
    #[default]
    Select,
    /// The routers select the experts, and the step returns them: see [`StepResult::routed`](crate::StepResult::routed).
    Record,
    /// The experts are given: an entry for each micro-batch of this rank, with all tokens in order. In a micro-batch with
    /// `None` the routers select.
    Replay(&'a [Option<RoutedMicro>]),
}

/// Experts of a micro-batch's tokens, on the host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RoutedMicro {
    /// Position of each token in the micro-batch, without the engine's padding.
    pub tokens: Vec<u32>,
    /// Experts of these tokens, k each, by layer index.
    pub layers: BTreeMap<usize, Vec<u32>>,
}
