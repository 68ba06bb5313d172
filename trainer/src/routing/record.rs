//! Recording: each rank writes the experts of its tokens.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use candlewick_parallel::RoutedMicro;
use candlewick_text::files::write_durably;

use super::error::RoutingError;
use super::file::RoutingFile;
use super::folder::{MicroPosition, file_name, files, names, step_dir, steps};
use super::routed_model::RoutedModel;

/// The writer of a rank.
#[derive(Debug)]
pub(crate) struct RoutingRecorder {
    pub(crate) dir: PathBuf,
    pub(crate) model: RoutedModel,
    /// This rank among all ranks.
    pub(crate) rank: usize,
    /// Id of the run.
    pub(crate) run: u64,
}

impl RoutingRecorder {
    /// Prepares the folder of a run that has done `n_done` steps. Deletes the files of later steps, which the run wrote before it
    /// resumed or restarted. One rank calls this, before any rank writes.
    ///
    /// # Errors
    ///
    /// If the folder has a file of another run. Nothing is deleted then.
    pub(crate) fn prepare(&self, n_done: usize) -> Result<(), RoutingError> {
        let known = steps(&self.dir).map_err(RoutingError::write("read", &self.dir))?;
        known.iter().try_for_each(|step| self.check(&step_dir(&self.dir, *step), known.len()))?;
        known.into_iter().filter(|step| *step > n_done).try_for_each(|step| remove(&step_dir(&self.dir, step)))
    }

    /// Fails unless this run wrote the files of a step. The record has `n_steps` steps.
    fn check(&self, dir: &Path, n_steps: usize) -> Result<(), RoutingError> {
        for (_, path) in files(dir).map_err(RoutingError::write("read", dir))? {
            if RoutingFile::run_of(&path).map_err(RoutingError::write("read", &path))? != Some(self.run) {
                let problem = format!(
                    "another run wrote this file, in a record of {n_steps} steps; name another folder, or delete the record"
                );
                return Err(RoutingError::occupied(&path, problem));
            }
        }
        Ok(())
    }

    /// Writes the experts of a micro-batch with these token ids, and waits until they are on disk. Experts without tokens or
    /// layers are not written.
    pub(crate) fn write(&self, at: MicroPosition, experts: RoutedMicro, ids: &[u32]) -> Result<(), RoutingError> {
        if experts.tokens.is_empty() || experts.layers.is_empty() {
            return Ok(());
        }
        let file = RoutingFile {
            top_k: self.model.top_k,
            n_experts: self.model.n_experts,
            n_layers: self.model.layers.len(),
            n_tokens: ids.len(),
            run: Some(self.run),
            ids: experts.tokens.iter().map(|token| ids[*token as usize]).collect(),
            experts,
        };
        let dir = step_dir(&self.dir, at.step);
        let path = dir.join(file_name(at.micro_idx, Some(self.rank)));
        write_durably(&path, |out| out.write_all(&file.encode())).map_err(RoutingError::write("write", &path))
    }
}

/// Deletes the files of a step.
fn remove(dir: &Path) -> Result<(), RoutingError> {
    let written = files(dir).map_err(RoutingError::write("read", dir))?;
    let unfinished = names(dir).map_err(RoutingError::write("read", dir))?;
    let unfinished = unfinished.iter().filter(|name| name.starts_with(".micro-") && name.ends_with(".tmp"));
    for path in written.into_iter().map(|(_, path)| path).chain(unfinished.map(|name| dir.join(name))) {
        fs::remove_file(&path).map_err(RoutingError::write("delete", &path))?;
    }
    fs::remove_dir(dir).map_err(RoutingError::write("delete", dir))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn recorder(dir: &Path, run: u64) -> RoutingRecorder {
        let model = RoutedModel { top_k: 1, n_experts: 4, layers: vec![0] };
        RoutingRecorder { dir: dir.to_owned(), model, rank: 2, run }
    }

    fn write(recorder: &RoutingRecorder, step: usize) {
        let experts = RoutedMicro { tokens: vec![0, 1], layers: BTreeMap::from([(0, vec![3, 2])]) };
        recorder.write(MicroPosition { step, micro_idx: 1 }, experts, &[5, 6]).unwrap();
    }

    #[test]
    fn a_resumed_run_deletes_its_later_steps_only() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("record");
        let recorder = recorder(&dir, 7);
        recorder.prepare(0).unwrap();
        (1..=3).for_each(|step| write(&recorder, step));
        fs::write(step_dir(&dir, 3).join(".micro-0002.rank-001.tmp"), "half").unwrap();
        recorder.prepare(1).unwrap();
        assert_eq!(names(&dir).unwrap(), ["step-000001"]);
        assert_eq!(names(&step_dir(&dir, 1)).unwrap(), ["micro-0001.rank-002.safetensors"]);
    }

    #[test]
    fn a_restarted_run_replaces_its_record() {
        let folder = tempfile::tempdir().unwrap();
        let recorder = recorder(folder.path(), 7);
        (1..=3).for_each(|step| write(&recorder, step));
        recorder.prepare(0).unwrap();
        assert!(names(folder.path()).unwrap().is_empty());
    }

    #[test]
    fn records_of_other_runs_stay() {
        let folder = tempfile::tempdir().unwrap();
        let others = recorder(folder.path(), 7);
        (1..=2).for_each(|step| write(&others, step));
        let ours = recorder(folder.path(), 8);
        for n_done in 0..=3 {
            let error = ours.prepare(n_done).unwrap_err().to_string();
            assert!(error.contains("moe.routing_replay.record") && error.contains("a record of 2 steps"), "{error}");
            assert!(error.contains("step-000001/micro-0001.rank-002.safetensors"), "{error}");
            assert!(error.contains("another run wrote this file"), "{error}");
        }
        (3..=4).for_each(|step| write(&ours, step));
        assert!(ours.prepare(2).is_err() && others.prepare(0).is_err());
        assert_eq!(names(folder.path()).unwrap().len(), 4);
        (3..=4).for_each(|step| write(&others, step));
        fs::write(step_dir(folder.path(), 1).join("micro-0002.rank-000.safetensors"), "half").unwrap();
        assert!(others.prepare(4).unwrap_err().to_string().contains("micro-0002.rank-000.safetensors"));
        fs::remove_file(step_dir(folder.path(), 1).join("micro-0002.rank-000.safetensors")).unwrap();
        fs::write(step_dir(folder.path(), 2).join("notes"), "mine").unwrap();
        assert!(others.prepare(1).is_err() && step_dir(folder.path(), 2).join("notes").exists());
    }
}
