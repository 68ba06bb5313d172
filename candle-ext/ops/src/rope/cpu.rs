//! The CPU kernel of `rope`: tokens in parallel.

use rayon::prelude::*;

use super::Turn;
use crate::floats::{Floats, FloatsMut};
use crate::simd::vectorised;

/// Elements that one task handles, about.
const BLOCK: usize = 1 << 14;

/// Rotates x [t, h, k] by the (cos, sin) table [t, k/2].
pub(super) fn rotate(x: Floats<'_>, table: (&[f32], &[f32]), y: FloatsMut<'_>, (h, k): (usize, usize), turn: Turn) {
    let (width, half) = (h * k, k / 2);
    if width == 0 {
        return;
    }
    let sign = turn.sign();
    let n_tokens = (BLOCK / width).max(1);
    y.chunks(n_tokens * width).into_par_iter().enumerate().for_each(|(i, mut y)| {
        let (mut wide, mut out) = (Vec::new(), vec![0.0; width]);
        for row in 0..y.len() / width {
            let token = i * n_tokens + row;
            let x = x.slice(token * width..(token + 1) * width).widened(&mut wide);
            let cos = &table.0[token * half..(token + 1) * half];
            let sin = &table.1[token * half..(token + 1) * half];
            vectorised!({
                for (x, out) in x.chunks_exact(k).zip(out.chunks_exact_mut(k)) {
                    let ((a, b), (out_a, out_b)) = (x.split_at(half), out.split_at_mut(half));
                    for ((((a, b), (cos, sin)), out_a), out_b) in
                        a.iter().zip(b).zip(cos.iter().zip(sin)).zip(out_a).zip(out_b)
                    {
                        let sin = sign * sin;
                        *out_a = a * cos - b * sin;
                        *out_b = b * cos + a * sin;
                    }
                }
            });
            y.write(row * width, &out);
        }
    });
}
