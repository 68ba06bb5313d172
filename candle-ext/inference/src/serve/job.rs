//! Jobs of the model's worker, and the events that it sends back.

use std::sync::Arc;

use tokio::sync::mpsc::UnboundedSender;

use super::api_error::ApiError;
use crate::constraint::TokenConstraint;
use crate::sampler::{LogitBias, SamplingParams};

/// One generation, or the scoring of one prompt.
pub(super) struct GenerationJob {
    /// Index of the model.
    pub(super) model: usize,
    /// Prompt tokens, at least one.
    pub(super) prompt: Arc<[u32]>,
    /// Maximum number of new tokens.
    pub(super) n_max: usize,
    pub(super) sampling: SamplingParams,
    /// Numbers to add to logits.
    pub(super) logit_bias: LogitBias,
    /// Grammar of the text.
    pub(super) constraint: Option<ReplyConstraint>,
    pub(super) seed: [u8; 32],
    /// Stop strings, none empty.
    pub(super) stop: Arc<[String]>,
    /// Tokens that end the generation, those of the model and of stop strings.
    pub(super) stop_ids: Arc<[u32]>,
    /// Tokens of the request that end the generation. They may be tokens of a text.
    pub(super) text_stop_ids: Arc<[u32]>,
    /// Special tokens that are part of the text.
    pub(super) visible: Arc<[u32]>,
    pub(super) logprobs: Option<LogprobOptions>,
    /// Index of the choice in the response.
    pub(super) choice: usize,
    /// Receiver of the events. The generation is cancelled if it is closed.
    pub(super) events: UnboundedSender<(usize, GenerationEvent)>,
}

/// Grammar of a text, and the field of the request that has its schema.
pub(super) struct ReplyConstraint {
    pub(super) field: &'static str,
    pub(super) tokens: TokenConstraint,
}

/// Log-probabilities to return.
#[derive(Clone, Copy, Debug)]
pub(super) struct LogprobOptions {
    /// Number of most probable tokens at each position.
    pub(super) n_top: usize,
    /// Also returns the log-probabilities of the prompt's tokens.
    pub(super) of_prompt: bool,
}

/// Part of the answer to a job.
pub(super) enum GenerationEvent {
    /// Log-probabilities of the prompt's tokens.
    Prompt(Vec<TokenLogprobs>),
    /// A generated token, with the text that is complete now.
    Token { text: String, logprobs: Option<TokenLogprobs> },
    /// End of the generation, with the remaining text.
    End { text: String, reason: GenerationEnd },
    /// Failure of the job.
    Failed(ApiError),
}

/// Reason why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GenerationEnd {
    /// A stop token or stop string.
    Stop,
    /// The maximum number of tokens.
    Length,
}

/// Log-probability of a token, and those of the most probable ones at its position.
#[derive(Clone, Debug)]
pub(super) struct TokenLogprobs {
    pub(super) token: TokenText,
    /// `None` for the first token of a prompt.
    pub(super) logprob: Option<f32>,
    pub(super) top: Vec<(TokenText, f32)>,
}

/// Text of a token in its context.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TokenText {
    /// Text; `bytes:\xf0\x9f` if the token is a part of a character, as in OpenAI's API.
    pub(super) text: String,
    pub(super) bytes: Vec<u8>,
}
