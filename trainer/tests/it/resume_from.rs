//! `resume_from_checkpoint`: a name that is no checkpoint, or that the run does not continue, is an error with the near ones.

use std::fs;

use crate::support::{Run, stderr};

/// Trains a run with checkpoints of the steps 5 and 10, and another one with a checkpoint of step 5. Returns their folder.
fn two_runs() -> Run {
    let run = Run::new();
    for folder in ["checkpoints", "hf"] {
        run.edit(&format!("    output_dir: {}/{folder}\n", run.path().display()), "");
    }
    run.train_ok(&["output_dir=other", "train_iters=6"]);
    run.train_ok(&["output_dir=own", "train_iters=10"]);
    run
}

#[track_caller]
fn check(run: &Run, output_dir: &str, named: &str, parts: &[&str]) {
    let named = format!("resume_from_checkpoint={named}");
    let output = run.train(&[&format!("output_dir={output_dir}"), &named, "train_iters=12"]);
    let log = stderr(&output);
    assert_eq!(output.status.code(), Some(6), "{output_dir} {named}: {log}");
    for part in parts {
        assert!(log.contains(part), "{output_dir} {named}: no {part:?} in:\n{log}");
    }
}

#[test]
fn a_mistyped_checkpoint_is_an_error_that_lists_the_near_ones() {
    let run = two_runs();
    let near = [
        "it does not exist. The checkpoints near it are own/checkpoints/epoch_0_global_step_10, own/checkpoints/epoch_0",
    ];
    // A run with checkpoints of its own, and a new one.
    for output_dir in ["own", "new"] {
        for mistyped in [
            "own/checkpoints/epoch_0_global_step_99",
            "own/checkpoints/step_5",
            "own/checkpoint/epoch_0_global_step_5",
            "own/epoch_0_global_step_5",
        ] {
            check(&run, output_dir, mistyped, &near);
        }
        check(
            &run,
            output_dir,
            "nowhere/epoch_0_global_step_5",
            &["it does not exist. No folder near it has checkpoints"],
        );
        let newest = "it is not a checkpoint. The newest one in it is own/checkpoints/epoch_0_global_step_10";
        check(&run, output_dir, "own", &[newest]);
    }
}

#[test]
fn a_checkpoint_that_the_run_does_not_continue_is_an_error() {
    let run = two_runs();
    let newer = [
        "this run has a newer checkpoint, own/checkpoints/epoch_0_global_step_10, which does not continue it",
        "To continue from the newest one, remove `resume_from_checkpoint`",
    ];
    for named in ["own/checkpoints/epoch_0_global_step_5", "other/checkpoints/epoch_0_global_step_5"] {
        check(&run, "own", named, &newer);
    }
    // Its own newest checkpoint, and a run that started from another one, continue.
    run.train_ok(&[
        "output_dir=own",
        "train_iters=12",
        "resume_from_checkpoint=own/checkpoints/epoch_0_global_step_10",
    ]);
    for iterations in ["train_iters=10", "train_iters=12"] {
        run.train_ok(&["output_dir=new", "resume_from_checkpoint=other/checkpoints/epoch_0_global_step_5", iterations]);
    }
}

#[test]
fn an_old_checkpoint_without_the_start_of_its_run_continues_with_a_warning() {
    let run = two_runs();
    let newest = run.path().join("own/checkpoints/epoch_0_global_step_10");
    let rewrite = |name: &str, from: &str, to: &str| {
        let text = fs::read_to_string(newest.join(name)).unwrap();
        assert!(text.contains(from), "no {from} in:\n{text}");
        let changed = text.replace(from, to);
        fs::write(newest.join(name), &changed).unwrap();
        [text, changed].map(|text| blake3::hash(text.as_bytes()).to_string())
    };
    // A key of the same length keeps the size.
    let [old_hash, new_hash] = rewrite("state.json", "\"started_from\": null", "\"an_other_key\": null");
    rewrite("manifest.json", &old_hash, &new_hash);
    let output = run.train(&[
        "output_dir=own",
        "train_iters=12",
        "resume_from_checkpoint=own/checkpoints/epoch_0_global_step_5",
    ]);
    let log = stderr(&output);
    assert!(output.status.success(), "{log}");
    assert!(log.contains("nothing shows that it continues own/checkpoints/epoch_0_global_step_5"), "{log}");
    assert!(log.contains("resumed after step 10"), "{log}");
}
