//! Tiling of MLPs and experts over the tokens.

/// Tiling of a layer's MLP over the tokens (ArcticTraining's `tiled_mlp`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TiledMlp {
    /// All tokens at once. Activations are saved for backward.
    #[default]
    Off,
    /// Tiles of about hidden_size tokens each. Backward recomputes each tile's activations.
    On,
}
