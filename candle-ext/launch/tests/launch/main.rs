//! Tests of the program `launch` with real processes, compared with torchrun's recorded results.

#![allow(clippy::unwrap_used, missing_docs)]

mod launcher;

mod command_line;
mod environment;
mod faults;
mod nodes;
mod output;
mod parity;
mod signals;
mod slurm;
mod starters;
