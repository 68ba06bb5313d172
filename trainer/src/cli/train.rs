//! `trainer train`: resolves a recipe and trains.

use anyhow::{Context, Result, anyhow};
use candlewick_comm::rank_env::RankEnv;
use candlewick_runtime::process_group::exit_after_peer;
use candlewick_runtime::progress::{ProgressDisplay, set_progress_display};
use candlewick_runtime::rank_env::rank_env;
use candlewick_text::hub::{HubLock, LockContext, LockedRepo};
use clap::Args;

use super::options::{RecipeArgs, Verbosity, plan_of_run, recipe_hub, world_info};
use super::profile::{Profile, ProfileSort};
use super::{Ui, logging};
use crate::estimate::{Capacity, Setup, estimate};
use crate::exit::ExitCode;
use crate::plan::Plan;
use crate::profiling::Instruments;
use crate::run::{MeasuredDevice, connect};

#[derive(Debug, Args)]
pub(super) struct TrainArgs {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Print a profile table with this sort order, and write a Perfetto trace
    #[arg(long, value_enum, value_name = "SORT")]
    profile: Option<ProfileSort>,
    /// Number of steps in the trace
    #[arg(long, value_name = "N", default_value_t = 5, requires = "profile")]
    profile_steps: usize,
}

/// Examples for the long help.
pub(super) const EXAMPLES: &str = "\
Examples:
  trainer train recipe.yaml
  trainer train recipe.yaml train_iters=100 model.dtype=f32
  trainer train recipe.yaml --profile tottime train_iters=10
  trainer train recipe.yaml 'data.sources=[mine.jsonl]' checkpoint.0.output_dir=out
If a checkpoint entry has auto_resume: true, the same command resumes an interrupted run.";

pub(super) fn run(args: &TrainArgs, verbosity: Verbosity, ui: &Ui) -> Result<ExitCode> {
    let env = rank_env()?;
    if env.local_rank > 0 {
        // The first rank of a machine shows the progress of all.
        set_progress_display(ProgressDisplay::Hidden);
    }
    let plan = plan_of_run(&args.recipe, verbosity, world_info(&env))?;
    let folder = plan.log.output_dir.clone().unwrap_or_default();
    let mut profile = args
        .profile
        .filter(|_| env.rank == 0)
        .map(|sort| Profile::create(folder, sort, args.profile_steps))
        .transpose()?;
    let instruments = Instruments::new(&plan.profiling, env.rank);
    let layers = profile.as_mut().map(Profile::layer).into_iter().chain(instruments.layers());
    logging::start(verbosity, &plan.logger, layers.collect())?;
    for note in plan.notes.iter().filter(|_| env.rank == 0) {
        ui.log(&format!("note: {note}"));
    }
    let (world, device) = connect(&plan, &env)?;
    check_memory(&plan, &env, ui)?;
    let hub = recipe_hub(&plan.recipe)?;
    if let Some((lock, context)) = hub.lock().filter(|_| env.rank == 0) {
        ui.log(&describe_lock(lock, context));
    }
    let measured = MeasuredDevice { device: &device, instruments: &instruments };
    let trained = crate::run::train_measured(&plan, &hub, &world, &measured);
    // The profile of a failed run shows the memory before the failure.
    let written = instruments.finish().context("failed to write the memory profile");
    if let Err(error) = &trained {
        exit_after_peer(world, error);
    }
    let code = trained?;
    for line in written?.iter().filter(|_| env.rank == 0) {
        ui.log(line);
    }
    if let Some(profile) = profile {
        ui.log(&profile.finish()?);
    }
    Ok(code)
}

/// Describes the commits of the lock file in a note.
fn describe_lock(lock: &HubLock, context: &LockContext) -> String {
    let one = |repo: &LockedRepo| format!("{} {} at commit {}", repo.kind.name(), repo.id, &repo.commit[..12]);
    let repos: Vec<String> = lock.repositories.iter().map(one).collect();
    let path = context.path.display();
    match repos.is_empty() {
        true => format!("note: {path} is in use: no file comes from the Hub"),
        false => format!("note: {path} is in use, without requests to the Hub: {}", repos.join(", ")),
    }
}

/// Fails if the run cannot fit with sequences of any length. Prints a note if it fits only with sequences shorter than
/// `data.max_length`.
fn check_memory(plan: &Plan, env: &RankEnv, ui: &Ui) -> Result<()> {
    let capacity = Capacity::now(plan.device).of_one(env.local_world_size);
    let setup = Setup::on(plan, &capacity)?;
    let least = estimate(&Setup { row_tokens: 2, rows: 1, eval_load: None, ..setup.clone() }).shortages(&capacity);
    // The estimate may be 10% too high, and the system may free some memory. So fail only above 125%.
    if let Some(shortage) = least.into_iter().find(|short| short.needed_bytes / 5 * 4 > short.free_bytes) {
        let problem = format!("failed to start: the run needs {shortage}, even with the shortest sequences");
        let advice = "see `trainer estimate RECIPE` for the memory breakdown and the settings that reduce it";
        return Err(anyhow!("{problem}; {advice}").context(ExitCode::OutOfMemory));
    }
    for shortage in estimate(&setup).shortages(&capacity).iter().filter(|_| env.rank == 0) {
        let rows = plan.data.max_length;
        ui.log(&format!(
            "note: sequences of {rows} tokens (data.max_length) would need {shortage}; see `trainer estimate`"
        ));
    }
    Ok(())
}
