//! Transpose of sixteen registers of sixteen floats.

use std::arch::x86_64::{
    __m512, _mm512_castpd_ps, _mm512_castps_pd, _mm512_shuffle_f32x4, _mm512_unpackhi_pd, _mm512_unpackhi_ps,
    _mm512_unpacklo_pd, _mm512_unpacklo_ps,
};

/// Transposes: row i of the result holds lane i of every register.
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) fn transpose(rows: [__m512; 16]) -> [__m512; 16] {
    // Interleave pairs of rows, then fours: 128-bit quarter q of fours[4 g + c] holds column 4 q + c of rows 4 g to 4 g
    // + 3.
    let mut fours = rows;
    for g in 0..4 {
        let [r0, r1, r2, r3] = [rows[4 * g], rows[4 * g + 1], rows[4 * g + 2], rows[4 * g + 3]];
        let (low01, high01) = (_mm512_unpacklo_ps(r0, r1), _mm512_unpackhi_ps(r0, r1));
        let (low23, high23) = (_mm512_unpacklo_ps(r2, r3), _mm512_unpackhi_ps(r2, r3));
        fours[4 * g] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(low01), _mm512_castps_pd(low23)));
        fours[4 * g + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(low01), _mm512_castps_pd(low23)));
        fours[4 * g + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(high01), _mm512_castps_pd(high23)));
        fours[4 * g + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(high01), _mm512_castps_pd(high23)));
    }
    // Column 4 q + c consists of quarter q of the four groups.
    let mut columns = rows;
    for c in 0..4 {
        let [g0, g1, g2, g3] = [fours[c], fours[4 + c], fours[8 + c], fours[12 + c]];
        let (even01, odd01) = (_mm512_shuffle_f32x4::<0x88>(g0, g1), _mm512_shuffle_f32x4::<0xdd>(g0, g1));
        let (even23, odd23) = (_mm512_shuffle_f32x4::<0x88>(g2, g3), _mm512_shuffle_f32x4::<0xdd>(g2, g3));
        columns[c] = _mm512_shuffle_f32x4::<0x88>(even01, even23);
        columns[8 + c] = _mm512_shuffle_f32x4::<0xdd>(even01, even23);
        columns[4 + c] = _mm512_shuffle_f32x4::<0x88>(odd01, odd23);
        columns[12 + c] = _mm512_shuffle_f32x4::<0xdd>(odd01, odd23);
    }
    columns
}
