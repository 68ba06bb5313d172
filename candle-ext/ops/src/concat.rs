//! Concatenation of the columns of two matrices.

use candle_core::{Result, Tensor, bail};

use crate::recording::record;

/// Concatenates columns: [t, a] and [t, b] -> [t, a + b].
pub fn concat(x: &Tensor, y: &Tensor) -> Result<Tensor> {
    let (&[n_rows, a], &[other, b]) = (x.dims(), y.dims()) else {
        bail!("concat: want matrices, got {:?} and {:?}", x.dims(), y.dims())
    };
    if n_rows != other {
        bail!("concat: {n_rows} and {other} rows")
    }
    let joined = Tensor::cat(&[x, y], 1)?;
    Ok(record("concat", [x.into(), y.into()], joined, move |dy, _| {
        Ok([Some(dy.narrow(1, 0, a)?.contiguous()?), Some(dy.narrow(1, a, b)?.contiguous()?)])
    }))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::Tape;

    fn matrix<const N: usize>(values: &[[f32; 2]; N]) -> Tensor {
        Tensor::new(values, &Device::Cpu).unwrap()
    }

    #[test]
    fn a_gradient_is_split_at_the_columns() {
        let (x, y) = (matrix(&[[1.0, 2.0], [3.0, 4.0]]), matrix(&[[5.0, 6.0], [7.0, 8.0]]));
        let tape = Tape::record(&[&x, &y], || concat(&x, &y)).unwrap();
        let joined = [[1f32, 2.0, 5.0, 6.0], [3.0, 4.0, 7.0, 8.0]];
        assert_eq!(tape.output().to_vec2::<f32>().unwrap(), joined);
        let dy = Tensor::new(&[[0.1f32, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8]], &Device::Cpu).unwrap();
        let mut grads = tape.backward(&dy).unwrap();
        assert_eq!(grads.remove(&x).unwrap().to_vec2::<f32>().unwrap(), [[0.1, 0.2], [0.5, 0.6]]);
        assert_eq!(grads.remove(&y).unwrap().to_vec2::<f32>().unwrap(), [[0.3, 0.4], [0.7, 0.8]]);
    }

    #[test]
    fn different_numbers_of_rows_are_an_error() {
        let error = concat(&matrix(&[[1.0, 2.0]]), &matrix(&[[1.0, 2.0], [3.0, 4.0]])).unwrap_err().to_string();
        assert!(error.contains("1 and 2 rows"), "{error}");
    }
}
