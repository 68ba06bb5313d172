//! Measures which linear layers of a model are faster in FP8 on a device, with the time of quantization.

mod measure;

use std::collections::BTreeMap;
use std::fmt;

use anyhow::{Context, Result};
use candle_core::{Device, DeviceLocation, Tensor, bail};
use candlewick_model::{LinearSpec, Model, SwiGluSpec, swiglu_mlp};
use candlewick_ops::{Fp8Config, OutputDtype, Weight, linear, rms_norm};
use serde::Serialize;

use crate::plan::{Plan, dtype};
use measure::{LayerMeasurement, LayerTimes};

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
    /// The MLPs of which all layers multiply in FP8, by size.
    pub mlps: Vec<MlpAdvice>,
    /// The other linear layers, by size.
    pub sizes: Vec<SizeAdvice>,
    /// Parameters of routed experts. FP8 does not make them faster: the values of their codes are multiplied in `dtype`.
    pub experts: Vec<String>,
}

/// Times of all MLPs of one size, each with the norm before it. A GPU quantizes their activations where it computes them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MlpAdvice {
    /// Module names of the linear layers.
    pub modules: Vec<String>,
    /// Width of the input and the output.
    pub hidden_size: usize,
    /// Output features of gate and up on a rank.
    pub intermediate_size: usize,
    /// Milliseconds in the dtype of the model: the median of several runs.
    pub dense_ms: f64,
    /// Milliseconds in FP8.
    pub fp8_ms: f64,
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

/// A line of the table.
struct AdviceRow<'a> {
    modules: &'a [String],
    /// Layers or MLPs.
    n: usize,
    size: String,
    dense_ms: f64,
    fp8_ms: f64,
}

impl Fp8Advice {
    /// Returns the modules that FP8 does not make faster.
    pub fn slower_modules(&self) -> impl Iterator<Item = &str> {
        let slower = self.rows().into_iter().filter(|row| !row.is_faster());
        slower.flat_map(|row| row.modules).chain(&self.experts).map(String::as_str)
    }

    fn rows(&self) -> Vec<AdviceRow<'_>> {
        let mlps = self.mlps.iter().map(|mlp| AdviceRow {
            modules: &mlp.modules,
            n: mlp.modules.len() / LAYERS_PER_MLP,
            size: format!("MLP {} x {}", mlp.hidden_size, mlp.intermediate_size),
            dense_ms: mlp.dense_ms,
            fp8_ms: mlp.fp8_ms,
        });
        let layers = self.sizes.iter().map(|size| AdviceRow {
            modules: &size.modules,
            n: size.modules.len(),
            size: format!("{} x {}", size.n_out, size.n_in),
            dense_ms: size.dense_ms,
            fp8_ms: size.fp8_ms,
        });
        mlps.chain(layers).collect()
    }
}

impl AdviceRow<'_> {
    /// Returns true if FP8 is faster.
    fn is_faster(&self) -> bool {
        self.fp8_ms < self.dense_ms
    }
}

/// Gate, up and down.
const LAYERS_PER_MLP: usize = 3;

/// Measures the linear layers that `model`, built from the plan, multiplies in FP8 with these settings.
pub fn advise(plan: &Plan, model: &Model, config: Fp8Config, device: &Device) -> Result<Fp8Advice> {
    let n_tokens = (plan.data.max_length * plan.data.micro_batch_size).div_ceil(plan.ranks.n_of_micro_batch()).max(1);
    let (dtype_of_model, is_trained) = (dtype(plan.model.dtype), model.lora().is_none());
    let measurement = LayerMeasurement { sizes: &[], n_tokens, dtype: dtype_of_model, is_trained, config, device };
    let (mlps, layers) = by_size(model, plan.ranks.tensor);
    let mlps = mlps.into_iter().map(|([hidden_size, intermediate_size], modules)| {
        let LayerTimes { dense_ms, fp8_ms } = measure_mlp(measurement, [hidden_size, intermediate_size])
            .with_context(|| format!("failed to measure an MLP of {hidden_size} x {intermediate_size} in FP8"))?;
        Ok(MlpAdvice { modules, hidden_size, intermediate_size, dense_ms, fp8_ms })
    });
    let sizes = layers.into_iter().map(|([n_out, n_in], modules)| {
        let LayerTimes { dense_ms, fp8_ms } = LayerMeasurement { sizes: &[[n_out, n_in]], ..measurement }
            .run(|x, weights| linear(x, &weights[0], None, OutputDtype::SameAsInput))
            .with_context(|| format!("failed to measure a linear layer of {n_out} x {n_in} in FP8"))?;
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
        mlps: mlps.collect::<Result<_>>()?,
        sizes: sizes.collect::<Result<_>>()?,
        experts: model
            .fp8_modules()
            .into_iter()
            .filter(|module| module.n_matrices > 1)
            .map(|module| module.name)
            .collect(),
    })
}

/// Measures an MLP and the norm before it, whose output a GPU quantizes where backward computes it.
fn measure_mlp(measurement: LayerMeasurement<'_>, [d, f]: [usize; 2]) -> Result<LayerTimes> {
    let norm = Weight::frozen(Tensor::ones(d, measurement.dtype, measurement.device)?);
    let mlp = |x: &Tensor, weights: &[Weight]| {
        let [gate, up, down] = weights else { bail!("an MLP has {LAYERS_PER_MLP} layers") };
        swiglu_mlp(&rms_norm(x, &norm, 1e-6)?, [gate, up, down])
    };
    LayerMeasurement { sizes: &[[f, d], [f, d], [d, f]], ..measurement }.run(mlp)
}

type ModulesBySize = BTreeMap<[usize; 2], Vec<String>>;

/// Returns the modules of MLPs that compute as one, by hidden and intermediate size, and of other layers, by output and input
/// features, on a tensor parallel rank.
fn by_size(model: &Model, n_slices: usize) -> (ModulesBySize, ModulesBySize) {
    let (mut mlps, mut layers) = (ModulesBySize::new(), ModulesBySize::new());
    for layer in model.layers() {
        let mlp = layer.mlp.swiglu().filter(|mlp| computes_as_one(mlp));
        let of_mlp: Vec<&String> = mlp.into_iter().flat_map(linears_of).map(|linear| &linear.module).collect();
        if let Some(mlp) = mlp {
            let [f, d] = size_on_rank(&mlp.gate_up[0], n_slices);
            mlps.entry([d, f]).or_default().extend(of_mlp.iter().map(|module| (*module).clone()));
        }
        for spec in layer.linears().filter(|spec| spec.fp8 && !of_mlp.contains(&&spec.module)) {
            layers.entry(size_on_rank(spec, n_slices)).or_default().push(spec.module.clone());
        }
    }
    (mlps, layers)
}

/// Returns true if all layers of an MLP multiply in FP8, without biases or adapters.
fn computes_as_one(mlp: &SwiGluSpec) -> bool {
    linears_of(mlp).all(|linear| linear.fp8 && !linear.bias && linear.adapter.is_none())
}

fn linears_of(mlp: &SwiGluSpec) -> impl Iterator<Item = &LinearSpec> {
    mlp.gate_up.iter().chain([&mlp.down])
}

/// Returns output and input features on a tensor parallel rank: attention's output and the down projection are row-parallel.
fn size_on_rank(spec: &LinearSpec, n_slices: usize) -> [usize; 2] {
    let is_row_parallel = ["o_proj", "down_proj"].iter().any(|name| spec.module.ends_with(name));
    match is_row_parallel {
        true => [spec.out.len, spec.input.len / n_slices],
        false => [spec.out.len / n_slices, spec.input.len],
    }
}

impl fmt::Display for Fp8Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, recipe, dtype, n_tokens, experts, .. } = self;
        writeln!(
            f,
            "precision.recipe: {recipe} on {device}, {n_tokens} tokens, forward and backward of one layer or MLP"
        )?;
        writeln!(f, "  {:>6}  {:>17}  {:>10}  {:>10}  {:>8}  advice", "number", "out x in", dtype, "fp8", "speed-up")?;
        let rows = self.rows();
        for row in &rows {
            let AdviceRow { n, size, dense_ms, fp8_ms, .. } = row;
            let advice = if row.is_faster() { "fp8" } else { dtype };
            let speed_up = dense_ms / fp8_ms;
            writeln!(f, "  {n:>6}  {size:>17}  {dense_ms:>7.2} ms  {fp8_ms:>7.2} ms  {speed_up:>8.2}  {advice}")?;
        }
        if !experts.is_empty() {
            writeln!(
                f,
                "  {:>6}  routed experts: FP8 rounds their matmuls but does not make them faster  {dtype}",
                experts.len()
            )?;
        }
        let n_faster = rows.iter().filter(|row| row.is_faster()).count();
        match n_faster {
            0 => write!(f, "no layer is faster in FP8 here: leave out the section precision"),
            n if n == rows.len() && experts.is_empty() => write!(f, "all layers are faster in FP8"),
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
        let mlp = |name: &str, dense_ms, fp8_ms| MlpAdvice {
            modules: vec![format!("{name}.gate"), format!("{name}.up"), format!("{name}.down")],
            hidden_size: 16,
            intermediate_size: 32,
            dense_ms,
            fp8_ms,
        };
        let advice = Fp8Advice {
            device: "cpu".to_owned(),
            recipe: "current".to_owned(),
            dtype: "bf16".to_owned(),
            n_tokens: 8,
            mlps: vec![mlp("fast_mlp", 2.0, 1.0), mlp("slow_mlp", 1.0, 2.0)],
            sizes: vec![size("fast", 2.0, 1.0), size("equal", 1.0, 1.0), size("slow", 1.0, 2.0)],
            experts: vec!["experts".to_owned()],
        };
        let slower: Vec<&str> = advice.slower_modules().collect();
        let expected =
            ["slow_mlp.gate", "slow_mlp.up", "slow_mlp.down", "equal.0", "equal.1", "slow.0", "slow.1", "experts"];
        assert_eq!(slower, expected);
    }
}
