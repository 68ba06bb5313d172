//! `trainer train`: from a recipe to a plan to a run.

use anyhow::{Result, anyhow};
use candlewick_comm::rank_env::RankEnv;
use candlewick_runtime::rank_env::rank_env;
use clap::Args;

use super::options::{Recipe, Verbosity, hub, plan, seat};
use super::profile::{Profile, Sort};
use super::{Ui, logging};
use crate::estimate::{Capacity, Setup, estimate};
use crate::exit::ExitCode;
use crate::plan::Plan;
use crate::run::connect;

#[derive(Debug, Args)]
pub(super) struct Train {
    #[command(flatten)]
    recipe: Recipe,
    /// Print where the time went, by the time of each part alone or with its parts, and write a trace for Perfetto
    #[arg(long, value_enum, value_name = "SORT")]
    profile: Option<Sort>,
    /// Steps of the trace
    #[arg(long, value_name = "N", default_value_t = 5, requires = "profile")]
    profile_steps: usize,
}

/// The examples of the long help.
pub(super) const EXAMPLES: &str = "\
Examples:
  trainer train recipe.yaml
  trainer train recipe.yaml train_iters=100 model.dtype=f32
  trainer train recipe.yaml --profile tottime train_iters=10
  trainer train recipe.yaml 'data.sources=[mine.jsonl]' checkpoint.0.output_dir=out
The same command goes on where the last run stopped, if a checkpoint has auto_resume: true.";

pub(super) fn run(train: &Train, verbosity: Verbosity, ui: &Ui) -> Result<ExitCode> {
    let env = rank_env()?;
    let plan = plan(&train.recipe, verbosity, seat(&env))?;
    let folder = plan.log.output_dir.clone().unwrap_or_default();
    let mut profile = train
        .profile
        .filter(|_| env.rank == 0)
        .map(|sort| Profile::create(folder, sort, train.profile_steps))
        .transpose()?;
    logging::start(verbosity, &plan.logger, profile.as_mut())?;
    for note in plan.notes.iter().filter(|_| env.rank == 0) {
        ui.remark(&format!("note: {note}"));
    }
    let (world, device) = connect(&plan, &env)?;
    refuse_what_cannot_fit(&plan, &env, ui)?;
    let code = crate::run::train(&plan, &hub(ui)?, &world, &device)?;
    if let Some(profile) = profile {
        ui.remark(&profile.finish()?);
    }
    Ok(code)
}

/// Fails if the run cannot fit with rows of any length. Prints a note if it fits only with rows shorter than `data.max_length`.
fn refuse_what_cannot_fit(plan: &Plan, env: &RankEnv, ui: &Ui) -> Result<()> {
    let capacity = Capacity::now(plan.device).of_one(env.local_world_size);
    let setup = Setup::on(plan, &capacity)?;
    let least = estimate(&Setup { row_tokens: 2, rows: 1, eval_load: None, ..setup.clone() }).shortages(&capacity);
    // An estimate is up to a tenth too high, and the system may find some more.
    if let Some(shortage) = least.into_iter().find(|short| short.needed_bytes / 5 * 4 > short.free_bytes) {
        let problem = format!("failed to start: the run needs {shortage}, whatever its rows are");
        let advice = "`trainer estimate RECIPE` says what takes it and what to change";
        return Err(anyhow!("{problem}; {advice}").context(ExitCode::OutOfMemory));
    }
    for shortage in estimate(&setup).shortages(&capacity).iter().filter(|_| env.rank == 0) {
        let rows = plan.data.max_length;
        ui.remark(&format!(
            "note: rows of {rows} tokens (data.max_length) would need {shortage}; see `trainer estimate`"
        ));
    }
    Ok(())
}
