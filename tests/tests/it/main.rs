//! Tests of the whole system: the programs, the documents, the recipes and the layering.

#![allow(clippy::unwrap_used, missing_docs)]

mod documents;
mod eval_tasks;
mod getting_started;
mod golden;
mod gpu_scripts;
mod hostile;
mod layers;
mod module_cycles;
mod names;
mod parity;
mod prose;
mod ranks;
mod recipes;
mod reference;
mod traffic;
mod use_model;
