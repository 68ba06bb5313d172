//! The tokens of one source: from the cache, or read, sampled, rendered and cached.

use std::sync::Arc;

use candlewick_runtime::progress::{ProgressUnit, WorkProgress};
use candlewick_text::format::{FormatRequest, RowFormat};
use candlewick_text::hub::{DatasetRequest, Hub, RepoId};
use candlewick_text::quantity::{counted, grouped};
use candlewick_text::render::{RenderOptions, Sample};
use candlewick_text::snowflake::{SnowflakeQuery, SnowflakeSettings, write_rows};
use candlewick_text::source::{
    NullFieldRemoval, ReadOptions, RowSource, SampleBy, SplitSlice, WithoutNullFields, open_files,
};

use super::DataError;
use super::cache::{CacheLookup, PartialStore, TokenCache};
use super::cache_key::{self, CacheKey};
use super::dataset::TokenizedSource;
use super::order::{RngPurpose, identity, sample_without_replacement, seeded_rng};
use super::plan::{DataKind, Sampling, SnowflakePlan, SourcePlan};
use super::render::{ChosenRows, Renderer};
use super::stream::StreamedSource;
use super::token_store::TokenStore;
use crate::recipe::missing_shipped_file;

/// The use of a source, which decides its default split.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SourceUse {
    /// Training.
    Train,
    /// Evaluation.
    Eval,
}

/// Opens a source for inspection.
pub fn open(plan: &SourcePlan, kind: DataKind, split: SourceUse, hub: &Hub) -> Result<Arc<dyn RowSource>, DataError> {
    if plan.snowflake.is_some() {
        let problem = "rows of Snowflake are read when the data are prepared: run `trainer preprocess`".to_owned();
        return Err(DataError::Plan { name: plan.name_or_path.clone(), problem });
    }
    let request = request(plan, kind, split)?;
    Ok(open_dataset(hub, &request)?.into())
}

/// Opens a data set. The error of a missing shipped file names the command that copies it.
fn open_dataset(hub: &Hub, request: &DatasetRequest) -> Result<Box<dyn RowSource>, DataError> {
    hub.dataset(request).map_err(|error| match missing_shipped_file(&request.spec.name) {
        Some(problem) => DataError::Plan { name: request.spec.name.clone(), problem },
        None => error.into(),
    })
}

/// Returns the repository and the revision of a source that is not local.
pub(crate) fn hub_repo(plan: &SourcePlan) -> Option<(RepoId, String)> {
    if plan.snowflake.is_some() {
        return None;
    }
    request(plan, DataKind::Sft, SourceUse::Train).ok()?.hub_repo()
}

/// Loads sources as tokens.
pub(crate) struct SourceLoader<'a> {
    pub(crate) renderer: Renderer<'a>,
    pub(crate) cache: TokenCache,
    pub(crate) hub: &'a Hub,
    /// Returns true once the preparation is to stop.
    pub(crate) is_stopped: &'a (dyn Fn() -> bool + Sync),
}

impl SourceLoader<'_> {
    /// Loads a source's samples from the cache, or renders and caches them.
    pub(crate) fn load(
        &self,
        plan: &SourcePlan,
        split: SourceUse,
        notes: &mut Vec<String>,
    ) -> Result<TokenizedSource, DataError> {
        let name = &plan.name_or_path;
        self.refuse_stopped()?;
        let (source, format) = self.open(plan, split)?;
        let rows = sample_rows(plan, source.len())?;
        notes.extend(source.files().describe_selection().map(|choice| format!("{name}: {choice}")));
        notes.push(format!("{name}: {}; {}", format.describe(), describe_count(rows.len(), source.len())));
        let key = self
            .renderer
            .add_to(CacheKey::new(name), plan)
            .with("the rows", self.hash_rows(&*source, &rows)?)
            .with("the format", format!("{format:?}"));
        notes.extend(describe_removed_nulls(&*source).map(|removed| format!("{name}: {removed}")));
        let store = match self.cache.find(&key)? {
            CacheLookup::Hit(store) => {
                let path = self.cache.path(&key);
                notes.push(format!("{name}: tokens from the cache, {}", path.display()));
                store
            }
            CacheLookup::Miss(why) => {
                let options = self.renderer.options(plan);
                self.render(&key, &UncachedRows { source: &*source, format, rows, options, why }, notes)?
            }
        };
        Ok(TokenizedSource { store, rows: source, key: key.digest() })
    }

    /// Opens a source and finds its format.
    fn open(&self, plan: &SourcePlan, split: SourceUse) -> Result<(Arc<dyn RowSource>, RowFormat), DataError> {
        let (source, id): (Arc<dyn RowSource>, String) = match &plan.snowflake {
            Some(query) => (self.snowflake(query)?, plan.name_or_path.clone()),
            None => {
                let request = request(plan, self.renderer.plan.kind, split)?;
                (open_dataset(self.hub, &request)?.into(), request.spec.name)
            }
        };
        let removal = NullFieldRemoval::of(plan.remove_none_values);
        let source: Arc<dyn RowSource> = Arc::new(WithoutNullFields::new(source, removal));
        let format = RowFormat::find(&self.format_request(plan, id), &*source)?;
        self.renderer.check(plan, &format)?;
        Ok((source, format))
    }

    /// Opens a training source whose rows are tokenized while training. Returns the digest of its settings, too.
    pub(crate) fn open_stream(
        &self,
        plan: &SourcePlan,
        notes: &mut Vec<String>,
    ) -> Result<(StreamedSource, String), DataError> {
        let name = &plan.name_or_path;
        self.refuse_stopped()?;
        let (rows, format) = self.open(plan, SourceUse::Train)?;
        let chosen = match plan.sampling {
            Sampling::All => None,
            Sampling::Count(_) | Sampling::Ratio(_) => Some(sample_rows(plan, rows.len())?),
        };
        let n_chosen = chosen.as_ref().map_or(rows.len(), Vec::len);
        notes.extend(rows.files().describe_selection().map(|choice| format!("{name}: {choice}")));
        notes.push(format!("{name}: {}; streams {}", format.describe(), describe_count(n_chosen, rows.len())));
        let key = self
            .renderer
            .add_to(CacheKey::new(name), plan)
            .with("the rows", format!("{} rows, {:?}, seed {}", rows.len(), plan.sampling, plan.sample_seed))
            .with("the format", format!("{format:?}"));
        let options = self.renderer.options(plan);
        Ok((StreamedSource { rows, format, chosen, options }, key.digest()))
    }

    fn render(
        &self,
        key: &CacheKey,
        rows: &UncachedRows<'_>,
        notes: &mut Vec<String>,
    ) -> Result<Arc<TokenStore>, DataError> {
        let (name, why) = (key.name.clone(), rows.why.clone());
        let path = self.cache.path(key);
        if self.renderer.plan.fail_on_missing_cache {
            return Err(DataError::NotCached { name, path, why });
        }
        let mut n_before = 0;
        let store = self.cache.write(key, |PartialStore { writer, n_done }, failed| {
            n_before = n_done;
            let remaining = rows.rows.get(n_done..).unwrap_or_default();
            let push = |row, sample: &Sample| writer.push(row, sample).map_err(failed);
            let UncachedRows { source, format, options, .. } = rows;
            let chosen = ChosenRows { source: *source, format, rows: remaining, options: *options };
            let progress = WorkProgress::start("tokenize", ProgressUnit::Count("rows"), remaining.len());
            self.renderer.render(&chosen, &progress, self.is_stopped, push)
        })?;
        if n_before > 0 {
            notes.push(format!(
                "{name}: continued after {}, which a stopped run has tokenized",
                counted(n_before, "row")
            ));
        }
        let n_tokens = store.n_tokens();
        let tokens = counted(n_tokens, "token");
        notes.push(format!("{name}: {why}; tokenized, and cached {tokens} in {}", path.display()));
        Ok(store)
    }

    fn hash_rows(&self, source: &dyn RowSource, rows: &[u32]) -> Result<String, DataError> {
        let hash = cache_key::hash_rows(source, rows, self.is_stopped)?;
        hash.ok_or_else(Self::stopped)
    }

    fn refuse_stopped(&self) -> Result<(), DataError> {
        if (self.is_stopped)() { Err(Self::stopped()) } else { Ok(()) }
    }

    fn stopped() -> DataError {
        DataError::Stopped { kept: "the tokens of finished sources are cached".to_owned() }
    }

    /// Opens the rows of a query: those in the cache folder, or those that Snowflake returns now.
    fn snowflake(&self, plan: &SnowflakePlan) -> Result<Arc<dyn RowSource>, DataError> {
        let settings = SnowflakeSettings::from_env();
        let query = SnowflakeQuery {
            statement: plan.statement.clone(),
            limit: plan.limit,
            column_mapping: plan.column_mapping.clone(),
        };
        let key = CacheKey::new("snowflake")
            .with("the query", format!("{query:?}"))
            .with("the account", format!("{settings:?}"));
        let path = self.renderer.plan.cache_dir.join(format!("snowflake-{}.jsonl", &key.digest()[..16]));
        if !path.exists() {
            let n_rows = write_rows(&query, &settings, &path)?;
            tracing::info!("wrote {n_rows} rows of a Snowflake query to {}", path.display());
        }
        Ok(open_files(&[path], &ReadOptions::default())?.into())
    }

    fn format_request(&self, plan: &SourcePlan, id: String) -> FormatRequest {
        FormatRequest {
            purpose: self.renderer.purpose(),
            format: plan.format.clone(),
            role_mapping: plan.role_mapping.clone(),
            content_key: plan.content_key.clone(),
            column: plan.column.clone(),
            id: Some(id),
        }
    }
}

/// Rows that are not in the cache.
struct UncachedRows<'a> {
    source: &'a dyn RowSource,
    format: RowFormat,
    rows: Vec<u32>,
    options: RenderOptions,
    why: String,
}

/// Describes the null fields that were removed from the rows read so far.
pub(crate) fn describe_removed_nulls(source: &dyn RowSource) -> Option<String> {
    let first = source.first_row_with_removed_nulls()?;
    Some(format!(
        "null fields of nested structs are removed, the first in {first}; `remove_none_values: false` keeps them"
    ))
}

fn describe_count(chosen: usize, all: usize) -> String {
    let all_rows = counted(all, "row");
    if chosen == all { all_rows } else { format!("{} of {all_rows}", grouped(chosen as u64)) }
}

fn request(plan: &SourcePlan, kind: DataKind, split: SourceUse) -> Result<DatasetRequest, DataError> {
    let default_split = match split {
        SourceUse::Train => "train",
        SourceUse::Eval => "eval",
    };
    let mut request = DatasetRequest::parse(&plan.name_or_path, default_split)?;
    if let Some(split) = &plan.split {
        if !request.spec.parts.is_empty() {
            let problem = "the split is set twice, after the colon and in `split`; keep one".into();
            return Err(DataError::Plan { name: plan.name_or_path.clone(), problem });
        }
        request.spec.parts = SplitSlice::parse_plus_joined(split)?;
    }
    let sample_by = match kind {
        DataKind::Causal => SampleBy::Document,
        DataKind::Sft => SampleBy::default(),
    };
    let read = ReadOptions {
        sample_by: plan.sample_by.as_deref().map_or(Ok(sample_by), str::parse)?,
        field: plan.field.clone(),
        delimiter: plan.delimiter,
    };
    Ok(DatasetRequest {
        revision: plan.revision.clone(),
        config: plan.subset.clone(),
        split_mapping: plan.split_mapping.clone(),
        data_files: plan.data_files.clone(),
        read,
        ..request
    })
}

/// Returns the indices of the rows that are used, in their order of use.
fn sample_rows(plan: &SourcePlan, n_rows: usize) -> Result<Vec<u32>, DataError> {
    let wrong = |problem| DataError::Plan { name: plan.name_or_path.clone(), problem };
    if u32::try_from(n_rows).is_err() {
        return Err(wrong(format!(
            "{n_rows} rows exceed the limit of 2^32 - 1; select a slice, as in name:train[:10%]"
        )));
    }
    let count = match plan.sampling {
        Sampling::All => return Ok(identity(n_rows)),
        Sampling::Count(count) => count,
        Sampling::Ratio(ratio) => (ratio * n_rows as f64) as usize,
    };
    if count > n_rows {
        return Err(wrong(format!("sample_count is {count}, but the source has {}; lower it", counted(n_rows, "row"))));
    }
    if count == 0 {
        return Err(wrong(format!("sample_ratio or sample_count selects none of its {n_rows} rows; raise it")));
    }
    Ok(sample_without_replacement(n_rows, count, seeded_rng(plan.sample_seed, RngPurpose::Sampling, 0, 0)))
}
