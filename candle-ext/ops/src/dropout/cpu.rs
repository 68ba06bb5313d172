//! The CPU kernel of `dropout`: a counter-based generator, so that any block can be drawn by any thread.

use rayon::prelude::*;

use super::Dropout;
use crate::floats::{Floats, FloatsMut};

/// Elements that one task handles.
const BLOCK: usize = 1 << 12;

/// y = x mask / (1 - p)
pub(super) fn apply(x: Floats<'_>, y: FloatsMut<'_>, spec: Dropout) {
    let (scale, threshold) = (spec.scale(), spec.threshold());
    y.chunks(BLOCK).into_par_iter().enumerate().for_each(|(i, mut y)| {
        let start = i * BLOCK;
        let mut wide = Vec::new();
        let x = x.slice(start..start + y.len()).widened(&mut wide);
        let keeps = |element: usize| random(spec.key, element as u64) >> 32 >= threshold;
        let out: Vec<f32> = x.iter().enumerate().map(|(j, x)| if keeps(start + j) { x * scale } else { 0.0 }).collect();
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
