use candle_core::DType;

use super::super::{Gemm, Matrix};
use super::*;

/// Fake library that refuses on request and records its calls.
#[derive(Default)]
pub(in super::super) struct Fake {
    /// Index of the first limits within which there are algorithms; `None` if there are none.
    pub(in super::super) first_limits: Option<usize>,
    pub(in super::super) refused: Vec<u64>,
    pub(in super::super) has_gemm_ex: bool,
    pub(in super::super) fatal: Option<u64>,
    /// Microseconds of each algorithm.
    pub(in super::super) times: Vec<f32>,
    pub(in super::super) calls: Vec<String>,
}

pub(in super::super) fn key() -> GemmKey {
    let gemm = Gemm::new([3, 5, 7], DType::BF16);
    GemmKey::of(&Gemm { a: Matrix::plain(0x1000), b: Matrix::plain(0x2040), c: 0x3002, c_dtype: DType::BF16, ..gemm })
}

fn algorithm(id: u64) -> Algorithm {
    Algorithm([id; 8])
}

impl Library for Fake {
    /// Returns two algorithms per limits: 10 and 11, 20 and 21, and so on; or as many as `times` has, if it is set.
    fn candidates(&mut self, within: &Limits, most: usize) -> Result<Vec<Algorithm>, GemmError> {
        let i = limits(&key()).iter().position(|other| other == within).expect("limits of this key");
        self.calls.push(format!("candidates {i}"));
        if self.first_limits.is_none_or(|first| i < first) {
            return Err(GemmError::Refused("NOT_SUPPORTED".into()));
        }
        let n = self.times.len().max(2).min(most) as u64;
        Ok((0..n).map(|id| algorithm(10 * (i as u64 + 1) + id)).collect())
    }

    fn check(&mut self, algorithm: &Algorithm) -> Result<(), GemmError> {
        self.multiply(algorithm)
    }

    fn multiply(&mut self, algorithm: &Algorithm) -> Result<(), GemmError> {
        let id = algorithm.0[0];
        self.calls.push(format!("multiply {id}"));
        match () {
            () if self.fatal == Some(id) => Err(GemmError::Fatal("EXECUTION_FAILED".into())),
            () if self.refused.contains(&id) => Err(GemmError::Refused("NOT_SUPPORTED".into())),
            () => Ok(()),
        }
    }

    fn multiply_by_gemm_ex(&mut self) -> Result<(), GemmError> {
        self.calls.push("gemm_ex".into());
        if self.has_gemm_ex { Ok(()) } else { Err(GemmError::Refused("INVALID_VALUE".into())) }
    }

    fn microseconds(&mut self, algorithm: &Algorithm) -> Result<f32, GemmError> {
        self.multiply(algorithm)?;
        Ok(self.times[algorithm.0[0] as usize - 10])
    }
}

#[track_caller]
fn check(mut library: Fake, want: Route, calls: &[&str], said: &[&str]) {
    let found = compute(&mut library, &key(), None).expect("a route");
    assert_eq!(found.route, want);
    assert_eq!(library.calls, calls);
    let fallback = found.fallback.unwrap_or_default();
    assert_eq!(fallback.is_empty(), said.is_empty(), "{fallback}");
    said.iter().for_each(|part| assert!(fallback.contains(part), "{fallback:?} does not say {part:?}"));
}

#[test]
fn the_first_algorithm_computes_without_a_fallback() {
    let library = Fake { first_limits: Some(0), ..Fake::default() };
    check(library, Route::Lt(algorithm(10)), &["candidates 0", "multiply 10"], &[]);
}

#[test]
fn a_refused_gemm_uses_the_next_algorithm() {
    let library = Fake { first_limits: Some(0), refused: vec![10], ..Fake::default() };
    let calls = ["candidates 0", "multiply 10", "multiply 11"];
    check(library, Route::Lt(algorithm(11)), &calls, &["algorithm 0 of partial sums in f32", "NOT_SUPPORTED"]);
}

#[test]
fn a_refused_heuristic_drops_the_reduction_mask_and_then_alignments() {
    let library = Fake { first_limits: Some(1), ..Fake::default() };
    let said = ["cuBLASLt with partial sums in any dtype, alignments 256,64,2,2"];
    check(library, Route::Lt(algorithm(20)), &["candidates 0", "candidates 1", "multiply 20"], &said);
    let library = Fake { first_limits: Some(3), refused: vec![40], ..Fake::default() };
    let calls = ["candidates 0", "candidates 1", "candidates 2", "candidates 3", "multiply 40", "multiply 41"];
    check(library, Route::Lt(algorithm(41)), &calls, &["alignments 8,8,2,2"]);
}

#[test]
fn algorithms_that_all_fail_to_run_loosen_the_limits() {
    let library = Fake { first_limits: Some(0), refused: vec![10, 11], ..Fake::default() };
    let calls = ["candidates 0", "multiply 10", "multiply 11", "candidates 1", "multiply 20"];
    check(library, Route::Lt(algorithm(20)), &calls, &["in any dtype"]);
}

#[test]
fn gemm_ex_computes_what_cublas_lt_refuses() {
    let library = Fake { has_gemm_ex: true, ..Fake::default() };
    let calls =
        ["candidates 0", "candidates 1", "candidates 2", "candidates 3", "candidates 4", "candidates 5", "gemm_ex"];
    check(library, Route::GemmEx, &calls, &["cublasGemmEx, after partial sums in f32"]);
}

#[test]
fn a_gemm_that_every_algorithm_refuses_is_an_error_with_all_refusals() {
    let error = compute(&mut Fake::default(), &key(), None).expect_err("nothing computes it");
    for part in
        ["no algorithm computes it", "in f32, alignments 256,64,2,2: NOT_SUPPORTED", "cublasGemmEx: INVALID_VALUE"]
    {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn a_failure_of_the_device_is_an_error_at_once() {
    let mut library = Fake { first_limits: Some(0), fatal: Some(10), has_gemm_ex: true, ..Fake::default() };
    let error = compute(&mut library, &key(), None).expect_err("it failed");
    assert!(error.contains("EXECUTION_FAILED"), "{error}");
    assert_eq!(library.calls, ["candidates 0", "multiply 10"]);
}

#[test]
fn limits_end_at_the_size_of_an_element_and_none_is_there_twice() {
    let alignments = |c: u64, dtype| -> Vec<[u32; 4]> {
        let gemm = Gemm { a: Matrix::plain(8), b: Matrix::plain(0x20), c, ..Gemm::new([3, 5, 7], dtype) };
        limits(&GemmKey::of(&gemm)).iter().map(|limits| limits.alignments).collect()
    };
    assert_eq!(alignments(4, DType::F32), [[8, 32, 4, 4], [8, 32, 4, 4], [8, 16, 4, 4], [8, 8, 4, 4], [4; 4]]);
    assert_eq!(alignments(2, DType::F16)[4..], [[4, 4, 2, 2], [2; 4]]);
}

#[test]
fn a_tuned_algorithm_computes_before_all_others_unless_it_is_refused() {
    let mut library = Fake { first_limits: Some(0), ..Fake::default() };
    let found = compute(&mut library, &key(), Some(algorithm(15))).expect("a route");
    assert_eq!(found, SelectedRoute { route: Route::Lt(algorithm(15)), fallback: None });
    let mut library = Fake { first_limits: Some(0), refused: vec![15], ..Fake::default() };
    let found = compute(&mut library, &key(), Some(algorithm(15))).expect("a route");
    assert_eq!(found.route, Route::Lt(algorithm(10)));
    assert!(found.fallback.is_some_and(|said| said.contains("the tuned algorithm: NOT_SUPPORTED")));
}

#[track_caller]
fn check_fastest(times: &[f32], refused: &[u64], want: Option<(u64, f32, f32)>) {
    let mut library =
        Fake { first_limits: Some(0), times: times.to_vec(), refused: refused.to_vec(), ..Fake::default() };
    let timed = fastest(&mut library, &key()).expect("times");
    assert_eq!(timed.map(|timed| (timed.algorithm.0[0], timed.microseconds, timed.first_microseconds)), want);
}

#[test]
fn the_fastest_algorithm_is_chosen_if_it_is_faster_by_more_than_noise() {
    check_fastest(&[10.0, 9.0, 8.0, 12.0], &[], Some((12, 8.0, 10.0)));
    check_fastest(&[10.0, 9.9, 11.0], &[], Some((10, 10.0, 10.0)));
    check_fastest(&[10.0, 3.0, 9.0], &[11], Some((12, 9.0, 10.0)));
    check_fastest(&[10.0, 3.0], &[10], Some((11, 3.0, 3.0)));
    check_fastest(&[10.0, 3.0], &[10, 11], None);
    // The ninth is not requested.
    check_fastest(&[10.0, 9.0, 9.0, 9.0, 9.0, 9.0, 9.0, 5.0, 1.0], &[], Some((17, 5.0, 10.0)));
}

#[test]
fn a_heuristic_that_is_refused_leaves_nothing_to_time() {
    assert_eq!(fastest(&mut Fake::default(), &key()), Ok(None));
    let mut library = Fake { first_limits: Some(0), times: vec![1.0], fatal: Some(10), ..Fake::default() };
    assert!(fastest(&mut library, &key()).is_err_and(|why| why.contains("EXECUTION_FAILED")));
}

#[test]
fn a_status_refuses_the_matmul_or_is_fatal() {
    for name in ["CUBLAS_STATUS_NOT_SUPPORTED", "CUBLAS_STATUS_INVALID_VALUE", "CUBLAS_STATUS_ARCH_MISMATCH"] {
        assert_eq!(GemmError::of_status(format_args!("{name}")), GemmError::Refused(name.to_owned()));
    }
    let name = "CUBLAS_STATUS_EXECUTION_FAILED";
    assert_eq!(GemmError::of_status(format_args!("{name}")), GemmError::Fatal(name.to_owned()));
}

#[test]
fn limits_are_named_by_their_partial_sums_and_alignments() {
    let named = |reductions| Limits { reductions, alignments: [16, 16, 8, 8] }.to_string();
    assert_eq!(named(Reductions::InF32), "partial sums in f32, alignments 16,16,8,8");
    assert_eq!(named(Reductions::Unsplit), "no partial sums, alignments 16,16,8,8");
    assert_eq!(named(Reductions::Any), "partial sums in any dtype, alignments 16,16,8,8");
}
