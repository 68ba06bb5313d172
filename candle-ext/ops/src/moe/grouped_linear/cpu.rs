//! CPU kernel of `grouped_linear`: tasks of rows or columns of a group, each on one thread.
//!
//! No task splits a sum, and a single row takes the same kernel as many. The bits of a row therefore depend neither on
//! its group's size nor on the number of threads.

use std::cell::RefCell;
use std::ops::Range;

use super::tasks::{Division, GemmTask, MAX_COPIED_ROWS, run_largest_first};
use crate::floats::{Floats, FloatsMut, first_of};
use crate::gemm::{self, Accumulate, Mat, MatMut, Store, Threads, gemm_bf16, gemm_by_rows};
use crate::weight_matmul::{self, Dims, WeightOperand, bf16_operands};

/// Elements of the f32 gradients of a call from which they are stored past the caches: 16 MiB.
const STREAMED_FROM: usize = 1 << 22;
/// Rows of x and dy per f32 copy in the weight gradient.
const BLOCK_ROWS: usize = MAX_COPIED_ROWS;

thread_local! {
    static SCRATCH: RefCell<Scratch> = const { RefCell::new(Scratch::EMPTY) };
}

/// f32 copies of a task's operands, kept by its thread.
struct Scratch {
    rows: Vec<f32>,
    weights: Vec<f32>,
    output: Vec<f32>,
}

/// Operands of a call: x [t, k], the weights of all groups [e * n, k] and the row range of each group.
#[derive(Clone, Copy)]
pub(super) struct Grouped<'a> {
    pub(super) groups: &'a [Range<usize>],
    /// Sizes of the matmul of one group; `t` counts the rows of all.
    pub(super) dims: Dims,
}

/// Computes y = x w^T, group by group; rows after the last group become zero.
pub(super) fn forward(x: Floats<'_>, w: WeightOperand<'_>, y: FloatsMut<'_>, grouped: Grouped<'_>) {
    let Dims { n, k, .. } = grouped.dims;
    let division = Division::of(grouped.work(), max_rows(x, w));
    let mut tasks = Vec::new();
    for_each_group(y, n, grouped, |group, rows, y| {
        let height = division.height(rows.len(), n * k);
        for (i, y) in y.chunks(height * n).into_iter().enumerate() {
            let start = rows.start + i * height;
            let rows = start..start + y.len() / n;
            let width = division.width(rows.len(), n, k);
            for (columns, y) in by_columns(y, n, width) {
                let work = rows.len() * columns.len() * k;
                tasks.push(GemmTask {
                    work,
                    item: (rows.clone(), group * n + columns.start..group * n + columns.end, y),
                });
            }
        }
    });
    run_largest_first(tasks, |(rows, of_w, y)| {
        let x = x.slice(rows.start * k..rows.end * k);
        multiply(x, w.rows(of_w.clone(), k), y, Dims { t: rows.len(), n: of_w.len(), k });
    });
}

/// Returns the most rows per task: each task packs the weights again, but copies of rows need memory.
fn max_rows(x: Floats<'_>, w: WeightOperand<'_>) -> usize {
    let are_copied = !matches!(x, Floats::F32(_)) && bf16_operands(x, w).is_none();
    if are_copied { MAX_COPIED_ROWS } else { usize::MAX }
}

/// Output of a task: whole rows, or some columns of a few rows.
enum Output<'a> {
    Rows(FloatsMut<'a>),
    Columns(Vec<FloatsMut<'a>>),
}

/// Splits rows of `n` elements into columns of `width`.
fn by_columns(y: FloatsMut<'_>, n: usize, width: usize) -> Vec<(Range<usize>, Output<'_>)> {
    if width >= n {
        return vec![(0..n, Output::Rows(y))];
    }
    let mut parts: Vec<Vec<FloatsMut<'_>>> = (0..n.div_ceil(width)).map(|_| Vec::new()).collect();
    for row in y.chunks(n) {
        parts.iter_mut().zip(row.chunks(width)).for_each(|(part, columns)| part.push(columns));
    }
    let starts = (0..n).step_by(width);
    starts.zip(parts).map(|(start, part)| (start..(start + width).min(n), Output::Columns(part))).collect()
}

/// Computes y = x w^T on this thread.
fn multiply(x: Floats<'_>, w: WeightOperand<'_>, y: Output<'_>, dims: Dims) {
    let Dims { t, n, k } = dims;
    let mut scratch = SCRATCH.take();
    let Scratch { rows, weights, output } = &mut scratch;
    if let Some((x, w)) = bf16_operands(x, w) {
        let (x, w) = (Mat::new(x, t, k), Mat::new(w, n, k));
        write_bf16_matmul(y, (t, n), output, |y| gemm_bf16(y, Accumulate::Overwrite, x, w.t(), 1.0, Threads::One));
        return SCRATCH.set(scratch);
    }
    let x = Mat::new(x.widened_here(rows), t, k);
    write_whole(y, n, output, |y| {
        let height = w.panel_rows(n, k).max(1);
        for start in (0..n).step_by(height) {
            let end = (start + height).min(n);
            let w = Mat::new(w.rows(start..end, k).to_pack(end - start, k, weights), end - start, k);
            gemm_by_rows(MatMut::with_stride(&mut y[start..], t, end - start, n), Accumulate::Overwrite, x, w.t());
        }
    });
    SCRATCH.set(scratch);
}

/// Calls `compute` with an output of `n` columns: that of the task if it is one matrix, else f32 sums.
fn write_bf16_matmul(
    y: Output<'_>,
    (t, n): (usize, usize),
    scratch: &mut Vec<f32>,
    compute: impl FnOnce(gemm::Output<'_>),
) {
    match y {
        Output::Rows(y @ (FloatsMut::F32(_) | FloatsMut::Bf16(_))) => compute(gemm::Output::new(y, t, n)),
        y => write_whole(y, n, scratch, |y| compute(MatMut::new(y, t, n).into())),
    }
}

/// Calls `compute` with f32 rows of `n` elements, all of which it overwrites, and rounds them once.
fn write_whole(y: Output<'_>, n: usize, scratch: &mut Vec<f32>, compute: impl FnOnce(&mut [f32])) {
    let mut parts = match y {
        Output::Rows(FloatsMut::F32(y)) => return compute(y),
        Output::Rows(y) => vec![y],
        Output::Columns(parts) => parts,
    };
    let len = parts.iter().map(FloatsMut::len).sum::<usize>();
    compute(first_of(scratch, len));
    if let [y] = parts.as_mut_slice() {
        return y.write(0, &scratch[..len]);
    }
    parts.iter_mut().zip(scratch.chunks(n)).for_each(|(y, row)| y.write(0, row));
}

/// Computes dx = dy w, group by group; rows after the last group become zero.
pub(super) fn grad_x(dy: Floats<'_>, w: WeightOperand<'_>, dx: FloatsMut<'_>, grouped: Grouped<'_>) {
    let Dims { n, k, .. } = grouped.dims;
    let division = Division::of(grouped.work(), max_rows(dy, w));
    let mut tasks = Vec::new();
    for_each_group(dx, k, grouped, |group, rows, dx| {
        let height = division.height(rows.len(), n * k);
        for (i, dx) in dx.chunks(height * k).into_iter().enumerate() {
            let start = rows.start + i * height;
            let rows = start..start + dx.len() / k;
            tasks.push(GemmTask { work: rows.len() * n * k, item: (rows, group, dx) });
        }
    });
    run_largest_first(tasks, |(rows, group, dx)| {
        let dy = dy.slice(rows.start * n..rows.end * n);
        multiply_transposed(dy, w.rows(group * n..(group + 1) * n, k), dx, Dims { t: rows.len(), n, k });
    });
}

/// Computes dx = dy w on this thread, as a sum over panels of w.
fn multiply_transposed(dy: Floats<'_>, w: WeightOperand<'_>, dx: FloatsMut<'_>, dims: Dims) {
    let Dims { t, n, k } = dims;
    if n == 0 {
        return dx.clear();
    }
    let mut scratch = SCRATCH.take();
    let Scratch { rows, weights, output } = &mut scratch;
    if let Some((dy, w)) = bf16_operands(dy, w) {
        let (dy, w, dx) = (Mat::new(dy, t, n), Mat::new(w, n, k), Output::Rows(dx));
        write_bf16_matmul(dx, (t, k), output, |dx| gemm_bf16(dx, Accumulate::Overwrite, dy, w, 1.0, Threads::One));
        return SCRATCH.set(scratch);
    }
    let dy = dy.widened_here(rows);
    write_whole(Output::Rows(dx), k, output, |dx| {
        let height = w.panel_rows(n, k).max(1);
        for start in (0..n).step_by(height) {
            let end = (start + height).min(n);
            let accumulate = if start == 0 { Accumulate::Overwrite } else { Accumulate::Add };
            let w = Mat::new(w.rows(start..end, k).to_pack(end - start, k, weights), end - start, k);
            let dy = Mat::with_stride(&dy[start..], t, end - start, n);
            gemm_by_rows(MatMut::new(dx, t, k), accumulate, dy, w);
        }
    });
    SCRATCH.set(scratch);
}

/// Computes dw = [dw +] dy^T x of each group. The gradient of a group without rows is zero.
pub(super) fn grad_w(dy: Floats<'_>, x: Floats<'_>, dw: FloatsMut<'_>, accumulate: Accumulate, grouped: Grouped<'_>) {
    let Dims { n, k, .. } = grouped.dims;
    if n * k == 0 {
        return;
    }
    let store = if dw.len() >= STREAMED_FROM { Store::Streamed } else { Store::Cached };
    let division = Division::of(grouped.work(), usize::MAX);
    let mut tasks = Vec::new();
    for (rows, dw) in grouped.groups.iter().zip(dw.chunks(n * k)) {
        if rows.is_empty() && accumulate == Accumulate::Add {
            continue;
        }
        let height = division.width(1, n, rows.len() * k);
        for (i, dw) in dw.chunks(height * k).into_iter().enumerate() {
            let outputs = i * height..(i * height + height).min(n);
            tasks.push(GemmTask { work: rows.len() * dw.len(), item: (rows.clone(), outputs, dw) });
        }
    }
    run_largest_first(tasks, |(rows, outputs, dw)| {
        if rows.is_empty() {
            return dw.clear();
        }
        let mut scratch = SCRATCH.take();
        let output = WeightGrad { dw, accumulate, store };
        add_outer(dy, x, (rows, outputs), output, grouped.dims, &mut scratch);
        SCRATCH.set(scratch);
    });
}

/// Some rows of one group's dw.
struct WeightGrad<'a> {
    dw: FloatsMut<'a>,
    accumulate: Accumulate,
    store: Store,
}

/// Computes some rows of one group's dw = [dw +] dy^T x on this thread.
fn add_outer(
    dy: Floats<'_>,
    x: Floats<'_>,
    (rows, outputs): (Range<usize>, Range<usize>),
    WeightGrad { mut dw, accumulate, store }: WeightGrad<'_>,
    Dims { n, k, .. }: Dims,
    scratch: &mut Scratch,
) {
    let Scratch { rows: dy_wide, weights: x_wide, output } = scratch;
    let m = outputs.len();
    if let (Some((dy, x)), FloatsMut::F32(_) | FloatsMut::Bf16(_)) = (bf16_operands(dy, x), &dw) {
        let dy = Mat::with_stride(&dy[rows.start * n + outputs.start..], rows.len(), m, n);
        let x = Mat::new(&x[rows.start * k..rows.end * k], rows.len(), k);
        return gemm_bf16(gemm::Output::new(dw, m, k), accumulate, dy.t(), x, 1.0, Threads::One);
    }
    let store = if rows.len() > BLOCK_ROWS { Store::Cached } else { store };
    let mut sum_into = |dw: &mut [f32]| {
        for start in rows.clone().step_by(BLOCK_ROWS) {
            let block = start..(start + BLOCK_ROWS).min(rows.end);
            let accumulate = if start == rows.start { accumulate } else { Accumulate::Add };
            let x = Mat::new(x.slice(block.start * k..block.end * k).widened_here(x_wide), block.len(), k);
            let dy = columns(dy, &block, &outputs, n, dy_wide);
            gemm_by_rows(MatMut::new(dw, m, k).stored(store), accumulate, dy.t(), x);
        }
    };
    if let FloatsMut::F32(dw) = dw {
        return sum_into(dw);
    }
    let sum = first_of(output, m * k);
    if accumulate == Accumulate::Add {
        dw.floats().read_into(sum);
    }
    sum_into(sum);
    dw.write(0, sum);
}

/// Returns some rows and columns of a matrix with rows of `n` elements: borrowed if f32, else converted.
fn columns<'s>(
    x: Floats<'s>,
    rows: &Range<usize>,
    columns: &Range<usize>,
    n: usize,
    scratch: &'s mut Vec<f32>,
) -> Mat<'s> {
    if let Floats::F32(data) = x {
        return Mat::with_stride(&data[rows.start * n + columns.start..], rows.len(), columns.len(), n);
    }
    let width = columns.len();
    let scratch = first_of(scratch, rows.len() * width);
    for (row, out) in rows.clone().zip(scratch.chunks_exact_mut(width)) {
        x.slice(row * n + columns.start..row * n + columns.end).read_into(out);
    }
    Mat::new(scratch, rows.len(), width)
}

/// Computes y = x w^T for the few rows of one token, each as `linear` does: memory bandwidth is the limit.
pub(super) fn forward_one(x: Floats<'_>, w: WeightOperand<'_>, y: FloatsMut<'_>, grouped: Grouped<'_>) {
    let Dims { n, k, .. } = grouped.dims;
    for_each_row(x, y, [k, n], grouped, |group, x, y| {
        weight_matmul::forward(
            x,
            w.rows(group * n..(group + 1) * n, k),
            y,
            Accumulate::Overwrite,
            1.0,
            Dims { t: 1, n, k },
        );
    });
}

/// Computes dx = dy w for the few rows of one token, each as `linear` does.
pub(super) fn grad_x_one(dy: Floats<'_>, w: WeightOperand<'_>, dx: FloatsMut<'_>, grouped: Grouped<'_>) {
    let Dims { n, k, .. } = grouped.dims;
    for_each_row(dy, dx, [n, k], grouped, |group, dy, dx| {
        weight_matmul::grad_x(dy, w.rows(group * n..(group + 1) * n, k), &[n], dx, 1.0, Dims { t: 1, n, k });
    });
}

/// Calls `compute` with the group, the input and the output of each row; rows after the last group become zero.
fn for_each_row(
    x: Floats<'_>,
    y: FloatsMut<'_>,
    [from, to]: [usize; 2],
    grouped: Grouped<'_>,
    mut compute: impl FnMut(usize, &[f32], &mut [f32]),
) {
    let (mut wide, mut out) = (Vec::new(), vec![0.0; to]);
    for_each_group(y, to, grouped, |group, rows, y| {
        for (row, mut y) in rows.zip(y.chunks(to)) {
            compute(group, x.slice(row * from..(row + 1) * from).widened_here(&mut wide), &mut out);
            y.write(0, &out);
        }
    });
}

/// Calls `add` with each nonempty group, its rows, and its part of an output with rows of `n` elements.
///
/// Rows after the last group are cleared.
fn for_each_group<'y>(
    y: FloatsMut<'y>,
    n: usize,
    grouped: Grouped<'_>,
    mut add: impl FnMut(usize, Range<usize>, FloatsMut<'y>),
) {
    let mut rest = y;
    for (group, rows) in grouped.groups.iter().enumerate() {
        let (part, after) = rest.split_at(rows.len() * n);
        rest = after;
        if part.len() > 0 {
            add(group, rows.clone(), part);
        }
    }
    rest.clear();
}

impl Grouped<'_> {
    /// Returns the multiply-adds of one pass.
    fn work(&self) -> usize {
        self.groups.last().map_or(0, |group| group.end) * self.dims.n * self.dims.k
    }
}

impl Scratch {
    const EMPTY: Self = Self { rows: Vec::new(), weights: Vec::new(), output: Vec::new() };
}

impl Default for Scratch {
    fn default() -> Self {
        Self::EMPTY
    }
}
