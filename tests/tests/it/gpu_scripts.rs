//! The GPU check scripts, run on the CPU: their calls of our programs, and their use of the output.
//!
//! They need Python's standard library only; the comparisons with torch are not run.
#![cfg(target_os = "linux")]
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};
use suite::{program, root};

use crate::gpu_check::put_program;

/// Runs a script of `tests/reference` and returns what it prints.
#[track_caller]
fn python(script: &str, arguments: &[&str], environment: &[(&str, &Path)]) -> String {
    let mut command = Command::new("python3");
    command.arg(format!("tests/reference/{script}")).args(arguments).current_dir(root());
    command.envs(environment.iter().copied()).env("RAYON_NUM_THREADS", "2").env("HF_HUB_OFFLINE", "1");
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{script}: {said}{}", String::from_utf8_lossy(&output.stderr));
    said
}

pub(crate) fn trainer() -> String {
    program("trainer").display().to_string()
}

#[test]
fn every_memory_mode_is_compared_with_a_plain_run() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("runs.json");
    let said = python("gpu_runs.py", &[&trainer(), out.to_str().unwrap(), "--device", "cpu", "--quick"], &[]);
    let found: Value = serde_json::from_slice(&fs::read(&out).unwrap()).unwrap();
    let parts = found.as_object().unwrap();
    assert_eq!(parts.len(), said.lines().count(), "{said}");
    for (name, part) in parts {
        assert_eq!(part["ok"], true, "{name}: {part}");
    }
    // fp16 differs from the plain run, so that the comparison is not trivial.
    assert!(parts["fp16"]["weights_differ_by"].as_f64().unwrap() > 0.0, "{}", parts["fp16"]);
}

#[test]
fn steps_are_timed_one_side_after_another_into_one_file() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("bench.json");
    let arguments = [&trainer(), out.to_str().unwrap(), "--device", "cpu", "--quick", "--sides"];
    python("gpu_bench.py", &[&arguments[..], &["ours"]].concat(), &[]);
    // A side without time left gets a line of its own; earlier results stay.
    python("gpu_bench.py", &[&arguments[..], &["torch_compiled", "--seconds", "0"]].concat(), &[]);
    let table: Value = serde_json::from_slice(&fs::read(&out).unwrap()).unwrap();
    assert_eq!(table.as_array().unwrap().len(), 3);
    for row in table.as_array().unwrap() {
        assert!(row["ours"]["tokens_per_second"].as_f64().unwrap() > 0.0, "{row}");
        assert!(row["torch_compiled"]["error"].as_str().unwrap().contains("no time was left"), "{row}");
    }
    let said = python("gpu_summary.py", &[folder.path().to_str().unwrap()], &[]);
    assert_eq!(said.matches("tokens/s").count(), 3, "{said}");
}

/// The speed-up of FP8 is printed with the gap of the loss at the last step that both runs took.
#[test]
fn steps_in_fp8_are_compared_with_those_in_bf16() {
    let folder = tempfile::tempdir().unwrap();
    let row = |name: &str, speed: f64, iter: u64, loss: f64| {
        let ours = json!({
            "tokens_per_second": speed, "mfu": 0.5, "record": {}, "losses": {"3": 9.0, iter.to_string(): loss}
        });
        json!({"name": name, "recompute": false, "ours": ours})
    };
    let rows = [
        row("4B-bf16", 100.0, 8, 5.0),
        row("4B-delayed", 122.0, 8, 5.0125),
        row("4B-current", 119.0, 7, 5.0),
        row("MoE", 50.0, 8, 4.0),
        row("MoE-delayed", 45.0, 8, 3.5),
    ];
    fs::write(folder.path().join("fp8-steps.json"), serde_json::to_string(&rows).unwrap()).unwrap();
    let said = python("gpu_summary.py", &[folder.path().to_str().unwrap()], &[]);
    for line in [
        "4B-delayed: 1.22 times as fast as bf16, loss of step 8 +0.0125",
        "4B-current: 1.19 times as fast as bf16, loss of step 3 +0.0000",
        "MoE-delayed: 0.90 times as fast as bf16, loss of step 8 -0.5000",
    ] {
        assert!(said.lines().any(|said| said == line), "{line}: {said}");
    }
}

/// Steps with `precision.exclude_slower_modules`, and the advice alone. On a CPU all or nearly all layers are slower in FP8.
#[test]
fn layers_that_are_slower_in_fp8_are_measured() {
    let folder = tempfile::tempdir().unwrap();
    let (steps, advice) = (folder.path().join("fp8-steps.json"), folder.path().join("fp8-advise.json"));
    let on_cpu = ["--device", "cpu", "--quick"];
    let trainer = trainer();
    let arguments = [&[trainer.as_str(), steps.to_str().unwrap()], &on_cpu[..]].concat();
    python("gpu_bench.py", &[&arguments[..], &["--sides", "ours", "--shapes", "4B-bf16,4B-auto"]].concat(), &[]);
    let arguments = [&[trainer.as_str(), advice.to_str().unwrap()], &on_cpu[..]].concat();
    let said = python("gpu_fp8_advice.py", &arguments, &[]);
    assert_eq!(
        said.lines().filter(|line| line.starts_with("fp8-advise ")).count(),
        6,
        "two shapes, three recipes: {said}"
    );
    // The MLP, q with k and v, and the output of attention.
    assert!(said.contains("MLP ") && said.contains("+"), "{said}");
    let summary = python("gpu_summary.py", &[folder.path().to_str().unwrap()], &[]);
    assert!(summary.contains(&said), "{summary}");
    assert!(summary.contains("4B-auto: ") && summary.contains("linear layers multiply in FP8"), "{summary}");
}

#[test]
fn without_transformer_engine_its_benchmark_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let rows = folder.path().join("fp8.json");
    fs::write(&rows, r#"{"rows": []}"#).unwrap();
    // A torch that can be imported, whatever the machine has.
    fs::create_dir(folder.path().join("torch")).unwrap();
    fs::write(folder.path().join("torch/__init__.py"), "").unwrap();
    fs::write(folder.path().join("transformer_engine.py"), "raise ModuleNotFoundError(name='transformer_engine')")
        .unwrap();
    let said = python("gpu_te_bench.py", &[rows.to_str().unwrap()], &[("PYTHONPATH", folder.path())]);
    assert_eq!(said, "transformer_engine is not installed: TransformerEngine was not timed\n");
    assert_eq!(fs::read_to_string(&rows).unwrap(), r#"{"rows": []}"#);
}

#[test]
fn clock_power_and_temperature_are_sampled_by_nvidia_smi() {
    let folder = tempfile::tempdir().unwrap();
    let smi = "printf '%s\\n' '1980, 300.00, 50, 0x0000000000000000' '1500, 690.00, 60, 0x0000000000000004' \
               '1400, 700.00, 61, 0x0000000000000004' '[N/A], [N/A], 61, [N/A]'; exec sleep 1000";
    put_program(&folder.path().join("nvidia-smi"), smi);
    let script = "import gpu_smi, sys, time\nwith gpu_smi.sampled() as samples:\n    while len(samples.rows) < 4:\n        \
                  time.sleep(0.01)\nprint(gpu_smi.text(samples.summary(0, time.time())))\n\
                  for i, row in enumerate(samples.rows):\n    row['at'] = i\n\
                  print(samples.summary(1)['sm_mhz_min'], samples.summary(1, 1.5)['power_w'], samples.summary(5))\n";
    fs::write(folder.path().join("sample.py"), script).unwrap();
    let path = format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap());
    let mut command = Command::new("python3");
    command.arg(folder.path().join("sample.py")).env("PATH", path).env("PYTHONPATH", root().join("tests/reference"));
    let said = command.output().unwrap();
    assert_eq!(
        String::from_utf8_lossy(&said.stdout),
        "1500 MHz, 690 W, 61 °C, reasons 0x4\n1400.0 690.0 {}\n",
        "{}",
        String::from_utf8_lossy(&said.stderr)
    );
}

#[test]
fn matmuls_are_timed_by_both_algorithms_in_turns() {
    let folder = tempfile::tempdir().unwrap();
    let (bench, out) = (folder.path().join("ops-bench"), folder.path().join("ceilings.json"));
    let answers = "while read -r t k n kind; do [ $kind = burst ] && echo '{\"tflop_s\": '${CANDLEWICK_GEMM_TUNE:+1}700', \"ms\": 1, \
                   \"runs\": 10}' || echo '{\"error\": \"out of memory\"}'; done";
    put_program(&bench, answers);
    // A torch that cannot be imported.
    fs::write(folder.path().join("torch.py"), "raise ImportError('no torch')").unwrap();
    let mut command = Command::new("python3");
    command.args([&root().join("tests/reference/gpu_ceilings.py"), &bench, &out]).args(["--device", "cpu", "--quick"]);
    let output = command.env("PYTHONPATH", folder.path()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("torch is not measured: no torch") && said.contains("first out of memory"), "{said}");
    let rows: Value = serde_json::from_slice(&fs::read(&out).unwrap()).unwrap();
    let burst = &rows[0];
    assert_eq!((&burst["first"]["tflop_s"], &burst["tuned"]["tflop_s"]), (&700.into(), &1700.into()), "{rows}");
    assert_eq!((rows.as_array().unwrap().len(), output.status.code()), (4, Some(1)), "{said}");
    let summary = python("gpu_summary.py", &[folder.path().to_str().unwrap()], &[]);
    assert!(summary.contains("tuned 1700.0 TFLOP/s"), "{summary}");
}

#[test]
fn a_failed_round_keeps_the_earlier_rounds_and_is_printed() {
    let folder = tempfile::tempdir().unwrap();
    let script = "import gpu_bench\n\
                  row = {'name': 'A', 'times_host': False, 'job': {}, 'ours': {'rounds': [[5.0]], 'tokens_per_second': 5.0, 'mfu': 0.5, \
                  'cut_off': 'not done after 9 s'}}\n\
                  def fails(*_):\n    raise RuntimeError('out of memory')\n\
                  gpu_bench.run_side = fails\nrow['ours'] = gpu_bench.measure(row, 'ours', 60)\n\
                  print(gpu_bench.line(row, 'ours'))\n";
    fs::write(folder.path().join("round.py"), script).unwrap();
    let mut command = Command::new("python3");
    command.arg(folder.path().join("round.py")).env("PYTHONPATH", root().join("tests/reference"));
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    for part in ["5 tokens/s", "cut off: not done after 9 s", "a round failed: RuntimeError: out of memory"] {
        assert!(said.contains(part), "{said}{}", String::from_utf8_lossy(&output.stderr));
    }
}

/// The sides of a model begin in turns; a side that cannot train it is left out.
#[test]
fn every_side_is_timed_in_each_round() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("large.json");
    let arguments = [&trainer(), out.to_str().unwrap(), "--device", "cpu", "--quick"];
    let of = ["--sides", "ours,torchao_rowwise", "--shapes", "135M-LoRA,4B-mb2", "--rounds", "2"];
    // Without torch its side is an error.
    fs::write(folder.path().join("torch.py"), "raise ImportError('no torch')").unwrap();
    python("gpu_bench.py", &[&arguments[..], &of].concat(), &[("PYTHONPATH", folder.path())]);
    let rows: Value = serde_json::from_slice(&fs::read(&out).unwrap()).unwrap();
    for row in rows.as_array().unwrap() {
        assert_eq!(row["ours"]["rounds"].as_array().unwrap().len(), 2, "{row}");
        assert!(row["ours"]["estimated_bytes"].as_u64().unwrap() > 0, "{row}");
    }
    assert!(rows[0]["ours"]["host_ms"].as_f64().unwrap() > 0.0 && rows[0]["torchao_rowwise"].is_null(), "{rows}");
    assert!(rows[1]["torchao_rowwise"]["error"].as_str().unwrap().contains("no torch"), "{rows}");
    let said = python("gpu_summary.py", &[folder.path().to_str().unwrap()], &[]);
    assert!(said.contains(" ms a step; estimated "), "{said}");
}

#[test]
fn the_time_of_kernels_is_summed_by_name_and_without_a_profiler_that_of_spans() {
    let folder = tempfile::tempdir().unwrap();
    let (path, out) = (folder.path().join("path"), folder.path().join("where.json"));
    fs::create_dir(&path).unwrap();
    let table = r#"#!/bin/bash
echo '==PROF== Connected to process 1'
echo '"ID","Kernel Name","gpu__time_duration.sum"'
echo '"","","ns"'
echo '"0","gemm(a, b)","1,500"'
echo '"1","add","1000"'
echo '"2","gemm(a, b)","500"'
"#;
    fs::write(path.join("ncu"), table).unwrap();
    fs::set_permissions(path.join("ncu"), fs::Permissions::from_mode(0o755)).unwrap();
    let arguments = [&trainer(), out.to_str().unwrap(), "--device", "cpu", "--quick"];
    let with_ncu = format!("{}:{}", path.display(), std::env::var("PATH").unwrap());
    python("gpu_where.py", &arguments, &[("PATH", Path::new(&with_ncu))]);
    let read = || serde_json::from_slice::<Value>(&fs::read(&out).unwrap()).unwrap();
    let found = read();
    assert_eq!((&found["by"], found["rows"].as_array().unwrap().len()), (&"kernel".into(), 2), "{found}");
    let first = &found["rows"][0];
    assert_eq!((&first["name"], &first["calls"]), (&"gemm(a, b)".into(), &2.into()), "{found}");
    assert!((first["seconds"].as_f64().unwrap() - 2e-6).abs() < 1e-12, "{found}");

    python("gpu_where.py", &arguments, &[]);
    let found = read();
    assert_eq!(found["by"], "span");
    let names: Vec<&str> = found["rows"].as_array().unwrap().iter().map(|row| row["name"].as_str().unwrap()).collect();
    assert!(names.contains(&"linear forward") && names.contains(&"adamw"), "{names:?}");
}

#[test]
fn ever_longer_sequences_are_trained_in_one_run() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("long.json");
    python("gpu_long.py", &[&trainer(), out.to_str().unwrap(), "--device", "cpu", "--quick"], &[]);
    let found: Value = serde_json::from_slice(&fs::read(&out).unwrap()).unwrap();
    let tokens: Vec<u64> =
        found["steps"].as_array().unwrap().iter().map(|step| step["tokens"].as_u64().unwrap()).collect();
    assert!(tokens.len() == 3 && tokens.is_sorted() && tokens[2] > 2 * tokens[0], "{found}");
    assert_eq!(found["end"], "all lengths were trained");
}

#[test]
fn nvidias_libraries_are_found_wherever_pip_puts_them() {
    let folder = tempfile::tempdir().unwrap();
    let put = |path: &str| {
        let file = folder.path().join(path);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, "").unwrap();
    };
    let find = || python("nvidia_libraries.py", &[], &[("PYTHONPATH", folder.path())]);
    let is_found = |lib: &str| find().trim().split(':').any(|found| Path::new(found) == folder.path().join(lib));
    put("nvidia/cu13/lib/libcublas.so.13");
    put("nvidia/nothing/lib/libnothing.so");
    put("torch/__init__.py");
    put("torch/lib/libtorch.so");
    assert!(is_found("nvidia/cu13/lib"), "{}", find());
    assert!(!is_found("nvidia/nothing/lib") && !is_found("torch/lib"), "{}", find());
    put("torch/lib/libcudnn.so.9");
    assert!(is_found("torch/lib"), "{}", find());
    // The folder layout of NVIDIA's pip packages for CUDA 12, with the headers that cuDNN compiles with.
    put("nvidia/cuda_nvrtc/lib/libnvrtc.so.12");
    put("nvidia/cuda_runtime/lib/libcudart.so.12");
    assert!(is_found("nvidia/cuda_nvrtc/lib") && is_found("nvidia/cuda_runtime/lib"), "{}", find());
}

/// Returns the last lines of `ptxas -v` for a kernel with a number of registers and bytes of spills.
fn usage(kernel: &str, registers: usize, spills: usize) -> String {
    let of = |architecture| {
        format!(
            "ptxas info    : Compiling entry function '{kernel}' for '{architecture}'\n\
             ptxas info    : Function properties for {kernel}\n    \
             {spills} bytes stack frame, {spills} bytes spill stores, 0 bytes spill loads\n\
             ptxas info    : Used {registers} registers, used 1 barriers\n"
        )
    };
    of("sm_80") + &of("sm_90a")
}

#[track_caller]
fn check_usage(directive: &str, usage: &str, want: Option<&str>) {
    let folder = tempfile::tempdir().unwrap();
    let ptx = format!(".visible .entry run(\n\t.param .u64 run_param_0\n)\n{directive}\n{{\n}}\n");
    fs::write(folder.path().join("op.ptx"), ptx).unwrap();
    fs::write(folder.path().join("op.usage"), usage).unwrap();
    let output = Command::new(root().join("scripts/kernel-usage")).arg(folder.path()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.success(), want.is_none(), "{said}");
    assert!(said.contains(want.unwrap_or_default()), "{said}");
}

#[test]
fn a_kernel_that_a_gpu_would_not_launch_or_that_spills_is_an_error() {
    check_usage(".maxntid 1024, 1, 1", &usage("run", 64, 0), None);
    check_usage(".maxntid 1024, 1, 1\n.minnctapersm 1", &usage("run", 65, 0), Some("op/run for sm_90a: 65 registers"));
    check_usage(".maxntid 32, 1, 1", &usage("run", 255, 8), Some("op/run for sm_80: 8 bytes of spills, 0 are listed"));
    check_usage("", &usage("run", 20, 0), Some("op/run for sm_80: no launch bounds"));
    check_usage(".maxntid 32, 1, 1", &usage("other", 20, 0), Some("op/run: not compiled for sm_90a"));
}
