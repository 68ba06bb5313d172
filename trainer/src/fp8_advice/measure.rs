//! Times of linear layers with and without FP8, on random data.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor, bail};
use candlewick_model::swiglu_mlp;
use candlewick_ops::{
    FlatBuffer, Fp8Config, Fp8Layers, Fp8Module, GradSink, NormCall, OutputDtype, Tape, Weight, fp8_normed_linears,
    fp8_normed_swiglu_mlp, linear, no_grad, record, rms_norm,
};

use super::units::{LinearSize, MeasuredUnit, SharedInputLinears};

/// Rounds of a measurement, after one that is not counted. Both sides take turns.
const ROUNDS: usize = 5;
const NORM_EPS: f64 = 1e-6;

/// Conditions of all measurements.
#[derive(Clone, Copy)]
pub(super) struct LayerMeasurement<'a> {
    pub(super) n_tokens: usize,
    pub(super) dtype: DType,
    /// True if the weights are trained.
    pub(super) is_trained: bool,
    /// True if MLPs and projections read the output of a norm. Tensor parallel ranks exchange it before.
    pub(super) reads_norm: bool,
    pub(super) config: Fp8Config,
    pub(super) device: &'a Device,
}

/// Milliseconds of forward and backward of a micro-batch.
pub(super) struct LayerTimes {
    pub(super) dense_ms: f64,
    pub(super) fp8_ms: f64,
}

impl LayerMeasurement<'_> {
    /// Measures a unit. Its norm is computed on both sides, because a GPU quantizes its output as it computes it.
    pub(super) fn of(&self, unit: &MeasuredUnit) -> Result<LayerTimes> {
        let sizes = unit.sizes();
        let weight = Weight::frozen(Tensor::ones(sizes[0].n_in, self.dtype, self.device)?);
        let norm = self.reads_norm.then_some(&weight);
        match unit {
            MeasuredUnit::Mlp { .. } => self.run(&sizes, |x, weights| {
                let [gate, up, down] = weights else { bail!("an MLP has {} layers", sizes.len()) };
                mlp(x, norm, [gate, up, down])
            }),
            MeasuredUnit::SharedInput(linears) => {
                let grads = self.grads(&sizes)?;
                self.run(&sizes, |x, weights| group(x, norm, weights, linears, &grads))
            }
            MeasuredUnit::Single(_) => {
                self.run(&sizes, |x, weights| linear(x, &weights[0], None, OutputDtype::SameAsInput))
            }
        }
    }

    /// Measures `compute`, a function of the input of the first layer and of the weights, in the dtype and in FP8.
    fn run(
        &self,
        sizes: &[LinearSize],
        compute: impl Fn(&Tensor, &[Weight]) -> candle_core::Result<Tensor>,
    ) -> Result<LayerTimes> {
        let (buffer, weights) = self.weights(sizes)?;
        let (layers, fp8_weights) = self.in_fp8(sizes, &weights)?;
        let x = self.random((self.n_tokens, sizes[0].n_in))?;
        let dy = self.random(no_grad(|| compute(&x, &weights))?.dims2()?)?;
        let time = |weights: &[Weight]| -> Result<f64> {
            buffer.drop_fp8_copies();
            // Each run is a step of its own: codes of an earlier one would save a quantization.
            debug_assert!(!layers.is_enabled(), "FP8 is on before the step");
            let _on = layers.enable(0)?;
            self.device.synchronize()?;
            let started = Instant::now();
            let tape = Tape::record(&[&x], || compute(&x, weights))?;
            tape.backward(&dy)?;
            self.device.synchronize()?;
            Ok(started.elapsed().as_secs_f64() * 1e3)
        };
        let mut times = [Vec::new(), Vec::new()];
        for round in 0..=ROUNDS {
            let pair = [time(&weights)?, time(&fp8_weights)?];
            if round > 0 {
                times.iter_mut().zip(pair).for_each(|(times, time)| times.push(time));
            }
        }
        let [dense_ms, fp8_ms] = times.map(median);
        Ok(LayerTimes { dense_ms, fp8_ms })
    }

    /// Returns adjacent weights as in a unit of a run, and the buffer of their values.
    fn weights(&self, sizes: &[LinearSize]) -> Result<(FlatBuffer, Vec<Weight>)> {
        let n = sizes.iter().map(|size| size.n_out * size.n_in).sum();
        let values = FlatBuffer::from_tensor(self.random((n, 1))?.flatten_all()?);
        let grads = FlatBuffer::from_tensor(Tensor::zeros(n, DType::F32, self.device)?);
        let mut start = 0;
        let weight = |size: &LinearSize| {
            let [value, grad] = [&values, &grads].map(|buffer| buffer.view(start, (size.n_out, size.n_in)));
            start += size.n_out * size.n_in;
            Ok(match self.is_trained {
                true => Weight::trainable(value?, GradSink::new(grad?)?),
                false => Weight::frozen(value?),
            })
        };
        let weights = sizes.iter().map(weight).collect::<Result<_>>()?;
        Ok((values, weights))
    }

    /// Returns the same weights, of which some are those of FP8 layers.
    fn in_fp8(&self, sizes: &[LinearSize], weights: &[Weight]) -> Result<(Arc<Fp8Layers>, Vec<Weight>)> {
        let modules = (0..weights.len()).map(|i| Fp8Module::linear(i.to_string())).collect();
        let layers = Fp8Layers::new(self.config, modules, self.device)?;
        if let Some(amaxes) = layers.amaxes() {
            // In its first step delayed scaling reads each tensor twice.
            layers.update(&amaxes.ones_like()?)?;
        }
        let layers = Arc::new(layers);
        let with_layer = |(i, (size, weight)): (usize, (&LinearSize, &Weight))| {
            let layer = layers.layer(&i.to_string()).context("the layer has its name")?;
            Ok(if size.fp8 { weight.clone().with_fp8(layer) } else { weight.clone() })
        };
        let weights = sizes.iter().zip(weights).enumerate().map(with_layer).collect::<Result<_>>()?;
        Ok((layers, weights))
    }

    /// Returns gradients of the outputs of layers, and of their joined output.
    fn grads(&self, sizes: &[LinearSize]) -> Result<(Vec<Tensor>, Tensor)> {
        let apart = sizes.iter().map(|size| self.random((self.n_tokens, size.n_out))).collect::<Result<_>>()?;
        Ok((apart, self.random((self.n_tokens, sizes.iter().map(|size| size.n_out).sum()))?))
    }

    fn random(&self, shape: (usize, usize)) -> Result<Tensor> {
        Ok(Tensor::randn(0f32, 1f32, shape, self.device)?.to_dtype(self.dtype)?)
    }
}

fn norm_call<'a>(x: &'a Tensor, weight: &'a Weight) -> NormCall<'a> {
    NormCall { x, plus: None, weight, eps: NORM_EPS }
}

/// Returns the norm of x, or x if layers do not read a norm.
fn normed(x: &Tensor, norm: Option<&Weight>) -> candle_core::Result<Tensor> {
    norm.map_or_else(|| Ok(x.clone()), |weight| rms_norm(x, weight, NORM_EPS))
}

/// Computes an MLP as the decoder layer does.
fn mlp(x: &Tensor, norm: Option<&Weight>, weights: [&Weight; 3]) -> candle_core::Result<Tensor> {
    if let Some(norm) = norm
        && let Some([_, y]) = fp8_normed_swiglu_mlp(norm_call(x, norm), weights)?
    {
        return Ok(y);
    }
    swiglu_mlp(&normed(x, norm)?, weights)
}

/// Computes layers that read one tensor as the decoder layer does. Their backward starts from `grads`.
fn group(
    x: &Tensor,
    norm: Option<&Weight>,
    weights: &[Weight],
    linears: &SharedInputLinears,
    (grads, joined_grad): &(Vec<Tensor>, Tensor),
) -> candle_core::Result<Tensor> {
    let end = Tensor::zeros((1, 1), x.dtype(), x.device())?;
    let ends = |outputs: &[Tensor]| outputs.iter().zip(grads).try_fold(end.clone(), |end, (y, dy)| end_of(end, y, dy));
    if let ([q, k, v], Some(norm), true) = (weights, norm, linears.quantize_norm)
        && let Some((_, outputs)) = fp8_normed_linears(norm_call(x, norm), [(q, None), (k, None), (v, None)])?
    {
        return ends(&outputs);
    }
    let x = normed(x, norm)?;
    let multiply = |w: &Weight| linear(&x, w, None, OutputDtype::SameAsInput);
    let joined = if linears.join { Weight::joined(&weights.iter().collect::<Vec<_>>(), &x) } else { None };
    match joined {
        Some(joined) => end_of(end.clone(), &multiply(&joined)?, joined_grad),
        None => ends(&weights.iter().map(multiply).collect::<candle_core::Result<Vec<_>>>()?),
    }
}

/// Returns a new `end` whose backward gives y the gradient dy.
fn end_of(end: Tensor, y: &Tensor, dy: &Tensor) -> candle_core::Result<Tensor> {
    let (next, dy) = (end.reshape(end.shape())?, dy.clone());
    Ok(record("end", [y.into(), (&end).into()], next, move |of_end, _| Ok([Some(dy), Some(of_end.clone())])))
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use candlewick_ops::{Fp8Formats, Fp8Recipe, Fp8Rounding, ScaleRule};

    use super::*;

    const SIZES: [LinearSize; 3] = [
        LinearSize { n_out: 64, n_in: 32, fp8: true },
        LinearSize { n_out: 16, n_in: 32, fp8: false },
        LinearSize { n_out: 16, n_in: 32, fp8: true },
    ];

    fn measurement() -> LayerMeasurement<'static> {
        let rule = ScaleRule { power_of_two: true, amax_epsilon: 0.0 };
        let config = Fp8Config {
            recipe: Fp8Recipe::Current(rule),
            formats: Fp8Formats::Hybrid,
            gradient_rounding: Fp8Rounding::Nearest,
            fake_quantize: false,
        };
        let (dtype, device) = (DType::F32, &Device::Cpu);
        LayerMeasurement { n_tokens: 48, dtype, is_trained: true, reads_norm: true, config, device }
    }

    /// Returns the gradients of x and of the weights, each as one list.
    fn gradients(x: &Tensor, weights: &[Weight], join: bool, grads: &(Vec<Tensor>, Tensor)) -> Vec<Vec<f32>> {
        let linears = SharedInputLinears { layers: SIZES.to_vec(), join, quantize_norm: true };
        let sinks = || weights.iter().filter_map(Weight::sink);
        sinks().for_each(GradSink::reset);
        let tape = Tape::record(&[x], || group(x, None, weights, &linears, grads)).unwrap();
        let dx = tape.backward(&Tensor::ones((1, 1), DType::F32, &Device::Cpu).unwrap()).unwrap().remove(x).unwrap();
        let of_weights = sinks().map(|sink| sink.grad().unwrap());
        [dx].into_iter().chain(of_weights).map(|grad| grad.flatten_all().unwrap().to_vec1().unwrap()).collect()
    }

    /// Returns the norm of the difference over that of `b`.
    fn difference(a: &[f32], b: &[f32]) -> f32 {
        let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|x| x * x).sum::<f32>().sqrt();
        norm(&mut a.iter().zip(b).map(|(a, b)| a - b)) / norm(&mut b.iter().copied())
    }

    /// Each layer of a group has its gradient of the output, by one matmul or by several.
    #[test]
    fn a_group_has_forward_and_backward_of_each_layer() {
        let measurement = measurement();
        let (_buffer, weights) = measurement.weights(&SIZES).unwrap();
        let x = measurement.random((48, 32)).unwrap();
        let (apart, _) = measurement.grads(&SIZES).unwrap();
        let joined = Tensor::cat(&apart, 1).unwrap();
        let grads = (apart, joined);
        let several = gradients(&x, &weights, false, &grads);
        for (i, (w, dy)) in weights.iter().zip(&grads.0).enumerate() {
            let want = dy.t().unwrap().matmul(&x).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
            assert!(difference(&several[1 + i], &want) < 1e-5, "{:?}", w.dims());
        }
        for (one, several) in gradients(&x, &weights, true, &grads).iter().zip(&several) {
            assert!(difference(one, several) < 1e-5);
        }
    }

    /// A layer of a group that is not in FP8 has the gradients without FP8, and the others have those of FP8.
    #[test]
    fn layers_of_a_group_are_in_fp8_as_their_size_says() {
        let measurement = measurement();
        let (_buffer, weights) = measurement.weights(&SIZES).unwrap();
        let (layers, fp8_weights) = measurement.in_fp8(&SIZES, &weights).unwrap();
        let x = measurement.random((48, 32)).unwrap();
        let grads = measurement.grads(&SIZES).unwrap();
        let dense = gradients(&x, &weights, false, &grads);
        let _on = layers.enable(0).unwrap();
        let fp8 = gradients(&x, &fp8_weights, false, &grads);
        let differences: Vec<f32> = fp8.iter().zip(&dense).map(|(fp8, dense)| difference(fp8, dense)).collect();
        assert_eq!(differences[2], 0.0);
        assert!([0, 1, 3].iter().all(|i| (1e-3..0.2).contains(&differences[*i])), "{differences:?}");
    }

    #[test]
    fn every_unit_is_measured_with_and_without_norm() {
        let single = MeasuredUnit::Single(SIZES[0]);
        let mlp = MeasuredUnit::Mlp { hidden_size: 32, intermediate_size: 48 };
        let linears =
            |join| MeasuredUnit::SharedInput(SharedInputLinears { layers: SIZES.to_vec(), join, quantize_norm: !join });
        let linears = [true, false].map(linears);
        for unit in [single, mlp].into_iter().chain(linears) {
            for reads_norm in [true, false] {
                let times = LayerMeasurement { reads_norm, ..measurement() }.of(&unit).unwrap();
                assert!(times.dense_ms > 0.0 && times.fp8_ms > 0.0, "{unit:?}");
            }
        }
    }
}
