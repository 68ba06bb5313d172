//! Errors of the data pipeline. Each message completes "failed to ..." and names a remedy.

use std::path::PathBuf;

/// A data set that cannot be prepared, or that has no targets.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// A data set cannot be found or read.
    #[error(transparent)]
    Source(#[from] candlewick_text::source::SourceError),
    /// A data set cannot be downloaded from the Hub, or cannot be opened.
    #[error(transparent)]
    Hub(#[from] candlewick_text::hub::HubError),
    /// A data set's rows do not have the expected format.
    #[error(transparent)]
    Format(#[from] candlewick_text::format::FormatError),
    /// A Snowflake query fails.
    #[error(transparent)]
    Snowflake(#[from] candlewick_text::snowflake::SnowflakeError),
    /// A row cannot be rendered.
    #[error("render {place}: {problem}")]
    Row {
        /// File and line.
        place: String,
        /// The problem and the remedy.
        problem: String,
    },
    /// The plan contradicts the data.
    #[error("use {name}: {problem}")]
    Plan {
        /// The data set or the key.
        name: String,
        /// The problem and the remedy.
        problem: String,
    },
    /// The token cache cannot be written or read.
    #[error("cache tokens in {path}: {source}; set `data.cache_dir` to a writable folder with free space", path = path.display())]
    Cache {
        /// The folder.
        path: PathBuf,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// A signal has stopped the preparation.
    #[error("prepare the data: stopped by a signal; {kept}. The same command continues")]
    Stopped {
        /// The finished work.
        kept: String,
    },
    /// `fail_on_missing_cache` is set and the cache has no entry.
    #[error("find the tokens of {name} in {path}: {why}; run `trainer preprocess` with this recipe, or unset `data.fail_on_missing_cache`", path = path.display())]
    NotCached {
        /// The data set.
        name: String,
        /// The cache folder.
        path: PathBuf,
        /// The changed parts of the cache key.
        why: String,
    },
    /// Samples are longer than `max_length`.
    #[error("{0}")]
    SamplesTooLong(LongSamples),
    /// The data have no tokens.
    #[error("prepare the {which} data: no tokens are left ({why}); check the sources and `data.max_length`")]
    Empty {
        /// `training` or `evaluation`.
        which: &'static str,
        /// The numbers of samples read and dropped.
        why: String,
    },
    /// The data have fewer rows than one step.
    #[error(
        "fill one step of {needed} rows (micro_batch_size x gradient_accumulation_steps x data ranks): the data have {rows} rows; lower these sizes, unset `data.drop_last`, or set `min_iterations`"
    )]
    TooFew {
        /// The number of rows.
        rows: usize,
        /// The number of rows in a step.
        needed: usize,
    },
    /// Rows hold messages or tool calls that the chat template does not render.
    #[error(
        "render {n_samples} of {total} {which} samples: they {what}, the first at {place}. Use a chat template that renders them, correct the rows, or set `data.unrendered_messages` to drop (drops the rows) or mask (masks these turns in the loss)"
    )]
    Unrendered {
        /// The number of such samples.
        n_samples: usize,
        /// The number of all samples.
        total: usize,
        /// `training` or `evaluation`.
        which: &'static str,
        /// The unrendered parts, and the template.
        what: String,
        /// The first row.
        place: String,
    },
    /// No token is a target.
    #[error("find a target: none of {n_tokens} {which} tokens is a target. The first row is {place}. {fix}")]
    NothingSupervised {
        /// `training` or `evaluation`.
        which: &'static str,
        /// The number of tokens read.
        n_tokens: u64,
        /// The first row.
        place: String,
        /// The remedy.
        fix: String,
    },
    /// No end-of-turn token is a target.
    #[error(
        "find an end-of-turn target: none of {tokens} is ever a target, so the model would not learn to stop. The first row is {place}. {fix}"
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
    #[error("accept {n_samples} of {total} samples: they begin with {token} twice, the first at {place}. {fix}")]
    DoubledStart {
        /// The number of these samples.
        n_samples: usize,
        /// The number of all samples.
        total: usize,
        /// The token.
        token: String,
        /// The first row.
        place: String,
        /// The remedy.
        fix: &'static str,
    },
    /// The data or their order changed since the run started.
    #[error(
        "resume the data: {changed}. Restore the values of the original run, or start a new run with another output_dir"
    )]
    Changed {
        /// The changed values, old and new.
        changed: String,
    },
}

/// The samples that are longer than `max_length`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LongSamples {
    /// The number of samples that are too long.
    pub n_samples: usize,
    /// The number of all samples.
    pub total: usize,
    /// The maximum length in tokens.
    pub max_length: usize,
    /// The three longest samples: file and row, and length in tokens.
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
            "\nraise `data.max_length` ({longest} fits all of them), or set `data.truncation` to \
             truncate, drop or split"
        )
    }
}
