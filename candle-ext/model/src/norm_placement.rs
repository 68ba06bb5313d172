//! Positions of the norms in a decoder layer, and their names.

use crate::linear_spec::layer_name;

/// Positions of a layer's RMS norms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NormPlacement {
    /// Before each sublayer f, as in Llama: x + f(norm(x)).
    #[default]
    Pre,
    /// After each sublayer, as in OLMo 2: x + norm(f(x)).
    Post,
    /// Before and after each sublayer, as in Gemma 2: x + norm(f(norm(x))).
    Sandwich,
}

/// The norms around a sublayer: their names, or the norms.
#[derive(Clone, Debug, Default)]
pub(crate) struct SublayerNorms<N> {
    pub(crate) before: Option<N>,
    pub(crate) after: Option<N>,
}

impl NormPlacement {
    /// Returns true if norms are after the sublayers.
    pub(crate) fn is_after(self) -> bool {
        self != Self::Pre
    }

    /// Returns the names of the norms around the mixer, as transformers' models have them.
    pub(crate) fn of_mixer(self, layer_idx: usize) -> SublayerNorms<String> {
        let [before, after] = ["input_layernorm", "post_attention_layernorm"].map(|norm| name(layer_idx, norm));
        self.select(before, after)
    }

    /// Returns the names of the norms around the MLP, as transformers' models have them.
    pub(crate) fn of_mlp(self, layer_idx: usize) -> SublayerNorms<String> {
        let before = if self == Self::Pre { "post_attention_layernorm" } else { "pre_feedforward_layernorm" };
        self.select(name(layer_idx, before), name(layer_idx, "post_feedforward_layernorm"))
    }

    fn select<N>(self, before: N, after: N) -> SublayerNorms<N> {
        match self {
            Self::Pre => SublayerNorms { before: Some(before), after: None },
            Self::Post => SublayerNorms { before: None, after: Some(after) },
            Self::Sandwich => SublayerNorms { before: Some(before), after: Some(after) },
        }
    }
}

impl<N> SublayerNorms<N> {
    /// Converts both norms.
    pub(crate) fn try_map<T, E>(self, mut f: impl FnMut(N) -> Result<T, E>) -> Result<SublayerNorms<T>, E> {
        Ok(SublayerNorms { before: self.before.map(&mut f).transpose()?, after: self.after.map(&mut f).transpose()? })
    }
}

fn name(layer_idx: usize, norm: &str) -> String {
    format!("{}.{norm}.weight", layer_name(layer_idx))
}
