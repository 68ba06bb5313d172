//! The program `launch`: reads the command line, the environment and the machine, and hands them on as values.

use std::env;
use std::ffi::OsString;
use std::process::ExitCode;

use candlewick_comm::rank_env::{RankEnv, Variables};
use candlewick_launch::agent;
use candlewick_launch::cli::Cli;
use candlewick_launch::console::{self, say};
use candlewick_launch::exit::{FAILED, OK, USAGE};
use candlewick_launch::host::Host;
use candlewick_launch::plan::Plan;
use candlewick_launch::program;
use candlewick_launch::streams::Stream;
use candlewick_launch::{child, dry_run};
use clap::Parser;

fn main() -> ExitCode {
    let arguments: Vec<OsString> = env::args_os().skip(1).collect();
    match child::run(&arguments) {
        Some(code) => code,
        None => ExitCode::from(u8::try_from(run() & 0xff).expect("a byte was cut out")),
    }
}

fn run() -> i32 {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // A closed pipe is nobody's fault.
            let _ = error.print();
            return error.exit_code();
        }
    };
    let variables = variables();
    if cli.world { show_world(&variables) } else { launch(&cli, Host::this(variables)) }
}

fn launch(cli: &Cli, host: Host) -> i32 {
    let plan = match Plan::resolve(cli, &host) {
        Ok(plan) => plan,
        Err(error) => return failed(&error, USAGE),
    };
    if cli.dry_run {
        console::write(Stream::Out, dry_run::text(&plan, &host).as_bytes());
        return OK;
    }
    let path = host.variables.get("PATH").map_or("", String::as_str);
    if let Err(error) = program::find(&plan.command[0], path) {
        return failed(&error, USAGE);
    }
    plan.notes.iter().for_each(|note| say(note));
    agent::run(&plan, &host).unwrap_or_else(|error| failed(&error, error.code()))
}

fn show_world(variables: &Variables) -> i32 {
    match RankEnv::from_variables(variables) {
        Ok(world) => {
            console::write(Stream::Out, format!("{world}\n").as_bytes());
            OK
        }
        Err(error) => failed(&error, FAILED),
    }
}

fn failed(error: &dyn std::error::Error, code: i32) -> i32 {
    console::write(Stream::Err, format!("error: failed to {error}\n").as_bytes());
    code
}

/// A variable that is not text can neither be ours nor torchrun's. Workers inherit it all the same.
fn variables() -> Variables {
    let text = |(name, value): (OsString, OsString)| Some((name.into_string().ok()?, value.into_string().ok()?));
    env::vars_os().filter_map(text).collect()
}
