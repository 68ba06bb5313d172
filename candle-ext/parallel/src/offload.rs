//! An activation parked outside the heap: on CPU, in an unlinked temporary file.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::os::unix::fs::FileExt;

use candle_core::{DType, Device, Result, Tensor};

/// A tensor that was written out. Its memory is given back; [`Parked::fetch`] reads it in again, bit for bit.
pub(crate) struct Parked {
    file: File,
    shape: Vec<usize>,
    dtype: DType,
    device: Device,
}

impl Parked {
    /// Writes `x` to a temporary file that vanishes with this value.
    pub(crate) fn park(x: &Tensor) -> Result<Self> {
        let mut writer = BufWriter::with_capacity(1 << 20, tempfile::tempfile()?);
        x.write_bytes(&mut writer)?;
        writer.flush()?;
        let file = writer.into_inner().map_err(|e| e.into_error())?;
        Ok(Self { file, shape: x.dims().to_vec(), dtype: x.dtype(), device: x.device().clone() })
    }

    /// Reads the tensor back.
    pub(crate) fn fetch(&self) -> Result<Tensor> {
        let n_bytes = self.shape.iter().product::<usize>() * self.dtype.size_in_bytes();
        let mut bytes = vec![0; n_bytes];
        self.file.read_exact_at(&mut bytes, 0)?;
        Tensor::from_raw_buffer(&bytes, self.dtype, &self.shape, &self.device)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn check(x: Tensor) {
        let back = Parked::park(&x).unwrap().fetch().unwrap();
        assert_eq!((back.dims(), back.dtype()), (x.dims(), x.dtype()));
        let flat = |t: &Tensor| t.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(flat(&back), flat(&x));
    }

    #[test]
    fn a_parked_activation_comes_back_unchanged() {
        let x = Tensor::arange(0f32, 24.0, &Device::Cpu).unwrap().reshape((4, 6)).unwrap();
        check(x.clone());
        check(x.to_dtype(DType::BF16).unwrap());
        check(x.to_dtype(DType::F16).unwrap());
        check(x.narrow(0, 1, 2).unwrap().t().unwrap());
        check(Tensor::zeros((0, 6), DType::F32, &Device::Cpu).unwrap());
    }
}
