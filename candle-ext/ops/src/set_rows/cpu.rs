//! CPU kernel of `set_rows`.

use crate::floats::{Floats, FloatsMut};

/// Computes dst[rows[i]] = src[i] for rows of `d` elements.
pub(super) fn set_rows(mut dst: FloatsMut<'_>, rows: &[u32], src: Floats<'_>, d: usize) {
    let mut wide = Vec::new();
    for (i, &row) in rows.iter().enumerate() {
        dst.write(row as usize * d, src.slice(i * d..(i + 1) * d).widened(&mut wide));
    }
}
