//! Property tests: invariants of random plans on random data sets.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use proptest::prelude::*;

use super::batch::IGNORE_INDEX;
use super::dataset::Dataset;
use super::fixture::{of_lengths, plan};
use super::token_stats::DatasetCounts;
use super::truncation::apply_truncation;
use super::{
    Batch, Cursor, DataError, DataPlan, EvalLoader, GlobalBatch, Horizon, Packing, PackingStrategy, Padding, RowOrder,
    TrainLoader, Truncation,
};

fn stream(lengths: &[usize], plan: &DataPlan) -> TrainLoader {
    let dataset = apply_truncation(of_lengths(lengths), plan, plan.drop_last).unwrap();
    TrainLoader::new(Arc::new(dataset), plan.clone(), Cursor::default()).unwrap()
}

fn remaining(stream: &mut TrainLoader) -> Vec<GlobalBatch> {
    std::iter::from_fn(|| stream.next_step()).collect()
}

fn steps(lengths: &[usize], plan: &DataPlan) -> Vec<GlobalBatch> {
    remaining(&mut stream(lengths, plan))
}

fn batches(steps: &[GlobalBatch]) -> impl Iterator<Item = &Batch> {
    steps.iter().flat_map(|step| &step.micro_batches)
}

/// Counts the pairs of token and target.
fn pairs(steps: &[GlobalBatch]) -> BTreeMap<(u32, i64), usize> {
    let mut pairs = BTreeMap::new();
    for batch in batches(steps) {
        for (id, target) in batch.ids.iter().zip(&batch.targets) {
            if *target != IGNORE_INDEX {
                *pairs.entry((*id, *target)).or_insert(0) += 1;
            }
        }
    }
    pairs
}

fn counted<T: Ord>(items: impl IntoIterator<Item = T>) -> BTreeMap<T, usize> {
    let mut counts = BTreeMap::new();
    items.into_iter().for_each(|item| *counts.entry(item).or_insert(0) += 1);
    counts
}

/// Generates sample lengths. The last sample always has targets.
fn lengths() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(1..=32usize, 1..60).prop_map(|lengths| [lengths, vec![5]].concat())
}

fn plans() -> impl Strategy<Value = DataPlan> {
    let packing = prop_oneof![
        Just(Packing::Off),
        Just(Packing::Fit(PackingStrategy::BestFit)),
        Just(Packing::Fit(PackingStrategy::Bfd)),
        Just(Packing::Exact)
    ];
    let order = prop_oneof![Just(RowOrder::Shuffle), Just(RowOrder::Sequential), Just(RowOrder::LongestFirst)];
    let padding = prop_oneof![Just(Padding::Nothing), Just(Padding::Multiple(8)), Just(Padding::MaxLength)];
    let sizes = (1..4usize, 1..4usize, 1..4usize, 0..12usize);
    let rest = (any::<bool>(), 0..9u64, prop_oneof![Just(0.0), Just(0.5)]);
    (packing, order, padding, sizes, rest).prop_map(|(packing, order, padding, sizes, rest)| {
        let (micro_batch_size, gradient_accumulation_steps, epochs, min_iterations) = sizes;
        let (drop_last, seed, fuse_positions_prob) = rest;
        DataPlan {
            packing,
            order,
            padding,
            micro_batch_size,
            gradient_accumulation_steps,
            min_iterations,
            drop_last,
            seed,
            fuse_positions_prob,
            horizon: Horizon::Epochs(epochs as f64),
            ..plan()
        }
    })
}

fn whole_epochs(plan: &DataPlan) -> usize {
    let Horizon::Epochs(epochs) = plan.horizon else { unreachable!() };
    epochs as usize
}

fn check_batch(batch: &Batch, dataset: &Dataset, plan: &DataPlan) -> Result<(), TestCaseError> {
    let length = batch.ids.len();
    prop_assert_eq!(batch.targets.len(), length);
    prop_assert_eq!(batch.positions.len(), length);
    prop_assert_eq!((batch.cu_seqlens[0], *batch.cu_seqlens.last().unwrap()), (0, length));
    for span in batch.cu_seqlens.windows(2) {
        prop_assert!(span[0] < span[1] && span[1] - span[0] <= plan.max_length);
        let positions: Vec<u32> = (0..(span[1] - span[0]) as u32).collect();
        prop_assert_eq!(&batch.positions[span[0]..span[1]], positions);
        prop_assert_eq!(batch.targets[span[1] - 1], IGNORE_INDEX);
    }
    let n_targets = batch.targets.iter().filter(|target| **target != IGNORE_INDEX).count();
    prop_assert_eq!(n_targets, batch.n_targets);
    let n_tokens: usize = batch.samples.iter().map(|&i| dataset.length(i)).sum();
    prop_assert_eq!(n_tokens, batch.n_tokens);
    prop_assert_eq!(batch.padding.iter().map(Range::len).sum::<usize>(), batch.n_padding());
    let of_padding = batch.padding.iter().flat_map(|range| &batch.ids[range.clone()]);
    prop_assert!(of_padding.clone().all(|id| *id == dataset.pad_id()));
    prop_assert!(batch.padding.is_sorted_by(|a, b| a.end < b.start));
    // In the fixture each id occurs once and id + 1 follows it.
    let targets = batch.ids.iter().zip(&batch.targets).filter(|(_, t)| **t != IGNORE_INDEX);
    for (id, target) in targets {
        prop_assert_eq!(i64::from(*id) + 1, *target);
        prop_assert!(target % 3 != 0);
    }
    Ok(())
}

proptest! {
    #[test]
    fn the_fields_of_a_batch_are_consistent(lengths in lengths(), plan in plans()) {
        let dataset = apply_truncation(of_lengths(&lengths), &plan, plan.drop_last).unwrap();
        let dataset = Arc::new(dataset);
        let Ok(mut stream) = TrainLoader::new(dataset.clone(), plan.clone(), Cursor::default()) else {
            return Ok(());
        };
        for step in remaining(&mut stream) {
            let n_targets: usize = step.micro_batches.iter().map(|batch| batch.n_targets).sum();
            prop_assert_eq!(n_targets, step.n_targets);
            prop_assert!(step.micro_batches.len() <= plan.gradient_accumulation_steps);
            for batch in &step.micro_batches {
                check_batch(batch, &dataset, &plan)?;
            }
        }
        let seen = stream.cursor().seen;
        prop_assert_eq!(stream.cursor().step, stream.total_steps());
        prop_assert_eq!(seen.steps as usize, stream.total_steps());
    }

    #[test]
    fn an_epoch_has_every_sequence_once(lengths in lengths(), plan in plans()) {
        let plan = DataPlan { drop_last: false, min_iterations: 0, ..plan };
        let epochs = whole_epochs(&plan);
        let mut stream = stream(&lengths, &plan);
        let steps = remaining(&mut stream);
        for epoch in 0..epochs {
            let own: Vec<GlobalBatch> = steps.iter().filter(|s| s.epoch == epoch).cloned().collect();
            let samples = counted(batches(&own).flat_map(|batch| batch.samples.clone()));
            prop_assert_eq!(samples, counted(0..stream.dataset().len()));
        }
    }

    #[test]
    fn rows_that_drop_last_drops_are_counted(lengths in lengths(), plan in plans()) {
        let plan = DataPlan { drop_last: true, min_iterations: 0, ..plan };
        let epochs = whole_epochs(&plan);
        let dataset = Arc::new(apply_truncation(of_lengths(&lengths), &plan, true).unwrap());
        let Ok(mut stream) = TrainLoader::new(dataset.clone(), plan.clone(), Cursor::default()) else {
            return Ok(());
        };
        for step in remaining(&mut stream) {
            prop_assert_eq!(step.micro_batches.len(), plan.gradient_accumulation_steps);
        }
        let seen = stream.cursor().seen;
        let n_tokens = seen.read.tokens + seen.left_over.tokens;
        prop_assert_eq!(n_tokens, epochs as u64 * dataset.n_tokens());
    }

    #[test]
    fn a_resumed_run_has_the_same_batches(lengths in lengths(), plan in plans(), at in 0..40usize) {
        let dataset = Arc::new(apply_truncation(of_lengths(&lengths), &plan, plan.drop_last).unwrap());
        let begin = |cursor| TrainLoader::new(dataset.clone(), plan.clone(), cursor);
        let Ok(mut whole) = begin(Cursor::default()) else { return Ok(()) };
        for _ in 0..at {
            whole.next_step();
        }
        let saved = serde_json::to_string(whole.cursor()).unwrap();
        let mut resumed = begin(serde_json::from_str(&saved).unwrap()).unwrap();
        prop_assert_eq!(resumed.total_steps(), whole.total_steps());
        prop_assert_eq!(remaining(&mut resumed), remaining(&mut whole));
        prop_assert_eq!(resumed.cursor(), whole.cursor());
    }

    #[test]
    fn the_token_statistics_add_up(
        lengths in prop::collection::vec(0..90usize, 1..40), plan in plans(), policy in 0..3usize,
    ) {
        let truncation = [Truncation::Truncate, Truncation::Drop, Truncation::Split][policy];
        let plan = DataPlan { truncation, ..plan };
        let dataset = apply_truncation(of_lengths(&lengths), &plan, plan.drop_last).unwrap();
        let counts = DatasetCounts::of(&dataset);
        let DatasetCounts { read, kept, truncated, dropped, supervised, masked, sequences, .. } = counts;
        prop_assert_eq!(read.samples, lengths.len() as u64);
        prop_assert_eq!(read.tokens, lengths.iter().sum::<usize>() as u64);
        prop_assert_eq!(read.tokens, kept.tokens + truncated.tokens + dropped.tokens);
        prop_assert_eq!(read.samples, kept.samples + dropped.samples);
        prop_assert_eq!(kept.tokens, supervised.tokens + masked.tokens);
        prop_assert_eq!(kept.samples, supervised.samples + masked.samples);
        prop_assert_eq!(sequences, dataset.len() as u64);
        let plan = DataPlan { drop_last: false, min_iterations: 0, ..plan };
        if dataset.is_empty() {
            return Ok(());
        }
        let mut stream = TrainLoader::new(Arc::new(dataset), plan.clone(), Cursor::default()).unwrap();
        let n_rows_padded: u64 = batches(&remaining(&mut stream)).map(|b| b.n_padding() as u64).sum();
        let epochs = whole_epochs(&plan);
        let seen = stream.cursor().seen;
        prop_assert_eq!(seen.read.tokens, epochs as u64 * kept.tokens);
        prop_assert_eq!(seen.supervised, epochs as u64 * supervised.tokens);
        prop_assert_eq!(seen.padded, n_rows_padded);
    }

    #[test]
    fn batch_sizes_padding_and_packing_have_the_same_targets(lengths in lengths(), seed in 0..9u64) {
        let plan = |micro_batch_size, gradient_accumulation_steps, packing, padding| DataPlan {
            micro_batch_size, gradient_accumulation_steps, packing, padding, seed, ..plan()
        };
        let want = pairs(&steps(&lengths, &plan(1, 6, Packing::Off, Padding::Nothing)));
        for other in [
            plan(6, 1, Packing::Off, Padding::Nothing),
            plan(2, 3, Packing::Off, Padding::MaxLength),
            plan(3, 2, Packing::Off, Padding::Multiple(8)),
            plan(1, 1, Packing::Fit(PackingStrategy::BestFit), Padding::Nothing),
            plan(2, 2, Packing::Fit(PackingStrategy::BestFit), Padding::Multiple(8)),
        ] {
            prop_assert_eq!(&pairs(&steps(&lengths, &other)), &want);
        }
    }

    #[test]
    fn an_evaluation_reads_every_sequence_once_in_order(lengths in lengths(), plan in plans()) {
        let dataset = Arc::new(apply_truncation(of_lengths(&lengths), &plan, false).unwrap());
        let stream = EvalLoader::new(dataset.clone(), &plan);
        let n_batches = stream.n_batches();
        let batches: Vec<Batch> = stream.collect();
        prop_assert_eq!(batches.len(), n_batches);
        let samples = counted(batches.iter().flat_map(|batch| batch.samples.clone()));
        prop_assert_eq!(samples, counted(0..dataset.len()));
        prop_assert_eq!(batches, EvalLoader::new(dataset, &plan).collect::<Vec<_>>());
    }
}

#[test]
fn gradient_accumulation_keeps_the_rows_of_a_step() {
    let plan = |micro_batch_size, gradient_accumulation_steps| DataPlan {
        micro_batch_size,
        gradient_accumulation_steps,
        ..plan()
    };
    let lengths: Vec<usize> = (1..=23).collect();
    let samples = |plan| -> Vec<Vec<usize>> {
        let steps = steps(&lengths, &plan);
        steps.iter().map(|s| s.micro_batches.iter().flat_map(|b| b.samples.clone()).collect()).collect()
    };
    assert_eq!(samples(plan(1, 4)), samples(plan(4, 1)));
    assert_eq!(samples(plan(1, 4)), samples(plan(2, 2)));
}

#[test]
fn shuffled_epochs_differ_and_sequential_epochs_do_not() {
    let order = |order| {
        let plan = DataPlan { order, horizon: Horizon::Epochs(2.0), ..plan() };
        let steps = steps(&[3; 16], &plan);
        let samples: Vec<usize> = batches(&steps).map(|batch| batch.samples[0]).collect();
        (samples[..16].to_vec(), samples[16..].to_vec())
    };
    let (first, second) = order(RowOrder::Shuffle);
    assert_ne!(first, second);
    assert_eq!(order(RowOrder::Sequential), ((0..16).collect(), (0..16).collect()));
}

#[test]
fn the_longest_rows_come_first_in_the_first_epoch_only() {
    let lengths = [3, 30, 4, 31, 5, 9, 2, 6];
    let plan = DataPlan { order: RowOrder::LongestFirst, micro_batch_size: 2, horizon: Horizon::Epochs(3.0), ..plan() };
    let steps = steps(&lengths, &plan);
    assert_eq!(steps[0].micro_batches[0].samples, [3, 1]);
    let later = [&steps[4], &steps[8]].map(|step| step.micro_batches[0].samples.clone());
    assert!(later.iter().any(|samples| *samples != [3, 1]), "{later:?}");
}

#[test]
fn a_short_last_step_is_kept_or_dropped() {
    let n_rows = |drop_last| -> Vec<usize> {
        let plan = DataPlan { drop_last, micro_batch_size: 2, gradient_accumulation_steps: 2, ..plan() };
        let n_rows = |step: &GlobalBatch| step.micro_batches.iter().map(|b| b.samples.len()).sum();
        steps(&[5; 11], &plan).iter().map(n_rows).collect()
    };
    assert_eq!(n_rows(false), [4, 4, 3]);
    assert_eq!(n_rows(true), [4, 4]);
}

#[test]
fn a_fraction_of_an_epoch_is_rounded_up_to_a_step_and_continues_the_whole_run() {
    let steps_of =
        |epochs| steps(&[3; 9], &DataPlan { horizon: Horizon::Epochs(epochs), micro_batch_size: 2, ..plan() });
    let whole = steps_of(2.0);
    for (epochs, want) in [(0.1, 1), (0.5, 3), (1.0, 5), (1.1, 6), (1.2, 6), (1.5, 8), (1.99, 10), (2.0, 10)] {
        let run = steps_of(epochs);
        assert_eq!(run.len(), want, "{epochs} epochs");
        assert_eq!(run, whole[..want], "{epochs} epochs");
    }
}

#[test]
fn a_resume_across_fractional_horizons_reads_the_steps_of_one_run() {
    for packing in [Packing::Off, Packing::Fit(PackingStrategy::BestFit), Packing::Exact] {
        let of = |epochs| DataPlan { horizon: Horizon::Epochs(epochs), packing, ..plan() };
        let whole = steps(&[5, 9, 14, 3, 7, 11, 20, 2, 8], &of(2.5));
        let mut first = stream(&[5, 9, 14, 3, 7, 11, 20, 2, 8], &of(1.5));
        let mut read = remaining(&mut first);
        assert!(read.len() < whole.len());
        let dataset = first.dataset().clone();
        read.extend(remaining(&mut TrainLoader::new(dataset, of(2.5), first.cursor().clone()).unwrap()));
        assert_eq!(read, whole, "{packing:?}");
    }
}

#[test]
fn the_ends_of_epochs_are_known_before_the_first_step() {
    // The order of the samples decides the number of packed rows.
    let lengths = [11, 16, 10, 6, 13].repeat(12);
    let mut varies = false;
    for packing in [Packing::Off, Packing::Fit(PackingStrategy::BestFit), Packing::Exact] {
        for epochs in [0.5, 1.0, 1.99, 2.5, 40.0] {
            let mut stream = stream(&lengths, &DataPlan { horizon: Horizon::Epochs(epochs), packing, ..plan() });
            let (known, mut ends) = (stream.epoch_ends(), Vec::new());
            varies |= known.windows(2).any(|ends| ends[1] - ends[0] != known[0]);
            while stream.next_step().is_some() {
                ends.extend((stream.cursor().step_in_epoch == 0).then_some(stream.cursor().step));
            }
            assert_eq!(known, ends, "{packing:?}, {epochs} epochs");
        }
    }
    assert!(varies, "no packed epoch has another number of steps");
}

#[test]
fn a_horizon_in_steps_repeats_epochs() {
    let plan = DataPlan { horizon: Horizon::Steps(7), ..plan() };
    let steps = steps(&[4; 3], &plan);
    let epochs: Vec<usize> = steps.iter().map(|step| step.epoch).collect();
    assert_eq!(epochs, [0, 0, 0, 1, 1, 1, 2]);
}

#[test]
fn min_iterations_repeats_the_data_within_an_epoch() {
    let plan = DataPlan { min_iterations: 7, micro_batch_size: 2, ..plan() };
    let steps = steps(&[4; 5], &plan);
    assert_eq!(steps.len(), 8);
    let samples = counted(batches(&steps).flat_map(|batch| batch.samples.clone()));
    assert!(samples.values().all(|&times| times == 3), "{samples:?}");
}

#[test]
fn overfitting_repeats_the_first_step() {
    let plan = DataPlan { overfit_first_batch: true, horizon: Horizon::Steps(5), ..plan() };
    let repeated = steps(&[4, 5, 6], &plan);
    assert_eq!(repeated.len(), 5);
    assert!(repeated.iter().all(|step| step.micro_batches == repeated[0].micro_batches));
}

#[test]
fn padding_lengthens_the_last_sequence_and_has_no_targets() {
    let plan = DataPlan { padding: Padding::Multiple(8), order: RowOrder::Sequential, ..plan() };
    let batch = &steps(&[5], &plan)[0].micro_batches[0];
    assert_eq!(batch.ids, [1, 2, 3, 4, 5, 0, 0, 0]);
    assert_eq!(batch.targets, [2, -100, 4, 5, -100, -100, -100, -100]);
    assert_eq!(batch.positions, [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(batch.cu_seqlens, [0, 8]);
    assert_eq!((batch.n_tokens, batch.n_padding(), batch.n_targets), (5, 3, 3));
}

#[test]
fn padding_stops_at_max_length() {
    let plan = DataPlan { padding: Padding::Multiple(24), ..plan() };
    assert_eq!(steps(&[30], &plan)[0].micro_batches[0].ids.len(), 32);
}

#[test]
fn a_fused_pack_is_one_sequence() {
    let plan = DataPlan {
        packing: Packing::Fit(PackingStrategy::BestFit),
        fuse_positions_prob: 1.0,
        order: RowOrder::Sequential,
        ..plan()
    };
    let batch = &steps(&[3, 4], &plan)[0].micro_batches[0];
    assert_eq!(batch.cu_seqlens, [0, 7]);
    assert_eq!(batch.positions, [0, 1, 2, 3, 4, 5, 6]);
    assert_eq!(batch.targets[2], IGNORE_INDEX);
    assert_eq!(batch.samples, [0, 1]);
}

#[test]
fn drop_last_drops_a_short_last_row_of_exact_packing() {
    let tokens = |drop_last| -> usize {
        let plan = DataPlan { packing: Packing::Exact, max_length: 8, drop_last, ..plan() };
        batches(&steps(&[11, 3, 9], &plan)).map(|batch| batch.n_tokens).sum()
    };
    assert_eq!((tokens(false), tokens(true)), (23, 16));
}

#[test]
fn a_changed_order_cannot_be_resumed() {
    let dataset = Arc::new(of_lengths(&[3; 9]));
    let first = TrainLoader::new(dataset.clone(), plan(), Cursor::default()).unwrap();
    let changed = DataPlan { seed: 7, micro_batch_size: 3, ..plan() };
    let error = TrainLoader::new(dataset.clone(), changed, first.cursor().clone()).unwrap_err();
    let message = error.to_string();
    assert!(message.contains("seed was 42, now 7"), "{message}");
    assert!(message.contains("rows a step was 1, now 3"), "{message}");
    // The values that restore the rows of a step are named.
    let cases = [
        ([2, 4, 2], "8", "set gradient_accumulation_steps: 2"),
        ([3, 1, 2], "8", "set micro_batch_size: 2 and gradient_accumulation_steps: 2"),
        (
            [2, 1, 2],
            "1",
            "1 cannot be divided by 2: use 1 data ranks with micro_batch_size: 1 and gradient_accumulation_steps: 1",
        ),
        ([1, 1, 4], "6", "6 cannot be divided by 4: use 3 data ranks with gradient_accumulation_steps: 2"),
    ];
    for ([micro_batch_size, gradient_accumulation_steps, data_ranks], old, want) in cases {
        let changed = DataPlan { micro_batch_size, gradient_accumulation_steps, data_ranks, ..plan() };
        let mut cursor = first.cursor().clone();
        cursor.made_with.insert("rows a step".to_owned(), old.to_owned());
        let message = TrainLoader::new(dataset.clone(), changed, cursor).unwrap_err().to_string();
        assert!(message.contains(&format!("; {want}. Restore")), "{want:?} is not in {message:?}");
    }
    let packed = |strategy| DataPlan { packing: Packing::Fit(strategy), ..plan() };
    let now = TrainLoader::new(dataset.clone(), packed(PackingStrategy::BestFit), Cursor::default()).unwrap();
    let error = TrainLoader::new(dataset.clone(), packed(PackingStrategy::Bfd), now.cursor().clone()).unwrap_err();
    let want = "data.packing_strategy: best_fit before, data.packing_strategy: bfd now";
    assert!(error.to_string().contains(want), "{error}");
    // Earlier versions had one strategy, and wrote another name.
    let mut earlier = now.cursor().clone();
    earlier.made_with.insert("packing".to_owned(), "Fit".to_owned());
    TrainLoader::new(dataset.clone(), packed(PackingStrategy::Bfd), earlier.clone()).unwrap();
    TrainLoader::new(dataset.clone(), packed(PackingStrategy::BestFit), earlier).unwrap_err();
    // The horizon, the padding and the number of micro-batches may change.
    let longer = DataPlan { horizon: Horizon::Epochs(4.0), padding: Padding::MaxLength, ..plan() };
    TrainLoader::new(dataset, longer, first.cursor().clone()).unwrap();
}

#[test]
fn fewer_rows_than_a_full_step_are_refused() {
    let plan = DataPlan { drop_last: true, micro_batch_size: 4, ..plan() };
    let stream = TrainLoader::new(Arc::new(of_lengths(&[3; 3])), plan, Cursor::default());
    assert!(matches!(stream, Err(DataError::TooFew { rows: 3, needed: 4 })));
}

#[test]
fn long_samples_are_refused_with_the_three_longest() {
    let error = apply_truncation(of_lengths(&[40, 5, 90, 33, 70, 32]), &plan(), false).unwrap_err();
    let want = "fit 4 of 6 samples into max_length 32. The longest:\n  train.jsonl:3: 90 tokens\n  \
                train.jsonl:5: 70 tokens\n  train.jsonl:1: 40 tokens\nraise `data.max_length` (90 \
                fits all of them), or set `data.truncation` to truncate, drop or split";
    assert_eq!(error.to_string(), want);
}

#[test]
fn long_samples_are_truncated_dropped_or_split() {
    let lengths = |truncation| -> Vec<usize> {
        let dataset = apply_truncation(of_lengths(&[40, 5, 64]), &DataPlan { truncation, ..plan() }, false).unwrap();
        (0..dataset.len()).map(|index| dataset.length(index)).collect()
    };
    assert_eq!(lengths(Truncation::Truncate), [32, 5, 32]);
    assert_eq!(lengths(Truncation::Drop), [5]);
    assert_eq!(lengths(Truncation::Split), [32, 8, 5, 32, 32]);
}
