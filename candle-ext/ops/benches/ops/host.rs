//! The host's time to submit the linear layers of a training step, with cached descriptors of GEMMs and without.
//!
//! The layers have few tokens, so that the host waits for no device.

use std::time::Instant;

use candle_core::{DType, Device, Result, Tensor};
use candlewick_ops::{FlatBuffer, GradSink, OutputDtype, Tape, Weight, forget_gemms, linear};
use serde::Serialize;

use crate::cases::randn;
use crate::fp8::{DELAYED, fp8_layers, layer_of};

/// Tokens of a step.
const TOKENS: usize = 16;

/// Inputs and outputs of the linear layers of a decoder layer.
const QWEN3_4B: [[usize; 2]; 7] =
    [[2560, 4096], [2560, 1024], [2560, 1024], [4096, 2560], [2560, 9728], [2560, 9728], [9728, 2560]];
const TINY: [[usize; 2]; 7] = [[32, 32]; 7];

/// Milliseconds of the host for forward and backward of all linear layers: the median of several steps.
#[derive(Debug, Serialize)]
pub(crate) struct HostRow {
    precision: &'static str,
    layers: usize,
    /// With descriptors of earlier steps.
    cached_ms: f64,
    /// With new descriptors for each layer.
    not_cached_ms: f64,
}

/// Sizes and repetitions of the measurement.
#[derive(Clone, Copy)]
pub(crate) struct HostSteps {
    sizes: [[usize; 2]; 7],
    layers: usize,
    steps: usize,
}

impl HostSteps {
    pub(crate) const FULL: Self = Self { sizes: QWEN3_4B, layers: 36, steps: 11 };
    pub(crate) const QUICK: Self = Self { sizes: TINY, layers: 2, steps: 3 };

    /// Measures bf16, and FP8 with delayed scaling.
    pub(crate) fn run(self, device: &Device) -> Result<Vec<HostRow>> {
        let names: Vec<String> = (0..self.sizes.len()).map(|i| i.to_string()).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let layers = fp8_layers(DELAYED, &names, device)?;
        let mut rows = Vec::new();
        for precision in ["bf16", "fp8"] {
            let mut pairs = Vec::new();
            for ([k, n], name) in self.sizes.into_iter().zip(&names) {
                let buffer = FlatBuffer::from_tensor(randn(n * k, device)?);
                let sink = GradSink::new(Tensor::zeros((n, k), DType::F32, device)?)?;
                let weight = Weight::trainable(buffer.view(0, (n, k))?, sink).with_fp8(layer_of(&layers, name)?);
                pairs.push((randn((TOKENS, k), device)?, randn((TOKENS, n), device)?, weight));
            }
            let step = |before_layer: fn()| -> Result<f64> {
                let _on = (precision == "fp8").then(|| layers.enable(0)).transpose()?;
                device.synchronize()?;
                let began = Instant::now();
                for _ in 0..self.layers {
                    for (x, dy, weight) in &pairs {
                        before_layer();
                        Tape::record(&[x], || linear(x, weight, None, OutputDtype::SameAsInput))?.backward(dy)?;
                    }
                }
                Ok(began.elapsed().as_secs_f64() * 1e3)
            };
            // Kernels are loaded, and weights quantized.
            step(|| ())?;
            let [cached_ms, not_cached_ms] =
                [(|| ()) as fn(), forget_gemms].map(|before_layer| self.median(|| step(before_layer)));
            let (cached_ms, not_cached_ms) = (cached_ms?, not_cached_ms?);
            rows.push(HostRow { precision, layers: self.layers, cached_ms, not_cached_ms });
        }
        Ok(rows)
    }

    fn median(self, mut step: impl FnMut() -> Result<f64>) -> Result<f64> {
        let mut all = (0..self.steps).map(|_| step()).collect::<Result<Vec<_>>>()?;
        all.sort_by(f64::total_cmp);
        Ok(all[all.len() / 2])
    }
}

impl HostRow {
    pub(crate) fn line(&self) -> String {
        let Self { precision, layers, cached_ms, not_cached_ms } = self;
        format!(
            "host, linear layers of {layers} decoder layers, {precision}: {cached_ms:.2} ms a step, {not_cached_ms:.2} ms with \
             new descriptors"
        )
    }
}
