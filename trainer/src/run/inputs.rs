//! The files that a run reads, opened without a run.

use std::path::{Path, PathBuf};

use anyhow::Result;
use candlewick_runtime::run_id::RunId;
use candlewick_text::hub::Hub;
use candlewick_text::template::ChatTemplateSource;

use super::Assets;
use super::tasks::{open_tasks_data, select};
use crate::data::{SourcePlan, SourceUse, hub_repo};
use crate::plan::{Plan, RoutingReplayPlan};

/// Opens the model, the tokenizer, every data set and the tasks as a run does. Returns the local paths among them.
pub fn open_inputs(plan: &Plan, hub: &Hub) -> Result<Vec<PathBuf>> {
    let mut local = local_assets(plan, hub)?;
    for (sources, purpose) in [(&plan.data.sources, SourceUse::Train), (&plan.data.eval_sources, SourceUse::Eval)] {
        for source in sources {
            local.extend(open_source(plan, source, purpose, hub)?);
        }
    }
    if let Some(RoutingReplayPlan::Replay(folder)) = plan.moe.as_ref().and_then(|moe| moe.routing_replay.as_ref()) {
        local.push(folder.clone());
    }
    if let (Some(tasks), Some(selection)) = (&plan.tasks, select(plan)?) {
        let files = open_tasks_data(tasks, selection, hub)?;
        local.extend(files.into_iter().map(PathBuf::from).filter(|path| path.is_file()));
        local.extend(tasks.include_path.iter().cloned());
        local.extend(tasks.tasks.iter().map(PathBuf::from).filter(|path| path.is_file()));
    }
    local.sort();
    local.dedup();
    Ok(local)
}

/// Finds the folders of model and tokenizer, and returns those outside of the cache, with the adapter and the chat
/// template.
fn local_assets(plan: &Plan, hub: &Hub) -> Result<Vec<PathBuf>> {
    Assets::find(plan, hub, RunId::now())?;
    let names = plan.model.name_or_path.iter().chain([&plan.tokenizer.name_or_path]);
    let folders = names.map(PathBuf::from).chain(plan.model.adapter_folder.clone());
    let mut local: Vec<PathBuf> = folders.filter(|folder| folder.exists()).collect();
    if let Some(ChatTemplateSource::File(path)) = &plan.tokenizer.chat_template {
        local.push(path.clone());
    }
    Ok(local)
}

/// Opens a source, and returns its files if they are local. The rows of Snowflake are in no file.
fn open_source(plan: &Plan, source: &SourcePlan, purpose: SourceUse, hub: &Hub) -> Result<Vec<PathBuf>> {
    if source.snowflake.is_some() {
        return Ok(Vec::new());
    }
    let rows = crate::data::open(source, plan.data.kind, purpose, hub)?;
    if hub_repo(source).is_some() {
        return Ok(Vec::new());
    }
    let card = Path::new(&source.name_or_path).join("README.md");
    let files = rows.files().full_paths().into_iter().map(PathBuf::from);
    Ok(files.chain(card.is_file().then_some(card)).collect())
}
