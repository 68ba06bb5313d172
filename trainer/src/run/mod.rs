//! Training: turns a plan into a trained model.
//!
//! `assets` finds the files, `build` creates the engine, `step` computes an optimizer step, `checkpointer` saves and
//! resumes, `finish` ends the run. Nothing here reads a recipe, the command line or the environment.

mod assets;
mod async_save;
mod build;
mod checkpointer;
mod connect;
mod context;
mod describe;
mod evaluate;
mod finish;
mod initial_weights;
mod inputs;
mod kept_batch;
mod lock;
mod nonfinite;
mod out_of_memory;
mod rank_info;
mod ranks;
mod replay;
mod routing;
mod samples;
mod session;
mod slower_modules;
mod small_data;
mod state;
mod step;
mod step_experts;
mod tasks;
mod watchdog;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use candle_core::Device;
use candlewick_comm::World;
use candlewick_ops::{DeviceTimestamp, span};
use candlewick_runtime::exit::ExitCode;
use candlewick_runtime::run_id::RunId;
use candlewick_text::hub::Hub;
use evaluator::chat::ChatTemplateFormatter;
use evaluator::task::TaskSelection;

use crate::checkpoint::{CheckpointError, CheckpointFormat};
use crate::data::{PreparedData, prepare_stream_until, prepare_until};
use crate::failpoint::failpoint;
use crate::metrics::{RunExit, RunJson, Terminal};
use crate::plan::Plan;
use crate::profiling::Instruments;
use crate::signals::{SignalReaction, StopRequest, StopSignals};

pub use assets::Assets;
pub(crate) use build::engine_spec;
pub use connect::connect;
pub use initial_weights::check_weights;
pub use inputs::open_inputs;
pub use kept_batch::{KeptBatch, KeptMicroBatch};
pub(crate) use lock::lock_existing;
pub use replay::{ReplayReport, ReplayTotals, ReplayWeights, ReplayedSequence, replay};
pub use small_data::count_steps;
pub use tasks::check_tasks;

use build::Built;
use context::{EndReason, TrainingRun};
use ranks::RankContext;
use session::Session;
use slower_modules::EarlierRun;
use tasks::Tasks;

/// The device of a rank, and the measurements of this process.
pub struct MeasuredDevice<'a> {
    /// The compute device.
    pub device: &'a Device,
    /// The measurements, which the caller writes at the end.
    pub instruments: &'a Instruments,
}

/// Trains on `device` with the settings of `plan`, as one rank of `world`, and returns the exit code. On a failure, the
/// other ranks fail too.
pub fn train(plan: &Plan, hub: &Hub, world: &World, device: &Device) -> Result<ExitCode> {
    train_measured(plan, hub, world, &MeasuredDevice { device, instruments: &Instruments::default() })
}

/// Trains like [`train`] with measurements.
pub fn train_measured(plan: &Plan, hub: &Hub, world: &World, measured: &MeasuredDevice) -> Result<ExitCode> {
    // Keep the groups until the other ranks know of a failure, because dropping a group waits for its pending
    // operations.
    let ranks = RankContext::new(world, measured.device, &plan.ranks)?.with_instruments(measured.instruments);
    train_as(plan, hub, &ranks).map_err(|error| ranks.report_failure(error))
}

/// Trains as one of `ranks`. Writes the result into `run.json` in any case.
fn train_as(plan: &Plan, hub: &Hub, ranks: &RankContext) -> Result<ExitCode> {
    let plan = &ranks.agree_on(plan)?;
    let locks = if ranks.process.is_first() { lock::lock(plan).map(Some) } else { Ok(None) };
    let _locks = ranks.process.all_ok(locks)?;
    let unwritten = |source| {
        let path = plan.log.output_dir.clone().unwrap_or_default();
        CheckpointError::Io { action: "write run.json into", path, source }
    };
    let mut run_json = RunJson::start(&plan.log, serde_json::to_value(plan)?).map_err(unwritten)?;
    run_json.update(|report| report.export_folders = export_folders(plan)).map_err(unwritten)?;
    let ended = run(plan, hub, ranks, &mut run_json).map_err(|error| ranks.report_failure(error));
    let exit = match &ended {
        Ok((code, reason)) => RunExit { code: *code as u8, reason: reason.clone() },
        Err(error) => RunExit { code: crate::exit::classify(error) as u8, reason: format!("{error:#}") },
    };
    match (ended, run_json.finish(exit)) {
        // The checkpoints are complete, but the exit code reports the missing run.json.
        (Ok((ExitCode::Ok, _)), Err(source)) => Err(unwritten(source).into()),
        (ended, Err(error)) => {
            tracing::warn!("failed to write run.json: {error}");
            ended.map(|(code, _)| code)
        }
        (ended, Ok(())) => ended.map(|(code, _)| code),
    }
}

/// Lists the folders of exported models. The locks have created them.
fn export_folders(plan: &Plan) -> Vec<PathBuf> {
    let exports = plan.checkpoints.iter().filter(|checkpoint| checkpoint.format == CheckpointFormat::HuggingFace);
    exports.filter_map(|checkpoint| checkpoint.output_dir.canonicalize().ok()).collect()
}

/// Loads and tokenizes the data of `plan`, as a run does before its first step.
pub fn prepare_data(plan: &Plan, hub: &Hub, run_id: RunId) -> Result<(Assets, PreparedData)> {
    prepare_data_until(plan, hub, run_id, &StopSignals::without_signals(None))
}

/// Prepares like [`prepare_data`]. A signal stops it: the finished tokens are cached, and the error has the exit code for
/// preemption.
pub fn prepare_data_until(
    plan: &Plan,
    hub: &Hub,
    run_id: RunId,
    signals: &StopSignals,
) -> Result<(Assets, PreparedData)> {
    let _span = span("prepare data", "");
    // A download, or a long row, cannot be interrupted.
    let _deadline = signals.deadline(STOP_LIMIT, ExitCode::Preempted).context("failed to watch for signals")?;
    let assets = Assets::find(plan, hub, run_id)?;
    let is_stopped = || signals.signal().is_some();
    let template = assets.template()?;
    let prepared = match plan.data.streaming {
        Some(_) => prepare_stream_until(&plan.data, assets.tokenizer.clone(), template, hub, &is_stopped)?,
        None => prepare_until(&plan.data, &assets.tokenizer, template, hub, &is_stopped)?,
    };
    Ok((assets, prepared))
}

/// The time after a signal until the process ends, if the preparation of the data does not react.
const STOP_LIMIT: Duration = Duration::from_secs(4);

/// Prepares the data on every rank, on one of each node first. If a signal stopped a rank, returns the request on all
/// ranks. All ranks call this.
fn prepare_on_all_ranks(
    plan: &Plan,
    hub: &Hub,
    ranks: &RankContext,
    (run_id, signals): (RunId, &StopSignals),
) -> Result<Result<(Assets, PreparedData), StopRequest>> {
    // A rank that was stopped has not failed: the others shall end with the same exit code.
    let prepare = || match prepare_data_until(plan, hub, run_id, signals) {
        Err(error) if crate::exit::classify(&error) == ExitCode::Preempted => {
            tracing::warn!("{}", crate::exit::report(&error).trim_end());
            Ok(None)
        }
        prepared => prepared.map(Some),
    };
    let requested = || ranks.agree_on_stop(signals.signal().map(StopRequest::Signal), None);
    let first = ranks.process.on_first_rank_of_node(prepare)?;
    if let Some(request) = requested()? {
        return Ok(Err(request));
    }
    let prepared = ranks.process.on_other_ranks_of_node(first, prepare)?;
    match (prepared, requested()?) {
        (_, Some(request)) => Ok(Err(request)),
        (Some(prepared), None) => Ok(Ok(prepared)),
        (None, None) => bail!("failed to prepare the data: stopped without a signal"),
    }
}

fn run(plan: &Plan, hub: &Hub, ranks: &RankContext, run_json: &mut RunJson) -> Result<(ExitCode, String)> {
    ranks.process.all_ok(refuse_stale_stop(plan))?;
    let stop = StopSignals::install(plan.exit.kill_switch_path.clone()).context("failed to watch for signals")?;
    let terminal = Terminal::new(plan.log.console, 0, 0);
    stop.respond_with({
        let terminal = terminal.clone();
        move |signal| terminal.line(&signal.acknowledgement("stopping the preparation of the data"))
    });
    let run_id = RunId::agree(&ranks.process, checkpointer::run_id(plan, run_json.run_id()))?;
    run_json.update(|report| report.run_id = Some(run_id.run)).context("failed to write run.json")?;
    let selection = ranks.process.all_ok(tasks::select(plan))?;
    ranks.process.on_first_rank(|| tasks::check_sandbox(plan, selection.as_ref()))?;
    let scores = ranks.process.all_ok(tasks::scores(plan, selection.as_ref()))?;
    let early_stopping = ranks.process.all_ok(tasks::early_stopping(plan, selection.as_ref()))?;
    let (assets, prepared) = match prepare_on_all_ranks(plan, hub, ranks, (run_id, &stop))? {
        Ok(prepared) => prepared,
        Err(request) => {
            let reason = format!("stopped by {request} while the data were prepared; the same command continues");
            terminal.line(&reason);
            return Ok((ExitCode::Preempted, reason));
        }
    };
    let plan = &ranks.process.all_ok(with_counted_steps(plan, &prepared))?;
    // There is nothing to save until the first step.
    stop.set_reaction(SignalReaction::EndAtOnce);
    let chat = ranks.process.all_ok(tasks::chat(plan, &assets))?;
    let open = || open_tasks(plan, selection.as_ref(), chat.as_ref(), hub);
    let tasks = ranks.process.one_rank_per_node_first(open)?;
    let explain = |error| out_of_memory::explain(error, plan, &ranks.device, None);
    let Built { engine, notes, peak, slower_modules } = {
        let _span = span("build model", "");
        build::engine(plan, &assets, ranks, &EarlierRun::Resumed).map_err(explain)?
    };
    let notes: Vec<String> = tasks.iter().flat_map(Tasks::notes).chain(notes).collect();
    stop.set_reaction(SignalReaction::Request);
    let (assets, engine, prepared) = (&assets, &engine, &prepared);
    let (notes, tasks, scores, early_stopping, stop) = (&notes, tasks.as_ref(), &scores, &early_stopping, &stop);
    let slower_modules = slower_modules.as_deref();
    let run = TrainingRun {
        plan,
        ranks,
        assets,
        engine,
        notes,
        peak,
        slower_modules,
        prepared,
        tasks,
        scores,
        early_stopping,
        run_id,
        stop,
    };
    train_and_finish(run, run_json)
}

/// Counts the steps of intervals that are a fraction of the run or of an epoch.
fn with_counted_steps(plan: &Plan, prepared: &PreparedData) -> Result<Plan> {
    let run = if plan.has_fractions() { Some(prepared.run_length(&plan.data)?) } else { None };
    Ok(run.map_or_else(|| plan.clone(), |run| plan.with_counted_steps(run)))
}

fn train_and_finish(run: TrainingRun, run_json: &mut RunJson) -> Result<(ExitCode, String)> {
    failpoint("engine_built", 0);
    let TrainingRun { plan, ranks, engine, .. } = run;
    let explain = |error| out_of_memory::explain(error, plan, &ranks.device, Some(engine.store().device_bytes()));
    let mut session = Session::begin(run, run_json).map_err(explain)?;
    // The other ranks know of a failure before this one waits for the servers of its trackers.
    let ended = train_to_end(&mut session).map_err(|error| ranks.report_failure(explain(error)));
    let code = ended.as_ref().map_or_else(crate::exit::classify, |(code, _)| *code);
    session.reporter.finish(code);
    let (code, reason) = ended?;
    ranks.process.all_ok(session.check_metrics_written(code))?;
    Ok((code, reason))
}

fn train_to_end(session: &mut Session) -> Result<(ExitCode, String)> {
    let end = steps(session)?;
    session.drain(0)?;
    let code = finish::finish(session, &end)?;
    session.finish_async_save(true)?;
    Ok((code, end.reason()))
}

/// Fails if the stop file exists: it would end the run before its first step.
fn refuse_stale_stop(plan: &Plan) -> Result<()> {
    let stale = plan.exit.kill_switch_path.as_deref().filter(|path| path.exists());
    stale.map_or(Ok(()), |path| {
        bail!("failed to start: the stop file {} already exists; remove the file", path.display())
    })
}

/// Loads the documents of the plan's tasks.
fn open_tasks<'a>(
    plan: &'a Plan,
    selection: Option<&TaskSelection>,
    chat: Option<&'a ChatTemplateFormatter>,
    hub: &Hub,
) -> Result<Option<Tasks<'a>>> {
    let selection = selection.filter(|_| plan.tasks.is_some());
    selection.map(|selection| Tasks::open(plan, selection.clone(), chat, hub)).transpose()
}

fn steps(session: &mut Session) -> Result<EndReason> {
    let first_step = session.first_step;
    match first_step {
        0 => session.evaluate_first()?,
        // A run that was stopped during an evaluation evaluates first.
        _ => {
            session.evaluate()?;
            session.finish_earlier_saves()?;
        }
    }
    loop {
        let done = session.stream.cursor().step;
        // A stop request may have ended the last evaluation without a result.
        if done >= session.stream.total_steps() && !session.is_evaluation_due() {
            return Ok(EndReason::Horizon);
        }
        if let Some(end) = session.early_stopping() {
            return Ok(end);
        }
        if let Some(request) = session.stop_request()? {
            return Ok(EndReason::Stop(request));
        }
        let exit = &session.run.plan.exit;
        if exit.iteration_this_run.is_some_and(|n| done - first_step >= n) {
            return Ok(EndReason::Exit("exit_iteration_this_run"));
        }
        if exit.iteration.is_some_and(|n| done >= n) {
            return Ok(EndReason::Exit("exit_iteration"));
        }
        let started = DeviceTimestamp::now(session.run.engine.device())?;
        let next = session.next_batch()?;
        let Some(step) = next else { return Ok(EndReason::Horizon) };
        session.train_step(step, started)?;
        after_step(session)?;
    }
}

fn after_step(session: &mut Session) -> Result<()> {
    session.evaluate()?;
    session.save_due()
}
