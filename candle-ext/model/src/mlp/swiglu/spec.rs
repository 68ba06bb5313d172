//! Specification of a SwiGLU MLP.

use crate::{Config, Dim, DimSize, LinearSpec};

/// The linear layers of a SwiGLU MLP.
#[derive(Clone, Debug, PartialEq)]
pub struct SwiGluSpec {
    /// Gate and up projections, in this order.
    pub gate_up: [LinearSpec; 2],
    /// The down projection.
    pub down: LinearSpec,
}

impl Config {
    /// Returns the specification of a SwiGLU MLP by its module name.
    pub(crate) fn swiglu(&self, module: &str, intermediate_size: usize) -> SwiGluSpec {
        let ffn = DimSize { dim: Dim::Ffn, len: intermediate_size };
        let linear = |name: &str, shape| LinearSpec::new(format!("{module}.{name}"), shape, self.typed.mlp_bias);
        SwiGluSpec {
            gate_up: ["gate_proj", "up_proj"].map(|name| linear(name, [ffn, self.embed()])),
            down: linear("down_proj", [self.embed(), ffn]),
        }
    }
}
