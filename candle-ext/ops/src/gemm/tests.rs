//! Tests of every kernel that the processor supports, and of emulated ones, with three loops and with f64.

use super::matrix::Side;
use super::operand::multiply_by;
use super::*;

fn numbers(len: usize, seed: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 37 + seed * 11) % 19) as f32 - 9.0).collect()
}

/// Compares a GEMM of one shape and layout with three loops.
///
/// The operands are small integers, so that every order of summation gives the same bits.
fn check(kernel: GemmKernel, (m, n, k): (usize, usize, usize), (a_t, b_t, pad): (bool, bool, usize)) {
    let (a_rows, a_cols) = if a_t { (k, m) } else { (m, k) };
    let (b_rows, b_cols) = if b_t { (n, k) } else { (k, n) };
    let (a, b) = (numbers(a_rows * (a_cols + pad), 1), numbers(b_rows * (b_cols + pad), 2));
    let a_mat = Mat::with_stride(&a, a_rows, a_cols, a_cols + pad);
    let b_mat = Mat::with_stride(&b, b_rows, b_cols, b_cols + pad);
    let (a_mat, b_mat) = (if a_t { a_mat.t() } else { a_mat }, if b_t { b_mat.t() } else { b_mat });
    let runs = [(Accumulate::Overwrite, Threads::One), (Accumulate::Add, Threads::All)];
    for ((accumulate, threads), store) in
        runs.into_iter().flat_map(|run| [(run, Store::Cached), (run, Store::Streamed)])
    {
        let before = numbers(m * (n + pad), 3);
        let mut out = before.clone();
        let mat = MatMut::with_stride(&mut out, m, n, n + pad).stored(store);
        kernel.run(mat, accumulate, a_mat, b_mat, 2.0, threads);
        for (at, (&got, &before)) in out.iter().zip(&before).enumerate() {
            let (i, j) = (at / (n + pad), at % (n + pad));
            let term =
                |l| a[i * a_mat.row_stride + l * a_mat.col_stride] * b[l * b_mat.row_stride + j * b_mat.col_stride];
            let want = match (j < n, accumulate) {
                (false, _) => before,
                (true, Accumulate::Add) => before + 2.0 * (0..k).map(term).sum::<f32>(),
                (true, Accumulate::Overwrite) => 2.0 * (0..k).map(term).sum::<f32>(),
            };
            assert_eq!(got, want, "[{m}, {n}, {k}] at ({i}, {j})");
        }
    }
}

/// Compares a bf16 GEMM of one shape and layout with three loops. Sums of the small integers are exact in f32.
fn check_bf16(kernel: GemmKernel, (m, n, k): (usize, usize, usize), (a_t, b_t, pad): (bool, bool, usize)) {
    let bf16_numbers = |len, seed| numbers(len, seed).into_iter().map(bf16::from_f32).collect::<Vec<_>>();
    let (a_rows, a_cols) = if a_t { (k, m) } else { (m, k) };
    let (b_rows, b_cols) = if b_t { (n, k) } else { (k, n) };
    let (a, b) = (bf16_numbers(a_rows * (a_cols + pad), 1), bf16_numbers(b_rows * (b_cols + pad), 2));
    let a_mat = Mat::with_stride(&a, a_rows, a_cols, a_cols + pad);
    let b_mat = Mat::with_stride(&b, b_rows, b_cols, b_cols + pad);
    let (a_mat, b_mat) = (if a_t { a_mat.t() } else { a_mat }, if b_t { b_mat.t() } else { b_mat });
    let (a_wide, b_wide) = (a_mat.widened(), b_mat.widened());
    let before = numbers(m * (n + pad), 3);
    for (accumulate, threads) in [(Accumulate::Overwrite, Threads::One), (Accumulate::Add, Threads::All)] {
        let want = |i: usize, j: usize| {
            let first = if accumulate == Accumulate::Add { before[i * (n + pad) + j] } else { 0.0 };
            first + 2.0 * (0..k).map(|l| a_wide[i * k + l] * b_wide[l * n + j]).sum::<f32>()
        };
        let mut out = before.clone();
        let mat = MatMut::with_stride(&mut out, m, n, n + pad);
        kernel.run_bf16(mat.into(), accumulate, a_mat, b_mat, 2.0, threads);
        let mut rounded: Vec<bf16> = before.iter().copied().map(bf16::from_f32).collect();
        let mat = MatMut::with_stride(&mut rounded, m, n, n + pad);
        kernel.run_bf16(mat.into(), accumulate, a_mat, b_mat, 2.0, threads);
        for (at, &before) in before.iter().enumerate() {
            let (i, j) = (at / (n + pad), at % (n + pad));
            let want = if j < n { want(i, j) } else { before };
            let name = kernel.name();
            assert_eq!(out[at], want, "{name} [{m}, {n}, {k}] at ({i}, {j})");
            assert_eq!(rounded[at], bf16::from_f32(want), "{name} [{m}, {n}, {k}] at ({i}, {j}), rounded");
        }
    }
}

/// Compares a GEMM of packed operands with one that packs them itself, to the bit.
fn check_packed<T: OperandElement>(
    kernel: GemmKernel,
    (m, n, k): (usize, usize, usize),
    of: impl Fn(f32) -> T,
    gemm: impl Fn(MatMut<'_>, Accumulate, Mat<'_, T>, Mat<'_, T>),
) {
    let values = |len, step: f32| (0..len).map(|i| of((i as f32 * step).sin())).collect::<Vec<T>>();
    let (a, b) = (values(k * (m + 3), 0.7), values(k * (n + 1), 0.3));
    // The left operand is transposed.
    let (a, b) = (Mat::with_stride(&a, k, m, m + 3).t(), Mat::with_stride(&b, k, n, n + 1));
    let (mut a_packed, mut b_packed) = (PackedOperand::default(), PackedOperand::default());
    // Buffers of an earlier, larger operand do not matter.
    let earlier = values(4 * m * k, 0.9);
    a_packed.pack_by(kernel, Side::A, Mat::new(&earlier, 2 * m, 2 * k));
    a_packed.pack_by(kernel, Side::A, a);
    b_packed.pack_by(kernel, Side::B, b);
    for accumulate in [Accumulate::Overwrite, Accumulate::Add] {
        let before: Vec<f32> = (0..m * n).map(|i| (i as f32 * 0.1).cos()).collect();
        let (mut got, mut want) = (before.clone(), before);
        multiply_by(kernel, MatMut::new(&mut got, m, n), accumulate, [&a_packed, &b_packed], 0.5);
        gemm(MatMut::new(&mut want, m, n), accumulate, a, b);
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&got), bits(&want), "{} [{m}, {n}, {k}]", kernel.name());
    }
}

#[test]
fn packed_operands_give_the_bits_of_unpacked_ones() {
    for kernel in GemmKernel::tested() {
        for shape in [(1, 1, 1), (3, 5, 7), (128, 128, 64), (65, 70, 130), (33, 64, 1100), (40, 33, 2700)] {
            check_packed(
                kernel,
                shape,
                |x| x,
                |out, accumulate, a, b| kernel.run(out, accumulate, a, b, 0.5, Threads::One),
            );
            check_packed(kernel, shape, bf16::from_f32, |out, accumulate, a, b| {
                kernel.run_bf16(out.into(), accumulate, a, b, 0.5, Threads::One);
            });
        }
    }
}

#[test]
fn every_layout_of_bf16_equals_three_loops() {
    for kernel in GemmKernel::tested() {
        for shape in [(1, 1, 1), (3, 5, 7), (40, 1, 9), (65, 70, 130), (15, 700, 17), (33, 64, 1100), (70, 40, 2700)] {
            for layout in [(false, false, 0), (true, false, 3), (false, true, 1), (true, true, 0)] {
                check_bf16(kernel, shape, layout);
            }
        }
    }
}

/// Rows, columns and terms each exceed one packed block.
#[test]
fn gemms_of_bf16_larger_than_a_packed_block_equal_three_loops() {
    for kernel in GemmKernel::all() {
        check_bf16(kernel, (9000, 3, 800), (true, false, 0));
        check_bf16(kernel, (3, 7000, 600), (false, true, 0));
        check_bf16(kernel, (40, 50, 90_000), (false, false, 0));
    }
}

/// Compares with f64, for bf16 numbers whose magnitudes differ widely, and with the bits of fewer rows and one thread.
#[test]
fn sums_of_bf16_are_exact_and_a_row_has_the_same_bits_among_any_others() {
    let numbers = |len: usize, factor: f32| -> Vec<bf16> {
        (0..len).map(|i| bf16::from_f32((i as f32 * factor).sin() * (i as f32 * 0.7).cos().exp())).collect()
    };
    let (m, n, k) = (300, 170, 2500);
    let (a, b) = (numbers(m * k, 1.7), numbers(k * n, 0.9));
    for kernel in GemmKernel::tested() {
        let rows = |range: std::ops::Range<usize>, threads| {
            let mut out = vec![f32::NAN; range.len() * n];
            let a = Mat::new(&a[range.start * k..range.end * k], range.len(), k);
            let to = MatMut::new(&mut out, range.len(), n);
            kernel.run_bf16(to.into(), Accumulate::Overwrite, a, Mat::new(&b, k, n), 1.0, threads);
            out
        };
        let all = rows(0..m, Threads::All);
        let (mut error, mut norm) = (0.0, 0.0);
        for (at, &got) in all.iter().enumerate().step_by(7) {
            let term = |l: usize| f64::from(a[at / n * k + l]) * f64::from(b[l * n + at % n]);
            let want: f64 = (0..k).map(term).sum();
            error += (f64::from(got) - want).powi(2);
            norm += want.powi(2);
        }
        assert!((error / norm).sqrt() < 8.0 * f64::from(f32::EPSILON), "{}: {error:e}", kernel.name());
        if kernel.name() == "gemm" {
            continue;
        }
        for range in [0..1, 5..40, 299..300] {
            let part = rows(range.clone(), Threads::One);
            assert_eq!(part, all[range.start * n..range.end * n], "{} {range:?}", kernel.name());
        }
    }
}

/// Computes the first `m` rows of a matmul in a pool of threads. Returns its f32 sums, and bf16 sums added to others.
fn bits_of_rows(kernel: GemmKernel, m: usize, a: Mat<'_, bf16>, b: Mat<'_, bf16>, n_threads: usize) -> [Vec<u32>; 2] {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(n_threads).build().expect("a pool");
    let a = Mat { rows: m, ..a };
    let (mut sums, mut rounded) = (vec![0.0; m * b.cols], vec![bf16::ONE; m * b.cols]);
    pool.install(|| {
        let out = MatMut::new(&mut sums, m, b.cols);
        kernel.run_bf16(out.into(), Accumulate::Overwrite, a, b, 0.7, Threads::All);
        let out = MatMut::new(&mut rounded, m, b.cols);
        kernel.run_bf16(out.into(), Accumulate::Add, a, b, 0.7, Threads::All);
    });
    [sums.into_iter().map(f32::to_bits).collect(), rounded.into_iter().map(|x| x.to_bits().into()).collect()]
}

/// Operands of forward (x w^T), dx (dy w) and dw (dy^T x) have three layouts. The terms fill several partial sums.
#[test]
fn rows_of_bf16_have_the_same_bits_in_any_number_of_rows_and_threads() {
    let numbers = |len: usize, factor: f32| -> Vec<bf16> {
        (0..len).map(|i| bf16::from_f32((i as f32 * factor).sin() * (i as f32 * 0.7).cos().exp())).collect()
    };
    for kernel in GemmKernel::tested().into_iter().filter(|kernel| kernel.name() != "gemm") {
        for (n, k) in [(67, 1100), (150, 45), (64, 32)] {
            let (a, b) = (numbers(100 * k, 1.7), numbers(n * k, 0.9));
            let (a, a_t) = (Mat::new(&a, 100, k), Mat::new(&a, k, 100).t());
            let (b, b_t) = (Mat::new(&b, k, n), Mat::new(&b, n, k).t());
            for (pass, a, b) in [("forward", a, b_t), ("dx", a, b), ("dw", a_t, b)] {
                let all = bits_of_rows(kernel, 100, a, b, 3);
                for (m, n_threads) in
                    [(1, 1), (1, 3), (2, 1), (3, 2), (7, 1), (16, 1), (17, 1), (33, 2), (100, 1), (100, 2)]
                {
                    let rows = bits_of_rows(kernel, m, a, b, n_threads);
                    for (rows, all) in rows.iter().zip(&all) {
                        let what = format!("{} {pass}, {m} rows of [{n}, {k}], {n_threads} threads", kernel.name());
                        assert!(*rows == all[..m * n], "{what}");
                    }
                }
            }
        }
    }
}

#[test]
fn every_layout_equals_three_loops() {
    for kernel in GemmKernel::tested() {
        for shape in
            [(1, 1, 1), (3, 5, 7), (1, 33, 64), (40, 1, 9), (65, 70, 130), (15, 700, 17), (29, 31, 800), (33, 64, 1100)]
        {
            for layout in [(false, false, 0), (true, false, 3), (false, true, 1), (true, true, 0)] {
                check(kernel, shape, layout);
            }
        }
    }
}

/// Rows, columns and terms each exceed one packed block.
#[test]
fn gemms_larger_than_a_packed_block_equal_three_loops() {
    for kernel in GemmKernel::all() {
        check(kernel, (7000, 3, 600), (true, false, 0));
        check(kernel, (3, 7000, 600), (false, true, 0));
        check(kernel, (40, 50, 90_000), (false, false, 0));
    }
}

#[test]
fn one_row_equals_three_loops() {
    for (n, transposed) in [(40, false), (40, true), (64, false), (150, false), (150, true), (600, false)] {
        let (a, b) = (numbers(70, 1), numbers(70 * 605, 2));
        let b = if transposed { Mat::with_stride(&b, n, 70, 75).t() } else { Mat::with_stride(&b, 70, n, n + 5) };
        let term = |l: usize, j: usize| a[l] * b.data[l * b.row_stride + j * b.col_stride];
        let want: Vec<f32> = (0..n).map(|j| 2.0 * (0..70).map(|l| term(l, j)).sum::<f32>()).collect();
        let mut out = vec![1.0; n];
        assert!(row::takes(&MatMut::new(&mut out, 1, n), Mat::new(&a, 1, 70), b));
        gemm(MatMut::new(&mut out, 1, n), Accumulate::Overwrite, Mat::new(&a, 1, 70), b, 2.0, Threads::One);
        assert_eq!(out, want);
        gemm(MatMut::new(&mut out, 1, n), Accumulate::Add, Mat::new(&a, 1, 70), b, 2.0, Threads::One);
        assert_eq!(out, want.iter().map(|x| 2.0 * x).collect::<Vec<_>>());
    }
}

#[test]
fn no_terms_are_zero() {
    let mut out = [3.0; 4];
    gemm(MatMut::new(&mut out, 2, 2), Accumulate::Add, Mat::new(&[], 2, 0), Mat::new(&[], 0, 2), 1.0, Threads::All);
    assert_eq!(out, [3.0; 4]);
    gemm(
        MatMut::new(&mut out, 2, 2),
        Accumulate::Overwrite,
        Mat::new(&[], 2, 0),
        Mat::new(&[], 0, 2),
        1.0,
        Threads::All,
    );
    assert_eq!(out, [0.0; 4]);
}

/// Compares with f64, for numbers whose magnitudes differ widely.
#[test]
fn sums_are_as_exact_as_f32_is() {
    let numbers = |len: usize, seed: u32| -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            f64::from(state) / f64::from(u32::MAX)
        };
        (0..len).map(|_| ((next() - 0.5) * (8.0 * next() - 4.0).exp()) as f32).collect()
    };
    let (m, n, k) = (40, 50, 700);
    let (a, b) = (numbers(m * k, 1), numbers(k * n, 2));
    for kernel in GemmKernel::tested() {
        let mut out = vec![f32::NAN; m * n];
        kernel.run(
            MatMut::new(&mut out, m, n),
            Accumulate::Overwrite,
            Mat::new(&a, m, k),
            Mat::new(&b, k, n),
            1.0,
            Threads::One,
        );
        let (mut error, mut norm) = (0.0, 0.0);
        for (at, &got) in out.iter().enumerate() {
            let term = |l: usize| f64::from(a[at / n * k + l]) * f64::from(b[l * n + at % n]);
            let want: f64 = (0..k).map(term).sum();
            error += (f64::from(got) - want).powi(2);
            norm += want.powi(2);
        }
        let error = (error / norm).sqrt();
        // 8 units of the last place: a sum of 700 terms rounds as often, in both directions.
        assert!(error < 4.0 * f64::from(f32::EPSILON), "{error:.2e}");
    }
}

/// Checks that partial sums add term after term with one rounding each, so that AVX-512 and AVX2 give the same
/// bits.
#[test]
fn fused_sums_are_in_the_order_of_their_terms() {
    let numbers = |len: usize, factor: f32| (0..len).map(|i| (i as f32 * factor).sin()).collect::<Vec<_>>();
    for kernel in
        GemmKernel::all().into_iter().filter(|kernel| ["avx512_bf16", "avx512", "avx2"].contains(&kernel.name()))
    {
        for (m, n, k) in [(1, 1, 9), (7, 17, 384), (20, 50, 385), (33, 40, 1000)] {
            let (a, b, before) = (numbers(m * k, 1.7), numbers(k * n, 0.9), numbers(m * n, 0.3));
            let (a_mat, b_mat) = (Mat::new(&a, m, k), Mat::new(&b, k, n));
            let part = k.div_ceil(k.div_ceil(384));
            for accumulate in [Accumulate::Add, Accumulate::Overwrite] {
                let mut out = before.clone();
                kernel.run(MatMut::new(&mut out, m, n), accumulate, a_mat, b_mat, 0.7, Threads::One);
                for (at, &got) in out.iter().enumerate() {
                    let add_part = |total: Option<f32>, from: usize| {
                        let terms = from..(from + part).min(k);
                        let sum = terms.fold(0.0f32, |sum, l| a[at / n * k + l].mul_add(b[l * n + at % n], sum));
                        Some(total.map_or(sum * 0.7, |total| sum.mul_add(0.7, total)))
                    };
                    let first = (accumulate == Accumulate::Add).then_some(before[at]);
                    let want = (0..k).step_by(part).fold(first, add_part).expect("there are terms");
                    assert_eq!(got.to_bits(), want.to_bits(), "{} [{m}, {n}, {k}] at {at}", kernel.name());
                }
            }
        }
    }
}

#[test]
fn non_finite_values_stay_non_finite() {
    for kernel in GemmKernel::tested() {
        for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let (mut a, b) = (vec![1.0; 40 * 40], vec![1.0; 40 * 40]);
            a[5 * 40 + 7] = wrong;
            let mut out = vec![0.0; 40 * 40];
            kernel.run(
                MatMut::new(&mut out, 40, 40),
                Accumulate::Add,
                Mat::new(&a, 40, 40),
                Mat::new(&b, 40, 40),
                1.0,
                Threads::One,
            );
            assert!(out.iter().enumerate().all(|(at, x)| x.is_finite() == (at / 40 != 5)));
        }
    }
}

#[test]
#[should_panic(expected = "a [3, 4] matrix with row stride 5 in 13 elements")]
fn a_matrix_past_its_slice_is_refused() {
    Mat::with_stride(&[0.0; 13], 3, 4, 5);
}

#[test]
#[should_panic(expected = "rows of 4 elements overlap at stride 3")]
fn overlapping_rows_are_refused() {
    MatMut::with_stride(&mut [0.0; 20], 3, 4, 3);
}

#[test]
#[should_panic(expected = "gemm of [2, 3] by [2, 3] into [2, 3]")]
fn shapes_that_do_not_match_are_refused() {
    let (a, mut c) = ([0.0; 6], [0.0; 6]);
    let (x, y) = (Mat::new(&a, 2, 3), Mat::new(&a, 2, 3));
    gemm(MatMut::new(&mut c, 2, 3), Accumulate::Add, x, y, 1.0, Threads::One);
}
