//! Measures which linear layers of a model are faster in FP8 on a device, with the time of quantization.

mod measure;
mod units;

use std::fmt;

use anyhow::{Context, Result};
use candle_core::{Device, DeviceLocation};
use candlewick_model::Model;
use candlewick_ops::Fp8Config;
use serde::Serialize;

use crate::plan::{Plan, dtype};
use measure::{LayerMeasurement, LayerTimes};
use units::{LinearSize, MeasuredUnit, SharedInputLinears};

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
    /// The other linear layers that read one tensor, such as q, k and v, by size.
    pub shared_inputs: Vec<SharedInputAdvice>,
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

/// Times of all groups of linear layers of one size that read one tensor, with the norm before. FP8 quantizes it once. Layers of the
/// group that are not in FP8 are computed, too.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SharedInputAdvice {
    /// Module names of the layers that multiply in FP8.
    pub modules: Vec<String>,
    /// Output features on a rank of each layer of a group that multiplies in FP8.
    pub n_out: Vec<usize>,
    /// Input features on a rank.
    pub n_in: usize,
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
    /// Layers, groups of layers or MLPs.
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
        let groups = self.shared_inputs.iter().map(|group| AdviceRow {
            modules: &group.modules,
            n: group.modules.len() / group.n_out.len().max(1),
            size: format!("{} x {}", outputs(&group.n_out), group.n_in),
            dense_ms: group.dense_ms,
            fp8_ms: group.fp8_ms,
        });
        let layers = self.sizes.iter().map(|size| AdviceRow {
            modules: &size.modules,
            n: size.modules.len(),
            size: format!("{} x {}", size.n_out, size.n_in),
            dense_ms: size.dense_ms,
            fp8_ms: size.fp8_ms,
        });
        mlps.chain(groups).chain(layers).collect()
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

/// Returns output features as a sum, such as 4096+1024+1024.
fn outputs(n_out: &[usize]) -> String {
    n_out.iter().map(usize::to_string).collect::<Vec<_>>().join("+")
}

/// Measures the linear layers that `model`, built from the plan, multiplies in FP8 with these settings.
pub fn advise(plan: &Plan, model: &Model, config: Fp8Config, device: &Device) -> Result<Fp8Advice> {
    let n_tokens = (plan.data.max_length * plan.data.micro_batch_size).div_ceil(plan.ranks.n_of_micro_batch()).max(1);
    let measurement = LayerMeasurement {
        n_tokens,
        dtype: dtype(plan.model.dtype),
        is_trained: model.lora().is_none(),
        reads_norm: plan.ranks.tensor == 1,
        config,
        device,
    };
    let mut advice = Fp8Advice {
        device: match device.location() {
            DeviceLocation::Cuda { gpu_id } => format!("cuda:{gpu_id}"),
            _ => "cpu".to_owned(),
        },
        recipe: plan.fp8.as_ref().map_or("none", |fp8| fp8.recipe.name()).to_owned(),
        dtype: format!("{:?}", plan.model.dtype).to_lowercase(),
        n_tokens,
        mlps: Vec::new(),
        shared_inputs: Vec::new(),
        sizes: Vec::new(),
        experts: model
            .fp8_modules()
            .into_iter()
            .filter(|module| module.n_matrices > 1)
            .map(|module| module.name)
            .collect(),
    };
    for (unit, modules) in units::units(model, plan.ranks.tensor) {
        let times = measurement
            .of(&unit)
            .with_context(|| format!("failed to measure {} and layers of this size in FP8", modules[0]))?;
        advice.add(&unit, modules, times);
    }
    Ok(advice)
}

impl Fp8Advice {
    /// Adds the times of a unit.
    fn add(&mut self, unit: &MeasuredUnit, modules: Vec<String>, LayerTimes { dense_ms, fp8_ms }: LayerTimes) {
        match *unit {
            MeasuredUnit::Mlp { hidden_size, intermediate_size } => {
                self.mlps.push(MlpAdvice { modules, hidden_size, intermediate_size, dense_ms, fp8_ms });
            }
            MeasuredUnit::SharedInput(SharedInputLinears { ref layers, .. }) => {
                let n_out = layers.iter().filter(|layer| layer.fp8).map(|layer| layer.n_out).collect();
                self.shared_inputs.push(SharedInputAdvice { modules, n_out, n_in: layers[0].n_in, dense_ms, fp8_ms });
            }
            MeasuredUnit::Single(LinearSize { n_out, n_in, .. }) => {
                self.sizes.push(SizeAdvice { modules, n_out, n_in, dense_ms, fp8_ms });
            }
        }
    }
}

impl fmt::Display for Fp8Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, recipe, dtype, n_tokens, experts, .. } = self;
        writeln!(
            f,
            "precision.recipe: {recipe} on {device}, {n_tokens} tokens, forward and backward of one layer, group or MLP"
        )?;
        writeln!(f, "  {:>6}  {:>21}  {:>10}  {:>10}  {:>8}  advice", "number", "out x in", dtype, "fp8", "speed-up")?;
        let rows = self.rows();
        for row in &rows {
            let AdviceRow { n, size, dense_ms, fp8_ms, .. } = row;
            let advice = if row.is_faster() { "fp8" } else { dtype };
            let speed_up = dense_ms / fp8_ms;
            writeln!(f, "  {n:>6}  {size:>21}  {dense_ms:>7.2} ms  {fp8_ms:>7.2} ms  {speed_up:>8.2}  {advice}")?;
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
        let qkv = |name: &str, dense_ms, fp8_ms| SharedInputAdvice {
            modules: ["q", "k", "v"].map(|layer| format!("{name}.{layer}")).to_vec(),
            n_out: vec![16, 8, 8],
            n_in: 32,
            dense_ms,
            fp8_ms,
        };
        let advice = Fp8Advice {
            device: "cpu".to_owned(),
            recipe: "current".to_owned(),
            dtype: "bf16".to_owned(),
            n_tokens: 8,
            mlps: vec![mlp("fast_mlp", 2.0, 1.0), mlp("slow_mlp", 1.0, 2.0)],
            shared_inputs: vec![qkv("fast_qkv", 2.0, 1.0), qkv("slow_qkv", 1.0, 2.0)],
            sizes: vec![size("fast", 2.0, 1.0), size("equal", 1.0, 1.0), size("slow", 1.0, 2.0)],
            experts: vec!["experts".to_owned()],
        };
        let slower: Vec<&str> = advice.slower_modules().collect();
        let expected = "slow_mlp.gate slow_mlp.up slow_mlp.down slow_qkv.q slow_qkv.k slow_qkv.v equal.0 equal.1 slow.0 slow.1 experts";
        assert_eq!(slower.join(" "), expected);
        let text = advice.to_string();
        let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        let row: Vec<&str> = "1 16+8+8 x 32 2.00 ms 1.00 ms 2.00 fp8".split(' ').collect();
        assert!(rows.contains(&row), "{text}");
    }
}
