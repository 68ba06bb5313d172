//! One source's tokens: from the cache, or opened, understood, drawn from, rendered and kept.

use std::sync::Arc;

use candlewick_text::format::{FormatRequest, RowFormat};
use candlewick_text::hub::{DatasetRequest, Hub};
use candlewick_text::source::{ReadOptions, RowSource, SampleBy, SplitSlice};

use super::DataError;
use super::cache::{Cache, Found};
use super::dataset::Part;
use super::key::{self, Key};
use super::order::{Purpose, draw, generator, identity};
use super::plan::{Kind, Sampling, SourcePlan};
use super::render::Renderer;
use super::store::Store;

/// What a source is for: which split is taken if none is named.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Split {
    Train,
    Eval,
}

/// Opens a source for a look at it: as training data would be, or where there is none of that split, as evaluation data.
pub fn open(plan: &SourcePlan, kind: Kind, hub: &Hub) -> Result<Arc<dyn RowSource>, DataError> {
    let as_split = |split| Ok::<_, DataError>(hub.dataset(&request(plan, kind, split)?)?.into());
    as_split(Split::Train).or_else(|error| as_split(Split::Eval).map_err(|_| error))
}

/// What it takes to turn a source into tokens.
pub(crate) struct Opener<'a> {
    pub(crate) renderer: Renderer<'a>,
    pub(crate) cache: Cache,
    pub(crate) hub: &'a Hub,
}

impl Opener<'_> {
    /// A source's samples, rendered now or before.
    pub(crate) fn tokens(&self, plan: &SourcePlan, split: Split, notes: &mut Vec<String>) -> Result<Part, DataError> {
        let name = &plan.name_or_path;
        let request = request(plan, self.renderer.plan.kind, split)?;
        let source: Arc<dyn RowSource> = self.hub.dataset(&request)?.into();
        let format = RowFormat::find(&self.format_request(plan, &request), &*source)?;
        self.renderer.check(name, &format)?;
        let rows = chosen(plan, source.len())?;
        notes.extend(source.files().describe_selection().map(|choice| format!("{name}: {choice}")));
        notes.push(format!("{name}: {}; {}", format.describe(), of_rows(rows.len(), source.len())));
        let key = self
            .renderer
            .add_to(Key::new(name))
            .with("the rows", key::of_rows(&*source, &rows)?)
            .with("the format", format!("{format:?}"));
        let store = match self.cache.find(&key)? {
            Found::Hit(store) => {
                let path = self.cache.path(&key);
                notes.push(format!("{name}: tokens from the cache, {}", path.display()));
                store
            }
            Found::Miss(why) => self.render(&key, &Rows { source: &*source, format, rows, why }, notes)?,
        };
        Ok(Part { store, source, key: key.digest() })
    }

    fn render(&self, key: &Key, rows: &Rows<'_>, notes: &mut Vec<String>) -> Result<Arc<Store>, DataError> {
        let (name, why) = (key.name.clone(), rows.why.clone());
        let path = self.cache.path(key);
        if self.renderer.plan.fail_on_missing_cache {
            return Err(DataError::NotCached { name, path, why });
        }
        let store = self.cache.write(key, |writer, failed| {
            self.renderer
                .render(rows.source, &rows.format, &rows.rows, |row, sample| writer.push(row, sample).map_err(failed))
        })?;
        let n_tokens = store.n_tokens();
        notes.push(format!("{name}: {n_tokens} tokens kept in {} ({why})", path.display()));
        Ok(store)
    }

    fn format_request(&self, plan: &SourcePlan, request: &DatasetRequest) -> FormatRequest {
        FormatRequest {
            purpose: self.renderer.purpose(),
            format: plan.format.clone(),
            role_mapping: plan.role_mapping.clone(),
            content_key: plan.content_key.clone(),
            column: plan.column.clone(),
            id: Some(request.spec.name.clone()),
        }
    }
}

/// Rows that are not in the cache.
struct Rows<'a> {
    source: &'a dyn RowSource,
    format: RowFormat,
    rows: Vec<u32>,
    why: String,
}

fn of_rows(chosen: usize, all: usize) -> String {
    if chosen == all { format!("{all} rows") } else { format!("{chosen} of {all} rows") }
}

fn request(plan: &SourcePlan, kind: Kind, split: Split) -> Result<DatasetRequest, DataError> {
    let default_split = match split {
        Split::Train => "train",
        Split::Eval => "eval",
    };
    let mut request = DatasetRequest::parse(&plan.name_or_path, default_split)?;
    if let Some(split) = &plan.split {
        if !request.spec.parts.is_empty() {
            let problem = "the split is named twice, behind the colon and in `split`; keep one".into();
            return Err(DataError::Plan { name: plan.name_or_path.clone(), problem });
        }
        request.spec.parts = SplitSlice::parse_all(split)?;
    }
    let sample_by = match kind {
        Kind::Causal => SampleBy::Document,
        Kind::Sft => SampleBy::default(),
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

/// The rows that are used, in the order they are used.
fn chosen(plan: &SourcePlan, n_rows: usize) -> Result<Vec<u32>, DataError> {
    let wrong = |problem| DataError::Plan { name: plan.name_or_path.clone(), problem };
    if u32::try_from(n_rows).is_err() {
        return Err(wrong(format!(
            "{n_rows} rows are too many for one source; name a slice of them, as in name:train[:10%]"
        )));
    }
    let count = match plan.sampling {
        Sampling::All => return Ok(identity(n_rows)),
        Sampling::Count(count) => count,
        Sampling::Ratio(ratio) => (ratio * n_rows as f64) as usize,
    };
    if count > n_rows {
        return Err(wrong(format!("sample_count is {count}, but there are only {n_rows} rows; lower it")));
    }
    if count == 0 {
        return Err(wrong(format!("sample_ratio or sample_count takes none of its {n_rows} rows; raise it")));
    }
    Ok(draw(n_rows, count, generator(plan.sample_seed, Purpose::Sampling, 0, 0)))
}
