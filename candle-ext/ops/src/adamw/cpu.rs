//! The CPU kernel of `adamw`: chunks in parallel, everything in one pass.

use rayon::prelude::*;

use crate::floats::FloatsMut;
use crate::grad_scaler::StepFactors;

/// Elements that one task handles.
const CHUNK: usize = 1 << 13;

/// Moments that are widened at once: they stay in the first cache.
const BLOCK: usize = 1 << 10;

pub(super) struct Factors {
    grad_scale: f32,
    shrink: f32,
    beta1: f32,
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
    step_size: f32,
    eps: f32,
}

impl Factors {
    pub(super) fn of(factors: &super::Factors, step: StepFactors) -> Self {
        Self {
            grad_scale: step.grad_scale,
            shrink: factors.shrink,
            beta1: factors.beta1,
            one_minus_beta1: factors.one_minus_beta1,
            beta2: factors.beta2,
            one_minus_beta2: factors.one_minus_beta2,
            step_size: factors.lr * step.correction,
            eps: factors.eps * step.root,
        }
    }
}

/// What an update reads and writes, element by element.
pub(super) struct Buffers<'a> {
    pub(super) master: &'a mut [f32],
    pub(super) grad: &'a [f32],
    pub(super) mean: FloatsMut<'a>,
    pub(super) square: FloatsMut<'a>,
}

pub(super) fn run(factors: &Factors, buffers: Buffers<'_>, compute: Option<FloatsMut<'_>>) {
    let n_chunks = buffers.master.len().div_ceil(CHUNK);
    let copies: Vec<Option<FloatsMut<'_>>> = match compute {
        Some(compute) => compute.chunks(CHUNK).into_iter().map(Some).collect(),
        None => (0..n_chunks).map(|_| None).collect(),
    };
    (buffers.master.par_chunks_mut(CHUNK), buffers.grad.par_chunks(CHUNK))
        .into_par_iter()
        .zip((buffers.mean.chunks(CHUNK), buffers.square.chunks(CHUNK)))
        .zip(copies)
        .for_each(|(((master, grad), (mean, square)), copy)| {
            match (mean, square) {
                (FloatsMut::F32(mean), FloatsMut::F32(square)) => step(factors, master, grad, mean, square),
                (mean, square) => widened(factors, master, grad, mean, square),
            }
            if let Some(mut copy) = copy {
                copy.write(0, master);
            }
        });
}

/// As `step` for moments in another format.
fn widened(f: &Factors, master: &mut [f32], grad: &[f32], mut mean: FloatsMut, mut square: FloatsMut) {
    let (mut wide_mean, mut wide_square) = ([0.0; BLOCK], [0.0; BLOCK]);
    for (i, (master, grad)) in master.chunks_mut(BLOCK).zip(grad.chunks(BLOCK)).enumerate() {
        let (start, n) = (i * BLOCK, master.len());
        let (wide_mean, wide_square) = (&mut wide_mean[..n], &mut wide_square[..n]);
        mean.floats().slice(start..start + n).read_into(wide_mean);
        square.floats().slice(start..start + n).read_into(wide_square);
        step(f, master, grad, wide_mean, wide_square);
        mean.write(start, wide_mean);
        square.write(start, wide_square);
    }
}

/// m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2, p = shrink p - step_size m / (sqrt(v) + eps)
fn step(f: &Factors, master: &mut [f32], grad: &[f32], mean: &mut [f32], square: &mut [f32]) {
    for ((p, g), (m, v)) in master.iter_mut().zip(grad).zip(mean.iter_mut().zip(square)) {
        let g = g * f.grad_scale;
        *m = *m * f.beta1 + g * f.one_minus_beta1;
        *v = *v * f.beta2 + g * g * f.one_minus_beta2;
        *p = *p * f.shrink - f.step_size * (*m / (v.sqrt() + f.eps));
    }
}
