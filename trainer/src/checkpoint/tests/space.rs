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
    let removed = prune(Kind::HuggingFace, dir.path(), Tag { step: 20, epoch: 0 }, 1).unwrap();
    assert_eq!(removed.len(), 2);
    assert_eq!(names(dir.path()), ["global_step_20", "notes"]);
}

#[track_caller]
fn check_preflight(plan: &CheckpointPlan, bytes_per_save: u64, n_saves: usize) -> Result<(), CheckpointError> {
    preflight(&[PlannedSaves { plan, bytes_per_save, n_saves }])
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
    let two = [PlannedSaves { plan: &all, bytes_per_save: free / 3 * 2, n_saves: 1 }; 2];
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
