//! Starts a program once for each rank, as torchrun does: the program `launch`.
//!
//! [`cli`] is what the user wrote and [`plan`] what will happen. The [`agent`] of a node joins the [`rendezvous`] and runs its
//! [`worker_group`], once for each generation. This crate sets processes up and moves no data between them; the variables
//! that it gives them are read by [`candlewick_comm::rank_env`].

pub mod agent;
pub mod child;
pub mod cli;
pub mod console;
pub mod dry_run;
pub mod endpoint;
pub mod error_file;
pub mod event;
pub mod exit;
pub mod generation;
pub mod guard;
pub mod host;
pub mod lines;
pub mod logs;
pub mod mailbox;
pub mod output;
pub mod plan;
pub mod program;
pub mod rendezvous;
pub mod report;
pub mod streams;
pub mod values;
pub mod worker_group;
