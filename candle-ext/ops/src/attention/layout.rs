//! The kernel's own layout: f32, one key head after the other, and within it the query heads that
//! share it side by side. A tile of queries is then one matrix for all heads of the group.

use rayon::prelude::*;

use crate::floats::{Floats, FloatsMut};

/// Rows that one task copies back.
const ROWS: usize = 32;

/// Head counts: `n_kv` key heads, each read by `group` query heads of `dim` elements.
#[derive(Clone, Copy, Debug)]
pub(super) struct Heads {
    pub(super) n_kv: usize,
    pub(super) group: usize,
    pub(super) dim: usize,
}

/// [rows, n_kv, width] -> f32 [n_kv, rows, width]
pub(super) fn by_head(x: Floats<'_>, n_kv: usize, width: usize) -> Vec<f32> {
    let rows = x.len() / (n_kv * width);
    let mut out = vec![0.0; x.len()];
    out.par_chunks_mut((rows * width).max(1)).enumerate().for_each(|(head, out)| {
        for (row, out) in out.chunks_exact_mut(width).enumerate() {
            let start = (row * n_kv + head) * width;
            x.slice(start..start + width).read_into(out);
        }
    });
    out
}

/// f32 [n_kv, rows, width] -> [rows, n_kv, width]
pub(super) fn by_row(x: &[f32], out: FloatsMut<'_>, n_kv: usize, width: usize) {
    let rows = x.len() / (n_kv * width);
    out.chunks(ROWS * n_kv * width).into_par_iter().enumerate().for_each(|(i, mut out)| {
        for row in 0..out.len() / (n_kv * width) {
            for head in 0..n_kv {
                let start = (head * rows + i * ROWS + row) * width;
                out.write((row * n_kv + head) * width, &x[start..start + width]);
            }
        }
    });
}

/// Cuts `data` into consecutive pieces of the given lengths.
pub(super) fn pieces(mut data: &mut [f32], lens: impl Iterator<Item = usize>) -> Vec<&mut [f32]> {
    lens.map(|len| data.split_off_mut(..len).expect("the pieces tile the buffer")).collect()
}
