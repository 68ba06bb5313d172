//! Tests of matmuls and attention again, with each GEMM kernel that this processor supports.
//!
//! A process uses one kernel. The other kernels have processes of their own, which run on the CPU only.

use std::process::Command;

use candle_core::{DType, Result, Tensor};
use candlewick_ops::{OutputDtype, cpu_gemm_kernel, cpu_gemm_kernels, linear, select_cpu_gemm_kernel};

use crate::cases::{bits, check_each, grad_of, randn, tape, trainable};

/// Environment variable that names the kernel of this process.
const KERNEL: &str = "CANDLEWICK_OPS_GEMM";

/// Modules of tests that depend on the kernel.
const MODULES: [&str; 8] = [
    "attention::",
    "attention_chunks::",
    "invariants::",
    "kernels::",
    "linear::",
    "linear_cross_entropy::",
    "moe::grouped_linear::",
    "quantized::",
];

/// Selects the kernel that the parent process names. Returns true if there is one.
pub(crate) fn select() -> bool {
    let name = std::env::var(KERNEL);
    if let Ok(name) = &name {
        select_cpu_gemm_kernel(name).unwrap();
    }
    name.is_ok()
}

#[test]
fn the_tests_of_matmuls_pass_with_each_kernel_of_the_processor() {
    if select() {
        return;
    }
    let others = cpu_gemm_kernels().into_iter().filter(|kernel| *kernel != cpu_gemm_kernel());
    check_each(others, |kernel| {
        let mut child = Command::new(std::env::current_exe().unwrap());
        if kernel == "gemm" {
            // The crate's order of terms depends on the numbers of rows and columns.
            child.args(["--skip", "the_bits_of_a_row_do_not_depend_on_its_group"]);
            child.args(["--skip", "adapters_on_columns_of_joined_layers_have_the_bits_of_separate_layers"]);
        }
        let output = child.args(MODULES).env(KERNEL, kernel).output().unwrap();
        let [stdout, stderr] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
        assert!(output.status.success() && !stdout.contains(" 0 passed"), "{kernel}: {stdout}{stderr}");
    });
}

#[test]
fn an_unknown_kernel_is_refused_with_those_of_the_processor() {
    select();
    let error = select_cpu_gemm_kernel("avx1024").unwrap_err().to_string();
    let all = cpu_gemm_kernels().join(", ");
    assert!(error.contains("`avx1024` is unknown or unsupported") && error.contains(&all), "{error}");
}

/// Output of a linear layer for the first `n_rows` of x, and its gradients.
fn results(x: &Tensor, w: &Tensor, n_rows: usize) -> Result<[Tensor; 3]> {
    let x = x.narrow(0, 0, n_rows)?;
    let w = trainable(w);
    let tape = tape(std::slice::from_ref(&x), || linear(&x, &w, None, OutputDtype::SameAsInput));
    let y = tape.output().clone();
    let dy = randn((100, y.dim(1)?), 9).to_dtype(y.dtype())?.narrow(0, 0, n_rows)?;
    let dx = tape.backward(&dy)?.get(&x).cloned().expect("x is tracked");
    Ok([y, dx, grad_of(&w)])
}

/// Generation computes a token alone that a prompt's evaluation computes among others.
#[test]
fn a_row_of_bf16_has_the_same_bits_alone_and_among_others() {
    select();
    if ["avx2", "gemm"].contains(&cpu_gemm_kernel()) {
        return; // A single row has a faster kernel there, which sums in another order.
    }
    for (n, k) in [(65, 96), (200, 1500)] {
        let [x, w] = [randn((100, k), 1), randn((n, k), 2)].map(|x| x.to_dtype(DType::BF16).unwrap());
        let all = results(&x, &w, 100).unwrap();
        for n_rows in [1, 2, 3, 7, 16, 17, 33] {
            let rows = results(&x, &w, n_rows).unwrap();
            for (what, rows, all) in [("y", &rows[0], &all[0]), ("dx", &rows[1], &all[1])] {
                let want = all.narrow(0, 0, n_rows).unwrap();
                assert!(bits(rows) == bits(&want), "{what} of {n_rows} rows, [{n}, {k}]");
            }
        }
        // Rows of dw are outputs of the layer.
        let first = w.narrow(0, 0, 1).unwrap();
        let dy = |n: usize| randn((100, n), 9).to_dtype(DType::BF16).unwrap();
        let whole = grad_w(&x, &w, &dy(n));
        let alone = grad_w(&x, &first, &dy(n).narrow(1, 0, 1).unwrap().contiguous().unwrap());
        assert!(bits(&alone) == bits(&whole.narrow(0, 0, 1).unwrap()), "dw of [{n}, {k}]");
    }
}

fn grad_w(x: &Tensor, w: &Tensor, dy: &Tensor) -> Tensor {
    let w = trainable(w);
    tape(&[], || linear(x, &w, None, OutputDtype::SameAsInput)).backward(dy).unwrap();
    grad_of(&w)
}

#[test]
fn results_in_bf16_are_the_same_bits_for_any_number_of_threads() {
    select();
    let on = |n_threads: usize, n_rows: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(n_threads).build().unwrap();
        let [x, w] = [randn((100, 1500), 1), randn((300, 1500), 2)].map(|x| x.to_dtype(DType::BF16).unwrap());
        pool.install(|| results(&x, &w, n_rows).unwrap().map(|x| bits(&x)))
    };
    for n_rows in [1, 100] {
        let one = on(1, n_rows);
        for n_threads in [2, 3] {
            assert!(on(n_threads, n_rows) == one, "{n_rows} rows, {n_threads} threads");
        }
    }
}
