//! Integration tests of the trainer: one binary with one module for each subject.
#![allow(clippy::unwrap_used, missing_docs)]

mod bad_input;
mod cli;
mod config;
mod data;
mod flops;
mod fp8;
mod memory_auto;
mod modes;
mod mtp;
mod nonfinite;
mod plan_rules;
mod profile;
mod recipe_base;
mod recipe_errors;
mod recipe_schema;
mod recipe_values;
mod results;
mod resume;
mod routing_replay;
mod schedules;
mod sharing;
mod signals;
mod support;
mod tracking;
mod tracking_server;
