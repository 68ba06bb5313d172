//! Operands of an f32 matmul on the CPU.

/// Matrix operand; element (i, j) is `data[i * row_stride + j * col_stride]`.
#[derive(Clone, Copy)]
pub(crate) struct Mat<'a> {
    pub(super) data: &'a [f32],
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) row_stride: usize,
    pub(super) col_stride: usize,
}

impl<'a> Mat<'a> {
    /// Wraps contiguous rows of `cols` elements.
    pub(crate) fn new(data: &'a [f32], rows: usize, cols: usize) -> Self {
        Self::with_stride(data, rows, cols, cols)
    }

    /// Wraps rows of `cols` elements that start `row_stride` apart.
    pub(crate) fn with_stride(data: &'a [f32], rows: usize, cols: usize, row_stride: usize) -> Self {
        check_bounds(data.len(), rows, cols, row_stride);
        Self { data, rows, cols, row_stride, col_stride: 1 }
    }

    /// Returns the transpose, without a copy.
    pub(crate) fn t(self) -> Self {
        Self { rows: self.cols, cols: self.rows, row_stride: self.col_stride, col_stride: self.row_stride, ..self }
    }

    /// Returns some rows and columns, at least one of each.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn part(self, first_row: usize, rows: usize, first_col: usize, cols: usize) -> Self {
        assert!(first_row + rows <= self.rows && first_col + cols <= self.cols, "a submatrix is within its matrix");
        let data = &self.data[first_row * self.row_stride + first_col * self.col_stride..];
        Self { data, rows, cols, ..self }
    }
}

/// Row-major output of a matmul.
pub(crate) struct MatMut<'a> {
    pub(super) data: &'a mut [f32],
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) row_stride: usize,
}

impl<'a> MatMut<'a> {
    /// Wraps contiguous rows of `cols` elements.
    pub(crate) fn new(data: &'a mut [f32], rows: usize, cols: usize) -> Self {
        Self::with_stride(data, rows, cols, cols)
    }

    /// Wraps rows of `cols` elements that start `row_stride` apart.
    pub(crate) fn with_stride(data: &'a mut [f32], rows: usize, cols: usize, row_stride: usize) -> Self {
        check_bounds(data.len(), rows, cols, row_stride);
        Self { data, rows, cols, row_stride }
    }
}

/// Treatment of the output's present values: BLAS's beta is 0 (overwrite) or 1 (add).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Accumulate {
    Overwrite,
    Add,
}

/// Threads of a matmul: the calling one, or rayon's whole pool.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Threads {
    One,
    All,
}

fn check_bounds(len: usize, rows: usize, cols: usize, row_stride: usize) {
    assert!(row_stride >= cols, "rows of {cols} elements overlap at stride {row_stride}");
    let last = rows.checked_sub(1).and_then(|last| last.checked_mul(row_stride)?.checked_add(cols));
    let needed = if rows == 0 || cols == 0 { Some(0) } else { last };
    assert!(
        needed.is_some_and(|needed| needed <= len),
        "a [{rows}, {cols}] matrix with row stride {row_stride} in {len} elements"
    );
}
