//! Settings of batched request processing.

use std::path::PathBuf;

use super::stop::ThinkEnd;

/// Settings of batched request processing.
#[derive(Clone, Debug, PartialEq)]
pub struct BackendSettings {
    /// Context length in tokens; `None` for the model's.
    pub max_length: Option<usize>,
    /// Maximum number of new tokens, if the request has none.
    pub max_gen_toks: usize,
    /// True prepends BOS to texts, false does not; `None` for the tokenizer's setting.
    pub add_bos: Option<bool>,
    /// Sequences per forward; `None` for automatic.
    pub batch_size: Option<usize>,
    /// Maximum of the automatic batch size.
    pub max_batch_size: Option<usize>,
    /// End of a reasoning model's thinking, which responses exclude.
    pub think_end: Option<ThinkEnd>,
    /// Sampling seed. A response depends on it, on the request, and on how often the request occurred before.
    pub seed: u64,
    /// Folder of the response cache; `None` for no cache.
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
