//! Benchmark cases of FP8 linear layers, with the same layers in bf16, and of quantization alone.
//!
//! t tokens, k inputs, n outputs

use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor};
use candlewick_ops::{
    AmaxHistoryPolicy, DelayedScaling, FlatBuffer, Fp8Config, Fp8Formats, Fp8Layers, Fp8Module, Fp8Operand, Fp8Recipe,
    Fp8Rounding, GradSink, NormCall, OutputDtype, ScaleRule, Weight, fp8_normed_swiglu_mlp, fp8_swiglu_mlp, linear,
    rms_norm, swiglu,
};

use crate::cases::{BF16, BenchCase, BenchCost, F32, Graph, both, bytes, keep, once, randn, trainable};
use crate::linear::linears;

/// Linear layers of a model.
pub(crate) struct Layers {
    t: usize,
    /// Inputs and outputs of each layer.
    sizes: &'static [[usize; 2]],
    /// Hidden and intermediate size of the MLP.
    mlp: [usize; 2],
}

const QWEN3_4B: Layers = Layers { t: 16_384, sizes: &[[2560, 4096], [2560, 9728], [9728, 2560]], mlp: [2560, 9728] };
const LLAMA_8B: Layers =
    Layers { t: 8192, sizes: &[[4096, 4096], [4096, 14_336], [14_336, 4096]], mlp: [4096, 14_336] };
const TINY: Layers = Layers { t: 96, sizes: &[[64, 160]], mlp: [64, 160] };

/// A recipe with the names of its cases.
struct Recipe {
    recipe: Fp8Recipe,
    /// The layer with its quantization, its matmuls of inputs and of weights, and forward without quantization.
    layer: [&'static str; 3],
    matmul: &'static str,
    /// The MLP.
    mlp: &'static str,
    /// Quantization of an activation and of a weight.
    quantize: [&'static str; 2],
    /// Bytes that quantization reads per bf16 element.
    read: f64,
}

/// Rule of scales, exact or powers of two: TransformerEngine's default for current and for blockwise scaling.
const fn rule(power_of_two: bool) -> ScaleRule {
    ScaleRule { power_of_two, amax_epsilon: 0.0 }
}

pub(crate) const DELAYED: Fp8Recipe =
    Fp8Recipe::Delayed(DelayedScaling { margin: 0, amax_history_len: 1024, amax_compute: AmaxHistoryPolicy::Max });

const RECIPES: [Recipe; 3] = [
    Recipe {
        recipe: DELAYED,
        layer: ["fp8 delayed", "fp8 delayed dx", "fp8 delayed dw"],
        matmul: "fp8 tensor matmul",
        mlp: "fp8 delayed mlp",
        quantize: ["quantize delayed", "quantize w delayed"],
        read: BF16,
    },
    // The amax of the whole matrix precedes its quantization.
    Recipe {
        recipe: Fp8Recipe::Current(rule(false)),
        layer: ["fp8 current", "fp8 current dx", "fp8 current dw"],
        matmul: "",
        mlp: "fp8 current mlp",
        quantize: ["quantize current", "quantize w current"],
        read: 2.0 * BF16,
    },
    Recipe {
        recipe: Fp8Recipe::Blockwise(rule(true)),
        layer: ["fp8 block", "fp8 block dx", "fp8 block dw"],
        matmul: "fp8 block matmul",
        mlp: "fp8 block mlp",
        quantize: ["quantize block", "quantize w block"],
        read: BF16,
    },
];

pub(crate) fn all() -> Vec<BenchCase> {
    [QWEN3_4B, LLAMA_8B].iter().flat_map(of_layers).collect()
}

/// Returns the same cases at tiny sizes, for a trial run.
pub(crate) fn tiny() -> Vec<BenchCase> {
    of_layers(&TINY)
}

fn of_layers(&Layers { t, sizes, mlp }: &Layers) -> Vec<BenchCase> {
    let mut cases = Vec::new();
    for &[k, n] in sizes {
        cases.extend(linears(DType::BF16, t, k, n));
        for recipe in &RECIPES {
            cases.extend(layers_by(recipe, t, k, n));
            if !recipe.matmul.is_empty() {
                cases.push(matmul_by(recipe, t, k, n));
            }
            let of_weight = [n, k];
            for (name, operand, [rows, columns]) in
                [(recipe.quantize[0], Fp8Operand::Input, [t, k]), (recipe.quantize[1], Fp8Operand::Weight, of_weight)]
            {
                cases.push(quantization(recipe, name, operand, rows, columns));
            }
        }
    }
    cases.extend(RECIPES.iter().flat_map(|recipe| mlp_by(recipe, t, mlp)));
    cases
}

/// Returns layers after their first step: before it, delayed scaling reads each tensor twice. The formats are TransformerEngine's
/// defaults, which `gpu_te_bench.py` times.
pub(crate) fn fp8_layers(recipe: Fp8Recipe, names: &[&str], device: &Device) -> Result<Arc<Fp8Layers>> {
    let formats = match recipe {
        Fp8Recipe::Blockwise(_) => Fp8Formats::E4m3,
        Fp8Recipe::Delayed(_) | Fp8Recipe::Current(_) => Fp8Formats::Hybrid,
    };
    let config = Fp8Config { recipe, formats, gradient_rounding: Fp8Rounding::Nearest, fake_quantize: false };
    let layers = Fp8Layers::new(config, names.iter().map(|name| Fp8Module::linear(*name)).collect(), device)?;
    if let Some(amaxes) = layers.amaxes() {
        layers.update(&amaxes.ones_like()?)?;
    }
    Ok(Arc::new(layers))
}

/// Cases of a SwiGLU MLP [d, f] with trained weights, and the norm before it. Weights are quantized once, and their gradients
/// overwritten.
fn mlp_by(recipe: &Recipe, t: usize, [d, f]: [usize; 2]) -> [BenchCase; 2] {
    let by = recipe.recipe;
    let flops = 6.0 * (t * d * f) as f64;
    let (rows, wide, weights) = ((t * d) as f64, (t * f) as f64, 3.0 * (d * f) as f64);
    let forward = BenchCost { bytes: BF16 * (3.0 * rows + 4.0 * wide) + weights, flops };
    let backward = BenchCost { bytes: BF16 * (5.0 * rows + 6.0 * wide) + (1.0 + F32) * weights, flops: 2.0 * flops };
    both(recipe.mlp, vec![("t", t), ("d", d), ("f", f)], [forward, backward], move |device| {
        let names = ["gate", "up", "down"];
        let layers = fp8_layers(by, &names, device)?;
        let weight =
            |name, n, k| Ok::<_, candle_core::Error>(in_buffer([n, k], device)?.with_fp8(layer_of(&layers, name)?));
        let weights = [weight("gate", f, d)?, weight("up", f, d)?, weight("down", d, f)?];
        let grad = GradSink::new(Tensor::zeros(d, DType::F32, device)?)?;
        let norm = Weight::trainable(Tensor::ones(d, DType::BF16, device)?, grad);
        Ok(Graph::new([randn((t, d), device)?], move |x| {
            let _on = layers.enable(0)?;
            let [gate, up, down] = &weights;
            weights.iter().chain([&norm]).filter_map(Weight::sink).for_each(GradSink::reset);
            let call = NormCall { x: &x[0], plus: None, weight: &norm, eps: 1e-6 };
            if let Some([_, y]) = fp8_normed_swiglu_mlp(call, [gate, up, down])? {
                return Ok(y);
            }
            let x = rms_norm(&x[0], &norm, 1e-6)?;
            if let Some(y) = fp8_swiglu_mlp(&x, [gate, up, down])? {
                return Ok(y);
            }
            let multiply = |x: &Tensor, w: &Weight| linear(x, w, None, OutputDtype::SameAsInput);
            multiply(&swiglu(&multiply(&x, gate)?, &multiply(&x, up)?)?, down)
        }))
    })
}

/// Returns a trained weight in a buffer, which caches its FP8 copy.
fn in_buffer([n, k]: [usize; 2], device: &Device) -> Result<Weight> {
    let buffer = FlatBuffer::from_tensor(randn(n * k, device)?);
    let sink = GradSink::new(Tensor::zeros((n, k), DType::F32, device)?)?;
    Ok(Weight::trainable(buffer.view(0, (n, k))?, sink))
}

/// Cases of [`linears`] in FP8. Inputs and gradients are quantized in each run, the frozen weight once.
fn layers_by(recipe: &Recipe, t: usize, k: usize, n: usize) -> Vec<BenchCase> {
    let (x, w, y) = ((t * k) as f64, (n * k) as f64, (t * n) as f64);
    let cost = |bytes| BenchCost { bytes, flops: 2.0 * x * n as f64 };
    let shape = || vec![("t", t), ("k", k), ("n", n)];
    let (by, [name, name_dx, name_dw]) = (recipe.recipe, recipe.layer);
    let multiply = |layers: &Fp8Layers, x: &Tensor, w: &Weight| {
        // A new step forgets the quantized input.
        let _on = layers.enable(0)?;
        linear(x, w, None, OutputDtype::SameAsInput)
    };
    let [forward, grad_x] = both(name, shape(), [cost(BF16 * (x + y) + w); 2], move |device| {
        let layers = fp8_layers(by, &["layer"], device)?;
        let w = frozen(&layers, [n, k], device)?;
        Ok(Graph::new([randn((t, k), device)?], move |x| multiply(&layers, &x[0], &w)))
    });
    let cost_w = cost(BF16 * (x + y) + 2.0 * F32 * w);
    let [_, grad_w] = both(name_dw, shape(), [cost_w; 2], move |device| {
        let layers = fp8_layers(by, &["layer"], device)?;
        let w = trainable(&[n, k], device)?;
        let w = w.with_fp8(layer_of(&layers, "layer")?);
        let x = randn((t, k), device)?;
        Ok(Graph::new([], move |_| multiply(&layers, &x, &w)))
    });
    vec![forward, BenchCase { op: name_dx, ..grad_x }, grad_w]
}

/// Case of y = x w^T with operands that are quantized once.
fn matmul_by(recipe: &Recipe, t: usize, k: usize, n: usize) -> BenchCase {
    let by = recipe.recipe;
    let (x, w, y) = ((t * k) as f64, (n * k) as f64, (t * n) as f64);
    let cost = BenchCost { bytes: x + w + BF16 * y, flops: 2.0 * x * n as f64 };
    let case = once(recipe.matmul, vec![("t", t), ("k", k), ("n", n)], cost.bytes, move |device| {
        let layers = fp8_layers(by, &["layer"], device)?;
        let (x, w) = (randn((t, k), device)?, frozen(&layers, [n, k], device)?);
        // FP8 stays on, and with it the quantized input.
        std::mem::forget(layers.enable(0)?);
        Ok(Box::new(move || keep(linear(&x, &w, None, OutputDtype::SameAsInput)?)))
    });
    BenchCase { cost, ..case }
}

/// Case of a bf16 matrix read and two matrices of codes written.
fn quantization(recipe: &Recipe, name: &'static str, operand: Fp8Operand, rows: usize, columns: usize) -> BenchCase {
    let by = recipe.recipe;
    let n_bytes = (recipe.read + 2.0) * (rows * columns) as f64;
    let case = once(name, vec![("rows", rows), ("columns", columns)], n_bytes, move |device| {
        let layers = fp8_layers(by, &["layer"], device)?;
        let (layer, x) = (layer_of(&layers, "layer")?, randn((rows, columns), device)?);
        Ok(Box::new(move || keep(layer.quantize_operand(operand, &x)?)))
    });
    BenchCase { cost: bytes(n_bytes), ..case }
}

/// Returns a frozen weight in a buffer, which caches its FP8 copy.
fn frozen(layers: &Arc<Fp8Layers>, [n, k]: [usize; 2], device: &Device) -> Result<Weight> {
    let buffer = FlatBuffer::from_tensor(randn(n * k, device)?);
    Ok(Weight::frozen(buffer.view(0, (n, k))?).with_fp8(layer_of(layers, "layer")?))
}

pub(crate) fn layer_of(layers: &Arc<Fp8Layers>, name: &str) -> Result<candlewick_ops::Fp8Linear> {
    match layers.layer(name) {
        Some(layer) => Ok(layer),
        None => candle_core::bail!("the layers have no layer of this name"),
    }
}
