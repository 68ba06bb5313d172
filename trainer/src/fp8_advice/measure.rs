//! Times of linear layers with and without FP8, on random data.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor};
use candlewick_ops::{FlatBuffer, Fp8Config, Fp8Layers, Fp8Module, GradSink, Tape, Weight};

/// Rounds of a measurement, after one that is not counted. Both sides take turns.
const ROUNDS: usize = 5;

/// Layers that are measured together, and the conditions.
#[derive(Clone, Copy)]
pub(super) struct LayerMeasurement<'a> {
    /// Output and input features of each layer. Weights are adjacent, as in a unit of a run.
    pub(super) sizes: &'a [[usize; 2]],
    pub(super) n_tokens: usize,
    pub(super) dtype: DType,
    /// True if the weights are trained.
    pub(super) is_trained: bool,
    pub(super) config: Fp8Config,
    pub(super) device: &'a Device,
}

/// Milliseconds of forward and backward of a micro-batch.
pub(super) struct LayerTimes {
    pub(super) dense_ms: f64,
    pub(super) fp8_ms: f64,
}

impl LayerMeasurement<'_> {
    /// Measures `compute`, a function of the input of the first layer and of the weights, in the dtype and in FP8.
    pub(super) fn run(
        &self,
        compute: impl Fn(&Tensor, &[Weight]) -> candle_core::Result<Tensor>,
    ) -> Result<LayerTimes> {
        let (buffer, weights) = self.weights()?;
        let (layers, fp8_weights) = self.in_fp8(&weights)?;
        let n_out = self.sizes.last().context("there is a layer")?[0];
        let (x, dy) = (self.random((self.n_tokens, self.sizes[0][1]))?, self.random((self.n_tokens, n_out))?);
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

    /// Returns adjacent weights, and the buffer of their values.
    fn weights(&self) -> Result<(FlatBuffer, Vec<Weight>)> {
        let n = self.sizes.iter().map(|[n_out, n_in]| n_out * n_in).sum();
        let values = FlatBuffer::from_tensor(self.random((n, 1))?.flatten_all()?);
        let grads = FlatBuffer::from_tensor(Tensor::zeros(n, DType::F32, self.device)?);
        let mut start = 0;
        let weight = |[n_out, n_in]: &[usize; 2]| {
            let [value, grad] = [&values, &grads].map(|buffer| buffer.view(start, (*n_out, *n_in)));
            start += n_out * n_in;
            Ok(match self.is_trained {
                true => Weight::trainable(value?, GradSink::new(grad?)?),
                false => Weight::frozen(value?),
            })
        };
        let weights = self.sizes.iter().map(weight).collect::<Result<_>>()?;
        Ok((values, weights))
    }

    /// Returns the same weights as those of FP8 layers.
    fn in_fp8(&self, weights: &[Weight]) -> Result<(Arc<Fp8Layers>, Vec<Weight>)> {
        let modules = (0..weights.len()).map(|i| Fp8Module::linear(i.to_string())).collect();
        let layers = Fp8Layers::new(self.config, modules, self.device)?;
        if let Some(amaxes) = layers.amaxes() {
            // In its first step delayed scaling reads each tensor twice.
            layers.update(&amaxes.ones_like()?)?;
        }
        let layers = Arc::new(layers);
        let with_layer = |(i, weight): (usize, &Weight)| {
            let layer = layers.layer(&i.to_string()).context("the layer has its name")?;
            Ok(weight.clone().with_fp8(layer))
        };
        let weights = weights.iter().enumerate().map(with_layer).collect::<Result<_>>()?;
        Ok((layers, weights))
    }

    fn random(&self, shape: (usize, usize)) -> Result<Tensor> {
        Ok(Tensor::randn(0f32, 1f32, shape, self.device)?.to_dtype(self.dtype)?)
    }
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
