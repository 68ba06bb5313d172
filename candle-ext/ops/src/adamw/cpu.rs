//! CPU kernel of `adamw`: chunks in parallel, one pass over the buffers.

use rayon::prelude::*;

use super::args::{Factors, StochasticRounding};
use super::step::StepFactors;
use crate::dropout::random;
use crate::floats::{Floats, FloatsMut, stochastic_bf16};
use crate::simd::{prefetch, vectorised};

/// Elements per task.
const CHUNK: usize = 1 << 13;

/// Elements converted to f32 at once, few enough for the L1 cache.
const BLOCK: usize = 1 << 10;

/// Elements of a cache line.
const LINE: usize = 16;

/// Prefetch distance in elements. Hardware prefetchers alone reach nine tenths of the speed.
const AHEAD: usize = 1 << 9;

/// Scalars of an update with the step's bias corrections applied: `lr` and `eps` are the corrected ones.
pub(super) struct AdamWUpdate<'a> {
    factors: Factors,
    grad_scale: f32,
    rounding: Option<&'a StochasticRounding>,
}

impl<'a> AdamWUpdate<'a> {
    pub(super) fn of(factors: Factors, step: StepFactors, rounding: Option<&'a StochasticRounding>) -> Self {
        let (lr, eps) = (factors.lr * step.correction, factors.eps * step.root);
        Self { factors: Factors { lr, eps, ..factors }, grad_scale: step.grad_scale, rounding }
    }
}

/// Buffers of an update; all have the same length.
pub(super) struct Buffers<'a> {
    pub(super) master: FloatsMut<'a>,
    pub(super) grad: Floats<'a>,
    pub(super) mean: FloatsMut<'a>,
    pub(super) square: FloatsMut<'a>,
}

pub(super) fn run(by: &AdamWUpdate<'_>, buffers: Buffers<'_>, compute: Option<FloatsMut<'_>>) {
    let Buffers { master, grad, mean, square } = buffers;
    let n_chunks = master.len().div_ceil(CHUNK);
    let copies: Vec<Option<FloatsMut<'_>>> = match compute {
        Some(compute) => compute.chunks(CHUNK).into_iter().map(Some).collect(),
        None => (0..n_chunks).map(|_| None).collect(),
    };
    (master.chunks(CHUNK), mean.chunks(CHUNK), square.chunks(CHUNK), copies).into_par_iter().enumerate().for_each(
        |(i, (master, mean, square, copy))| {
            let grad = grad.slice(i * CHUNK..i * CHUNK + master.len());
            update(by, i * CHUNK, Buffers { master, grad, mean, square }, copy);
        },
    );
}

/// Updates a chunk; `first` is the index of its first element.
fn update(by: &AdamWUpdate<'_>, first: usize, buffers: Buffers<'_>, copy: Option<FloatsMut<'_>>) {
    let Buffers { master, grad, mean, square } = buffers;
    match (master, grad, mean, square) {
        (FloatsMut::F32(master), Floats::F32(grad), FloatsMut::F32(mean), FloatsMut::F32(square)) => {
            step(by, master, grad, mean, square);
            copy.into_iter().for_each(|mut copy| copy.write(0, master));
        }
        (master, grad, mean, square) => widened(by, first, Buffers { master, grad, mean, square }, copy),
    }
}

/// Calls `step` on f32 copies of buffers that are not all f32.
fn widened(by: &AdamWUpdate<'_>, first: usize, buffers: Buffers<'_>, mut copy: Option<FloatsMut<'_>>) {
    let Buffers { mut master, grad, mut mean, mut square } = buffers;
    let (mut p, mut g, mut m, mut v) = ([0.0; BLOCK], [0.0; BLOCK], [0.0; BLOCK], [0.0; BLOCK]);
    for start in (0..master.len()).step_by(BLOCK) {
        let n = BLOCK.min(master.len() - start);
        let (p, g, m, v) = (&mut p[..n], &mut g[..n], &mut m[..n], &mut v[..n]);
        let block = start..start + n;
        master.floats().slice(block.clone()).read_into(p);
        grad.slice(block.clone()).read_into(g);
        mean.floats().slice(block.clone()).read_into(m);
        square.floats().slice(block).read_into(v);
        step(by, p, g, m, v);
        if let Some(rounding) = by.rounding {
            round_stochastically(rounding, first + start, p);
        }
        master.write(start, p);
        mean.write(start, m);
        square.write(start, v);
        if let Some(copy) = &mut copy {
            copy.write(start, p);
        }
    }
}

/// Rounds values to numbers of bf16; `first` is the index of the first.
fn round_stochastically(rounding: &StochasticRounding, first: usize, values: &mut [f32]) {
    let mut done = 0;
    while done < values.len() {
        let (position, n_left) = rounding.position.of_element(first + done);
        let end = values.len().min(done + n_left);
        let (key, row) = (rounding.key, &mut values[done..end]);
        vectorised!(row.iter_mut().enumerate().for_each(|(i, x)| {
            *x = stochastic_bf16(*x, random(key, (position + i) as u64) as u32);
        }));
        done = end;
    }
}

/// Updates f32 buffers of equal length.
fn step(by: &AdamWUpdate<'_>, master: &mut [f32], grad: &[f32], mean: &mut [f32], square: &mut [f32]) {
    vectorised!({
        let ((p_lines, p), (g_lines, g)) = (master.as_chunks_mut::<LINE>(), grad.as_chunks::<LINE>());
        let ((m_lines, m), (v_lines, v)) = (mean.as_chunks_mut::<LINE>(), square.as_chunks_mut::<LINE>());
        for ((p, g), (m, v)) in p_lines.iter_mut().zip(g_lines).zip(m_lines.iter_mut().zip(v_lines)) {
            for line in [p.as_ptr(), g.as_ptr(), m.as_ptr(), v.as_ptr()] {
                prefetch(line.wrapping_add(AHEAD), LINE);
            }
            step_elements(by, p, g, m, v);
        }
        step_elements(by, p, g, m, v);
    });
}

/// Computes `m = b1 m + (1 - b1) g`, `v = b2 v + (1 - b2) g^2` and `p = shrink p - lr m / (sqrt(v) + eps)`.
#[inline(always)]
fn step_elements(by: &AdamWUpdate<'_>, p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32]) {
    let f = by.factors;
    for ((p, g), (m, v)) in p.iter_mut().zip(g).zip(m.iter_mut().zip(v)) {
        let g = g * by.grad_scale;
        *m = *m * f.beta1 + g * f.one_minus_beta1;
        *v = *v * f.beta2 + g * g * f.one_minus_beta2;
        *p = *p * f.shrink - f.lr * (*m / (v.sqrt() + f.eps));
    }
}
