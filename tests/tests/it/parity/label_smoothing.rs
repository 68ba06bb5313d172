//! Label smoothing of the training loss: every parallel strategy equals one rank.

use std::time::Duration;

use candle_core::Result;
use candlewick_comm::mesh::Degrees;
use candlewick_comm::{Options, World, threads};
use candlewick_parallel::{PipelineScheduleKind, SequenceParallel};

use super::case::{BATCHINGS, Batching, MODELS, micros};
use super::rank::{STEPS, Strategy, compare, engine, one_rank, run};
use super::{ONE, dp, pipeline, ring, tensor, ulysses};

fn smoothed(strategy: Strategy) -> Strategy {
    Strategy { label_smoothing: 0.2, ..strategy }
}

#[test]
fn parity_of_label_smoothing() {
    let vocab_parallel = tensor(Degrees { tp: 2, ..ONE }, SequenceParallel::On);
    let strategies = [
        dp(2),
        ulysses(1, 2, None),
        ring::ring(2),
        vocab_parallel,
        // At most 16 rows of half of the vocabulary at once.
        Strategy { logits_bytes: Some(1600), ..vocab_parallel },
        tensor(Degrees { tp: 4, ..ONE }, SequenceParallel::Off),
        pipeline(Degrees { pp: 2, tp: 2, ..ONE }, PipelineScheduleKind::OneForwardOneBackward, &[1, 1, 1, 1]),
    ];
    for (case, batching) in [(MODELS[1], Batching::Accumulated(3)), (MODELS[0], Batching::Packed)] {
        let want = run(smoothed(Strategy::ONE_RANK), case, batching);
        assert!(compare(&want, &one_rank(case, batching, STEPS)).is_err(), "label smoothing has no effect");
        for strategy in strategies {
            if let Err(difference) = compare(&run(smoothed(strategy), case, batching), &want) {
                panic!("{strategy:?}, {case:?}, {batching:?}: {difference}");
            }
        }
    }
}

#[test]
fn losses_of_evaluation_are_not_smoothed() {
    let losses = |strategy: Strategy| {
        let rank = |world: &World| -> Result<_> {
            let (micros, _) = micros(BATCHINGS[0], 0, 0, 1);
            let engine = engine(world, strategy, MODELS[1], None)?;
            Ok((engine.loss(&micros[0])?, engine.token_losses(&micros[0])?))
        };
        let options = Options { timeout: Duration::from_secs(120), record: false };
        threads::run(strategy.degrees.n_ranks(), options, rank).unwrap()
    };
    for strategy in [Strategy::ONE_RANK, tensor(Degrees { tp: 2, ..ONE }, SequenceParallel::On)] {
        assert_eq!(losses(smoothed(strategy)), losses(strategy), "{strategy:?}");
    }
}
