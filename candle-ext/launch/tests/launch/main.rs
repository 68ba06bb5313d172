//! The program `launch` as its users meet it: real processes, and what torchrun did with the same command lines.

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
