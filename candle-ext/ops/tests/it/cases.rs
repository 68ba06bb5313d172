//! Shared test support: seeded inputs, the relative error, and one check for all ops.

use std::any::Any;
#[cfg(not(feature = "cuda"))]
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::LazyLock;

use candle_core::{DType, Device, Result, Shape, Tensor, Var};
use candlewick_ops::{GradSink, Tape, Weight, record_exchange};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand_distr::{Distribution, StandardNormal};

use crate::kernels;

/// Bound of f32 arithmetic compared with f64: rows of up to a few hundred terms lose about three bits.
pub(crate) const F32: f64 = 1e-6;

/// Returns the bound of two roundings to a dtype, as rms_norm has them. One rounding moves a value by at most half a
/// unit: 2^-9 for bf16, 2^-12 for f16.
pub(crate) fn bound(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 2f64.powi(-8),
        DType::F16 => 2f64.powi(-11),
        _ => F32,
    }
}

/// Factor on the bounds for other seeds. The bounds were chosen for seed 0.
const OTHER_INPUTS: f64 = 3.0;

/// Seed of all inputs, and of the orders of emulated lanes, from CANDLEWICK_OPS_SEED; failures print it.
///
/// Tests draw inputs before they compute. So the GEMM kernel is selected here.
static SEED: LazyLock<u64> = LazyLock::new(|| {
    kernels::select();
    match std::env::var("CANDLEWICK_OPS_SEED") {
        Ok(seed) => seed.parse().expect("CANDLEWICK_OPS_SEED is a number"),
        Err(_) => 0,
    }
});

/// Returns the seed of the order of lanes in the next emulation of this thread. It differs from those before.
#[cfg(not(feature = "cuda"))]
fn next_lane_seed() -> u64 {
    thread_local! {
        static RUNS: Cell<u64> = const { Cell::new(0) };
    }
    let run = RUNS.replace(RUNS.get() + 1);
    SEED.wrapping_mul(1 << 32).wrapping_add(run)
}

/// Returns a random number generator with this seed.
pub(crate) fn rng(seed: u64) -> StdRng {
    StdRng::seed_from_u64(seed.wrapping_add(SEED.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
}

/// Returns standard normal values, f32, with this seed.
pub(crate) fn randn(shape: impl Into<Shape>, seed: u64) -> Tensor {
    let shape = shape.into();
    let values: Vec<f32> = StandardNormal.sample_iter(rng(seed)).take(shape.elem_count()).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

/// Returns all elements as f64.
pub(crate) fn values(x: &Tensor) -> Vec<f64> {
    x.to_device(&Device::Cpu).unwrap().to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Records an exchange that returns x, and whose backward returns the gradient later.
pub(crate) fn identity_exchange(x: &Tensor) -> candle_core::Result<Tensor> {
    let backward = |dy: &Tensor| {
        let dy = dy.clone();
        Ok(Box::new(move || Ok(dy)) as _)
    };
    record_exchange("exchange", x, |x| x.affine(1.0, 0.0), backward)
}

/// Returns the bits of all elements, for exact comparisons.
pub(crate) fn bits(x: &Tensor) -> Vec<u64> {
    values(x).into_iter().map(f64::to_bits).collect()
}

pub(crate) fn dot(a: &Tensor, b: &Tensor) -> f64 {
    values(a).iter().zip(values(b)).map(|(a, b)| a * b).sum()
}

pub(crate) fn norm(x: &Tensor) -> f64 {
    dot(x, x).sqrt()
}

/// Returns |got - want| / max(|want|, floor).
pub(crate) fn relative_error(got: &Tensor, want: &Tensor, floor: f64) -> f64 {
    assert_eq!(got.dims(), want.dims());
    let pairs = values(got).into_iter().zip(values(want));
    let difference = pairs.map(|(got, want)| (got - want).powi(2)).sum::<f64>().sqrt();
    if difference == 0.0 { 0.0 } else { difference / norm(want).max(floor) }
}

#[track_caller]
pub(crate) fn assert_close(what: &str, got: &Tensor, want: &Tensor, bound: f64) {
    assert_close_above(what, got, want, bound, 0.0);
}

#[track_caller]
pub(crate) fn assert_close_above(what: &str, got: &Tensor, want: &Tensor, bound: f64, floor: f64) {
    let error = relative_error(got, want, floor);
    let bound = if *SEED == 0 { bound } else { bound * OTHER_INPUTS };
    assert!(error <= bound, "{what}: relative error {error:.2e}, bound {bound:.2e}, seed {}", *SEED);
}

#[track_caller]
pub(crate) fn assert_error<T>(result: Result<T>, fragment: &str) {
    let message = result.err().expect("an error").to_string();
    assert!(message.contains(fragment), "{message:?} does not say {fragment:?}");
}

/// Returns a weight whose gradient is an aligned view in the middle of a longer buffer.
pub(crate) fn trainable(value: &Tensor) -> Weight {
    let n = value.elem_count();
    let is_aligned = value.dims().last().is_some_and(|d| d.is_multiple_of(8));
    let flat = Tensor::zeros(n + 9, DType::F32, value.device()).unwrap();
    let view = flat.narrow(0, if is_aligned { 8 } else { 3 }, n).unwrap().reshape(value.shape()).unwrap();
    Weight::trainable(value.clone(), GradSink::new(view).unwrap())
}

pub(crate) fn grad_of(weight: &Weight) -> Tensor {
    weight.sink().unwrap().grad().unwrap()
}

/// Runs a check of every item. Panics once, at the end, with the message of each failure.
#[track_caller]
pub(crate) fn check_each<T>(items: impl IntoIterator<Item = T>, mut check: impl FnMut(T)) {
    let mut n_items = 0;
    let mut failures = Vec::new();
    for item in items {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| check(item))) {
            failures.push(format!("number {n_items}: {}", message(&*panic)));
        }
        n_items += 1;
    }
    assert!(failures.is_empty(), "{} of {n_items} failed\n{}", failures.len(), failures.join("\n"));
}

/// Returns the text of a panic.
fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without a text")
}

#[test]
fn check_each_continues_after_a_failure_and_reports_all() {
    let mut checked = Vec::new();
    let check = AssertUnwindSafe(|| {
        check_each([1, 2, 3, 4], |i| {
            checked.push(i);
            assert!(i != 2, "two is wrong");
            assert_ne!(i, 4, "so is {i}");
        });
    });
    let panic = catch_unwind(check).unwrap_err();
    let said = message(&*panic);
    assert_eq!(checked, [1, 2, 3, 4]);
    for part in ["2 of 4 failed", "number 1: two is wrong", "so is 4"] {
        assert!(said.contains(part), "{said}");
    }
}

/// Records `op` on a tape of `inputs`.
pub(crate) fn tape(inputs: &[Tensor], op: impl FnOnce() -> Result<Tensor>) -> Tape {
    let inputs: Vec<&Tensor> = inputs.iter().collect();
    Tape::record(&inputs, op).unwrap()
}

/// GPU of all tests, opened once as in a run.
#[cfg(feature = "cuda")]
static GPU: LazyLock<Device> = LazyLock::new(|| {
    if let Some(folder) = std::env::var_os("CANDLEWICK_KERNELS") {
        candlewick_ops::replace_kernels(folder.as_ref()).unwrap();
    }
    if let Some(folder) = std::env::var_os("CANDLEWICK_CUTLASS") {
        candlewick_ops::load_cutlass_from(folder.as_ref()).unwrap();
    }
    candlewick_ops::DeviceChoice::Cuda(0).open().expect("tests with the feature cuda need a GPU")
});

/// Device that runs an op. Tests run on every device that the build and the machine have.
#[derive(Clone, Debug)]
pub(crate) enum TestDevice {
    /// CPU kernel.
    Cpu,
    /// CUDA kernel emulated on the CPU, in a build without CUDA.
    #[cfg(not(feature = "cuda"))]
    Emulated,
    /// CUDA kernel on a GPU.
    #[cfg(feature = "cuda")]
    Cuda(Device),
}

impl TestDevice {
    pub(crate) fn all() -> Vec<Self> {
        if kernels::select() {
            return vec![Self::Cpu];
        }
        vec![
            Self::Cpu,
            #[cfg(not(feature = "cuda"))]
            Self::Emulated,
            #[cfg(feature = "cuda")]
            Self::Cuda(GPU.clone()),
        ]
    }

    /// Runs `f` on this device, with kernel outputs filled with NaN first.
    pub(crate) fn run<T>(&self, f: impl FnOnce() -> T) -> T {
        match self {
            Self::Cpu => f(),
            #[cfg(not(feature = "cuda"))]
            Self::Emulated => candlewick_ops::emulate_with_seed(next_lane_seed(), f),
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => candlewick_ops::poison(f),
        }
    }

    pub(crate) fn device(&self) -> Device {
        match self {
            #[cfg(feature = "cuda")]
            Self::Cuda(device) => device.clone(),
            _ => Device::Cpu,
        }
    }

    /// Returns true if cuBLASLt multiplies. Its algorithm depends on the number of rows, and it may round a matmul to the
    /// output's dtype before it adds to the output.
    pub(crate) fn uses_cublas(&self) -> bool {
        match self {
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => true,
            _ => false,
        }
    }

    pub(crate) fn put(&self, x: &Tensor) -> Tensor {
        match self {
            #[cfg(feature = "cuda")]
            Self::Cuda(device) => x.to_device(device).unwrap(),
            _ => x.clone(),
        }
    }
}

type Op<'a> = &'a dyn Fn(&[Tensor], &[Weight]) -> Result<Tensor>;

/// An op of tracked inputs and weights, and its reference in plain candle ops on f64 (inputs, weights).
pub(crate) struct OpCase<'a> {
    pub(crate) name: &'a str,
    pub(crate) inputs: Vec<Tensor>,
    pub(crate) weights: Vec<Tensor>,
    pub(crate) op: Op<'a>,
    pub(crate) reference: &'a dyn Fn(&[Tensor]) -> Result<Tensor>,
}

/// Output of an op, and the gradients of all its inputs and weights.
#[derive(Clone)]
struct Results {
    y: Tensor,
    grads: Vec<Tensor>,
}

impl OpCase<'_> {
    /// Compares output and all gradients, for a random upstream gradient, with the reference and the CPU's, on every
    /// device.
    ///
    /// A second run must give the same bits.
    #[track_caller]
    pub(crate) fn check(&self, dtype: DType) {
        self.check_on(&TestDevice::all(), dtype);
    }

    /// Runs [`Case::check`] on some devices, the CPU first.
    #[track_caller]
    pub(crate) fn check_on(&self, devices: &[TestDevice], dtype: DType) {
        let want = self.reference_results(dtype);
        let mut of_cpu = None;
        for test_device in devices {
            let got = test_device.run(|| self.results_in(test_device, dtype));
            let what = format!("{} {dtype:?} {test_device:?}", self.name);
            got.assert_close(&what, &want, bound(dtype));
            let of_cpu = of_cpu.get_or_insert_with(|| got.clone());
            // Both are within the bound of the exact result.
            got.assert_close(&format!("{what} beside the CPU"), of_cpu, 2.0 * bound(dtype));
            got.assert_same(&what, &test_device.run(|| self.results_in(test_device, dtype)));
        }
    }

    fn results_in(&self, test_device: &TestDevice, dtype: DType) -> Results {
        let put = |x: &Tensor| test_device.put(&x.to_dtype(dtype).unwrap());
        let inputs: Vec<Tensor> = self.inputs.iter().map(put).collect();
        let weights: Vec<Weight> = self.weights.iter().map(|w| trainable(&put(w))).collect();
        let tape = tape(&inputs, || (self.op)(&inputs, &weights));
        let y = tape.output().clone();
        let grads = tape.backward(&test_device.put(&upstream(&y, y.dtype()))).unwrap();
        let grads = inputs.iter().map(|x| grads.get(x).unwrap().clone()).chain(weights.iter().map(grad_of));
        let host = |x: &Tensor| x.to_device(&Device::Cpu).unwrap();
        Results { y: host(&y), grads: grads.map(|grad| host(&grad)).collect() }
    }

    fn reference_results(&self, dtype: DType) -> Results {
        let exact = |x: &Tensor| Var::from_tensor(&x.to_dtype(dtype).unwrap().to_dtype(DType::F64).unwrap()).unwrap();
        let leaves: Vec<Var> = self.inputs.iter().chain(&self.weights).map(exact).collect();
        let tensors: Vec<Tensor> = leaves.iter().map(|x| x.as_tensor().clone()).collect();
        let y = (self.reference)(&tensors).unwrap();
        let dy = upstream(&y, dtype).to_dtype(DType::F64).unwrap();
        let grads = (&y * dy).unwrap().sum_all().unwrap().backward().unwrap();
        let grad = |x: &Var| grads.get(x).cloned().unwrap_or_else(|| x.zeros_like().unwrap());
        Results { y: y.detach(), grads: leaves.iter().map(grad).collect() }
    }

    pub(crate) fn check_all_formats(&self) {
        check_each([DType::F32, DType::BF16, DType::F16], |dtype| self.check(dtype));
    }

    /// Compares the gradient along a random direction with a central difference, in f32.
    #[track_caller]
    pub(crate) fn check_finite_difference(&self) {
        let all: Vec<&Tensor> = self.inputs.iter().chain(&self.weights).collect();
        let n_inputs = self.inputs.len();
        let direction: Vec<Tensor> = all.iter().enumerate().map(|(i, x)| randn(x.shape(), 500 + i as u64)).collect();
        let run = |step: f64| {
            let moved: Vec<Tensor> =
                all.iter().zip(&direction).map(|(x, d)| (*x + (d * step).unwrap()).unwrap()).collect();
            let weights: Vec<Weight> = moved[n_inputs..].iter().map(|w| Weight::frozen(w.clone())).collect();
            (self.op)(&moved[..n_inputs], &weights).unwrap()
        };
        let dy = randn(run(0.0).shape(), 99);
        let h = 3e-3;
        let want = (dot(&run(h), &dy) - dot(&run(-h), &dy)) / (2.0 * h);

        let weights: Vec<Weight> = self.weights.iter().map(trainable).collect();
        let grads = tape(&self.inputs, || (self.op)(&self.inputs, &weights)).backward(&dy).unwrap();
        let got = self.inputs.iter().map(|x| grads.get(x).unwrap().clone()).chain(weights.iter().map(grad_of));
        let grads: Vec<Tensor> = got.collect();
        let got: f64 = grads.iter().zip(&direction).map(|(grad, d)| dot(grad, d)).sum();
        assert_slope(self.name, got, want, &grads.iter().collect::<Vec<_>>());
    }
}

/// Compares a gradient along a random direction with a central difference, in f32.
///
/// The error is relative to the gradient's norm, in case the direction is nearly orthogonal to it.
#[track_caller]
pub(crate) fn assert_slope(what: &str, got: f64, want: f64, grads: &[&Tensor]) {
    let norm = grads.iter().map(|grad| dot(grad, grad)).sum::<f64>().sqrt();
    let error = (got - want).abs() / want.abs().max(0.3 * norm);
    assert!(error < 2e-3, "{what}: gradient {got}, central difference {want}, seed {}", *SEED);
}

impl Results {
    /// Compares outputs and gradients.
    ///
    /// Some gradients vanish because terms of the size of the upstream gradient cancel, as in a softmax over one key.
    /// Their error is relative to a tenth of the upstream gradient.
    #[track_caller]
    fn assert_close(&self, what: &str, want: &Self, bound: f64) {
        assert_close(&format!("{what} y"), &self.y, &want.y, bound);
        let floor = 0.1 * norm(&upstream(&self.y, self.y.dtype()));
        for (i, (got, want)) in self.grads.iter().zip(&want.grads).enumerate() {
            assert_close_above(&format!("{what} gradient {i}"), got, want, bound, floor);
        }
    }

    #[track_caller]
    fn assert_same(&self, what: &str, again: &Self) {
        let all =
            |results: &Self| -> Vec<Vec<u64>> { std::iter::once(&results.y).chain(&results.grads).map(bits).collect() };
        assert!(all(self) == all(again), "{what}: another run gives other bits");
    }
}

/// Returns a random gradient of an output.
fn upstream(y: &Tensor, dtype: DType) -> Tensor {
    randn(y.shape(), 99).to_dtype(dtype).unwrap()
}
