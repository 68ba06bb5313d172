//! CPU kernel of `swiglu`: rows, or parts of rows, in parallel.

use rayon::prelude::*;

use super::source::Gated;
use crate::exp::sigmoid;
use crate::floats::{Floats, FloatsMut};
use crate::simd::vectorised;

/// Elements per task, approximately, and the most elements computed at once.
const BLOCK: usize = 1 << 12;

/// Inputs; element i of row r is at `r * stride + i` of each.
#[derive(Clone, Copy)]
pub(super) struct SwigluInputs<'a> {
    pub(super) gate: Floats<'a>,
    pub(super) up: Floats<'a>,
}

/// Up to [`BLOCK`] elements of a row: their positions in the inputs and in a task's part of the output [rows, width].
struct Span {
    input: usize,
    output: usize,
    len: usize,
}

/// Computes y = silu(gate) up.
pub(super) fn forward(SwigluInputs { gate, up }: SwigluInputs<'_>, y: FloatsMut<'_>, gated: Gated) {
    let gated = gated.in_blocks();
    y.chunks(gated.task()).into_par_iter().enumerate().for_each(|(task, mut y)| {
        let (mut gate_wide, mut up_wide, mut out) = (Vec::new(), Vec::new(), [0.0; BLOCK]);
        for Span { input, output, len } in gated.spans(task, y.len()) {
            let gate = gate.slice(input..input + len).widened(&mut gate_wide);
            let up = up.slice(input..input + len).widened(&mut up_wide);
            let out = &mut out[..len];
            vectorised!(out.iter_mut().zip(gate.iter().zip(up)).for_each(|(out, (&g, u))| *out = g * sigmoid(g) * u));
            y.write(output, out);
        }
    });
}

/// Gradient of the output, contiguous.
pub(super) enum OutputGradBuffer<'a> {
    Read(Floats<'a>),
    /// Overwritten by the output.
    BecomesOutput(FloatsMut<'a>),
}

/// GateUpGrads of gate and up.
pub(super) enum GateUpGrads<'a> {
    /// One buffer each, contiguous.
    Two([FloatsMut<'a>; 2]),
    /// One buffer: rows of `stride` elements, `width` of d_gate, then `width` of d_up.
    Joined(FloatsMut<'a>),
}

/// Computes d_up = dy silu(gate) and d_gate = dy up s (1 + gate (1 - s)) with s = sigmoid(gate), and y if it overwrites dy.
pub(super) fn backward(inputs: SwigluInputs<'_>, dy: OutputGradBuffer<'_>, grads: GateUpGrads<'_>, gated: Gated) {
    match grads {
        GateUpGrads::Two([d_gate, d_up]) => {
            let gated = gated.in_blocks();
            let outputs = d_gate.chunks(gated.task()).into_par_iter().zip(d_up.chunks(gated.task()));
            outputs.zip(dy.chunks(gated.task())).enumerate().for_each(|(task, ((mut d_gate, mut d_up), dy))| {
                for_each_gradient(inputs, dy, task, gated, |span, dg, du| {
                    d_gate.write(span.output, dg);
                    d_up.write(span.output, du);
                });
            });
        }
        GateUpGrads::Joined(d_joined) => {
            let Gated { width, stride, .. } = gated;
            let joined = d_joined.chunks(gated.task() / width * stride).into_par_iter();
            joined.zip(dy.chunks(gated.task())).enumerate().for_each(|(task, (mut d_joined, dy))| {
                for_each_gradient(inputs, dy, task, gated, |span, dg, du| {
                    let at = span.output / width * stride + span.output % width;
                    d_joined.write(at, dg);
                    d_joined.write(at + width, du);
                });
            });
        }
    }
}

impl<'a> OutputGradBuffer<'a> {
    /// Splits into chunks of `len`; the last may be shorter.
    fn chunks(self, len: usize) -> Vec<Self> {
        match self {
            Self::Read(dy) => {
                let n = dy.len();
                (0..n).step_by(len.max(1)).map(|start| Self::Read(dy.slice(start..n.min(start + len)))).collect()
            }
            Self::BecomesOutput(dy) => dy.chunks(len).into_iter().map(Self::BecomesOutput).collect(),
        }
    }

    fn floats(&self) -> Floats<'_> {
        match self {
            Self::Read(dy) => *dy,
            Self::BecomesOutput(dy) => dy.floats(),
        }
    }
}

/// Calls `write` with d_gate and d_up, for the spans of a task with this part of dy.
fn for_each_gradient(
    SwigluInputs { gate, up }: SwigluInputs<'_>,
    mut of_output: OutputGradBuffer<'_>,
    task: usize,
    gated: Gated,
    mut write: impl FnMut(&Span, &[f32], &[f32]),
) {
    let (mut gate_wide, mut up_wide, mut dy_wide) = (Vec::new(), Vec::new(), Vec::new());
    let (mut dg, mut du, mut out) = ([0.0; BLOCK], [0.0; BLOCK], [0.0; BLOCK]);
    for span in gated.spans(task, of_output.floats().len()) {
        let range = span.input..span.input + span.len;
        let gate = gate.slice(range.clone()).widened(&mut gate_wide);
        let up = up.slice(range).widened(&mut up_wide);
        let dy = of_output.floats().slice(span.output..span.output + span.len).widened(&mut dy_wide);
        let (dg, du) = (&mut dg[..span.len], &mut du[..span.len]);
        vectorised!({
            let outputs = dg.iter_mut().zip(du.iter_mut());
            for (((dg, du), (&g, &u)), &dy) in outputs.zip(gate.iter().zip(up)).zip(dy) {
                let s = sigmoid(g);
                *du = dy * g * s;
                *dg = dy * u * s * (1.0 + g * (1.0 - s));
            }
        });
        write(&span, dg, du);
        if let OutputGradBuffer::BecomesOutput(y) = &mut of_output {
            let out = &mut out[..span.len];
            vectorised!(out.iter_mut().zip(gate.iter().zip(up)).for_each(|(out, (&g, u))| *out = g * sigmoid(g) * u));
            y.write(span.output, out);
        }
    }
}

impl Gated {
    /// Splits one long row into rows of a block; the last may be shorter.
    fn in_blocks(self) -> Self {
        if self.n_rows == 1 { Self { width: BLOCK, stride: BLOCK, ..self } } else { self }
    }

    /// Returns the number of elements per task: whole rows.
    fn task(self) -> usize {
        (BLOCK / self.width).max(1) * self.width
    }

    /// Returns the spans of a task that writes `n` elements.
    fn spans(self, task: usize, n: usize) -> impl Iterator<Item = Span> {
        let Self { width, stride, .. } = self;
        let first_row = task * self.task() / width;
        (0..n).step_by(width).flat_map(move |row| {
            let end = width.min(n - row);
            (0..end).step_by(BLOCK).map(move |start| Span {
                input: (first_row + row / width) * stride + start,
                output: row + start,
                len: BLOCK.min(end - start),
            })
        })
    }
}
