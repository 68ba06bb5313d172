//! Requests of lm-eval tasks, and responses of models.

/// A request to a model, as lm-eval's `Instance`.
#[derive(Clone, Debug, PartialEq)]
pub enum Request {
    /// Log-likelihood of `continuation` given `context`.
    Loglikelihood {
        /// Context; may be empty.
        context: String,
        /// Continuation to score. The tokenizer decides where whitespace at the border belongs.
        continuation: String,
    },
    /// Log-likelihood of a whole text, in rolling windows of the context length.
    LoglikelihoodRolling {
        /// Text to score.
        text: String,
    },
    /// Generation after `context`, until a stop string.
    GenerateUntil {
        /// Prompt, after the chat template.
        context: String,
        /// Generation settings.
        settings: GenerationSettings,
    },
}

impl Request {
    /// Returns the context, or the whole text of a rolling request.
    pub fn context(&self) -> &str {
        match self {
            Self::Loglikelihood { context, .. } | Self::GenerateUntil { context, .. } => context,
            Self::LoglikelihoodRolling { text } => text,
        }
    }
}

/// Generation settings of a request (lm-eval's `generation_kwargs`).
#[derive(Clone, Debug, PartialEq)]
pub struct GenerationSettings {
    /// Stop strings, which the response excludes. EOS always ends the generation.
    pub until: Vec<String>,
    /// Maximum number of new tokens; `None` for the backend's default (256, unless the command line changes it).
    pub max_gen_toks: Option<usize>,
    /// True to sample; false for greedy decoding.
    pub do_sample: bool,
    /// Sampling temperature.
    pub temperature: f64,
    /// Nucleus sampling; 1 means the model's default.
    pub top_p: f64,
    /// Number of most probable tokens to sample from; 0 for all, `None` for the model's default.
    pub top_k: Option<usize>,
}

/// Response to a [`Request`] of the same kind.
#[derive(Clone, Debug, PartialEq)]
pub enum Response {
    /// Response to [`Request::Loglikelihood`].
    Loglikelihood {
        /// Sum of the tokens' log-probabilities, in nats.
        logprob: f64,
        /// True if greedy decoding would generate the continuation.
        is_greedy: bool,
    },
    /// Response to [`Request::LoglikelihoodRolling`]: the sum of the tokens' log-probabilities, in nats.
    LoglikelihoodRolling(f64),
    /// Response to [`Request::GenerateUntil`]: the text before the first stop string.
    Text(String),
}
