//! Files of a run for the tests of `trainer watch` and `trainer report`, in the formats that a run writes.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use trainer::metrics::{EvalRecord, ExpertLoad, LayerLoad, Memory, StepRecord};

/// Folder of a run that no process trains.
pub(crate) struct RunFolder {
    parent: tempfile::TempDir,
    name: String,
}

impl RunFolder {
    pub(crate) fn new(name: &str) -> Self {
        let folder = Self { parent: tempfile::tempdir().unwrap(), name: name.to_owned() };
        fs::create_dir(folder.path()).unwrap();
        folder
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.parent.path().join(&self.name)
    }

    pub(crate) fn write(&self, name: &str, text: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path().join(name);
        fs::write(&path, text).unwrap();
        path
    }

    /// Appends records to the metrics file.
    pub(crate) fn log(&self, records: &[Value]) {
        let path = self.path().join("metrics.jsonl");
        let lines: String = records.iter().map(|record| format!("{record}\n")).collect();
        let old = fs::read_to_string(&path).unwrap_or_default();
        fs::write(&path, old + &lines).unwrap();
    }

    /// Writes a run.json that ended as `exit` says.
    pub(crate) fn save(&self, exit: Value) {
        let setting = |key: &str, value: Value| json!({"key": key, "value": value, "origin": "line 3"});
        let report = json!({
            "format": 1, "run_id": 1, "started_at": "2026-11-01T10:00:00Z", "updated_at": "2026-11-01T11:00:00Z",
            "elapsed_s": 3600.0, "exit": exit, "resumed_from": null,
            "run": {"run_id": 1, "name": self.name, "parameters": 134_515_008, "trained_parameters": 134_515_008,
                "mesh": {"dp_shard": 2, "tp": 1, "world_size": 2}, "global_batch_size": 8, "global_batch_tokens": 4096,
                "total_steps": 400, "device": "cpu"},
            "plan": {"recipe": "r.yaml", "settings": [setting("seed", json!(7)), setting("name", json!(self.name))],
                "written": []},
            "versions": {"candlewick": "0.1.0", "commit": null},
            "host": {"name": "host", "system": "linux x86_64", "cpu": "Xeon", "n_cpus": 2, "memory_bytes": 80e9},
            "notes": ["a note of the run"], "ledger": {}, "skipped_steps": 0, "metrics": null,
        });
        self.write("run.json", report.to_string());
    }
}

/// Returns the exit of a run that succeeded.
pub(crate) fn finished() -> Value {
    json!({"code": 0, "reason": "all steps are done"})
}

/// Returns the record of a step with a falling loss.
pub(crate) fn step(iter: usize) -> Value {
    let record = StepRecord {
        iter,
        lr: 1e-3,
        loss: 4.0 / (1.0 + iter as f64 / 50.0),
        grad_norm: 1.5,
        step_time: 0.5,
        tokens: 1000,
        n_targets: 900,
        tokens_per_second: 2000.0,
        mfu: Some(0.41),
        memory: Some(Memory {
            rss_bytes: 2_100_000_000,
            peak_rss_bytes: 2_400_000_000,
            node_used_bytes: 10_000_000_000,
            node_total_bytes: 80_000_000_000,
        }),
        ..StepRecord::default()
    };
    json!(record)
}

/// Returns the record of a step of a model with experts.
pub(crate) fn step_of_experts(iter: usize) -> Value {
    let losses = [("z_loss".to_owned(), 0.125)].into();
    let logits = LayerLoad { logit_mean: -0.5, logit_std: 1.75, losses, ..LayerLoad::default() };
    let layer = LayerLoad { layer: 3, max_over_mean: 2.5, entropy: 0.9, ..logits };
    let load = ExpertLoad { max_over_mean: 2.5, entropy: 0.9, unused: 0.125, dropped: 0.0, layers: vec![layer] };
    let mut record = step(iter);
    record["expert_load"] = json!(load);
    record["auxiliary_losses"] = json!({"load_balancing_loss": 1.25});
    record
}

pub(crate) fn eval(iter: usize, loss: f64) -> Value {
    json!(EvalRecord { iter, loss, ..EvalRecord::default() })
}

/// Returns a page without its script and its data.
pub(crate) fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap()
}
