//! Experts that a run records are replayed by runs on other meshes.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::run::TrainerRun;
use super::{ALL, EXPERTS, same_curve};

/// Meshes of two ranks.
const MESHES: [&[&str]; 5] = [
    &[],
    &["expert_parallel_size=2"],
    &["context_parallel_size=2", ALL],
    &["tensor_parallel_size=2", "sequence_parallel=true", "expert_parallel_size=2", ALL],
    &["pipeline_parallel_size=2", ALL],
];

/// Weights other than the recorded run's, which select other experts.
const OTHER_WEIGHTS: &str = "seed=8";

/// Keys of the routers of a run that records or replays experts.
fn routers(key: &str, dir: &Path) -> String {
    format!("moe={{aux_loss_coeff: 0.01, z_loss_coeff: 1e-3, routing_replay: {{{key}: {}}}}}", dir.display())
}

/// Returns the numbers of selections of each step.
fn loads(run: &TrainerRun) -> Vec<Value> {
    let of_layer = |layer: &Value| {
        Value::from(["max_over_mean", "entropy", "unused"].map(|key| layer[key].as_f64().unwrap()).to_vec())
    };
    let of_step = |record: Value| Some(record["expert_load"]["layers"].as_array()?.iter().map(of_layer).collect());
    run.records().into_iter().filter_map(of_step).collect()
}

struct Runs {
    folder: tempfile::TempDir,
}

impl Runs {
    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn finish(&self, name: &str, n_ranks: usize, arguments: &[&str]) -> TrainerRun {
        let run = TrainerRun::new(&self.path(name), n_ranks, &[&EXPERTS[..], arguments].concat());
        run.finish();
        assert_eq!(loads(&run).len(), 5, "{name}");
        run
    }
}

#[test]
fn experts_of_one_rank_are_replayed_on_meshes_and_the_reverse() {
    let runs = Runs { folder: tempfile::tempdir().unwrap() };
    let dir = runs.path("experts");
    let recorded = runs.finish("recorded", 1, &[&routers("record", &dir)]);
    let replay = routers("replay", &dir);
    let one_rank = runs.finish("one", 1, &[&replay, OTHER_WEIGHTS]);
    assert_eq!(loads(&one_rank), loads(&recorded));
    let selected = runs.finish("selected", 1, &[OTHER_WEIGHTS]);
    assert_ne!(loads(&selected), loads(&recorded));
    for (i, mesh) in MESHES.iter().enumerate() {
        let replayed = runs.finish(&format!("replayed-{i}"), 2, &[&[replay.as_str(), OTHER_WEIGHTS], *mesh].concat());
        assert_eq!(loads(&replayed), loads(&recorded), "{mesh:?}");
        same_curve(&replayed.curve(), &one_rank.curve());

        let dir = runs.path(&format!("experts-{i}"));
        let record = routers("record", &dir);
        let of_mesh = runs.finish(&format!("recorded-{i}"), 2, &[&[record.as_str()], *mesh].concat());
        let back = runs.finish(&format!("back-{i}"), 1, &[&routers("replay", &dir)]);
        assert_eq!(loads(&back), loads(&of_mesh), "{mesh:?}");
        same_curve(&back.curve(), &of_mesh.curve());
    }
}

#[test]
fn a_record_is_resumed_on_another_mesh() {
    let runs = Runs { folder: tempfile::tempdir().unwrap() };
    let (dir, saves) = (runs.path("experts"), runs.path("saves"));
    let record = routers("record", &dir);
    let checkpoint =
        format!("checkpoint=[{{output_dir: {}, auto_resume: true, save_every_n_steps: 1}}]", saves.display());
    let part = |n_ranks, arguments: &[&str]| {
        let arguments = [&EXPERTS[..], &[record.as_str(), &checkpoint], arguments].concat();
        TrainerRun::new(&runs.path("parts"), n_ranks, &arguments)
    };
    part(2, &["exit_iteration=2", "expert_parallel_size=2"]).finish();
    part(1, &["exit_iteration=3"]).finish();
    let recorded = part(2, &["pipeline_parallel_size=2", ALL]);
    recorded.finish();
    let replay = routers("replay", &dir);
    let replayed = runs.finish("replayed", 2, &[&replay, "context_parallel_size=2", ALL]);
    assert_eq!(loads(&replayed), loads(&recorded));
}
