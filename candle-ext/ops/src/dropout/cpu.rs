//! CPU kernel of `dropout`: blocks in parallel.

use rayon::prelude::*;

use super::mask::{Dropout, ELEMENTS_PER_HASH, derive_key, random};
use super::rows::DropoutSpan;
use crate::floats::{Floats, FloatsMut};
use crate::simd::vectorised;

/// Elements per task.
const BLOCK: usize = 1 << 12;

/// Computes y = x mask / (1 - p) for the elements of a span.
pub(super) fn apply(x: Floats<'_>, y: FloatsMut<'_>, spec: Dropout, run: &DropoutSpan) {
    let blocks = y.chunks(BLOCK).into_par_iter().enumerate();
    blocks.for_each_init(
        || (Vec::new(), vec![0.0; BLOCK], vec![0; BLOCK / ELEMENTS_PER_HASH + 2]),
        |(wide, out, words), (i, mut y)| {
            let start = i * BLOCK;
            let x = x.slice(start..start + y.len()).widened_here(wide);
            let mut n_done = 0;
            while n_done < x.len() {
                let (global_start, n_left) = run.global_position(start + n_done);
                let part = n_done..x.len().min(n_done + n_left);
                mask(spec, global_start, words, &x[part.clone()], &mut out[part.clone()]);
                n_done = part.end;
            }
            y.write(0, &out[..x.len()]);
        },
    );
}

/// Computes y = x mask / (1 - p) for rows, each with the mask of its key, from column `first_column` on.
pub(super) fn apply_rows(x: Floats<'_>, y: FloatsMut<'_>, spec: Dropout, keys: &[i64], first_column: usize) {
    let width = y.len() / keys.len().max(1);
    if width == 0 {
        return;
    }
    let n_rows = (BLOCK / width).max(1);
    let blocks = y.chunks(n_rows * width).into_par_iter().zip(keys.par_chunks(n_rows)).enumerate();
    blocks.for_each_init(
        || (Vec::new(), vec![0.0; n_rows * width], vec![0; width / ELEMENTS_PER_HASH + 2]),
        |(wide, out, words), (i, (mut y, keys))| {
            let start = i * n_rows * width;
            let x = x.slice(start..start + y.len()).widened_here(wide);
            for ((x, out), key) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)).zip(keys) {
                let spec = Dropout { key: derive_key(*key as u64, spec.key), ..spec };
                mask(spec, first_column, words, x, out);
            }
            y.write(0, &out[..x.len()]);
        },
    );
}

/// Computes y = x mask / (1 - p) for consecutive elements of the whole tensor, the first of which is `global_start`.
///
/// `words` is scratch memory for 16 bits an element, and two words more.
fn mask(spec: Dropout, global_start: usize, words: &mut [u64], x: &[f32], y: &mut [f32]) {
    let (scale, threshold) = (spec.scale(), spec.threshold());
    let (first_word, n_skipped) = ((global_start / ELEMENTS_PER_HASH) as u64, global_start % ELEMENTS_PER_HASH);
    let words = &mut words[..(n_skipped + x.len()).div_ceil(ELEMENTS_PER_HASH)];
    let numbered = words.iter_mut().enumerate();
    vectorised!(numbered.for_each(|(i, word)| *word = random(spec.key, first_word + i as u64).to_le()));
    let bits: &[u16] = bytemuck::cast_slice(words);
    let triples = y.iter_mut().zip(x).zip(&bits[n_skipped..]);
    vectorised!(triples.for_each(|((y, x), bits)| *y = if *bits >= threshold { x * scale } else { 0.0 }));
}
