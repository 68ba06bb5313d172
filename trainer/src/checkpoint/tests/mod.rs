//! Saving and resuming a toy engine: round trips, rejected checkpoints, failures.

mod corruption;
mod disk_space;
mod faults;
mod ranks;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Mutex;

use candlewick_comm::{Options, RankFailure, threads};
use candlewick_runtime::process_group::ProcessGroup;
use serde_json::json;
use tempfile::TempDir;

use super::save::save_with;
use super::storage::{LocalDisk, Storage};
use super::*;

/// An engine with four tensors: a matrix, a vector, a scalar and an empty one.
#[derive(Clone, Debug, PartialEq)]
struct Toy(BTreeMap<String, (Vec<usize>, Vec<u32>)>);

impl Toy {
    /// Returns values that differ from step to step; some are NaNs with a payload.
    fn at(step: usize) -> Self {
        let shapes: [(&str, &[usize]); 4] =
            [("master/a", &[3, 5]), ("master/b", &[7]), ("optimizer.exp_avg/a", &[]), ("optimizer.exp_avg/e", &[0, 4])];
        let values = |n: usize| (0..n).map(|i| 0x7fc0_0000 + (100 * step + i) as u32).collect();
        Self(
            shapes
                .iter()
                .map(|(name, shape)| (name.to_string(), (shape.to_vec(), values(shape.iter().product()))))
                .collect(),
        )
    }
}

impl TrainState for Toy {
    fn tensors(&self) -> Vec<TensorMeta> {
        let metas = self.0.iter();
        metas.map(|(name, (shape, _))| TensorMeta { name: name.clone(), shape: shape.clone() }).collect()
    }

    fn read(&self, name: &str, start: usize, n_values: usize, take: &mut dyn FnMut(&[f32])) -> Result<(), StateError> {
        let from = &self.0.get(name).ok_or("no such tensor")?.1[start..][..n_values];
        take(&from.iter().map(|&bits| f32::from_bits(bits)).collect::<Vec<_>>());
        Ok(())
    }

    fn load(&mut self, name: &str, start: usize, values: Vec<f32>) -> Result<(), StateError> {
        let to = &mut self.0.get_mut(name).ok_or("no such tensor")?.1[start..][..values.len()];
        to.iter_mut().zip(values).for_each(|(bits, value)| *bits = value.to_bits());
        Ok(())
    }
}

fn plan(dir: &TempDir, save_total_limit: Option<usize>) -> CheckpointPlan {
    CheckpointPlan {
        format: CheckpointFormat::Sharded,
        output_dir: dir.path().join("saves"),
        auto_resume: true,
        async_save: false,
        dtype: None,
        save_every_n_steps: 1,
        save_every_n_epochs: 0,
        save_fraction: None,
        save_end_of_training: false,
        save_total_limit,
        save_retain_interval: None,
    }
}

fn fingerprint() -> Fingerprint {
    Fingerprint::of(&json!({"model": {"hidden": 8}, "seed": 42}))
}

fn run(step: usize) -> RunState {
    RunState {
        step,
        epoch: 0,
        accumulation_phase: 0,
        cursor: json!({"row": 10 * step}),
        rng: json!([1, u64::MAX]),
        tokens: 100,
        target_tokens: 50,
        elapsed_s: 1.5,
        scores: Scores::default(),
        evaluated: None,
        early_stopping: EarlyStoppingState::default(),
        loss_history: LossHistory::default(),
        token_stats: json!({"read": 3}),
        fingerprint: fingerprint(),
        run_start: 1,
        date: None,
        home: None,
        output_dir: None,
        n_skipped: 0,
        scaler: None,
        settings: Fingerprint::default(),
        slower_modules: None,
        started_from: RunOrigin::Beginning,
    }
}

/// The toy's tensors need two shards of this size.
const SHARD: usize = 64;

fn save_step(storage: &dyn Storage, plan: &CheckpointPlan, step: usize) -> anyhow::Result<WrittenCheckpoint> {
    save_with(storage, SHARD, plan, &run(step), &Toy::at(step), &ProcessGroup::solo())
}

/// Resumes a fresh engine, compares every value with that step's, and returns the step.
#[track_caller]
fn resumed_step(plan: &CheckpointPlan) -> usize {
    let mut toy = Toy::at(0);
    let resumed = resume(plan, &fingerprint(), &mut toy, &ProcessGroup::solo()).unwrap().expect("a checkpoint");
    assert_eq!(resumed.run, run(resumed.run.step));
    assert_eq!(toy, Toy::at(resumed.run.step));
    resumed.run.step
}

/// Returns the names in a folder, without the link `latest`.
fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.retain(|name| name != "latest");
    names.sort();
    names
}

#[test]
fn a_checkpoint_round_trips_bit_exactly_and_is_safetensors() {
    let dir = tempfile::tempdir().unwrap();
    let plan = plan(&dir, None);
    assert_eq!(resume(&plan, &fingerprint(), &mut Toy::at(0), &ProcessGroup::solo()).unwrap(), None);
    let saved = save_step(&LocalDisk, &plan, 3).unwrap();
    assert_eq!(resumed_step(&plan), 3);
    assert_eq!(
        names(&saved.dir),
        ["manifest.json", "shard_00000_00001.safetensors", "shard_00000_00002.safetensors", "state.json"]
    );
    let sizes = names(&saved.dir).iter().map(|name| fs::metadata(saved.dir.join(name)).unwrap().len()).sum();
    assert_eq!(saved.n_bytes, sizes);
    assert!(bytes_needed(&Toy::at(3).tensors()) >= sizes);

    let bytes = fs::read(saved.dir.join("shard_00000_00001.safetensors")).unwrap();
    let shard = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let tensor = shard.tensor("master/a").unwrap();
    let want: Vec<u8> = Toy::at(3).0["master/a"].1.iter().flat_map(|bits| bits.to_le_bytes()).collect();
    assert_eq!((tensor.shape(), tensor.data()), (&[3, 5][..], &want[..]));
}

#[test]
fn scores_round_trip_bit_exactly() {
    let dir = tempfile::tempdir().unwrap();
    let plan = plan(&dir, None);
    let mut scores = Scores::of("acc".to_owned(), true);
    [(1, 0.1), (2, f64::NAN), (3, 1.0 / 3.0)].into_iter().for_each(|(step, value)| scores.add(step, value));
    let state = RunState { scores: scores.clone(), evaluated: Some(3), ..run(3) };
    save(&plan, &state, &Toy::at(1), &ProcessGroup::solo()).unwrap();
    let resumed = resume(&plan, &fingerprint(), &mut Toy::at(0), &ProcessGroup::solo()).unwrap().unwrap();
    assert_eq!((resumed.run.scores, resumed.run.evaluated), (scores, Some(3)));
}

#[test]
fn a_tensor_larger_than_a_block_round_trips() {
    let dir = tempfile::tempdir().unwrap();
    let plan = plan(&dir, None);
    let n = (1 << 20) + 3;
    let big = Toy([("big".to_owned(), (vec![n], (0..n as u32).collect()))].into());
    save(&plan, &run(1), &big, &ProcessGroup::solo()).unwrap();
    let mut read = Toy([("big".to_owned(), (vec![n], vec![0; n]))].into());
    resume(&plan, &fingerprint(), &mut read, &ProcessGroup::solo()).unwrap();
    assert!(read == big);
}

#[test]
fn the_newest_complete_checkpoint_has_the_most_steps() {
    let dir = tempfile::tempdir().unwrap();
    let plan = plan(&dir, None);
    assert_eq!(newest_complete(&plan.output_dir).unwrap(), None);
    [2, 10, 9].iter().for_each(|&step| _ = save_step(&LocalDisk, &plan, step).unwrap());
    fs::create_dir(plan.output_dir.join("epoch_0_global_step_99")).unwrap();
    fs::create_dir(plan.output_dir.join(".epoch_0_global_step_100.tmp")).unwrap();
    let newest = newest_complete(&plan.output_dir).unwrap().unwrap();
    assert_eq!(newest.manifest.tag(), Tag { step: 10, epoch: 0 });
    assert_eq!(search(&plan.output_dir).unwrap().skipped.len(), 1);
}

#[track_caller]
fn check_refused(now: &Fingerprint, mut toy: Toy, want: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    let plan = plan(&dir, None);
    save_step(&LocalDisk, &plan, 1).unwrap();
    let before = toy.clone();
    match resume(&plan, now, &mut toy, &ProcessGroup::solo()).unwrap_err().downcast().unwrap() {
        CheckpointError::Different { differences, .. } => assert_eq!(differences, want),
        other => panic!("{other}"),
    }
    assert_eq!(toy, before);
}

#[test]
fn differences_of_plan_and_model_are_named_and_nothing_is_loaded() {
    let now = Fingerprint::of(&json!({"model": {"hidden": 8}, "seed": 43}));
    check_refused(&now, Toy::at(0), &["seed: 42 in the checkpoint, 43 now"]);

    let mut toy = Toy::at(0);
    toy.0.insert("master/a".to_owned(), (vec![5, 3], vec![0; 15]));
    let b = toy.0.remove("master/b").unwrap();
    toy.0.insert("master/c".to_owned(), b);
    let want = [
        "tensor master/b: in the checkpoint, not in the model",
        "tensor master/a: [3, 5] in the checkpoint, [5, 3] now",
        "tensor master/c: in the model, not in the checkpoint",
    ];
    check_refused(&fingerprint(), toy, &want);
}

/// Rank 0 fails after its folder is created, and rank 1 does not find the folder.
#[test]
fn after_a_failure_of_rank_0_another_rank_reports_that_failure() {
    let dir = tempfile::tempdir().unwrap();
    let reported = Mutex::new(None);
    let ended = threads::run(2, Options::default(), |world| {
        let process = ProcessGroup::new(world)?;
        if process.is_first() {
            process.exchange(Ok(Vec::new()))?;
            world.fail("wait for rank 1");
        } else {
            *reported.lock().unwrap() = save(&plan(&dir, None), &run(1), &Toy::at(1), &process).err();
        }
        anyhow::Ok(())
    });
    assert!(ended.is_err());
    let error = reported.lock().unwrap().take().expect("an error of rank 1");
    assert!(RankFailure::find_in(&*error).is_some(), "{error:#}");
    assert!(format!("{error:#}").contains("wait for rank 1"), "{error:#}");
}

#[test]
fn a_failed_engine_read_removes_the_unfinished_checkpoint() {
    struct Broken;
    impl TrainState for Broken {
        fn tensors(&self) -> Vec<TensorMeta> {
            Toy::at(0).tensors()
        }
        fn read(&self, _: &str, _: usize, _: usize, _: &mut dyn FnMut(&[f32])) -> Result<(), StateError> {
            Err("device lost".into())
        }
        fn load(&mut self, _: &str, _: usize, _: Vec<f32>) -> Result<(), StateError> {
            Err("device lost".into())
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let plan = plan(&dir, None);
    let error = save(&plan, &run(1), &Broken, &ProcessGroup::solo()).unwrap_err();
    assert_eq!(error.to_string(), "read the tensor master/a");
    assert!(names(&plan.output_dir).is_empty());
    save_step(&LocalDisk, &plan, 1).unwrap();
    assert!(resume(&plan, &fingerprint(), &mut Broken, &ProcessGroup::solo()).is_err());
}
