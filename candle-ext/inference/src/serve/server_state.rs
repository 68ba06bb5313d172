//! State of the server that all requests read.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use axum::http::StatusCode;
use candlewick_runtime::exit::ExitCode;
use candlewick_text::render::end_of_turn;
use candlewick_text::template::{ChatTemplate, ToolCallFormat};
use candlewick_text::tokenizer::Tokenizer;
use llguidance::api::TopLevelGrammar;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Semaphore, mpsc, watch};

use super::access_log::AccessLog;
use super::api_error::ApiError;
use super::body::RequestBodyMemory;
use super::fields::shown;
use super::grammar_threads::{GrammarThreads, LazyGrammarCompiler, RequestedGrammar};
use super::job::GenerationJob;
use super::metrics::WorkerGauges;
use super::origin::OriginPolicy;
use super::request_record::RequestReporter;
use super::settings::ServeSettings;
use super::tool_choice::special_tokens;
use super::worker::WorkerLimits;
use crate::answer::batch::BatchLimits;
use crate::lm::Lm;
use crate::reasoning::ReasoningFormat;

/// State of the server.
pub(super) struct ServerState {
    /// The models, at least one. The first is the default.
    pub(super) models: Vec<ServedModel>,
    pub(super) api_key: Option<String>,
    pub(super) max_model_len: usize,
    /// Format of the thinking in chats.
    pub(super) reasoning_format: ReasoningFormat,
    /// Start of the server, in seconds since 1970.
    pub(super) created: u64,
    /// Time of running requests after the first signal.
    pub(super) shutdown_timeout: Duration,
    pub(super) origins: OriginPolicy,
    pub(super) bodies: RequestBodyMemory,
    /// Permit to parse a large body. One thread is left for small ones.
    pub(super) large_parser: Arc<Semaphore>,
    pub(super) grammar_threads: GrammarThreads,
    pub(super) log: AccessLog,
    pub(super) reporter: Arc<RequestReporter>,
    gauges: Arc<WorkerGauges>,
    /// Number of stop signals.
    pub(super) signals: watch::Receiver<usize>,
    /// Queue of the worker. It closes when the HTTP server ends, even if a thread still reads the state.
    queue: mpsc::WeakSender<GenerationJob>,
    max_queue: usize,
}

/// Address of the server, and the channels between its threads.
pub(super) struct ServerEndpoints {
    pub(super) address: SocketAddr,
    /// Jobs of the worker.
    pub(super) queue: mpsc::WeakSender<GenerationJob>,
    /// Number of stop signals.
    pub(super) signals: watch::Receiver<usize>,
    pub(super) gauges: Arc<WorkerGauges>,
}

/// A model, or an adapter on the first one.
pub(super) struct ServedModel {
    /// Name in requests and responses.
    pub(super) name: String,
    /// Name of the base model of an adapter.
    pub(super) parent: Option<String>,
    pub(super) tokenizer: Arc<Tokenizer>,
    pub(super) template: Option<Arc<ChatTemplate>>,
    /// Format of tool calls, if the template renders them as JSON.
    pub(super) tool_calls: Option<Arc<ToolCallFormat>>,
    /// Special tokens of tool calls.
    pub(super) tool_call_tokens: Arc<[u32]>,
    /// Tokens that end a completion.
    pub(super) stop_ids: Arc<[u32]>,
    /// Tokens that end a reply in a chat.
    pub(super) chat_stop_ids: Arc<[u32]>,
    /// Rows of the model's embedding.
    pub(super) n_vocab: usize,
    /// Bytes of the longest token in the vocabulary.
    max_token_bytes: usize,
    /// Compiler of grammars for the tokenizer.
    grammars: Arc<LazyGrammarCompiler>,
}

impl ServedModel {
    fn new(lm: &Lm, name: &str, parent: Option<&str>) -> Self {
        let tokenizer = Arc::clone(lm.tokenizer());
        let n_vocab = lm.engine().model().config().vocab_size();
        let stop_ids: Arc<[u32]> = tokenizer.eos_ids().iter().copied().collect();
        let end_of_turn = lm.template().and_then(|template| end_of_turn(&tokenizer, template));
        // A template that has exceeded a limit fails from then on, so a copy renders the example.
        let tool_calls = lm.template().and_then(|template| template.clone().tool_call_format());
        let tool_call_tokens = tool_calls.as_ref().map(|format| special_tokens(format, &tokenizer)).unwrap_or_default();
        Self {
            tool_calls: tool_calls.map(Arc::new),
            tool_call_tokens: tool_call_tokens.into(),
            name: name.to_owned(),
            parent: parent.map(str::to_owned),
            template: lm.shared_template(),
            chat_stop_ids: stop_ids.iter().copied().chain(end_of_turn).collect(),
            stop_ids,
            max_token_bytes: max_token_bytes(&tokenizer),
            grammars: LazyGrammarCompiler::new(&tokenizer, n_vocab),
            n_vocab,
            tokenizer,
        }
    }
}

impl ServedModel {
    /// Returns the grammar of a reply, which the field `field` of the request has.
    pub(super) fn requested(&self, field: &'static str, grammar: TopLevelGrammar) -> RequestedGrammar {
        RequestedGrammar { field, grammar, compiler: Arc::clone(&self.grammars) }
    }
}

/// Shares the grammar compilers of models with one tokenizer.
fn share_grammars(models: &mut [ServedModel]) {
    for later in 1..models.len() {
        let (earlier, rest) = models.split_at_mut(later);
        let is_equal = |model: &&ServedModel| {
            Arc::ptr_eq(&model.tokenizer, &rest[0].tokenizer) && model.n_vocab == rest[0].n_vocab
        };
        if let Some(model) = earlier.iter().find(is_equal) {
            rest[0].grammars = Arc::clone(&model.grammars);
        }
    }
}

/// Returns the length of the longest token, as the vocabulary spells it.
fn max_token_bytes(tokenizer: &Tokenizer) -> usize {
    let texts = (0..tokenizer.min_embedding_rows()).filter_map(|id| tokenizer.id_to_token(id));
    texts.map(|text| text.len()).max().unwrap_or(1)
}

impl ServerState {
    /// Creates the state of a server.
    pub(super) fn new(
        models: &[Lm],
        settings: &ServeSettings,
        max_model_len: usize,
        endpoints: ServerEndpoints,
    ) -> Self {
        let ServerEndpoints { address, queue, signals, gauges } = endpoints;
        let names = &settings.model_names;
        let model = |(idx, (lm, name)): (usize, (&Lm, &String))| {
            ServedModel::new(lm, name, names.first().filter(|_| idx > 0).map(String::as_str))
        };
        let mut models: Vec<ServedModel> = models.iter().zip(names).enumerate().map(model).collect();
        share_grammars(&mut models);
        let is_first =
            |idx: &usize| !models[..*idx].iter().any(|model| Arc::ptr_eq(&model.grammars, &models[*idx].grammars));
        (0..models.len()).filter(is_first).for_each(|idx| Arc::clone(&models[idx].grammars).build());
        let reporter = Arc::new(RequestReporter::new(settings.request_log.clone()));
        Self {
            models,
            grammar_threads: GrammarThreads::new(Arc::clone(&reporter.log)),
            api_key: settings.api_key.clone(),
            max_model_len,
            reasoning_format: settings.reasoning_format,
            created: seconds_since_1970(),
            shutdown_timeout: settings.shutdown_timeout,
            origins: OriginPolicy {
                is_loopback: address.ip().is_loopback(),
                hosts: settings.allowed_hosts.clone(),
                origins: settings.allowed_origins.clone(),
            },
            bodies: RequestBodyMemory::default(),
            large_parser: Arc::new(Semaphore::new(1)),
            log: AccessLog::default(),
            reporter,
            gauges,
            signals,
            queue,
            max_queue: settings.max_queue,
        }
    }

    /// Returns the metrics in Prometheus's text format.
    pub(super) fn metrics(&self) -> String {
        let n_queued = self.queue.upgrade().map_or(0, |queue| self.max_queue - queue.capacity());
        self.reporter.metrics.text(&self.gauges, n_queued, self.reporter.log.n_lost())
    }

    /// Returns the index of the model with this name; without a name, of the first.
    pub(super) fn find_model(&self, name: Option<&str>) -> Result<usize, ApiError> {
        let Some(name) = name else { return Ok(0) };
        self.models.iter().position(|model| model.name == name).ok_or_else(|| {
            let names: Vec<String> = self.models.iter().map(|model| format!("{:?}", model.name)).collect();
            let name = shown(&name.into());
            let problem = format!("model is {name}, but this server has {}", names.join(", "));
            ApiError::new(StatusCode::NOT_FOUND, problem).with_code("model_not_found")
        })
    }

    /// Returns the number of tokens that a request may generate after a prompt of `n_prompt` tokens.
    pub(super) fn n_max(&self, n_prompt: usize, requested: Option<usize>) -> Result<usize, ApiError> {
        match self.max_model_len.checked_sub(n_prompt) {
            Some(n_left) if n_left > 0 || requested == Some(0) => Ok(requested.unwrap_or(n_left).min(n_left)),
            _ => {
                // Clients recognize vLLM's text.
                let problem = format!(
                    "This model's maximum context length is {} tokens. However, your request has {n_prompt} input tokens. \
                     Reduce the length of the input messages.",
                    self.max_model_len
                );
                Err(ApiError::new(StatusCode::BAD_REQUEST, problem).with_code("context_length_exceeded"))
            }
        }
    }

    /// Fails if a text has more bytes than the tokens of the longest possible prompt. Tokenizing takes memory and time.
    pub(super) fn check_length(&self, model: &ServedModel, text: &str) -> Result<(), ApiError> {
        let max = self.max_model_len.saturating_mul(model.max_token_bytes);
        if text.len() <= max {
            return Ok(());
        }
        let problem = format!(
            "the prompt has {} bytes, at most {max} are possible, because the server's limit for prompt and completion is \
             {} tokens; shorten the prompt",
            text.len(),
            self.max_model_len
        );
        Err(ApiError::new(StatusCode::BAD_REQUEST, problem).with_code("context_length_exceeded"))
    }

    /// Fails if a request has more choices than the queue can have.
    pub(super) fn check_number_of_choices(&self, n_prompts: usize, n: usize) -> Result<(), ApiError> {
        let (n_choices, max) = (n_prompts.saturating_mul(n), self.max_queue);
        if n_choices <= max {
            return Ok(());
        }
        let problem = format!("the request has {n_choices} prompts or choices, at most {max} are possible");
        Err(ApiError::new(StatusCode::BAD_REQUEST, problem))
    }

    /// Appends the jobs of a request to the queue, all or none.
    pub(super) fn submit(&self, jobs: Vec<GenerationJob>) -> Result<(), ApiError> {
        let queue = self.queue.upgrade().ok_or_else(ApiError::stopping)?;
        match queue.try_reserve_many(jobs.len()) {
            Ok(permits) => {
                permits.zip(jobs).for_each(|(permit, job)| permit.send(job));
                Ok(())
            }
            Err(TrySendError::Full(())) => {
                let problem = "too many requests are waiting; send the request again later";
                Err(ApiError::new(StatusCode::TOO_MANY_REQUESTS, problem).with_code("queue_full"))
            }
            Err(TrySendError::Closed(())) => Err(ApiError::stopping()),
        }
    }
}

/// Returns the limits of the worker, and the maximum length of prompt and completion.
pub(super) fn limits(lm: &Lm, settings: &ServeSettings) -> Result<(WorkerLimits, usize)> {
    let BatchLimits { n_tokens, n_texts, pool_rows, .. } = BatchLimits::of_engine(lm.engine());
    let pool_rows = settings.max_total_tokens.unwrap_or(pool_rows);
    let max_model_len = settings.max_model_len.unwrap_or(lm.context().min(pool_rows));
    ensure!(
        max_model_len > 0 && max_model_len <= lm.context(),
        anyhow::anyhow!(
            "failed to start: --max-model-len {max_model_len}: the model's context has {} tokens",
            lm.context()
        )
        .context(ExitCode::Usage)
    );
    ensure!(
        settings.max_total_tokens.is_none_or(|n_tokens| n_tokens >= max_model_len),
        anyhow::anyhow!("failed to start: --max-total-tokens must be at least --max-model-len {max_model_len}")
            .context(ExitCode::Usage)
    );
    let n_sequences = settings.max_num_seqs.unwrap_or(n_texts);
    let most = n_sequences.saturating_mul(max_model_len);
    let pool_rows = pool_rows.clamp(max_model_len, most.max(max_model_len));
    Ok((WorkerLimits { n_sequences, n_tokens, pool_rows }, max_model_len))
}

/// Returns the current time in seconds since 1970.
pub(super) fn seconds_since_1970() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |time| time.as_secs())
}
