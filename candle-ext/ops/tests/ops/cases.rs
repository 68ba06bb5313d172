//! What the tests share: seeded inputs, the relative error, and one check for all ops.

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Shape, Tensor, Var};
use candlewick_ops::{GradSink, Weight, cotangent};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand_distr::{Distribution, StandardNormal};

/// f32 arithmetic against f64: rows of up to a few hundred terms lose about three bits.
pub(crate) const F32: f64 = 1e-6;

/// Rounding to a format once moves a value by at most half a unit: 2^-9 for bf16, 2^-12 for f16.
/// The bound is two such roundings, as rms_norm has them.
pub(crate) fn bound(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 2f64.powi(-8),
        DType::F16 => 2f64.powi(-11),
        _ => F32,
    }
}

/// Standard normal values, f32, the same for the same seed.
pub(crate) fn randn(shape: impl Into<Shape>, seed: u64) -> Tensor {
    let shape = shape.into();
    let rng = StdRng::seed_from_u64(seed);
    let values: Vec<f32> = StandardNormal.sample_iter(rng).take(shape.elem_count()).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

/// All elements as f64.
pub(crate) fn values(x: &Tensor) -> Vec<f64> {
    x.to_device(&Device::Cpu).unwrap().to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// The bits of all elements, for comparisons that allow no difference.
pub(crate) fn bits(x: &Tensor) -> Vec<u64> {
    values(x).into_iter().map(f64::to_bits).collect()
}

pub(crate) fn dot(a: &Tensor, b: &Tensor) -> f64 {
    values(a).iter().zip(values(b)).map(|(a, b)| a * b).sum()
}

pub(crate) fn norm(x: &Tensor) -> f64 {
    dot(x, x).sqrt()
}

/// |got - want| / max(|want|, floor)
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
    assert!(error <= bound, "{what}: relative error {error:.2e}, bound {bound:.2e}");
}

#[track_caller]
pub(crate) fn assert_error<T>(result: Result<T>, fragment: &str) {
    let message = result.err().expect("an error").to_string();
    assert!(message.contains(fragment), "{message:?} does not say {fragment:?}");
}

/// A weight whose gradient is a view in the middle of a longer buffer.
pub(crate) fn trainable(value: &Tensor) -> Weight {
    let n = value.elem_count();
    let flat = Tensor::zeros(n + 7, DType::F32, value.device()).unwrap();
    let view = flat.narrow(0, 3, n).unwrap().reshape(value.shape()).unwrap();
    Weight::trainable(value.clone(), GradSink::new(view).unwrap())
}

pub(crate) fn grad_of(weight: &Weight) -> &Tensor {
    weight.sink().unwrap().grad()
}

pub(crate) fn backward(y: &Tensor, dy: &Tensor) -> GradStore {
    cotangent(y, dy).unwrap().backward().unwrap()
}

/// Where an op is computed: every test that runs in one of these runs in all that the build and the machine have.
#[derive(Clone, Debug)]
pub(crate) enum Place {
    /// The CPU's kernel.
    Cpu,
    /// The CUDA kernel on the CPU.
    #[cfg(feature = "emulate")]
    Emulated,
    /// The CUDA kernel on a GPU.
    #[cfg(feature = "cuda")]
    Cuda(Device),
}

impl Place {
    pub(crate) fn all() -> Vec<Self> {
        vec![
            Self::Cpu,
            #[cfg(feature = "emulate")]
            Self::Emulated,
            #[cfg(feature = "cuda")]
            Self::Cuda(Device::new_cuda(0).expect("tests with the feature cuda need a GPU")),
        ]
    }

    pub(crate) fn run<T>(&self, f: impl FnOnce() -> T) -> T {
        match self {
            #[cfg(feature = "emulate")]
            Self::Emulated => candlewick_ops::emulate(f),
            _ => f(),
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

/// An op of tracked inputs and weights, and the same in plain candle ops on f64 (inputs, weights).
pub(crate) struct Case<'a> {
    pub(crate) name: &'a str,
    pub(crate) inputs: Vec<Tensor>,
    pub(crate) weights: Vec<Tensor>,
    pub(crate) op: Op<'a>,
    pub(crate) reference: &'a dyn Fn(&[Tensor]) -> Result<Tensor>,
}

impl Case<'_> {
    /// Compares output and all gradients with the reference, from a random upstream gradient.
    ///
    /// Some gradients vanish because terms of the size of the upstream gradient cancel (a softmax
    /// over one key, the norm of one element): their error is measured against a tenth of it.
    #[track_caller]
    pub(crate) fn check(&self, dtype: DType) {
        for place in Place::all() {
            place.run(|| self.check_in(&place, dtype));
        }
    }

    #[track_caller]
    fn check_in(&self, place: &Place, dtype: DType) {
        let as_var = |x: &Tensor| Var::from_tensor(&place.put(&x.to_dtype(dtype).unwrap())).unwrap();
        let inputs: Vec<Var> = self.inputs.iter().map(as_var).collect();
        let tensors: Vec<Tensor> = inputs.iter().map(|x| x.as_tensor().clone()).collect();
        let weights: Vec<Weight> =
            self.weights.iter().map(|w| trainable(&place.put(&w.to_dtype(dtype).unwrap()))).collect();
        let y = (self.op)(&tensors, &weights).unwrap();
        let dy = place.put(&randn(y.shape(), 99).to_dtype(y.dtype()).unwrap());
        let grads = backward(&y, &dy);

        let to_f64 = |x: &Tensor| {
            let host = x.to_device(&Device::Cpu).unwrap();
            Var::from_tensor(&host.to_dtype(DType::F64).unwrap()).unwrap()
        };
        let all = tensors.iter().chain(weights.iter().map(Weight::value));
        let exact: Vec<Var> = all.map(to_f64).collect();
        let exact_tensors: Vec<Tensor> = exact.iter().map(|x| x.as_tensor().clone()).collect();
        let want = (self.reference)(&exact_tensors).unwrap();
        assert_close(&format!("{} y {dtype:?} {place:?}", self.name), &y, &want, bound(y.dtype()));

        let dy = dy.to_device(&Device::Cpu).unwrap();
        let seeded = (want * dy.to_dtype(DType::F64).unwrap()).unwrap().sum_all().unwrap();
        let want = seeded.backward().unwrap();
        let got = inputs.iter().map(|x| grads.get(x).unwrap()).chain(weights.iter().map(grad_of));
        for (i, (got, exact)) in got.zip(&exact).enumerate() {
            let what = format!("{} gradient {i} {dtype:?} {place:?}", self.name);
            let want = want.get(exact).cloned().unwrap_or_else(|| exact.zeros_like().unwrap());
            assert_close_above(&what, got, &want, bound(dtype), 0.1 * norm(&dy));
        }
    }

    pub(crate) fn check_all_formats(&self) {
        [DType::F32, DType::BF16, DType::F16].into_iter().for_each(|dtype| self.check(dtype));
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

        let inputs: Vec<Var> = self.inputs.iter().map(|x| Var::from_tensor(x).unwrap()).collect();
        let tensors: Vec<Tensor> = inputs.iter().map(|x| x.as_tensor().clone()).collect();
        let weights: Vec<Weight> = self.weights.iter().map(trainable).collect();
        let grads = backward(&(self.op)(&tensors, &weights).unwrap(), &dy);
        let got = inputs.iter().map(|x| grads.get(x).unwrap()).chain(weights.iter().map(grad_of));
        let got: f64 = got.zip(&direction).map(|(grad, d)| dot(grad, d)).sum();
        let error = (got - want).abs() / want.abs();
        assert!(error < 2e-3, "{}: gradient {got}, central difference {want}", self.name);
    }
}
