//! The CPU kernel of `adamw`: chunks in parallel, everything in one pass.

use rayon::prelude::*;

use super::AdamW;
use crate::floats::FloatsMut;

/// Elements that one task handles.
const CHUNK: usize = 1 << 13;

/// The scalars of an update, computed in f64 and rounded once.
pub(super) struct Factors {
    grad_scale: f32,
    shrink: f32,
    beta1: f32,
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
    step_size: f32,
    root_correction2: f32,
    eps: f32,
}

impl Factors {
    pub(super) fn of(hyper: &AdamW) -> Self {
        let step = hyper.step as f64;
        Self {
            grad_scale: hyper.grad_scale as f32,
            shrink: (1.0 - hyper.lr * hyper.weight_decay) as f32,
            beta1: hyper.beta1 as f32,
            one_minus_beta1: (1.0 - hyper.beta1) as f32,
            beta2: hyper.beta2 as f32,
            one_minus_beta2: (1.0 - hyper.beta2) as f32,
            step_size: (hyper.lr / (1.0 - hyper.beta1.powf(step))) as f32,
            root_correction2: (1.0 - hyper.beta2.powf(step)).sqrt() as f32,
            eps: hyper.eps as f32,
        }
    }
}

/// What an update reads and writes, element by element.
pub(super) struct State<'a> {
    pub(super) master: &'a mut [f32],
    pub(super) grad: &'a [f32],
    pub(super) mean: &'a mut [f32],
    pub(super) square: &'a mut [f32],
}

pub(super) fn run(factors: &Factors, state: State<'_>, compute: Option<FloatsMut<'_>>) {
    let n_chunks = state.master.len().div_ceil(CHUNK);
    let copies: Vec<Option<FloatsMut<'_>>> = match compute {
        Some(compute) => compute.chunks(CHUNK).into_iter().map(Some).collect(),
        None => (0..n_chunks).map(|_| None).collect(),
    };
    (state.master.par_chunks_mut(CHUNK), state.grad.par_chunks(CHUNK))
        .into_par_iter()
        .zip((state.mean.par_chunks_mut(CHUNK), state.square.par_chunks_mut(CHUNK)))
        .zip(copies)
        .for_each(|(((master, grad), (mean, square)), copy)| {
            step(factors, State { master, grad, mean, square });
            if let Some(mut copy) = copy {
                copy.write(0, master);
            }
        });
}

fn step(f: &Factors, state: State<'_>) {
    let moments = state.mean.iter_mut().zip(state.square);
    for ((p, g), (m, v)) in state.master.iter_mut().zip(state.grad).zip(moments) {
        let g = g * f.grad_scale;
        *m = *m * f.beta1 + g * f.one_minus_beta1;
        *v = *v * f.beta2 + g * g * f.one_minus_beta2;
        let root = v.sqrt() / f.root_correction2 + f.eps;
        *p = *p * f.shrink - f.step_size * (*m / root);
    }
}
