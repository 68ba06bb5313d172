//! The mixture of the sources: the units of an epoch in their order. A unit is a sequence, or a row if every epoch has
//! the same rows ([`Packing::Exact`](super::Packing::Exact)).
//!
//! The order is a pure function of the plan, the epoch and the pass, as that of a single source. It does not depend on
//! the number of ranks.

use std::fmt;
use std::ops::Range;

use candlewick_text::quantity::counted;
use rand_chacha::rand_core::RngCore;
use serde::{Deserialize, Serialize};

use super::DataError;
use super::dataset::Dataset;
use super::order::{RngPurpose, permutation, sample_without_replacement, seeded_rng, shuffle, uniform};
use super::plan::{DataPlan, Mixture, RowOrder, SourcePlan, StoppingStrategy};
use super::token_count::TokenCount;

/// The most units of an epoch. More would not fit into memory.
const MOST_UNITS: f64 = (1u64 << 31) as f64;

/// The samples and tokens that training reads from one source.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct SourceCounts {
    /// The source, as in the recipe.
    pub name: String,
    /// The sequences of the source and their tokens, each once.
    pub available: TokenCount,
    /// The sequences and tokens that training reads.
    pub read: TokenCount,
    /// The tokens read, divided by those of the source.
    pub epochs: f64,
}

/// Returns the units of one pass of an epoch in their order. `None` if each sample is read once.
pub(crate) fn mixed_units(dataset: &Dataset, plan: &DataPlan, epoch: usize, pass: usize) -> Option<Vec<u32>> {
    let sources = || dataset.units_by_source();
    match &plan.mixture {
        Mixture::Concatenate => None,
        Mixture::Repeat(factors) => Some(repeated(&sources(), factors, plan, epoch, pass)),
        Mixture::Interleave { probabilities, stopping_strategy } => {
            let orders = seeded_rng(plan.seed, RngPurpose::SourceOrder, epoch, pass);
            let draws = seeded_rng(plan.seed, RngPurpose::SourceDraw, epoch, pass);
            let sources = sources().into_iter().map(|units| SourceReader::new(units, plan.order)).collect();
            Some(Interleaving { sources, orders, draws }.units(probabilities, *stopping_strategy))
        }
    }
}

/// Refuses a mixture of a source without samples, and epochs that do not fit into memory.
pub(crate) fn check(dataset: &Dataset, plan: &DataPlan) -> Result<(), DataError> {
    let fail = |name: &str, problem: String| Err(DataError::Plan { name: name.to_owned(), problem });
    let sizes: Vec<f64> = dataset.units_by_source().into_iter().map(|units| units.len() as f64).collect();
    let n_units = match &plan.mixture {
        Mixture::Concatenate => return Ok(()),
        Mixture::Repeat(factors) => sizes.iter().zip(factors).map(|(size, factor)| size * factor).sum::<f64>(),
        Mixture::Interleave { probabilities, stopping_strategy } => {
            if let Some((_, source)) = sizes.iter().zip(&plan.sources).find(|(size, _)| **size == 0.0) {
                let problem = "it has no samples with targets to interleave; remove the source".to_owned();
                return fail(&source.name_or_path, problem);
            }
            let even = 1.0 / sizes.len() as f64;
            let turns = sizes.iter().enumerate().map(|(idx, size)| size / probabilities.get(idx).unwrap_or(&even));
            match stopping_strategy {
                StoppingStrategy::FirstExhausted => turns.fold(f64::INFINITY, f64::min),
                StoppingStrategy::AllExhausted => turns.fold(0.0, f64::max),
            }
        }
    };
    match n_units > MOST_UNITS {
        true => {
            fail("the mixture of data.sources", format!("an epoch has about {n_units:.0} rows; raise small weights"))
        }
        false => Ok(()),
    }
}

/// Counts what an epoch with these sequences reads of each source.
pub(crate) fn count_epoch(dataset: &Dataset, sequences: &[u32], sources: &[SourcePlan]) -> Vec<SourceCounts> {
    let mut read = vec![TokenCount::default(); sources.len()];
    for &sequence in sequences {
        read[dataset.source_of(sequence as usize)].add(dataset.length(sequence as usize));
    }
    compare(dataset, &read, sources)
}

/// Compares what training has read of each source with the whole source.
pub(crate) fn compare(dataset: &Dataset, read: &[TokenCount], sources: &[SourcePlan]) -> Vec<SourceCounts> {
    if read.is_empty() {
        return Vec::new();
    }
    let available = dataset.counts_by_source();
    let names = sources.iter().map(|source| source.name_or_path.clone());
    let counts = names.zip(available).zip(read.iter().copied());
    counts
        .map(|((name, available), read)| {
            let epochs = read.tokens as f64 / available.tokens.max(1) as f64;
            SourceCounts { name, available, read, epochs }
        })
        .collect()
}

fn repeated(sources: &[Range<u32>], factors: &[f64], plan: &DataPlan, epoch: usize, pass: usize) -> Vec<u32> {
    let mut rng = seeded_rng(plan.seed, RngPurpose::SourceDraw, epoch, pass);
    let mut units = Vec::new();
    for (source, factor) in sources.iter().zip(factors) {
        (0..*factor as usize).for_each(|_| units.extend(source.clone()));
        let n_more = (factor.fract() * source.len() as f64).round() as usize;
        let mut more = sample_without_replacement(source.len(), n_more, &mut rng);
        more.sort_unstable();
        units.extend(more.into_iter().map(|unit| source.start + unit));
    }
    if plan.order != RowOrder::Sequential {
        shuffle(&mut units, &mut seeded_rng(plan.seed, RngPurpose::SourceOrder, epoch, pass));
    }
    units
}

/// Reads the units of one source again and again, in a new order each time.
struct SourceReader {
    units: Range<u32>,
    order: RowOrder,
    /// The units of the current reading, in reverse.
    left: Vec<u32>,
    /// True after the last unit of the first reading.
    is_exhausted: bool,
}

impl SourceReader {
    fn new(units: Range<u32>, order: RowOrder) -> Self {
        Self { units, order, left: Vec::new(), is_exhausted: false }
    }

    fn next(&mut self, rng: &mut impl RngCore) -> Option<u32> {
        if self.left.is_empty() {
            self.left = match self.order {
                RowOrder::Sequential => self.units.clone().rev().collect(),
                RowOrder::Shuffle | RowOrder::LongestFirst => {
                    let order = permutation(self.units.len(), rng);
                    order.into_iter().map(|unit| self.units.start + unit).collect()
                }
            };
        }
        let unit = self.left.pop();
        self.is_exhausted |= self.left.is_empty();
        unit
    }
}

struct Interleaving<R> {
    sources: Vec<SourceReader>,
    orders: R,
    draws: R,
}

impl<R: RngCore> Interleaving<R> {
    fn units(mut self, probabilities: &[f64], stopping_strategy: StoppingStrategy) -> Vec<u32> {
        let mut units = Vec::new();
        for turn in 0.. {
            let mut exhausted = self.sources.iter().map(|source| source.is_exhausted);
            let ends = match stopping_strategy {
                StoppingStrategy::FirstExhausted => exhausted.any(|is_exhausted| is_exhausted),
                StoppingStrategy::AllExhausted => exhausted.all(|is_exhausted| is_exhausted),
            };
            if ends {
                break;
            }
            let source = if probabilities.is_empty() { turn % self.sources.len() } else { self.draw(probabilities) };
            units.extend(self.sources[source].next(&mut self.orders));
        }
        units
    }

    fn draw(&mut self, probabilities: &[f64]) -> usize {
        let mut drawn = uniform(&mut self.draws);
        for (source, probability) in probabilities.iter().enumerate() {
            drawn -= probability;
            if drawn < 0.0 {
                return source;
            }
        }
        // The sum may be below 1 by a rounding error.
        probabilities.len() - 1
    }
}

impl Mixture {
    /// The mixture of a run that interleaves and repeats nothing, as in a checkpoint.
    pub(crate) const DEFAULT: &str = "each sample once";
}

impl fmt::Display for Mixture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |numbers: &[f64]| numbers.iter().map(f64::to_string).collect::<Vec<_>>().join(", ");
        match self {
            Self::Concatenate => f.write_str(Self::DEFAULT),
            Self::Repeat(factors) => write!(f, "repeat {}", list(factors)),
            Self::Interleave { probabilities, stopping_strategy } => {
                let end = match stopping_strategy {
                    StoppingStrategy::FirstExhausted => "first_exhausted",
                    StoppingStrategy::AllExhausted => "all_exhausted",
                };
                match probabilities.is_empty() {
                    true => write!(f, "in turn until {end}"),
                    false => write!(f, "weights {} until {end}", list(probabilities)),
                }
            }
        }
    }
}

impl fmt::Display for SourceCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, read, epochs, .. } = self;
        write!(
            f,
            "{name}: {}, {}, {epochs:.2} times the source",
            counted(read.samples, "sequence"),
            counted(read.tokens, "token")
        )
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use super::*;
    use crate::data::fixture::{of_sources, plan};
    use crate::data::truncation::apply_truncation;
    use crate::data::{Cursor, Horizon, Packing, PackingStrategy, TrainLoader};

    const UNTIL_FIRST: StoppingStrategy = StoppingStrategy::FirstExhausted;
    const UNTIL_ALL: StoppingStrategy = StoppingStrategy::AllExhausted;

    fn mixed(mixture: Mixture) -> DataPlan {
        let source = |name: &str| SourcePlan { name_or_path: name.into(), ..serde_json::from_str(SOURCE).unwrap() };
        DataPlan { mixture, sources: ["a", "b", "c"].map(source).to_vec(), ..plan() }
    }

    const SOURCE: &str = r#"{"name_or_path": "", "split": null, "subset": null, "split_mapping": [], "revision": null,
        "format": null, "role_mapping": [], "content_key": null, "column": null, "sampling": "all", "sample_seed": 42}"#;

    fn weights(probabilities: &[f64], stopping_strategy: StoppingStrategy) -> Mixture {
        Mixture::Interleave { probabilities: probabilities.to_vec(), stopping_strategy }
    }

    fn units(sizes: &[usize], plan: &DataPlan, epoch: usize) -> Vec<u32> {
        mixed_units(&of_sources(sizes), plan, epoch, 0).unwrap()
    }

    fn times(units: &[u32]) -> BTreeMap<u32, usize> {
        let mut times = BTreeMap::new();
        units.iter().for_each(|unit| *times.entry(*unit).or_insert(0) += 1);
        times
    }

    /// Returns the ids of all sequences that training reads, in their order. The id is the source.
    fn read(sizes: &[usize], plan: &DataPlan) -> (Vec<u32>, TrainLoader) {
        let dataset = apply_truncation(of_sources(sizes), plan, plan.drop_last).unwrap();
        let mut loader = TrainLoader::new(Arc::new(dataset), plan.clone(), Cursor::default()).unwrap();
        let steps = std::iter::from_fn(|| loader.next_step()).collect::<Vec<_>>();
        let batches = steps.iter().flat_map(|step| &step.micro_batches);
        (batches.flat_map(|batch| batch.samples.iter().map(|&sample| sample as u32)).collect(), loader)
    }

    #[test]
    fn a_factor_reads_whole_passes_and_a_part_that_changes_with_the_epoch() {
        let plan = mixed(Mixture::Repeat(vec![2.5, 1.0, 0.5]));
        let first = times(&units(&[4, 3, 6], &plan, 0));
        assert_eq!((0..4).map(|unit| first[&unit]).collect::<Vec<_>>().iter().sum::<usize>(), 10);
        assert!((0..4).all(|unit| (2..=3).contains(&first[&unit])), "{first:?}");
        assert!((4..7).all(|unit| first[&unit] == 1), "{first:?}");
        assert_eq!(first.range(7..).map(|(_, n)| n).sum::<usize>(), 3);
        assert!((1..9).any(|epoch| times(&units(&[4, 3, 6], &plan, epoch)) != first));
        assert_eq!(units(&[4, 3, 6], &plan, 5), units(&[4, 3, 6], &plan, 5));
    }

    #[test]
    fn without_weights_the_sources_take_turns() {
        let plan = |end| DataPlan { order: RowOrder::Sequential, ..mixed(weights(&[], end)) };
        assert_eq!(units(&[2, 4], &plan(UNTIL_FIRST), 0), [0, 2, 1]);
        assert_eq!(units(&[2, 4], &plan(UNTIL_ALL), 0), [0, 2, 1, 3, 0, 4, 1, 5]);
    }

    #[test]
    fn an_epoch_ends_when_the_first_or_the_last_source_is_exhausted() {
        let sizes = [30, 50, 20];
        for epoch in 0..20 {
            let first = units(&sizes, &mixed(weights(&[0.5, 0.3, 0.2], UNTIL_FIRST)), epoch);
            let counts = times(&first);
            assert!(counts.values().all(|&n| n == 1), "each unit at most once");
            let n_read = |range: std::ops::Range<u32>| counts.range(range).count();
            let n_read = [n_read(0..30), n_read(30..80), n_read(80..100)];
            assert_eq!((0..3).filter(|&source| n_read[source] == sizes[source]).count(), 1, "{n_read:?}");
            let all = units(&sizes, &mixed(weights(&[0.5, 0.3, 0.2], UNTIL_ALL)), epoch);
            let counts = times(&all);
            assert_eq!(counts.len(), 100, "each unit at least once");
            assert_eq!(counts[all.last().unwrap()], 1, "the last unit completes its source");
        }
    }

    #[test]
    fn a_source_is_drawn_as_often_as_its_weight_says() {
        let drawn = units(&[20_000, 20_000], &mixed(weights(&[0.75, 0.25], UNTIL_FIRST)), 0);
        let share = drawn.iter().filter(|unit| **unit < 20_000).count() as f64 / drawn.len() as f64;
        assert!((share - 0.75).abs() < 0.01, "{share}");
    }

    #[test]
    fn the_order_is_the_same_on_any_number_of_ranks() {
        for packing in [Packing::Off, Packing::Fit(PackingStrategy::BestFit), Packing::Exact] {
            let plan = DataPlan { packing, ..mixed(weights(&[0.5, 0.3, 0.2], UNTIL_ALL)) };
            let (one, _) = read(&[9, 14, 6], &plan);
            for data_ranks in [2, 3, 8] {
                assert_eq!(read(&[9, 14, 6], &DataPlan { data_ranks, ..plan.clone() }).0, one, "{packing:?}");
            }
        }
    }

    #[test]
    fn a_resumed_mixture_reads_the_rest() {
        let mixtures = [weights(&[0.5, 0.3, 0.2], UNTIL_FIRST), Mixture::Repeat(vec![1.5, 2.0, 0.4])];
        for (mixture, packing) in
            mixtures.iter().zip([Packing::Off, Packing::Exact, Packing::Fit(PackingStrategy::BestFit)].iter().cycle())
        {
            let plan = DataPlan { packing: *packing, horizon: Horizon::Epochs(3.0), ..mixed(mixture.clone()) };
            let dataset = Arc::new(apply_truncation(of_sources(&[9, 14, 6]), &plan, false).unwrap());
            let mut whole = TrainLoader::new(dataset.clone(), plan.clone(), Cursor::default()).unwrap();
            for _ in 0..whole.total_steps() / 2 {
                whole.next_step();
            }
            let cursor = serde_json::from_str(&serde_json::to_string(whole.cursor()).unwrap()).unwrap();
            let mut resumed = TrainLoader::new(dataset, plan, cursor).unwrap();
            while let Some(step) = whole.next_step() {
                assert_eq!(resumed.next_step(), Some(step));
            }
            assert_eq!((resumed.next_step(), resumed.cursor()), (None, whole.cursor()));
        }
    }

    #[test]
    fn samples_tokens_and_epochs_are_counted_by_source() {
        let plan = DataPlan { horizon: Horizon::Epochs(2.0), ..mixed(Mixture::Repeat(vec![1.5, 1.0, 1.0])) };
        let (_, loader) = read(&[4, 3, 5], &plan);
        let counts = loader.counts_by_source();
        let shown: Vec<_> = counts.iter().map(|c| (&*c.name, c.available.samples, c.read.tokens, c.epochs)).collect();
        assert_eq!(shown, [("a", 4, 36, 3.0), ("b", 3, 24, 2.0), ("c", 5, 50, 2.0)]);
        assert_eq!(loader.cursor().seen.read.tokens, 110);
    }

    #[test]
    fn exact_packing_mixes_whole_rows_of_one_source() {
        let plan = DataPlan { packing: Packing::Exact, max_length: 8, ..mixed(weights(&[0.5, 0.3, 0.2], UNTIL_ALL)) };
        let dataset = Arc::new(apply_truncation(of_sources(&[9, 14, 6]), &plan, false).unwrap());
        let mut loader = TrainLoader::new(dataset.clone(), plan, Cursor::default()).unwrap();
        while let Some(step) = loader.next_step() {
            let ids = &step.micro_batches[0].ids;
            assert!(ids.iter().all(|id| id == &ids[0]), "{ids:?}");
        }
        assert!(dataset.units_by_source().iter().all(|rows| !rows.is_empty()));
    }

    #[test]
    fn a_changed_mixture_cannot_be_resumed() {
        let dataset = Arc::new(of_sources(&[9, 14, 6]));
        let start = |mixture, cursor| TrainLoader::new(dataset.clone(), mixed(mixture), cursor);
        let mut cursor = start(Mixture::Concatenate, Cursor::default()).unwrap().cursor().clone();
        let error = start(Mixture::Repeat(vec![2.0, 1.0, 1.0]), cursor.clone()).unwrap_err().to_string();
        assert!(error.contains("the mixture of sources was each sample once, now repeat 2, 1, 1"), "{error}");
        // A checkpoint of an earlier version.
        cursor.made_with.remove("the mixture of sources");
        assert!(start(weights(&[0.5, 0.3, 0.2], UNTIL_ALL), cursor.clone()).is_err());
        start(Mixture::Concatenate, cursor).unwrap();
    }

    #[test]
    fn a_source_without_samples_and_endless_epochs_are_refused() {
        let refused = |sizes: &[usize], mixture| check(&of_sources(sizes), &mixed(mixture)).unwrap_err().to_string();
        let error = refused(&[3, 0, 3], weights(&[0.5, 0.3, 0.2], UNTIL_ALL));
        assert!(error.contains("use b: it has no samples with targets to interleave"), "{error}");
        let error = refused(&[3, 3, 3], weights(&[1.0 - 2e-12, 1e-12, 1e-12], UNTIL_ALL));
        assert!(error.contains("an epoch has about 3000000000000 rows; raise small weights"), "{error}");
        check(&of_sources(&[3, 0, 3]), &mixed(Mixture::Repeat(vec![1.0, 2.0, 1.0]))).unwrap();
    }
}
