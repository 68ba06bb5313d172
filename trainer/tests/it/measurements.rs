//! `wall_clock_breakdown` and `mem_profiler`: times of phases, and memory over time.

use std::fs;

use serde_json::Value;

use crate::support::{Run, stderr};

#[test]
fn the_phases_of_each_step_are_timed() {
    let run = Run::new();
    let output =
        run.train(&["train_iters=3", "deepspeed.wall_clock_breakdown=true", "checkpoint=none", "eval_interval=0"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let lines: Vec<String> =
        stderr(&output).lines().filter(|line| line.contains("time (ms) | fwd: ")).map(str::to_owned).collect();
    assert_eq!(lines.len(), 3, "{}", stderr(&output));
    assert!(
        lines[0].contains("| bwd_inner: ") && lines[0].contains("| bwd_allreduce: ") && lines[0].contains("| step: ")
    );
    let steps: Vec<Value> = run.metrics().into_iter().filter(|record| record["loss"].is_number()).collect();
    for step in &steps {
        let time = |phase: &str| step["wall_clock_ms"][phase].as_f64().unwrap();
        assert!(time("fwd") > 0.0 && time("bwd") > 0.0 && time("step") > 0.0, "{step}");
        let phases: f64 = ["fwd", "bwd", "bwd_allreduce", "step"].into_iter().map(time).sum();
        assert!(phases <= step["step_time"].as_f64().unwrap() * 1e3, "{step}");
    }
    let plain = Run::new();
    plain.train_ok(&["train_iters=1", "checkpoint=none"]);
    assert!(plain.metrics().iter().all(|record| record["wall_clock_ms"].is_null()));
}

/// Returns the trace and the table of a profiled run.
fn profile(arguments: &[&str]) -> (Value, String) {
    let run = Run::new();
    let output = run.train(&[&["train_iters=2", "checkpoint=none"], arguments].concat());
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).contains("memory profile: "), "{}", stderr(&output));
    let folder = run.path().join("run/mem-prof");
    let read = |name: &str| fs::read_to_string(folder.join(name)).unwrap();
    (serde_json::from_str(&read("0.json")).unwrap(), read("0.txt"))
}

fn names(trace: &Value, phase: &str) -> Vec<String> {
    let events = trace["traceEvents"].as_array().unwrap().iter().filter(|event| event["ph"] == phase);
    events.map(|event| event["name"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn a_memory_profile_has_the_bytes_at_each_span() {
    let (trace, table) = profile(&["mem_profiler=step"]);
    let begun = names(&trace, "B");
    assert_eq!(begun.len(), names(&trace, "E").len());
    assert_eq!(begun.iter().filter(|name| *name == "step").count(), 2, "{begun:?}");
    let row = |name: &str| -> Vec<f64> {
        let line = table
            .lines()
            .find(|line| line.ends_with(&format!("  {name}")))
            .unwrap_or_else(|| panic!("{name}:\n{table}"));
        line.split_whitespace().take(5).map(|number| number.parse().unwrap()).collect()
    };
    // A forward keeps activations, which the backward frees.
    let (forward, backward) = (row("micro-batch forward"), row("micro-batch backward"));
    assert_eq!((forward[0], backward[0]), (4.0, 4.0));
    assert!(forward[1] > 0.0 && forward[2] > 0.0, "{table}");
    assert!(backward[2] < 0.0, "{table}");
    assert!(row("step")[1] >= forward[1], "{table}");
    assert!(table.contains("peak: "), "{table}");
}

#[test]
fn a_profile_of_the_whole_run_begins_earlier_and_keeps_the_newest_entries() {
    let evaluated = ["eval_on_start=true", "mem_profiler=e2e"];
    let (whole, _) = profile(&evaluated);
    let (training, _) = profile(&["eval_on_start=true", "mem_profiler=step"]);
    let has = |trace: &Value, name: &str| names(trace, "B").iter().any(|own| own == name);
    for name in ["prepare data", "build model"] {
        assert!(has(&whole, name) && !has(&training, name), "{name}");
    }
    let (short, table) = profile(&[&evaluated[..], &["mem_profiler_max_entries=20"]].concat());
    assert_eq!(short["traceEvents"].as_array().unwrap().len(), 2 * 20);
    let n_dropped = short["otherData"]["dropped_entries"].as_u64().unwrap();
    let n_all = whole["traceEvents"].as_array().unwrap().len() as u64 / 2;
    assert_eq!(n_dropped + 20, n_all);
    assert!(table.contains("raise mem_profiler_max_entries"), "{table}");
}
