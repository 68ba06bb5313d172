//! The settings of answering.

use std::path::PathBuf;

use super::stop::ThinkEnd;

/// The settings of answering.
#[derive(Clone, Debug, PartialEq)]
pub struct BackendSettings {
    /// Tokens of context, if not as many as the model was made for.
    pub max_length: Option<usize>,
    /// Tokens that are generated at most, where the request does not say it.
    pub max_gen_toks: usize,
    /// True puts BOS before texts, false does not; `None` follows the tokenizer.
    pub add_bos: Option<bool>,
    /// Sequences of a forward; `None` finds a good number.
    pub batch_size: Option<usize>,
    /// The most of them, where a good number is found.
    pub max_batch_size: Option<usize>,
    /// The end of the thinking before an answer, if a model thinks.
    pub think_end: Option<ThinkEnd>,
    /// Seeds what is sampled. An answer depends on it, on the request and on how often the request came before.
    pub seed: u64,
    /// The folder that answers are written to as they come, and read from before anything is computed.
    pub cache_folder: Option<PathBuf>,
}

impl Default for BackendSettings {
    fn default() -> Self {
        Self {
            max_length: None,
            max_gen_toks: 256,
            add_bos: None,
            batch_size: None,
            max_batch_size: None,
            think_end: None,
            seed: 1234,
            cache_folder: None,
        }
    }
}
