//! Batched processing of lm-eval requests, in which shared prefixes are computed once.
//!
//! [`encode`] tokenizes requests, [`rolling`] truncates and splits them. [`prefix_tree`] finds shared prefixes;
//! [`score`] and [`generation`] run them. [`response_cache`] keeps responses between evaluations.

mod assignment;
pub mod batch;
pub mod encode;
pub mod generation;
pub mod identity;
mod lockstep;
mod plan;
pub mod prefix_tree;
pub mod response_cache;
pub mod rolling;
pub mod sample;
pub mod score;
mod settings;
pub mod stop;

use std::collections::HashMap;

use anyhow::{Context, Result, anyhow};
use candlewick_comm::exchange_bytes;
use serde::{Deserialize, Serialize};

use crate::lm::{Lm, LmHandle};
use crate::parallel_config::InferenceGroup;
use crate::request::{Request, Response};
use assignment::assign_to_rank;
use batch::BatchLimits;
use encode::RequestEncoder;
pub use encode::UnscorableRequests;
use generation::GenerationPlan;
use lockstep::Lockstep;
pub use lockstep::RequestsInterrupted;
use plan::{RequestPlan, TokenizedRequests};
use response_cache::{ResponseCache, ResponseJson};
use sample::SamplingDefaults;
use score::{ScoringPlan, SequenceScore};
pub use settings::BackendSettings;

/// Version of the response cache. Increment it with every change that alters responses.
const FORMAT: u32 = 4;

/// A source of responses to requests, as lm-eval's `LM`.
pub trait LmBackend {
    /// Returns the responses in the order of `requests`. Collective: all ranks pass the same requests and get all
    /// responses.
    fn answer(&mut self, requests: &[Request]) -> Result<Vec<RequestOutput>>;
}

/// A response, with the size of its request.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestOutput {
    /// Response.
    pub response: Response,
    /// Tokens of the request before truncation.
    pub n_tokens: usize,
    /// Tokens truncated from the left to fit the context length.
    pub n_truncated: usize,
}

/// Backend that runs requests on an engine, over all ranks of an [`InferenceGroup`].
pub struct EngineBackend<'a> {
    handle: LmHandle<'a>,
    encoder: RequestEncoder<'a>,
    defaults: SamplingDefaults,
    settings: BackendSettings,
    limits: BatchLimits,
    group: InferenceGroup,
    /// Model identity; empty without a response cache.
    identity: String,
    on_progress: Box<dyn FnMut(RequestProgress) + 'a>,
    asked_to_stop: Option<Box<dyn Fn() -> bool + 'a>>,
}

/// Progress of this rank's share of the requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestProgress {
    /// Completed requests.
    pub n_done: usize,
    /// All requests of this rank.
    pub n_all: usize,
}

impl<'a> EngineBackend<'a> {
    /// Creates a backend. Collective: all ranks of `group` must call it.
    pub fn new(lm: &'a Lm, settings: BackendSettings, group: InferenceGroup) -> Result<Self> {
        let cache_folder = settings.cache_folder.clone();
        let mut answers = Self::for_training(lm.handle(), settings, group)?;
        if cache_folder.is_some() {
            answers.identity = answers.identify(lm)?;
            answers.settings.cache_folder = cache_folder;
        }
        Ok(answers)
    }

    /// Creates a backend for a model in training, without a response cache.
    pub fn for_training(handle: LmHandle<'a>, settings: BackendSettings, group: InferenceGroup) -> Result<Self> {
        let LmHandle { engine, tokenizer, generation_config } = handle;
        let limits = match settings.batch_size {
            Some(n) => BatchLimits::sequences(n),
            None => BatchLimits::of_engine(engine).at_most(settings.max_batch_size),
        };
        Ok(Self {
            handle,
            encoder: RequestEncoder::new(tokenizer, settings.add_bos),
            defaults: generation_config.map(SamplingDefaults::read).transpose()?.unwrap_or_default(),
            settings: BackendSettings { cache_folder: None, ..settings },
            limits,
            group,
            identity: String::new(),
            on_progress: Box::new(|_| {}),
            asked_to_stop: None,
        })
    }

    /// Sets a callback for progress.
    #[must_use]
    pub fn with_progress(self, on_progress: impl FnMut(RequestProgress) + 'a) -> Self {
        Self { on_progress: Box::new(on_progress), ..self }
    }

    /// Sets a callback that requests a stop, polled before each forward. If it returns true, this rank and those that share
    /// experts or a model replica with it end with [`RequestsInterrupted`]. Set it on all ranks or on none.
    #[must_use]
    pub fn with_stop(self, asked_to_stop: impl Fn() -> bool + 'a) -> Self {
        Self { asked_to_stop: Some(Box::new(asked_to_stop)), ..self }
    }

    /// Returns the context length, in tokens.
    pub fn max_length(&self) -> usize {
        self.settings.max_length.unwrap_or(self.handle.engine.model().config().max_positions())
    }

    /// Hashes the model on rank 0 and broadcasts the result.
    fn identify(&self, lm: &Lm) -> Result<String> {
        let own = match self.group.world.rank() {
            0 => {
                let BackendSettings { add_bos, think_end, .. } = &self.settings;
                let (dtype, attention, max_length) = (lm.dtype(), lm.attention().implementation, self.max_length());
                let quantization = if lm.multiplies_in_fp8() { " fp8" } else { "" };
                let settings =
                    format!("{FORMAT} {dtype:?}{quantization} {attention:?} {max_length} {add_bos:?} {think_end:?}");
                self.group.alone(|| identity::identity(lm.folders(), &settings))?
            }
            _ => String::new(),
        };
        let of_first = exchange_bytes(&*self.group.world, own.as_bytes())?.into_iter().next().unwrap_or_default();
        Ok(String::from_utf8(of_first)?)
    }
}

impl LmBackend for EngineBackend<'_> {
    fn answer(&mut self, requests: &[Request]) -> Result<Vec<RequestOutput>> {
        let max_length = self.max_length();
        let plan = self.group.alone(|| {
            RequestPlan::new(requests, &self.encoder, &self.settings, self.defaults, max_length, &self.identity)
        })?;
        let mut found = self.known(&plan)?;
        found.extend(plan.empty_text_responses());
        let group = self.group.clone();
        let computed = match group.together(|| self.compute(&plan, &found)) {
            Err(error) if error.is::<RequestsInterrupted>() => None,
            computed => Some(computed?),
        };
        let own = if self.group.reports { computed } else { computed.map(|_| Vec::new()) };
        for answers in exchange_bytes(&*self.group.world, &serde_json::to_vec(&own)?)? {
            let answers: Option<Vec<IndexedResponse>> = serde_json::from_slice(&answers)?;
            found.extend(answers.ok_or(RequestsInterrupted)?.into_iter().map(IndexedResponse::unpack));
        }
        plan.places
            .iter()
            .map(|question| {
                let response = found
                    .get(question)
                    .cloned()
                    .context("failed to answer: no rank returned a response to a request")?;
                let (n_tokens, n_truncated) = plan.questions[*question].size;
                Ok(RequestOutput { response, n_tokens, n_truncated })
            })
            .collect()
    }
}

/// A response with the index of its unique request.
#[derive(Serialize, Deserialize)]
struct IndexedResponse(usize, ResponseJson);

impl IndexedResponse {
    fn unpack(self) -> (usize, Response) {
        (self.0, self.1.into())
    }
}

impl EngineBackend<'_> {
    /// Returns cached responses, read by rank 0 and broadcast.
    fn known(&self, plan: &RequestPlan) -> Result<HashMap<usize, Response>> {
        let Some(folder) = &self.settings.cache_folder else { return Ok(HashMap::new()) };
        let mut own = Vec::new();
        if self.group.world.rank() == 0 {
            let known = self.group.alone(|| response_cache::read(folder, &self.identity))?;
            let questions = plan.questions.iter().enumerate();
            let found =
                questions.filter_map(|(i, question)| Some(IndexedResponse(i, known.get(&question.key)?.into())));
            own.extend(found);
        }
        let all = exchange_bytes(&*self.group.world, &serde_json::to_vec(&own)?)?;
        let of_first = all.first().ok_or_else(|| anyhow!("failed to receive the cached responses of rank 0"))?;
        let known: Vec<IndexedResponse> = serde_json::from_slice(of_first)?;
        Ok(known.into_iter().map(IndexedResponse::unpack).collect())
    }

    /// Runs this rank's share of the requests that are not cached, and appends responses to the cache.
    fn compute(&mut self, plan: &RequestPlan, known: &HashMap<usize, Response>) -> Result<Vec<IndexedResponse>> {
        let LmHandle { engine, tokenizer, .. } = self.handle;
        let TokenizedRequests { scored, owners, prompts, prompt_owners } = &plan.work;
        let model = engine.model();
        let (scoring, generation) = (ScoringPlan::new(scored, model), GenerationPlan::new(prompts, model));
        let open = |question: &usize| !known.contains_key(question);
        let own_scored = assign_to_rank(&*self.group.data_parallel, scoring.order(), &scoring.costs(), owners, open);
        let own_prompts =
            assign_to_rank(&*self.group.data_parallel, generation.order(), &generation.costs(), prompt_owners, open);
        let folder = self.settings.cache_folder.as_ref().filter(|_| self.group.reports);
        let log = folder
            .map(|folder| ResponseCache::open(folder, &self.identity, self.group.data_parallel.rank()))
            .transpose()?;
        let n_all = own_prompts.len() + plan.n_requests(&own_scored);
        let asked_to_stop = self.asked_to_stop.as_ref().map(|asked| &**asked as &dyn Fn() -> bool);
        let lockstep = Lockstep::new(&self.group, asked_to_stop);
        let go_on = || lockstep.before_forward();
        (self.on_progress)(RequestProgress { n_done: 0, n_all });
        let mut sink = ResponseSink { plan, log, done: Vec::new(), n_all, on_progress: &mut self.on_progress };
        let mut scores: HashMap<usize, Vec<(usize, SequenceScore)>> = HashMap::new();
        scoring.run(engine, &self.limits, &own_scored, go_on, |finished| {
            for (item, score) in finished {
                let question = owners[item];
                let of_question = scores.entry(question).or_default();
                of_question.push((item, score));
                if of_question.len() == plan.questions[question].n_scored {
                    sink.take(
                        question,
                        plan.response_from_scores(question, scores.remove(&question).unwrap_or_default()),
                    )?;
                }
            }
            sink.write()
        })?;
        generation.run(engine, tokenizer, &self.limits, &own_prompts, go_on, |prompt, text| {
            sink.take(prompt_owners[prompt], Response::Text(text))?;
            sink.write()
        })?;
        lockstep.finish(engine)?;
        Ok(sink.done)
    }
}

/// Collector of responses.
struct ResponseSink<'d> {
    plan: &'d RequestPlan,
    log: Option<ResponseCache>,
    done: Vec<IndexedResponse>,
    n_all: usize,
    on_progress: &'d mut dyn FnMut(RequestProgress),
}

impl ResponseSink<'_> {
    fn take(&mut self, question: usize, response: Response) -> Result<()> {
        if let Some(log) = &mut self.log {
            log.add(&self.plan.questions[question].key, &response)?;
        }
        self.done.push(IndexedResponse(question, ResponseJson::from(&response)));
        Ok(())
    }

    fn write(&mut self) -> Result<()> {
        (self.on_progress)(RequestProgress { n_done: self.done.len(), n_all: self.n_all });
        self.log.as_mut().map_or(Ok(()), ResponseCache::write)
    }
}
