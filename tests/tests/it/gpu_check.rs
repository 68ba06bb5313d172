//! `scripts/gpu-check` and `scripts/pack-gpu` with stand-ins for our programs.
#![cfg(target_os = "linux")]
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use progress::{Progress, read, within};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use suite::root;

use crate::gpu_scripts::trainer;

// The benchmarks have no tests of their own.
#[path = "../../../candle-ext/ops/benches/ops/progress.rs"]
mod progress;

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
    // A fake sanitizer that was killed after its time.
    let found = folder.path().join("path");
    fs::create_dir(&found).unwrap();
    put_program(&found.join("compute-sanitizer"), "exit 137");
    let check = |options: &[&str]| {
        let path = format!("{}:{}", found.display(), std::env::var("PATH").unwrap());
        let mut check = Command::new("scripts/gpu-check");
        check.args(options).args([&out, &bin]).current_dir(root()).env("PATH", path).env("CUDA_VISIBLE_DEVICES", "");
        check.env("GPU_WHEELS", &found);
        let output = check.output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        (said, output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    // A slow machine has time for every part.
    let (said, code, complained) = check(&["--seconds", "2000"]);
    for part in ["doctor", "ops", "comm", "losses", "steps", "ops-bench", "torch's-ops"] {
        assert!(said.contains(&format!("FAIL  {part} (")), "{part}: {said}");
    }
    assert!(said.contains("FAILED: b::two: thread 'b::two' panicked at x.rs:1: relative error 3"), "{said}");
    assert!(said.contains("alone it is right: c::three") && !said.contains("a::one: "), "{said}");
    assert_eq!(code, Some(7), "{said}{complained}");
    let summary = fs::read_to_string(out.join("summary.txt")).unwrap();
    assert!(summary.contains("doctor.json: ") && summary.contains("FAIL ops-bench"), "{summary}");
    assert!(
        summary.contains("Qwen3-4B        ours            RuntimeError: trainer estimate: exit code 3"),
        "{summary}"
    );
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
    check.args(["--signal=INT", "240", "scripts/gpu-check", "--first", "--seconds", "2000"]);
    check.args([&out, &bin]).current_dir(root());
    let mut check = check.env("GPU_WHEELS", &out).stdout(Stdio::piped()).spawn().unwrap();
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

/// Runs `gpu-check` with these programs, and returns its output and exit code.
fn gpu_check(programs: &[(&str, &str)], folder: &Path, options: &[&str]) -> (String, Option<i32>) {
    let (bin, out) = (folder.join("bin"), folder.join("out"));
    fs::create_dir_all(&bin).unwrap();
    for (name, program) in programs {
        put_program(&bin.join(name), program);
    }
    let mut check = Command::new("scripts/gpu-check");
    check.args(options).args([&out, &bin]).current_dir(root()).env("GPU_WHEELS", folder);
    let output = check.output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    (String::from_utf8_lossy(&said).into_owned(), output.status.code())
}

pub(crate) fn put_program(file: &Path, program: &str) {
    fs::write(file, format!("#!/bin/bash\n{program}\n")).unwrap();
    fs::set_permissions(file, fs::Permissions::from_mode(0o755)).unwrap();
}

/// Returns the names of the parts of a call, their seconds together, and the limit of the call.
fn listed(draw: &str, call: &str) -> (Vec<String>, u64, u64) {
    let folder = tempfile::tempdir().unwrap();
    let (said, code) = gpu_check(&[], folder.path(), &["--draw", draw, "--call", call, "--list"]);
    assert_eq!(code, Some(0), "{said}");
    let (mut names, mut seconds, mut limit) = (Vec::new(), 0, 0);
    for line in said.lines() {
        match line.split_once(' ').unwrap() {
            ("limit:", number) => limit = number.parse().unwrap(),
            (number, name) => {
                seconds += number.parse::<u64>().unwrap();
                names.push(name.to_owned());
            }
        }
    }
    (names, seconds, limit)
}

#[test]
fn the_calls_of_a_draw_have_their_parts_and_fit_into_its_time() {
    let check = |draw: &str, call: &str, parts: &str| {
        let (names, seconds, limit) = listed(draw, call);
        assert_eq!(names.join(" "), parts, "draw {draw}, call {call}");
        // Ten seconds for the table.
        assert!(seconds + 10 <= limit && limit < 600, "draw {draw}, call {call}: {seconds} s of {limit} s");
        limit
    };
    let one = [("A", "doctor smoke ops ceilings grouped moe-peers"), ("B", "lora micro-batches tune fp8-mlp host")];
    let two = [("A", "doctor tests fp8-peers fp8-8B peers lora-fp8"), ("B", "long-300")];
    let in_place_of_b =
        check("2", "C", "sanitize where small-lora batch-invariant").max(check("2", "D", "long-2-layers"));
    for (draw, calls) in [("1", one), ("2", two)] {
        let [a, b] = calls.map(|(call, parts)| check(draw, call, parts));
        // 15 minutes, with two for the start of a machine.
        assert!(a + b.max(in_place_of_b) <= 780, "draw {draw}: {a} s and {b} s");
    }
    check("3", "A", "doctor smoke h100");
}

/// Returns the seconds of a part in a list.
fn seconds_of(options: &[&str], part: &str) -> Option<u64> {
    let folder = tempfile::tempdir().unwrap();
    let (said, _) = gpu_check(&[], folder.path(), &[options, &["--list"]].concat());
    said.lines().filter_map(|line| line.split_once(' ')).find(|(_, name)| *name == part)?.0.parse().ok()
}

/// These parts cannot be shortened: a filter of tests, and steps of a fixed length.
#[test]
fn a_part_of_fixed_work_has_its_own_seconds_in_every_call() {
    for part in ["tests", "batch-invariant", "long-300", "long-2-layers"] {
        let own = seconds_of(&["--parts", part], part).unwrap();
        let calls = [("1", "A"), ("1", "B"), ("2", "A"), ("2", "B"), ("2", "C"), ("2", "D"), ("3", "A")];
        let in_calls = calls.iter().filter_map(|(draw, call)| seconds_of(&["--draw", draw, "--call", call], part));
        let in_calls: Vec<u64> = in_calls.collect();
        assert!(
            !in_calls.is_empty() && in_calls.iter().all(|seconds| *seconds >= own),
            "{part}: {in_calls:?}, not {own}"
        );
    }
}

/// A dry run takes our program's steps on the CPU; without torch its sides are errors.
#[test]
fn a_call_runs_dry_on_the_cpu() {
    let folder = tempfile::tempdir().unwrap();
    let trainer = format!("exec {} \"$@\"", trainer());
    let evaluator = format!("exec {} \"$@\"", suite::program("evaluator").display());
    let (said, code) = gpu_check(
        &[("trainer", &trainer), ("evaluator", &evaluator)],
        folder.path(),
        &["--dry-run", "--parts", "micro-batches,where,long-2-layers,batch-invariant", "--seconds", "2000"],
    );
    assert_eq!(code, Some(0), "{said}");
    for line in [
        "4B-mb2          ours",
        "linear forward",
        "long, 2 layers:",
        "end: all lengths were trained",
        "batch invariance: ok; of 8",
    ] {
        assert!(said.contains(line), "{line}: {said}");
    }
}

#[test]
fn wrong_options_of_the_check_are_refused_before_it_starts() {
    let check = |options: &[&str], want: &str| {
        let folder = tempfile::tempdir().unwrap();
        let (said, code) = gpu_check(&[], folder.path(), options);
        assert!(code == Some(2) && said.contains(want), "{options:?}: {said}");
        assert!(!folder.path().join("out").exists(), "{options:?}");
    };
    check(&["--draw", "1"], "draw 1 has no call ''; the draws and calls are 1A 1B 2A");
    check(&["--draw", "7", "--call", "A"], "draw 7 has no call 'A'");
    check(&["--draw", "1", "--call", "A", "--parts", "ops"], "--draw goes with neither --parts nor --first");
    check(&["--parts", "ops:fast"], "--parts ops:fast: the seconds are no number");
    check(&["--draw", "1", "--call", "A", "--seconds", "100"], "--seconds 100: the parts keep 410 seconds");
    check(&["--parts", "ops", "--seconds", "soon"], "--seconds soon is no number");
}

/// A case that hangs ends its process, and the next process continues the file. All of them read one file of ceilings.
#[test]
fn after_a_case_that_ends_the_process_the_others_are_timed() {
    let folder = tempfile::tempdir().unwrap();
    let calls = folder.path().join("calls");
    // The first process is aborted as by its time limit; the second one finishes.
    let ops_bench = format!(
        "echo \"$*\" >>{0}; [ $(wc -l <{0}) -gt 1 ] || kill -ABRT $$\nwhile [ \"$1\" != --json ]; do shift; done\n\
         echo '{{\"ceilings\": {{\"copy_bytes_per_second\": 1, \"product_flops_per_second\": 1}}, \"rows\": [], \
         \"failed\": [{{\"case\": \"add\", \"error\": \"the process ended\"}}]}}' >\"$2\"; exit 1",
        calls.display()
    );
    let (said, code) = gpu_check(&[("ops-bench", &ops_bench)], folder.path(), &["--parts", "ops-bench"]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("failed: add: the process ended"), "{said}");
    let calls = fs::read_to_string(calls).unwrap();
    let calls: Vec<&str> = calls.lines().collect();
    assert_eq!((calls.len(), calls[0]), (2, calls[1]), "{said}");
    let ceilings = calls[0].split_once("--ceilings ").expect("a file of ceilings").1;
    assert!(
        ceilings.ends_with("/results/device-ceilings.json") && calls[0].contains("--resume --case-seconds "),
        "{ceilings}"
    );
}

#[test]
fn a_case_that_ended_the_process_has_failed_and_no_case_runs_twice() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("ops.json");
    let resumed = || Progress::resume(Some(file.clone()), json!({ "device": "CPU" })).unwrap();
    let mut before = resumed();
    before.begin("add").unwrap();
    before.end("rows", json!({ "case": "add", "ms": within(Some(600.0), || 1.0) })).unwrap();
    before.begin("hangs").unwrap();
    drop(before);

    let mut after = resumed();
    assert!(after.has("add") && after.has("hangs") && !after.has("rope") && after.has_failures());
    after.begin("rope").unwrap();
    after.end("rows", json!({ "case": "rope" })).unwrap();
    let found = read(&file).unwrap();
    assert_eq!((found["rows"].as_array().unwrap().len(), &found["device"]), (2, &json!("CPU")), "{found}");
    assert_eq!(found["failed"][0]["case"], "hangs", "{found}");
    assert!(found.get("running").is_none(), "{found}");
}

#[test]
fn a_program_that_hangs_is_ended_with_its_part_and_the_next_part_runs() {
    let folder = tempfile::tempdir().unwrap();
    let programs = [("ops-bench", "exec sleep 1000"), ("comm-test", "exit 0")];
    let (said, code) = gpu_check(&programs, folder.path(), &["--parts", "host:5,comm", "--seconds", "40"]);
    // `host` has what `comm` does not keep: 15 seconds of 40, less the script's start. A part needs 5.
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("FAIL  host (") && said.contains("ok  comm ("), "{said}");
}

#[test]
fn named_tests_run_before_the_other_parts_and_must_exist() {
    let folder = tempfile::tempdir().unwrap();
    let trainer = "echo '{\"gpus\": []}'";
    let ops_test =
        "case \"$*\" in *fp8::*moe::*) echo 'test result: ok. 2 passed' ;; *) echo 'test result: ok. 0 passed' ;; esac";
    let programs = [("ops-test", ops_test), ("trainer", trainer)];
    let (said, code) = gpu_check(&programs, folder.path(), &["--tests", "fp8::,moe::", "--parts", "doctor"]);
    assert!(code == Some(0) && said.find("ok  tests (") < said.find("ok  doctor ("), "{said}");
    let (said, code) = gpu_check(&programs, folder.path(), &["--tests", "nothing", "--parts", "doctor"]);
    assert!(code == Some(1) && said.contains("FAIL  tests ("), "{said}");
}

#[test]
fn files_that_cannot_travel_together_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let size = |mib: u64| {
        let archive = fs::File::create(folder.path().join("bin.tar.xz")).unwrap();
        archive.set_len(mib << 20).unwrap();
        let mut pack = Command::new("scripts/pack-gpu");
        let output = pack.arg("--size").arg(folder.path().join("bin")).current_dir(root()).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
    };
    let (code, said) = size(1);
    assert!(code == Some(0) && said.contains("archive 1 MiB, wheels 0 MiB, checkout "), "{said}");
    let (code, said) = size(65);
    assert!(code == Some(1) && said.contains("MiB together, more than 64 MiB"), "{said}");
    fs::create_dir(folder.path().join("wheels")).unwrap();
    fs::File::create(folder.path().join("wheels/a.whl")).unwrap().set_len(64 << 20).unwrap();
    let (code, said) = size(1);
    assert!(code == Some(1) && said.contains("wheels 64 MiB"), "{said}");
}

/// An `ops-bench` whose cases take a time that depends on the tile. `256x128` ends its process at once.
const BENCH_OF_TILES: &str = r#"
while [ $# -gt 0 ]; do
    case "$1" in --json) file="$2" ;; --tile) tile="$2" ;; esac
    shift
done
row() { echo "{\"op\": \"$op$1\", \"shape\": {\"t\": 32768, \"k\": 2048, \"n\": 1536, \"e\": 128}, \"what\": \"x\",
    \"ms\": $ms, \"ms_min\": $ms, \"ms_max\": $ms, \"tflop_s\": $((800 / ms))}"; }
op=grouped_linear ms=4
case "${tile:-}" in
'') rows="$(row ''), $(row ' dw')" ;;
256x128) exit 1 ;;
dw-*) op='grouped_linear cutlass' ms=2 rows=$(row ' dw') ;;
*) op='grouped_linear cutlass' ms=2 rows=$(row '') ;;
esac
echo "{\"device\": \"NVIDIA H200\", \"tile\": \"${tile:-}\", \"rows\": [$rows]}" >"$file"
"#;

#[test]
fn every_tile_is_measured_and_the_faster_ones_are_recorded() {
    let folder = tempfile::tempdir().unwrap();
    let tiles = folder.path().join("bin/cutlass");
    fs::create_dir_all(&tiles).unwrap();
    ["128x256", "256x128", "dw-128x256"]
        .iter()
        .for_each(|tile| fs::write(tiles.join(format!("{tile}.so")), "").unwrap());
    let programs = [("ops-bench", BENCH_OF_TILES), ("ops-test", "exit 0"), ("trainer", "echo '{\"capability\": 90}'")];
    let options = ["--parts", "grouped", "--seconds", "2000"];
    let (said, code) = gpu_check(&programs, folder.path(), &options);
    assert_eq!(code, Some(1), "a tile failed: {said}");
    for line in ["y bf16 256 2048 1536 128x256 400 200 ", "dw f32 256 2048 1536 dw-128x256 400 200 "] {
        assert!(said.contains(line) && said.contains(" NVIDIA H200\n"), "{line}: {said}");
    }
    // Without tiles a GPU fails the check.
    fs::remove_dir_all(&tiles).unwrap();
    let (said, code) = gpu_check(&programs, folder.path(), &options);
    assert!(code == Some(1) && said.contains("there are no tiles of CUTLASS"), "{said}");
}

#[test]
fn a_missing_or_unknown_tile_of_cutlass_is_named() {
    let folder = tempfile::tempdir().unwrap();
    put_program(&folder.path().join("trainer"), "echo 'trainer 0.1.0 (0123456789)'");
    let run = |script: &str, arguments: &[&str]| {
        let mut command = Command::new(root().join(script));
        let output = command.arg(folder.path()).args(arguments).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, said) = run("scripts/pack-gpu", &["--any-commit"]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("has no tile 128x128: scripts/build-cutlass") && said.contains("/cutlass 128x128"), "{said}");
    let (code, said) = run("scripts/build-cutlass", &["128x512"]);
    assert_eq!(code, Some(2), "{said}");
    assert!(
        said.contains("there is no tile 128x512; the tiles are 128x128 ") && said.contains(" dw-256x128"),
        "{said}"
    );
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

/// Packs stand-ins of the programs. They need the libraries that a fake `readelf` prints.
fn pack(folder: &Path, needed: &str) -> (Option<i32>, String) {
    let (bin, path) = (folder.join("bin"), folder.join("path"));
    for folder in [&bin.join("cutlass"), &path] {
        fs::create_dir_all(folder).unwrap();
    }
    let tiles = fs::read_to_string(root().join("candle-ext/ops/src/cuda/gemm/cutlass/tiles.txt")).unwrap();
    for line in tiles.lines().filter(|line| !line.starts_with('#')) {
        let tile = line.split_whitespace().next().expect("a line has a tile");
        fs::write(bin.join(format!("cutlass/{tile}.so")), "").unwrap();
    }
    put_program(
        &path.join("readelf"),
        &format!(
            "case $1 in -d) printf ' 0x1 (NEEDED) Shared library: [%s]\\n' {needed} ;; *) echo 'Name: GLIBC_2.34 Flags' ;; esac"
        ),
    );
    let calls = folder.join("calls");
    for name in ["trainer", "evaluator", "ops-test", "comm-test", "ops-bench"] {
        put_program(&bin.join(name), &format!("echo \"{name} $*\" >>{}; echo said by {name}", calls.display()));
    }
    let path = format!("{}:{}", path.display(), std::env::var("PATH").unwrap());
    let mut pack = Command::new("scripts/pack-gpu");
    let output = pack.arg(&bin).arg("--any-commit").current_dir(root()).env("PATH", path).output().unwrap();
    (output.status.code(), String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
}

#[test]
fn the_archive_has_the_programs_and_the_files_of_the_check() {
    let folder = tempfile::tempdir().unwrap();
    let (code, said) = pack(folder.path(), "libc.so.6 libm.so.6");
    if code != Some(0) && said.contains("xz: ") {
        eprintln!("skipped: there is no xz here");
        return;
    }
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("the programs need a C library with GLIBC_2.34"), "{said}");
    // Each program was started, and the trainer took a step.
    let calls = fs::read_to_string(folder.path().join("calls")).unwrap();
    for call in [
        "trainer --version",
        "trainer doctor",
        "trainer -q train recipes/quickstart.yaml device=cpu train_iters=1",
        "evaluator --version",
        "ops-test --list",
        "comm-test --list",
        "ops-bench --device cpu --quick --filter add",
    ] {
        assert!(calls.lines().any(|line| line.starts_with(call)), "{call}: {calls}");
    }
    let unpacked = folder.path().join("unpacked");
    fs::create_dir(&unpacked).unwrap();
    let archive = folder.path().join("bin.tar.xz");
    assert!(Command::new("tar").arg("-xf").arg(archive).arg("-C").arg(&unpacked).status().unwrap().success());
    // The scripts of every part are there, and the check runs from the unpacked folder.
    let check = fs::read_to_string(root().join("scripts/gpu-check")).unwrap();
    let scripts = check.split_whitespace().filter(|word| word.starts_with("tests/reference/") && word.ends_with(".py"));
    for file in scripts.chain(["trainer", "evaluator", "ops-test", "comm-test", "ops-bench", "recipes/quickstart.yaml"])
    {
        assert!(unpacked.join(file).is_file(), "{file} is not in the archive");
    }
    let output = Command::new(unpacked.join("scripts/gpu-check"))
        .args(["--parts", "comm"])
        .arg(folder.path().join("out"))
        .output();
    let output = output.unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && said.contains("ok  comm ("),
        "{said}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn a_program_that_links_a_library_of_the_driver_is_not_packed() {
    let folder = tempfile::tempdir().unwrap();
    let (code, said) = pack(folder.path(), "libc.so.6 libcuda.so.1");
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("libcuda.so.1") && said.contains("failed: trainer needs these libraries to start"), "{said}");
    assert!(!folder.path().join("bin.tar.xz").exists());
}
