//! `trainer train --profile`: a table of time by span, and a trace of the first steps.

use serde_json::Value;

use crate::support::{Run, stderr};

#[test]
fn a_profile_has_a_row_for_each_span_and_a_trace_of_the_first_steps() {
    let run = Run::new();
    let mut command = run.command("train", &["train_iters=4", "gradient_accumulation_steps=2"]);
    let output = command.args(["--profile", "cumtime", "--profile-steps", "2"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let folder = run.path().join("run");
    let table = std::fs::read_to_string(folder.join("profile.txt")).unwrap();
    let rows: Vec<Vec<&str>> = table.lines().skip(1).map(|line| line.split_whitespace().collect()).collect();
    let row =
        |name: &str| rows.iter().find(|row| row[4..].join(" ") == name).unwrap_or_else(|| panic!("{name}:\n{table}"));
    let seconds = |cell: &str| cell.parse::<f64>().unwrap();
    assert_eq!((row("step")[0], row("micro-batch forward")[0]), ("4", "8"));
    for name in ["block forward", "block backward", "linear forward", "linear backward", "adamw", "save"] {
        assert!(seconds(row(name)[1]) <= seconds(row(name)[3]), "{table}");
    }
    // The span of a linear layer has no child spans.
    assert_eq!(row("linear forward")[1], row("linear forward")[3]);
    let cumtimes: Vec<f64> = rows[..rows.len() - 1].iter().map(|row| seconds(row[3])).collect();
    assert!(cumtimes.is_sorted_by(|a, b| a >= b), "{table}");
    assert!(stderr(&output).contains("trace.json"), "{}", stderr(&output));

    let trace: Value = serde_json::from_str(&std::fs::read_to_string(folder.join("trace.json")).unwrap()).unwrap();
    let begun = |name: &str| {
        trace.as_array().unwrap().iter().filter(|event| event["ph"] == "B" && event["name"] == name).count()
    };
    assert_eq!(begun("step"), 2);
    assert!(begun("linear backward") > 0);
}

#[test]
fn profile_steps_need_a_profile() {
    let run = Run::new();
    let output = run.command("train", &[]).args(["--profile-steps", "2"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("--profile"), "{}", stderr(&output));
}
