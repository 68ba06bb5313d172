//! CPU kernel of `dropout`: blocks in parallel.

use rayon::prelude::*;

use super::mask::{Dropout, key_after, random};
use super::rows::DropoutSpan;
use crate::floats::{Floats, FloatsMut};

/// Elements per task.
const BLOCK: usize = 1 << 12;

/// Computes y = x mask / (1 - p) for the elements of a span.
pub(super) fn apply(x: Floats<'_>, y: FloatsMut<'_>, spec: Dropout, run: &DropoutSpan) {
    let (scale, threshold) = (spec.scale(), spec.threshold());
    y.chunks(BLOCK).into_par_iter().enumerate().for_each(|(i, mut y)| {
        let start = i * BLOCK;
        let mut wide = Vec::new();
        let x = x.slice(start..start + y.len()).widened(&mut wide);
        let mut out = Vec::with_capacity(x.len());
        while out.len() < x.len() {
            let (global_start, n_left) = run.global_position(start + out.len());
            let key = key_after(spec.key, global_start as u64);
            let rest = x[out.len()..].iter().take(n_left).enumerate();
            out.extend(rest.map(|(j, x)| if random(key, j as u64) >> 32 >= threshold { x * scale } else { 0.0 }));
        }
        y.write(0, &out);
    });
}
