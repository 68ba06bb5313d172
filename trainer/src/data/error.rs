//! Why a run cannot be given its data. Each message completes "failed to ..." and names the way out.

use std::path::PathBuf;

/// A data set that cannot be prepared, or teaches nothing.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// A data set cannot be found or read.
    #[error(transparent)]
    Source(#[from] candlewick_text::source::SourceError),
    /// The Hub does not give a data set, or the data set cannot be opened.
    #[error(transparent)]
    Hub(#[from] candlewick_text::hub::HubError),
    /// A data set's rows are not what its format promises.
    #[error(transparent)]
    Format(#[from] candlewick_text::format::FormatError),
    /// A row cannot be rendered.
    #[error("render {place}: {problem}")]
    Row {
        /// File and line.
        place: String,
        /// What is wrong and what to do.
        problem: String,
    },
    /// The plan and the data do not fit.
    #[error("use {name}: {problem}")]
    Plan {
        /// The data set or the key.
        name: String,
        /// What is wrong and what to do.
        problem: String,
    },
    /// The token cache cannot be written or read.
    #[error("keep tokens in {path}: {source}; set `data.cache_dir` to a folder that can be written and has free space", path = path.display())]
    Cache {
        /// The folder.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// `fail_on_missing_cache` is set and there is no entry.
    #[error("find the tokens of {name} in {path}: {why}; run `trainer preprocess` with this recipe, or unset `data.fail_on_missing_cache`", path = path.display())]
    NotCached {
        /// The data set.
        name: String,
        /// The cache folder.
        path: PathBuf,
        /// Which part of the key changed.
        why: String,
    },
    /// Samples are longer than a row may be.
    #[error("{0}")]
    SamplesTooLong(LongSamples),
    /// There is not one token.
    #[error("prepare the {which} data: there are no tokens in it ({why}); check the sources and `data.max_length`")]
    Empty {
        /// `training` or `evaluation`.
        which: &'static str,
        /// What was read and dropped.
        why: String,
    },
    /// Fewer rows than one step takes.
    #[error(
        "fill one step of {needed} rows (micro_batch_size x gradient_accumulation_steps): the data make {rows}; lower them, unset `data.drop_last`, or set `min_iterations`"
    )]
    TooFew {
        /// Rows there are.
        rows: usize,
        /// Rows a step takes.
        needed: usize,
    },
    /// Rows hold tool calls that the chat template does not render.
    #[error(
        "render {n_samples} of {total} {which} samples: {template} does not render their tool calls (or an answer that is all reasoning), the first at {place}. Use a chat template that prints `tool_calls`, or set `data.unrendered_tool_calls` to drop (leave the rows out) or mask (do not learn these turns)"
    )]
    Unrendered {
        /// Samples with such calls.
        n_samples: usize,
        /// All samples.
        total: usize,
        /// `training` or `evaluation`.
        which: &'static str,
        /// The origin of the template.
        template: String,
        /// The first row.
        place: String,
    },
    /// No token is a target.
    #[error(
        "find something to learn: not one of {n_tokens} {which} tokens is a target. The first row is {place}. {fix}"
    )]
    NothingSupervised {
        /// `training` or `evaluation`.
        which: &'static str,
        /// The tokens read.
        n_tokens: u64,
        /// The first row.
        place: String,
        /// The remedy.
        fix: String,
    },
    /// No end of turn is ever a target.
    #[error(
        "find an end of turn to learn: none of {tokens} is ever a target, so the model would never stop. The first row is {place}. {fix}"
    )]
    EndNeverTarget {
        /// The tokens that end a turn.
        tokens: String,
        /// The first row.
        place: String,
        /// The remedy.
        fix: &'static str,
    },
    /// Samples begin with two begin-of-sequence tokens.
    #[error(
        "accept {n_samples} of {total} samples: they begin with {token} twice, first at {place}. The chat template and the data (or the tokenizer's own additions) both put one; take it out of the rows or of the template"
    )]
    DoubledStart {
        /// Samples with the mistake.
        n_samples: usize,
        /// All samples.
        total: usize,
        /// The token.
        token: String,
        /// The first row.
        place: String,
    },
    /// The data or their order are not those that the run began with.
    #[error(
        "resume the data where the run left them: {changed}. Restore what the run began with; or begin a new run, with another \
         output_dir for its checkpoints, or with auto_resume: false"
    )]
    Changed {
        /// What changed, from what to what.
        changed: String,
    },
}

/// The samples that do not fit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LongSamples {
    /// How many are too long.
    pub n_samples: usize,
    /// Out of how many.
    pub total: usize,
    /// The longest length allowed.
    pub max_length: usize,
    /// The three longest: where they stand and how long they are.
    pub longest: Vec<(String, usize)>,
}

impl std::fmt::Display for LongSamples {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { n_samples, total, max_length, longest } = self;
        write!(f, "fit {n_samples} of {total} samples into max_length {max_length}. The longest:")?;
        for (place, length) in longest {
            write!(f, "\n  {place}: {length} tokens")?;
        }
        let longest = longest.first().map_or(0, |(_, length)| *length);
        write!(
            f,
            "\nraise `data.max_length` (to {longest} for all of them), or set `data.truncation` to \
             truncate, drop or split"
        )
    }
}
