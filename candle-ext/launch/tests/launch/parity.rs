//! The settings of a command line, compared with torchrun's (tests/reference/torchrun_args.py).

use std::collections::BTreeMap;

use candlewick_comm::store::StoreSecret;
use candlewick_launch::cli::Cli;
use candlewick_launch::node_resources::NodeResources;
use candlewick_launch::plan::{LaunchPlan, RendezvousPlan};
use candlewick_launch::streams::{StdStreams, StreamsPerRank};
use clap::Parser;
use serde_json::{Value, json};

use crate::launcher::command;

/// Command lines with intended differences from torchrun, and the reasons.
const DIFFERENT: &[(&str, &str)] = &[
    ("--no-python --nproc-per-node 2 prog -- a", "`--` after the program is passed to the program"),
    ("--nnodes 2 --no-python prog", "two nodes require a rendezvous endpoint"),
    ("--nnodes 1:4 --no-python prog", "four nodes require a rendezvous endpoint"),
    ("--nnodes=2:2 --no-python prog", "two nodes require a rendezvous endpoint"),
];

fn cases() -> (Value, Vec<Value>) {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/torchrun_args.json");
    let head: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let cases = head["cases"].as_array().unwrap().clone();
    (head, cases)
}

fn words(value: &Value) -> Vec<String> {
    value.as_array().unwrap().iter().map(|word| word.as_str().unwrap().to_owned()).collect()
}

/// Returns the launch plan as torchrun's `LaunchConfig`.
fn settings(case: &Value, n_cores: usize) -> Option<Value> {
    let arguments = std::iter::once("launch".to_owned()).chain(words(&case["args"]));
    let cli = Cli::try_parse_from(arguments).ok()?;
    let n_gpus = case["gpus"].as_u64().unwrap() as usize;
    let variables = BTreeMap::from([(StoreSecret::VARIABLE.to_owned(), "word".to_owned())]);
    let node_resources = NodeResources { n_cores, n_gpus, hostname: "h".into(), variables };
    let plan = LaunchPlan::resolve(&cli, &node_resources).ok()?;
    let (backend, endpoint, mut options) = match &plan.rendezvous {
        RendezvousPlan::Static { master, node_rank, .. } => {
            ("static", master.to_string(), BTreeMap::from([("rank".to_owned(), node_rank.to_string())]))
        }
        RendezvousPlan::Dynamic(dynamic) => ("c10d", dynamic.endpoint.to_string(), BTreeMap::new()),
    };
    options.extend(cli.nodes.rdzv_conf.0.clone());
    let local_ranks_filter = plan.output.local_ranks_filter.as_ref();
    let command = plan.command.iter().map(|word| if word == "python3" { "python" } else { word });
    Some(json!({
        "min_nodes": plan.nodes.min,
        "max_nodes": plan.nodes.max,
        "nproc_per_node": plan.local_world_size,
        "run_id": if cli.nodes.standalone { "<uuid>" } else { &plan.run_id },
        "role": plan.role,
        "rdzv_backend": backend,
        "rdzv_endpoint": endpoint,
        "rdzv_configs": options,
        "max_restarts": plan.max_restarts,
        "monitor_interval": plan.monitor_interval.as_secs_f64(),
        "local_addr": plan.local_addr,
        "log_dir": plan.output.log_dir,
        "redirects": number(&plan.output.redirects),
        "tee": number(&plan.output.tee),
        "local_ranks_filter": local_ranks_filter.map(|ranks| &ranks.0),
        "signals_to_handle": plan.signals.text,
        "duplicate_stdout_filters": plan.output.stdout_filters.0,
        "duplicate_stderr_filters": plan.output.stderr_filters.0,
        "virtual_local_rank": plan.virtual_local_rank,
        "command": command.collect::<Vec<_>>(),
    }))
}

fn number(streams: &StreamsPerRank) -> Value {
    let one = |streams: &StdStreams| u8::from(streams.out) + 2 * u8::from(streams.err);
    match streams {
        StreamsPerRank::Every(streams) => json!(one(streams)),
        StreamsPerRank::Of(map) => map.iter().map(|(rank, streams)| (rank.to_string(), json!(one(streams)))).collect(),
    }
}

/// Returns torchrun's settings, with the default port added to the endpoint. torchrun adds it later.
fn theirs(case: &Value) -> Value {
    let mut settings = case["settings"].clone();
    if settings["rdzv_endpoint"] == "node0" {
        settings["rdzv_endpoint"] = json!("node0:29400");
    }
    settings
}

#[test]
fn command_lines_give_the_settings_of_torchrun() {
    let (head, cases) = cases();
    let n_cores = head["cores"].as_u64().unwrap() as usize;
    let mut n_compared = 0;
    for case in cases.iter().filter(|case| case["env"].as_object().unwrap().is_empty()) {
        let line = words(&case["args"]).join(" ");
        let (ours, theirs) = (settings(case, n_cores), theirs(case));
        match DIFFERENT.iter().find(|(other, _)| *other == line) {
            Some((_, why)) => assert_ne!(ours.unwrap_or(Value::Null), theirs, "{line}: no longer different: {why}"),
            None => assert_eq!(ours.unwrap_or(Value::Null), theirs, "{line}"),
        }
        n_compared += 1;
    }
    assert!(n_compared > 50, "only {n_compared} command lines were compared");
}

/// Runs the program, because clap reads environment variables itself. The output of `--dry-run` shows the settings.
#[test]
fn environment_variables_set_the_defaults_of_torchrun() {
    let (_, cases) = cases();
    for case in cases.iter().filter(|case| !case["env"].as_object().unwrap().is_empty()) {
        let variables =
            case["env"].as_object().unwrap().iter().map(|(k, v)| (k.clone(), v.as_str().unwrap().to_owned()));
        let mut command = command(&[["--dry-run".to_owned()].to_vec(), words(&case["args"])].concat());
        let output = command.envs(variables).env(StoreSecret::VARIABLE, "word").output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap().replace('\'', "");
        let theirs = &case["settings"];
        if theirs["max_nodes"] != 1 && theirs["rdzv_backend"] == "static" {
            assert_eq!(output.status.code(), Some(2), "{case}");
            continue;
        }
        let n_workers = theirs["nproc_per_node"].as_u64().unwrap() as usize;
        assert_eq!(text.matches("LOCAL_RANK=").count(), n_workers, "{case}\n{text}");
        let restarts = format!("TORCHELASTIC_MAX_RESTARTS={}", theirs["max_restarts"]);
        let role = format!("ROLE_NAME={} ", theirs["role"].as_str().unwrap());
        let signals = format!("TORCHELASTIC_SIGNALS_TO_HANDLE={} ", theirs["signals_to_handle"].as_str().unwrap());
        let backend = format!(" {}, store at ", theirs["rdzv_backend"].as_str().unwrap());
        for word in [restarts, role, signals, backend] {
            assert!(text.contains(&word), "{word}: {case}\n{text}");
        }
        let endpoint = theirs["rdzv_endpoint"].as_str().unwrap();
        let point = if endpoint == "localhost:0" { "a free port" } else { endpoint };
        assert!(text.contains(&format!("store at {point}\n")), "{case}\n{text}");
    }
}
