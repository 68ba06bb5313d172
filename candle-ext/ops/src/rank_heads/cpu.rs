//! CPU kernels of `rank_heads`: rows in parallel.

use rayon::prelude::*;

use super::sizes::RankHeads;
use crate::floats::{Floats, FloatsMut};

/// Computes y [groups * copies, tokens, len] of x [tokens, groups, len].
pub(super) fn by_rank(x: Floats<'_>, y: FloatsMut<'_>, sizes: RankHeads) {
    let RankHeads { tokens, groups, copies, len } = sizes;
    y.chunks(len.max(1)).into_par_iter().enumerate().for_each(|(row, mut y)| {
        let (rank, token) = (row / tokens, row % tokens);
        let from = (token * groups + rank / copies) * len;
        y.write(0, x.slice(from..from + len).widened(&mut Vec::new()));
    });
}

/// Computes x [tokens, groups, len], the sums over copies of y [groups * copies, tokens, len].
pub(super) fn of_ranks(y: Floats<'_>, x: FloatsMut<'_>, sizes: RankHeads) {
    let RankHeads { tokens, groups, copies, len } = sizes;
    x.chunks(len.max(1)).into_par_iter().enumerate().for_each(|(row, mut x)| {
        let (token, group) = (row / groups, row % groups);
        let (mut wide, mut sum) = (Vec::new(), vec![0.0; len]);
        for copy in 0..copies {
            let from = ((group * copies + copy) * tokens + token) * len;
            let of_rank = y.slice(from..from + len).widened(&mut wide);
            sum.iter_mut().zip(of_rank).for_each(|(sum, value)| *sum += value);
            y.round_like(&mut sum);
        }
        x.write(0, &sum);
    });
}
