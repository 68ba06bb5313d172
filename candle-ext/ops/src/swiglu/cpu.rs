//! The CPU kernel of `swiglu`: blocks of elements in parallel.

use rayon::prelude::*;

use crate::exp::sigmoid;
use crate::floats::{Floats, FloatsMut};
use crate::simd::vectorised;

/// Elements that one task handles.
const BLOCK: usize = 1 << 12;

/// y = silu(gate) up
pub(super) fn forward(gate: Floats<'_>, up: Floats<'_>, y: FloatsMut<'_>) {
    y.chunks(BLOCK).into_par_iter().enumerate().for_each(|(i, mut y)| {
        let range = i * BLOCK..i * BLOCK + y.len();
        let (mut gate_wide, mut up_wide) = (Vec::new(), Vec::new());
        let gate = gate.slice(range.clone()).widened(&mut gate_wide);
        let up = up.slice(range).widened(&mut up_wide);
        let mut out = [0.0; BLOCK];
        let out = &mut out[..gate.len()];
        vectorised!(out.iter_mut().zip(gate.iter().zip(up)).for_each(|(out, (&g, u))| *out = g * sigmoid(g) * u));
        y.write(0, out);
    });
}

/// d_up = dy silu(gate), d_gate = dy up s (1 + gate (1 - s)) with s = sigmoid(gate)
pub(super) fn backward(
    (gate, up, dy): (Floats<'_>, Floats<'_>, Floats<'_>),
    d_gate: FloatsMut<'_>,
    d_up: FloatsMut<'_>,
) {
    let outputs = d_gate.chunks(BLOCK).into_par_iter().zip(d_up.chunks(BLOCK));
    outputs.enumerate().for_each(|(i, (mut d_gate, mut d_up))| {
        let range = i * BLOCK..i * BLOCK + d_gate.len();
        let (mut gate_wide, mut up_wide, mut dy_wide) = (Vec::new(), Vec::new(), Vec::new());
        let gate = gate.slice(range.clone()).widened(&mut gate_wide);
        let up = up.slice(range.clone()).widened(&mut up_wide);
        let dy = dy.slice(range).widened(&mut dy_wide);
        let (mut dg, mut du) = ([0.0; BLOCK], [0.0; BLOCK]);
        let (dg, du) = (&mut dg[..gate.len()], &mut du[..gate.len()]);
        vectorised!({
            let outputs = dg.iter_mut().zip(du.iter_mut());
            for (((dg, du), (&g, &u)), &dy) in outputs.zip(gate.iter().zip(up)).zip(dy) {
                let s = sigmoid(g);
                *du = dy * g * s;
                *dg = dy * u * s * (1.0 + g * (1.0 - s));
            }
        });
        d_gate.write(0, dg);
        d_up.write(0, du);
    });
}
