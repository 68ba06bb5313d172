//! CPU kernel of `dropout`: blocks in parallel.

use rayon::prelude::*;

use super::mask::{Dropout, key_after, random};
use super::rows::DropoutSpan;
use crate::floats::{Floats, FloatsMut};
use crate::simd::vectorised;

/// Elements per task.
const BLOCK: usize = 1 << 12;

/// Computes y = x mask / (1 - p) for the elements of a span.
pub(super) fn apply(x: Floats<'_>, y: FloatsMut<'_>, spec: Dropout, run: &DropoutSpan) {
    let (scale, threshold) = (spec.scale(), spec.threshold());
    let blocks = y.chunks(BLOCK).into_par_iter().enumerate();
    blocks.for_each_init(
        || (Vec::new(), vec![0.0; BLOCK]),
        |(wide, out), (i, mut y)| {
            let start = i * BLOCK;
            let x = x.slice(start..start + y.len()).widened_here(wide);
            let mut n_done = 0;
            while n_done < x.len() {
                let (global_start, n_left) = run.global_position(start + n_done);
                let key = key_after(spec.key, global_start as u64);
                let part = n_done..x.len().min(n_done + n_left);
                let pairs = out[part.clone()].iter_mut().zip(&x[part.clone()]).enumerate();
                vectorised!(pairs.for_each(|(j, (y, x))| {
                    *y = if random(key, j as u64) >> 32 >= threshold { x * scale } else { 0.0 };
                }));
                n_done = part.end;
            }
            y.write(0, &out[..x.len()]);
        },
    );
}
