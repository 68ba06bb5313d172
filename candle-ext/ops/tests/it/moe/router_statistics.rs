//! Statistics that the router computes with its choice.

use candle_core::{Device, Tensor};
use candlewick_ops::{
    CountedExperts, ExpertChoice, OutputsToSave, RouterSpec, RouterStatisticsSpec, ScoreFunction, expert_score_sums,
    no_grad, route, route_with_statistics, router_z_loss, save_outputs, sinkhorn,
};

use super::router::{SPEC, specs};
use super::{devices, statistics, to_u32s, u32s};
use crate::cases::{TestDevice, assert_close, assert_error, bits, check_each, randn, values};

/// Marks of a third of the tokens, with a run of them in the middle.
fn marks(t: usize) -> Vec<u32> {
    (0..t).map(|token| u32::from(token % 7 == 0 || (t / 3..t / 2).contains(&token))).collect()
}

/// Returns the normalized scores of a token.
fn normalized(row: &[f64], score: ScoreFunction) -> Vec<f64> {
    let scores: Vec<f64> = match score {
        ScoreFunction::Softmax => row.iter().map(|x| x.exp()).collect(),
        ScoreFunction::Sigmoid => row.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect(),
        ScoreFunction::SqrtSoftplus => row.iter().map(|x| (1.0 + x.exp()).ln().sqrt()).collect(),
    };
    let sum: f64 = scores.iter().sum();
    scores.iter().map(|score| score / sum).collect()
}

/// Counts the experts of the marked tokens.
fn counts(experts: &[u32], marks: &[u32], [e, k]: [usize; 2]) -> Vec<f64> {
    let mut counts = vec![0.0; e];
    let counted = experts.chunks(k).zip(marks).filter(|(_, mark)| **mark == 1);
    counted.flat_map(|(experts, _)| experts).for_each(|expert| counts[*expert as usize] += 1.0);
    counts
}

/// Compares the statistics of the marked tokens with sums in f64 over the experts that [`route`] chooses.
fn check(test_device: &TestDevice, [t, e]: [usize; 2], spec: RouterSpec, marked: Option<&[u32]>) {
    let what = format!("{test_device:?} {t} {e} {spec:?} {}", marked.is_some());
    let (logits, bias) = (test_device.put(&(randn((t, e), 1) * 2.0).unwrap()), test_device.put(&randn(e, 2)));
    let marks = marked.map_or_else(|| vec![1; t], <[u32]>::to_vec);
    let on_device = test_device.put(&u32s(&marks));
    let counted = RouterStatisticsSpec { token_mask: marked.map(|_| &on_device), experts: CountedExperts::TopScores };
    let choice = ExpertChoice::ByScore { bias: Some(&bias) };
    let run = || test_device.run(|| route_with_statistics(&logits, choice, spec, counted)).unwrap();
    let (routing, found) = run();
    let plain = test_device.run(|| route(&logits, Some(&bias), spec)).unwrap();
    assert_eq!(bits(&routing.weights), bits(&plain.weights), "{what}");
    assert_eq!(to_u32s(&routing.assignment.experts), to_u32s(&plain.assignment.experts), "{what}");
    let best =
        test_device.run(|| route(&logits, None, RouterSpec { groups: None, ..spec })).unwrap().assignment.experts;
    assert_eq!(to_u32s(found.counted_experts()), to_u32s(&best), "{what}");

    let of_logits = values(&logits);
    let rows: Vec<&[f64]> =
        of_logits.chunks(e).zip(&marks).filter(|(_, mark)| **mark == 1).map(|(row, _)| row).collect();
    let of_experts = |experts: &Tensor| counts(&to_u32s(experts), &marks, [e, spec.top_k]);
    let moment = |power: i32| rows.iter().flat_map(|row| row.iter()).map(|x| x.powi(power)).sum::<f64>();
    let totals = values(&found.totals().unwrap());
    assert_eq!(totals[..e], of_experts(&plain.assignment.experts), "{what}");
    assert_eq!((totals[e], totals[e + 3], totals.len()), (rows.len() as f64, 0.0, e + 4), "{what}");
    assert!((totals[e + 1] - moment(1)).abs() < 1e-5 * moment(2).sqrt().max(1e-9), "{what}");
    assert!((totals[e + 2] - moment(2)).abs() <= 1e-6 * moment(2), "{what}");
    assert_eq!(values(&found.tokens_per_expert().unwrap()), of_experts(&best), "{what}");

    let vector = |values: Vec<f64>| Tensor::new(values, &Device::Cpu).unwrap();
    let scores = rows.iter().map(|row| normalized(row, spec.score));
    let sums = scores.fold(vec![0.0; e], |sums, row| sums.iter().zip(row).map(|(sum, x)| sum + x).collect());
    let lse = |row: &&[f64]| row.iter().map(|x| x.exp()).sum::<f64>().ln();
    test_device.run(|| {
        assert_close(&what, &expert_score_sums(&logits, &found).unwrap(), &vector(sums), 1e-6);
        let squares = rows.iter().map(|row| lse(row).powi(2)).sum::<f64>();
        assert_close(
            &what,
            &router_z_loss(&logits, &found).unwrap(),
            &Tensor::new(squares, &Device::Cpu).unwrap(),
            1e-6,
        );
    });
    let again = run().1;
    let all = |statistics: &candlewick_ops::RouterStatistics| {
        let sums = test_device.run(|| expert_score_sums(&logits, statistics)).unwrap();
        [sums, statistics.totals().unwrap(), statistics.tokens_per_expert().unwrap()].map(|x| bits(&x))
    };
    assert_eq!(all(&found), all(&again), "{what}");
}

#[test]
fn statistics_are_sums_over_the_counted_tokens() {
    // 2,100 tokens are more than all warps, so some of them sum two.
    for (t, e, every) in [(34, 16, 1), (5, 160, 6), (2100, 8, 24)] {
        check_each(specs().into_iter().filter(|spec| spec.top_k <= e).step_by(every), |spec| {
            for test_device in devices() {
                check(&test_device, [t, e], spec, None);
                if t < 2100 {
                    check(&test_device, [t, e], spec, Some(&marks(t)));
                }
            }
        });
    }
}

#[test]
fn a_choice_by_score_alone_counts_its_experts_once() {
    let (t, e) = (40, 8);
    for test_device in devices() {
        test_device.run(|| {
            let logits = test_device.put(&randn((t, e), 1));
            let counted = RouterStatisticsSpec { token_mask: None, experts: CountedExperts::Chosen };
            let of = |choice| route_with_statistics(&logits, choice, SPEC, counted).unwrap();
            let (routing, plain) = of(ExpertChoice::ByScore { bias: None });
            assert_eq!(to_u32s(plain.counted_experts()), to_u32s(&routing.assignment.experts));
            let n_counts = values(&plain.totals().unwrap())[..e].to_vec();
            assert_eq!(values(&plain.tokens_per_expert().unwrap()), n_counts);
            // Given experts and selections are counted, too.
            let given = of(ExpertChoice::Given(&routing.assignment.experts)).1;
            assert_eq!(values(&given.totals().unwrap()), values(&plain.totals().unwrap()));
            let selection = sinkhorn(&logits).unwrap();
            let (balanced, selected) = of(ExpertChoice::BySelection(&selection));
            let experts = to_u32s(&balanced.assignment.experts);
            assert_eq!(values(&selected.totals().unwrap())[..e], counts(&experts, &vec![1; t], [e, SPEC.top_k]));
        });
    }
}

#[test]
fn no_tokens_have_statistics_of_zeros() {
    for test_device in devices() {
        test_device.run(|| {
            let logits = test_device.put(&randn((3, 8), 1)).narrow(0, 0, 0).unwrap();
            let found = statistics(&logits, ScoreFunction::Softmax).unwrap();
            assert_eq!(values(&found.totals().unwrap()), [0.0; 12]);
            let logits = test_device.put(&randn((3, 8), 1));
            let none = test_device.put(&u32s(&[0; 3]));
            let counted = RouterStatisticsSpec { token_mask: Some(&none), experts: CountedExperts::Chosen };
            let found = route_with_statistics(&logits, ExpertChoice::ByScore { bias: None }, SPEC, counted).unwrap().1;
            assert_eq!(values(&found.totals().unwrap()), [0.0; 12]);
        });
    }
}

/// A recomputed layer gets the statistics of its first forward.
#[test]
fn statistics_are_replayed() {
    let counted = RouterStatisticsSpec { token_mask: None, experts: CountedExperts::Chosen };
    let first = randn((9, 8), 1);
    let run = |logits: &Tensor| {
        let (routing, statistics) = route_with_statistics(logits, ExpertChoice::ByScore { bias: None }, SPEC, counted)?;
        Ok((routing.weights, values(&statistics.totals()?)))
    };
    let ((_, totals), saved) = save_outputs(OutputsToSave::All, || run(&first)).unwrap();
    let other = randn((9, 8), 2);
    let replayed = std::cell::RefCell::default();
    candlewick_ops::Tape::replay(saved, &[&other], || {
        let (weights, totals) = run(&other)?;
        replayed.replace(totals);
        Ok(weights)
    })
    .unwrap();
    assert_eq!(replayed.into_inner(), totals);
    assert_ne!(run(&other).unwrap().1, totals);
}

#[test]
fn wrong_marks_are_named() {
    let marks = u32s(&[1; 3]);
    let counted = RouterStatisticsSpec { token_mask: Some(&marks), experts: CountedExperts::Chosen };
    let choice = ExpertChoice::ByScore { bias: None };
    let run = || no_grad(|| route_with_statistics(&randn((4, 8), 1), choice, SPEC, counted)).map(drop);
    assert_error(run(), "want a u32 token mask [4], got U32 [3]");
}
