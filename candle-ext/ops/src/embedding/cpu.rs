//! CPU kernel of `embedding`.

use rayon::prelude::*;

use crate::floats::{Floats, FloatsMut};

/// Positions per task in a gather.
const POSITIONS: usize = 64;

/// Rows of the table per task in a scatter.
const ROWS: usize = 256;

/// Computes y_i = table[ids_i].
pub(super) fn gather(ids: &[u32], table: Floats<'_>, y: FloatsMut<'_>, d: usize) {
    let tasks = y.chunks(POSITIONS * d).into_par_iter().zip(ids.par_chunks(POSITIONS));
    tasks.for_each(|(mut y, ids)| {
        let mut wide = Vec::new();
        for (i, &id) in ids.iter().enumerate() {
            let row = id as usize * d;
            y.write(i * d, table.slice(row..row + d).widened(&mut wide));
        }
    });
}

/// Adds dy_i to dw[ids_i], except for `padding`. One task sums each row, in the order of positions, and rounds it once.
pub(super) fn scatter_add(ids: &[u32], dy: Floats<'_>, dw: FloatsMut<'_>, d: usize, padding: Option<u32>) {
    if d == 0 {
        return;
    }
    let mut uses: Vec<(u32, u32)> = ids.iter().copied().zip(0..).filter(|(id, _)| Some(*id) != padding).collect();
    uses.par_sort_unstable();
    dw.chunks(ROWS * d).into_par_iter().enumerate().for_each(|(i, mut rows)| {
        let first = uses.partition_point(|&(id, _)| (id as usize) < i * ROWS);
        let n_uses = uses[first..].partition_point(|&(id, _)| (id as usize) < (i + 1) * ROWS);
        let (mut wide, mut sum) = (Vec::new(), vec![0.0; d]);
        for of_row in uses[first..first + n_uses].chunk_by(|a, b| a.0 == b.0) {
            let row = (of_row[0].0 as usize - i * ROWS) * d;
            rows.floats().slice(row..row + d).read_into(&mut sum);
            for &(_, position) in of_row {
                let start = position as usize * d;
                let dy = dy.slice(start..start + d).widened(&mut wide);
                sum.iter_mut().zip(dy).for_each(|(sum, dy)| *sum += dy);
            }
            rows.write(row, &sum);
        }
    });
}
