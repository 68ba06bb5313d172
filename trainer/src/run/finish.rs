//! The end of a run: the save that it can be taken up from, and samples of what was learned.

use std::io::Write;

use anyhow::{Context, Result};
use candlewick_text::tokenizer::Specials;
use evaluator::exit::ExitCode;
use evaluator::generate::GenerateOptions;
use evaluator::lm;

use crate::data::Kind;
use crate::plan::GeneratePlan;
use crate::signals::Stop;

use super::End;
use super::session::Session;

/// Settles a run that ended as `end` says, and returns its exit code.
pub(super) fn finish(session: &mut Session, end: &End) -> Result<ExitCode> {
    let code = match end {
        End::Horizon => {
            session.save_missing()?;
            ExitCode::Ok
        }
        End::Exit(_) | End::Stop(Stop::KillSwitch(_)) => {
            session.save_to_resume()?;
            ExitCode::Ok
        }
        End::Stop(Stop::Signal(_)) => {
            let is_saved = session.save_to_resume()?;
            let what = if is_saved { "saved, ready to be started again" } else { "no sharded checkpoint to save to" };
            session.reporter.terminal().line(&format!("{}: {what}", end.reason()));
            return Ok(if is_saved { ExitCode::Preempted } else { ExitCode::Failed });
        }
    };
    let mut ledger = session.prepared.ledger.clone();
    ledger.seen = session.stream.cursor().seen;
    session.reporter.terminal().line(&format!("{ledger}"));
    session.run_json.update(|report| report.ledger = serde_json::json!(ledger))?;
    if let (End::Horizon, Some(generate)) = (end, &session.plan.generate) {
        session.reporter.terminal().finish();
        samples(session, generate)?;
    }
    Ok(code)
}

/// Prints what the model answers to each prompt of the recipe.
fn samples(session: &Session, plan: &GeneratePlan) -> Result<()> {
    let options = GenerateOptions {
        max_new_tokens: plan.max_new_tokens,
        temperature: plan.temperature,
        top_p: plan.top_p,
        seed: plan.seed,
    };
    let template = session.assets.template()?;
    let tokenizer = &session.assets.tokenizer;
    let mut out = std::io::stdout().lock();
    for prompt in &plan.prompts {
        let answer = match (session.plan.data.kind, &template) {
            (Kind::Sft, Some(template)) => lm::chat(session.engine, tokenizer, template, prompt, &options)?,
            _ => lm::complete(session.engine, tokenizer, &tokenizer.encode(prompt, Specials::Add)?, &options)?,
        };
        writeln!(out, "> {prompt}\n{}\n", answer.trim()).context("failed to print a sample")?;
    }
    Ok(())
}
