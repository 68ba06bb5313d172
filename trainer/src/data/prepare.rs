//! Preparation of the data sets of a plan: reading, rendering, truncation, token counts and checks.

use std::sync::Arc;

use candlewick_text::hub::Hub;
use candlewick_text::source::RowSource;
use candlewick_text::template::ChatTemplate;
use candlewick_text::tokenizer::Tokenizer;

use super::DataError;
use super::cache::TokenCache;
use super::dataset::{Dataset, TokenizedSource};
use super::dataset_check::DatasetCheck;
use super::mixture;
use super::order::{RngPurpose, permutation, seeded_rng};
use super::plan::{DataPlan, Packing, SourcePlan};
use super::render::{Renderer, threads};
use super::rows::{PackingStats, epoch_rows};
use super::source::{SourceLoader, SourceUse, describe_removed_nulls};
use super::stream::StreamedData;
use super::token_stats::{DatasetCounts, TokenStats};
use super::truncation::apply_truncation;
use super::warnings::SampleWarningReport;

/// The prepared data of a run.
#[derive(Debug)]
pub struct PreparedData {
    /// The training data. Empty if they are streamed.
    pub train: Arc<Dataset>,
    /// The training data of a run that tokenizes them while training.
    pub streamed: Option<Arc<StreamedData>>,
    /// The evaluation data, if there are any.
    pub eval: Option<Arc<Dataset>>,
    /// The token statistics.
    pub token_stats: TokenStats,
    /// Notes for the user, one line each: detected formats, cache hits, packing, warnings.
    pub notes: Vec<String>,
}

/// Reads the sources and renders them, or takes their tokens from the cache, and refuses data that cannot be trained on.
/// It uses no device. Chats need a `template`, which gets the plan's variables.
pub fn prepare(
    plan: &DataPlan,
    tokenizer: &Tokenizer,
    template: Option<ChatTemplate>,
    hub: &Hub,
) -> Result<PreparedData, DataError> {
    prepare_until(plan, tokenizer, template, hub, &|| false)
}

/// Prepares like [`prepare`]. Reads the token cache, and writes nothing into it.
pub fn prepare_without_caching(
    plan: &DataPlan,
    tokenizer: &Tokenizer,
    template: Option<ChatTemplate>,
    hub: &Hub,
) -> Result<PreparedData, DataError> {
    let cache = TokenCache::read_only(&plan.cache_dir)?;
    Preparation { plan, tokenizer, template, hub, is_stopped: &|| false }.with_cache(cache)
}

/// Prepares like [`prepare`]. Once `is_stopped`, caches the finished samples and fails with [`DataError::Stopped`].
pub fn prepare_until(
    plan: &DataPlan,
    tokenizer: &Tokenizer,
    template: Option<ChatTemplate>,
    hub: &Hub,
    is_stopped: &(dyn Fn() -> bool + Sync),
) -> Result<PreparedData, DataError> {
    let cache = TokenCache::open(&plan.cache_dir)?;
    Preparation { plan, tokenizer, template, hub, is_stopped }.with_cache(cache)
}

/// The inputs of a preparation.
struct Preparation<'a> {
    plan: &'a DataPlan,
    tokenizer: &'a Tokenizer,
    template: Option<ChatTemplate>,
    hub: &'a Hub,
    is_stopped: &'a (dyn Fn() -> bool + Sync),
}

impl Preparation<'_> {
    fn with_cache(self, cache: TokenCache) -> Result<PreparedData, DataError> {
        let Self { plan, tokenizer, template, hub, is_stopped } = self;
        let mut notes = Vec::new();
        let template_name =
            template.as_ref().map_or_else(String::new, |template| format!("chat template {}", template.name()));
        let template_name = &*template_name;
        let (train, eval) = threads(plan)?.install(|| {
            let renderer = Renderer::new(plan, tokenizer, template);
            let loader = SourceLoader { renderer, cache, hub, is_stopped };
            let train = tokenize(&loader, &plan.sources, SourceUse::Train, &mut notes)?;
            let eval = tokenize(&loader, &plan.eval_sources, SourceUse::Eval, &mut notes)?;
            Ok::<_, DataError>((train, eval))
        })?;
        for source in &eval {
            if train.iter().any(|other| other.key == source.key) {
                let place = source.rows.locate(0);
                notes.push(format!("the evaluation data that begin at {place} equal training data, row by row"));
            }
        }
        let pad_id = tokenizer.pad().map_or(0, |pad| pad.id);
        let (train, eval) = split(plan, train, eval, pad_id)?;
        SampleWarningReport { dataset: &train, which: "training", plan, template: template_name }
            .refuse_unrendered()?;
        if let Some(eval) = &eval {
            SampleWarningReport { dataset: eval, which: "evaluation", plan, template: template_name }
                .refuse_unrendered()?;
        }
        let train = apply_truncation(train, plan, plan.drop_last)?;
        let eval = eval.map(|eval| apply_truncation(eval, plan, false)).transpose()?;

        let counts = DatasetCounts::of(&train);
        notes.extend(
            SampleWarningReport { dataset: &train, which: "training", plan, template: template_name }.warnings(&counts),
        );
        let check = DatasetCheck { dataset: &train, counts: &counts, plan, tokenizer };
        notes.extend(check.train()?);
        let mut token_stats = TokenStats { train: counts, ..TokenStats::default() };
        if let Some(eval) = &eval {
            let counts = DatasetCounts::of(eval);
            DatasetCheck { dataset: eval, counts: &counts, plan, tokenizer }.eval()?;
            notes.extend(
                SampleWarningReport { dataset: eval, which: "evaluation", plan, template: template_name }
                    .warnings(&counts),
            );
            token_stats.eval = Some(counts);
        }
        mixture::check(&train, plan)?;
        notes.extend(describe_epoch(&train, plan));
        Ok(PreparedData { train: Arc::new(train), streamed: None, eval: eval.map(Arc::new), token_stats, notes })
    }
}

/// Describes the first epoch: the packing, and what it reads of each source if there are several.
fn describe_epoch(train: &Dataset, plan: &DataPlan) -> Vec<String> {
    let has_several = plan.sources.len() > 1;
    if plan.packing == Packing::Off && !has_several {
        return Vec::new();
    }
    let rows = epoch_rows(train, plan, 0);
    let mut notes = Vec::new();
    if plan.packing != Packing::Off {
        notes.push(format!("packed {}", PackingStats::of(&rows, train, plan.max_length)));
    }
    if has_several {
        let counts = mixture::count_epoch(train, rows.sequences(), &plan.sources);
        notes.extend(counts.iter().map(|source| format!("epoch 0 of {source}")));
    }
    notes
}

/// The rows that [`prepare_stream_until`] reads to check the data.
const CHECKED_ROWS: usize = 256;

/// Opens the training sources of a plan with `streaming`, and checks their first rows. Evaluation data are prepared as by
/// [`prepare_until`], and `is_stopped` ends it likewise.
pub fn prepare_stream_until(
    plan: &DataPlan,
    tokenizer: Arc<Tokenizer>,
    template: Option<ChatTemplate>,
    hub: &Hub,
    is_stopped: &(dyn Fn() -> bool + Sync),
) -> Result<PreparedData, DataError> {
    let eval_plan = DataPlan { sources: Vec::new(), eval_fraction: 0.0, ..plan.clone() };
    let mut notes = Vec::new();
    let (eval, sources) = threads(plan)?.install(|| {
        let renderer = Renderer::new(plan, &tokenizer, template.clone());
        let loader = SourceLoader { renderer, cache: TokenCache::open(&plan.cache_dir)?, hub, is_stopped };
        let sources = plan.sources.iter().map(|source| loader.open_stream(source, &mut notes));
        let sources = sources.collect::<Result<Vec<_>, _>>()?;
        let eval = tokenize(&loader, &plan.eval_sources, SourceUse::Eval, &mut notes)?;
        Ok::<_, DataError>((eval, sources))
    })?;
    let (sources, keys): (Vec<_>, Vec<_>) = sources.into_iter().unzip();
    let data = StreamedData { plan: plan.clone(), tokenizer, template, sources, identity: keys.join(" ") };
    let data = Arc::new(data);
    notes.extend(check_first_rows(&data, is_stopped)?);
    let pad_id = data.tokenizer.pad().map_or(0, |pad| pad.id);
    let mut token_stats = TokenStats::default();
    let eval = match eval.is_empty() {
        true => None,
        false => {
            let eval = apply_truncation(Dataset::new(eval, pad_id), &eval_plan, false)?;
            let counts = DatasetCounts::of(&eval);
            DatasetCheck { dataset: &eval, counts: &counts, plan, tokenizer: &data.tokenizer }.eval()?;
            token_stats.eval = Some(counts);
            Some(Arc::new(eval))
        }
    };
    let train = Arc::new(Dataset::new(Vec::new(), pad_id));
    Ok(PreparedData { train, streamed: Some(data), eval, token_stats, notes })
}

/// Tokenizes the first rows of a stream, and refuses data that cannot be trained on.
fn check_first_rows(
    data: &Arc<StreamedData>,
    is_stopped: &(dyn Fn() -> bool + Sync),
) -> Result<Vec<String>, DataError> {
    let (plan, n_rows) = (&data.plan, data.len());
    if u32::try_from(n_rows).is_err() {
        let problem = format!("{n_rows} rows exceed the limit of 2^32 - 1; select a slice, as in name:train[:10%]");
        return Err(DataError::Plan { name: "the data".into(), problem });
    }
    let part = threads(plan)?.install(|| data.tokenize(0..n_rows.min(CHECKED_ROWS), is_stopped))?;
    let dataset = data.dataset(&[part])?;
    let template = data.template_name();
    let report = SampleWarningReport { dataset: &dataset, which: "training", plan, template: &template };
    report.refuse_unrendered()?;
    let dataset = apply_truncation(dataset, plan, false)?;
    let counts = DatasetCounts::of(&dataset);
    let check = DatasetCheck { dataset: &dataset, counts: &counts, plan, tokenizer: &data.tokenizer };
    let mut notes = check.train()?;
    notes.extend(data.sources.iter().filter_map(|source| describe_removed_nulls(&*source.rows)));
    notes.extend(
        SampleWarningReport { dataset: &dataset, which: "training", plan, template: &template }.warnings(&counts),
    );
    Ok(notes)
}

fn tokenize(
    loader: &SourceLoader<'_>,
    sources: &[SourcePlan],
    split: SourceUse,
    notes: &mut Vec<String>,
) -> Result<Vec<TokenizedSource>, DataError> {
    let tokenized: Vec<TokenizedSource> =
        sources.iter().map(|source| loader.load(source, split, notes)).collect::<Result<_, _>>()?;
    let n_samples: usize = tokenized.iter().map(|source| source.store.len()).sum();
    if u32::try_from(n_samples).is_err() {
        return Err(DataError::Plan {
            name: "the data".into(),
            problem: format!("{n_samples} samples exceed the limit of 2^32 - 1; select fewer with sample_count"),
        });
    }
    Ok(tokenized)
}

/// Holds out a fraction of the training samples, unless there are evaluation sources.
fn split(
    plan: &DataPlan,
    train: Vec<TokenizedSource>,
    eval: Vec<TokenizedSource>,
    pad_id: u32,
) -> Result<(Dataset, Option<Dataset>), DataError> {
    if !eval.is_empty() {
        return Ok((Dataset::new(train, pad_id), Some(Dataset::new(eval, pad_id))));
    }
    let n_samples: usize = train.iter().map(|source| source.store.len()).sum();
    if plan.eval_fraction == 0.0 {
        return Ok((Dataset::new(train, pad_id), None));
    }
    if n_samples < 2 {
        let problem = format!("{n_samples} samples are too few to hold any out; set eval_sources");
        return Err(DataError::Plan { name: "data.train_eval_split".into(), problem });
    }
    let n_eval = (plan.eval_fraction * n_samples as f64).round() as usize;
    let n_eval = n_eval.clamp(1, n_samples - 1);
    let mut order = permutation(n_samples, seeded_rng(plan.seed, RngPurpose::Split, 0, 0));
    let mut held_out = order.split_off(n_samples - n_eval);
    order.sort_unstable();
    held_out.sort_unstable();
    let eval = Dataset::choose(train.clone(), held_out, pad_id);
    Ok((Dataset::choose(train, order, pad_id), Some(eval)))
}
