//! Warnings about rows that the chat template renders incompletely or unexpectedly.

use std::fmt::Display;

use candlewick_text::format::RoleCounts;
use candlewick_text::sample_warning::{SampleWarning, SampleWarnings};

use super::DataError;
use super::dataset::Dataset;
use super::plan::{DataPlan, TrainedRole, UnrenderedMessages};
use super::token_stats::DatasetCounts;

/// The most rows that are read to count roles.
const ROWS_READ: usize = 1000;

/// A data set and the context of its warnings.
pub(crate) struct SampleWarningReport<'a> {
    pub(crate) dataset: &'a Dataset,
    /// `training` or `evaluation`.
    pub(crate) which: &'static str,
    pub(crate) plan: &'a DataPlan,
    /// The origin of the chat template.
    pub(crate) template: &'a str,
}

impl SampleWarningReport<'_> {
    /// Refuses rows with messages or tool calls that are not rendered, unless the plan drops or masks them.
    pub(crate) fn refuse_unrendered(&self) -> Result<(), DataError> {
        let is_unrendered = |sample: &usize| self.dataset.sample_warnings(*sample).has_unrendered();
        let found: Vec<usize> = (0..self.dataset.n_samples()).filter(is_unrendered).collect();
        let Some(&first) = found.first().filter(|_| self.plan.unrendered_messages == UnrenderedMessages::Error) else {
            return Ok(());
        };
        let mut sample_warnings = SampleWarnings::default();
        found.iter().for_each(|sample| sample_warnings.extend(self.dataset.sample_warnings(*sample)));
        Err(DataError::Unrendered {
            n_samples: found.len(),
            total: self.dataset.n_samples(),
            which: self.which,
            what: sample_warnings.describe_unrendered(self.template),
            place: self.dataset.locate_sample(first),
        })
    }

    /// Returns each warning once, with the number of samples and the first row.
    pub(crate) fn warnings(&self, counts: &DatasetCounts) -> Vec<String> {
        let unrendered_advice = match self.plan.unrendered_messages {
            UnrenderedMessages::Drop => "these rows are dropped",
            _ => "these turns are masked in the loss",
        };
        let empty_advice = match self.plan.train_on_empty_answers {
            true => "the end of these turns is trained on",
            false => "these turns are masked in the loss; `data.train_on_empty_answers: true` trains on them",
        };
        let warnings = [
            (SampleWarning::ResponseNotRendered, unrendered_advice),
            (SampleWarning::MessageNotRendered, unrendered_advice),
            (SampleWarning::ToolDefinitionsNotRendered, "use a chat template that renders `tools`"),
            (
                SampleWarning::ReasoningNotRendered,
                "only the rest of the answer is trained on; use a chat template that renders `reasoning_content`",
            ),
            (SampleWarning::EmptyResponse, empty_advice),
            (
                SampleWarning::TokenSpansPromptBoundary,
                "generation never produces that token; begin answers without white space",
            ),
        ];
        let warnings = warnings.into_iter().filter_map(|(finding, advice)| self.warning(finding, advice));
        warnings.chain(self.without_targets(counts)).chain(self.unknown_roles()).collect()
    }

    fn warning(&self, finding: SampleWarning, advice: impl Display) -> Option<String> {
        let what = finding.describe(self.template);
        let mut found = self.samples(finding);
        let first = found.next()?;
        let n_found = 1 + found.count();
        let (total, which, place) = (self.dataset.n_samples(), self.which, self.dataset.locate_sample(first));
        Some(format!("warning: {n_found} of {total} {which} samples {what}, the first at {place}: {advice}"))
    }

    fn without_targets(&self, counts: &DatasetCounts) -> Option<String> {
        // The search for the first sample reads all tokens up to it, so it runs only if there is one.
        if counts.without_targets.samples == 0 {
            return None;
        }
        let has_none = |sample: &usize| !self.dataset.sequence(&self.dataset.whole(*sample)).has_targets();
        let first = (0..self.dataset.n_samples()).find(has_none)?;
        let (n_found, total) = (counts.without_targets.samples, counts.read.samples);
        let (which, place) = (self.which, self.dataset.locate_sample(first));
        Some(format!(
            "warning: {n_found} of {total} {which} samples have no targets, the first at {place}: they are dropped"
        ))
    }

    fn unknown_roles(&self) -> Option<String> {
        let roles = count_roles(self.dataset, self.samples(SampleWarning::UnknownRole));
        let mapping = roles.mapping().map(|mapping| format!("; to change that, write {mapping}")).unwrap_or_default();
        let trained = TrainedRole::list(&self.plan.roles_to_train);
        let advice = format!("only {trained} turns are trained on (roles: {roles}){mapping}");
        self.warning(SampleWarning::UnknownRole, advice)
    }

    fn samples(&self, finding: SampleWarning) -> impl Iterator<Item = usize> + '_ {
        (0..self.dataset.n_samples()).filter(move |sample| self.dataset.sample_warnings(*sample).contains(finding))
    }
}

/// Counts the roles in the rows of the first samples.
pub(crate) fn count_roles(dataset: &Dataset, samples: impl Iterator<Item = usize>) -> RoleCounts {
    let mut roles = RoleCounts::default();
    for sample in samples.take(ROWS_READ) {
        // The row was readable at rendering. If its file is gone since, its roles are not counted.
        if let Ok(row) = dataset.row_of_sample(sample) {
            roles.count(&row);
        }
    }
    roles
}
