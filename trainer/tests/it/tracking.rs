//! Experiment trackers: TensorBoard, Weights and Biases, MLflow.

use std::fs;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::support::{Run, Started, stderr};
use super::tracking_server::{Fault, Received, TrackingServer};

const WANDB_KEY: &str = "s3cret-wandb-key";
const MLFLOW_TOKEN: &str = "s3cret-mlflow-token";

/// Returns the command of a run that reports to the server at `url`.
fn command(run: &Run, url: &str, overrides: &[&str]) -> Command {
    let is_own = overrides.iter().any(|argument| argument.starts_with("report_to="));
    let all: &[&str] = if is_own { &[] } else { &["report_to=[tensorboard, wandb, mlflow]"] };
    let mut command = run.command("train", &[all, overrides].concat());
    for (name, value) in [
        ("HOME", run.path().to_str().unwrap()),
        ("NO_PROXY", "127.0.0.1"),
        ("WANDB_BASE_URL", url),
        ("WANDB_API_KEY", WANDB_KEY),
        ("MLFLOW_TRACKING_URI", url),
        ("MLFLOW_TRACKING_TOKEN", MLFLOW_TOKEN),
    ] {
        command.env(name, value);
    }
    command
}

/// Returns the values of a field of W&B's history by step.
fn history(received: &Received, name: &str) -> Vec<(u64, f64)> {
    let value = |line: &Value| Some((line["_step"].as_u64().unwrap(), line[name].as_f64()?));
    received.history.iter().filter_map(value).collect()
}

/// Returns the values of a metric of the MLflow run by step.
fn metric(received: &Received, name: &str) -> Vec<(u64, f64)> {
    let metrics = received.runs[0].metrics.iter().filter(|(key, ..)| key == name);
    metrics.map(|(_, step, value)| (*step, *value)).collect()
}

/// Returns the values of a field of metrics.jsonl by step.
fn written(run: &Run, name: &str) -> Vec<(u64, f64)> {
    let value = |record: &Value| Some((record["iter"].as_u64().unwrap(), record[name].as_f64()?));
    run.metrics().iter().filter_map(value).collect()
}

/// Returns the `.wandb` files of a run.
fn wandb_files(run: &Run) -> Vec<PathBuf> {
    let folders = fs::read_dir(run.path().join("run/wandb")).unwrap().map(|entry| entry.unwrap().path());
    let files = folders.flat_map(|folder| fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()));
    files.filter(|path| path.extension().is_some_and(|extension| extension == "wandb")).collect()
}

/// Checks that no file of the run's folder contains a secret.
#[track_caller]
fn assert_no_secrets(run: &Run) {
    let mut folders = vec![run.path().join("run")];
    while let Some(folder) = folders.pop() {
        for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let text = String::from_utf8_lossy(&fs::read(&path).unwrap()).into_owned();
            assert!(!text.contains("s3cret"), "{} contains a secret", path.display());
        }
    }
}

#[test]
fn every_tracker_receives_the_metrics_and_the_description_of_a_run() {
    let (run, server) = (Run::new(), TrackingServer::start(Fault::Healthy));
    let names = ["run_name=first", "wandb.project=mine", "mlflow.experiment_name=tests"];
    let output = command(&run, server.url(), &names).env("WANDB_TAGS", "a, b").output().unwrap();
    let log = stderr(&output);
    assert!(output.status.success(), "{log}");
    let received = server.received();
    for name in ["loss", "lr", "grad_norm", "loss/eval"] {
        let written = written(&run, name);
        assert!(!written.is_empty(), "{name} is not in metrics.jsonl");
        assert_eq!(history(&received, name), written, "{name} in W&B");
        assert_eq!(metric(&received, name), written, "{name} in MLflow");
    }
    assert_eq!(history(&received, "loss").len(), 24);
    assert_eq!(received.history.len(), 24, "W&B has one line a step");
    assert_eq!(received.summary["_step"], 24);
    assert_eq!(received.exits, [0]);
    assert_eq!(received.runs[0].status, ["RUNNING", "FINISHED"]);

    let upsert = &received.upserts[0];
    assert_eq!([&upsert["project"], &upsert["displayName"]], ["mine", "first"]);
    assert_eq!(upsert["tags"], serde_json::json!(["a", "b"]));
    let config: Value = serde_json::from_str(upsert["config"].as_str().unwrap()).unwrap();
    let params = &received.runs[0].params;
    assert!(received.runs[0].tags.contains_key("candlewick.run_id"));
    let report = run.report();
    for (name, want) in [
        ("parameters", report["run"]["parameters"].clone()),
        ("trained_parameters", report["run"]["trained_parameters"].clone()),
        ("mesh/world_size", 1.into()),
        ("mesh/tp", 1.into()),
        ("global_batch_size", 4.into()),
        ("optimizer.learning_rate", 0.01.into()),
        ("versions/candlewick", env!("CARGO_PKG_VERSION").into()),
    ] {
        assert_eq!(config[name]["value"], want, "{name} in W&B");
        let text = want.as_str().map_or_else(|| want.to_string(), str::to_owned);
        assert_eq!(params[name], text, "{name} in MLflow");
    }
    for line in ["parameters: ", "device: cpu", "global batch: 4 rows a step", "W&B: http", "MLflow: http"] {
        assert_eq!(log.matches(line).count(), 1, "{line:?} in {log}");
    }
    assert!(received.authorizations.iter().any(|value| *value == format!("Bearer {MLFLOW_TOKEN}")));
    assert!(received.authorizations.iter().any(|value| value.starts_with("Basic ")));
    assert_eq!(wandb_files(&run).len(), 1);
    assert_eq!(fs::read_dir(run.path().join("run/tensorboard")).unwrap().count(), 1);
    assert_no_secrets(&run);
}

/// A step and an evaluation after it are one row of W&B.
#[test]
fn metrics_of_steps_and_of_evaluations_have_different_names() {
    let (run, server) = (Run::new(), TrackingServer::start(Fault::Healthy));
    let output = command(&run, server.url(), &["epochs=1", "train_iters=null", "eval_interval=10"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let received = server.received();
    let (steps, evaluations): (Vec<u64>, _) = ((1..=20).collect(), [10, 20]);
    for (name, want) in [
        ("n_targets", &steps[..]),
        ("epoch", &steps),
        ("n_targets/eval", &evaluations),
        ("epoch/eval", &evaluations),
        ("eval_time", &evaluations),
    ] {
        // A checkpoint has an epoch, too, which is no metric.
        let records = run.metrics().into_iter().filter(|record| record.get("saved").is_none());
        let value = |record: Value| Some((record["iter"].as_u64()?, record[name].as_f64()?));
        let written: Vec<(u64, f64)> = records.filter_map(value).collect();
        assert_eq!(history(&received, name), written, "{name} in W&B");
        assert_eq!(metric(&received, name), written, "{name} in MLflow");
        assert_eq!(written.iter().map(|(step, _)| *step).collect::<Vec<_>>(), want, "{name}");
    }
    assert_eq!(written(&run, "epoch/eval"), [(10, 0.0), (20, 1.0)]);
}

#[test]
fn the_row_of_a_checkpoint_whose_record_is_missing_comes_from_the_metrics_file() {
    let (run, server) = (Run::new(), TrackingServer::start(Fault::Healthy));
    let mut killed = command(&run, server.url(), &[]);
    let output = killed.env("CANDLEWICK_TEST_KILL_AT", "checkpoint_published:10").output().unwrap();
    assert!(!output.status.success());
    let output = command(&run, server.url(), &[]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    run.assert_resumed();
    let received = server.received();
    assert_eq!(history(&received, "loss"), written(&run, "loss"));
    let times: Vec<f64> = received.history.iter().map(|row| row["_runtime"].as_f64().unwrap()).collect();
    assert!(times.is_sorted(), "{times:?}");
}

#[test]
fn an_evaluation_that_is_repeated_at_each_start_is_recorded_once() {
    let (run, server) = (Run::new(), TrackingServer::start(Fault::Healthy));
    let generate = "generate={prompts: [hello], max_new_tokens: 2, on_evaluate: true}";
    // The last checkpoint is saved before its evaluation, as by a signal during the evaluation.
    for overrides in [&["eval_interval=100"][..], &["eval_interval=12"], &["eval_interval=12"]] {
        let output = command(&run, server.url(), &[overrides, &[generate]].concat()).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
    }
    assert_eq!(written(&run, "loss/eval").iter().map(|(step, _)| *step).collect::<Vec<_>>(), [24]);
    assert_eq!(metric(&server.received(), "loss/eval").len(), 1);
    let samples = fs::read_to_string(run.path().join("run/samples.jsonl")).unwrap();
    assert_eq!(samples.lines().count(), 1, "{samples}");
}

#[test]
fn every_tracker_receives_sample_generations_as_texts() {
    let (run, server) = (Run::new(), TrackingServer::start(Fault::Healthy));
    let generate = "generate={prompts: [hello], max_new_tokens: 2, on_evaluate: true}";
    let output = command(&run, server.url(), &[generate]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let received = server.received();
    assert!(received.runs[0].tags["samples/0"].contains("> hello"), "{:?}", received.runs[0].tags);
    let texts = received.history.iter().filter_map(|row| row["samples/0"].as_str());
    assert_eq!(texts.filter(|text| text.contains("> hello")).count(), 2, "{:?}", received.history);
}

#[test]
fn a_resumed_run_continues_its_runs_without_duplicates() {
    let (run, server) = (Run::new(), TrackingServer::start(Fault::Healthy));
    let train = |overrides: &[&str]| {
        let output = command(&run, server.url(), overrides).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
    };
    // The last checkpoint is that of step 5, and the trackers did not receive the steps before the kill.
    let mut killed = command(&run, server.url(), &[]);
    let output = killed.env("CANDLEWICK_TEST_KILL_AT", "step_computed:8").output().unwrap();
    assert!(!output.status.success());
    // The trackers receive 12 steps, and the next process resumes after 10.
    train(&["exit_iteration=12"]);
    assert_eq!(history(&server.received(), "loss").len(), 12);
    fs::remove_dir_all(run.path().join("checkpoints/epoch_0_global_step_12")).unwrap();
    train(&[]);
    run.assert_resumed();
    let received = server.received();
    assert_eq!(received.runs.len(), 1, "a second MLflow run was created");
    assert!(received.upserts.iter().all(|upsert| upsert["name"] == received.upserts[0]["name"]));
    assert_eq!(history(&received, "loss"), written(&run, "loss"));
    assert_eq!(metric(&received, "loss"), written(&run, "loss"));
    assert_eq!(wandb_files(&run).len(), 1, "the resumed run did not continue the .wandb file");
    assert_eq!(fs::read_dir(run.path().join("run/tensorboard")).unwrap().count(), 3);
}

#[test]
fn trackers_know_that_a_run_was_preempted() {
    let (run, server) = (Run::new(), TrackingServer::start(Fault::Healthy));
    let long = ["train_iters=100000", "eval_interval=100000", "checkpoint.0.save_every_n_steps=100000"];
    let mut started = Started::spawn(command(&run, server.url(), &long));
    started.wait_for("loss: ");
    started.send(libc::SIGTERM);
    let (code, log) = started.finish();
    assert_eq!(code, Some(75), "{log}");
    let received = server.received();
    assert_eq!(received.exits, [75]);
    assert_eq!(received.runs[0].status, ["RUNNING", "KILLED"]);
    assert_eq!(history(&received, "loss"), written(&run, "loss"));
    assert_eq!(metric(&received, "loss"), written(&run, "loss"));
}

/// Trains with a server that fails, and checks that the run and its files are those of a run without trackers.
#[track_caller]
fn check_fault(url: &str, want: &[&str]) {
    let (plain, run) = (Run::new(), Run::new());
    let started = Instant::now();
    plain.train_ok(&[]);
    // On a slow machine, the run itself takes long.
    let limit = Duration::from_secs(60) + 10 * started.elapsed();
    let started = Instant::now();
    let output = command(&run, url, &[]).output().unwrap();
    let log = stderr(&output);
    assert!(output.status.success(), "{log}");
    assert_eq!(run.losses(), plain.losses());
    for part in want.iter().chain(&["upload the run with `wandb sync "]) {
        assert!(log.contains(part), "no {part:?} in {log}");
    }
    assert!(!log.contains("s3cret") && !log.contains("panicked"), "{log}");
    assert!(log.matches("WARN").count() <= 4, "more than two warnings a server: {log}");
    let file = wandb_files(&run).swap_remove(0);
    assert!(fs::metadata(&file).unwrap().len() > 1000, "{} is empty", file.display());
    assert!(started.elapsed() < limit, "the run waited for the servers: {:?}", started.elapsed());
    assert_no_secrets(&run);
}

#[test]
fn a_server_that_refuses_connections_does_not_change_a_run() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    check_fault(&url, &["the run continues, and the upload is tried again"]);
}

#[test]
fn a_server_that_refuses_a_key_does_not_change_a_run() {
    check_fault(TrackingServer::start(Fault::Status(401)).url(), &["the upload ended: HTTP 401"]);
}

#[test]
fn a_server_that_limits_requests_does_not_change_a_run() {
    check_fault(TrackingServer::start(Fault::Status(429)).url(), &["HTTP 429"]);
}

#[test]
fn a_server_with_internal_errors_does_not_change_a_run() {
    check_fault(TrackingServer::start(Fault::Status(500)).url(), &["HTTP 500"]);
}

#[test]
fn a_server_with_unexpected_json_does_not_change_a_run() {
    for json in ["[]", r#"{"data": [1], "runs": {"0": 1}, "run": 3, "experiment": {"experiment_id": "1"}}"#] {
        check_fault(
            TrackingServer::start(Fault::Json(json)).url(),
            &["W&B: the upload ended: ", "MLflow: the upload ended: "],
        );
    }
}

#[test]
fn control_characters_of_a_server_are_escaped() {
    let project = r#"{"name": "p", "entity": {"name": "\u001b]0;x\u0007\u202e"}}"#;
    let json = format!(r#"{{"data": {{"upsertBucket": {{"bucket": {{"project": {project}}}}}}}}}"#);
    let server = TrackingServer::start(Fault::Json(json.leak()));
    let output = command(&Run::new(), server.url(), &["train_iters=2"]).output().unwrap();
    let log = stderr(&output);
    assert!(output.status.success() && log.contains("\\u001b]0;x\\u0007\\u202e/p/runs/"), "{log}");
    assert!(!log.contains(['\u{1b}', '\u{7}', '\u{202e}']), "{log}");
}

#[test]
fn a_server_that_dies_during_a_run_does_not_change_it() {
    check_fault(TrackingServer::start(Fault::DiesAfter(3)).url(), &["the run continues"]);
}

#[test]
fn a_server_that_never_responds_delays_a_run_by_a_fixed_time() {
    check_fault(TrackingServer::start(Fault::Silent).url(), &["did not receive all metrics"]);
}

#[test]
fn an_offline_run_sends_no_request() {
    let (run, server) = (Run::new(), TrackingServer::start(Fault::Healthy));
    let mut offline = command(&run, server.url(), &["report_to=wandb"]);
    let output = offline.env("WANDB_MODE", "offline").output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).contains("W&B: offline; upload the run with `wandb sync "), "{}", stderr(&output));
    assert_eq!(server.received().n_requests, 0);
    assert!(wandb_files(&run)[0].display().to_string().contains("/offline-run-"));
}

#[test]
fn without_an_api_key_a_run_is_logged_offline() {
    let run = Run::new();
    let mut keyless = command(&run, "http://127.0.0.1:9", &["report_to=none", "wandb.enable=true", "train_iters=2"]);
    let output = keyless.env_remove("WANDB_API_KEY").output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).contains("there is no API key, so the run is logged offline"), "{}", stderr(&output));
    assert_eq!(wandb_files(&run).len(), 1);
}
