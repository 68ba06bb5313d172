//! Trains language models from recipes.

pub mod data;
pub mod checkpoint;
pub mod metrics;
pub mod schedule;
pub mod recipe;
pub mod signals;
pub mod plan;
pub mod cli;
pub mod run;
pub mod exit;
