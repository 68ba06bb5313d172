//! Starts a program once for each rank, as torchrun does: the program `launch`.
//!
//! [`cli`] is what the user wrote, [`plan`] what it comes to, [`launcher`] what is then done. This crate sets processes up
//! and moves no data between them; what it tells them is read by [`candlewick_comm::place`].

pub mod attempt;
pub mod child;
pub mod cli;
pub mod console;
pub mod dry_run;
pub mod ended;
pub mod endpoint;
pub mod error_file;
pub mod event;
pub mod group;
pub mod guard;
pub mod host;
pub mod launcher;
pub mod lines;
pub mod logs;
pub mod mailbox;
pub mod meeting;
pub mod output;
pub mod plan;
pub mod program;
pub mod report;
pub mod round;
pub mod streams;
pub mod values;
pub mod worker;
