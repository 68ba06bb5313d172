//! Tests of every op through the public API: against plain candle in f64, finite differences and invariants.

#![allow(clippy::unwrap_used, missing_docs)]

mod adamw;
mod attention;
mod attention_chunks;
mod attention_edge_cases;
mod attention_implementations;
mod candle_nn;
mod cases;
mod devices;
mod dropout;
mod embedding;
mod fp8;
mod fp8_experts;
mod fp8_fused;
mod grad_scaler;
mod in_place;
mod invariants;
mod kernels;
mod linear;
mod linear_cross_entropy;
mod main_gradients;
mod memory;
mod moe;
mod quantized;
mod rank_heads;
mod rms_norm;
mod rope;
mod scale_rows;
mod set_rows;
mod swiglu;
mod tape;
mod tiled;
