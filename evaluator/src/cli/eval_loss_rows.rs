//! Tokenized rows of a data set for `evaluator score`, with warnings about malformed rows.

use anyhow::{Result, anyhow};
use candlewick_text::render::Sample;
use candlewick_text::sample_warning::{SampleWarning, SampleWarnings};
use clap::ValueEnum;

use candlewick_runtime::exit::ExitCode;

/// Findings that are reported as errors or warnings, in the order of the warnings.
const FINDINGS: [SampleWarning; 5] = [
    SampleWarning::ToolDefinitionsNotRendered,
    SampleWarning::ReasoningNotRendered,
    SampleWarning::EmptyResponse,
    SampleWarning::TokenSpansPromptBoundary,
    SampleWarning::UnknownRole,
];

/// Handling of rows with messages or tool calls that the chat template does not render.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum UnrenderedRowHandling {
    /// Fail, and name the first row
    #[default]
    Error,
    /// Skip these rows
    Drop,
    /// Score the rest of these rows
    Mask,
}

/// Tokenized rows of a data set.
#[derive(Debug, Default)]
pub(super) struct EvalLossRows {
    unrendered_rows: UnrenderedRowHandling,
    /// Sequences with targets, each with the location of its row, for messages.
    pub(super) sequences: Vec<(String, Sample)>,
    /// Number of rows with at least one sequence.
    pub(super) n_rows: usize,
    n_read: usize,
    found: [FindingCount; FINDINGS.len()],
    without_targets: FindingCount,
    unrendered: FindingCount,
    /// Warnings about the unrendered parts of these rows.
    unrendered_parts: SampleWarnings,
}

/// Number of rows with a finding, and the location of the first.
#[derive(Clone, Debug, Default)]
struct FindingCount {
    n_rows: usize,
    first: String,
}

impl EvalLossRows {
    pub(super) fn new(unrendered_rows: UnrenderedRowHandling) -> Self {
        Self { unrendered_rows, ..Self::default() }
    }

    /// Adds a row and the sequences that it is split into. Sequences without target tokens are skipped.
    pub(super) fn add(&mut self, place: String, whole: &Sample, sequences: Vec<Sample>) {
        self.n_read += 1;
        let is_dropped = self.unrendered_rows == UnrenderedRowHandling::Drop && whole.sample_warnings.has_unrendered();
        let sequences = if is_dropped { Vec::new() } else { sequences };
        for (finding, found) in FINDINGS.into_iter().zip(&mut self.found) {
            found.count_if(whole.sample_warnings.contains(finding), &place);
        }
        self.unrendered.count_if(whole.sample_warnings.has_unrendered(), &place);
        self.unrendered_parts.extend(whole.sample_warnings);
        self.without_targets.count_if(!has_targets(whole), &place);
        let n_before = self.sequences.len();
        let with_targets = sequences.into_iter().filter(has_targets);
        self.sequences.extend(with_targets.map(|sequence| (place.clone(), sequence)));
        self.n_rows += usize::from(self.sequences.len() > n_before);
    }

    /// Returns an error if rows have messages or tool calls that the chat template does not render, as in training. Rows
    /// that are dropped or masked are no error.
    pub(super) fn refuse_unrendered(&self, template: &str) -> Result<()> {
        let FindingCount { n_rows, first } = &self.unrendered;
        if *n_rows == 0 || self.unrendered_rows != UnrenderedRowHandling::Error {
            return Ok(());
        }
        let what = self.unrendered_parts.describe_unrendered(template);
        let problem = format!(
            "failed to render {n_rows} of {} rows: they {what}, the first at {first}; use a chat template that \
             renders them, correct these rows, or set --unrendered-messages to drop (skips them) or mask (scores their \
             other messages)",
            self.n_read
        );
        Err(anyhow!(problem).context(ExitCode::Data))
    }

    /// Returns one warning for each kind of finding, with its row count and first row.
    pub(super) fn warnings(&self, template: &str) -> Vec<String> {
        let described = FINDINGS.iter().map(|finding| finding.describe(template));
        let found = described.zip(&self.found);
        let handling =
            if self.unrendered_rows == UnrenderedRowHandling::Drop { "are skipped" } else { "are scored without them" };
        let unrendered = format!("{} and {handling}", self.unrendered_parts.describe_unrendered(template));
        let found = found.chain([(unrendered, &self.unrendered)]);
        let all = found.chain([("have no target tokens and are skipped".to_owned(), &self.without_targets)]);
        let warning = |(what, FindingCount { n_rows, first }): (String, &FindingCount)| {
            (*n_rows > 0).then(|| format!("warning: {n_rows} of {} rows {what}, the first at {first}", self.n_read))
        };
        all.filter_map(warning).collect()
    }
}

impl FindingCount {
    fn count_if(&mut self, is_found: bool, place: &str) {
        if is_found && self.n_rows == 0 {
            place.clone_into(&mut self.first);
        }
        self.n_rows += usize::from(is_found);
    }
}

/// Returns true if a token after the first is a target. The first token has no prediction.
fn has_targets(sample: &Sample) -> bool {
    sample.is_target.iter().skip(1).any(|is_target| *is_target)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(is_target: &[bool], finding: Option<SampleWarning>) -> Sample {
        let mut sample = Sample { ids: vec![1; is_target.len()], is_target: is_target.into(), ..Sample::default() };
        if let Some(finding) = finding {
            sample.sample_warnings.insert(finding);
        }
        sample
    }

    #[test]
    fn oddities_of_rows_are_counted_and_the_first_is_named() {
        let mut rows = EvalLossRows::default();
        let all = [
            sample(&[false, true], None),
            sample(&[true, false], Some(SampleWarning::EmptyResponse)),
            sample(&[false, false], Some(SampleWarning::EmptyResponse)),
        ];
        for (i, sample) in all.iter().enumerate() {
            rows.add(format!("a:{i}"), sample, vec![sample.clone()]);
        }
        assert_eq!((rows.n_rows, rows.sequences.len()), (1, 1));
        let warnings = [
            "warning: 2 of 3 rows hold an empty answer, the first at a:1",
            "warning: 2 of 3 rows have no target tokens and are skipped, the first at a:1",
        ];
        assert_eq!(rows.warnings("chat template x"), warnings);
        assert!(rows.refuse_unrendered("chat template x").is_ok());
    }

    #[test]
    fn rows_that_are_not_rendered_are_dropped_or_scored_in_part() {
        for (handling, n_rows, want) in [
            (UnrenderedRowHandling::Drop, 1, "are skipped"),
            (UnrenderedRowHandling::Mask, 2, "are scored without them"),
        ] {
            let mut rows = EvalLossRows::new(handling);
            for finding in [None, Some(SampleWarning::MessageNotRendered)] {
                let whole = sample(&[false, true], finding);
                rows.add("a:7".into(), &whole, vec![whole.clone()]);
            }
            assert_eq!((rows.n_rows, rows.sequences.len()), (n_rows, n_rows));
            assert!(rows.refuse_unrendered("chat template x").is_ok());
            let warnings = rows.warnings("chat template x");
            assert!(
                warnings[0].starts_with("warning: 1 of 2 rows hold messages") && warnings[0].contains(want),
                "{warnings:?}"
            );
        }
    }

    #[test]
    fn messages_and_tool_calls_that_are_not_rendered_are_refused() {
        for (warning, want) in [
            (SampleWarning::ResponseNotRendered, "hold tool calls, or answers of reasoning alone, that"),
            (SampleWarning::MessageNotRendered, "hold messages whose content"),
        ] {
            let mut rows = EvalLossRows::default();
            let whole = sample(&[false, true], Some(warning));
            rows.add("a:7".into(), &whole, vec![whole.clone()]);
            let said = rows.refuse_unrendered("chat template x").map_err(|error| format!("{error:#}")).err();
            let want = format!("they {want} chat template x does not render, the first at a:7");
            assert!(said.as_ref().is_some_and(|said| said.contains(&want)), "{said:?}");
        }
    }
}
