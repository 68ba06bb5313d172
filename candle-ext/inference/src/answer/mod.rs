//! Answers requests with a model, as lm-evaluation-harness does with its Hugging Face model, but each run of tokens once.
//!
//! Texts become tokens in [`encode`] and are cut in [`windows`]. What begins alike is found by a prefix [`tree`]; [`score`]
//! and [`generation`] compute it. [`log`] remembers answers from one evaluation to the next.

pub mod batch;
pub mod encode;
pub mod generation;
pub mod identity;
pub mod log;
mod plan;
pub mod sample;
pub mod score;
mod settings;
mod share;
pub mod stop;
pub mod tree;
pub mod windows;

use std::collections::HashMap;

use anyhow::{Context, Result, anyhow};
use candlewick_comm::exchange_bytes;
use serde::{Deserialize, Serialize};

use crate::lm::{Lm, Voice};
use crate::parts::Crew;
use crate::request::{Request, Response};
use batch::Batching;
use encode::Encoder;
pub use encode::Unscorable;
use generation::Generation;
use log::{AnswerLog, Plain};
use plan::{Plan, Work};
use sample::Defaults;
use score::{Score, Scoring};
pub use settings::AnswerSettings;
use share::share_of;

/// Which way of answering it is. A change that gives the same request another answer takes another number, so that a log of
/// before is not read.
const FORMAT: u32 = 2;

/// A model or another source of answers to requests.
pub trait Answers {
    /// Answers all requests, in their order. All ranks give the same requests, and get all answers.
    fn answer(&mut self, requests: &[Request]) -> Result<Vec<Answered>>;
}

/// An answer, and how much of the request was looked at.
#[derive(Clone, Debug, PartialEq)]
pub struct Answered {
    /// The answer.
    pub response: Response,
    /// Tokens of the request, those that were cut off among them.
    pub n_tokens: usize,
    /// Tokens that were cut off in front, because the model's context is no longer.
    pub n_cut: usize,
}

/// A model that answers, together with those of the other ranks.
pub struct LmAnswers<'a> {
    voice: Voice<'a>,
    encoder: Encoder<'a>,
    defaults: Defaults,
    settings: AnswerSettings,
    batching: Batching,
    crew: Crew,
    /// Known if there is a log.
    identity: String,
    on_progress: Box<dyn FnMut(Progress) + 'a>,
    asked_to_stop: Option<Box<dyn Fn() -> bool + 'a>>,
}

/// A stop was requested before all requests were answered.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("stopped before all requests were answered")]
pub struct Stopped;

/// How far this rank is with its share of the requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Requests that are answered.
    pub n_done: usize,
    /// All that this rank answers.
    pub n_all: usize,
}

impl<'a> LmAnswers<'a> {
    /// Gets ready to answer together with a crew.
    pub fn new(lm: &'a Lm, settings: AnswerSettings, crew: Crew) -> Result<Self> {
        let log = settings.log.clone();
        let mut answers = Self::of(lm.voice(), settings, crew)?;
        if log.is_some() {
            answers.identity = answers.identify(lm)?;
            answers.settings.log = log;
        }
        Ok(answers)
    }

    /// Gets ready to answer for a model whose weights change, and so without a log of answers.
    pub fn of(voice: Voice<'a>, settings: AnswerSettings, crew: Crew) -> Result<Self> {
        let Voice { engine, tokenizer, generation_config } = voice;
        let heads = engine.model().config().attention_heads();
        let row_bytes = 2 * engine.model().n_blocks() * heads.n_kv * heads.dim * size_of::<f32>();
        let batching = match settings.batch_size {
            Some(n) => Batching::sequences(n),
            None => Batching::auto(engine.device().is_cpu(), row_bytes).at_most(settings.max_batch_size),
        };
        Ok(Self {
            voice,
            encoder: Encoder::new(tokenizer, settings.add_bos)?,
            defaults: generation_config.map(Defaults::read).transpose()?.unwrap_or_default(),
            settings: AnswerSettings { log: None, ..settings },
            batching,
            crew,
            identity: String::new(),
            on_progress: Box::new(|_| {}),
            asked_to_stop: None,
        })
    }

    /// Calls `on_progress` while requests are answered.
    #[must_use]
    pub fn with_progress(self, on_progress: impl FnMut(Progress) + 'a) -> Self {
        Self { on_progress: Box::new(on_progress), ..self }
    }

    /// Asks before each forward; if it is so on any rank, all end with [`Stopped`]. Every rank is to ask, or none.
    #[must_use]
    pub fn with_stop(self, asked_to_stop: impl Fn() -> bool + 'a) -> Self {
        Self { asked_to_stop: Some(Box::new(asked_to_stop)), ..self }
    }

    /// Tokens of context.
    pub fn max_length(&self) -> usize {
        self.settings.max_length.unwrap_or(self.voice.engine.model().config().max_positions())
    }

    /// Hashes the model on the first rank; the others believe it.
    fn identify(&self, lm: &Lm) -> Result<String> {
        let own = match self.crew.all.rank() {
            0 => {
                let AnswerSettings { add_bos, think_end, .. } = &self.settings;
                let (dtype, attention, max_length) = (lm.dtype(), lm.attention().implementation, self.max_length());
                let settings = format!("{FORMAT} {dtype:?} {attention:?} {max_length} {add_bos:?} {think_end:?}");
                self.crew.alone(|| identity::identity(lm.folders(), &settings))?
            }
            _ => String::new(),
        };
        let of_first = exchange_bytes(&*self.crew.all, own.as_bytes())?.into_iter().next().unwrap_or_default();
        Ok(String::from_utf8(of_first)?)
    }
}

impl Answers for LmAnswers<'_> {
    fn answer(&mut self, requests: &[Request]) -> Result<Vec<Answered>> {
        let max_length = self.max_length();
        let plan = self
            .crew
            .alone(|| Plan::new(requests, &self.encoder, &self.settings, self.defaults, max_length, &self.identity))?;
        let mut found = self.known(&plan)?;
        found.extend(plan.about_nothing());
        let crew = self.crew.clone();
        let computed = match crew.together(|| self.compute(&plan, &found)) {
            Err(error) if error.is::<Stopped>() => None,
            computed => Some(computed?),
        };
        let own = if self.crew.speaks { computed } else { computed.map(|_| Vec::new()) };
        for answers in exchange_bytes(&*self.crew.all, &serde_json::to_vec(&own)?)? {
            let answers: Option<Vec<Numbered>> = serde_json::from_slice(&answers)?;
            found.extend(answers.ok_or(Stopped)?.into_iter().map(Numbered::unpack));
        }
        plan.places
            .iter()
            .map(|question| {
                let response =
                    found.get(question).cloned().context("failed to answer: a rank has forgotten a request")?;
                let (n_tokens, n_cut) = plan.questions[*question].size;
                Ok(Answered { response, n_tokens, n_cut })
            })
            .collect()
    }
}

/// An answer with the number of its question.
#[derive(Serialize, Deserialize)]
struct Numbered(usize, Plain);

impl Numbered {
    fn unpack(self) -> (usize, Response) {
        (self.0, self.1.into())
    }
}

impl LmAnswers<'_> {
    /// What the log knows, as the first rank reads it.
    fn known(&self, plan: &Plan) -> Result<HashMap<usize, Response>> {
        let Some(folder) = &self.settings.log else { return Ok(HashMap::new()) };
        let mut own = Vec::new();
        if self.crew.all.rank() == 0 {
            let known = self.crew.alone(|| log::read(folder, &self.identity))?;
            let questions = plan.questions.iter().enumerate();
            let found = questions.filter_map(|(i, question)| Some(Numbered(i, known.get(&question.key)?.into())));
            own.extend(found);
        }
        let all = exchange_bytes(&*self.crew.all, &serde_json::to_vec(&own)?)?;
        let of_first = all.first().ok_or_else(|| anyhow!("failed to hear from the first rank"))?;
        let known: Vec<Numbered> = serde_json::from_slice(of_first)?;
        Ok(known.into_iter().map(Numbered::unpack).collect())
    }

    /// Answers this rank's share of what is not known, and writes it to the log as it comes.
    fn compute(&mut self, plan: &Plan, known: &HashMap<usize, Response>) -> Result<Vec<Numbered>> {
        let Voice { engine, tokenizer, .. } = self.voice;
        let Work { scored, owners, prompts, prompt_owners } = &plan.work;
        let (scoring, generation) = (Scoring::new(scored), Generation::new(prompts));
        let open = |question: &usize| !known.contains_key(question);
        let own_scored = share_of(&*self.crew.copies, scoring.order(), &scoring.costs(), owners, open);
        let own_prompts = share_of(&*self.crew.copies, generation.order(), &generation.costs(), prompt_owners, open);
        let folder = self.settings.log.as_ref().filter(|_| self.crew.speaks);
        let log = folder.map(|folder| AnswerLog::open(folder, &self.identity, self.crew.copies.rank())).transpose()?;
        let n_all = own_prompts.len() + plan.n_questions(&own_scored);
        let (crew, asked_to_stop) = (&self.crew, &self.asked_to_stop);
        let go_on = || {
            crew.step();
            match asked_to_stop {
                Some(asked) if crew.any_of_copy(asked())? => Err(Stopped.into()),
                _ => Ok(()),
            }
        };
        (self.on_progress)(Progress { n_done: 0, n_all });
        let mut desk = Desk { plan, log, done: Vec::new(), n_all, on_progress: &mut self.on_progress };
        let mut scores: HashMap<usize, Vec<(usize, Score)>> = HashMap::new();
        scoring.run(engine, &self.batching, &own_scored, go_on, |finished| {
            for (item, score) in finished {
                let question = owners[item];
                let of_question = scores.entry(question).or_default();
                of_question.push((item, score));
                if of_question.len() == plan.questions[question].n_scored {
                    desk.take(question, plan.response(question, scores.remove(&question).unwrap_or_default()))?;
                }
            }
            desk.write()
        })?;
        generation.run(engine, tokenizer, &self.batching, &own_prompts, go_on, |prompt, text| {
            desk.take(prompt_owners[prompt], Response::Text(text))?;
            desk.write()
        })?;
        Ok(desk.done)
    }
}

/// Where answers arrive.
struct Desk<'d> {
    plan: &'d Plan,
    log: Option<AnswerLog>,
    done: Vec<Numbered>,
    n_all: usize,
    on_progress: &'d mut dyn FnMut(Progress),
}

impl Desk<'_> {
    fn take(&mut self, question: usize, response: Response) -> Result<()> {
        if let Some(log) = &mut self.log {
            log.add(&self.plan.questions[question].key, &response)?;
        }
        self.done.push(Numbered(question, Plain::from(&response)));
        Ok(())
    }

    fn write(&mut self) -> Result<()> {
        (self.on_progress)(Progress { n_done: self.done.len(), n_all: self.n_all });
        self.log.as_mut().map_or(Ok(()), AnswerLog::write)
    }
}
