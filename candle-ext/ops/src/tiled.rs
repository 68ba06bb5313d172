//! Row-wise function computed tile by tile, as TiledMLP: its intermediates are in memory for one tile at a time.
//!
//! It has no kernel of its own: it loops over other ops, in forward and in backward.

use candle_core::{DType, Result, Shape, Tensor, bail};

use crate::cost::{Cost, bytes};
use crate::in_place::copy_into;
use crate::recording::{OpInput, is_recording, no_grad, record, requires_grad};
use crate::saved::SavedOutputs;
use crate::span::span;
use crate::tape::Tape;

/// Computes y = f(x) tile by tile; row i of y may depend only on row i of x and on weights.
///
/// `f` gets `tile_rows` rows of x (the last tile may be shorter) and the index of the first. Everything that it records
/// is freed before the next tile.
///
/// Backward runs `f` again on each tile and differentiates it. Weight gradients of the tiles add up in the sinks.
pub fn tiled(x: &Tensor, tile_rows: usize, f: impl Fn(&Tensor, usize) -> Result<Tensor> + 'static) -> Result<Tensor> {
    let _span = span("tiled", "forward");
    if tile_rows == 0 {
        bail!("tiled: want at least one row in a tile, got 0")
    }
    let tiled = Tiled { x: x.clone(), tile_rows, f };
    let (y, trains_weights) = tiled.forward()?;
    let inside = if trains_weights { OpInput::InnerWeights } else { OpInput::Activation(x) };
    let wants_dx = requires_grad(x);
    Ok(record("tiled", [x.into(), inside], y, move |dy, _| Ok([tiled.backward(dy, wants_dx)?, None])))
}

/// Returns the rows per tile, as in ArcticTraining: the fewest tiles of at most `width` rows, equal except for the
/// last.
pub fn tile_rows(n_rows: usize, width: usize) -> usize {
    n_rows.div_ceil(n_rows.div_ceil(width.max(1)).max(1)).max(1)
}

/// Sizes of a tiled function x [n, width] -> y [n, width], for its cost. The cost excludes the ops inside.
#[derive(Clone, Copy, Debug)]
pub struct TiledCost {
    /// n, the number of rows.
    pub n_rows: u64,
    /// Number of rows per tile.
    pub tile_rows: u64,
    /// Number of columns of x and y.
    pub width: u64,
    /// Dtype of x and y.
    pub dtype: DType,
}

impl TiledCost {
    /// Returns the cost of the forward: x is saved; the output of a tile is copied into y.
    pub fn forward(&self) -> Cost {
        let Self { n_rows, width, .. } = *self;
        Cost { saved_bytes: bytes(n_rows * width, self.dtype), scratch_bytes: self.tile_bytes(), flops: 0 }
    }

    /// Returns the cost of the backward: the output of a tile and the gradient of its input.
    pub fn backward(&self) -> Cost {
        Cost { scratch_bytes: 2 * self.tile_bytes(), ..Cost::default() }
    }

    fn tile_bytes(&self) -> u64 {
        bytes(self.tile_rows * self.width, self.dtype)
    }
}

struct Tiled<F> {
    x: Tensor,
    tile_rows: usize,
    f: F,
}

impl<F: Fn(&Tensor, usize) -> Result<Tensor>> Tiled<F> {
    /// Returns y, and true if f has trainable weights.
    fn forward(&self) -> Result<(Tensor, bool)> {
        let (mut y, mut trains_weights) = (None, false);
        for (first, n_rows) in self.tiles()? {
            let run = || (self.f)(&self.x.narrow(0, first, n_rows)?, first);
            let tile = if y.is_none() && is_recording() {
                let tape = Tape::record(&[], run)?;
                trains_weights = !tape.is_empty();
                tape.output().clone()
            } else {
                no_grad(run)?
            };
            let y = match &y {
                Some(y) => y,
                None => y.insert(self.output_like(&tile, n_rows)?),
            };
            copy_into(&y.narrow(0, first, n_rows)?, &tile)?;
        }
        let y = y.expect("there is at least one tile");
        Ok((y, trains_weights))
    }

    /// Returns dx; each tile's backward computes its own rows.
    fn backward(&self, dy: &Tensor, wants_dx: bool) -> Result<Option<Tensor>> {
        let dx = wants_dx.then(|| Tensor::zeros(self.x.shape(), self.x.dtype(), self.x.device())).transpose()?;
        for (first, n_rows) in self.tiles()? {
            let rows = self.x.narrow(0, first, n_rows)?;
            let inputs: &[&Tensor] = if wants_dx { &[&rows] } else { &[] };
            let tape = Tape::replay(SavedOutputs::default(), inputs, || (self.f)(&rows, first))?;
            let grads = tape.backward(&dy.narrow(0, first, n_rows)?)?;
            if let (Some(dx), Some(grad)) = (&dx, grads.get(&rows)) {
                copy_into(&dx.narrow(0, first, n_rows)?, grad)?;
            }
        }
        Ok(dx)
    }

    /// Returns the first row and the number of rows of each tile. Without rows there is one empty tile, from which y's
    /// shape follows.
    fn tiles(&self) -> Result<impl Iterator<Item = (usize, usize)>> {
        let (n_rows, tile_rows) = (self.x.dim(0)?, self.tile_rows);
        let firsts = (0..n_rows.max(1)).step_by(tile_rows);
        Ok(firsts.map(move |first| (first, tile_rows.min(n_rows - first))))
    }

    fn output_like(&self, tile: &Tensor, n_rows: usize) -> Result<Tensor> {
        if tile.dims().first() != Some(&n_rows) {
            bail!("tiled: want a row for each of {n_rows} rows, got shape {:?}", tile.dims())
        }
        let mut shape = tile.dims().to_vec();
        shape[0] = self.x.dim(0)?;
        Tensor::zeros(Shape::from(shape), tile.dtype(), tile.device())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_are_no_longer_than_the_model_is_wide_and_of_one_size() {
        assert_eq!([0, 1, 32, 33, 75, 96, 97].map(|n_tokens| tile_rows(n_tokens, 32)), [1, 1, 32, 17, 25, 32, 25]);
    }
}
