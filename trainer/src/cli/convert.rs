//! `trainer convert`: converts a training file of another toolkit into a recipe.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use candlewick_text::files::{MAX_CONFIG_FILE_BYTES, read_regular_file, without_bom, write_new};
use clap::Args;
use serde_json::{Value, json};

use super::Ui;
use crate::convert::{Conversion, ForeignFormat, convert};
use crate::exit::ExitCode;

pub(super) const EXAMPLES: &str = "\
Examples:
  trainer convert axolotl.yml -o recipe.yaml
  trainer convert llama3_lora.yaml --from torchtune --output recipe.yaml
  trainer convert config.json --json

Without --output, the recipe goes to stdout and the report to stderr. The report lists the keys that were mapped, that
changed, and that have no counterpart.";

#[derive(Debug, Args)]
pub(super) struct ConvertArgs {
    /// YAML of axolotl, torchtune or LLaMA-Factory, or JSON of picotron
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Output file of the recipe; must not exist [default: stdout]
    #[arg(long, short, value_name = "OUT")]
    output: Option<PathBuf>,
    /// Format of the file [default: detected]
    #[arg(long, value_enum, value_name = "FORMAT")]
    from: Option<ForeignFormat>,
    /// Print the report as JSON to stdout; without --output it contains the recipe
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &ConvertArgs, ui: &Ui) -> Result<ExitCode> {
    let conversion = convert(&args.file, read(&args.file)?, args.from)?;
    if let Some(output) = &args.output {
        write(output, &conversion.recipe)?;
    }
    match (args.json, &args.output) {
        (true, _) => ui.print(&serde_json::to_string_pretty(&json(args, &conversion))?),
        (false, Some(_)) => ui.print(report(args, &conversion).trim_end()),
        (false, None) => {
            ui.note(report(args, &conversion).trim_end());
            ui.print(conversion.recipe.trim_end())
        }
    }
}

fn read(path: &Path) -> Result<String> {
    let failed = || format!("failed to read {}", path.display());
    let bytes = read_regular_file(path, MAX_CONFIG_FILE_BYTES).with_context(failed).context(ExitCode::Usage)?;
    let text = std::str::from_utf8(without_bom(&bytes)).with_context(failed).context(ExitCode::Usage)?;
    Ok(text.to_owned())
}

fn write(path: &Path, recipe: &str) -> Result<()> {
    let failed = || format!("failed to write {}", path.display());
    match write_new(path, recipe.as_bytes()) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
            let problem = format!("{}: the file exists; remove it or name another one", failed());
            Err(anyhow!(problem).context(ExitCode::Usage))
        }
        written => written.with_context(failed),
    }
}

/// Returns the report with the next commands.
fn report(args: &ConvertArgs, conversion: &Conversion) -> String {
    let Conversion { format, report, n_ranks, notes, .. } = conversion;
    let output = args.output.as_ref().map_or_else(|| "stdout".to_owned(), |output| output.display().to_string());
    let mut text = format!("{} ({}) -> {output}\n\n{}", args.file.display(), format.toolkit(), report.text());
    for note in notes {
        text.push_str(&format!("note: {note}\n"));
    }
    if *n_ranks > 1 {
        text.push_str(&format!("note: start at least {n_ranks} ranks: scripts/launch --nproc-per-node {n_ranks}\n"));
    }
    if args.output.is_some() {
        text.push_str(&format!("\nnext: trainer check {output}\n"));
    }
    text
}

fn json(args: &ConvertArgs, conversion: &Conversion) -> Value {
    let Conversion { format, report, n_ranks, notes, recipe } = conversion;
    let mut value = json!({
        "file": args.file.display().to_string(),
        "format": format.toolkit(),
        "output": args.output.as_ref().map(|output| output.display().to_string()),
        "ranks": n_ranks,
        "notes": notes,
    });
    if let (Value::Object(value), Value::Object(lists)) = (&mut value, report.json()) {
        value.extend(lists);
        if args.output.is_none() {
            value.insert("recipe".to_owned(), recipe.as_str().into());
        }
    }
    value
}
