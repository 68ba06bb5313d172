//! Token statistics: the exact counts of tokens read, dropped, truncated, masked and trained on.

use std::fmt;

use candlewick_text::quantity::grouped;
use candlewick_text::sample_warning::{SampleWarning, SampleWarnings};
use serde::{Deserialize, Serialize};

use super::batch::GlobalBatch;
use super::dataset::Dataset;
use super::mixture::SourceCounts;
use super::token_count::TokenCount;

/// The token counts of a run.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct TokenStats {
    /// One pass over the training data.
    pub train: DatasetCounts,
    /// One pass over the evaluation data.
    pub eval: Option<DatasetCounts>,
    /// The training steps of all epochs.
    pub seen: TrainedCounts,
    /// The training steps by source, if there are several sources.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sources: Vec<SourceCounts>,
}

/// The counts of one pass over a data set. In tokens, read = kept + truncated + dropped. In samples,
/// read = kept + dropped. In both, kept = supervised + masked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DatasetCounts {
    /// All rendered samples.
    pub read: TokenCount,
    /// Samples and tokens that are trained on or evaluated.
    pub kept: TokenCount,
    /// Tokens cut off kept samples, and the number of truncated samples.
    pub truncated: TokenCount,
    /// Samples that are left out.
    pub dropped: TokenCount,
    /// Targets, and samples with any.
    pub supervised: TokenCount,
    /// Kept tokens that are no targets, and kept samples without targets.
    pub masked: TokenCount,
    /// Sequences of the kept samples.
    pub sequences: u64,
    /// Dropped samples without targets.
    #[serde(default)]
    pub without_targets: TokenCount,
    /// Samples with an empty answer.
    #[serde(default)]
    pub empty_answers: TokenCount,
    /// Samples with messages or tool calls that the chat template does not render.
    #[serde(default, alias = "unrendered_tool_calls")]
    pub unrendered_messages: TokenCount,
    /// Samples with a target token that spans the boundary of prompt and answer.
    #[serde(default)]
    pub merged_boundaries: TokenCount,
}

/// The counts of training steps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrainedCounts {
    /// Optimizer steps.
    pub steps: u64,
    /// Sequences, and tokens without padding.
    pub read: TokenCount,
    /// Targets.
    pub supervised: u64,
    /// Pad tokens.
    pub padded: u64,
    /// Sequences that `drop_last` dropped at the ends of epochs.
    pub left_over: TokenCount,
}

impl TrainedCounts {
    pub(crate) fn count(&mut self, step: &GlobalBatch) {
        self.steps += 1;
        for batch in &step.micro_batches {
            self.read.samples += batch.samples.len() as u64;
            self.read.tokens += batch.n_tokens as u64;
            self.supervised += batch.n_targets as u64;
            self.padded += batch.n_padding() as u64;
        }
    }
}

impl DatasetCounts {
    /// Counts the samples and tokens of a data set.
    pub(crate) fn of(dataset: &Dataset) -> Self {
        let mut counts = Self { sequences: dataset.len() as u64, ..Self::default() };
        let mut kept = vec![0; dataset.n_samples()];
        let mut supervised = vec![0; dataset.n_samples()];
        for (index, slice) in dataset.slices().iter().enumerate() {
            kept[slice.sample as usize] += slice.len as usize;
            supervised[slice.sample as usize] += dataset.get(index).n_targets();
        }
        for sample in 0..dataset.n_samples() {
            let n_tokens = dataset.sample_length(sample);
            counts.add(n_tokens, kept[sample], supervised[sample]);
            counts.add_warnings(n_tokens, dataset.sample_warnings(sample));
            if kept[sample] == 0 && !dataset.sequence(&dataset.whole(sample)).has_targets() {
                counts.without_targets.add(n_tokens);
            }
        }
        counts
    }

    fn add_warnings(&mut self, n_tokens: usize, sample_warnings: SampleWarnings) {
        for (finding, count) in [
            (SampleWarning::EmptyResponse, &mut self.empty_answers),
            (SampleWarning::TokenSpansPromptBoundary, &mut self.merged_boundaries),
        ] {
            if sample_warnings.contains(finding) {
                count.add(n_tokens);
            }
        }
        if sample_warnings.has_unrendered() {
            self.unrendered_messages.add(n_tokens);
        }
    }

    fn add(&mut self, read: usize, kept: usize, supervised: usize) {
        self.read.add(read);
        if kept == 0 {
            self.dropped.add(read);
            return;
        }
        self.kept.add(kept);
        if kept < read {
            self.truncated.add(read - kept);
        }
        self.supervised.tokens += supervised as u64;
        self.masked.tokens += (kept - supervised) as u64;
        let side = if supervised > 0 { &mut self.supervised } else { &mut self.masked };
        side.samples += 1;
    }
}

impl fmt::Display for TokenStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<24}{:>12}{:>16}", "token statistics", "samples", "tokens")?;
        self.train.write(f, "train")?;
        if let Some(eval) = &self.eval {
            eval.write(f, "eval")?;
        }
        if self.seen != TrainedCounts::default() {
            self.seen.write(f)?;
        }
        Ok(())
    }
}

impl DatasetCounts {
    fn write(&self, f: &mut fmt::Formatter<'_>, name: &str) -> fmt::Result {
        let lines = [
            ("read", self.read),
            ("truncated", self.truncated),
            ("dropped", self.dropped),
            ("kept", self.kept),
            ("supervised", self.supervised),
            ("masked", self.masked),
            ("without targets", self.without_targets),
            ("empty answers", self.empty_answers),
            ("unrendered messages", self.unrendered_messages),
            ("merged prompts", self.merged_boundaries),
        ];
        lines.into_iter().try_for_each(|(what, count)| line(f, name, what, count))
    }
}

impl TrainedCounts {
    fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        line(f, "steps", "read", self.read)?;
        for (what, n_tokens) in [("supervised", self.supervised), ("padded", self.padded)] {
            if n_tokens > 0 {
                writeln!(f, "{:<36}{:>16}", format!("steps {what}"), grouped(n_tokens))?;
            }
        }
        line(f, "steps", "left over", self.left_over)
    }
}

fn line(f: &mut fmt::Formatter<'_>, name: &str, what: &str, count: TokenCount) -> fmt::Result {
    if count == TokenCount::default() {
        return Ok(());
    }
    // Tokens are masked within samples: a count of 0 samples would say that nothing is masked.
    let samples = if count.samples == 0 { String::new() } else { grouped(count.samples) };
    let tokens = grouped(count.tokens);
    writeln!(f, "{:<24}{samples:>12}{tokens:>16}", format!("{name} {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_aligned_columns() {
        let train = DatasetCounts {
            read: TokenCount { samples: 7473, tokens: 1_234_567 },
            kept: TokenCount { samples: 7470, tokens: 1_230_000 },
            truncated: TokenCount { samples: 2, tokens: 67 },
            dropped: TokenCount { samples: 3, tokens: 4500 },
            supervised: TokenCount { samples: 7470, tokens: 800_000 },
            masked: TokenCount { samples: 0, tokens: 430_000 },
            sequences: 7470,
            empty_answers: TokenCount { samples: 3, tokens: 900 },
            ..DatasetCounts::default()
        };
        let seen = TrainedCounts { steps: 1, supervised: 99, padded: 1024, ..TrainedCounts::default() };
        let token_stats = TokenStats { train, eval: None, seen, sources: Vec::new() };
        insta::assert_snapshot!(token_stats, @r"
        token statistics             samples          tokens
        train read                     7,473       1,234,567
        train truncated                    2              67
        train dropped                      3           4,500
        train kept                     7,470       1,230,000
        train supervised               7,470         800,000
        train masked                                 430,000
        train empty answers                3             900
        steps supervised                                  99
        steps padded                                   1,024
        ");
    }

    #[test]
    fn a_sample_cut_into_pieces_is_one_sample() {
        let mut counts = DatasetCounts::default();
        counts.add(10, 8, 3);
        counts.add(4, 0, 0);
        counts.add(5, 5, 0);
        assert_eq!(counts.read, TokenCount { samples: 3, tokens: 19 });
        assert_eq!(counts.truncated, TokenCount { samples: 1, tokens: 2 });
        assert_eq!(counts.dropped, TokenCount { samples: 1, tokens: 4 });
        assert_eq!(counts.masked, TokenCount { samples: 1, tokens: 10 });
    }
}
