//! Sum of a matrix and a narrower one, such as the gate and up projections of experts and an adapter of one of them.

use candle_core::{Result, Tensor, bail};

use crate::recording::record;

/// Adds z [n, w] to the columns `first_column..first_column + w` of y [n, m].
///
/// The gradient of z is those columns of the gradient.
pub fn add_columns(y: &Tensor, z: &Tensor, first_column: usize) -> Result<Tensor> {
    let (&[n, m], &[n_z, w]) = (y.dims(), z.dims()) else {
        bail!("add_columns: want two matrices, got {:?} and {:?}", y.dims(), z.dims())
    };
    let end = first_column + w;
    if n != n_z || end > m || y.dtype() != z.dtype() {
        let (of_y, of_z) = (y.dtype(), z.dtype());
        bail!("add_columns: {of_z:?} [{n_z}, {w}] at column {first_column} does not fit into {of_y:?} [{n}, {m}]")
    }
    let middle = (y.narrow(1, first_column, w)? + z)?;
    let sum = Tensor::cat(&[&y.narrow(1, 0, first_column)?, &middle, &y.narrow(1, end, m - end)?], 1)?;
    Ok(record("add_columns", [y.into(), z.into()], sum, move |dy, _| {
        Ok([Some(dy.clone()), Some(dy.narrow(1, first_column, w)?.contiguous()?)])
    }))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;
    use crate::Tape;

    fn matrix(n_rows: usize, n_columns: usize) -> Tensor {
        let values = Tensor::arange(1f32, (n_rows * n_columns + 1) as f32, &Device::Cpu).unwrap();
        values.reshape((n_rows, n_columns)).unwrap()
    }

    #[track_caller]
    fn check(first_column: usize, want: [[f32; 3]; 2], want_dz: [[f32; 2]; 2]) {
        let (y, z) = (matrix(2, 3), (matrix(2, 2) * 10.0).unwrap());
        let tape = Tape::record(&[&y, &z], || add_columns(&y, &z, first_column)).unwrap();
        assert_eq!(tape.output().to_vec2::<f32>().unwrap(), want);
        let dy = matrix(2, 3);
        let mut grads = tape.backward(&dy).unwrap();
        assert_eq!(grads.remove(&y).unwrap().to_vec2::<f32>().unwrap(), dy.to_vec2::<f32>().unwrap());
        assert_eq!(grads.remove(&z).unwrap().to_vec2::<f32>().unwrap(), want_dz);
    }

    #[test]
    fn columns_add_and_their_gradient_returns() {
        check(0, [[11.0, 22.0, 3.0], [34.0, 45.0, 6.0]], [[1.0, 2.0], [4.0, 5.0]]);
        check(1, [[1.0, 12.0, 23.0], [4.0, 35.0, 46.0]], [[2.0, 3.0], [5.0, 6.0]]);
    }

    #[test]
    fn no_rows_are_an_empty_sum() {
        let empty = |width| Tensor::zeros((0, width), DType::F32, &Device::Cpu).unwrap();
        assert_eq!(add_columns(&empty(3), &empty(2), 1).unwrap().dims(), [0, 3]);
    }

    #[test]
    fn columns_that_do_not_fit_are_refused() {
        let message = add_columns(&matrix(2, 3), &matrix(2, 2), 2).unwrap_err().to_string();
        assert!(message.contains("F32 [2, 2] at column 2 does not fit into F32 [2, 3]"), "{message}");
        assert!(add_columns(&matrix(2, 3), &matrix(1, 2), 0).is_err());
    }
}
