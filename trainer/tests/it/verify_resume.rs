//! `trainer verify-resume`: a resumed run compared with an uninterrupted one.

use std::process::Output;

use serde_json::Value;

use crate::support::Run;

fn verify(run: &Run, arguments: &[&str]) -> (Option<i32>, String) {
    let Output { status, stdout, stderr } = run.command("verify-resume", arguments).output().unwrap();
    let text = String::from_utf8_lossy(&stdout).into_owned() + &String::from_utf8_lossy(&stderr);
    (status.code(), text)
}

#[test]
fn a_resumed_run_equals_an_uninterrupted_one_to_the_bit() {
    let run = Run::new();
    for (arguments, lines) in [
        (&[][..], ["4 steps with a stop after step 2", "from the checkpoint of step 2"]),
        (&["--steps", "5", "--stop-after", "1"], ["5 steps with a stop after step 1", "from the checkpoint of step 1"]),
    ] {
        let (code, text) = verify(&run, arguments);
        assert_eq!(code, Some(0), "{text}");
        for part in lines.iter().chain(&["equal to the bit: losses, gradient norms, weights and optimizer state"]) {
            assert!(text.contains(part), "no {part:?} in {text}");
        }
        assert!(!run.path().join("verify-resume").exists(), "the folder is removed");
    }
    assert!(!run.path().join("run").exists(), "the recipe's own folder is untouched");
}

#[test]
fn the_numbers_of_each_step_are_in_the_json() {
    let run = Run::new();
    let output = run.command("verify-resume", &["--json", "--output", "here"]).output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["resumed_from"], report["steps"].as_array().unwrap().len()), (&Value::from(2), 4));
    assert_eq!(report["steps"][3]["uninterrupted"], report["steps"][3]["resumed"]);
    assert_eq!(report["different_files"], Value::Array(Vec::new()));
}

#[test]
fn wrong_steps_and_an_existing_folder_are_refused() {
    let run = Run::new();
    run.write("notes", "years of work");
    for (arguments, parts) in [
        (&["--steps", "4", "--stop-after", "4"][..], ["--stop-after 4", "set 1 to 3"]),
        (&["--steps", "1"], ["--steps", "at least 2"]),
        (&["--output", "notes"], ["notes exists", "another --output"]),
    ] {
        let (code, text) = verify(&run, arguments);
        assert_eq!(code, Some(2), "{text}");
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    }
    let (code, text) = verify(&run, &["train_iters=3"]);
    assert!(code == Some(1) && text.contains("the run has 3; lower --steps"), "{text}");
    assert!(!run.path().join("verify-resume").exists(), "the same command can start again");
}
