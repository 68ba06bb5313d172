//! Samples become sequences: no longer than a row, or exactly as long.

use super::DataError;
use super::dataset::{Dataset, Piece};
use super::error::OverlongSamples;
use super::order::{Purpose, generator, identity, permutation};
use super::pack;
use super::plan::{DataPlan, Order, Overlong, Packing};

/// Cuts samples into sequences no longer than a row, or into exact rows.
pub(crate) fn cut(dataset: Dataset, plan: &DataPlan, drop_last: bool) -> Result<Dataset, DataError> {
    if plan.packing != Packing::Exact {
        let pieces = fit(&dataset, plan.max_length, plan.overlong)?;
        return Ok(dataset.with_pieces(pieces, None));
    }
    let n_samples = dataset.n_samples();
    let order = match plan.order {
        Order::Sequential => identity(n_samples),
        _ => permutation(n_samples, generator(plan.seed, Purpose::Samples, 0, 0)),
    };
    let samples = order.iter().map(|&sample| dataset.whole(sample as usize));
    let (mut pieces, mut ends) = pack::exact(samples, plan.max_length);
    let last = ends.len().checked_sub(2).map_or(0, |before| ends[before]);
    let n_last: usize = pieces[last..].iter().map(|piece| piece.len as usize).sum();
    if drop_last && n_last < plan.max_length {
        pieces.truncate(last);
        ends.pop();
    }
    Ok(dataset.with_pieces(pieces, Some(ends)))
}

/// Cuts, leaves out or refuses the samples longer than `max_length`. Empty samples are left out.
fn fit(dataset: &Dataset, max_length: usize, policy: Overlong) -> Result<Vec<Piece>, DataError> {
    if policy == Overlong::Error {
        refuse_overlong(dataset, max_length)?;
    }
    let whole = (0..dataset.n_samples()).map(|sample| dataset.whole(sample));
    Ok(match policy {
        Overlong::Error => whole.filter(|piece| piece.len > 0).collect(),
        Overlong::Drop => whole.filter(|piece| (1..=max_length).contains(&(piece.len as usize))).collect(),
        Overlong::Truncate => whole.filter_map(|piece| slices(piece, max_length).next()).collect(),
        Overlong::Split => whole.flat_map(|piece| slices(piece, max_length)).collect(),
    })
}

/// Slices of `max_length` and a rest.
pub(crate) fn slices(piece: Piece, max_length: usize) -> impl Iterator<Item = Piece> {
    let end = piece.start + piece.len;
    (piece.start..end).step_by(max_length).map(move |start| Piece {
        start,
        len: (end - start).min(max_length as u32),
        ..piece
    })
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
