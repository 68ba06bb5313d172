//! Replay: the experts of a micro-batch, from the files of all ranks that wrote them.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::path::PathBuf;

use candlewick_parallel::RoutedMicro;
use candlewick_text::files::{MAX_GENERATED_FILE_BYTES, read_regular_file};

use super::error::RoutingError;
use super::file::RoutingFile;
use super::folder::{MicroPosition, file_name, files, step_dir, steps};
use super::routed_model::RoutedModel;

/// The reader of a record.
#[derive(Debug)]
pub(crate) struct RoutingReplay {
    pub(crate) dir: PathBuf,
    pub(crate) model: RoutedModel,
}

/// The experts of a micro-batch, as far as they were read.
struct ReadExperts {
    top_k: usize,
    n_tokens: usize,
    /// Experts of all tokens by layer; [`UNREAD`] where no file has them yet.
    layers: BTreeMap<usize, Vec<u32>>,
}

/// Mark of a token whose experts were not read yet. No expert has this index.
const UNREAD: u32 = u32::MAX;

impl RoutingReplay {
    /// Fails unless the record has all these steps.
    pub(crate) fn check_steps(&self, mut wanted: RangeInclusive<usize>) -> Result<(), RoutingError> {
        let known = steps(&self.dir).map_err(RoutingError::read(&self.dir))?;
        match wanted.find(|step| !known.contains(step)) {
            Some(step) => Err(self.missing_step(step, &known)),
            None => Ok(()),
        }
    }

    fn missing_step(&self, step: usize, known: &BTreeSet<usize>) -> RoutingError {
        if !self.dir.is_dir() {
            let problem = "there is no such folder; name one that a run with moe.routing_replay.record wrote";
            return RoutingError::unusable(&self.dir, problem);
        }
        let range = match (known.first(), known.last()) {
            (Some(first), Some(last)) => format!(" ({first} to {last})"),
            _ => String::new(),
        };
        let problem = format!("there is no step {step}: the record has {} recorded steps{range}", known.len());
        RoutingError::unusable(&step_dir(&self.dir, step), problem)
    }

    /// Fails unless the record has exactly these micro-batches of a step.
    pub(crate) fn check_micro_batches(&self, step: usize, n_micros: usize) -> Result<(), RoutingError> {
        let recorded: BTreeSet<usize> = self.files_of(step)?.into_iter().map(|(micro_idx, _)| micro_idx).collect();
        let missing = (0..n_micros).find(|micro_idx| !recorded.contains(micro_idx));
        let (micro_idx, problem) = match (missing, recorded.range(n_micros..).next()) {
            (Some(micro_idx), _) => (micro_idx, "there is no such file"),
            (None, Some(micro_idx)) => (*micro_idx, "this run has no such micro-batch"),
            (None, None) => return Ok(()),
        };
        let problem = format!(
            "{problem}: the step has {} recorded micro-batches, and {n_micros} in this run; use the data of the recorded run, its \
             micro_batch_size, and as many micro-batches per step (gradient_accumulation_steps times data-parallel ranks)",
            recorded.len()
        );
        Err(RoutingError::unusable(&step_dir(&self.dir, step).join(file_name(micro_idx, None)), problem))
    }

    /// Returns the files of a step with the indices of their micro-batches.
    fn files_of(&self, step: usize) -> Result<Vec<(usize, PathBuf)>, RoutingError> {
        let dir = step_dir(&self.dir, step);
        let of_step = files(&dir).map_err(RoutingError::read(&dir))?;
        if of_step.is_empty() {
            let known = steps(&self.dir).map_err(RoutingError::read(&self.dir))?;
            return Err(self.missing_step(step, &known));
        }
        Ok(of_step)
    }

    /// Returns the experts of all tokens of a micro-batch with these token ids.
    pub(crate) fn read(&self, at: MicroPosition, ids: &[u32]) -> Result<RoutedMicro, RoutingError> {
        let all = step_dir(&self.dir, at.step).join(file_name(at.micro_idx, None));
        let of_step = self.files_of(at.step)?;
        let own = of_step.iter().filter(|(micro_idx, _)| *micro_idx == at.micro_idx).map(|(_, path)| path.as_path());
        let mut read = ReadExperts { top_k: self.model.top_k, n_tokens: ids.len(), layers: BTreeMap::new() };
        for path in own {
            let bytes = read_regular_file(path, MAX_GENERATED_FILE_BYTES).map_err(RoutingError::read(path))?;
            let file = RoutingFile::parse(&bytes).and_then(|file| file.check(&self.model, ids).map(|()| file));
            file.and_then(|file| read.add(&file)).map_err(|problem| RoutingError::unusable(path, problem))?;
        }
        read.complete(&self.model).map_err(|problem| RoutingError::unusable(&all, problem))
    }
}

impl ReadExperts {
    /// Adds the experts of a file that fits the model and the micro-batch.
    fn add(&mut self, file: &RoutingFile) -> Result<(), String> {
        let (top_k, n) = (self.top_k, self.n_tokens * self.top_k);
        for (layer_idx, experts) in &file.experts.layers {
            let layer = self.layers.entry(*layer_idx).or_insert_with(|| vec![UNREAD; n]);
            for (row, experts) in file.experts.tokens.iter().zip(experts.chunks_exact(top_k)) {
                let first = *row as usize * top_k;
                let of_token = &mut layer[first..first + top_k];
                if of_token[0] != UNREAD {
                    return Err(format!("row {row} of layer-{layer_idx} is in two files, or twice in one"));
                }
                of_token.copy_from_slice(experts);
            }
        }
        Ok(())
    }

    /// Returns the experts if each layer has those of all tokens.
    fn complete(self, model: &RoutedModel) -> Result<RoutedMicro, String> {
        for layer_idx in &model.layers {
            let layer = self.layers.get(layer_idx).ok_or_else(|| format!("no file has layer-{layer_idx}"))?;
            if let Some(slot) = layer.iter().position(|expert| *expert == UNREAD) {
                let row = slot / self.top_k;
                return Err(format!("no file has row {row} of layer-{layer_idx}; a rank's file is missing"));
            }
        }
        Ok(RoutedMicro { tokens: (0..self.n_tokens as u32).collect(), layers: self.layers })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::routing::RoutingRecorder;

    const IDS: [u32; 4] = [5, 6, 7, 8];
    const AT: MicroPosition = MicroPosition { step: 2, micro_idx: 3 };

    fn model() -> RoutedModel {
        RoutedModel { top_k: 2, n_experts: 4, layers: vec![1, 4] }
    }

    /// Records tokens and layers, a list for each rank, and replays the micro-batch [`AT`].
    fn replayed(dir: &Path, ranks: &[(&[u32], &[usize])]) -> Result<RoutedMicro, String> {
        for (rank, (tokens, layers)) in ranks.iter().enumerate() {
            let recorder = RoutingRecorder { dir: dir.to_owned(), model: model(), rank, run: 1 };
            let of_layer = |layer: &usize| (*layer, tokens.iter().flat_map(|token| experts(*token, *layer)).collect());
            let experts = RoutedMicro { tokens: tokens.to_vec(), layers: layers.iter().map(of_layer).collect() };
            recorder.write(AT, experts, &IDS).unwrap();
        }
        RoutingReplay { dir: dir.to_owned(), model: model() }.read(AT, &IDS).map_err(|error| error.to_string())
    }

    fn experts(token: u32, layer: usize) -> [u32; 2] {
        let first = (token + layer as u32) % 4;
        [first, (first + 1) % 4]
    }

    #[test]
    fn files_of_ranks_that_divide_tokens_and_layers_are_joined() {
        let all = |layer| (0..4).flat_map(|token| experts(token, layer)).collect::<Vec<u32>>();
        let want = RoutedMicro { tokens: vec![0, 1, 2, 3], layers: BTreeMap::from([(1, all(1)), (4, all(4))]) };
        let meshes: [&[(&[u32], &[usize])]; 4] = [
            &[(&[0, 1, 2, 3], &[1, 4])],
            &[(&[0, 3], &[1, 4]), (&[1, 2], &[1, 4])],
            &[(&[0, 1, 2, 3], &[1]), (&[0, 1, 2, 3], &[4])],
            &[(&[2, 3], &[4]), (&[], &[1]), (&[1, 0], &[4]), (&[0, 1, 2, 3], &[1])],
        ];
        for ranks in meshes {
            let folder = tempfile::tempdir().unwrap();
            assert_eq!(replayed(folder.path(), ranks), Ok(want.clone()));
        }
    }

    #[track_caller]
    fn refused(ranks: &[(&[u32], &[usize])], parts: &[&str]) {
        let folder = tempfile::tempdir().unwrap();
        let error = replayed(folder.path(), ranks).unwrap_err();
        for part in parts.iter().chain(&["moe.routing_replay.replay"]) {
            assert!(error.contains(part), "no {part:?} in {error}");
        }
    }

    #[test]
    fn missing_and_doubled_experts_are_named() {
        let any = "step-000002/micro-0003.rank-*.safetensors";
        refused(&[(&[0, 1, 3], &[1, 4])], &[any, "no file has row 2 of layer-1"]);
        refused(&[(&[0, 1, 2, 3], &[1])], &[any, "no file has layer-4"]);
        let second = "step-000002/micro-0003.rank-001.safetensors";
        refused(&[(&[0, 1, 2, 3], &[1, 4]), (&[2], &[4])], &[second, "row 2 of layer-4 is in two files"]);
        refused(&[(&[0, 1, 2, 3, 3], &[1, 4])], &["row 3 of layer-1 is in two files, or twice in one"]);
    }

    #[test]
    fn missing_steps_and_micro_batches_are_counted() {
        let folder = tempfile::tempdir().unwrap();
        replayed(folder.path(), &[(&[0, 1, 2, 3], &[1, 4])]).unwrap();
        let replay = RoutingReplay { dir: folder.path().to_owned(), model: model() };
        replay.check_steps(2..=2).unwrap();
        let steps = replay.check_steps(2..=5).unwrap_err().to_string();
        assert!(steps.contains("step-000003") && steps.contains("the record has 1 recorded steps (2 to 2)"), "{steps}");
        let step = replay.read(MicroPosition { step: 9, ..AT }, &IDS).unwrap_err().to_string();
        assert!(step.contains("there is no step 9: the record has 1 recorded steps"), "{step}");
        let of_step = |n_micros| replay.check_micro_batches(2, n_micros).map_err(|error| error.to_string());
        let first = of_step(1).unwrap_err();
        let counts = "the step has 1 recorded micro-batches, and 1 in this run";
        assert!(first.contains("micro-0000.rank-*") && first.contains(counts), "{first}");
        for micro_idx in 0..3 {
            std::fs::write(folder.path().join("step-000002").join(file_name(micro_idx, Some(0))), "").unwrap();
        }
        of_step(4).unwrap();
        let fewer = of_step(5).unwrap_err();
        assert!(fewer.contains("micro-0004.rank-*") && fewer.contains("there is no such file"), "{fewer}");
        assert!(fewer.contains("the step has 4 recorded micro-batches, and 5 in this run"), "{fewer}");
        let more = of_step(2).unwrap_err();
        assert!(more.contains("micro-0002.rank-*") && more.contains("this run has no such micro-batch"), "{more}");
        assert!(more.contains("the step has 4 recorded micro-batches, and 2 in this run; use the data"), "{more}");
        let nowhere = RoutingReplay { dir: folder.path().join("x"), model: model() };
        let error = nowhere.check_steps(1..=1).unwrap_err().to_string();
        assert!(error.contains("there is no such folder; name one that a run with"), "{error}");
        std::fs::write(folder.path().join("step-000002/micro-0003.rank-000.safetensors"), "half").unwrap();
        let damaged = replay.read(AT, &IDS).unwrap_err().to_string();
        assert!(damaged.contains("micro-0003.rank-000.safetensors") && damaged.contains("no complete"), "{damaged}");
    }

    #[test]
    fn a_file_that_never_ends_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        replayed(folder.path(), &[(&[0, 1, 2, 3], &[1, 4])]).unwrap();
        let file = folder.path().join("step-000002/micro-0003.rank-000.safetensors");
        std::fs::remove_file(&file).unwrap();
        std::os::unix::fs::symlink("/dev/zero", &file).unwrap();
        let replay = RoutingReplay { dir: folder.path().to_owned(), model: model() };
        let error = replay.read(AT, &IDS).unwrap_err();
        let cause = std::error::Error::source(&error).unwrap().to_string();
        assert!(error.to_string().contains("micro-0003.rank-000.safetensors"), "{error}");
        assert!(cause.contains("not a regular file"), "{cause}");
        let recorder = RoutingRecorder { dir: folder.path().to_owned(), model: model(), rank: 0, run: 1 };
        assert!(recorder.prepare(2).is_err(), "a record reads the headers of earlier files");
    }
}
