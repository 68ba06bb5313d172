//! The environment of a worker, compared with that of torchrun's workers (tests/reference/torchrun_env.py).

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::launcher::{command, free_port, launch_script, start, temp_folder};

type Variables = BTreeMap<String, String>;

/// A worker's script: writes its environment and its argument to a file named by its rank.
const WORKER: &str = r#"env > "$0/$RANK.part"; echo "argument=$1" >> "$0/$RANK.part"; mv "$0/$RANK.part" "$0/$RANK""#;

/// Variables that differ from torchrun's, and the reasons.
const DIFFERENT: &[&str] = &[
    // torchrun sets the host name, which may not resolve.
    "MASTER_ADDR",
    // torchrun does not set rayon's threads.
    "RAYON_NUM_THREADS",
    // torch's store has no secret.
    "CANDLEWICK_STORE_SECRET",
];

fn run(nodes: &[Vec<String>]) -> Vec<Variables> {
    let (_folder, path) = temp_folder();
    let agents: Vec<_> = nodes
        .iter()
        .map(|flags| {
            let worker = ["sh", "-c", WORKER, path.to_str().unwrap(), "${local_rank}"].map(str::to_owned);
            start(command(&[flags.clone(), worker.to_vec()].concat()).env("CANDLEWICK_STORE_SECRET", "word"))
        })
        .collect();
    for agent in agents {
        agent.wait().exits_with(0);
    }
    let n_workers = fs::read_dir(&path).unwrap().count();
    (0..n_workers).map(|rank| read(&path.join(rank.to_string()))).collect()
}

fn read(path: &Path) -> Variables {
    let text = fs::read_to_string(path).unwrap();
    text.lines().filter_map(|line| line.split_once('=')).map(|(k, v)| (k.to_owned(), v.to_owned())).collect()
}

/// Replaces the recorded port by a free one, equal on all nodes, so that concurrent tests do not collide.
fn with_port(nodes: &Value) -> (Vec<Vec<String>>, String) {
    let port = free_port().to_string();
    let swap = |flags: &Value| {
        let mut flags: Vec<String> = flags.as_array().unwrap().iter().map(|f| f.as_str().unwrap().to_owned()).collect();
        for i in 1..flags.len() {
            if flags[i - 1] == "--master-port" {
                flags[i] = port.clone();
            }
            if let Some((host, _)) = flags[i].clone().split_once(':').filter(|_| flags[i - 1] == "--rdzv-endpoint") {
                flags[i] = format!("{host}:{port}");
            }
        }
        if flags.contains(&"--nnodes".to_owned()) && flags.contains(&"--node-rank".to_owned()) {
            flags.extend(["--master-addr".to_owned(), "127.0.0.1".to_owned()]);
        }
        flags
    };
    (nodes.as_array().unwrap().iter().map(swap).collect(), port)
}

fn comparable(mut variables: Variables, port: &str) -> Variables {
    let own = ["PATH", "PWD", "SHLVL", "_", "OLDPWD", "argument"];
    variables.retain(|name, _| !own.contains(&name.as_str()) && !DIFFERENT.contains(&name.as_str()));
    for (name, value) in &mut variables {
        match name.as_str() {
            "TORCHELASTIC_ERROR_FILE" => {
                let tail = value.find("attempt_").map(|at| value[at..].to_owned());
                *value = format!("<logs>/{}", tail.unwrap());
            }
            "TORCHELASTIC_RUN_ID" if value.len() == 36 => *value = "<uuid>".into(),
            "MASTER_PORT" if *value == port => *value = "<given>".into(),
            "MASTER_PORT" => *value = "<port>".into(),
            _ => {}
        }
    }
    variables
}

#[test]
fn workers_get_the_environment_of_torchruns_workers() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/torchrun_env.json");
    let jobs: Vec<Value> = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    for job in jobs {
        let (nodes, port) = with_port(&job["nodes"]);
        let ours = run(&nodes);
        let theirs = job["workers"].as_array().unwrap();
        assert_eq!(ours.len(), theirs.len(), "{nodes:?}");
        for (ours, theirs) in ours.into_iter().zip(theirs) {
            assert_eq!(ours["argument"], theirs["arguments"][0].as_str().unwrap(), "{nodes:?}");
            let is_c10d = nodes[0].contains(&"--rdzv-endpoint".to_owned());
            let mut want: Variables = serde_json::from_value(theirs["env"].clone()).unwrap();
            let given = ["<port>"].iter().all(|port| want["MASTER_PORT"] != **port) || is_c10d;
            want.retain(|name, _| !DIFFERENT.contains(&name.as_str()));
            want.insert("MASTER_PORT".into(), if given { "<given>" } else { "<port>" }.into());
            assert_eq!(comparable(ours, &port), want, "{nodes:?}");
        }
    }
}

#[test]
fn cores_are_shared_and_logged_once() {
    let n_cores = std::thread::available_parallelism().unwrap().get();
    let output = launch_script(2, &[], "echo $RAYON_NUM_THREADS $OMP_NUM_THREADS");
    let rayon_threads = (n_cores / 2).max(1);
    assert_eq!(output.sorted_stdout(), [format!("[0]: {rayon_threads} 1"), format!("[1]: {rayon_threads} 1")]);
    assert_eq!(output.stderr.matches("share").count(), 1, "{}", output.stderr);
    let alone = launch_script(1, &[], "echo ${RAYON_NUM_THREADS-unset}");
    assert_eq!((alone.stdout.as_str(), alone.stderr.as_str()), ("[0]: unset\n", ""));
}

#[test]
fn variables_set_by_the_user_are_kept() {
    let arguments = crate::launcher::script_arguments(2, &[], "echo $RAYON_NUM_THREADS $CUDA_VISIBLE_DEVICES");
    let mut command = command(&arguments);
    let output = start(command.env("RAYON_NUM_THREADS", "7").env("CUDA_VISIBLE_DEVICES", "3,5")).wait();
    assert_eq!(output.sorted_stdout(), ["[0]: 7 3,5", "[1]: 7 3,5"]);
}

#[test]
fn a_virtual_local_rank_sees_its_own_gpu() {
    let script = "echo $LOCAL_RANK $CUDA_VISIBLE_DEVICES";
    let arguments = crate::launcher::script_arguments(2, &["--virtual-local-rank"], script);
    let output = start(command(&arguments).env("CUDA_VISIBLE_DEVICES", "3,5")).wait();
    assert_eq!(output.sorted_stdout(), ["[0]: 0 3", "[1]: 0 5"]);
}
