//! `trainer selfcheck`: whether the recipe's way of sharing the work computes what one rank computes.

use anyhow::{Context, Result};

use super::{Selfcheck, Ui, Verbosity, train};
use crate::exit::ExitCode;
use crate::plan::Seat;
use crate::selfcheck::selfcheck;

pub(super) fn run(asked: &Selfcheck, verbosity: Verbosity, ui: &Ui) -> Result<ExitCode> {
    let plan = train::plan(&asked.recipe, verbosity, Seat::first_of(asked.ranks))?;
    let report = selfcheck(&plan)?;
    match asked.json {
        true => ui.answer(&serde_json::to_string_pretty(&report).context("failed to write the report as JSON")?)?,
        false => ui.answer(&report.to_string())?,
    };
    Ok(if report.passes() { ExitCode::Ok } else { ExitCode::Failed })
}
