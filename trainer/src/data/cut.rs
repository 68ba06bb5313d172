//! Samples become sequences: no longer than a row, or exactly as long.

use candlewick_text::sample_warning::SampleWarning;

use super::DataError;
use super::dataset::{Dataset, Piece};
use super::error::OverlongSamples;
use super::order::{Purpose, generator, identity, permutation};
use super::pack;
use super::plan::{DataPlan, Order, Overlong, Packing, UnrenderedToolCalls};

/// Cuts samples into sequences no longer than a row, or into exact rows. Samples that the plan drops, and what has no
/// targets, are left out.
pub(crate) fn cut(dataset: Dataset, plan: &DataPlan, drop_last: bool) -> Result<Dataset, DataError> {
    if plan.packing != Packing::Exact {
        let pieces = fit(&dataset, plan)?;
        return Ok(dataset.with_pieces(pieces, None));
    }
    let n_samples = dataset.n_samples();
    let order = match plan.order {
        Order::Sequential => identity(n_samples),
        _ => permutation(n_samples, generator(plan.seed, Purpose::Samples, 0, 0)),
    };
    let samples = order.iter().map(|&sample| dataset.whole(sample as usize));
    let samples = samples.filter(|whole| is_wanted(&dataset, plan, whole) && has_targets(&dataset, whole));
    let (mut pieces, mut ends) = pack::exact(samples, plan.max_length);
    let last = ends.len().checked_sub(2).map_or(0, |before| ends[before]);
    let n_last: usize = pieces[last..].iter().map(|piece| piece.len as usize).sum();
    if drop_last && n_last < plan.max_length {
        pieces.truncate(last);
        ends.pop();
    }
    Ok(dataset.with_pieces(pieces, Some(ends)))
}

/// Cuts, leaves out or refuses the samples longer than `max_length`.
fn fit(dataset: &Dataset, plan: &DataPlan) -> Result<Vec<Piece>, DataError> {
    let max_length = plan.max_length;
    if plan.overlong == Overlong::Error {
        refuse_overlong(dataset, max_length)?;
    }
    let whole = (0..dataset.n_samples()).map(|sample| dataset.whole(sample));
    let wanted = whole.filter(|whole| is_wanted(dataset, plan, whole));
    let mut pieces: Vec<Piece> = match plan.overlong {
        Overlong::Error => wanted.collect(),
        Overlong::Drop => wanted.filter(|piece| piece.len as usize <= max_length).collect(),
        Overlong::Truncate => wanted.filter_map(|piece| piece.slices(max_length).next()).collect(),
        Overlong::Split => wanted.flat_map(|piece| piece.slices(max_length)).collect(),
    };
    pieces.retain(|piece| has_targets(dataset, piece));
    Ok(pieces)
}

fn is_wanted(dataset: &Dataset, plan: &DataPlan, whole: &Piece) -> bool {
    let is_unrendered = || dataset.sample_warnings(whole.sample as usize).contains(SampleWarning::ResponseNotRendered);
    plan.unrendered_tool_calls != UnrenderedToolCalls::Drop || !is_unrendered()
}

/// A step of pieces without targets would have no loss, and would decay the weights all the same.
fn has_targets(dataset: &Dataset, piece: &Piece) -> bool {
    dataset.sequence(piece).has_targets()
}

fn refuse_overlong(dataset: &Dataset, max_length: usize) -> Result<(), DataError> {
    let length = |sample: &usize| dataset.sample_length(*sample);
    let mut overlong: Vec<usize> = (0..dataset.n_samples()).filter(|sample| length(sample) > max_length).collect();
    if overlong.is_empty() {
        return Ok(());
    }
    let n_samples = overlong.len();
    overlong.sort_by_key(|sample| std::cmp::Reverse(length(sample)));
    let longest = overlong.iter().take(3).map(|&i| (dataset.place_of_sample(i), length(&i)));
    Err(DataError::Overlong(OverlongSamples {
        n_samples,
        total: dataset.n_samples(),
        max_length,
        longest: longest.collect(),
    }))
}
