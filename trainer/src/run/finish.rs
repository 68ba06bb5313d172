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
use super::session::{Run, Session, Stopped};

/// Settles a run that ended as `end` says, and returns its exit code.
pub(super) fn finish(session: &mut Session, end: &End) -> Result<ExitCode> {
    let code = match end {
        End::Horizon => ExitCode::Ok,
        End::Exit(_) | End::Stop(Stop::KillSwitch(_)) => {
            let n_saves = session.save_early_end()?;
            let what = if n_saves > 0 { "" } else { "; nothing was saved: the recipe has no checkpoint" };
            session.reporter.terminal().line(&format!("{}{what}", end.reason()));
            ExitCode::Ok
        }
        End::Stop(Stop::Signal(_)) => {
            let (what, code) = match session.save_to_resume()? {
                Stopped::Resumable => ("saved, ready to be started again", ExitCode::Preempted),
                Stopped::Saved => {
                    ("saved; to go on from there, start again with checkpoint.N.auto_resume=true", ExitCode::Failed)
                }
                Stopped::Exported => ("the weights are saved; a run cannot go on from them", ExitCode::Failed),
                Stopped::Lost => ("nothing was saved: the recipe has no checkpoint", ExitCode::Failed),
            };
            session.reporter.terminal().line(&format!("{}: {what}", end.reason()));
            return Ok(code);
        }
    };
    if let (End::Horizon, Some(generate)) = (end, &session.run.plan.generate) {
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
    let Run { plan: whole, assets, engine, ranks, .. } = session.run;
    let template = assets.template()?;
    let tokenizer = &assets.tokenizer;
    let mut out = std::io::stdout().lock();
    for prompt in &plan.prompts {
        if session.asked_to_stop()?.is_some() {
            break;
        }
        let answer = match (whole.data.kind, &template) {
            (Kind::Sft, Some(template)) => lm::chat(engine, tokenizer, template, prompt, &options)?,
            _ => lm::complete(engine, tokenizer, &tokenizer.encode(prompt, Specials::Add)?, &options)?,
        };
        if !ranks.is_first() {
            continue;
        }
        writeln!(out, "> {prompt}\n{}\n", answer.text.trim()).context("failed to print a sample")?;
    }
    Ok(())
}
