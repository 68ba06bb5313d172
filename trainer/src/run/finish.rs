//! The end of a run: its last checkpoint and log lines.

use anyhow::Result;
use candlewick_runtime::exit::ExitCode;
use candlewick_text::quantity::counted;

use crate::checkpoint::Moment;
use crate::data::DataKind;
use crate::signals::{Signal, StopRequest};

use super::context::EndReason;
use super::session::{Session, StopResult};

/// Saves the checkpoints that the end requires, logs the result, and returns the exit code.
pub(super) fn finish(session: &mut Session, end: &EndReason) -> Result<ExitCode> {
    let terminal = session.reporter.terminal().clone();
    let respond = move |signal: Signal| terminal.line(&signal.acknowledgement("the run is ending already"));
    if !matches!(end, EndReason::Stop(_)) {
        session.run.stop.respond_with(respond);
    }
    let code = match end {
        EndReason::Horizon => {
            session.save_last_step()?;
            ExitCode::Ok
        }
        EndReason::Exit(_) | EndReason::EarlyStopping(_) | EndReason::Stop(StopRequest::KillSwitch(_)) => {
            let n_checkpoints = session.save_early_end()?;
            session.renew_stop_checkpoint();
            let what = if n_checkpoints > 0 { "" } else { "; nothing was saved" };
            session.reporter.terminal().line(&format!("{}{what}", end.reason()));
            ExitCode::Ok
        }
        EndReason::Stop(StopRequest::Signal(_)) => {
            let (what, code) = match session.save_to_resume()? {
                StopResult::Resumable(dir) => (
                    format!("checkpoint saved in {}; the same command continues the run", dir.display()),
                    ExitCode::Preempted,
                ),
                StopResult::Saved(dir) => (
                    format!(
                        "checkpoint saved in {}; to continue the run, set auto_resume=true for its checkpoint entry",
                        dir.display()
                    ),
                    ExitCode::Failed,
                ),
                StopResult::Exported => {
                    ("only the weights are saved; a run cannot resume from them".to_owned(), ExitCode::Failed)
                }
                StopResult::Lost => ("nothing was saved: the run has no checkpoint".to_owned(), ExitCode::Failed),
            };
            session.reporter.terminal().line(&format!("{}: {what}", end.reason()));
            return Ok(code);
        }
    };
    let moment = session.moment();
    let end_of_training = moment.end_of_training || *end == EndReason::Horizon;
    session.checkpointer.remove_stop_checkpoint(Moment { end_of_training, ..moment })?;
    for source in session.stream.counts_by_source() {
        session.reporter.terminal().line(&format!("read {source}"));
    }
    log_skipped(session);
    log_saved(session);
    if let Some(remedy) = end.remedy().filter(|_| session.has_only_resumed()) {
        session.reporter.terminal().line(&format!("nothing left to train: {}. To train on, {remedy}", end.reason()));
    }
    if let (EndReason::Horizon | EndReason::EarlyStopping(_), Some(generate)) = (end, &session.run.plan.generate) {
        session.reporter.terminal().finish();
        session.print_samples(generate)?;
    }
    if let Some(command) = next_command(session) {
        session.reporter.terminal().line(&format!("try it: {command}"));
    }
    Ok(code)
}

/// Returns the command that talks with the result, if the run exported one.
fn next_command(session: &Session) -> Option<String> {
    let exported = session.checkpointer.exported().next()?;
    let plan = session.run.plan;
    let in_output_dir = plan.log.output_dir.as_deref().filter(|dir| exported.starts_with(dir));
    let model = in_output_dir.unwrap_or(exported).display();
    Some(match plan.data.kind {
        DataKind::Sft => format!("trainer chat {model}"),
        DataKind::Causal => format!("trainer generate {model} --prompt \"Once upon a time\""),
    })
}

/// Logs the number of skipped steps.
fn log_skipped(session: &Session) {
    let (n, total) = (session.progress.n_skipped, session.stream.cursor().step);
    let n_spikes = session.progress.loss_history.n_spikes;
    let spikes = if n_spikes > 0 {
        format!(", or by loss_watchdog ({})", counted(n_spikes, "loss spike"))
    } else {
        String::new()
    };
    if n > 0 {
        session
            .reporter
            .terminal()
            .line(&format!("{n} of {total} steps were skipped: the loss or gradient was not finite{spikes}"));
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
