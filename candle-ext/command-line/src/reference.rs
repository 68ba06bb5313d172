//! The Markdown reference of a program: a section for each command, with usage, arguments and examples.

use std::fmt::Write as _;

use clap::builder::{PossibleValue, StyledStr};
use clap::{Arg, ArgAction, Command};

/// Returns the Markdown reference of a program and its visible commands. Options of all commands are in the first section.
pub fn reference(mut command: Command) -> String {
    command.build();
    let mut page = String::new();
    section(&mut page, &command, None);
    page
}

/// Appends the section of a command, and those of its own commands. `parent` is the command's prefix.
fn section(page: &mut String, command: &Command, parent: Option<&str>) {
    let name =
        parent.map_or_else(|| command.get_name().to_owned(), |parent| format!("{parent} {}", command.get_name()));
    if parent.is_some() {
        let _ = write!(page, "\n## {name}\n");
    }
    if let Some(about) = command.get_long_about().or(command.get_about()) {
        let _ = write!(page, "\n{}\n", sentence(about));
    }
    let aliases: Vec<String> = command.get_visible_aliases().map(|alias| format!("`{alias}`")).collect();
    if !aliases.is_empty() {
        let _ = write!(page, "\nAlias: {}.\n", aliases.join(", "));
    }
    let usage = command.clone().render_usage().to_string();
    let _ = write!(page, "\n```text\n{}\n```\n", usage.trim().trim_start_matches("Usage: "));
    arguments(page, command, parent.is_none());
    if let Some(examples) = command.get_after_long_help().or(command.get_after_help()) {
        let _ = write!(page, "\n```text\n{}\n```\n", examples.to_string().trim_end());
    }
    for subcommand in command.get_subcommands().filter(|it| !it.is_hide_set() && it.get_name() != "help") {
        section(page, subcommand, Some(&name));
    }
}

/// Appends a table for each heading of the arguments. Only the root lists global options.
fn arguments(page: &mut String, command: &Command, is_root: bool) {
    let is_shown = |arg: &&Arg| {
        let is_builtin = matches!(arg.get_action(), ArgAction::Help | ArgAction::HelpShort | ArgAction::HelpLong)
            || matches!(arg.get_action(), ArgAction::Version);
        !arg.is_hide_set() && !is_builtin && (is_root || !arg.is_global_set())
    };
    let shown: Vec<&Arg> = command.get_arguments().filter(is_shown).collect();
    let mut headings: Vec<Option<&str>> = shown.iter().map(|arg| arg.get_help_heading()).collect();
    // Arguments without a heading are first; the others keep the order of their declaration.
    headings.sort_by_key(Option::is_some);
    let mut listed = Vec::new();
    for heading in headings {
        if listed.contains(&heading) {
            continue;
        }
        listed.push(heading);
        if let Some(heading) = heading {
            let _ = write!(page, "\n{heading}:\n");
        }
        page.push_str("\n| argument | meaning | default |\n|---|---|---|\n");
        for arg in shown.iter().filter(|arg| arg.get_help_heading() == heading) {
            let _ = writeln!(page, "| {} | {} | {} |", cell(&spelling(arg)), cell(&meaning(arg)), cell(&default(arg)));
        }
    }
}

/// Returns the forms of an argument: `-M`, `--model <MODEL>`, `<RECIPE>`.
fn spelling(arg: &Arg) -> String {
    let value = match arg.get_action().takes_values() {
        true => value_names(arg),
        false => String::new(),
    };
    let (short, long) = (arg.get_short(), arg.get_long());
    let forms: Vec<String> = match (short, long) {
        (None, None) => vec![value],
        _ => {
            let separated = if value.is_empty() { String::new() } else { format!(" {value}") };
            let long = long.map(|long| format!("--{long}{separated}"));
            let short =
                short.map(|short| if long.is_none() { format!("-{short}{separated}") } else { format!("-{short}") });
            short.into_iter().chain(long).collect()
        }
    };
    forms.iter().map(|form| format!("`{form}`")).collect::<Vec<_>>().join(", ")
}

fn value_names(arg: &Arg) -> String {
    let names = arg.get_value_names().map_or_else(
        || vec![arg.get_id().as_str().to_uppercase()],
        |names| names.iter().map(ToString::to_string).collect(),
    );
    names.iter().map(|name| format!("<{name}>")).collect::<Vec<_>>().join(" ")
}

/// Returns the help of an argument, its values and its visible aliases.
fn meaning(arg: &Arg) -> String {
    let mut text = arg.get_long_help().or(arg.get_help()).map(sentence).unwrap_or_default();
    let values: Vec<PossibleValue> = match arg.get_action().takes_values() {
        true => arg.get_possible_values().into_iter().filter(|value| !value.is_hide_set()).collect(),
        false => Vec::new(),
    };
    if !values.is_empty() {
        let names: Vec<String> = values.iter().map(|value| format!("`{}`", value.get_name())).collect();
        let _ = write!(text, " Values: {}.", names.join(", "));
    }
    if let Some(aliases) = arg.get_visible_aliases().filter(|aliases| !aliases.is_empty()) {
        let names: Vec<String> = aliases.iter().map(|alias| format!("`--{alias}`")).collect();
        let _ = write!(text, " Alias: {}.", names.join(", "));
    }
    text
}

fn default(arg: &Arg) -> String {
    let values: Vec<String> = match arg.get_action().takes_values() && !arg.is_hide_default_value_set() {
        true => arg.get_default_values().iter().map(|value| format!("`{}`", value.to_string_lossy())).collect(),
        false => Vec::new(),
    };
    values.join(", ")
}

/// Returns help as one line that ends with a full stop.
fn sentence(help: &StyledStr) -> String {
    let text = help.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
    if text.is_empty() || text.ends_with(['.', ':', '!', '?']) { text } else { text + "." }
}

/// Escapes text for a table's cell.
fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reference_has_every_visible_command_and_argument() {
        let model = Arg::new("model").long("model").short('M').help("A folder").default_value("base");
        let format = Arg::new("format").long("format").value_parser(["text", "json"]).help_heading("Output");
        let quiet = Arg::new("quiet").long("quiet").global(true).action(ArgAction::SetTrue).help("Print less");
        let run = Command::new("run").about("Run it").args([model, format]).after_long_help("Examples:\n  demo run");
        let hidden = Command::new("old").hide(true).about("The former name");
        let page = reference(Command::new("demo").about("A demonstration").arg(quiet).subcommands([run, hidden]));
        for part in [
            "\nA demonstration.\n",
            "\n## demo run\n",
            "| `-M`, `--model <MODEL>` | A folder. | `base` |",
            "\nOutput:\n\n| argument |",
            "Values: `text`, `json`.",
            "```text\nExamples:\n  demo run\n```",
            "```text\ndemo run [OPTIONS]\n```",
        ] {
            assert!(page.contains(part), "{part:?} is missing:\n{page}");
        }
        assert!(!page.contains("former name") && !page.contains("--help"), "{page}");
        assert_eq!(page.matches("--quiet").count(), 1, "{page}");
    }

    #[test]
    fn a_bar_in_an_argument_is_escaped() {
        let arg = Arg::new("count").long("count").value_name("N|auto");
        assert!(reference(Command::new("demo").arg(arg)).contains("`--count <N\\|auto>`"));
    }
}
