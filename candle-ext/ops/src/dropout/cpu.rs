//! The CPU kernel of `dropout`: a counter-based generator, so that any block can be drawn by any thread.

use rayon::prelude::*;

use super::{Dropout, Run};
use crate::floats::{Floats, FloatsMut};

/// Elements that one task handles.
const BLOCK: usize = 1 << 12;

/// y = x mask / (1 - p), of the elements of a run.
pub(super) fn apply(x: Floats<'_>, y: FloatsMut<'_>, spec: Dropout, run: &Run) {
    let (scale, threshold) = (spec.scale(), spec.threshold());
    y.chunks(BLOCK).into_par_iter().enumerate().for_each(|(i, mut y)| {
        let start = i * BLOCK;
        let mut wide = Vec::new();
        let x = x.slice(start..start + y.len()).widened(&mut wide);
        let mut out = Vec::with_capacity(x.len());
        while out.len() < x.len() {
            let (place, n_left) = run.place_of(start + out.len());
            let key = key_after(spec.key, place as u64);
            let rest = x[out.len()..].iter().take(n_left).enumerate();
            out.extend(rest.map(|(j, x)| if random(key, j as u64) >> 32 >= threshold { x * scale } else { 0.0 }));
        }
        y.write(0, &out);
    });
}

const STRIDE: u64 = 0x9e37_79b9_7f4a_7c15;

/// The key of the stream that begins at `position` of the stream of `key`.
pub(super) fn key_after(key: u64, position: u64) -> u64 {
    key.wrapping_add(position.wrapping_mul(STRIDE))
}

/// SplitMix64's output at `position` of the stream that begins at `key` (Steele, Lea, Flood 2014).
pub(super) fn random(key: u64, position: u64) -> u64 {
    let mut z = key_after(key, position + 1);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
