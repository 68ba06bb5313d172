//! Which saves are deleted, and what is found out before the first step.

use super::*;

#[test]
fn keep_deletes_the_oldest_and_never_another_runs_later_steps() {
    let dir = tempfile::tempdir().unwrap();
    let all = plan(&dir, None);
    [50, 1, 2].iter().for_each(|&step| _ = save_step(&Drive, &all, step).unwrap());
    let two = plan(&dir, Some(2));
    let saved = save_step(&Drive, &two, 3).unwrap();
    assert_eq!(saved.removed, [two.dir(Tag { step: 1, epoch: 0 })]);
    save_step(&Drive, &two, 4).unwrap();
    let want = ["epoch_0_global_step_3", "epoch_0_global_step_4", "epoch_0_global_step_50"];
    assert_eq!(names(&two.output_dir), want);
}

#[test]
fn weights_only_folders_are_pruned_by_the_same_rule() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["global_step_1", "global_step_20", "global_step_3", "notes"] {
        fs::create_dir(dir.path().join(name)).unwrap();
    }
    let removed = prune(Kind::HuggingFace, dir.path(), Tag { step: 20, epoch: 0 }, 1, &Scores::default()).unwrap();
    assert_eq!(removed.len(), 2);
    assert_eq!(names(dir.path()), ["global_step_20", "notes"]);
}

#[test]
fn the_best_save_stays_until_there_is_a_better_one() {
    let dir = tempfile::tempdir().unwrap();
    let mut scores = Scores::of("acc".to_owned(), true);
    let mut found = Vec::new();
    for (step, value) in [(1, 0.2), (2, 0.5), (3, 0.4), (4, 0.1), (5, 0.6), (6, f64::NAN), (7, 0.3)] {
        // The fifth step is evaluated and never saved.
        scores.add(step, value);
        if step != 5 {
            fs::create_dir(dir.path().join(format!("global_step_{step}"))).unwrap();
            prune(Kind::HuggingFace, dir.path(), Tag { step, epoch: 0 }, 1, &scores).unwrap();
            found.push(names(dir.path()).join(" ").replace("global_step_", ""));
        }
    }
    assert_eq!(found, ["1", "2", "2 3", "2 4", "2 6", "2 7"]);
}

#[test]
fn the_best_save_takes_room_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let (free, plan) = (free_bytes(dir.path()).unwrap(), plan(&dir, Some(1)));
    let planned = |spares_best| [PlannedSaves { plan: &plan, bytes_per_save: free / 5 * 2, n_saves: 5, spares_best }];
    preflight(&planned(false)).unwrap();
    assert!(matches!(preflight(&planned(true)).unwrap_err(), CheckpointError::NotEnoughSpace { .. }));
}

#[track_caller]
fn check_preflight(plan: &CheckpointPlan, bytes_per_save: u64, n_saves: usize) -> Result<(), CheckpointError> {
    preflight(&[PlannedSaves { plan, bytes_per_save, n_saves, spares_best: false }])
}

#[test]
fn preflight_leaves_an_empty_folder_behind() {
    let dir = tempfile::tempdir().unwrap();
    let plan = plan(&dir, None);
    check_preflight(&plan, 1000, 0).unwrap();
    assert!(!plan.output_dir.exists());
    fs::create_dir_all(plan.output_dir.join(".epoch_0_global_step_7.tmp")).unwrap();
    check_preflight(&plan, 1000, 3).unwrap();
    assert!(names(&plan.output_dir).is_empty());
}

#[test]
fn preflight_knows_what_will_not_fit() {
    let dir = tempfile::tempdir().unwrap();
    let free = free_bytes(dir.path()).unwrap();
    let all = plan(&dir, None);
    let error = check_preflight(&all, free / 2, 5).unwrap_err();
    assert!(matches!(error, CheckpointError::NotEnoughSpace { .. }), "{error}");
    // Of the same five saves at most two are there at once, and those fit.
    check_preflight(&plan(&dir, Some(1)), free / 4, 5).unwrap();
    // Two entries on one disk add up.
    let two = [PlannedSaves { plan: &all, bytes_per_save: free / 3 * 2, n_saves: 1, spares_best: false }; 2];
    assert!(matches!(preflight(&two).unwrap_err(), CheckpointError::NotEnoughSpace { .. }));
}

#[test]
fn preflight_names_a_folder_that_cannot_be() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("saves"), "a file").unwrap();
    let plan = plan(&dir, None);
    let error = check_preflight(&plan, 1000, 1).unwrap_err().to_string();
    assert_eq!(error, format!("create the folder {}", plan.output_dir.display()));
}
