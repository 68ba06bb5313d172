//! `evaluator ls`: lists tasks, groups and tags.

use anyhow::Result;
use clap::{Args, ValueEnum};

use super::tasks::TaskArgs;
use crate::task::TaskListing;
use candlewick_runtime::terminal::print_line;

#[derive(Debug, Args)]
pub(super) struct LsArgs {
    /// Kind of entries to list
    #[arg(value_enum, default_value_t = ListKind::Tasks)]
    what: ListKind,
    #[command(flatten)]
    source: TaskArgs,
    /// Print a JSON list
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ListKind {
    /// Single tasks
    #[value(alias = "subtasks")]
    Tasks,
    /// Groups: several tasks under one name, with aggregate scores
    Groups,
    /// Tags: several tasks under one name, without aggregate scores
    Tags,
}

pub(super) fn run(args: &LsArgs) -> Result<()> {
    let registry = args.source.registry()?;
    let listed = match args.what {
        ListKind::Tasks => registry.tasks(),
        ListKind::Groups => registry.groups(),
        ListKind::Tags => registry.tags(),
    };
    if args.json {
        return print_line(&serde_json::to_string_pretty(&listed)?);
    }
    let widest = listed.iter().map(|entry| entry.name.chars().count()).max().unwrap_or(0);
    let lines: Vec<String> = listed.iter().map(|entry| line(entry, widest)).collect();
    print_line(&lines.join("\n"))
}

fn line(entry: &TaskListing, width: usize) -> String {
    let file = entry.file.as_ref().map(|file| file.display().to_string());
    let about = match (&entry.output_type, file) {
        (Some(output_type), Some(file)) => format!("{output_type:<22} {file}"),
        _ => entry.members.join(", "),
    };
    format!("{:<width$}  {about}", entry.name).trim_end().to_owned()
}
