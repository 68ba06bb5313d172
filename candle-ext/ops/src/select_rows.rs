//! Rows of a matrix by index, such as the tokens of a batch without its padding.

use candle_core::{DType, Result, Tensor, bail};

use crate::recording::record;

/// Selects rows: x [t, d] and u32 indices [n] -> [n, d]. An index may occur more than once.
pub fn select_rows(x: &Tensor, rows: &Tensor) -> Result<Tensor> {
    if x.rank() != 2 || rows.rank() != 1 || rows.dtype() != DType::U32 {
        bail!(
            "select_rows: want x [t, d] and u32 indices [n], got {:?} and {:?} {:?}",
            x.dims(),
            rows.dtype(),
            rows.dims()
        )
    }
    if rows.dims() == [0] {
        return x.narrow(0, 0, 0);
    }
    let y = x.contiguous()?.index_select(rows, 0)?;
    let (shape, dtype, device, rows) = (x.shape().clone(), x.dtype(), x.device().clone(), rows.clone());
    Ok(record("select_rows", [x.into()], y, move |dy, _| {
        Ok([Some(Tensor::zeros(shape, dtype, &device)?.index_add(&rows, dy, 0)?)])
    }))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::Tape;

    #[test]
    fn a_gradient_returns_to_its_row() {
        let x = Tensor::arange(0f32, 8.0, &Device::Cpu).unwrap().reshape((4, 2)).unwrap();
        let rows = Tensor::new(&[3u32, 0, 3], &Device::Cpu).unwrap();
        let tape = Tape::record(&[&x], || select_rows(&x, &rows)).unwrap();
        assert_eq!(tape.output().to_vec2::<f32>().unwrap(), [[6.0, 7.0], [0.0, 1.0], [6.0, 7.0]]);
        let dy = Tensor::new(&[[1f32, 2.0], [3.0, 4.0], [5.0, 6.0]], &Device::Cpu).unwrap();
        let dx = tape.backward(&dy).unwrap().remove(&x).unwrap();
        assert_eq!(dx.to_vec2::<f32>().unwrap(), [[3.0, 4.0], [0.0, 0.0], [0.0, 0.0], [6.0, 8.0]]);
    }

    #[test]
    fn no_rows_are_an_empty_matrix() {
        let (x, rows) = (Tensor::zeros((4, 2), DType::F32, &Device::Cpu), Tensor::new(&[0u32; 0], &Device::Cpu));
        assert_eq!(select_rows(&x.unwrap(), &rows.unwrap()).unwrap().dims(), [0, 2]);
    }
}
