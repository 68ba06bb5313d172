//! Losses and gradient norms of the first steps of a tiny model of each family equal those in `tests/golden`.
//!
//! The CPU GEMM kernel depends on the processor, and kernels round differently: a golden file has a section per rounding.
//! With each kernel that this machine supports, every number equals its section to the bit. On a machine without such a
//! kernel, a relative difference of 1e-5 is allowed; for comparison, the `reference` attention changes the numbers by up to
//! 5e-7. No sum is longer than a kernel's block of the inner dim, so that cache sizes change nothing.
//!
//! `scripts/make-golden` rewrites the files.

use std::path::Path;
use std::process::Command;

use candlewick_ops::cpu_gemm_kernels;
use serde_json::Value;
use suite::{program, read, root};

/// Metrics of a step, named as in metrics.jsonl.
const NAMES: [&str; 2] = ["loss", "grad_norm"];

#[test]
fn llamas_curve_is_the_golden_one() {
    check("llama");
}

#[test]
fn qwen2s_curve_is_the_golden_one() {
    check("qwen2");
}

#[test]
fn qwen3s_curve_is_the_golden_one() {
    check("qwen3");
}

#[test]
fn qwen3_moes_curve_is_the_golden_one() {
    check("qwen3_moe");
}

#[track_caller]
fn check(name: &str) {
    let golden: Value = serde_json::from_str(&read(format!("tests/golden/{name}.json"))).unwrap();
    // avx512_bf16 computes f32 as avx512 does.
    let kernels: Vec<_> = cpu_gemm_kernels().into_iter().filter(|kernel| *kernel != "avx512_bf16").collect();
    let sections = golden.as_object().unwrap();
    for kernel in &kernels {
        let [one, two] = [1, 2].map(|n_threads| curve(name, kernel, n_threads));
        assert_eq!(one, two, "{kernel}: the number of threads changes the result");
        let rounding = if ["avx512", "avx2"].contains(kernel) { "fma" } else { kernel };
        match sections.get(rounding) {
            Some(section) => compare(kernel, section, &one, 0.0),
            None => compare(kernel, sections.values().next().unwrap(), &one, 1e-5),
        }
    }
}

#[track_caller]
fn compare(kernel: &str, golden: &Value, curve: &[[f64; 2]], tolerance: f64) {
    let golden = golden.as_array().unwrap();
    assert_eq!(golden.len(), curve.len());
    for (step, got) in golden.iter().zip(curve) {
        for (name, got) in NAMES.into_iter().zip(got) {
            let bits = step[format!("{name}_bits")].as_str().unwrap();
            let want = f64::from_bits(u64::from_str_radix(bits, 16).unwrap());
            let is_close = (got - want).abs() <= tolerance * want.abs();
            assert!(is_close, "{kernel}: {name} of step {}: {got:?}, golden {want:?}", step["step"]);
        }
    }
}

/// Trains and returns the numbers of each step.
fn curve(name: &str, kernel: &str, n_threads: usize) -> Vec<[f64; 2]> {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().display();
    let mut trainer = Command::new(program("trainer"));
    trainer.current_dir(root()).args([
        "-q",
        "train",
        &format!("tests/golden/{name}.yaml"),
        "device=cpu",
        "checkpoint=none",
    ]);
    trainer.args([format!("output_dir={at}"), format!("data.cache_dir={at}/cache")]);
    trainer.env("CANDLEWICK_CPU_GEMM", kernel);
    let output = trainer.env("RAYON_NUM_THREADS", n_threads.to_string()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    numbers(&folder.path().join("metrics.jsonl"))
}

fn numbers(metrics: &Path) -> Vec<[f64; 2]> {
    std::fs::read_to_string(metrics).unwrap().lines().map(|line| NAMES.map(|name| number(line, name))).collect()
}

/// Returns the number under `name` in a line of JSON. serde_json may be off by one bit.
fn number(line: &str, name: &str) -> f64 {
    let text = line.split_once(&format!("\"{name}\":")).unwrap().1;
    text[..text.find([',', '}']).unwrap()].parse().unwrap()
}
