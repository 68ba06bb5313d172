//! Export of a trained model: Hugging Face folder and GGUF files, compared with the source before they get their name.

mod card;
mod format;
mod run_record;
mod source;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use candle_core::{DType, Device};
use candlewick_inference::logits_check::{LogitsDifference, PromptLogits};
use candlewick_model::checkpoint::{AuxiliaryFiles, CarriedTensors, ExpertTensors, StagingFolder};
use candlewick_model::{FP8_SCALES, GgufExport, MergeReport, SafetensorsExport};
use candlewick_runtime::progress::{ProgressUnit, WorkProgress};
use candlewick_text::render::{GENERATION_CONFIG, generation_config_with_end_of_turn};
use candlewick_text::tokenizer::{GgufVocabulary, Tokenizer, TokenizerError};

use crate::checkpoint::require_space;
use crate::exit::ExitCode;
use crate::failpoint::failpoint;

pub use card::model_card;
pub use format::ExportFormat;
pub use source::ExportSource;

use run_record::RunRecord;

/// Unit of the progress of logits.
const LAYERS: ProgressUnit = ProgressUnit::Count("layers");

/// An export to write.
pub struct Export<'a> {
    /// The model.
    pub source: &'a ExportSource,
    /// Output folder. It must be empty or missing.
    pub output: &'a Path,
    /// Formats to write into the folder.
    pub formats: &'a [ExportFormat],
    /// Dtype of safetensors; `None` for the model's.
    pub dtype: Option<DType>,
    /// Maximum size of a safetensors shard, in bytes.
    pub shard_bytes: u64,
    /// Tensors of the routed experts in safetensors.
    pub expert_tensors: ExpertTensors,
    /// Device that computes the logits; `None` does not compare them.
    pub check_on: Option<Device>,
    /// Text of README.md; `None` writes none.
    pub card: Option<String>,
}

/// Report of one written format.
#[derive(Clone, Debug)]
pub struct FormatReport {
    /// The format.
    pub format: ExportFormat,
    /// File or folder.
    pub path: PathBuf,
    /// Size of the weights, in bytes.
    pub n_bytes: u64,
    /// Report of a safetensors folder.
    pub merge: Option<MergeReport>,
    /// Difference of the logits to the source's; `None` if they are not compared.
    pub check: Option<LogitsDifference>,
}

impl Export<'_> {
    /// Writes all formats and compares values and logits of each with those of the source. The folder appears after that.
    ///
    /// # Errors
    /// If a difference exceeds the tolerance of its format. If it is of the logits, the files are kept in `<output>.failed`.
    pub fn run(&self) -> Result<Vec<FormatReport>> {
        let staging = StagingFolder::begin_new(self.output)?;
        if self.formats.iter().any(|format| format.gguf().is_some()) {
            GgufExport::check(&self.source.model)?;
        }
        require_space(self.output, self.n_bytes())?;
        let files = TokenizerFiles::copy(self.source, staging.folder())?;
        let (reports, problem) = self.write_all(staging.folder(), &files)?;
        // Removes the temporary copies from the folder.
        drop(files);
        if let Some(problem) = problem {
            let failed = staging.keep_as_failed()?;
            return Err(anyhow!("failed to export {problem}; the files are kept in {}", failed.display()));
        }
        if let Some(card) = &self.card {
            let path = staging.folder().join("README.md");
            std::fs::write(&path, card).with_context(|| format!("failed to write {}", path.display()))?;
        }
        failpoint("export_written", 0);
        staging.commit()?;
        Ok(reports)
    }

    /// Writes formats until one is not usable. Returns the reports and the problem of the last.
    fn write_all(&self, folder: &Path, files: &TokenizerFiles) -> Result<(Vec<FormatReport>, Option<String>)> {
        let vocabulary = files.vocabulary(self)?;
        let source_logits = self.check_on.as_ref().map(|device| self.source_logits(files, device)).transpose()?;
        let mut reports = Vec::new();
        for (idx, format) in self.formats.iter().enumerate() {
            let mut report = self.write(*format, folder, files, vocabulary.as_ref())?;
            failpoint("export_format", idx);
            report.check = source_logits.as_ref().map(|logits| self.compare(&report, logits)).transpose()?;
            if let Some(problem) = problem_of(&report) {
                return Ok((reports, Some(format!("{format}: {problem}"))));
            }
            // The path in the folder's final place, without a slash at the end.
            let relative = report.path.strip_prefix(folder).unwrap_or(Path::new(""));
            report.path = self.output.iter().chain(relative).collect();
            reports.push(report);
        }
        Ok((reports, None))
    }

    fn source_logits(&self, files: &TokenizerFiles, device: &Device) -> Result<PromptLogits> {
        let on_unit = progress("compute logits of the source", LAYERS);
        let logits = PromptLogits::of(&self.source.model, files.tokenizer.as_ref(), device, &on_unit);
        logits.context("failed to compute the source's logits")
    }

    /// Returns an upper bound of the weights' size, in bytes.
    fn n_bytes(&self) -> u64 {
        let n_params = self.source.model.n_elements();
        let safetensors = self.dtype.unwrap_or(self.source.model.dtype());
        let bits = self.formats.iter().map(|format| format.bits_per_weight(safetensors));
        let carried = self.source.model.carried().map_or(0, CarriedTensors::n_bytes);
        (bits.sum::<f64>() / 8.0 * n_params as f64) as u64 + carried
    }

    fn write(
        &self,
        format: ExportFormat,
        folder: &Path,
        files: &TokenizerFiles,
        vocabulary: Option<&GgufVocabulary>,
    ) -> Result<FormatReport> {
        let model = &self.source.model;
        let (Some(file_type), Some(vocabulary)) = (format.gguf(), vocabulary) else {
            let copied = [files.folder.path()];
            let scales: Vec<_> = self.source.fp8_scales.iter().map(|text| (FP8_SCALES, text.as_str())).collect();
            let auxiliary_files = AuxiliaryFiles { folders: &copied, chat_template: None, files: &scales };
            let Self { dtype, shard_bytes, expert_tensors, .. } = *self;
            let export = SafetensorsExport { auxiliary_files, dtype, shard_bytes, expert_tensors };
            let merge = export.write(
                model,
                folder,
                &progress("write and compare safetensors", ProgressUnit::Count("tensors")),
            )?;
            let n_bytes = size_of(folder, "safetensors")?;
            return Ok(FormatReport { format, path: folder.to_path_buf(), n_bytes, merge: Some(merge), check: None });
        };
        let name = self.name();
        let path = folder.join(format!("{name}-{file_type}.gguf"));
        GgufExport { name: &name, vocabulary, file_type }.write(
            model,
            &path,
            &progress(&format!("write and compare {format}"), ProgressUnit::Bytes),
        )?;
        let n_bytes = std::fs::metadata(&path).with_context(|| format!("failed to read {}", path.display()))?.len();
        Ok(FormatReport { format, path, n_bytes, merge: None, check: None })
    }

    /// Returns the name of the model: that of the output folder.
    fn name(&self) -> String {
        let name = std::path::absolute(self.output).ok().and_then(|path| path.file_name().map(ToOwned::to_owned));
        name.map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
    }

    fn compare(&self, report: &FormatReport, logits: &PromptLogits) -> Result<LogitsDifference> {
        let device = self.check_on.as_ref().unwrap_or(&Device::Cpu);
        let on_unit = progress(&format!("compute logits of {}", report.format), LAYERS);
        let compared = match report.format.gguf() {
            None => logits.compare_folder(&report.path, device, &on_unit),
            Some(_) => logits.compare_gguf(&report.path, device, &on_unit),
        };
        compared.with_context(|| format!("failed to compute the logits of {}", report.path.display()))
    }
}

/// Shows the progress of a work.
pub fn progress(what: &str, unit: ProgressUnit) -> impl Fn(usize, usize) + use<> {
    let progress = WorkProgress::start(what, unit, 0);
    move |n_done, n_all| progress.set(n_done, n_all)
}

/// Returns the reason why a written format is not usable.
fn problem_of(report: &FormatReport) -> Option<String> {
    let difference = report.check?;
    if !difference.largest.is_finite() {
        return Some("its logits are not finite".to_owned());
    }
    let tolerance = report.format.tolerance(report.merge.map(|merge| merge.dtype));
    let routing = difference.routing.map_or(0.0, |routing| routing.relative);
    let what = match (difference.relative <= tolerance, routing <= tolerance) {
        (true, true) => return None,
        (false, _) => "its logits differ",
        (true, false) => "its routers' selections differ",
    };
    Some(format!(
        "{what} from the source's by more than rounding does: {difference}; the tolerance of the relative norm is {tolerance}"
    ))
}

/// The tokenizer and generation files of the source, with the run's chat template.
struct TokenizerFiles {
    folder: tempfile::TempDir,
    /// `None` if the source has no tokenizer.json.
    tokenizer: Option<Tokenizer>,
}

impl TokenizerFiles {
    /// Copies the files into a temporary folder in `parent`. A container may have no `/tmp`.
    fn copy(source: &ExportSource, parent: &Path) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix(".tokenizer-").tempdir_in(parent);
        let folder = folder.with_context(|| format!("failed to create a temporary folder in {}", parent.display()))?;
        let folders: Vec<&Path> = source.model.folders().iter().map(PathBuf::as_path).collect();
        let files = AuxiliaryFiles { folders: &folders, chat_template: source.chat_template.as_deref(), files: &[] };
        files.copy_into(folder.path())?;
        let origin = folders.iter().find(|folder| folder.join("tokenizer.json").is_file());
        let tokenizer = origin.map(|origin| read_copy(folder.path(), origin)).transpose()?;
        let is_of_chats = source.run.as_ref().is_some_and(RunRecord::trained_on_chats);
        if let Some(tokenizer) = tokenizer.as_ref().filter(|_| is_of_chats) {
            add_end_of_turn(tokenizer, folder.path())?;
        }
        Ok(Self { folder, tokenizer })
    }

    /// Returns the vocabulary for GGUF files; `None` if no format needs one.
    fn vocabulary(&self, export: &Export) -> Result<Option<GgufVocabulary>> {
        if export.formats.iter().all(|format| format.gguf().is_none()) {
            return Ok(None);
        }
        let Some(tokenizer) = &self.tokenizer else {
            let problem = "failed to export GGUF: the model has no tokenizer.json; put one into its folder, or export safetensors";
            return Err(anyhow!(problem).context(ExitCode::Data));
        };
        Ok(Some(tokenizer.gguf_vocabulary(export.source.model.config().vocab_size())?))
    }
}

/// Adds the end of turn of the chat template to generation_config.json of `folder`.
fn add_end_of_turn(tokenizer: &Tokenizer, folder: &Path) -> Result<()> {
    let usable = |error: TokenizerError| anyhow!("failed to {error}");
    let Some(template) = tokenizer.chat_template(None).map_err(usable)? else { return Ok(()) };
    let config = generation_config_with_end_of_turn(tokenizer, &template, Some(folder)).map_err(usable)?;
    let path = folder.join(GENERATION_CONFIG);
    let written = config.map_or(Ok(()), |text| std::fs::write(&path, text));
    written.with_context(|| format!("failed to write {}", path.display()))
}

/// Reads the tokenizer in `copy`. Errors name the folder that the copy was made of.
fn read_copy(copy: &Path, origin: &Path) -> Result<Tokenizer> {
    let read = Tokenizer::from_directory(copy);
    let read = read.map_err(|error| Tokenizer::from_directory(origin).err().unwrap_or(error))?;
    Ok(read.with_eos_ids_from(origin)?.with_directory(origin.to_path_buf()))
}

/// Returns the total size of a folder's files with this extension, in bytes.
fn size_of(folder: &Path, extension: &str) -> Result<u64> {
    let mut n_bytes = 0;
    for entry in std::fs::read_dir(folder).with_context(|| format!("failed to read {}", folder.display()))? {
        let path = entry?.path();
        if path.extension().is_some_and(|own| own == extension) {
            n_bytes += std::fs::metadata(&path)?.len();
        }
    }
    Ok(n_bytes)
}

#[cfg(test)]
mod tests {
    use candlewick_inference::logits_check::RoutingDifference;

    use super::*;

    /// Checks that a relative norm is accepted, or refused with a text that names both numbers.
    #[track_caller]
    fn check(format: ExportFormat, relative: f64, is_accepted: bool) {
        let largest = if relative.is_nan() { f64::NAN } else { 3.0 };
        let difference = LogitsDifference { n_positions: 9, n_same_top: 4, largest, relative, routing: None };
        let problem = problem(format, difference);
        assert_eq!(problem.is_none(), is_accepted, "{problem:?}");
        let Some(problem) = problem else { return };
        let all = ["4 of 9 positions", &format.tolerance(None).to_string()];
        let parts = if relative.is_finite() { all.as_slice() } else { &["are not finite"] };
        for part in parts {
            assert!(problem.contains(part), "{part} is not in {problem}");
        }
    }

    fn problem(format: ExportFormat, difference: LogitsDifference) -> Option<String> {
        problem_of(&FormatReport { format, path: PathBuf::new(), n_bytes: 0, merge: None, check: Some(difference) })
    }

    #[test]
    fn logits_that_differ_by_more_than_the_tolerance_or_are_not_numbers_are_refused() {
        check(ExportFormat::GgufF16, 2e-3, true);
        check(ExportFormat::GgufF16, 2e-2, false);
        check(ExportFormat::GgufQ4KM, 0.25, true);
        for format in [ExportFormat::GgufQ8_0, ExportFormat::GgufQ4KM, ExportFormat::Safetensors] {
            check(format, 1.0, false);
            check(format, f64::NAN, false);
        }
    }

    #[test]
    fn routers_may_select_other_experts_near_ties_alone() {
        for (relative, is_accepted) in [(2e-3, true), (2e-2, false)] {
            let routing = Some(RoutingDifference { n_selections: 80, n_other: 7, relative });
            let same = LogitsDifference { n_positions: 9, n_same_top: 9, largest: 0.0, relative: 0.0, routing };
            let problem = problem(ExportFormat::GgufF16, same);
            assert_eq!(problem.is_none(), is_accepted, "{problem:?}");
            assert!(problem.is_none_or(|problem| problem.contains("other experts in 7 of 80 selections")));
        }
    }
}
