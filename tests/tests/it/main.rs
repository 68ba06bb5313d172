//! Tests of the whole system: the programs, the documents, the recipes and the layering.

#![allow(clippy::unwrap_used, missing_docs)]

mod documents;
mod eval_stop;
mod eval_tasks;
mod export;
mod golden;
mod gpu_check;
mod gpu_scripts;
mod hostile;
// Other tests use the rest of it.
#[allow(dead_code)]
#[path = "../../../candle-ext/text/tests/it/hub/server.rs"]
mod hub_server;
mod layers;
mod module_cycles;
mod names;
mod pages;
mod parity;
mod plurals;
mod prefetch;
mod prose;
mod ranks;
mod recipes;
mod reference;
mod traffic;
mod use_model;
