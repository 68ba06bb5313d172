//! Losses, auxiliary losses and gradient norms of the first steps of a tiny model of each family equal those in `tests/golden`.
//!
//! The CPU GEMM kernel depends on the processor, and kernels round differently: a golden file has a section per rounding.
//! With each kernel that this machine supports, every number equals its section to the bit. On a machine without such a
//! kernel, a relative difference of 1e-5 is allowed; for comparison, the `reference` attention changes the numbers by up to
//! 5e-7. No sum is longer than a kernel's block of the inner dim, so that cache sizes change nothing.
//!
//! `scripts/make-golden` rewrites the files.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use candlewick_ops::cpu_gemm_kernels;
use serde_json::Value;
use suite::{program, read, root};

/// Metrics of a step, named as in metrics.jsonl. Those of `auxiliary_losses` are added.
const NAMES: [&str; 2] = ["loss", "grad_norm"];

/// Numbers of a step by name.
type StepNumbers = BTreeMap<String, f64>;

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
fn compare(kernel: &str, golden: &Value, curve: &[StepNumbers], tolerance: f64) {
    let golden = golden.as_array().unwrap();
    assert_eq!(golden.len(), curve.len());
    for (step, got) in golden.iter().zip(curve) {
        let want = golden_numbers(step);
        assert_eq!(want.keys().collect::<Vec<_>>(), got.keys().collect::<Vec<_>>(), "{kernel}: step {}", step["step"]);
        for (name, want) in want {
            let is_close = (got[&name] - want).abs() <= tolerance * want.abs();
            assert!(is_close, "{kernel}: {name} of step {}: {:?}, golden {want:?}", step["step"], got[&name]);
        }
    }
}

/// Returns the numbers of a golden step, from their bits.
fn golden_numbers(step: &Value) -> StepNumbers {
    let of_bits = |bits: &Value| f64::from_bits(u64::from_str_radix(bits.as_str().unwrap(), 16).unwrap());
    let fields = step.as_object().unwrap().iter();
    fields.filter_map(|(name, bits)| Some((name.strip_suffix("_bits")?.to_owned(), of_bits(bits)))).collect()
}

/// Trains and returns the numbers of each step.
fn curve(name: &str, kernel: &str, n_threads: usize) -> Vec<StepNumbers> {
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

fn numbers(metrics: &Path) -> Vec<StepNumbers> {
    std::fs::read_to_string(metrics).unwrap().lines().map(step_numbers).collect()
}

fn step_numbers(line: &str) -> StepNumbers {
    let record: Value = serde_json::from_str(line).unwrap();
    let mut numbers: StepNumbers = NAMES.map(|name| (name.to_owned(), number(line, name))).into();
    if let Some(losses) = record["auxiliary_losses"].as_object() {
        let (_, text) = line.split_once("\"auxiliary_losses\":").unwrap();
        numbers.extend(losses.keys().map(|name| (name.clone(), number(text, name))));
    }
    numbers
}

/// Returns the number under `name` in a line of JSON. serde_json may be off by one bit.
fn number(line: &str, name: &str) -> f64 {
    let text = line.split_once(&format!("\"{name}\":")).unwrap().1;
    text[..text.find([',', '}']).unwrap()].parse().unwrap()
}

/// The names of the cases, one a line, by `cases.py`.
const PRINT_CASES: &str = "import cases; print(*(case.name for case in cases.CASES), sep='\\n')";

/// A benchmark skips golden results without a case.
#[test]
fn golden_results_of_the_cpu_benchmark_have_names_of_its_cases() {
    let folder = root().join("tests/reference/cpu_bench");
    let mut python = Command::new("python3");
    let Ok(printed) = python.args(["-B", "-c", PRINT_CASES]).current_dir(&folder).output() else {
        return suite::report_skip("python3 is not installed");
    };
    assert!(printed.status.success(), "{}", String::from_utf8_lossy(&printed.stderr));
    let printed = String::from_utf8(printed.stdout).unwrap();
    let cases: Vec<&str> = printed.lines().collect();
    let files = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let golden: Vec<String> = files.filter(|name| name.starts_with("golden") && name.ends_with(".json")).collect();
    assert!(!golden.is_empty());
    for file in golden {
        let results: Value = serde_json::from_str(&read(format!("tests/reference/cpu_bench/{file}"))).unwrap();
        for result in results.as_array().unwrap() {
            let name = result["name"].as_str().unwrap();
            assert!(cases.contains(&name), "{file}: {name:?} is no case of cases.py");
        }
    }
}
