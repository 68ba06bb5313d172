//! Truncation: samples to sequences no longer than a row, or exactly as long.

use std::ops::Range;

use super::DataError;
use super::dataset::{Dataset, SampleSlice};
use super::error::LongSamples;
use super::order::{RngPurpose, identity, permutation, seeded_rng};
use super::pack;
use super::plan::{DataPlan, Mixture, Packing, RowOrder, Truncation, UnrenderedMessages};

/// Cuts samples into sequences no longer than a row, or into rows of exactly `max_length`. Samples that the plan drops
/// and sequences without targets are left out.
pub(crate) fn apply_truncation(dataset: Dataset, plan: &DataPlan, drop_last: bool) -> Result<Dataset, DataError> {
    if plan.packing != Packing::Exact {
        let slices = repeated(fit(&dataset, plan)?, plan);
        return Ok(dataset.with_slices(slices, None));
    }
    let parts = match plan.mixture {
        Mixture::Concatenate => std::iter::once(0..dataset.n_samples()).collect(),
        // A mixture draws whole rows, so each row is of one source.
        Mixture::Repeat(_) | Mixture::Interleave { .. } => dataset.samples_by_source(),
    };
    let (mut slices, mut ends) = (Vec::new(), Vec::new());
    for part in parts {
        let (more, more_ends) = exact(&dataset, plan, part, drop_last);
        ends.extend(more_ends.into_iter().map(|end| slices.len() + end));
        slices.extend(more);
    }
    Ok(dataset.with_slices(slices, Some(ends)))
}

/// Packs some samples into rows of exactly `max_length`. Returns the slices and the end of each row among them.
fn exact(dataset: &Dataset, plan: &DataPlan, samples: Range<usize>, drop_last: bool) -> (Vec<SampleSlice>, Vec<usize>) {
    let order = match plan.order {
        RowOrder::Sequential => identity(samples.len()),
        _ => permutation(samples.len(), seeded_rng(plan.seed, RngPurpose::Samples, 0, 0)),
    };
    let samples = order.iter().map(|&sample| dataset.whole(samples.start + sample as usize));
    let samples = samples.filter(|whole| is_wanted(dataset, plan, whole) && has_targets(dataset, whole));
    let samples = repeated(samples.collect(), plan);
    let (mut slices, mut ends) = pack::exact(samples.into_iter(), plan.max_length);
    let last = ends.len().checked_sub(2).map_or(0, |before| ends[before]);
    let n_last: usize = slices[last..].iter().map(|slice| slice.len as usize).sum();
    if drop_last && n_last < plan.max_length {
        slices.truncate(last);
        ends.pop();
    }
    (slices, ends)
}

/// Repeats the sequences in their order while they fit into one row, as `repeat_to_pack_max_length` of ArcticTraining does.
fn repeated(slices: Vec<SampleSlice>, plan: &DataPlan) -> Vec<SampleSlice> {
    let n_tokens: usize = slices.iter().map(|slice| slice.len as usize).sum();
    if !plan.repeat_to_pack_max_length || n_tokens == 0 {
        return slices;
    }
    let n_repeats = (plan.max_length / n_tokens).max(1);
    let mut free = plan.max_length.saturating_sub(n_repeats * n_tokens);
    let fits = |slice: &&SampleSlice| {
        let rest = free.checked_sub(slice.len as usize);
        free = rest.unwrap_or(free);
        rest.is_some()
    };
    let partial: Vec<SampleSlice> = slices.iter().take_while(fits).copied().collect();
    [slices.repeat(n_repeats), partial].concat()
}

/// Truncates, splits, drops or refuses the samples longer than `max_length`.
fn fit(dataset: &Dataset, plan: &DataPlan) -> Result<Vec<SampleSlice>, DataError> {
    let max_length = plan.max_length;
    if plan.truncation == Truncation::Error {
        refuse_long_samples(dataset, max_length)?;
    }
    let whole = (0..dataset.n_samples()).map(|sample| dataset.whole(sample));
    let wanted = whole.filter(|whole| is_wanted(dataset, plan, whole));
    let mut slices: Vec<SampleSlice> = match plan.truncation {
        Truncation::Error => wanted.collect(),
        Truncation::Drop => wanted.filter(|slice| slice.len as usize <= max_length).collect(),
        Truncation::Truncate => wanted.filter_map(|slice| slice.chunks(max_length).next()).collect(),
        Truncation::Split => wanted.flat_map(|slice| slice.chunks(max_length)).collect(),
    };
    slices.retain(|slice| has_targets(dataset, slice));
    Ok(slices)
}

fn is_wanted(dataset: &Dataset, plan: &DataPlan, whole: &SampleSlice) -> bool {
    let is_unrendered = || dataset.sample_warnings(whole.sample as usize).has_unrendered();
    plan.unrendered_messages != UnrenderedMessages::Drop || !is_unrendered()
}

/// Returns true if a slice has targets. A step without any would have no loss but would still apply weight decay.
fn has_targets(dataset: &Dataset, slice: &SampleSlice) -> bool {
    dataset.sequence(slice).has_targets()
}

fn refuse_long_samples(dataset: &Dataset, max_length: usize) -> Result<(), DataError> {
    let length = |sample: &usize| dataset.sample_length(*sample);
    let mut too_long: Vec<usize> = (0..dataset.n_samples()).filter(|sample| length(sample) > max_length).collect();
    if too_long.is_empty() {
        return Ok(());
    }
    let n_samples = too_long.len();
    too_long.sort_by_key(|sample| std::cmp::Reverse(length(sample)));
    let longest = too_long.iter().take(3).map(|&i| (dataset.locate_sample(i), length(&i)));
    Err(DataError::SamplesTooLong(LongSamples {
        n_samples,
        total: dataset.n_samples(),
        max_length,
        longest: longest.collect(),
    }))
}
