//! The number of steps of small local data, for `trainer check`.

use std::path::Path;

use anyhow::Result;
use candlewick_runtime::run_id::RunId;
use candlewick_text::hub::Hub;

use super::Assets;
use crate::data::{Cursor, ReaderShard, SourceUse, TrainSteps, hub_repo, prepare_without_caching};
use crate::plan::Plan;

/// The bytes of training data up to which the steps are counted. A core tokenizes them in about a second.
const MAX_BYTES: u64 = 2 << 20;

/// Counts the steps of a plan, if its data are small local files and the tokenizer is on this machine. Returns `None` otherwise,
/// and for a stream. Reads the token cache, but does not write it: a check changes nothing.
pub fn count_steps(plan: &Plan, hub: &Hub) -> Result<Option<TrainSteps>> {
    let is_small = n_local_bytes(plan, hub).is_some_and(|n| n <= MAX_BYTES);
    if !is_small || plan.data.max_length == 0 || plan.data.streaming.is_some() {
        return Ok(None);
    }
    let mut plan = plan.clone();
    // Only the tokenizer is needed.
    plan.model.name_or_path = None;
    let Ok(assets) = Assets::find(&plan, hub, RunId::now()) else { return Ok(None) };
    plan.data.fail_on_missing_cache = false;
    plan.data.eval_sources.clear();
    plan.data.dl_num_workers = 0;
    let prepared = prepare_without_caching(&plan.data, &assets.tokenizer, assets.template()?, hub)?;
    let reader = ReaderShard { rank: 0, n_ranks: 1 };
    Ok(Some(TrainSteps::new(&prepared, &plan.data, Cursor::default(), reader)?))
}

/// Returns the bytes of the training data; `None` unless all of them are local files.
fn n_local_bytes(plan: &Plan, hub: &Hub) -> Option<u64> {
    let of_source = |source| {
        if hub_repo(source).is_some() {
            return None;
        }
        let rows = crate::data::open(source, plan.data.kind, SourceUse::Train, hub).ok()?;
        let bytes = |path: &String| std::fs::metadata(Path::new(path)).map(|file| file.len()).ok();
        rows.files().full_paths().iter().map(bytes).sum::<Option<u64>>()
    };
    plan.data.sources.iter().map(of_source).sum()
}
