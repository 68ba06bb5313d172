//! Calls of cuBLASLt and cuBLAS over fake libraries, which compute on the CPU and refuse calls on request.
//!
//! Without the fakes the tests are skipped; `scripts/check-cublas` provides them.

mod fp8;

use std::marker::PhantomData;
use std::path::PathBuf;
use std::sync::MutexGuard;

use candle_core::{DType, Device, Tensor};
use libloading::os::unix::{Library as Loaded, Symbol};

use super::*;
use crate::batch_invariance::with_batch_invariance;
use crate::cuda::address;
use crate::cuda::gemm::grouped::{GroupedArrays, GroupedGemm, GroupedOutput};
use crate::cuda::gemm::{Matrix, Scaling};

/// Refusals of the stand-in. They cover heuristics with a reduction mask or any, alignments above a limit, the first
/// algorithms, and cublasGemmEx. Same layout as in cublas.cpp.
#[repr(C)]
#[derive(Clone, Copy)]
struct Rules {
    mask: i32,
    heuristics: i32,
    max_alignment: i32,
    n_algorithms: i32,
    gemm_ex: i32,
    /// Algorithm that takes 4 us; the others take 10.
    fastest: i32,
    /// 1 for a release without grouped GEMMs.
    is_old: i32,
    /// 1 for a heuristic whose first algorithm depends on the number of rows.
    by_rows: i32,
}

const NOTHING_REFUSED: Rules =
    Rules { mask: 0, heuristics: 0, max_alignment: 0, n_algorithms: 0, gemm_ex: 0, fastest: -1, is_old: 0, by_rows: 0 };

/// Counts of calls. Same layout as in cublas.cpp.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Calls {
    heuristics: i32,
    products: i32,
    gemm_ex: i32,
    last: i32,
    /// Reduction mask of the last heuristic.
    reductions: i32,
}

/// Rules and counts of the stand-in, for one test at a time.
struct StandIn {
    rules: Symbol<*mut Rules>,
    calls: Symbol<*mut Calls>,
    _alone: MutexGuard<'static, ()>,
}

impl StandIn {
    /// Opens the stand-in; `None` if the libraries are NVIDIA's or missing.
    fn open() -> Option<Self> {
        static ALONE: Mutex<()> = Mutex::new(());
        // SAFETY: a driver's library may be loaded by any program; both symbols have these types.
        let (rules, calls) = unsafe {
            let library = Loaded::new("libcuda.so.1").ok()?;
            let symbols = (library.get(b"stand_in_rules").ok()?, library.get(b"stand_in_calls").ok()?);
            std::mem::forget(library);
            symbols
        };
        let stand_in = Self { rules, calls, _alone: ALONE.lock().unwrap_or_else(PoisonError::into_inner) };
        stand_in.refuse(NOTHING_REFUSED);
        Some(stand_in)
    }

    fn refuse(&self, rules: Rules) {
        // SAFETY: no matmul is running.
        unsafe { **self.rules = rules };
    }

    fn calls(&self) -> Calls {
        // SAFETY: as above.
        unsafe { **self.calls }
    }
}

/// A GEMM of [5, 9] and [9, 7], with its variations.
#[derive(Clone, Copy, Debug)]
struct Case {
    dtypes: [DType; 2],
    transposed: [bool; 2],
    /// Padding elements between the rows of a, b and c.
    gap: usize,
    plus: Addend,
    has_bias: bool,
    factor: f32,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Addend {
    Nothing,
    Output,
    Other,
}

const SIZES: [usize; 3] = [5, 7, 9];

const PLAIN: Case = Case {
    dtypes: [DType::BF16, DType::BF16],
    transposed: [false, true],
    gap: 0,
    plus: Addend::Nothing,
    has_bias: false,
    factor: 1.0,
};

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for transposed in [[false, false], [false, true], [true, false], [true, true]] {
        for (plus, has_bias) in [
            (Addend::Nothing, false),
            (Addend::Nothing, true),
            (Addend::Output, false),
            (Addend::Other, false),
            (Addend::Other, true),
        ] {
            let gap = cases.len() % 3;
            cases.push(Case { transposed, gap, plus, has_bias, ..PLAIN });
        }
    }
    for dtypes in [[DType::F32; 2], [DType::F16; 2], [DType::BF16, DType::F32]] {
        cases.push(Case { dtypes, plus: Addend::Output, ..PLAIN });
        cases.push(Case { dtypes, has_bias: true, ..PLAIN });
        cases.push(Case { dtypes, factor: -2.5, plus: Addend::Other, ..PLAIN });
    }
    cases
}

/// Tensors of a GEMM: a, b, c, the addend and the bias.
struct Tensors([Tensor; 5]);

impl Tensors {
    fn new(case: &Case, device: &Device) -> Self {
        let [m, n, k] = SIZES;
        let rows = |is_transposed: bool, rows: usize, columns: usize| {
            if is_transposed { (columns, rows + case.gap) } else { (rows, columns + case.gap) }
        };
        let tensor = |(rows, columns): (usize, usize), dtype: DType, step: f64| {
            let values: Vec<f32> = (0..rows * columns).map(|i| ((i + 1) as f64 * step).sin() as f32).collect();
            let x = Tensor::from_vec(values, (rows, columns), &Device::Cpu).unwrap();
            x.to_dtype(dtype).unwrap().to_device(device).unwrap()
        };
        let [dtype, c_dtype] = case.dtypes;
        Self([
            tensor(rows(case.transposed[0], m, k), dtype, 0.7),
            tensor(rows(case.transposed[1], k, n), dtype, 0.3),
            tensor((m, n + case.gap), c_dtype, 0.9),
            tensor((m, n + case.gap), c_dtype, 1.1),
            tensor((1, n), c_dtype, 1.3),
        ])
    }

    fn gemm(&self, case: &Case) -> Gemm {
        let at = |i: usize| address("gemm", &self.0[i]).unwrap();
        let stride = |i: usize| self.0[i].dims()[1];
        let matrix = |i: usize| Matrix { is_transposed: case.transposed[i], stride: Some(stride(i)), address: at(i) };
        Gemm {
            a: matrix(0),
            b: matrix(1),
            c: at(2),
            c_stride: Some(stride(2)),
            c_dtype: case.dtypes[1],
            plus: match case.plus {
                Addend::Nothing => None,
                Addend::Output => Some(at(2)),
                Addend::Other => Some(at(3)),
            },
            bias: case.has_bias.then(|| at(4)),
            factor: case.factor,
            ..Gemm::new(SIZES, case.dtypes[0])
        }
    }

    fn output(&self) -> Vec<f32> {
        let c = self.0[2].to_device(&Device::Cpu).unwrap().to_dtype(DType::F32).unwrap();
        c.flatten_all().unwrap().to_vec1().unwrap()
    }
}

/// Creates a device whose plans are separate from other tests'.
fn device() -> Device {
    Device::new_cuda_with_stream(0).unwrap()
}

fn run_on(device: &Device, case: &Case) -> Result<Vec<f32>> {
    let tensors = Tensors::new(case, device);
    // SAFETY: the tensors are those of the GEMM.
    unsafe { tensors.gemm(case).run(Gpu::Device(device.as_cuda_device()?))? };
    Ok(tensors.output())
}

#[track_caller]
fn check(device: &Device, case: &Case) {
    let got = run_on(device, case).unwrap();
    let tensors = Tensors::new(case, &Device::Cpu);
    // SAFETY: as in `run_on`.
    unsafe { tensors.gemm(case).run(Gpu::Emulated(PhantomData)) }.unwrap();
    // With an addend and a bias cublasGemmEx rounds twice.
    let bound = if case.dtypes[1] == DType::F32 { 1e-6 } else { 2f32.powi(-6) };
    for (i, (got, want)) in got.iter().zip(tensors.output()).enumerate() {
        assert!((got - want).abs() <= bound * want.abs().max(1.0), "{case:?}: {got} at {i}, want {want}");
    }
}

#[test]
fn every_layout_dtype_and_addend_equals_the_definition() {
    let Some(stand_in) = StandIn::open() else { return };
    let device = device();
    let before = stand_in.calls();
    cases().iter().for_each(|case| check(&device, case));
    let calls = stand_in.calls();
    assert_eq!(calls.products - before.products, cases().len() as i32);
    assert_eq!(calls.gemm_ex, before.gemm_ex);
}

#[test]
fn every_fallback_equals_the_definition() {
    let Some(stand_in) = StandIn::open() else { return };
    for (rules, uses_gemm_ex) in [
        (Rules { mask: 1, ..NOTHING_REFUSED }, false),
        (Rules { max_alignment: 4, ..NOTHING_REFUSED }, false),
        (Rules { n_algorithms: 3, ..NOTHING_REFUSED }, false),
        (Rules { n_algorithms: 5, ..NOTHING_REFUSED }, true),
        (Rules { heuristics: 1, ..NOTHING_REFUSED }, true),
    ] {
        stand_in.refuse(rules);
        let (device, before) = (device(), stand_in.calls());
        // The second pass takes the route that the first one found.
        cases().iter().chain(&cases()).for_each(|case| check(&device, case));
        let calls = stand_in.calls();
        assert_eq!(calls.gemm_ex - before.gemm_ex, if uses_gemm_ex { 2 * cases().len() as i32 } else { 0 });
    }
}

#[test]
fn an_unsupported_gemm_is_an_error_that_names_the_refusals() {
    let Some(stand_in) = StandIn::open() else { return };
    stand_in.refuse(Rules { heuristics: 1, gemm_ex: 1, ..NOTHING_REFUSED });
    let error = run_on(&device(), &PLAIN).unwrap_err().to_string();
    for part in ["cuBLASLt failed at Gemm", "partial sums in any dtype", "cublasGemmEx: CUBLAS_STATUS_NOT_SUPPORTED"] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn the_heuristic_is_queried_once_per_key() {
    let Some(stand_in) = StandIn::open() else { return };
    let (device, before) = (device(), stand_in.calls());
    (0..5).for_each(|_| check(&device, &PLAIN));
    let calls = stand_in.calls();
    assert_eq!((calls.heuristics - before.heuristics, calls.products - before.products), (1, 5));
}

#[test]
fn a_gemm_over_zero_terms_calls_no_library() {
    let Some(stand_in) = StandIn::open() else { return };
    let (device, before) = (device(), stand_in.calls());
    for case in cases() {
        let tensors = [&device, &Device::Cpu].map(|device| Tensors::new(&case, device));
        let gpus = [Gpu::Device(device.as_cuda_device().unwrap()), Gpu::Emulated(PhantomData)];
        for (tensors, gpu) in tensors.iter().zip(gpus) {
            // SAFETY: a and b are not read.
            unsafe { Gemm { k: 0, ..tensors.gemm(&case) }.run(gpu) }.unwrap();
        }
        assert_eq!(tensors[0].output(), tensors[1].output(), "{case:?}");
    }
    assert_eq!(stand_in.calls(), before);
}

/// Runs a case on a new device whose GEMMs are tuned into a folder, and checks it against the definition.
fn tuned(folder: &std::path::Path, case: &Case) {
    let device = device();
    let mut library = CublasLt::open(device.as_cuda_device().unwrap()).unwrap();
    // SAFETY: the library is loaded.
    let cublas_lt = unsafe { sys::cublasLtGetVersion() };
    let tuned_on = TunedOn { device: "stand-in".into(), cublas_lt, driver: "1.2".into() };
    library.choices = Some(Choices::open(folder, tuned_on));
    DEVICES.lock().unwrap().insert(device.as_cuda_device().unwrap().id(), library);
    check(&device, case);
}

#[test]
fn a_tuned_gemm_computes_by_the_fastest_algorithm_of_the_first_run() {
    let Some(stand_in) = StandIn::open() else { return };
    let folder: PathBuf = std::env::temp_dir().join(format!("candlewick-tuned-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    for case in [PLAIN, Case { plus: Addend::Output, ..PLAIN }, Case { has_bias: true, gap: 2, ..PLAIN }] {
        stand_in.refuse(Rules { fastest: 3, ..NOTHING_REFUSED });
        let before = stand_in.calls();
        tuned(&folder, &case);
        let calls = stand_in.calls();
        let n_timed = 5 * (TIMED_RUNS as i32 + 1);
        assert_eq!((calls.products - before.products, calls.last), (n_timed + 1, 3), "{case:?}");
        // In another run another algorithm would be faster.
        stand_in.refuse(Rules { fastest: 1, ..NOTHING_REFUSED });
        tuned(&folder, &case);
        assert_eq!((stand_in.calls().products - calls.products, stand_in.calls().last), (1, 3), "{case:?}");
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

/// Returns the algorithms that compute GEMMs of these numbers of rows.
fn algorithms_of_rows(stand_in: &StandIn, rows: &[usize]) -> Vec<i32> {
    let device = device();
    let of_rows = |m: &usize| {
        let ones = |shape: (usize, usize)| Tensor::ones(shape, DType::BF16, &Device::Cpu).unwrap();
        let tensors = [(*m, 64), (32, 64), (*m, 32)].map(|shape| ones(shape).to_device(&device).unwrap());
        let at = |i: usize| address("gemm", &tensors[i]).unwrap();
        let (a, b) = (Matrix::plain(at(0)), Matrix::transposed(at(1)));
        let gemm = Gemm { a, b, c: at(2), ..Gemm::new([*m, 32, 64], DType::BF16) };
        // SAFETY: the tensors are those of the GEMM.
        unsafe { gemm.run(Gpu::Device(device.as_cuda_device().unwrap())).unwrap() };
        let c = tensors[2].to_device(&Device::Cpu).unwrap().to_dtype(DType::F32).unwrap();
        assert!(c.flatten_all().unwrap().to_vec1::<f32>().unwrap().iter().all(|x| *x == 64.0), "{m} rows");
        stand_in.calls().last
    };
    rows.iter().map(of_rows).collect()
}

#[test]
fn with_batch_invariance_the_algorithm_does_not_depend_on_the_number_of_rows() {
    let Some(stand_in) = StandIn::open() else { return };
    stand_in.refuse(Rules { by_rows: 1, ..NOTHING_REFUSED });
    let rows = [1, 2, 16, 3, 1, 77];
    assert_eq!(algorithms_of_rows(&stand_in, &rows), [1, 2, 1, 3, 1, 2], "each number of rows has its own first");
    // The first candidate for 1024 rows, 4, does not compute a single row; the second is 0.
    let invariant = with_batch_invariance(|| algorithms_of_rows(&stand_in, &rows));
    assert_eq!(invariant, [0; 6]);
    assert_eq!(stand_in.calls().reductions, 0, "no algorithm may split k");
    let before = stand_in.calls().heuristics;
    with_batch_invariance(|| algorithms_of_rows(&stand_in, &[5]));
    assert_eq!(stand_in.calls().heuristics - before, 1);
}

#[test]
fn with_batch_invariance_a_gemm_without_an_algorithm_for_all_rows_fails() {
    let Some(stand_in) = StandIn::open() else { return };
    stand_in.refuse(Rules { heuristics: 1, ..NOTHING_REFUSED });
    let error = with_batch_invariance(|| run_on(&device(), &PLAIN).unwrap_err().to_string());
    assert!(error.contains("batch_invariant"), "{error}");
    let before = stand_in.calls();
    with_batch_invariance(|| assert!(run_on(&device(), &PLAIN).is_err()));
    assert_eq!(stand_in.calls().products, before.products, "nothing else computes it");
    // Weight gradients sum over the rows, and fall back as without batch invariance.
    let of_gradients = Case { transposed: [true, false], ..PLAIN };
    with_batch_invariance(|| assert!(run_on(&device(), &of_gradients).is_ok()));
}

/// A grouped GEMM: x [n, in], y [n, out] and w [e * out, in], with arrays that describe the groups.
struct GroupedTensors {
    operands: [Tensor; 3],
    arrays: [Tensor; 3],
    gemm: GroupedGemm,
}

impl GroupedTensors {
    const SIZES: [i32; 5] = [3, 0, 5, 1, 0];
    const IN: usize = 8;
    const OUT: usize = 16;

    fn new(output: GroupedOutput, adds: bool, output_dtype: DType, device: &Device) -> Self {
        let (e, [n_in, n_out], n) =
            (Self::SIZES.len(), [Self::IN, Self::OUT], Self::SIZES.iter().sum::<i32>() as usize);
        let tensor = |rows: usize, columns: usize, dtype: DType, step: f64| {
            let values: Vec<f32> = (0..rows * columns).map(|i| ((i + 1) as f64 * step).sin() as f32).collect();
            let x = Tensor::from_vec(values, (rows, columns), &Device::Cpu).unwrap();
            x.to_dtype(dtype).unwrap().to_device(device).unwrap()
        };
        let dtype_of = |operand| if operand == output { output_dtype } else { DType::BF16 };
        let operands = [
            tensor(n, n_in, dtype_of(GroupedOutput::X), 0.7),
            tensor(n, n_out, dtype_of(GroupedOutput::Y), 0.3),
            tensor(e * n_out, n_in, dtype_of(GroupedOutput::W), 0.9),
        ];
        let at = |tensor: &Tensor| address("grouped gemm", tensor).unwrap();
        let bytes = |i: usize, n: usize| (n * operands[i].dtype().size_in_bytes()) as u64;
        let first_row = |group: usize| Self::SIZES[..group].iter().sum::<i32>() as usize;
        // Runs of addresses are aligned to 16 bytes.
        let addresses = |i: usize, first: &dyn Fn(usize) -> usize| {
            let of_group = |group| (at(&operands[i]) + bytes(i, first(group))) as i64;
            (0..e).map(of_group).chain([0]).collect::<Vec<i64>>()
        };
        let addresses = [
            addresses(0, &|group| first_row(group) * n_in),
            addresses(1, &|group| first_row(group) * n_out),
            addresses(2, &|group| group * n_out * n_in),
        ]
        .concat();
        let sizes = [[n_in as i32; 5], [n_out as i32; 5], Self::SIZES].concat();
        let sizes: Vec<u32> = sizes.iter().map(|size| *size as u32).collect();
        let arrays = [
            Tensor::new(addresses, device).unwrap(),
            Tensor::new(sizes, device).unwrap(),
            Tensor::new(vec![1f32, if adds { 1.0 } else { 0.0 }], device).unwrap(),
        ];
        let [of_addresses, of_sizes, factors] = arrays.each_ref().map(at);
        let (run, size) = (8 * (e + 1) as u64, 4 * e as u64);
        let gemm = GroupedGemm {
            output,
            adds,
            dtype: DType::BF16,
            output_dtype,
            e,
            n,
            n_in,
            n_out,
            arrays: GroupedArrays {
                x: of_addresses,
                y: of_addresses + run,
                w: of_addresses + 2 * run,
                n_in: of_sizes,
                n_out: of_sizes + size,
                n_rows: of_sizes + 2 * size,
                alpha: factors,
                beta: factors + 4,
            },
        };
        Self { operands, arrays, gemm }
    }

    fn run(&self, gpu: Gpu) -> Result<Vec<f32>> {
        assert_eq!(self.arrays.len(), 3);
        // SAFETY: the arrays describe the operands.
        unsafe { self.gemm.run(gpu)? };
        let output = &self.operands[match self.gemm.output {
            GroupedOutput::X => 0,
            GroupedOutput::Y => 1,
            GroupedOutput::W => 2,
        }];
        output.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1()
    }
}

#[test]
fn a_grouped_gemm_equals_the_definition_and_its_heuristic_is_queried_once() {
    let Some(stand_in) = StandIn::open() else { return };
    let (device, before) = (device(), stand_in.calls());
    let cases = [
        (GroupedOutput::Y, false, DType::BF16),
        (GroupedOutput::X, false, DType::BF16),
        (GroupedOutput::W, false, DType::F32),
        (GroupedOutput::W, true, DType::F32),
        (GroupedOutput::W, true, DType::BF16),
    ];
    for _ in 0..2 {
        for (output, adds, dtype) in cases {
            let on = |device: &Device| GroupedTensors::new(output, adds, dtype, device);
            let got = on(&device).run(Gpu::Device(device.as_cuda_device().unwrap())).unwrap();
            let want = on(&Device::Cpu).run(Gpu::Emulated(PhantomData)).unwrap();
            let bound = if dtype == DType::F32 { 1e-6 } else { 2f32.powi(-7) };
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                // The emulation leaves undefined matrices NaN.
                let equal = want.is_nan() || (got - want).abs() <= bound * want.abs().max(1.0);
                assert!(equal, "{output:?} {adds} {dtype:?}: {got} at {i}, want {want}");
            }
        }
    }
    let calls = stand_in.calls();
    // The GEMMs of W with and without an addend share a key.
    assert_eq!((calls.heuristics - before.heuristics, calls.products - before.products), (4, 10));
}

#[test]
fn a_library_without_grouped_gemms_is_named_with_its_release() {
    let Some(stand_in) = StandIn::open() else { return };
    stand_in.refuse(Rules { is_old: 1, ..NOTHING_REFUSED });
    let device = device();
    let tensors = GroupedTensors::new(GroupedOutput::Y, false, DType::BF16, &device);
    let error = tensors.run(Gpu::Device(device.as_cuda_device().unwrap())).unwrap_err().to_string();
    for part in ["needs cuBLAS 13.4 or newer, not 13.1", "experts_implementation: fused"] {
        assert!(error.contains(part), "{error}");
    }
    stand_in.refuse(Rules { heuristics: 1, ..NOTHING_REFUSED });
    let error = tensors.run(Gpu::Device(device.as_cuda_device().unwrap())).unwrap_err().to_string();
    assert!(error.contains("its heuristic: CUBLAS_STATUS_NOT_SUPPORTED"), "{error}");
}
