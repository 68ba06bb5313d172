//! What a task asks of a model, and what it answers: the border between tasks, which know no tokens, and models, which know no
//! tasks.

/// A question to a model.
#[derive(Clone, Debug, PartialEq)]
pub enum Request {
    /// How likely `continuation` is after `context`.
    Loglikelihood {
        /// What stands before; empty if nothing does.
        context: String,
        /// The text that is scored. The tokenizer decides to which side blanks at its border with the context belong.
        continuation: String,
    },
    /// How likely a whole text is, in windows of the model's context.
    LoglikelihoodRolling {
        /// The text.
        text: String,
    },
    /// What comes after `context`.
    GenerateUntil {
        /// The prompt as it goes to the tokenizer.
        context: String,
        /// How to generate.
        settings: GenerationSettings,
    },
}

impl Request {
    /// What the model is given first: a context, or all of a text.
    pub fn context(&self) -> &str {
        match self {
            Self::Loglikelihood { context, .. } | Self::GenerateUntil { context, .. } => context,
            Self::LoglikelihoodRolling { text } => text,
        }
    }
}

/// How a text is generated.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerationSettings {
    /// The texts that end it; none of them is in the answer. The model's own end of text always ends it.
    pub until: Vec<String>,
    /// The most tokens to generate; `None` leaves it to the model's side (256, or what its command line says).
    pub max_gen_toks: Option<usize>,
    /// Whether to sample; otherwise the likeliest token is taken.
    pub do_sample: bool,
    /// Sampling's temperature.
    pub temperature: f64,
    /// Sample from the likeliest tokens whose probabilities reach this sum; 1 leaves it to the model's side.
    pub top_p: f64,
    /// Sample from so many of the likeliest tokens; 0 is all, `None` leaves it to the model's side.
    pub top_k: Option<usize>,
}

/// The answer to a [`Request`] of the same kind.
#[derive(Clone, Debug, PartialEq)]
pub enum Response {
    /// To [`Request::Loglikelihood`].
    Loglikelihood {
        /// The sum of the tokens' log-probabilities, in nats.
        logprob: f64,
        /// Whether each token was the likeliest.
        is_greedy: bool,
    },
    /// To [`Request::LoglikelihoodRolling`]: the sum of the tokens' log-probabilities, in nats.
    LoglikelihoodRolling(f64),
    /// To [`Request::GenerateUntil`]: the text before the first stop.
    Text(String),
}
