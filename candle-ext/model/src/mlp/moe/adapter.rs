//! LoRA on the routed experts of a layer, and the names of its tensors in PEFT's files.

use std::ops::Range;

use crate::AdapterSpec;

/// A LoRA adapter on one matrix of every routed expert of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertAdapterSpec {
    /// Name, rank and scaling. The name ends with `experts.gate_up_proj`, `experts.gate_proj`, and so on.
    pub adapter: AdapterSpec,
    /// Adapted output columns of an expert's matrix: all, or those of the gate or up projection.
    pub columns: Range<usize>,
    /// Tensors that hold the factors in an adapter folder.
    pub(crate) files: ExpertAdapterFiles,
}

/// Names of an adapter's tensors in a folder, without `.lora_A.weight`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ExpertAdapterFiles {
    /// One module for each expert, as vLLM reads them and PEFT saves them with transformers 4.
    PerExpert(Vec<String>),
    /// One module for a 3-D parameter, as PEFT saves `target_parameters`.
    Parameter(String),
}
