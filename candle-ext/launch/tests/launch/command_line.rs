//! The command line: help, errors and dry runs.

use crate::launcher::{command, launch, start};

#[test]
fn help_is_grouped() {
    let output = launch(&["--help"]);
    output.exits_with(0);
    insta::assert_snapshot!(output.stdout);
}

#[test]
fn a_mistyped_flag_suggests_the_right_one() {
    launch(&["--nproc-per-nod", "4", "true"]).exits_with(2).stderr_contains(&["--nproc-per-nod", "--nproc-per-node"]);
    launch(&["--bogus", "true"]).exits_with(2).stderr_contains(&["unexpected argument '--bogus'"]);
}

#[test]
fn an_invalid_command_line_exits_with_2_and_starts_nothing() {
    for (line, words) in [
        ("", "PROGRAM"),
        ("--nproc-per-node 0 true", "at least 1"),
        ("--nproc-per-node xpu true", "Intel's GPUs are not supported"),
        ("--rdzv-backend etcd true", "etcd is not supported"),
        ("--nnodes 2 true", "--nnodes 2 requires --master-addr"),
        ("--nnodes 2 --rdzv-backend c10d true", "--nnodes 2 requires --rdzv-endpoint"),
        ("--nnodes 2 --master-addr h --master-port 0 true", "requires a fixed port"),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint h:0 true", "requires a fixed port"),
        ("--nnodes 2 --node-rank 2 --master-addr h true", "start node 2 of 2: --node-rank counts from 0"),
        ("--nnodes 2 --master-addr h true", "CANDLEWICK_STORE_SECRET is not set"),
        ("--dry-run --nnodes 1:4 --rdzv-backend c10d --rdzv-endpoint h true", "CANDLEWICK_STORE_SECRET is not set"),
        ("--rdzv-backend c10d --rdzv-endpoint h:x true", "`x` is not a port"),
        ("--rdzv-conf timeout=soon true", "timeout=soon is not a number of seconds"),
        ("--rdzv-conf timeuot=3 true", "`timeuot` is none of"),
        ("--monitor-interval -1 true", "--monitor-interval"),
        ("--numa-binding node true", "numactl"),
        ("--logs-specs x true", "Python class"),
        ("-m --no-python mod", "--no-python excludes it"),
        ("-t 4 true", "`4` is none of 0 (neither), 1 (stdout), 2 (stderr), 3 (both)"),
        ("--signals-to-handle SIGKILL true", "`SIGKILL` is not a signal that can be handled"),
        ("no-such-program", "it is not on PATH"),
        ("./no-such-program", "there is no such file"),
    ] {
        let arguments: Vec<_> = line.split(' ').filter(|word| !word.is_empty()).collect();
        let output = launch(&arguments);
        assert_eq!((output.exit_code, output.stdout.as_str()), (Some(2), ""), "{line}\n{}", output.stderr);
        output.stderr_contains(&[words]);
    }
}

#[test]
fn a_secret_of_a_store_that_lets_in_torch_is_reported() {
    const NOTE: &str = "CANDLEWICK_STORE_SECRET has no effect";
    let run = |arguments: &[&str]| start(command(arguments).env("CANDLEWICK_STORE_SECRET", "word")).wait();
    run(&["--allow-torch-clients", "true"]).exits_with(0).stderr_contains(&[NOTE, "torch's clients send no secret"]);
    let output = run(&["true"]);
    assert!(!output.exits_with(0).stderr.contains(NOTE), "{}", output.stderr);
    assert!(!launch(&["--allow-torch-clients", "true"]).exits_with(0).stderr.contains(NOTE));
}

#[test]
fn a_dry_run_prints_shell_commands() {
    let line = "--dry-run --nproc-per-node 2 --master-port 1234 --log-dir logs --rdzv-id job7 -- trainer train r.yaml";
    let mut arguments: Vec<_> = line.split(' ').collect();
    arguments.extend(["data.sources=[a b]", "gpu=${local_rank}"]);
    let output = start(command(&arguments).env("RAYON_NUM_THREADS", "4").env("OMP_NUM_THREADS", "1")).wait();
    insta::assert_snapshot!(output.exits_with(0).stdout);
}

#[test]
fn a_dry_run_of_one_of_two_nodes() {
    let line = "--dry-run --nnodes 2 --node-rank 1 --master-addr node0 --max-restarts 3 trainer train r.yaml";
    let output = start(command(&line.split(' ').collect::<Vec<_>>()).env("CANDLEWICK_STORE_SECRET", "word")).wait();
    insta::assert_snapshot!(output.exits_with(0).stdout);
}

#[test]
fn python_runs_py_files_and_programs_with_python_flags() {
    for (line, want) in [
        ("train.py --lr 1", "python3 -u train.py --lr 1"),
        ("--no-python ./train.py", "./train.py"),
        ("-m pkg.train", "python3 -u -m pkg.train"),
        ("--run-path train", "python3 -u train"),
        ("trainer -m x", "trainer -m x"),
    ] {
        let arguments: Vec<_> = ["--dry-run"].into_iter().chain(line.split(' ')).collect();
        let out = launch(&arguments).stdout;
        assert_eq!(out.lines().last().map(str::trim), Some(want), "{line}");
    }
    let output = start(command(&["--dry-run", "train.py"]).env("PYTHON_EXEC", "/opt/python")).wait();
    assert!(output.stdout.ends_with("  /opt/python -u train.py\n"), "{}", output.stdout);
}

#[test]
fn the_last_value_of_a_repeated_flag_is_used() {
    let line = "--dry-run --nproc-per-node 3 --nproc_per_node=1 --role a --role b --standalone --standalone true";
    let output = launch(&line.split(' ').collect::<Vec<_>>());
    assert_eq!(output.exits_with(0).stdout.matches("ROLE_NAME=b ").count(), 1, "{}", output.stdout);
}

#[test]
fn a_huge_timeout_is_accepted() {
    let line =
        "--standalone --shutdown-timeout 1e19 --rdzv-conf keep_alive_interval=1e19,timeout=1e300 --max-restarts 1";
    let arguments: Vec<_> = line.split(' ').chain(["--", "sh", "-c", "exit 3"]).collect();
    launch(&arguments).exits_with(3);
    launch(&["--shutdown-timeout", "nan", "true"]).exits_with(2);
}

#[test]
fn node_0_logs_a_master_addr_of_another_machine() {
    let arguments = ["--nnodes", "2", "--master-addr", "192.0.2.1", "--rdzv-conf", "timeout=0", "true"];
    let output = start(command(&arguments).env("CANDLEWICK_STORE_SECRET", "word")).wait();
    output.stderr_contains(&["this is node 0, and --master-addr 192.0.2.1 is not an address of "]);
}

#[test]
fn the_launcher_prints_documents_of_its_command_line() {
    let script = launch(&["completions", "bash"]);
    assert!(script.exit_code == Some(0) && script.stdout.contains("_clap_complete_launch launch\n"), "{script:?}");
    let page = launch(&["man"]);
    assert!(page.exit_code == Some(0) && page.stdout.contains(".TH launch 1"), "{page:?}");
    let unknown = launch(&["completions", "none"]);
    assert!(unknown.exit_code == Some(2) && unknown.stderr.contains("possible values"), "{unknown:?}");
}

#[test]
fn a_program_may_have_the_name_of_a_command() {
    for arguments in [&["--dry-run", "--", "man", "ls"][..], &["--dry-run", "--nproc-per-node", "1", "man", "ls"]] {
        let output = launch(arguments);
        assert!(output.exit_code == Some(0) && output.stdout.contains("man ls"), "{arguments:?}: {output:?}");
    }
}
