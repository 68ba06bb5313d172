//! Settings of the server.

use std::fs::File;
use std::sync::Arc;
use std::time::Duration;

use crate::reasoning::ReasoningFormat;

/// Settings of the server.
#[derive(Clone, Debug)]
pub struct ServeSettings {
    /// Names of the models in requests and responses, the default first.
    pub model_names: Vec<String>,
    /// Key that requests must have; `None` for no authorization.
    pub api_key: Option<String>,
    /// Maximum number of tokens of prompt and completion; `None` for the context length.
    pub max_model_len: Option<usize>,
    /// Maximum number of concurrent sequences; `None` for automatic.
    pub max_num_seqs: Option<usize>,
    /// Number of tokens in the KV cache; `None` for automatic.
    pub max_total_tokens: Option<usize>,
    /// Maximum number of waiting sequences. A request that exceeds it is refused.
    pub max_queue: usize,
    /// Time of running requests after the first signal.
    pub shutdown_timeout: Duration,
    /// Host names that a server on a loopback address answers, besides its own.
    pub allowed_hosts: Vec<String>,
    /// Origins of web pages that may send requests; `*` is any.
    pub allowed_origins: Vec<String>,
    /// File to which a line of JSON is appended for each request.
    pub request_log: Option<Arc<File>>,
    /// Format of the thinking in chats.
    pub reasoning_format: ReasoningFormat,
}
