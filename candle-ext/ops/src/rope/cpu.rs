//! CPU kernel of `rope`: tokens in parallel.

pub(super) mod split;

use rayon::prelude::*;

use super::heads::{HeadSlice, RopeHeads, RotationDirection};
use crate::floats::{Floats, FloatsMut};
use crate::simd::vectorised;

/// Elements per task, approximately.
const BLOCK: usize = 1 << 14;

/// Cosines and sines [t, r/2].
#[derive(Clone, Copy)]
pub(super) struct RopeTable<'a> {
    pub(super) cos: &'a [f32],
    pub(super) sin: &'a [f32],
    /// Rotated pairs of a head, r/2.
    pub(super) n_pairs: usize,
}

/// Rotates heads of each token of `x` by the table into `y`; copies them if there is no table.
pub(super) fn rotate(
    (x, from): (Floats<'_>, HeadSlice),
    table: Option<RopeTable<'_>>,
    (y, to): (FloatsMut<'_>, HeadSlice),
    RopeHeads { n, dim }: RopeHeads,
    direction: RotationDirection,
) {
    let width = n * dim;
    if width == 0 {
        return;
    }
    let n_tokens = (BLOCK / width).max(1);
    y.chunks(n_tokens * to.stride).into_par_iter().enumerate().for_each(|(i, mut y)| {
        let (mut wide, mut out) = (Vec::new(), vec![0.0; width]);
        for row in 0..y.len() / to.stride {
            let token = i * n_tokens + row;
            let start = token * from.stride + from.first;
            let x = x.slice(start..start + width).widened(&mut wide);
            match table {
                Some(table) => rotate_token(x, table, token, &mut out, (dim, direction.sign())),
                None => out.copy_from_slice(x),
            }
            y.write(row * to.stride + to.first, &out);
        }
    });
}

/// Rotates the heads of one token, of k elements each, and copies the elements without an angle.
fn rotate_token(x: &[f32], table: RopeTable<'_>, token: usize, out: &mut [f32], (k, sign): (usize, f32)) {
    let half = table.n_pairs;
    let [cos, sin] = [table.cos, table.sin].map(|table| &table[token * half..(token + 1) * half]);
    vectorised!({
        for (x, out) in x.chunks_exact(k).zip(out.chunks_exact_mut(k)) {
            let ((x, rest), (out, out_rest)) = (x.split_at(2 * half), out.split_at_mut(2 * half));
            let ((a, b), (out_a, out_b)) = (x.split_at(half), out.split_at_mut(half));
            for ((((a, b), (cos, sin)), out_a), out_b) in a.iter().zip(b).zip(cos.iter().zip(sin)).zip(out_a).zip(out_b)
            {
                let sin = sign * sin;
                *out_a = a * cos - b * sin;
                *out_b = b * cos + a * sin;
            }
            out_rest.copy_from_slice(rest);
        }
    });
}
