//! Operands and outputs of a matmul on the CPU.

use half::bf16;

use crate::floats::{FloatsMut, wide_bf16};

/// Matrix operand, f32 or bf16; element (i, j) is `data[i * row_stride + j * col_stride]`.
#[derive(Clone, Copy)]
pub(crate) struct Mat<'a, T = f32> {
    pub(super) data: &'a [T],
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) row_stride: usize,
    pub(super) col_stride: usize,
}

impl<'a, T> Mat<'a, T> {
    /// Wraps contiguous rows of `cols` elements.
    pub(crate) fn new(data: &'a [T], rows: usize, cols: usize) -> Self {
        Self::with_stride(data, rows, cols, cols)
    }

    /// Wraps rows of `cols` elements that start `row_stride` apart.
    pub(crate) fn with_stride(data: &'a [T], rows: usize, cols: usize, row_stride: usize) -> Self {
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

impl<'a, T: Copy> Mat<'a, T> {
    /// Lists the elements row by row.
    pub(super) fn elements(self) -> impl Iterator<Item = T> + use<'a, T> {
        let of_row = move |i: usize| (0..self.cols).map(move |j| i * self.row_stride + j * self.col_stride);
        (0..self.rows).flat_map(of_row).map(move |at| self.data[at])
    }
}

impl Mat<'_, bf16> {
    /// Returns the elements as f32, row by row.
    pub(super) fn widened(self) -> Vec<f32> {
        self.elements().map(wide_bf16).collect()
    }
}

/// Row-major output of a matmul.
pub(crate) struct MatMut<'a, T = f32> {
    pub(super) data: &'a mut [T],
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) row_stride: usize,
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    pub(super) store: Store,
}

/// Treatment of the caches by a matmul's stores, where the kernel has both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Store {
    /// Through the caches, for outputs that are read soon.
    Cached,
    /// Past the caches, without a read of the lines, for large outputs that are overwritten.
    Streamed,
}

impl<'a, T> MatMut<'a, T> {
    /// Wraps contiguous rows of `cols` elements.
    pub(crate) fn new(data: &'a mut [T], rows: usize, cols: usize) -> Self {
        Self::with_stride(data, rows, cols, cols)
    }

    /// Wraps rows of `cols` elements that start `row_stride` apart.
    pub(crate) fn with_stride(data: &'a mut [T], rows: usize, cols: usize, row_stride: usize) -> Self {
        check_bounds(data.len(), rows, cols, row_stride);
        Self { data, rows, cols, row_stride, store: Store::Cached }
    }

    /// Returns the output with another treatment of the caches.
    pub(crate) fn stored(self, store: Store) -> Self {
        Self { store, ..self }
    }
}

/// Output of a matmul: the f32 sums, or these rounded once.
pub(crate) enum Output<'a> {
    F32(MatMut<'a>),
    Bf16(MatMut<'a, bf16>),
}

impl<'a> From<MatMut<'a>> for Output<'a> {
    fn from(out: MatMut<'a>) -> Self {
        Self::F32(out)
    }
}

impl<'a> From<MatMut<'a, bf16>> for Output<'a> {
    fn from(out: MatMut<'a, bf16>) -> Self {
        Self::Bf16(out)
    }
}

impl<'a> Output<'a> {
    /// Wraps contiguous rows of `cols` elements, f32 or bf16.
    pub(crate) fn new(data: FloatsMut<'a>, rows: usize, cols: usize) -> Self {
        match data {
            FloatsMut::F32(data) => Self::F32(MatMut::new(data, rows, cols)),
            FloatsMut::Bf16(data) => Self::Bf16(MatMut::new(data, rows, cols)),
            FloatsMut::F16(_) => unreachable!("a matmul of bf16 is f32 or bf16"),
        }
    }

    /// Returns the numbers of rows and columns.
    pub(super) fn dims(&self) -> (usize, usize) {
        match self {
            Self::F32(out) => (out.rows, out.cols),
            Self::Bf16(out) => (out.rows, out.cols),
        }
    }

    /// Writes zeros.
    pub(super) fn clear(self) {
        match self {
            Self::F32(out) => out.fill(0.0),
            Self::Bf16(out) => out.fill(bf16::ZERO),
        }
    }
}

impl<T: Copy> MatMut<'_, T> {
    fn fill(self, value: T) {
        for row in self.data.chunks_mut(self.row_stride.max(1)).take(self.rows) {
            row[..self.cols].fill(value);
        }
    }
}

/// Operand of a matmul.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    A,
    B,
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

/// Fails unless the shapes of a matmul agree.
pub(super) fn check_dims((m, n): (usize, usize), (a_rows, a_cols): (usize, usize), (b_rows, b_cols): (usize, usize)) {
    assert!(
        m == a_rows && n == b_cols && a_cols == b_rows,
        "gemm of [{a_rows}, {a_cols}] by [{b_rows}, {b_cols}] into [{m}, {n}]"
    );
}
