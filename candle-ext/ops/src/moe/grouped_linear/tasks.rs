//! Groups of rows, and their division into tasks for threads.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use candle_core::{Result, bail};
use rayon::prelude::*;

/// Tasks per thread that a call is divided into, for load balance.
const TASKS: usize = 4;
/// Fewest multiply-adds per task. Smaller ones cost more than they save.
const MIN_WORK: usize = 1 << 20;
/// Fewest rows per task of a divided group: each task packs the weights again.
const MIN_ROWS: usize = 128;
/// Most rows per task that copies them to f32, which bounds the copies.
pub(super) const MAX_COPIED_ROWS: usize = 512;
/// Fewest columns per task of a group that is divided by columns.
const MIN_COLUMNS: usize = 128;

/// Returns the row range of each group.
///
/// # Errors
///
/// If the offsets do not start at 0, decrease, or exceed `n_rows`.
pub(super) fn groups(offsets: &[u32], n_rows: usize) -> Result<Vec<Range<usize>>> {
    let ranges = offsets.windows(2).map(|pair| pair[0] as usize..pair[1] as usize);
    let groups: Vec<Range<usize>> = ranges.collect();
    let ordered = groups.iter().all(|group| group.start <= group.end);
    if offsets.first() != Some(&0) || !ordered || groups.last().is_some_and(|group| group.end > n_rows) {
        bail!("grouped_linear: offsets must rise from 0 to at most {n_rows} rows, got {offsets:?}")
    }
    Ok(groups)
}

/// Division of a call into tasks of similar work.
#[derive(Clone, Copy)]
pub(super) struct Division {
    /// Multiply-adds per task.
    target: usize,
    /// Most rows per task.
    max_rows: usize,
}

impl Division {
    /// Divides `work` multiply-adds among the threads, with at most `max_rows` rows per task.
    pub(super) fn of(work: usize, max_rows: usize) -> Self {
        Self { target: (work / (TASKS * rayon::current_num_threads())).max(MIN_WORK), max_rows }
    }

    /// Returns the rows per task of a group, with `work` multiply-adds per row.
    pub(super) fn height(self, n_rows: usize, work: usize) -> usize {
        let wanted = (n_rows * work).div_ceil(self.target).min(n_rows.div_ceil(MIN_ROWS));
        n_rows.div_ceil(wanted.max(n_rows.div_ceil(self.max_rows)).max(1)).max(1)
    }

    /// Returns the columns per task of `n_rows` rows, with `work` multiply-adds per output element.
    pub(super) fn width(self, n_rows: usize, n_columns: usize, work: usize) -> usize {
        let wanted = (n_rows * n_columns * work).div_ceil(self.target).min(n_columns.div_ceil(MIN_COLUMNS));
        n_columns.div_ceil(wanted.max(1)).max(1)
    }
}

/// A task with its multiply-adds.
pub(super) struct GemmTask<T> {
    pub(super) work: usize,
    pub(super) item: T,
}

/// Runs all tasks on rayon's threads, the largest first. Each thread takes the next task when it is free.
pub(super) fn run_largest_first<T: Send>(mut tasks: Vec<GemmTask<T>>, run: impl Fn(T) + Sync) {
    tasks.sort_by_key(|task| std::cmp::Reverse(task.work));
    let n_workers = rayon::current_num_threads().min(tasks.len());
    let queue = Mutex::new(tasks.into_iter());
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
    (0..n_workers).into_par_iter().with_max_len(1).for_each(|_| {
        while let Some(task) = next() {
            run(task.item);
        }
    });
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn offsets_that_are_no_partition_are_errors() {
        assert_eq!(groups(&[0, 2, 2, 5], 7).unwrap(), [0..2, 2..2, 2..5]);
        for wrong in [&[][..], &[1, 2], &[0, 3, 2], &[0, 8]] {
            assert!(groups(wrong, 7).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_large_group_is_divided_and_a_small_one_is_not() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(4).build().unwrap();
        let division = pool.install(|| Division::of(8192 * 512 * 512, usize::MAX));
        assert_eq!(division.height(8192, 512 * 512), 512);
        assert_eq!(Division { max_rows: 100, ..division }.height(300, 512 * 512), 100);
        assert_eq!(division.height(128, 512 * 512), 128);
        assert_eq!((division.height(0, 512), division.height(1, 0)), (1, 1));
        let few_rows = pool.install(|| Division::of(2 * 4096 * 4096, usize::MAX));
        assert_eq!(few_rows.height(2, 4096 * 4096), 2);
        assert_eq!(few_rows.width(2, 4096, 4096), 256);
    }

    #[test]
    fn every_task_runs_once() {
        let done = Mutex::new(Vec::new());
        let tasks = (0..100).map(|i| GemmTask { work: i * 37 % 11, item: i });
        run_largest_first(tasks.collect(), |i| done.lock().unwrap().push(i));
        let mut done = done.into_inner().unwrap();
        done.sort_unstable();
        assert_eq!(done, (0..100).collect::<Vec<usize>>());
    }
}
