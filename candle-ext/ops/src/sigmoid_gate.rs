//! Gate of a shared expert: y = x * sigmoid(gate), one gate per row.

use candle_core::{D, DType, Result, Tensor, bail};

use crate::recording::{record, requires_grad, save};

/// Computes y = x * sigmoid(gate), with x [t, d] and gate [t, 1]. It computes in f32 and rounds once.
///
/// # Errors
///
/// If the shapes do not match.
pub fn sigmoid_gate(x: &Tensor, gate: &Tensor) -> Result<Tensor> {
    if x.rank() != 2 || gate.dims() != [x.dims()[0], 1] {
        bail!("sigmoid_gate: want x [t, d] and a gate [t, 1], got {:?} and {:?}", x.dims(), gate.dims())
    }
    let factor = sigmoid(&gate.to_dtype(DType::F32)?)?;
    let y = x.to_dtype(DType::F32)?.broadcast_mul(&factor)?.to_dtype(x.dtype())?;
    let (dtype, gate_dtype, saved) = (x.dtype(), gate.dtype(), requires_grad(gate).then(|| save(x)));
    Ok(record("sigmoid_gate", [x.into(), gate.into()], y, move |dy, _| {
        let dy = dy.to_dtype(DType::F32)?;
        let dx = dy.broadcast_mul(&factor)?.to_dtype(dtype)?;
        let d_gate = saved.map(|x| {
            let d_factor = (dy * x.get()?.to_dtype(DType::F32)?)?.sum_keepdim(D::Minus1)?;
            let slope = (&factor * factor.affine(-1.0, 1.0)?)?;
            (d_factor * slope)?.to_dtype(gate_dtype)
        });
        Ok([Some(dx), d_gate.transpose()?])
    }))
}

fn sigmoid(x: &Tensor) -> Result<Tensor> {
    x.neg()?.exp()?.affine(1.0, 1.0)?.recip()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::Tape;

    fn values(t: &Tensor) -> Vec<f32> {
        t.flatten_all().unwrap().to_vec1().unwrap()
    }

    #[test]
    fn gradients_equal_finite_differences() {
        let tensor = |values: &[f32], shape: (usize, usize)| Tensor::from_slice(values, shape, &Device::Cpu).unwrap();
        let (x, gate) = (tensor(&[0.5, -1.0, 2.0, 0.3, 0.7, -0.2], (3, 2)), tensor(&[0.4, -2.0, 1.5], (3, 1)));
        let dy = tensor(&[1.0, 0.5, -0.3, 0.8, 0.2, -1.0], (3, 2));
        let tape = Tape::record(&[&x, &gate], || sigmoid_gate(&x, &gate)).unwrap();
        let grads = tape.backward(&dy).unwrap();
        let objective = |x: &Tensor, gate: &Tensor| -> f64 {
            let y = values(&sigmoid_gate(x, gate).unwrap());
            y.iter().zip(values(&dy)).map(|(y, dy)| f64::from(y * dy)).sum()
        };
        for (input, is_gate) in [(&x, false), (&gate, true)] {
            let ours = values(grads.get(input).unwrap());
            for (i, ours) in ours.iter().enumerate() {
                let shifted = |by: f32| {
                    let mut moved = values(input);
                    moved[i] += by;
                    let moved = Tensor::from_vec(moved, input.shape(), &Device::Cpu).unwrap();
                    if is_gate { objective(&x, &moved) } else { objective(&moved, &gate) }
                };
                let difference = (shifted(1e-2) - shifted(-1e-2)) / 2e-2;
                assert!((f64::from(*ours) - difference).abs() < 1e-3, "{is_gate} {i}: {ours} {difference}");
            }
        }
    }

    #[test]
    fn a_gate_of_another_height_is_refused() {
        let x = Tensor::zeros((3, 2), DType::F32, &Device::Cpu).unwrap();
        assert!(sigmoid_gate(&x, &x).unwrap_err().to_string().contains("want x [t, d] and a gate [t, 1]"));
    }
}
