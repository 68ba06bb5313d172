//! The program `launch`: reads the command line, the environment and the resources of this node.

use std::env;
use std::ffi::OsString;
use std::process::ExitCode;

use candlewick_comm::rank_env::{RankEnv, Variables};
use candlewick_command_line::{complete, completions, with_label_color};
use candlewick_launch::agent;
use candlewick_launch::cli::{Cli, DocumentCommand};
use candlewick_launch::console::{self, log};
use candlewick_launch::exit::{FAILED, OK, USAGE};
use candlewick_launch::node_resources::NodeResources;
use candlewick_launch::plan::LaunchPlan;
use candlewick_launch::program;
use candlewick_launch::streams::StdStream;
use candlewick_launch::{child, dry_run};
use clap::{CommandFactory, Parser};

fn main() -> ExitCode {
    complete(Cli::command);
    let arguments: Vec<OsString> = env::args_os().skip(1).collect();
    match child::run(&arguments) {
        Some(code) => code,
        None => ExitCode::from(u8::try_from(run() & 0xff).expect("masked to one byte")),
    }
}

fn run() -> i32 {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // An error of a closed pipe is ignored.
            let _ = error.print();
            return error.exit_code();
        }
    };
    if let Some(command) = &cli.document {
        return print_document(command);
    }
    let variables = variables();
    if cli.world { show_world(&variables) } else { launch(&cli, NodeResources::local(variables)) }
}

fn launch(cli: &Cli, node_resources: NodeResources) -> i32 {
    let plan = match LaunchPlan::resolve(cli, &node_resources) {
        Ok(plan) => plan,
        Err(error) => return failed(&error, USAGE),
    };
    if cli.dry_run {
        console::write(StdStream::Out, dry_run::text(&plan, &node_resources).as_bytes());
        return OK;
    }
    let path = node_resources.variables.get("PATH").map_or("", String::as_str);
    if let Err(error) = program::find(&plan.command[0], path) {
        return failed(&error, USAGE);
    }
    plan.notes.iter().for_each(|note| log(note));
    agent::run(&plan, &node_resources).unwrap_or_else(|error| failed(&error, error.code()))
}

fn print_document(command: &DocumentCommand) -> i32 {
    let text = match command {
        DocumentCommand::Completions { shell } => {
            Ok(completions(&Cli::command(), *shell, env::args_os().next().unwrap_or_default().as_ref()))
        }
        DocumentCommand::Man(args) => args.run(Cli::command()),
    };
    match text {
        Ok(text) => {
            console::write(StdStream::Out, format!("{}\n", text.trim_end()).as_bytes());
            OK
        }
        Err(error) => failed(&error, FAILED),
    }
}

fn show_world(variables: &Variables) -> i32 {
    match RankEnv::of_this_process(variables) {
        Ok(world) => {
            console::write(StdStream::Out, format!("{world}\n").as_bytes());
            OK
        }
        Err(error) => failed(&error, FAILED),
    }
}

fn failed(error: &dyn std::error::Error, code: i32) -> i32 {
    console::write(StdStream::Err, format!("{} failed to {error}\n", with_label_color("error:")).as_bytes());
    code
}

/// Returns the environment variables that are valid UTF-8. Workers inherit the others too.
fn variables() -> Variables {
    let text = |(name, value): (OsString, OsString)| Some((name.into_string().ok()?, value.into_string().ok()?));
    env::vars_os().filter_map(text).collect()
}
