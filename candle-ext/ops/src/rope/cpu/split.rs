//! CPU kernels of `split_qkv` and `rms_norm_rope`: tokens in parallel.

use candle_core::{Result, bail};
use rayon::prelude::*;

use super::{BLOCK, RopeTable, rotate_token};
use crate::dot::dot;
use crate::floats::{Floats, FloatsMut};
use crate::rms_norm::cpu::{add_in_parts, normalise, reciprocal_rms};
use crate::rope::heads::{HeadSlice, RopeHeads};
use crate::simd::vectorised;

/// A part of each joined row.
#[derive(Clone, Copy)]
pub(in crate::rope) struct CpuPart<'a> {
    pub(in crate::rope) heads: RopeHeads,
    pub(in crate::rope) slice: HeadSlice,
    /// Angles; `None` if the heads are not rotated.
    pub(in crate::rope) table: Option<RopeTable<'a>>,
    /// Weight of the heads' norm.
    pub(in crate::rope) weight: Option<Floats<'a>>,
    pub(in crate::rope) eps: f32,
}

/// Gradient of a part, and the joined rows if it has a norm.
#[derive(Clone, Copy)]
pub(in crate::rope) struct PartGrad<'a> {
    pub(in crate::rope) x: Option<Floats<'a>>,
    pub(in crate::rope) dy: Floats<'a>,
    pub(in crate::rope) part: CpuPart<'a>,
}

/// Writes the heads of a part of `x`, normed and rotated, to y [t, n, k].
pub(in crate::rope) fn split(x: Floats<'_>, part: CpuPart<'_>, y: FloatsMut<'_>) {
    let (width, dim) = (part.width(), part.heads.dim);
    let mut w_wide = Vec::new();
    let weight = part.weight.map(|weight| weight.widened(&mut w_wide));
    let n_tokens = (BLOCK / width.max(1)).max(1);
    y.chunks(n_tokens * width).into_par_iter().enumerate().for_each(|(i, mut y)| {
        let (mut x_wide, mut normed, mut out) = (Vec::new(), vec![0.0; width], vec![0.0; width]);
        for row in 0..y.len() / width {
            let token = i * n_tokens + row;
            let format = x.slice(part.elements(token));
            let x = format.widened(&mut x_wide);
            let heads = match weight {
                None => x,
                Some(weight) => {
                    for (x, out) in x.chunks_exact(dim).zip(normed.chunks_exact_mut(dim)) {
                        normalise(format, x, out, part.eps);
                        vectorised!(out.iter_mut().zip(weight).for_each(|(out, w)| *out *= w));
                    }
                    format.round_like(&mut normed);
                    &normed
                }
            };
            part.rotate(heads, token, &mut out, 1.0);
            y.write(row * width, &out);
        }
    });
}

impl CpuPart<'_> {
    fn width(self) -> usize {
        self.heads.n * self.heads.dim
    }

    /// Returns the positions of a token's heads in the joined rows.
    fn elements(self, token: usize) -> std::ops::Range<usize> {
        let start = token * self.slice.stride + self.slice.first;
        start..start + self.width()
    }

    /// Rotates heads of a token, or copies them.
    fn rotate(self, heads: &[f32], token: usize, out: &mut [f32], sign: f32) {
        match self.table {
            Some(table) => rotate_token(heads, table, token, out, (self.heads.dim, sign)),
            None => out.copy_from_slice(heads),
        }
    }
}

impl PartGrad<'_> {
    /// Writes the gradient of the part to its slice of the joined rows `dx`.
    pub(in crate::rope) fn write(self, dx: FloatsMut<'_>) -> Result<()> {
        let Self { x, dy, part } = self;
        let (width, dim, stride) = (part.width(), part.heads.dim, part.slice.stride);
        let mut w_wide = Vec::new();
        let norm = match (part.weight, x) {
            (Some(weight), Some(x)) => Some((weight.widened(&mut w_wide), x)),
            (Some(_), None) => bail!("split_qkv: the input of a norm was not saved"),
            (None, _) => None,
        };
        if width == 0 {
            return Ok(());
        }
        let n_tokens = (BLOCK / width).max(1);
        dx.chunks(n_tokens * stride).into_par_iter().enumerate().for_each(|(i, mut dx)| {
            let (mut x_wide, mut dy_wide, mut out) = (Vec::new(), Vec::new(), vec![0.0; width]);
            for row in 0..dx.len() / stride {
                let token = i * n_tokens + row;
                let dy = dy.slice(token * width..(token + 1) * width);
                part.rotate(dy.widened(&mut dy_wide), token, &mut out, -1.0);
                if let Some((weight, x)) = norm {
                    dy.round_like(&mut out);
                    let x = x.slice(part.elements(token)).widened(&mut x_wide);
                    for (x, out) in x.chunks_exact(dim).zip(out.chunks_exact_mut(dim)) {
                        let r = reciprocal_rms(x, part.eps);
                        vectorised!(out.iter_mut().zip(weight).for_each(|(g, w)| *g *= w));
                        let gn = dot(x, out) * r / dim as f32;
                        vectorised!(out.iter_mut().zip(x).for_each(|(g, x)| *g = r * (*g - x * r * gn)));
                    }
                }
                dx.write(row * stride + part.slice.first, &out);
            }
        });
        Ok(())
    }

    /// Adds the gradient of the norm's weight, in the order of `rms_norm`.
    pub(in crate::rope) fn add_grad_weight(self, dw: &mut [f32]) {
        let Self { x: Some(x), dy, part } = self else { return };
        let (n, dim) = (part.heads.n, part.heads.dim);
        let scratch = || (Vec::new(), Vec::new(), vec![0.0; dim], vec![0.0; dim]);
        add_in_parts(dy.len() / dim, dw, scratch, |row, (x_wide, dy_wide, grad, normed), sum| {
            let (token, head) = (row / n, row % n);
            let start = part.elements(token).start + head * dim;
            let (x, dy) = (x.slice(start..start + dim), dy.slice(row * dim..(row + 1) * dim));
            part.rotate(dy.widened(dy_wide), token, grad, -1.0);
            dy.round_like(grad);
            normalise(x, x.widened(x_wide), normed, part.eps);
            vectorised!(sum.iter_mut().zip(&*normed).zip(&*grad).for_each(|((sum, n), dy)| *sum += n * dy));
        });
    }
}
