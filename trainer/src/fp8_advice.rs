//! Measures which linear layers of a model are faster in FP8 on a device, with the time of quantization.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use candle_core::{DType, Device, DeviceLocation, Tensor};
use candlewick_model::{LayerSpec, LinearSpec, Model};
use candlewick_ops::{FlatBuffer, Fp8Config, Fp8Layers, Fp8Module, GradSink, OutputDtype, Tape, Weight, linear};
use serde::Serialize;

use crate::plan::{Plan, dtype};

/// Times of the linear layers of a model with and without FP8.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Fp8Advice {
    /// The device.
    pub device: String,
    /// The recipe of the scales.
    pub recipe: String,
    /// The dtype without FP8.
    pub dtype: String,
    /// Tokens of a micro-batch on a rank.
    pub n_tokens: usize,
    /// The linear layers, by size.
    pub sizes: Vec<SizeAdvice>,
    /// Parameters of routed experts. FP8 does not make them faster: the values of their codes are multiplied in `dtype`.
    pub experts: Vec<String>,
}

/// Times of all linear layers of one size: forward and backward of a micro-batch. With FP8, the weight is quantized once.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SizeAdvice {
    /// Module names of the layers.
    pub modules: Vec<String>,
    /// Output features on a rank.
    pub n_out: usize,
    /// Input features on a rank.
    pub n_in: usize,
    /// Milliseconds in the dtype of the model: the median of several runs.
    pub dense_ms: f64,
    /// Milliseconds in FP8.
    pub fp8_ms: f64,
}

/// Rounds of a measurement, after one that is not counted. Both sides take turns.
const ROUNDS: usize = 5;

impl Fp8Advice {
    /// Returns the modules that FP8 does not make faster.
    pub fn slower_modules(&self) -> impl Iterator<Item = &str> {
        let slower = self.sizes.iter().filter(|size| !size.is_faster());
        slower.flat_map(|size| &size.modules).chain(&self.experts).map(String::as_str)
    }
}

impl SizeAdvice {
    /// Returns true if FP8 is faster.
    pub fn is_faster(&self) -> bool {
        self.fp8_ms < self.dense_ms
    }
}

/// Measures the linear layers that `model`, built from the plan, multiplies in FP8 with these settings.
pub fn advise(plan: &Plan, model: &Model, config: Fp8Config, device: &Device) -> Result<Fp8Advice> {
    let n_tokens = (plan.data.max_length * plan.data.micro_batch_size).div_ceil(plan.ranks.n_of_micro_batch()).max(1);
    let mut by_size: BTreeMap<[usize; 2], Vec<&LinearSpec>> = BTreeMap::new();
    for spec in model.layers().flat_map(LayerSpec::linears).filter(|spec| spec.fp8) {
        by_size.entry(size_on_rank(spec, plan.ranks.tensor)).or_default().push(spec);
    }
    let is_trained = model.lora().is_none();
    let sizes = by_size.into_iter().map(|([n_out, n_in], specs)| {
        let shape = LayerShape { n_tokens, n_out, n_in, dtype: dtype(plan.model.dtype), is_trained };
        let [dense_ms, fp8_ms] = measure(shape, config, device)
            .with_context(|| format!("failed to measure a linear layer of {n_out} x {n_in} in FP8"))?;
        let modules = specs.iter().map(|spec| spec.module.clone()).collect();
        Ok(SizeAdvice { modules, n_out, n_in, dense_ms, fp8_ms })
    });
    Ok(Fp8Advice {
        device: match device.location() {
            DeviceLocation::Cuda { gpu_id } => format!("cuda:{gpu_id}"),
            _ => "cpu".to_owned(),
        },
        recipe: plan.fp8.as_ref().map_or("none", |fp8| fp8.recipe.name()).to_owned(),
        dtype: format!("{:?}", plan.model.dtype).to_lowercase(),
        n_tokens,
        sizes: sizes.collect::<Result<_>>()?,
        experts: model
            .fp8_modules()
            .into_iter()
            .filter(|module| module.n_matrices > 1)
            .map(|module| module.name)
            .collect(),
    })
}

/// Returns output and input features on a tensor parallel rank: attention's output and the down projection are row-parallel.
fn size_on_rank(spec: &LinearSpec, n_slices: usize) -> [usize; 2] {
    let is_row_parallel = ["o_proj", "down_proj"].iter().any(|name| spec.module.ends_with(name));
    match is_row_parallel {
        true => [spec.out.len, spec.input.len / n_slices],
        false => [spec.out.len / n_slices, spec.input.len],
    }
}

#[derive(Clone, Copy)]
struct LayerShape {
    n_tokens: usize,
    n_out: usize,
    n_in: usize,
    dtype: DType,
    is_trained: bool,
}

/// Returns the milliseconds of forward and backward, in the dtype of the model and in FP8.
fn measure(shape: LayerShape, config: Fp8Config, device: &Device) -> Result<[f64; 2]> {
    let LayerShape { n_tokens, n_out, n_in, dtype, is_trained } = shape;
    let random = |rows, columns| Tensor::randn(0f32, 1f32, (rows, columns), device)?.to_dtype(dtype);
    let (x, dy) = (random(n_tokens, n_in)?, random(n_tokens, n_out)?);
    let buffer = FlatBuffer::from_tensor(random(n_out, n_in)?.flatten_all()?);
    let view = buffer.view(0, (n_out, n_in))?;
    let weight = match is_trained {
        true => Weight::trainable(view, GradSink::new(Tensor::zeros((n_out, n_in), DType::F32, device)?)?),
        false => Weight::frozen(view),
    };
    let layers = Fp8Layers::new(config, vec![Fp8Module::linear("")], device)?;
    if let Some(amaxes) = layers.amaxes() {
        // In its first step delayed scaling reads each tensor twice.
        layers.update(&amaxes.ones_like()?)?;
    }
    let layers = Arc::new(layers);
    let layer = layers.layer("").context("the layer has its name")?;
    let fp8_weight = weight.clone().with_fp8(layer);
    let run = |weight: &Weight| -> Result<f64> {
        buffer.drop_fp8_copies();
        // Each run is a step of its own: codes of an earlier one would save a quantization.
        debug_assert!(!layers.is_enabled(), "FP8 is on before the step");
        let _on = layers.enable(0)?;
        device.synchronize()?;
        let started = Instant::now();
        let tape = Tape::record(&[&x], || linear(&x, weight, None, OutputDtype::SameAsInput))?;
        tape.backward(&dy)?;
        device.synchronize()?;
        Ok(started.elapsed().as_secs_f64() * 1e3)
    };
    let mut times = [Vec::new(), Vec::new()];
    for round in 0..=ROUNDS {
        let pair = [run(&weight)?, run(&fp8_weight)?];
        if round > 0 {
            times.iter_mut().zip(pair).for_each(|(times, time)| times.push(time));
        }
    }
    Ok(times.map(|mut times| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    }))
}

impl fmt::Display for Fp8Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, recipe, dtype, n_tokens, sizes, experts } = self;
        writeln!(f, "precision.recipe: {recipe} on {device}, {n_tokens} tokens, forward and backward of one layer")?;
        writeln!(f, "  {:>6}  {:>15}  {:>10}  {:>10}  {:>8}  advice", "layers", "out x in", dtype, "fp8", "speed-up")?;
        for size in sizes {
            let shape = format!("{} x {}", size.n_out, size.n_in);
            let advice = if size.is_faster() { "fp8" } else { dtype };
            writeln!(
                f,
                "  {:>6}  {shape:>15}  {:>7.2} ms  {:>7.2} ms  {:>8.2}  {advice}",
                size.modules.len(),
                size.dense_ms,
                size.fp8_ms,
                size.dense_ms / size.fp8_ms
            )?;
        }
        if !experts.is_empty() {
            writeln!(
                f,
                "  {:>6}  routed experts: FP8 rounds their matmuls but does not make them faster  {dtype}",
                experts.len()
            )?;
        }
        let n_faster = sizes.iter().filter(|size| size.is_faster()).count();
        match n_faster {
            0 => write!(f, "no layer is faster in FP8 here: leave out the section precision"),
            n if n == sizes.len() && experts.is_empty() => write!(f, "all layers are faster in FP8"),
            _ => write!(f, "precision.exclude_slower_modules: true keeps the slower layers in {dtype}"),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn modules_that_fp8_does_not_make_faster_are_slower() {
        let size = |name: &str, dense_ms, fp8_ms| SizeAdvice {
            modules: vec![format!("{name}.0"), format!("{name}.1")],
            n_out: 16,
            n_in: 32,
            dense_ms,
            fp8_ms,
        };
        let advice = Fp8Advice {
            device: "cpu".to_owned(),
            recipe: "current".to_owned(),
            dtype: "bf16".to_owned(),
            n_tokens: 8,
            sizes: vec![size("fast", 2.0, 1.0), size("equal", 1.0, 1.0), size("slow", 1.0, 2.0)],
            experts: vec!["experts".to_owned()],
        };
        let slower: Vec<&str> = advice.slower_modules().collect();
        assert_eq!(slower, ["equal.0", "equal.1", "slow.0", "slow.1", "experts"]);
    }
}
