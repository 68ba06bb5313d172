//! Retention of checkpoints, and the checks before the first step.

use super::*;

#[test]
fn save_total_limit_deletes_the_oldest_and_no_later_steps_of_other_runs() {
    let dir = tempfile::tempdir().unwrap();
    let all = plan(&dir, None);
    [50, 1, 2].iter().for_each(|&step| _ = save_step(&LocalDisk, &all, step).unwrap());
    let two = plan(&dir, Some(2));
    let saved = save_step(&LocalDisk, &two, 3).unwrap();
    assert_eq!(saved.removed, [two.dir(Tag { step: 1, epoch: 0 })]);
    save_step(&LocalDisk, &two, 4).unwrap();
    let want = ["epoch_0_global_step_3", "epoch_0_global_step_4", "epoch_0_global_step_50"];
    assert_eq!(names(&two.output_dir), want);
}

#[test]
fn exports_are_pruned_by_the_same_rule() {
    let dir = tempfile::tempdir().unwrap();
    for (name, run_start) in [("global_step_1", 1), ("global_step_20", 1), ("global_step_3", 1), ("global_step_5", 2)] {
        export(dir.path(), name, run_start);
    }
    for name in ["global_step_2", "notes"] {
        fs::create_dir(dir.path().join(name)).unwrap();
        fs::write(dir.path().join(name).join("thesis.txt"), "years").unwrap();
    }
    let removed = retention(1, &exports(dir.path()), &Scores::default()).prune(Tag { step: 20, epoch: 0 }).unwrap();
    assert_eq!(removed.len(), 2);
    assert_eq!(names(dir.path()), ["global_step_2", "global_step_20", "global_step_5", "notes"]);
    assert!(dir.path().join("global_step_2/thesis.txt").exists());
}

/// Creates a folder as the export of a run.
fn export(output_dir: &Path, name: &str, run_start: u64) {
    fs::create_dir(output_dir.join(name)).unwrap();
    fs::write(output_dir.join(name).join(EXPORT_MARK), ExportMark { run_start, step: 0 }.to_json()).unwrap();
}

/// Returns the entry of exports into a folder.
fn exports(output_dir: &Path) -> CheckpointPlan {
    let plan = plan(&tempfile::tempdir().unwrap(), Some(1));
    CheckpointPlan { format: CheckpointFormat::HuggingFace, output_dir: output_dir.to_owned(), ..plan }
}

fn retention<'a>(run_start: u64, plan: &'a CheckpointPlan, scores: &'a Scores) -> Retention<'a> {
    Retention { plan, run_start, save_total_limit: 1, scores }
}

#[test]
fn retained_and_best_checkpoints_stay_next_to_the_newest() {
    let dir = tempfile::tempdir().unwrap();
    let mut scores = Scores::of("loss".to_owned(), false);
    scores.add(3, 0.1);
    let plan = CheckpointPlan { save_retain_interval: Some(4), ..exports(dir.path()) };
    let mut found = Vec::new();
    for step in 1..=9 {
        export(dir.path(), &format!("global_step_{step}"), 1);
        let retention = Retention { save_total_limit: 2, ..retention(1, &plan, &scores) };
        retention.prune(Tag { step, epoch: 0 }).unwrap();
        found.push(names(dir.path()).join(" ").replace("global_step_", ""));
    }
    assert_eq!(found, ["1", "1 2", "2 3", "3 4", "3 4 5", "3 4 5 6", "3 4 6 7", "3 4 7 8", "3 4 8 9"]);
}

/// A run exported step 110, and resumed from a sharded checkpoint of step 100.
#[test]
fn the_link_stays_at_a_later_export_of_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let latest = |want: &str| assert_eq!(fs::read_link(dir.path().join("latest")).unwrap(), Path::new(want));
    let plan = CheckpointPlan { save_total_limit: None, ..exports(dir.path()) };
    for step in [50, 110] {
        export(dir.path(), &format!("global_step_{step}"), 1);
        plan.finish_save(&LocalDisk, Tag { step, epoch: 0 }, &run(step)).unwrap();
    }
    let finished = plan.finish_newest_save(&run(100)).unwrap().unwrap();
    assert_eq!(finished.tag.step, 50);
    latest("global_step_110");
    // The later one is another run's.
    export(dir.path(), "global_step_120", 2);
    plan.finish_newest_save(&run(115)).unwrap().unwrap();
    latest("global_step_110");
    fs::remove_dir_all(dir.path().join("global_step_110")).unwrap();
    plan.finish_newest_save(&run(115)).unwrap().unwrap();
    latest("global_step_50");
}

#[test]
fn retained_checkpoints_need_extra_space() {
    let dir = tempfile::tempdir().unwrap();
    let (free, plan) = (free_bytes(dir.path()).unwrap(), plan(&dir, Some(1)));
    let plan = CheckpointPlan { save_retain_interval: Some(2), ..plan };
    let planned = |n_retained| {
        let plan = &plan;
        let bytes_per_checkpoint = free / 5 * 2;
        [PlannedCheckpoints {
            plan,
            bytes_per_checkpoint,
            n_checkpoints: 5,
            n_retained,
            run_start: 1,
            keeps_best: false,
        }]
    };
    preflight(&planned(0)).unwrap();
    assert!(matches!(preflight(&planned(2)).unwrap_err(), CheckpointError::NotEnoughSpace { .. }));
}

#[test]
fn checkpoints_of_other_runs_are_moved_and_other_folders_stay() {
    let dir = tempfile::tempdir().unwrap();
    let (root, format) = (dir.path(), CheckpointFormat::HuggingFace);
    for (name, run_start) in [("global_step_1", 7), ("global_step_6", 7), ("global_step_4", 8)] {
        export(root, name, run_start);
    }
    fs::create_dir(root.join("global_step_9")).unwrap();
    fs::write(root.join("global_step_9/thesis.txt"), "years").unwrap();
    assert_eq!(move_aside(format, root, 8, 0).unwrap(), Some((root.join("run.1"), 2)));
    assert_eq!(names(root), ["global_step_4", "global_step_9", "run.1"]);
    assert_eq!(names(&root.join("run.1")), ["global_step_1", "global_step_6"]);
    assert_eq!(move_aside(format, root, 8, 0).unwrap(), None);
    assert_eq!(move_aside(format, root, 9, 0).unwrap(), Some((root.join("run.2"), 1)));
}

#[test]
fn an_occupied_checkpoint_name_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let (root, format) = (dir.path(), CheckpointFormat::HuggingFace);
    export(root, "global_step_1", 1);
    fs::create_dir(root.join("global_step_2")).unwrap();
    fs::create_dir(root.join("global_step_3")).unwrap();
    fs::write(root.join("global_step_3/thesis.txt"), "years").unwrap();
    fs::write(root.join("global_step_4"), "a file").unwrap();
    std::os::unix::fs::symlink(root.join("global_step_1"), root.join("global_step_5")).unwrap();
    let error_of = |step| refuse_occupied(format, root, 1, |due| due == step).map_err(|error| error.to_string());
    assert_eq!((error_of(1), error_of(2), error_of(6)), (Ok(()), Ok(()), Ok(())));
    for (step, what) in [(3, "a folder that this run did not write"), (4, "a file"), (5, "a link")] {
        let error = error_of(step).unwrap_err();
        assert!(error.contains(&format!("global_step_{step}: it is {what}")), "{error}");
    }
}

/// Regression test: the failed save left a file that made every later start fail.
#[test]
fn a_file_named_like_a_checkpoint_is_reported_and_kept() {
    let dir = tempfile::tempdir().unwrap();
    let plan = plan(&dir, None);
    save_step(&LocalDisk, &plan, 1).unwrap();
    let stray = plan.dir(Tag { step: 2, epoch: 0 });
    fs::write(&stray, "x").unwrap();
    let error = save_step(&LocalDisk, &plan, 2).unwrap_err();
    assert!(matches!(error.downcast_ref(), Some(CheckpointError::Occupied { .. })), "{error}");
    assert_eq!(resumed_step(&plan), 1);
    assert_eq!(fs::read_to_string(stray).unwrap(), "x");
}

#[test]
fn an_occupied_temporary_name_is_reported_before_the_first_step_and_kept() {
    for name in [".epoch_0_global_step_9.tmp", ".epoch_0_global_step_1.old", ".global_step_3.tmp"] {
        for file in [name.to_owned(), format!("{name}/thesis.txt")] {
            let dir = tempfile::tempdir().unwrap();
            let plan = plan(&dir, None);
            save_step(&LocalDisk, &plan, 1).unwrap();
            let path = plan.output_dir.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, "mine").unwrap();
            for error in [check_preflight(&plan, 1000, 3), remove_unfinished_checkpoints(&plan.output_dir).map(drop)] {
                let error = error.unwrap_err();
                let cause = std::error::Error::source(&error).unwrap().to_string();
                assert!(error.to_string().contains(name) && cause.contains("move it away"), "{error}: {cause}");
            }
            assert!(save_step(&LocalDisk, &plan, 9).is_err() || !name.contains("step_9"));
            assert_eq!(fs::read_to_string(&path).unwrap(), "mine");
        }
    }
}

#[test]
fn the_best_checkpoint_is_kept_until_there_is_a_better_one() {
    let dir = tempfile::tempdir().unwrap();
    let mut scores = Scores::of("acc".to_owned(), true);
    let plan = exports(dir.path());
    let mut found = Vec::new();
    for (step, value) in [(1, 0.2), (2, 0.5), (3, 0.4), (4, 0.1), (5, 0.6), (6, f64::NAN), (7, 0.3)] {
        // Step 5 is evaluated and never saved.
        scores.add(step, value);
        if step != 5 {
            export(dir.path(), &format!("global_step_{step}"), 1);
            retention(1, &plan, &scores).prune(Tag { step, epoch: 0 }).unwrap();
            found.push(names(dir.path()).join(" ").replace("global_step_", ""));
        }
    }
    assert_eq!(found, ["1", "2", "2 3", "2 4", "2 6", "2 7"]);
}

#[test]
fn the_best_checkpoint_needs_extra_space() {
    let dir = tempfile::tempdir().unwrap();
    let (free, plan) = (free_bytes(dir.path()).unwrap(), plan(&dir, Some(1)));
    let planned = |keeps_best| {
        [PlannedCheckpoints {
            plan: &plan,
            bytes_per_checkpoint: free / 5 * 2,
            n_checkpoints: 5,
            n_retained: 0,
            run_start: 1,
            keeps_best,
        }]
    };
    preflight(&planned(false)).unwrap();
    assert!(matches!(preflight(&planned(true)).unwrap_err(), CheckpointError::NotEnoughSpace { .. }));
}

#[track_caller]
fn check_preflight(
    plan: &CheckpointPlan,
    bytes_per_checkpoint: u64,
    n_checkpoints: usize,
) -> Result<(), CheckpointError> {
    let (n_retained, run_start, keeps_best) = (0, 1, false);
    preflight(&[PlannedCheckpoints { plan, bytes_per_checkpoint, n_checkpoints, n_retained, run_start, keeps_best }])
}

#[test]
fn preflight_leaves_an_empty_folder() {
    let dir = tempfile::tempdir().unwrap();
    let plan = plan(&dir, None);
    check_preflight(&plan, 1000, 0).unwrap();
    assert!(!plan.output_dir.exists());
    fs::create_dir_all(plan.output_dir.join(".epoch_0_global_step_7.tmp")).unwrap();
    check_preflight(&plan, 1000, 3).unwrap();
    assert!(names(&plan.output_dir).is_empty());
}

#[test]
fn preflight_fails_if_the_checkpoints_do_not_fit() {
    let dir = tempfile::tempdir().unwrap();
    let free = free_bytes(dir.path()).unwrap();
    let all = plan(&dir, None);
    let error = check_preflight(&all, free / 2, 5).unwrap_err();
    assert!(matches!(error, CheckpointError::NotEnoughSpace { .. }), "{error}");
    // Of the same five checkpoints at most two exist at once, and two fit.
    check_preflight(&plan(&dir, Some(1)), free / 4, 5).unwrap();
    // Two entries on one disk add up.
    let two = [PlannedCheckpoints {
        plan: &all,
        bytes_per_checkpoint: free / 3 * 2,
        n_checkpoints: 1,
        n_retained: 0,
        run_start: 1,
        keeps_best: false,
    }; 2];
    assert!(matches!(preflight(&two).unwrap_err(), CheckpointError::NotEnoughSpace { .. }));
}

#[test]
fn one_model_that_does_not_fit_is_refused_even_if_its_folder_is_missing() {
    let dir = tempfile::tempdir().unwrap();
    let (folder, free) = (dir.path().join("a/b"), free_bytes(dir.path()).unwrap());
    require_space(&folder, free / 2).unwrap();
    let error = require_space(&folder, free.saturating_mul(2)).unwrap_err();
    assert!(matches!(error, CheckpointError::NoSpaceForModel { .. }), "{error}");
    assert!(!folder.exists());
}

#[test]
fn preflight_names_a_folder_that_cannot_be_created() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("saves"), "a file").unwrap();
    let plan = plan(&dir, None);
    let error = check_preflight(&plan, 1000, 1).unwrap_err().to_string();
    assert_eq!(error, format!("create the folder {}", plan.output_dir.display()));
}
