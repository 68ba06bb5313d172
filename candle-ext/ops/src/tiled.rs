//! A function of rows, computed tile by tile: what it needs inside is in memory for one tile at a time.
//!
//! It has no kernel: it is a loop around other ops, once for forward and once for backward.

use candle_core::{DType, Result, Shape, Tensor, Var, bail};

use crate::in_place::copy_into;
use crate::span::span;
use crate::storage::take_storage;
use crate::tape::{cotangent, record};

/// y = f(x), where row i of y depends on nothing but row i of x and on weights.
///
/// `f` gets `tile_rows` rows of x at a time (the last tile may be shorter) with the index of the first of them, and is
/// dropped with everything it recorded before the next tile begins. Backward runs it again on each tile and takes that
/// tile's vjp. Gradients of weights leave through their sinks, where the sums of the tiles add up.
pub fn tiled(
    x: &Tensor,
    tile_rows: usize,
    f: impl Fn(&Tensor, usize) -> Result<Tensor> + Send + Sync + 'static,
) -> Result<Tensor> {
    let _span = span("tiled", "forward");
    if tile_rows == 0 {
        bail!("tiled: want at least one row in a tile, got 0")
    }
    let tiled = Tiled { x: x.detach(), tile_rows, f };
    let (y, trains_weights) = tiled.forward()?;
    if !x.track_op() && !trains_weights {
        return Ok(y);
    }
    // Keeps the op on the tape where weights inside of f want their gradients and nothing before it does.
    let anchor = Var::zeros((), DType::F32, x.device())?;
    let (wants_dx, shape) = (x.track_op(), y.shape().clone());
    record("tiled", [x, anchor.as_tensor()], (take_storage(y)?, shape), move |_, dy| {
        Ok([tiled.backward(dy, wants_dx)?, None])
    })
}

struct Tiled<F> {
    x: Tensor,
    tile_rows: usize,
    f: F,
}

impl<F: Fn(&Tensor, usize) -> Result<Tensor>> Tiled<F> {
    /// Returns y, untracked, and whether f recorded anything for its weights' sake.
    fn forward(&self) -> Result<(Tensor, bool)> {
        let (mut y, mut trains_weights) = (None, false);
        for (first, n_rows) in self.tiles()? {
            let tile = (self.f)(&self.x.narrow(0, first, n_rows)?, first)?;
            trains_weights |= tile.track_op();
            let y = match &y {
                Some(y) => y,
                None => y.insert(self.output_like(&tile, n_rows)?),
            };
            copy_into(&y.narrow(0, first, n_rows)?, &tile)?;
        }
        let y = y.expect("there is at least one tile");
        Ok((y, trains_weights))
    }

    /// Returns dx = sum over tiles of the tiles' vjps: each writes rows of its own.
    fn backward(&self, dy: &Tensor, wants_dx: bool) -> Result<Option<Tensor>> {
        let dx = wants_dx.then(|| Tensor::zeros(self.x.shape(), self.x.dtype(), self.x.device())).transpose()?;
        for (first, n_rows) in self.tiles()? {
            let rows = self.x.narrow(0, first, n_rows)?;
            let leaf = if wants_dx { Var::from_tensor(&rows)?.into_inner() } else { rows };
            let tile = (self.f)(&leaf, first)?;
            let mut grads = cotangent(&tile, &dy.narrow(0, first, n_rows)?)?.backward()?;
            if let (Some(dx), Some(grad)) = (&dx, grads.remove(&leaf)) {
                copy_into(&dx.narrow(0, first, n_rows)?, &grad)?;
            }
        }
        Ok(dx)
    }

    /// The first row and the number of rows of each tile. Without rows there is one empty tile, which tells y's shape.
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
