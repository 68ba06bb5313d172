//! Sample generations: after each evaluation, and after training.

use std::ops::ControlFlow;

use anyhow::{Result, anyhow};
use candlewick_inference::generate::GenerateOptions;
use candlewick_inference::lm;
use candlewick_inference::sampler::SamplingParams;
use candlewick_ops::span;
use candlewick_runtime::exit::ExitCode;
use candlewick_runtime::terminal::print_generated;
use candlewick_text::conversation::{Conversation, Message};
use candlewick_text::template::ChatTemplate;
use candlewick_text::tokenizer::SpecialTokens;

use crate::data::{Cursor, DataKind};
use crate::metrics::{SampleGeneration, SamplesRecord};
use crate::plan::GeneratePlan;
use crate::recipe::Prompt;
use crate::resolve::conversation;

use super::context::TrainingRun;
use super::session::Session;

/// The most characters of a reply in the log.
const SHOWN: usize = 100;

impl Session<'_> {
    /// Generates a reply to each prompt after an evaluation, if the plan wants it, and logs them. A stop request ends it
    /// without a result.
    pub(super) fn sample_after_evaluation(&mut self) -> Result<()> {
        let Some(plan) = self.run.plan.generate.as_ref().filter(|plan| plan.on_evaluate) else { return Ok(()) };
        self.drain(0)?;
        let _span = span("samples", "");
        let samples = self.generate_samples(plan)?;
        if samples.len() < n_samples(plan) {
            return Ok(());
        }
        let Cursor { epoch, step: iter, .. } = *self.stream.cursor();
        for SampleGeneration { prompt, text, .. } in &samples {
            let shown: String = format!("{prompt} > {text}").chars().take(SHOWN).collect();
            self.reporter.terminal().line(&format!("sample: {}", shown.replace('\n', " ")));
        }
        let record = SamplesRecord { epoch, iter, samples };
        self.reporter.log_samples(&record);
        self.last_samples = Some(record);
        Ok(())
    }

    /// Prints the replies to the prompts of the recipe. Uses those of an evaluation after the last step.
    pub(super) fn print_samples(&mut self, plan: &GeneratePlan) -> Result<()> {
        let step = self.stream.cursor().step;
        let samples = match self.last_samples.take().filter(|record| record.iter == step) {
            Some(record) => record.samples,
            None => self.generate_samples(plan)?,
        };
        if !self.run.ranks.process.is_first() {
            return Ok(());
        }
        samples.iter().try_for_each(|sample| print_generated(&format!("> {}\n{}\n", sample.prompt, sample.text)))
    }

    /// Generates a reply to each prompt at each temperature. A stop request ends it early. All ranks call this.
    fn generate_samples(&self, plan: &GeneratePlan) -> Result<Vec<SampleGeneration>> {
        let template = self.run.assets.template()?;
        let mut samples = Vec::new();
        for prompt in &plan.prompts {
            for &temperature in &plan.temperatures {
                if self.stop_request()?.is_some() {
                    return Ok(samples);
                }
                samples.push(self.generate_sample(plan, template.as_ref(), prompt, temperature)?);
            }
        }
        Ok(samples)
    }

    fn generate_sample(
        &self,
        plan: &GeneratePlan,
        template: Option<&ChatTemplate>,
        prompt: &Prompt,
        temperature: f64,
    ) -> Result<SampleGeneration> {
        let options = GenerateOptions {
            max_new_tokens: plan.max_new_tokens,
            sampling: SamplingParams { temperature, top_p: plan.top_p, ..SamplingParams::GREEDY },
            seed: plan.seed,
            stop: Vec::new(),
        };
        let TrainingRun { plan: run_plan, assets, engine, .. } = self.run;
        let tokenizer = &assets.tokenizer;
        let mut ignored = |_: &str| Ok(ControlFlow::Continue(()));
        let (chat, shown) = chat_of(prompt)?;
        let reply = match (run_plan.data.kind, template, prompt) {
            (DataKind::Sft, Some(template), _) => {
                lm::answer_chat(engine, tokenizer, template, &chat, &options, &mut ignored)?
            }
            (_, _, Prompt::Text(text)) => {
                let ids = tokenizer.encode(text, SpecialTokens::Include)?;
                lm::complete(engine, tokenizer, &ids, &options, &mut ignored)?
            }
            (_, _, Prompt::Messages(_)) => {
                let problem = "failed to reply to the messages of generate.prompts: the tokenizer has no chat template";
                return Err(anyhow!(problem).context(ExitCode::Data));
            }
        };
        Ok(SampleGeneration { prompt: shown, temperature, text: reply.text.trim().to_owned() })
    }
}

/// Returns a prompt as a conversation, and the text of its last message.
fn chat_of(prompt: &Prompt) -> Result<(Conversation, String)> {
    Ok(match prompt {
        Prompt::Text(text) => (Conversation::new([Message::new("user", text)]), text.clone()),
        Prompt::Messages(messages) => {
            let last = messages.last().and_then(|last| last.get("content")?.as_str()).unwrap_or_default();
            (conversation(messages)?, last.to_owned())
        }
    })
}

fn n_samples(plan: &GeneratePlan) -> usize {
    plan.prompts.len() * plan.temperatures.len()
}
