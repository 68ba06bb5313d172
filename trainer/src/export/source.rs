//! Sources of an export: a Hugging Face folder, a Hub id, an adapter, a `sharded` checkpoint, or a run's output folder.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use candlewick_model::checkpoint::{CarriedTensors, Checkpoint};
use candlewick_model::{LoraConfig, MergedModel, Model, ParamValues, fp8_scales_to_json, read_fp8_scales};
use candlewick_text::hub::{Hub, HubError, LocalModelKind, ModelFiles};

use super::run_record::RunRecord;
use crate::checkpoint::{CheckpointWeights, is_checkpoint, newest_complete};
use crate::exit::ExitCode;

/// The model to export.
pub struct ExportSource {
    /// The model, with its adapter merged in.
    pub model: MergedModel,
    /// Folder that the values come from.
    pub folder: PathBuf,
    /// Name or path of the base model, if it is known.
    pub base_model: Option<String>,
    /// Chat template that replaces the tokenizer's own.
    pub chat_template: Option<String>,
    /// True if the model has an adapter.
    pub is_adapted: bool,
    /// FP8 scales of the run that trained the model, as the text of `fp8_scales.json`; `None` without delayed scaling, or if an
    /// adapter changes the weights.
    pub fp8_scales: Option<String>,
    /// Log lines that name the chosen folders.
    pub notes: Vec<String>,
    /// Record of the run that trained the model, if there is one.
    pub(super) run: Option<RunRecord>,
}

impl ExportSource {
    /// Opens the model `name`. `base` replaces the base model that an adapter names.
    pub fn open(name: &str, base: Option<&str>, hub: &Hub) -> Result<Self> {
        if let Some(checkpoint) = sharded(Path::new(name))? {
            return Self::of_checkpoint(&checkpoint, base, hub);
        }
        let found = hub.find_model(name, None, ModelFiles::All).map_err(not_found)?;
        let notes = found.note("model");
        if let LocalModelKind::Adapter { .. } = found.contents {
            return Self::of_adapter(found.folder, base, hub, notes);
        }
        refuse_base(base, "has no adapter")?;
        let run = RunRecord::find(&found.folder);
        let trained_from = run.as_ref().and_then(|run| run.text("/plan/model/name_or_path"));
        let model = MergedModel::open(&found.folder, None).context("failed to open the model")?;
        let scales = read_fp8_scales(&found.folder, model.config()).context("failed to open the model")?;
        Ok(Self {
            fp8_scales: scales.map(|scales| fp8_scales_to_json(&scales, model.config())),
            model,
            is_adapted: false,
            base_model: trained_from.map(str::to_owned),
            folder: found.folder,
            chat_template: None,
            notes,
            run,
        })
    }

    /// Opens the adapter `name` on its base model. `base` replaces the base model that the adapter names.
    ///
    /// # Errors
    /// If `name` is a model.
    pub fn open_adapter(name: &str, base: Option<&str>, hub: &Hub) -> Result<Self> {
        let (folder, note) = hub.adapter(name).map_err(not_found)?;
        Self::of_adapter(folder, base, hub, note.into_iter().collect())
    }

    fn of_adapter(adapter: PathBuf, base: Option<&str>, hub: &Hub, mut notes: Vec<String>) -> Result<Self> {
        let (base, note) = find_base(&adapter, base, hub)?;
        notes.push(note);
        Ok(Self {
            model: MergedModel::open(&base, Some(&adapter)).context("failed to open the model")?,
            is_adapted: true,
            fp8_scales: None,
            base_model: LoraConfig::read(&adapter)?.base_model().map(str::to_owned),
            chat_template: None,
            notes,
            run: RunRecord::find(&adapter),
            folder: adapter,
        })
    }

    /// Opens a `sharded` checkpoint. The run's `run.json` has the config, the adapter and the tokenizer.
    fn of_checkpoint(checkpoint: &Path, base: Option<&str>, hub: &Hub) -> Result<Self> {
        let run = RunRecord::find(checkpoint).ok_or_else(|| {
            let problem = "its run.json is missing; it should be in one of the two folders above";
            anyhow!("failed to read the checkpoint {}: {problem}", checkpoint.display()).context(ExitCode::Data)
        })?;
        let weights = CheckpointWeights::open(checkpoint, run.dtype())?;
        run.check(weights.run_start())?;
        let lora = run.adapter()?;
        let is_adapted = lora.is_some();
        let scales = if is_adapted { None } else { weights.fp8_scales()? };
        let model = Model::new(run.config()?, lora)?;
        let name = run.text("/plan/model/name_or_path").map(str::to_owned);
        let revision = run.text("/plan/model/revision");
        let mut folders = Vec::new();
        let tokenizer = run.text("/plan/tokenizer/name_or_path");
        let tokenizer = tokenizer.ok_or_else(|| run.unusable("it names no tokenizer"))?;
        let tokenizer_revision = run.text("/plan/tokenizer/revision");
        folders.push(hub.model(tokenizer, tokenizer_revision, ModelFiles::WithoutWeights).map_err(not_found)?);
        let merged = match is_adapted {
            true => {
                let base =
                    base.or(name.as_deref()).ok_or_else(|| run.unusable("it names no base model; give --base"))?;
                let revision = revision.filter(|_| Some(base) == name.as_deref());
                let folder = hub.model(base, revision, ModelFiles::All).map_err(not_found)?;
                let base = Checkpoint::of_model(&folder, model.config())?;
                base.check(model.base_params())?;
                weights.check_frozen(&folder, base.identity())?;
                let carried = CarriedTensors::open(&folder, model.config())?;
                folders.push(folder);
                let adapter = Some(Box::new(weights) as Box<dyn ParamValues>);
                MergedModel::new(model, Box::new(base), adapter, folders).with_carried(carried)
            }
            false => {
                refuse_base(base, "is no adapter's")?;
                // For generation_config.json, and for the carried tensors of a multimodal model.
                let is_multimodal = model.config().family().is_multimodal();
                let files = if is_multimodal { ModelFiles::All } else { ModelFiles::WithoutWeights };
                let local = name.as_deref().map(|name| hub.model(name, revision, files));
                let local = local.transpose().map_err(not_found)?;
                let open = |folder: &PathBuf| CarriedTensors::open(folder, model.config());
                let carried = local.as_ref().map(open).transpose()?.flatten();
                if let (Some(folder), Some(carried)) = (&local, &carried) {
                    weights.check_frozen(folder, carried.identity())?;
                }
                folders.extend(local);
                MergedModel::new(model, Box::new(weights), None, folders).with_carried(carried)
            }
        };
        Ok(Self {
            fp8_scales: scales.map(|scales| fp8_scales_to_json(&scales, merged.config())),
            model: merged,
            folder: checkpoint.to_path_buf(),
            base_model: name,
            chat_template: run.chat_template()?,
            is_adapted,
            notes: vec![format!("model: {} (sharded checkpoint)", checkpoint.display())],
            run: Some(run),
        })
    }
}

/// Returns the `sharded` checkpoint that a path means: the folder itself, or the newest one in a folder without exports.
fn sharded(path: &Path) -> Result<Option<PathBuf>> {
    if !path.is_dir() {
        return Ok(None);
    }
    if is_checkpoint(path) {
        return Ok(Some(path.to_path_buf()));
    }
    if !matches!(candlewick_text::hub::local_model(&path.to_string_lossy()), Err(HubError::NotAModel { .. })) {
        return Ok(None);
    }
    let entries = std::fs::read_dir(path).with_context(|| format!("failed to read {}", path.display()))?;
    let mut folders: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).filter(|path| path.is_dir()).collect();
    folders.sort();
    let folders = std::iter::once(path.to_path_buf()).chain(folders);
    let newest = folders.map(|folder| newest_complete(&folder)).collect::<Result<Vec<_>, _>>()?;
    let newest = newest.into_iter().flatten().max_by_key(|save| (save.manifest.run_start, save.manifest.tag()));
    Ok(newest.map(|save| save.dir))
}

/// Returns the folder of an adapter's base model, with a log line. `base` replaces the model that the adapter names.
fn find_base(adapter: &Path, base: Option<&str>, hub: &Hub) -> Result<(PathBuf, String)> {
    let folder = match base {
        Some(base) => hub.find_model(base, None, ModelFiles::All).map_err(not_found)?.folder,
        None => {
            let config = LoraConfig::read(adapter).context("failed to read the adapter")?;
            let base = config.base_model().with_context(|| {
                let problem = "adapter_config.json has no base_model_name_or_path; name the base model with --base";
                format!("failed to find the base model of {}: {problem}", adapter.display())
            });
            hub.base_model(adapter, base.context(ExitCode::Usage)?).map_err(not_found)?
        }
    };
    let note = format!("base model: {}", folder.display());
    Ok((folder, note))
}

fn refuse_base(base: Option<&str>, why: &str) -> Result<()> {
    match base {
        Some(_) => Err(anyhow!("failed to export: the model {why}, so --base has no meaning; leave it out")
            .context(ExitCode::Usage)),
        None => Ok(()),
    }
}

fn not_found(error: HubError) -> anyhow::Error {
    anyhow!("failed to {error}").context(ExitCode::Data)
}
