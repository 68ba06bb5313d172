//! Small data sets and plans for tests.

use std::path::PathBuf;
use std::sync::Arc;

use candlewick_text::render::Sample;
use candlewick_text::source::{Row, RowSource, SourceError};

use super::dataset::{Dataset, TokenizedSource};
use super::plan::{
    DataKind, DataPlan, Horizon, MaskingStrategy, Mixture, Packing, Padding, RowOrder, TrainOnEos, TrainedRole,
    Truncation, UnrenderedMessages,
};
use super::token_store::{TokenStore, TokenStoreWriter};

/// Empty rows with a file and line each.
pub(crate) struct FixtureRows(pub(crate) usize);

impl RowSource for FixtureRows {
    fn len(&self) -> usize {
        self.0
    }
    fn row(&self, _: usize) -> Result<Row, SourceError> {
        Ok(Row::new())
    }
    fn locate(&self, row: usize) -> String {
        format!("train.jsonl:{}", row + 1)
    }
}

/// Returns a data set of these ids and loss masks.
pub(crate) fn dataset(samples: &[(Vec<u32>, Vec<bool>)]) -> Dataset {
    Dataset::new(vec![tokenized(samples)], 0)
}

/// Returns a data set with a source for each number of samples. A sample of source `s` has 3 + `s` tokens.
pub(crate) fn of_sources(sizes: &[usize]) -> Dataset {
    let sample = |source: usize| (vec![source as u32; 3 + source], vec![true; 3 + source]);
    let sources = sizes.iter().enumerate().map(|(source, &size)| tokenized(&vec![sample(source); size]));
    Dataset::new(sources.collect(), 0)
}

fn tokenized(samples: &[(Vec<u32>, Vec<bool>)]) -> TokenizedSource {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = TokenStoreWriter::create(folder.path()).unwrap();
    for (row, (ids, is_target)) in samples.iter().enumerate() {
        let sample = Sample { ids: ids.clone(), is_target: is_target.clone(), ..Sample::default() };
        writer.push(row as u32, &sample).unwrap();
    }
    writer.finish().unwrap();
    let store = Arc::new(TokenStore::open(folder.path()).unwrap());
    TokenizedSource { store, rows: Arc::new(FixtureRows(samples.len())), key: "fixture".into() }
}

/// Returns samples of these lengths. Every id occurs once; two of three are targets.
pub(crate) fn of_lengths(lengths: &[usize]) -> Dataset {
    let mut id = 0;
    let mut sample = |n: usize| {
        let ids: Vec<u32> = (id + 1..=id + n as u32).collect();
        id += n as u32;
        let is_target = ids.iter().map(|id| id % 3 != 0).collect();
        (ids, is_target)
    };
    dataset(&lengths.iter().map(|&n| sample(n)).collect::<Vec<_>>())
}

/// Returns a plan with one epoch, one row a step, no packing, and rows of up to 32 tokens.
pub(crate) fn plan() -> DataPlan {
    DataPlan {
        kind: DataKind::Sft,
        sources: Vec::new(),
        eval_sources: Vec::new(),
        eval_fraction: 0.0,
        max_length: 32,
        truncation: Truncation::Error,
        packing: Packing::Off,
        fuse_positions_prob: 0.0,
        padding: Padding::Nothing,
        drop_last: false,
        order: RowOrder::Shuffle,
        mixture: Mixture::Concatenate,
        masking_strategy: MaskingStrategy::TrainOnAssistant,
        roles_to_train: vec![TrainedRole::Assistant],
        train_on_eos: TrainOnEos::Turn,
        ignore_empty_think: false,
        train_on_empty_answers: false,
        unrendered_messages: UnrenderedMessages::Error,
        add_bos_token: None,
        add_eos_token: true,
        micro_batch_size: 1,
        gradient_accumulation_steps: 1,
        data_ranks: 1,
        min_iterations: 0,
        horizon: Horizon::Epochs(1.0),
        overfit_first_batch: false,
        seed: 42,
        cache_dir: PathBuf::new(),
        fail_on_missing_cache: false,
        num_proc: 2,
        max_text_tokens: None,
        repeat_to_pack_max_length: false,
        dl_num_workers: 0,
        streaming: None,
        template_kwargs: serde_json::Map::new(),
    }
}
