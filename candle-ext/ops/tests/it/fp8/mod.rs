//! FP8 quantization and linear layers in FP8.

mod linear;
mod quantization;
mod steps;
mod weight_copies;

use std::sync::Arc;

use candle_core::Tensor;
use candlewick_ops::{
    AmaxHistoryPolicy, DelayedScaling, Fp8Config, Fp8Formats, Fp8Layers, Fp8Module, Fp8Recipe, Fp8Rounding, ScaleRule,
};

use crate::cases::TestDevice;

pub(crate) fn devices() -> Vec<TestDevice> {
    TestDevice::all()
}

/// Returns the devices that multiply a weight [n, k] by a recipe. cuBLASLt needs multiples of 16, tensor cores for FP8, and
/// for scales of blocks Hopper.
fn devices_for([n, k]: [usize; 2], recipe: Fp8Recipe) -> Vec<TestDevice> {
    let is_wide = n.is_multiple_of(16) && k.is_multiple_of(16);
    let multiplies = |test_device: &TestDevice| match test_device {
        TestDevice::Cpu => true,
        _ => is_wide && gpu_multiplies(recipe),
    };
    devices().into_iter().filter(multiplies).collect()
}

#[cfg(feature = "cuda")]
fn gpu_multiplies(recipe: Fp8Recipe) -> bool {
    let capability = candlewick_ops::gpus().first().map_or(0, |gpu| gpu.capability);
    capability >= 89 && (!matches!(recipe, Fp8Recipe::Blockwise(_)) || capability == 90)
}

#[cfg(not(feature = "cuda"))]
fn gpu_multiplies(_: Fp8Recipe) -> bool {
    true
}

pub(crate) const FORMATS: [Fp8Formats; 2] = [Fp8Formats::Hybrid, Fp8Formats::E4m3];

pub(crate) fn config(recipe: Fp8Recipe) -> Fp8Config {
    config_in(Fp8Formats::Hybrid, recipe)
}

pub(crate) fn config_in(formats: Fp8Formats, recipe: Fp8Recipe) -> Fp8Config {
    Fp8Config { recipe, formats, gradient_rounding: Fp8Rounding::Nearest, fake_quantize: false }
}

pub(crate) fn rule(power_of_two: bool) -> ScaleRule {
    ScaleRule { power_of_two, amax_epsilon: 0.0 }
}

pub(crate) const DELAYED: Fp8Recipe =
    Fp8Recipe::Delayed(DelayedScaling { margin: 0, amax_history_len: 16, amax_compute: AmaxHistoryPolicy::Max });

pub(crate) fn recipes() -> [Fp8Recipe; 4] {
    [DELAYED, Fp8Recipe::Current(rule(false)), Fp8Recipe::Current(rule(true)), Fp8Recipe::Blockwise(rule(true))]
}

/// Returns all recipes in both formats.
pub(crate) fn recipes_in_formats() -> impl Iterator<Item = Fp8Config> {
    FORMATS.into_iter().flat_map(|formats| recipes().map(|recipe| config_in(formats, recipe)))
}

pub(crate) fn layers(recipe: Fp8Recipe, test_device: &TestDevice) -> Arc<Fp8Layers> {
    layers_of(config(recipe), test_device)
}

pub(crate) fn layers_of(config: Fp8Config, test_device: &TestDevice) -> Arc<Fp8Layers> {
    let modules = vec![Fp8Module::linear("a"), Fp8Module::linear("b")];
    Arc::new(Fp8Layers::new(config, modules, &test_device.device()).unwrap())
}

fn codes_of(matrix: &Tensor) -> Vec<u8> {
    matrix.flatten_all().unwrap().to_vec1().unwrap()
}

/// Sums of f32 with up to 700 terms, and the rounding of inverse scales that are no powers of two.
const SUMS: f64 = 1e-6;

/// Bound of the sums on a device. Tensor cores sum FP8 matmuls with fewer bits than f32 has.
fn sums(test_device: &TestDevice) -> f64 {
    match test_device {
        #[cfg(feature = "cuda")]
        TestDevice::Cuda(_) => 2f64.powi(-8),
        _ => SUMS,
    }
}
