//! Settings of the server.

/// Settings of the server.
#[derive(Clone, Debug)]
pub struct ServeSettings {
    /// Name of the model in requests and responses.
    pub model_name: String,
    /// Key that requests must have; `None` for no authorization.
    pub api_key: Option<String>,
    /// Maximum number of tokens of prompt and completion; `None` for the context length.
    pub max_model_len: Option<usize>,
    /// Maximum number of concurrent sequences; `None` for automatic.
    pub max_num_seqs: Option<usize>,
    /// Maximum number of waiting sequences. A request that exceeds it is refused.
    pub max_queue: usize,
}
