//! The end of a run: its last checkpoint, log lines and samples.

use std::io::Write;
use std::ops::ControlFlow;

use anyhow::{Context, Result};
use candlewick_inference::generate::GenerateOptions;
use candlewick_inference::lm;
use candlewick_inference::sampler::SamplingParams;
use candlewick_runtime::exit::ExitCode;
use candlewick_text::conversation::{Conversation, Message};
use candlewick_text::tokenizer::SpecialTokens;

use crate::data::DataKind;
use crate::plan::{GeneratePlan, conversation};
use crate::recipe::Prompt;
use crate::signals::StopRequest;

use super::context::{EndReason, TrainingRun};
use super::session::{Session, StopResult};

/// Saves the checkpoints that the end requires, logs the result, and returns the exit code.
pub(super) fn finish(session: &mut Session, end: &EndReason) -> Result<ExitCode> {
    let code = match end {
        EndReason::Horizon => {
            session.save_last_step()?;
            ExitCode::Ok
        }
        EndReason::Exit(_) | EndReason::Stop(StopRequest::KillSwitch(_)) => {
            let n_checkpoints = session.save_early_end()?;
            let what = if n_checkpoints > 0 { "" } else { "; nothing was saved" };
            session.reporter.terminal().line(&format!("{}{what}", end.reason()));
            ExitCode::Ok
        }
        EndReason::Stop(StopRequest::Signal(_)) => {
            let (what, code) = match session.save_to_resume()? {
                StopResult::Resumable => ("checkpoint saved; start the run again to resume", ExitCode::Preempted),
                StopResult::Saved => {
                    ("checkpoint saved; to resume, start again with checkpoint.N.auto_resume=true", ExitCode::Failed)
                }
                StopResult::Exported => ("only the weights are saved; a run cannot resume from them", ExitCode::Failed),
                StopResult::Lost => ("nothing was saved: the run has no checkpoint", ExitCode::Failed),
            };
            session.reporter.terminal().line(&format!("{}: {what}", end.reason()));
            return Ok(code);
        }
    };
    for source in session.stream.counts_by_source() {
        session.reporter.terminal().line(&format!("read {source}"));
    }
    log_skipped(session);
    log_saved(session);
    if let (EndReason::Horizon, Some(generate)) = (end, &session.run.plan.generate) {
        session.reporter.terminal().finish();
        samples(session, generate)?;
    }
    Ok(code)
}

/// Logs the number of skipped steps.
fn log_skipped(session: &Session) {
    let (n, total) = (session.progress.n_skipped, session.stream.cursor().step);
    if n > 0 {
        session
            .reporter
            .terminal()
            .line(&format!("{n} of {total} steps were skipped: the loss or gradient was not finite"));
    }
}

/// Logs the folders with the result.
fn log_saved(session: &Session) {
    let terminal = session.reporter.terminal();
    if session.run.plan.checkpoints.is_empty() {
        terminal.line("nothing was saved: the run has no checkpoint");
    }
    if let Some(step) = session.checkpointer.newest_step()
        && step < session.stream.cursor().step
    {
        terminal.line(&format!(
            "steps {} to {} are in no checkpoint; `save_end_of_training: true` saves the last one",
            step + 1,
            session.stream.cursor().step
        ));
    }
    let what = if session.run.plan.model.adapter.is_some() { "adapter" } else { "model" };
    session.checkpointer.exported().for_each(|dir| terminal.line(&format!("the {what} is in {}", dir.display())));
}

/// Prints the model's reply to each prompt of the recipe.
fn samples(session: &Session, plan: &GeneratePlan) -> Result<()> {
    let options = GenerateOptions {
        max_new_tokens: plan.max_new_tokens,
        sampling: SamplingParams { temperature: plan.temperature, top_p: plan.top_p, ..SamplingParams::GREEDY },
        seed: plan.seed,
        stop: Vec::new(),
    };
    let TrainingRun { plan: run_plan, assets, engine, ranks, .. } = session.run;
    let template = assets.template()?;
    let tokenizer = &assets.tokenizer;
    let mut out = std::io::stdout().lock();
    let mut ignored = |_: &str| Ok(ControlFlow::Continue(()));
    for prompt in &plan.prompts {
        if session.stop_request()?.is_some() {
            break;
        }
        let (chat, shown) = match prompt {
            Prompt::Text(text) => (Conversation::new([Message::new("user", text)]), text.as_str()),
            Prompt::Messages(messages) => {
                let chat = conversation(messages)?;
                (chat, messages.last().and_then(|last| last.get("content")?.as_str()).unwrap_or_default())
            }
        };
        let answer = match (run_plan.data.kind, &template, prompt) {
            (DataKind::Sft, Some(template), _) => {
                lm::answer_chat(engine, tokenizer, template, &chat, &options, &mut ignored)?
            }
            (_, _, Prompt::Text(text)) => lm::complete(
                engine,
                tokenizer,
                &tokenizer.encode(text, SpecialTokens::Include)?,
                &options,
                &mut ignored,
            )?,
            (_, _, Prompt::Messages(_)) => {
                let problem = "failed to reply to the messages of generate.prompts: the tokenizer has no chat template";
                return Err(anyhow::anyhow!(problem).context(ExitCode::Data));
            }
        };
        if !ranks.process.is_first() {
            continue;
        }
        writeln!(out, "> {shown}\n{}\n", answer.text.trim()).context("failed to print a sample")?;
    }
    Ok(())
}
