//! The elastic launcher `launch`: starts a program once per rank, as torchrun does.
//!
//! [`cli`] parses the command line. [`plan`] resolves it on this node. The [`agent`] of a node joins the [`rendezvous`]
//! and runs its [`worker_group`] once per generation. Workers read their environment variables with
//! [`candlewick_comm::rank_env`]. This crate starts processes and moves no data between them.

pub mod agent;
pub mod child;
pub mod cli;
pub mod console;
pub mod dry_run;
pub mod endpoint;
pub mod error_file;
pub mod event;
pub mod event_queue;
pub mod exit;
pub mod generation;
pub mod guard;
pub mod line_splitter;
pub mod log_dir;
pub mod node_resources;
pub mod output;
pub mod plan;
pub mod program;
pub mod rendezvous;
pub mod report;
pub mod streams;
pub mod values;
pub mod worker_group;
