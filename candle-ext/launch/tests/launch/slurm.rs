//! The Slurm example jobs, with stubs of Slurm's commands that print their arguments.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use crate::launcher::temp_folder;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// Shell command that prints the length of the store's secret, if the job has one.
const PRINT_SECRET: &str = r#"echo "${CANDLEWICK_STORE_SECRET:+a secret of ${#CANDLEWICK_STORE_SECRET} characters}""#;

/// Runs a job whose `srun` exits with `code`. Returns its exit code and the arguments of `srun` and `scontrol`.
fn run(job: &str, code: i32) -> (Option<i32>, String) {
    let (_folder, path) = temp_folder();
    write_stub(&path.join("srun"), &format!("{PRINT_SECRET}; echo $SRUN_CPUS_PER_TASK CPUs: srun \"$@\"; exit {code}"));
    write_stub(&path.join("scontrol"), r#"[ "$1" = show ] && printf 'node1\nnode2\n' || echo scontrol "$@""#);
    let output = Command::new(format!("{ROOT}/scripts/slurm/{job}.slurm"))
        .args(["recipe.yaml", "train_iters=5"])
        .current_dir(ROOT)
        .env("LAUNCH", env!("CARGO_BIN_EXE_launch"))
        .env("PATH", format!("{}:/usr/bin:/bin", path.display()))
        .envs([("SLURM_JOB_ID", "123456"), ("SLURM_JOB_NODELIST", "node[1-2]"), ("SLURM_JOB_NUM_NODES", "2")])
        .env("SLURM_CPUS_PER_TASK", "8")
        .output()
        .unwrap();
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    (output.status.code(), String::from_utf8(output.stdout).unwrap())
}

fn write_stub(path: &Path, script: &str) {
    fs::write(path, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn example_jobs_pass_the_expected_arguments_to_srun() {
    let text: Vec<_> = jobs().iter().map(|job| format!("{job}\n{}", run(job, 0).1)).collect();
    insta::assert_snapshot!(text.join("\n"));
}

#[test]
fn a_preempted_job_is_requeued() {
    for job in jobs() {
        let (code, text) = run(&job, 75);
        assert_eq!((code, text.lines().last()), (Some(75), Some("scontrol requeue 123456")), "{job}");
        let (code, text) = run(&job, 1);
        assert_eq!((code, text.contains("requeue")), (Some(1), false), "{job}");
    }
}

fn jobs() -> Vec<String> {
    let entries = fs::read_dir(format!("{ROOT}/scripts/slurm")).unwrap();
    let name = |path: &Path| path.file_stem().unwrap().to_str().unwrap().to_owned();
    let mut jobs: Vec<_> = entries.map(|entry| name(&entry.unwrap().path())).collect();
    jobs.sort();
    assert_eq!(jobs.len(), 3);
    jobs
}

/// Uses a stub of cargo that builds a stub of `launch` in `CARGO_TARGET_DIR`.
#[test]
fn the_script_builds_in_cargo_target_dir() {
    let (_folder, path) = temp_folder();
    let build =
        r#"d=$CARGO_TARGET_DIR/release; mkdir -p $d; printf '#!/bin/sh\necho "$@"\n' > $d/launch; chmod +x $d/launch"#;
    write_stub(&path.join("cargo"), build);
    let output = Command::new(format!("{ROOT}/scripts/launch"))
        .arg("built")
        .current_dir(&path)
        .env("PATH", format!("{}:/usr/bin:/bin", path.display()))
        .env("CARGO_TARGET_DIR", "here")
        .env_remove("LAUNCH")
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "built\n", "{}", String::from_utf8_lossy(&output.stderr));
    assert!(path.join("here/release/launch").exists());
}
