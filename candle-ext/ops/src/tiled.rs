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
    let tiled = Tiled::new([x], tile_rows, move |[x]: [&Tensor; 1], first| f(x, first))?;
    let (y, inside) = tiled.forward()?;
    let wanted = tiled.wanted();
    Ok(record("tiled", [x.into(), inside.input(x)], y, move |dy, _| {
        let [dx] = tiled.backward(dy, wanted)?;
        Ok([dx, None])
    }))
}

/// Computes y = f(x, weights) tile by tile, like [`tiled`]: row i of y may also depend on row i of `weights`.
pub fn tiled_with_weights(
    x: &Tensor,
    row_weights: &Tensor,
    tile_rows: usize,
    f: impl Fn([&Tensor; 2], usize) -> Result<Tensor> + 'static,
) -> Result<Tensor> {
    let _span = span("tiled", "forward");
    let tiled = Tiled::new([x, row_weights], tile_rows, f)?;
    let (y, inside) = tiled.forward()?;
    let wanted = tiled.wanted();
    Ok(record("tiled", [x.into(), row_weights.into(), inside.input(x)], y, move |dy, _| {
        let [dx, d_weights] = tiled.backward(dy, wanted)?;
        Ok([dx, d_weights, None])
    }))
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

/// A function of the rows of N inputs.
struct Tiled<F, const N: usize> {
    inputs: [Tensor; N],
    tile_rows: usize,
    f: F,
}

/// Presence of trainable weights inside of the function.
#[derive(Clone, Copy)]
enum InnerWeights {
    None,
    Trainable,
}

impl InnerWeights {
    /// Returns the last input of the recorded op. Without weights it is the first input again, which adds nothing.
    fn input(self, x: &Tensor) -> OpInput<'_> {
        match self {
            Self::Trainable => OpInput::InnerWeights,
            Self::None => OpInput::Activation(x),
        }
    }
}

impl<const N: usize, F: Fn([&Tensor; N], usize) -> Result<Tensor>> Tiled<F, N> {
    fn new(inputs: [&Tensor; N], tile_rows: usize, f: F) -> Result<Self> {
        if tile_rows == 0 {
            bail!("tiled: want at least one row in a tile, got 0")
        }
        Ok(Self { inputs: inputs.map(Tensor::clone), tile_rows, f })
    }

    /// Returns true for each input whose gradient is wanted.
    fn wanted(&self) -> [bool; N] {
        self.inputs.each_ref().map(requires_grad)
    }

    fn forward(&self) -> Result<(Tensor, InnerWeights)> {
        let (mut y, mut inside) = (None, InnerWeights::None);
        for (first, n_rows) in self.tiles()? {
            let run = || {
                let rows = self.rows(first, n_rows)?;
                (self.f)(rows.each_ref(), first)
            };
            let tile = if y.is_none() && is_recording() {
                let tape = Tape::record(&[], run)?;
                inside = if tape.is_empty() { InnerWeights::None } else { InnerWeights::Trainable };
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
        Ok((y.expect("there is at least one tile"), inside))
    }

    /// Returns the wanted gradients of the inputs; each tile's backward computes its own rows.
    fn backward(&self, dy: &Tensor, wanted: [bool; N]) -> Result<[Option<Tensor>; N]> {
        let zeros = |x: &Tensor| Tensor::zeros(x.shape(), x.dtype(), x.device());
        let mut grads = [const { None }; N];
        for ((grad, input), _) in grads.iter_mut().zip(&self.inputs).zip(wanted).filter(|(_, is_wanted)| *is_wanted) {
            *grad = Some(zeros(input)?);
        }
        for (first, n_rows) in self.tiles()? {
            let rows = self.rows(first, n_rows)?;
            let tracked: Vec<&Tensor> =
                rows.iter().zip(wanted).filter(|(_, is_wanted)| *is_wanted).map(|it| it.0).collect();
            let tape = Tape::replay(SavedOutputs::default(), &tracked, || (self.f)(rows.each_ref(), first))?;
            let of_tile = tape.backward(&dy.narrow(0, first, n_rows)?)?;
            for (grad, rows) in grads.iter().zip(&rows) {
                if let (Some(grad), Some(of_rows)) = (grad, of_tile.get(rows)) {
                    copy_into(&grad.narrow(0, first, n_rows)?, of_rows)?;
                }
            }
        }
        Ok(grads)
    }

    /// Returns these rows of each input.
    fn rows(&self, first: usize, n_rows: usize) -> Result<[Tensor; N]> {
        let mut rows = self.inputs.clone();
        for input in &mut rows {
            *input = input.narrow(0, first, n_rows)?;
        }
        Ok(rows)
    }

    /// Returns the first row and the number of rows of each tile. Without rows there is one empty tile, from which y's
    /// shape follows.
    fn tiles(&self) -> Result<impl Iterator<Item = (usize, usize)>> {
        let (n_rows, tile_rows) = (self.inputs[0].dim(0)?, self.tile_rows);
        let firsts = (0..n_rows.max(1)).step_by(tile_rows);
        Ok(firsts.map(move |first| (first, tile_rows.min(n_rows - first))))
    }

    fn output_like(&self, tile: &Tensor, n_rows: usize) -> Result<Tensor> {
        if tile.dims().first() != Some(&n_rows) {
            bail!("tiled: want a row for each of {n_rows} rows, got shape {:?}", tile.dims())
        }
        let mut shape = tile.dims().to_vec();
        shape[0] = self.inputs[0].dim(0)?;
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
