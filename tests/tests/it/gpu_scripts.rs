//! The GPU check scripts, run on the CPU: their calls of our programs, and their use of the output.
//!
//! They need Python's standard library only; the comparisons with torch are not run.
#![cfg(target_os = "linux")]
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use suite::{program, root};

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

fn trainer() -> String {
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

/// The speed-up of FP8 is printed with the gap of the loss, if both runs took the same steps.
#[test]
fn steps_in_fp8_are_compared_with_those_in_bf16() {
    let folder = tempfile::tempdir().unwrap();
    let row = |name: &str, speed: f64, iter: u64, loss: f64| {
        let ours = serde_json::json!({
            "tokens_per_second": speed, "mfu": 0.5, "record": {"iter": iter, "loss": loss}
        });
        serde_json::json!({"name": name, "recompute": false, "ours": ours})
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
        "4B-current: 1.19 times as fast as bf16, losses of other steps",
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

/// On a machine on which everything fails, every part reports its failure, and a table follows.
#[test]
fn a_failed_check_lists_the_tests_that_also_fail_alone() {
    let folder = tempfile::tempdir().unwrap();
    let (bin, out) = (folder.path().join("bin"), folder.path().join("out"));
    fs::create_dir(&bin).unwrap();
    let tests = r#"#!/bin/bash
case "$*" in
    *--list*) printf '%s: test\n' a::one b::two c::three; printf '\n3 tests, 0 benchmarks\n' ;;
    *--exact*b::two*) printf "thread 'b::two' panicked at x.rs:1:\nrelative error 3\n"; exit 101 ;;
    *--exact*) echo "test result: ok" ;;
    *) printf 'test a::one ... ok\ntest b::two ... FAILED\n'; kill -SEGV $$ ;;
esac
"#;
    // A `doctor` with truncated output.
    let broken = "#!/bin/bash\necho '{\"gpus\"'\nexit 3\n";
    for (name, program) in
        [("ops-test", tests), ("comm-test", tests), ("trainer", broken), ("evaluator", broken), ("ops-bench", broken)]
    {
        let file = bin.join(name);
        fs::write(&file, program).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
    }
    // A fake nvidia-smi without a GPU, and a fake sanitizer without findings.
    let found = folder.path().join("path");
    fs::create_dir(&found).unwrap();
    std::os::unix::fs::symlink("/bin/true", found.join("compute-sanitizer")).unwrap();
    let check = |options: &[&str]| {
        let path = format!("{}:{}", found.display(), std::env::var("PATH").unwrap());
        let mut check = Command::new("scripts/gpu-check");
        check.args(options).args([&out, &bin]).current_dir(root()).env("PATH", path).env("CUDA_VISIBLE_DEVICES", "");
        let output = check.output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        (said, output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (said, code, complained) = check(&[]);
    for part in ["doctor", "ops", "comm", "losses", "steps", "ops-bench", "torch's-ops"] {
        assert!(said.contains(&format!("FAIL  {part} (")), "{part}: {said}");
    }
    assert!(said.contains("FAILED: b::two: thread 'b::two' panicked at x.rs:1: relative error 3"), "{said}");
    assert!(said.contains("alone it is right: c::three") && !said.contains("a::one: "), "{said}");
    assert_eq!(code, Some(7), "{said}{complained}");
    let summary = fs::read_to_string(out.join("summary.txt")).unwrap();
    assert!(summary.contains("doctor.json: ") && summary.contains("FAIL ops-bench"), "{summary}");
    assert!(summary.contains("Qwen3-4B        ours            RuntimeError: exit code 3"), "{summary}");
    let files = fs::read_dir(&out).unwrap().map(|file| file.unwrap().file_name().into_string().unwrap());
    let mut files: Vec<String> = files.collect();
    files.sort();
    assert_eq!(files, ["doctor.json", "results.tar.gz", "summary.txt"]);

    // `--first` stops at a failure.
    let (said, code, complained) = check(&["--first"]);
    for part in ["doctor", "smoke", "ops-seed-0", "first-losses"] {
        assert!(said.contains(&format!("FAIL  {part} (")), "{part}: {said}");
    }
    assert!(said.contains("the other parts were not run") && !said.contains("FAIL  ops ("), "{said}");
    assert_eq!(code, Some(4), "{said}{complained}");

    // `--parts` runs the named part alone and refuses an unknown name.
    let (said, code, _) = check(&["--parts", "where,grouped,long"]);
    for part in ["where", "grouped", "long"] {
        assert!(said.contains(&format!("FAIL  {part} (")) && !said.contains("doctor ("), "{part}: {said}");
    }
    assert_eq!(code, Some(3), "{said}");
    let (_, code, complained) = check(&["--parts", "wher"]);
    assert_eq!((code, complained.trim()), (Some(2), "failed: there is no part wher"));
}

/// `gpu-check --first` continues with the other parts if all first parts pass.
#[test]
fn a_successful_first_part_is_followed_by_the_others() {
    let folder = tempfile::tempdir().unwrap();
    let (bin, out) = (folder.path().join("bin"), folder.path().join("out"));
    fs::create_dir(&bin).unwrap();
    let put = |name: &str, program: &str| {
        fs::write(bin.join(name), program).unwrap();
        fs::set_permissions(bin.join(name), fs::Permissions::from_mode(0o755)).unwrap();
    };
    let wrapped = format!(
        "#!/bin/bash\ncase \"$1\" in doctor) echo '{{\"gpus\": []}}' ;; *) exec {} \"$@\" device=cpu {} ;; esac\n",
        trainer(),
        "model.config.num_hidden_layers=1 model.config.intermediate_size=128 data.max_length=128 \
         data.sources=[recipes/quickstart/eval.jsonl] data.eval_sources=[]"
    );
    put("trainer", &wrapped.replace("\"$@\" device=cpu", "\"${@//device=cuda/device=cpu}\""));
    ["ops-test", "comm-test"].iter().for_each(|name| put(name, "#!/bin/bash\nexit 0\n"));
    ["evaluator", "ops-bench"].iter().for_each(|name| put(name, "#!/bin/bash\nexit 1\n"));
    let mut check = Command::new("timeout");
    check.args(["--signal=INT", "240", "scripts/gpu-check", "--first"]).args([&out, &bin]).current_dir(root());
    let mut check = check.stdout(Stdio::piped()).spawn().unwrap();
    let mut parts = vec!["doctor", "smoke", "ops-seed-0", "first-losses", "ops"];
    let mut lines = BufReader::new(check.stdout.take().unwrap()).lines().map_while(Result::ok);
    let mut said = Vec::new();
    while !parts.is_empty() {
        let Some(line) = lines.next() else { break };
        parts.retain(|part| !line.contains(&format!("ok  {part} (")));
        said.push(line);
    }
    // The script forwards the signal to the part that runs now.
    kill_process(Pid::from_child(&check), Signal::INT).unwrap();
    check.wait().unwrap();
    assert!(parts.is_empty(), "{parts:?}: {said:?}");
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

#[test]
fn programs_of_another_commit_are_not_packed() {
    let folder = tempfile::tempdir().unwrap();
    let trainer = folder.path().join("trainer");
    fs::write(&trainer, "#!/bin/bash\necho 'trainer 0.1.0 (0123456789)'\n").unwrap();
    fs::set_permissions(&trainer, fs::Permissions::from_mode(0o755)).unwrap();
    let output = Command::new(root().join("scripts/pack-gpu")).arg(folder.path()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("are not of this commit") && said.contains("--any-commit"), "{said}");
    assert_eq!(output.status.code(), Some(1), "{said}");
}
